"""The rows of a sweep's table: a configuration, its scores over seeds, and the seconds of its training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podracer.sweeps.plan import Member


@dataclasses.dataclass(frozen=True)
class Trained:
    """A member after its training.

    Attributes:
      member: its configuration and seed.
      score: the mean return of its last evaluation; None if it has diverged.
      train_seconds: its share of the seconds in which its wave trained.
      run: the run and the member in it, as `wave-0:3`.
    """

    member: Member
    score: float | None
    train_seconds: float
    run: str


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration after its training.

    Attributes:
      hyper: its numbers.
      seeds: the seeds of its members.
      scores: the mean return of the last evaluation by seed; None where the member has diverged.
      train_seconds: seconds of training of all its members: their share of their waves.
      runs: the run and the member in it, by seed.
    """

    hyper: Mapping[str, float]
    seeds: list[int]
    scores: list[float | None]
    train_seconds: float
    runs: list[str]

    @property
    def diverged(self) -> int:
        """Number of members that have diverged."""
        return self.scores.count(None)

    @property
    def mean(self) -> float | None:
        """The mean over the seeds that have not diverged; None if all have."""
        finite = [score for score in self.scores if score is not None]
        return float(np.mean(finite)) if finite else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean over seeds, by Student's t; None for fewer than two scores."""
        return interval([score for score in self.scores if score is not None])

    def to_json(self) -> dict[str, Any]:
        """The row in JSON's types."""
        return {
            "hyper": dict(self.hyper),
            "mean": self.mean,
            "interval": list(self.interval) if self.interval else None,
            "diverged": self.diverged,
            "train_seconds": self.train_seconds,
            "seeds": self.seeds,
            "scores": self.scores,
            "runs": self.runs,
        }


def interval(scores: Sequence[float]) -> tuple[float, float] | None:
    """The 95% interval of a mean by Student's t, which allows for few scores; None for fewer than two."""
    if len(scores) < 2:
        return None
    from scipy.special import stdtrit  # of JAX's own requirements

    half = float(stdtrit(len(scores) - 1, 0.975)) * float(np.std(scores, ddof=1)) / math.sqrt(len(scores))
    return float(np.mean(scores)) - half, float(np.mean(scores)) + half


def rows(configurations: Sequence[Mapping[str, float]], trained: Sequence[Trained]) -> list[Row]:
    """The rows of all configurations with a member that is trained: the best mean first, diverged ones last."""
    found = []
    for i, hyper in enumerate(configurations):
        own = [one for one in trained if one.member.configuration == i]
        if own:
            seconds = sum(one.train_seconds for one in own)
            parts = zip(*((one.member.seed, one.score, one.run) for one in own))
            seeds, scores, runs = map(list, parts)
            found.append(Row(hyper, seeds, scores, seconds, runs))
    return sorted(found, key=lambda row: (row.diverged, -row.mean if row.mean is not None else math.inf))


def text(found: Sequence[Row]) -> str:
    """The table for people, a line for each row."""
    names = list(found[0].hyper) if found else []
    lines = [[*names, "return", "95% interval", "seconds"]]
    for row in found:
        numbers = [f"{row.hyper[name]:g}" for name in names]
        lines.append([*numbers, *_cells(row), f"{row.train_seconds:.1f}"])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def score(row: Row) -> str:
    """The mean of a row with its interval and the number of its seeds."""
    mean, spread = _cells(row)
    return f"{mean} ({spread}; seeds {row.seeds[0]} to {row.seeds[-1]})"


def _cells(row: Row) -> tuple[str, str]:
    score = "-" if row.mean is None else f"{row.mean:.3f}"
    spread = f"{row.interval[0]:.3f} to {row.interval[1]:.3f}" if row.interval else "-"
    return score, f"{row.diverged} of {len(row.scores)} diverged" if row.diverged else spread
