"""AlphaZero on connect four, against a solver's answers and against other players.

    python benchmarks/connect_four.py [--steps 2500000] [--seed 0] [--run-dir DIR]

Trains with `--preset board`, and then says of each of the run's snapshots in how many of 600 solved positions
(`connect_four_positions.py`) the move keeps the value, by the network alone, by Gumbel with 50 simulations, which is
how the agent searches, and by PUCT with 50; and of the last one how many games it wins, from both seats. A random move
keeps the value in about a third of the positions. Writes `benchmarks/results/connect_four.json` and `.png`. A run
directory that is there is examined, not trained again.

Beside each snapshot are the seconds until it and the CPU seconds, of all threads together. Training may take half an
hour of two cores, with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import podracer
from podracer.bench import measure
from podracer.evaluation import matches, players
from podracer.result import plots
from podracer.types import TimeStep

HERE = pathlib.Path(__file__).parent
POSITIONS = HERE / "connect_four_positions.json"
RESULTS = HERE / "results"
PLAYERS: dict[str, dict[str, Any]] = {
    "network": {"simulations": 0},
    "gumbel 50": {"simulations": 50, "search": "gumbel"},
    "puct 50": {"simulations": 50, "search": "puct"},
}
KEPT = {"network": 0.70, "gumbel 50": 0.90}
WON = {"random": 0.95, "tactical": 0.70}
"""The scores to reach."""

GAMES = 400
HALF_AN_HOUR = 1800.0
"""Seconds."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that decide the results."""

    steps: int
    seed: int


def positions() -> tuple[np.ndarray, np.ndarray]:
    """Boards int8 [600, 6, 7], the mover's stones 1, and which moves keep the value, bool [600, 7]."""
    solved = json.loads(POSITIONS.read_text())
    cells = {".": 0, "x": 1, "o": -1}
    boards = np.array([[[cells[c] for c in row] for row in text.split("/")] for text in solved], np.int8)
    best = np.array([[column in answer["best"] for column in range(7)] for answer in solved.values()])
    return boards, best


def kept(environment: podracer.types.Environment, player: players.Player) -> float:
    """The share of the positions in which a player's move keeps the value."""
    boards, best = positions()
    lanes = len(boards)
    start = environment.start()  # type: ignore[attr-defined]
    state = jax.vmap(lambda board: start._replace(board=board))(jnp.asarray(boards))
    state = state._replace(to_play=jnp.sum(state.board != 0, axis=(1, 2), dtype=jnp.int32) % 2)
    zeros = jnp.zeros(lanes)
    row = TimeStep(jax.vmap(environment.observe)(state), zeros, zeros + 1.0, zeros == 0, zeros > 0)
    moves, _ = jax.jit(player.act)(player.params, player.start(lanes), row, jax.random.key(0))
    return float(best[np.arange(lanes), np.asarray(moves)].mean())


def examine(result: podracer.Result) -> dict[str, list[float]]:
    """Shares of moves that keep the value at each snapshot, by player, beside the steps."""
    environment = result.environment
    found: dict[str, list[float]] = {"steps": [], "train_seconds": [], "cpu_seconds": []}
    for step in result.snapshots():
        found["steps"].append(step)
        for name, seconds in spent(result.history, step).items():
            found[name].append(seconds)
        for name, how in PLAYERS.items():
            player = result.player(**how, step=step)
            found.setdefault(name, []).append(kept(environment, player))  # type: ignore[arg-type]
        print(f"{step:>12,} steps", *(f"{name} {found[name][-1]:.1%}" for name in PLAYERS), sep="   ", flush=True)
    return found


def spent(history: list[dict[str, Any]], step: int) -> dict[str, float]:
    """Seconds, and CPU seconds of all threads, until a number of steps."""
    names = ("train_seconds", "cpu_seconds")
    rows = [row for row in history if f"time/{names[-1]}" in row]
    steps = [row["env_steps"] for row in rows]
    return {name: float(np.interp(step, steps, [row[f"time/{name}"] for row in rows])) for name in names}


def draw(found: dict[str, list[float]], path: pathlib.Path) -> None:
    """The curves, beside what must be reached."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = picture.subplots()
    for colour, name in zip(plots.colours(len(PLAYERS)), PLAYERS):
        axes.plot(found["steps"], found[name], "o-", color=colour, markersize=3, label=name)
        if name in KEPT:
            axes.axhline(KEPT[name], color=colour, linestyle=":", linewidth=1)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("moves that keep the value, of 600 positions")
    axes.set_title("podracer train alphazero connect_four --preset board", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    picture.savefig(path)


def main() -> int:
    """Trains and examines; the exit code says whether the bounds hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2_500_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.run_dir and arguments.run_dir.exists():
        result = podracer.load(arguments.run_dir)
    else:
        result = podracer.train(
            "alphazero",
            "connect_four",
            preset="board",
            total_steps=arguments.steps,
            seed=arguments.seed,
            run_dir=arguments.run_dir or pathlib.Path(tempfile.mkdtemp()) / "run",
        )
    found = examine(result)
    third = max(1, len(found["steps"]) // 3)
    rises = {name: statistics.mean(found[name][-third:]) > statistics.mean(found[name][:third]) for name in PLAYERS}
    won = {}
    environment = result.environment
    for opponent in WON:
        other = players.player(environment, opponent)  # type: ignore[arg-type]
        match = matches.play(environment, result.player(), other, GAMES)  # type: ignore[arg-type]
        won[opponent] = {"first": match.counts(0), "second": match.counts(1), "points": match.mean}
        won[opponent]["interval"] = match.interval
        print(match, flush=True)
    holds = all(rises[name] and found[name][-1] >= share for name, share in KEPT.items())
    holds &= all(
        won[name][seat][0] / (GAMES // 2) >= share for name, share in WON.items() for seat in ("first", "second")
    )
    seconds = {name: result.summary[name] for name in ("train_seconds", "cpu_seconds")}
    holds &= seconds["train_seconds"] <= HALF_AN_HOUR
    print(", ".join(f"{value:.0f} {name}" for name, value in seconds.items()), end="; ")
    print(f"the bounds {'hold' if holds else 'do not hold'}")
    RESULTS.mkdir(exist_ok=True)
    draw(found, RESULTS / "connect_four.png")
    command = "python benchmarks/connect_four.py"
    settings = Settings(arguments.steps, arguments.seed)
    results = {**seconds, "kept": found, "rises": rises, "won": won, "holds": holds}
    measure.write(RESULTS / "connect_four.json", command, settings, results)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
