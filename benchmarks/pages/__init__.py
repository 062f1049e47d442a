"""Tables and figures of README and docs/results, from benchmarks/results: a module for each page.

A module has `TABLES` and `VALUES`, functions by the name of a marker. `benchmarks/readme.py` fills the markers.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).parents[1] / "results"

NETWORKS = {"cartpole": "CartPole, 64-64 MLP", "pong": "Pong, shallow network", "pong-resnet": "Pong, deep ResNet"}
"""IMPALA's networks, by the preset of `podracer bench sebulba`."""


def read(name: str) -> dict[str, Any]:
    """A file of benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |".replace("  ", " ") for line in lines]


def commit(result: dict[str, Any]) -> str:
    """The commit that was measured, in seven digits."""
    return short_commit(result["commit"])


def short_commit(name: str) -> str:
    """A commit in seven digits, and its mark where files had changed."""
    digits, _, changed = name.partition("-")
    return digits[:7] + (f"-{changed}" if changed else "")


def origin(*names: str) -> str:
    """The machine, versions and commits of files of results, for a sentence."""
    results = [read(name) for name in names]
    machines = dict.fromkeys(result["machine"].removeprefix("1 x ") for result in results)
    commits = dict.fromkeys(commit(result) for result in results)
    jax = dict.fromkeys(result["versions"]["jax"] for result in results)
    plural = "s" if len(commits) > 1 else ""
    return f"{', '.join(machines)}, jax {', '.join(jax)}, commit{plural} {', '.join(commits)}"


def spread(values: Sequence[float], digits: str = ".2f") -> str:
    """The median of measurements, and the least and the most of them."""
    return f"{statistics.median(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def to(values: Sequence[float], digits: str = ".3g") -> str:
    """The range from the least to the most."""
    return f"{min(values):{digits}} to {max(values):{digits}}"


def short(number: float) -> str:
    """A rate in thousands or millions."""
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"
