"""Checks that an environment keeps Gymnasium's interface; errors name the class, the method and a remedy."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from podracer.environments import host_masks
from podracer.environments.gymnasium_spaces import outside

STEPS = 3
"""Steps that a check plays."""


def check_spaces(environment: gymnasium.Env) -> None:
    """Checks that an environment has spaces.

    Raises:
      TypeError: naming the one that is missing.
    """
    for attribute in ("observation_space", "action_space"):
        if isinstance(getattr(environment, attribute, None), gymnasium.Space):
            continue
        for layer in (environment.unwrapped, environment):  # a wrapper has it of what it wraps
            space, name = getattr(layer, attribute, None), type(layer).__name__
            if not isinstance(space, gymnasium.Space):
                raise TypeError(
                    f"{name}.{attribute} is {space!r}: set it to a space of gymnasium.spaces in {name}.__init__."
                )


class InterfaceError(TypeError):
    """An environment does not keep Gymnasium's interface; the message says where, and what was expected."""


def check_play(environment: gymnasium.Env) -> None:
    """Plays a few steps and checks what `reset` and `step` return; what they raise themselves passes through.

    The whole environment is checked, after all wrappers. If that fails, the innermost one is checked too, so that the
    error names the layer with the mistake.

    Raises:
      TypeError: naming the method, what it returned and what was expected.
    """
    try:
        _check_layer(environment)
    except Exception:
        if environment.unwrapped is not environment:
            try:
                _check_layer(environment.unwrapped)
            except InterfaceError:
                raise
            except Exception:  # the same again
                pass
        raise


def _check_layer(environment: gymnasium.Env) -> None:
    name = type(environment).__name__
    try:
        inspect.signature(environment.reset).bind(seed=0, options=None)
    except TypeError as error:
        raise InterfaceError(f"{name}.reset: {error}; define reset(self, *, seed=None, options=None).") from None
    result, space = environment.reset(seed=0, options=None), environment.observation_space
    check_reset(result, space, name)
    _check_values(result[0], space, f"{name}.reset")
    environment.action_space.seed(0)
    for _ in range(STEPS):
        result = environment.step(host_masks.sample(environment.action_space, result[0]))
        check_step(result, space, name)
        _check_values(result[0], space, f"{name}.step")
        if result[2] or result[3]:
            return


def check_reset(result: Any, space: gymnasium.Space, name: str) -> None:
    """Checks the types and shapes of what `name.reset` returned.

    Raises:
      InterfaceError: saying what it returned and what was expected.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise InterfaceError(f"{name}.reset returned {_describe(result)}; expected a pair: observation, info (a dict).")
    _check_observation(result[0], space, f"{name}.reset")


def check_step(result: Any, space: gymnasium.Space, name: str) -> None:
    """Checks the types and shapes of what `name.step` returned.

    Raises:
      InterfaceError: saying what it returned and what was expected.
    """
    if not (isinstance(result, tuple) and len(result) == 5):
        raise InterfaceError(
            f"{name}.step returned {_describe(result)}; expected five values: observation, reward, terminated, "
            "truncated, info."
        )
    observation, reward, terminated, truncated, info = result
    _check_observation(observation, space, f"{name}.step")
    for what, value, kinds, expected in (
        ("reward", reward, "biuf", "a number"),
        ("terminated", terminated, "biu", "True or False"),
        ("truncated", truncated, "biu", "True or False"),
    ):
        array = np.asarray(value)
        # One number in an array is as good as a number.
        if array.size != 1 or array.dtype.kind not in kinds:
            raise InterfaceError(f"{name}.step returned {what} {_describe(value)}; expected {expected}.")
    if not isinstance(info, Mapping):
        raise InterfaceError(f"{name}.step returned info {_describe(info)}; expected a dict.")


def _check_observation(value: Any, space: gymnasium.Space, where: str, what: str = "observation") -> None:
    if isinstance(space, gymnasium.spaces.Dict):
        if not isinstance(value, Mapping) or not set(space.spaces) <= set(value):
            found = sorted(value) if isinstance(value, Mapping) else _describe(value)
            raise InterfaceError(f"{where} returned {what} {found}; expected a dict of {sorted(space.spaces)}.")
        for key, item in space.spaces.items():
            _check_observation(value[key], item, where, f"{what}[{key!r}]")
        return
    if space.shape is None:  # of what a wrapper has made something else
        return
    array = np.asarray(value)
    if array.shape != space.shape or not np.can_cast(array.dtype, np.dtype(space.dtype), "same_kind"):
        raise InterfaceError(
            f"{where} returned {what} {_describe(value)}; expected {space.dtype} {list(space.shape or ())} as in the "
            f"observation_space, {space}."
        )


def _check_values(value: Any, space: gymnasium.Space, where: str) -> None:
    if found := outside(value, space):
        raise InterfaceError(f"{where} returned {found}; widen the observation_space, or clip what it returns.")


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype} {list(value.shape)}"
    if type(value) is tuple:
        return f"a tuple of {len(value)}"
    return repr(value) if value is None or isinstance(value, int | float | str) else f"a {type(value).__name__}"
