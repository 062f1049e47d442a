"""Gymnasium's spaces and their values, which EnvPool shares, as the library's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from podracer import spaces

# Bounds in float64 are what many environments have; that they become float32 is no news. Set once, for changing
# filters while threads run is not safe.
warnings.filterwarnings("ignore", message=".*Box (low|high)'s precision lowered")


def observation_space(space: Any, name: str) -> spaces.Space:
    """The library's form of an observation space of Gymnasium.

    Raises:
      ValueError: naming a space that has none.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        return spaces.Dict({key: observation_space(item, f"{name}[{key!r}]") for key, item in space.items()})
    if isinstance(space, gymnasium.spaces.Discrete) and space.start == 0:
        return spaces.Discrete(int(space.n))
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return spaces.Box(0, 1, space.shape, np.int8)
    if isinstance(space, gymnasium.spaces.Box):
        low, high = float(np.min(space.low)), float(np.max(space.high))
        shape, dtype = _image_shape(space), np.dtype(np.float32) if space.dtype.kind == "f" else space.dtype
        if dtype.kind == "b":
            low, high, dtype = 0, 1, np.dtype(np.int8)
        return spaces.Box(low, high, shape, dtype)
    raise ValueError(
        f"{name} shows observations in {space}, which is not supported; Box, Discrete, MultiBinary, Dict are."
    )


def _image_shape(space: Any) -> tuple[int, ...]:
    """Images [C, H, W] are [H, W, C] here, and single grey ones [H, W]."""
    if space.dtype != np.uint8 or len(space.shape) != 3 or space.shape[0] > 4 or space.shape[2] <= 4:
        return space.shape
    channels, *size = space.shape
    return tuple(size) if channels == 1 else (*size, channels)


def action_space(space: Any, name: str) -> spaces.Space:
    """The library's form of an action space of Gymnasium.

    Raises:
      ValueError: naming a space that has none.
    """
    if isinstance(space, gymnasium.spaces.Discrete) and space.start == 0:
        return spaces.Discrete(int(space.n))
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return spaces.MultiDiscrete(tuple(space.nvec))
    if isinstance(space, gymnasium.spaces.Box) and space.dtype.kind == "f":
        if max(-np.min(space.low), np.max(space.high)) <= np.finfo(np.float32).max:
            return spaces.Box(space.low, space.high, space.shape)
        raise ValueError(f"{name} takes actions in {space}; a Box needs finite bounds for all numbers.")
    raise ValueError(f"{name} takes actions in {space}, which is not supported; Discrete and bounded Box are.")


def convert(value: Any, space: spaces.Space, copy: bool = False) -> Any:
    """Observations [B, ...] in the dtypes and shapes of a space; with `copy`, never the same arrays."""
    if isinstance(space, spaces.Dict):
        return {key: convert(value[key], item, copy) for key, item in space.items}
    if copy or value.dtype != space.dtype:
        value = value.astype(space.dtype)
    if value.shape[1:] == space.shape:
        return value
    return np.ascontiguousarray(np.moveaxis(value, 1, -1)).reshape(value.shape[0], *space.shape)


def action_checker(space: spaces.Space) -> Callable[[Any], np.ndarray]:
    """A function that returns actions [B] as NumPy in the environment's dtype.

    It raises ValueError for a discrete action that the environment does not have.
    """
    if isinstance(space, spaces.Discrete):

        def discrete(actions: Any) -> np.ndarray:
            actions = np.asarray(actions, np.int32)
            codes = actions.view(np.uint32)  # negative ones are huge
            if codes[codes.argmax()] >= space.num_values:
                raise ValueError(f"actions {actions.min()} to {actions.max()} are not in {space}.")
            return actions

        return discrete
    return lambda actions: np.asarray(actions, space.dtype)  # type: ignore[union-attr]
