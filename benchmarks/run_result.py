"""The figures of a run directory for a file of results: its speed, its evaluations, and fresh games of its policies."""

from __future__ import annotations

import importlib.metadata
import pathlib
from typing import Any

import podracer
from podracer.bench import measure
from podracer.result import plots
from podracer.run import metrics, rundir

PACKAGES = ("envpool", "gymnasium")
"""Packages of environments, which decide results too."""


def read(
    run_dir: pathlib.Path, games: int, seed: int, samples: bool = False, best_actions: bool = True
) -> dict[str, Any]:
    """The figures of a run, after games of its newest checkpoint and of its best one.

    Args:
      run_dir: the run directory; the run may not be complete.
      games: whole games that each of both policies plays.
      seed: seed of these games.
      samples: whether the policies sample in them.
      best_actions: whether the newest one then plays as many games by its best actions, too.
    """
    newest = podracer.load(run_dir)
    clock = [row for row in newest.history if "time/cpu_seconds" in row][-1]
    steps, train_seconds, cpu_seconds = (clock[n] for n in ("env_steps", "time/train_seconds", "time/cpu_seconds"))
    found: dict[str, Any] = {
        "podracer": podracer.__version__,
        "machine": measure.describe_machine(),
        "versions": measure.versions() | _versions(),
        "settings": rundir.read(run_dir),
        "env_steps": steps,
        "train_seconds": train_seconds,
        "cpu_seconds": cpu_seconds,
        "rows_per_second": steps / train_seconds,
        "rows_per_cpu_second": steps / cpu_seconds,
        "evaluations": [
            {"env_steps": row["env_steps"]} | {name: row[name] for name in row if name.startswith("eval/")}
            for row in metrics.stream(run_dir / "metrics.jsonl")  # the history of a long run has a part of them
            if "eval/return_mean" in row
        ],
    }
    for name, result in {"best": podracer.load(run_dir, step="best"), "newest": newest}.items():
        found[f"{name}_checkpoint"] = played(result, games, seed, greedy=False if samples else None)
    if samples and best_actions:
        found["newest_greedy"] = played(newest, games, seed, greedy=True)
    return found


def played(result: podracer.Result, games: int, seed: int, greedy: bool | None = None) -> dict[str, Any]:
    """The score of a policy in fresh games, by actions as `Result.evaluate` has them."""
    found = result.evaluate(games, seed=seed, greedy=greedy)
    return {
        "env_steps": max(row["env_steps"] for row in result.history),
        "mean": found.mean,
        "std": found.std,
        "interval": found.interval,
        "episodes": found.episodes,
        "unfinished": found.unfinished,
    }


def draw(run_dir: pathlib.Path, path: pathlib.Path, title: str) -> None:
    """Draws the learning curve of a run."""
    plots.learning_curve(podracer.load(run_dir).curves(), path, title=title)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
