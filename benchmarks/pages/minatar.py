"""The tables of docs/results/minatar.md."""

from __future__ import annotations

from typing import Any

from pages import read, short_commit, table

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
NAMES = {
    "ppo": "PPO",
    "vtrace": "V-trace",
    "pqn": "PQN",
    "muzero": "MuZero",
    "efficientzero": "EfficientZero",
    "dqn": "DQN",
}


def ours() -> dict[str, Any]:
    """The results by agent and game."""
    found: dict[str, Any] = read("minatar")["results"]["agents"]
    return found


FEWEST_SEEDS = 5
"""The fewest seeds that have a bootstrap interval: that of two seeds is their range."""


def score(one: dict[str, Any] | None) -> str:
    """A mean with its interval over seeds, or with the range of fewer than `FEWEST_SEEDS`; a single seed has none."""
    if one is None:
        return ""
    scores = one["scores"]
    low, high = one["interval"] if len(scores) >= FEWEST_SEEDS else (min(scores), max(scores))
    return f"{one['mean']:.1f}" + (f" ({low:.1f} to {high:.1f})" if len(scores) > 1 else "")


def returns() -> list[str]:
    """Returns of our agents, a row each."""
    rows = []
    for agent, games in ours().items():
        of_games = [games.get(f"minatar_{game}") for game in GAMES]
        there = [one for one in of_games if one]
        seeds = sorted({len(one["scores"]) for one in there})
        commits = dict.fromkeys(short_commit(commit or "installed") for one in there for commit in one["commits"])
        steps = max(frames for one in there for curve in one["curves"] for frames, _ in curve) / 1e6
        minutes = [m / beside for one in there for m, beside in zip(one["minutes"], one["side_by_side"])]
        shown = " to ".join(map(str, seeds[:: max(1, len(seeds) - 1)]))
        about = (shown, f"{sum(minutes) / len(minutes):.0f}", ", ".join(commits))
        rows.append((NAMES[agent], f"{steps:.0f}M", *map(score, of_games), *about))
    return table(("agent", "steps", *GAMES, "seeds", "minutes a seed", "commit"), rows)


def published() -> list[str]:
    """Returns that others publish, a row each."""
    rows = []
    for one in read("minatar")["results"]["published"]:
        numbers = ["" if number is None else f"{number:g}" for number in one["returns"]]
        rows.append((one["algorithm"], f"{one['steps']}M", *numbers, one["source"], one["protocol"]))
    return table(("algorithm", "steps", *GAMES, "source", "mean of"), rows)


def gates() -> list[str]:
    """The gates of agents that have results, and if they hold."""
    rows = []
    for gate in read("minatar")["results"]["gates"]:
        if gate["agent"] in ours() and gate["bounds"]:
            bounds = ", ".join(f"{game.removeprefix('minatar_')} {bound:g}" for game, bound in gate["bounds"].items())
            reached = f"{len(gate['reached'])} of {len(gate['bounds'])}"
            rows.append((NAMES[gate["agent"]], gate["beside"], bounds, reached, "yes" if gate["holds"] else "**no**"))
    return table(("agent", "beside", "required", "reached", "holds"), rows)


TABLES = {"returns": returns, "published": published, "gates": gates}
VALUES = {"origin": lambda: read("minatar")["machine"].removeprefix("1 x ")}
