"""The table of docs/results/atari.md."""

from __future__ import annotations

import re
from typing import Any

from pages import read, short_commit, table

RUNS = {
    "queue/vtrace-pong-0": "V-trace, shallow network, seed 0",
    "queue/vtrace-pong-1": "V-trace, shallow network, seed 1",
    "queue/vtrace-pong-2": "V-trace, shallow network, seed 2",
    "atari/pong-pqn": "PQN, shallow network",
    "atari/pong-vtrace-resnet": "V-trace, deep ResNet, its training games",
    "atari/pong-dqn": "fast DQN, shallow network",
    "atari/pong-ppo": "PPO",
    "atari/pong-r2d2": "R2D2, shallow network, the longer of two runs",
    "atari/pong-vtrace": "V-trace, shallow network, 0.01 inside the root",
}


def pong() -> list[str]:
    """Scores of Pong, of the last policies where they were kept, best first."""
    rows = []
    for name, about in RUNS.items():
        found = read(name)
        run = max(found.get("runs", [found]), key=lambda run: run["env_steps"])
        score, games, steps = _score(found, run)
        minutes = f"{run['train_seconds'] / 60:.0f}"
        machine = re.sub(r"1 x \w+ \((.*?)\).*", r"\1", found["machine"])
        commits = ", ".join(map(short_commit, run.get("commits", [run["commit"]])))
        greedy = f"{found['newest_greedy']['mean']:.1f}" if "newest_greedy" in found else ""
        rows.append((about, score, greedy, games, f"{steps:,}", f"{_planned(found, run):,}", minutes, machine, commits))
    head = ("run", "score (95% interval)", "of the best actions", "games", "at step", "planned", "minutes")
    return table((*head, "machine", "commits"), rows)


def _score(found: dict[str, Any], run: dict[str, Any]) -> tuple[str, int, int]:
    """The score that counts, its games and its step: of an evaluation with an interval, or without, or of training."""
    names = ("newest_checkpoint", "best_checkpoint", "final_evaluation")
    policy = next((found[name] for name in names if found.get(name)), None)
    if policy:
        low, high = policy["interval"]
        steps = policy.get("env_steps", run["env_steps"])
        return f"{policy['mean']:.1f} ({low:.1f} to {high:.1f})", policy["episodes"], steps
    if run.get("evaluation"):
        return f"{run['evaluation']['mean']:.1f}", run["evaluation"]["episodes"], run["env_steps"]
    if "evaluations" in run:
        last = run["evaluations"][-1]
        games = int(re.search(r"--eval-episodes (\d+)", run["command"])[1])
        return f"{last['eval/return_mean']:.1f}", games, last["env_steps"]
    return f"{run['training_return_last_500k_steps']:.1f}", int(run["training_games"]), run["env_steps"]


def _planned(found: dict[str, Any], run: dict[str, Any]) -> int:
    """The steps that a run was to take."""
    in_config = found.get("total_steps") or found.get("config", {}).get("run", {}).get("total_steps")
    return in_config or int(re.search(r"--total-steps (\d+)", run["command"])[1])


def breakout() -> str:
    """The rows of V-trace on Breakout, and those that it is to have."""
    found = read("queue/vtrace-breakout-0")
    steps = f"{found['newest_checkpoint']['env_steps']:,}"
    return f"{steps} rows" if found.get("complete", True) else f"{steps} of {found['total_steps']:,} rows so far"


TABLES = {"pong": pong}
VALUES = {"breakout": breakout}
