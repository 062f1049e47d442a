"""Whether one environment keeps Gymnasium's interface: mistakes of one's own get a name, a method and a remedy."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

STEPS = 3
"""Steps that are played to see what an environment returns."""


def check_spaces(environment: gymnasium.Env) -> None:
    """Checks that an environment has spaces.

    Raises:
      TypeError: naming the one that is missing.
    """
    for layer in _layers(environment):
        for attribute in ("observation_space", "action_space"):
            space = getattr(layer, attribute, None)
            if not isinstance(space, gymnasium.Space):
                name = type(layer).__name__
                raise TypeError(
                    f"{name}.{attribute} is {space!r}: set it to a space of gymnasium.spaces in {name}.__init__."
                )


def check_play(environment: gymnasium.Env) -> None:
    """Plays a few steps and checks what `reset` and `step` return; what they raise themselves passes through.

    Raises:
      TypeError: naming the method, what it returned and what was expected.
    """
    for layer in _layers(environment):
        _check_layer(layer, type(layer).__name__)


def _layers(environment: gymnasium.Env) -> list[gymnasium.Env]:
    """The environment itself before what its wrappers make of it, so that the first to blame is blamed."""
    return [environment.unwrapped] + ([environment] if environment.unwrapped is not environment else [])


def _check_layer(environment: gymnasium.Env, name: str) -> None:
    try:
        inspect.signature(environment.reset).bind(seed=0, options=None)
    except TypeError as error:
        raise TypeError(f"{name}.reset: {error}; define reset(self, *, seed=None, options=None).") from None
    result = environment.reset(seed=0, options=None)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise TypeError(f"{name}.reset returned {_describe(result)}; expected a pair: observation, info (a dict).")
    _check_observation(result[0], environment.observation_space, f"{name}.reset")
    environment.action_space.seed(0)
    for _ in range(STEPS):
        result = environment.step(environment.action_space.sample())
        if not (isinstance(result, tuple) and len(result) == 5):
            raise TypeError(
                f"{name}.step returned {_describe(result)}; expected five values: observation, reward, terminated, "
                "truncated, info."
            )
        observation, reward, terminated, truncated, info = result
        _check_observation(observation, environment.observation_space, f"{name}.step")
        for what, value, kinds, expected in (
            ("reward", reward, "biuf", "a number"),
            ("terminated", terminated, "biu", "True or False"),
            ("truncated", truncated, "biu", "True or False"),
        ):
            array = np.asarray(value)
            # One number in an array is as good as a number.
            if array.size != 1 or array.dtype.kind not in kinds:
                raise TypeError(f"{name}.step returned {what} {_describe(value)}; expected {expected}.")
        if not isinstance(info, Mapping):
            raise TypeError(f"{name}.step returned info {_describe(info)}; expected a dict.")
        if terminated or truncated:
            return


def _check_observation(value: Any, space: gymnasium.Space, where: str, what: str = "observation") -> None:
    if isinstance(space, gymnasium.spaces.Dict):
        if not isinstance(value, Mapping) or not set(space.spaces) <= set(value):
            found = sorted(value) if isinstance(value, Mapping) else _describe(value)
            raise TypeError(f"{where} returned {what} {found}; expected a dict of {sorted(space.spaces)}.")
        for key, item in space.spaces.items():
            _check_observation(value[key], item, where, f"{what}[{key!r}]")
        return
    array = np.asarray(value)
    if array.shape != space.shape or not np.can_cast(array.dtype, np.dtype(space.dtype), "same_kind"):
        raise TypeError(
            f"{where} returned {what} {_describe(value)}; expected {space.dtype} {list(space.shape or ())} as in the "
            f"observation_space, {space}."
        )


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} {list(value.shape)}"
    if type(value) is tuple:
        return f"a tuple of {len(value)}"
    return repr(value) if value is None or isinstance(value, int | float | str) else f"a {type(value).__name__}"
