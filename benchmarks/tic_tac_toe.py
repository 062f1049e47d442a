"""AlphaZero or MuZero on tic-tac-toe, against the truth: all positions that are not final, all replies to its moves.

    python benchmarks/tic_tac_toe.py [--steps 1000000] [--seeds 0 1 2]
    python benchmarks/tic_tac_toe.py --agent muzero --steps 400000 --seeds 0

Prints, and writes to `benchmarks/results/tic_tac_toe.json`, in how many of the 4,520 positions the move keeps the
value: by the network alone, by PUCT with 50 simulations and by Gumbel with 16; and how many games are lost, from both
seats, when the other side may answer anything. A control that may not pass: self-play without openings, which sees few
positions. MuZero, which is not told the rules, searches by Gumbel; its results are in `tic_tac_toe-muzero.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import envs_jax
import podracer
from podracer.bench import measure
from podracer.evaluation import players
from podracer.types import TimeStep

RESULTS = pathlib.Path(__file__).parent / "results"
PLAYERS = {"network": 0, "puct 50": 50, "gumbel 16": 16}
GAME = envs_jax.make("tic_tac_toe")
Position = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that decide the results."""

    steps: int
    agent: str = "alphazero"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


OPTIONS: dict[str, dict[str, Any]] = {"alphazero": {}, "muzero": {"search": "gumbel", "batch_size": 256}}
"""Settings of the agents."""


def positions() -> tuple[np.ndarray, np.ndarray]:
    """Boards int8 [4520, 9], the mover's stones 1, and which moves keep the value, bool [4520, 9]."""
    codes, best = players.solve(GAME)
    return ((codes[:, None] // 3 ** np.arange(9)) % 3 - 1).astype(np.int8), best


def moves(player: players.Player, boards: np.ndarray) -> np.ndarray:
    """The moves of a player in each position, int32 [n]."""
    state = jax.vmap(lambda board: GAME.start()._replace(board=board.reshape(3, 3)))(jnp.asarray(boards))
    state = state._replace(to_play=jnp.sum(state.board != 0, axis=(1, 2), dtype=jnp.int32) % 2)
    zeros = jnp.zeros(len(boards))
    row = TimeStep(jax.vmap(GAME.observe)(state), zeros, zeros + 1.0, zeros == 0, zeros > 0)
    act = jax.jit(lambda params, row: player.act(params, player.start(len(boards)), row, jax.random.key(0))[0])
    return np.asarray(act(player.params, row))


def lost_games(table: dict[Position, int]) -> int:
    """Different games that a table of moves loses, of all from both seats."""
    lines = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]

    def play(board: Position, is_ours: bool) -> int:
        """`board` with the mover's stones as 1."""
        total = 0
        for i in [table[board]] if is_ours else [i for i in range(9) if board[i] == 0]:
            after = (*board[:i], 1, *board[i + 1 :])
            if any(all(after[c] == 1 for c in line) for line in lines):
                total += not is_ours
            elif 0 in after:
                total += play(tuple(-x for x in after), not is_ours)
        return total

    empty = (0,) * 9
    return play(empty, True) + play(empty, False)


def examine(result: podracer.Result) -> dict[str, dict[str, float]]:
    """Shares of moves that keep the value and numbers of lost games, by player."""
    boards, best = positions()
    found = {}
    for name, simulations in PLAYERS.items():
        player = result.player(simulations=simulations, search=name.split()[0] if simulations else None)
        played = moves(player, boards)
        table = {tuple(board): int(move) for board, move in zip(boards.tolist(), played)}
        found[name] = {
            "value_kept": float(best[np.arange(len(best)), played].mean()),
            "lost_games": lost_games(table),
        }
    return found


def passes(agent: str, opening_plies: int, found: dict[str, dict[str, float]]) -> bool:
    """Returns True if a run is as good as it must be, or as bad as the control."""
    if agent == "muzero":
        return found["gumbel 16"]["value_kept"] >= 0.95
    raw, searched = found["network"]["value_kept"], (found["puct 50"], found["gumbel 16"])
    if not opening_plies:
        return raw < 0.99
    return raw >= 0.99 and all(x["value_kept"] == 1.0 and x["lost_games"] == 0 for x in searched)


def main() -> int:
    """Trains and examines; the exit code says whether the bounds hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", choices=tuple(OPTIONS), default="alphazero")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    agent, options = arguments.agent, OPTIONS[arguments.agent]
    runs, holds = [], True
    for opening_plies in (8, 0) if agent == "alphazero" else (8,):
        for seed in arguments.seeds if opening_plies else arguments.seeds[:1]:
            begin = time.perf_counter()
            result = podracer.train(
                agent,
                "tic_tac_toe",
                config=options,
                env_options={"opening_plies": opening_plies},
                total_steps=arguments.steps,
                seed=seed,
                progress=False,
            )
            seconds = time.perf_counter() - begin
            found = examine(result)
            runs.append({"opening_plies": opening_plies, "seed": seed, "seconds": seconds, "players": found})
            runs[-1]["cpu_seconds"] = result.summary["cpu_seconds"]
            print(f"openings of 0 to {opening_plies} plies, seed {seed}, {seconds:.0f} s:", flush=True)
            for name, figures in found.items():
                kept, lost = figures["value_kept"], figures["lost_games"]
                print(f"  {name:10} {kept:.2%} of moves keep the value, {lost} games lost")
            holds &= passes(agent, opening_plies, found)
    print(f"the bounds {'hold' if holds else 'do not hold'}")
    command = "python benchmarks/tic_tac_toe.py" + (f" --agent {agent}" if agent != "alphazero" else "")
    name = "tic_tac_toe" if agent == "alphazero" else f"tic_tac_toe-{agent}"
    settings = Settings(arguments.steps, agent, options)
    measure.write(RESULTS / f"{name}.json", command, settings, {"runs": runs, "holds": holds})
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
