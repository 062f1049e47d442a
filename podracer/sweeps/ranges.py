"""Values of a tunable number in a sweep: some that are given, or a range to draw from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

DIGITS = 5
"""Significant digits of a drawn number, so that a table, a file and a command say the same one."""

FORMS = "write values with commas between them (0.001,0.01), log:LOW:HIGH or uniform:LOW:HIGH"


@dataclasses.dataclass(frozen=True)
class Range:
    """A range to draw numbers from: uniformly, or uniformly in the logarithm.

    Attributes:
      low: the least number.
      high: the largest one.
      log: True for a uniform logarithm, so that every decade is drawn as often.

    Raises:
      ValueError: for limits that are none.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self):
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"{self}: the first number must be below the second, and both finite.")
        if self.log and self.low <= 0:
            raise ValueError(f"{self}: a logarithm needs numbers above 0; use uniform({self.low:g}, {self.high:g}).")

    def draw(self, count: int, generator: np.random.Generator) -> list[float]:
        """Draws numbers, of `DIGITS` significant digits; the first ones are the same for any `count`."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        points = low + (high - low) * generator.random(count)
        rounded = [float(f"{x:.{DIGITS}g}") for x in (np.exp(points) if self.log else points)]
        return [min(max(x, self.low), self.high) for x in rounded]

    def __str__(self) -> str:
        return f"{'log_uniform' if self.log else 'uniform'}({self.low:g}, {self.high:g})"


def log_uniform(low: float, high: float) -> Range:
    """The range of numbers whose logarithm is uniform, for `podracer.sweep`: learning rates, costs.

    Raises:
      ValueError: unless 0 < low < high.
    """
    return Range(float(low), float(high), log=True)


def uniform(low: float, high: float) -> Range:
    """The range of uniform numbers, for `podracer.sweep`.

    Raises:
      ValueError: unless low < high.
    """
    return Range(float(low), float(high))


Values = Range | tuple[float, ...]
"""The values of one number."""


def values(name: str, given: Any) -> Values:
    """The values of a number: a range, or the numbers of a grid, each once.

    Args:
      name: the tunable number.
      given: a range, a number, or a sequence of numbers.

    Raises:
      ValueError: for anything else.
    """
    if isinstance(given, Range):
        return given
    numbers = np.ravel(np.asarray(given)) if isinstance(given, Sequence | np.ndarray | int | float) else np.asarray([])
    if isinstance(given, str | bool) or numbers.dtype.kind not in "iuf" or not numbers.size:
        raise ValueError(
            f"hyper[{name!r}]={given!r}: give numbers, podracer.log_uniform(low, high) or podracer.uniform(low, high)."
        )
    found = tuple(float(x) for x in numbers)
    if len(set(found)) < len(found):
        raise ValueError(f"hyper[{name!r}]={given!r}: give each value once; seeds= is how often each is trained.")
    return found


def parse(name: str, text: str) -> Values:
    """The values that a user typed: `0.001,0.01`, `log:1e-4:1e-2` or `uniform:0:1`.

    Raises:
      ValueError: for another form.
    """
    kind, *limits = text.split(":")
    make = {"log": log_uniform, "uniform": uniform}.get(kind)
    try:
        numbers = [float(x) for x in limits or text.split(",")]
    except ValueError:
        numbers = []
    if make and len(numbers) == 2:
        return make(*numbers)
    if limits or not numbers:
        raise ValueError(f"--hyper {name}={text}: {FORMS}.")
    return values(name, numbers)
