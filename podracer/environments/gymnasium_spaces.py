"""Converts spaces of Gymnasium, which EnvPool shares, and actions for such environments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from podracer import spaces
from podracer.environments import gate

# Many environments have bounds in float64, which become float32. Set once, because changing filters while threads run
# is not safe.
warnings.filterwarnings("ignore", message=".*Box (low|high)'s precision lowered")

ARRAYS = (
    gymnasium.spaces.Box,
    gymnasium.spaces.Discrete,
    gymnasium.spaces.MultiBinary,
    gymnasium.spaces.MultiDiscrete,
)
"""Spaces whose values are arrays of numbers."""

INT32 = np.iinfo(np.int32)
MOST_CHOICES = 1024
"""The largest number of values of a Box of integers that become choices, each an output of a network."""

ROUNDING = 1e-5
"""The share of its bounds by which a float may exceed them."""


def observation_space(space: Any, name: str) -> spaces.Space:
    """Converts an observation space of Gymnasium.

    Raises:
      ValueError: for a space that is not supported.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        return spaces.Dict({key: observation_space(item, f"{name}[{key!r}]") for key, item in space.items()})
    if isinstance(space, gymnasium.spaces.Discrete):
        return spaces.Discrete(int(space.n), int(space.start))
    if isinstance(space, gymnasium.spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return spaces.MultiDiscrete(tuple(space.nvec), tuple(space.start))
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return spaces.Box(0, 1, space.shape, np.int8)
    if isinstance(space, gymnasium.spaces.Box):
        low, high, dtype = _numbers(space, name)
        return spaces.Box(low, high, _image_shape(space), dtype)
    raise ValueError(
        f"{name} shows observations in {space}, which is not supported; Box, Discrete, MultiBinary, MultiDiscrete of "
        "one axis and Dict of these are."
    )


def _numbers(space: Any, name: str) -> tuple[Any, Any, np.dtype]:
    """Returns the smallest bound of a Box, the largest, and the dtype of observations."""
    low, high, dtype = np.min(space.low).item(), np.max(space.high).item(), np.dtype(space.dtype)
    if dtype.kind == "b":
        return 0, 1, np.dtype(np.int8)
    if dtype.kind == "f":
        largest = float(np.finfo(np.float32).max)
        return -np.inf if low < -largest else low, np.inf if high > largest else high, np.dtype(np.float32)
    if dtype.itemsize <= 4:
        return low, high, dtype
    limits = np.iinfo(dtype)  # which stand for no bounds
    known = [*space.low[space.low > limits.min].flat, *space.high[space.high < limits.max].flat]
    if any(not INT32.min <= bound <= INT32.max for bound in known):
        raise ValueError(
            f"{name} shows observations in {space}: numbers that need 64 bits, which networks do not have; scale them "
            "in the environment to a Box of float32 in [-1, 1]."
        )
    return max(low, INT32.min), min(high, INT32.max), np.dtype(np.int32)


def _image_shape(space: Any) -> tuple[int, ...]:
    """Returns the shape with channels last: [H, W, C] for images [C, H, W], or [H, W] for one channel."""
    most = gate.MOST_CHANNELS
    if space.dtype != np.uint8 or len(space.shape) != 3 or space.shape[0] > most or space.shape[2] <= most:
        return space.shape
    channels, *size = space.shape
    return tuple(size) if channels == 1 else (*size, channels)


def action_space(space: Any, name: str) -> spaces.Space:
    """Converts an action space of Gymnasium.

    Raises:
      ValueError: for a space that is not supported.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        return spaces.Discrete(int(space.n), int(space.start))
    if isinstance(space, gymnasium.spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return spaces.MultiDiscrete(tuple(space.nvec), tuple(space.start))
    if isinstance(space, gymnasium.spaces.MultiBinary) and len(space.shape) == 1:
        return spaces.MultiDiscrete((2,) * space.shape[0])
    if isinstance(space, gymnasium.spaces.Box) and space.dtype.kind == "f":
        if max(-np.min(space.low), np.max(space.high)) <= np.finfo(np.float32).max:
            return spaces.Box(space.low, space.high, space.shape, min(space.dtype, np.dtype(np.float32)))
        raise ValueError(f"{name} takes actions in {space}; a Box needs finite bounds for all numbers.")
    if isinstance(space, gymnasium.spaces.Box) and space.dtype.kind in "iu" and len(space.shape) == 1:
        low, high = ([int(bound) for bound in bounds] for bounds in (space.low, space.high))
        num_values = [largest - least + 1 for least, largest in zip(low, high)]
        if max(num_values) <= MOST_CHOICES:
            return spaces.MultiDiscrete(tuple(num_values), tuple(low))
    raise ValueError(
        f"{name} takes actions in {space}, which is not supported; Discrete, bounded Box of floats and, of one axis, "
        f"MultiDiscrete, MultiBinary and Box of whole numbers, each of at most {MOST_CHOICES:,} values, are."
    )


def actions_for(space: Any, own: Any) -> Callable[[Any], np.ndarray]:
    """Makes a function from an agent's actions [B, ...] to an environment's, in NumPy.

    It raises ValueError for a discrete action outside the space.

    Args:
      space: the environment's, of Gymnasium.
      own: `action_space` of it.
    """
    if isinstance(own, spaces.Discrete) and not own.start:
        return lambda actions: gate.choices(actions, own)
    if isinstance(own, spaces.Discrete):
        return lambda actions: gate.to_environment(gate.choices(actions, own), own)
    if isinstance(own, spaces.MultiDiscrete):
        return lambda actions: gate.to_environment(gate.choices(actions, own), own).astype(space.dtype)
    if space.dtype == own.dtype:
        return lambda actions: np.asarray(actions, own.dtype)

    def clip(actions: Any) -> np.ndarray:
        actions = np.asarray(actions, space.dtype)
        if actions.shape[1:] != space.shape:
            raise ValueError(f"actions have shape {actions.shape}, not {(*actions.shape[:1], *space.shape)}.")
        return np.clip(actions, space.low, space.high)

    return clip


def outside(value: Any, space: Any, name: str = "observation") -> str:
    """Describes the first number of observations [..., *space.shape] outside the space; "" for none."""
    if isinstance(space, gymnasium.spaces.Dict):
        found = (outside(value[key], item, f"{name}[{key!r}]") for key, item in space.spaces.items())
        return next(filter(None, found), "")
    if not isinstance(space, ARRAYS):
        return ""
    array = np.asarray(value)
    low, high = _bounds(space)
    ok = (array >= low) & (array <= high) & np.isfinite(array)
    if ok.all():
        return ""
    at = tuple(np.argwhere(~ok)[0])
    inner = [int(i) for i in at[len(at) - len(space.shape or ()) :]]
    value = f"{array[at]:.6g}" if array.dtype.kind == "f" else array[at]
    return f"{name}{inner or ''} {value}, which is outside {space}"


def _bounds(space: Any) -> tuple[Any, Any]:
    """Returns the smallest and largest values of a space, for floats with some room for rounding."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return space.start, space.start + (space.nvec - 1)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return 0, 1
    if space.dtype.kind != "f":
        return space.low, space.high
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    return low - ROUNDING * np.maximum(1, np.abs(low)), high + ROUNDING * np.maximum(1, np.abs(high))
