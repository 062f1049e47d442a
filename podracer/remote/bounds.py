"""Limits of the numbers that a learner takes from a worker."""

from __future__ import annotations

from typing import Any

import numpy as np

from podracer import spaces

SLACK = 10.0
"""By how many times the width of its space, or 1 if that is less, a number may exceed its bounds: environments do."""


def limits(space: spaces.Box, largest: float) -> tuple[Any, Any] | None:
    """The least and the most that elements of a space may be, or None where its dtype has no others.

    Args:
      space: with a dtype of numbers.
      largest: in either direction, of elements without bounds.

    Returns:
      Two numbers, or two arrays of the space's shape.
    """
    dtype = np.dtype(space.dtype)
    if 0 in space.shape:
        return None
    own: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    low, high = (np.asarray(bound, np.float64) for bound in (space.low, space.high))
    endless = ~np.isfinite(low) | ~np.isfinite(high)
    if dtype.itemsize >= 4:  # the largest numbers that there are stand for no bound
        endless |= (high >= own.max) | ((low <= own.min) & (own.min < 0))
    with np.errstate(invalid="ignore", over="ignore"):
        slack = SLACK * np.maximum(high - low, 1.0)
        low, high = np.where(endless, -largest, low - slack), np.where(endless, largest, high + slack)
    if dtype.kind == "f":  # or they would be compared as float64, which takes longer
        low, high = (np.clip(x, own.min, own.max).astype(dtype) for x in (low, high))
    elif (low <= own.min).all() and (high >= own.max).all():
        return None
    uniform = (low == low.flat[0]).all() and (high == high.flat[0]).all()
    return (low.flat[0], high.flat[0]) if uniform else (low, high)
