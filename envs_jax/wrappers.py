"""Wrappers: functions that change one thing of an environment and return the changed environment.

    from envs_jax import make, wrappers
    environment = wrappers.time_limit(200)(wrappers.sticky_actions(0.25)(make("cartpole")))

They nest: the innermost changes the environment first. Each result keeps the contract of
`podracer.types.Environment`, and `render` where the environment has it. Logged and evaluated returns are those of the
wrapped environment. Frame stacking and the normalisation of observations and rewards are settings of agents.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from envs_jax import wrapped
from podracer.types import Environment

__all__ = [
    "action_repeat",
    "clip_reward",
    "flatten",
    "hide",
    "pick",
    "randomise",
    "scale_reward",
    "sticky_actions",
    "time_limit",
]

LARGEST = float(np.finfo(np.float32).max)

Wrapper: TypeAlias = Callable[[Environment], Environment]
"""A wrapper with its settings; raises ValueError for an environment that it does not fit."""


def time_limit(n: int) -> Wrapper:
    """Truncates an episode after `n` steps: `last` with discount 1. One that terminates on that step terminates.

    Raises:
      ValueError: if `n` is not an integer of at least 1.
    """
    _check_count(f"time_limit(n={n!r})", n)
    return lambda environment: wrapped.TimeLimit(environment, int(n))


def scale_reward(x: float) -> Wrapper:
    """Multiplies rewards by `x`.

    Raises:
      ValueError: if `x` is not a finite number in float32.
    """
    factor = _number(f"scale_reward(x={x!r})", x)
    if math.isinf(factor):
        raise ValueError(f"scale_reward(x={x!r}): must be finite.")
    return lambda environment: wrapped.ScaleReward(environment, factor)


def clip_reward(low: float, high: float) -> Wrapper:
    """Clips rewards to [low, high]; `low` may be -inf, and `high` inf.

    Raises:
      ValueError: if a bound is not a number of float32, `low` is above `high`, or no finite reward is between them.
    """
    where = f"clip_reward(low={low!r}, high={high!r})"
    bounds = _number(where, low), _number(where, high)
    if bounds[0] > bounds[1]:
        raise ValueError(f"{where}: low must not exceed high.")
    if math.inf in (bounds[0], -bounds[1]):
        raise ValueError(f"{where}: no finite reward is between them.")
    return lambda environment: wrapped.ClipReward(environment, *bounds)


def sticky_actions(p: float) -> Wrapper:
    """Executes the action executed last, instead of the agent's, with probability `p`.

    The first action of an episode is the agent's, and so is one where the environment's mask forbids the last one. From
    "Revisiting the Arcade Learning Environment" (Machado et al., 2018), section 5.2, where an episode begins after a
    no-op; environments in general have none.

    Raises:
      ValueError: if `p` is not a probability.
    """
    probability = _number(f"sticky_actions(p={p!r})", p)
    if not 0 <= probability <= 1:
        raise ValueError(f"sticky_actions(p={p!r}): must be between 0 and 1.")
    return lambda environment: wrapped.StickyActions(environment, probability)


def action_repeat(n: int) -> Wrapper:
    """Executes every action `n` times, or until the episode is over, and adds up rewards and metrics.

    A time limit inside counts the environment's own steps, and one outside the agent's.

    Raises:
      ValueError: if `n` is not an integer of at least 1; later, for an environment with a mask of actions.
    """
    _check_count(f"action_repeat(n={n!r})", n)
    return lambda environment: wrapped.ActionRepeat(environment, int(n))


def flatten() -> Wrapper:
    """Makes observations one array, float32 [n]: members of a `Dict` by name, choices as one-hot numbers.

    Numbers keep their values, those of uint8 images too.
    """
    return wrapped.Flatten


def pick(name: str) -> Wrapper:
    """Shows one member of a `Dict` of observations, and `action_mask` if it has one, without the others."""
    return lambda environment: wrapped.Pick(environment, name)


def hide(indices: Sequence[int]) -> Wrapper:
    """Drops elements of a flat `Box` of observations: `hide([1, 3])` hides the two velocities of `cartpole`.

    Raises:
      ValueError: if an index is not an integer of at least 0, or there are none.
    """
    where = f"hide({indices!r})"
    chosen = tuple(indices) if isinstance(indices, Sequence | np.ndarray) and not isinstance(indices, str) else ()
    if not chosen:
        raise ValueError(f"{where}: give the indices as a sequence, such as [1, 3].")
    for index in chosen:
        if isinstance(index, bool) or not isinstance(index, numbers.Integral) or index < 0:
            raise ValueError(f"{where}: indices must be integers of at least 0.")
    return lambda environment: wrapped.Hide(environment, tuple(map(int, chosen)))


def randomise(
    sample: Callable[[Any], Any], apply: Callable[[Any, Any], Environment]
) -> Callable[[Environment], Environment]:
    """Draws parameters of the environment anew for every episode (domain randomisation).

        randomise(lambda key: jax.random.uniform(key, minval=5.0, maxval=15.0),
                  lambda environment, gravity: Pole(gravity=gravity))

    Args:
      sample: `key -> parameters`, a tree of arrays; they are a part of the state.
      apply: `(environment, parameters) -> environment` with these parameters, called while JAX traces; its states and
        spaces must have the shapes of the environment's own, whose `spec` counts.
    """
    return lambda environment: wrapped.Randomise(environment, sample, apply)


def _check_count(where: str, n: Any) -> None:
    if isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 1:
        raise ValueError(f"{where}: must be an integer of at least 1.")


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value != value:
        raise ValueError(f"{where}: must be a number.")
    size: Any = abs(value)
    if LARGEST < size != math.inf:
        raise ValueError(f"{where}: must be within {LARGEST:.3g}, the largest number of float32.")
    return float(value)
