"""The table of docs/results/atari.md."""

from __future__ import annotations

import re
from typing import Any

from pages import read, short_commit, table

RUNS = {
    "pong-pqn": "PQN, shallow network, best of its checkpoints",
    "pong-dqn": "fast DQN, shallow network",
    "pong-ppo": "PPO",
    "pong-r2d2": "R2D2, the longer of two runs",
}


def pong() -> list[str]:
    """Scores of Pong, best first."""
    rows = []
    for name, about in RUNS.items():
        found = read(f"atari/{name}")
        run = max(found.get("runs", [found]), key=lambda run: run["env_steps"])
        mean, interval, games, steps = _score(found, run)
        planned = found.get("total_steps") or found.get("config", {}).get("run", {}).get("total_steps")
        planned = planned or int(re.search(r"--total-steps (\d+)", run["command"])[1])
        cells = f"{mean:.1f}{interval}", games, f"{steps:,}", f"{planned:,}"
        hours = run["train_seconds"] / 3600
        rows.append((about, *cells, f"{hours:.1f}", short_commit(run["commit"])))
    return table(("run", "score (95% interval)", "games", "at step", "planned", "hours", "commit"), rows)


def _score(found: dict[str, Any], run: dict[str, Any]) -> tuple[float, str, int, int]:
    """Mean, interval, games and step of the score that counts."""
    best = found.get("best_checkpoint") or found.get("final_evaluation")
    if best is None:
        last = run["evaluations"][-1]
        games = int(re.search(r"--eval-episodes (\d+)", run["command"])[1])
        return last["eval/return_mean"], "", games, last["env_steps"]
    low, high = best["interval"]
    return best["mean"], f" ({low:.1f} to {high:.1f})", best["episodes"], best.get("env_steps", run["env_steps"])


TABLES = {"pong": pong}
VALUES = {}
