"""Masks of actions from environments of the host, as the member `action_mask` [P] that agents follow.

P is the number of actions, or of several choices the sum of their numbers of values. A mask may come as a member of
the observations, of one axis, one row a choice [heads, n], or one number for each combination of choices. It may come
from a method `action_masks()`, as SB3-contrib's wrappers have it, or from `info["action_mask"]`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np

from podracer import spaces
from podracer.types import ArrayTree

NAME, METHOD = "action_mask", "action_masks"

Shape = Literal["auto", "joint", "heads", "none"]
"""The use of a mask of several choices: "joint" makes one choice of all combinations, "heads" masks each choice by
itself, "auto" goes by the mask's shape, and "none" hides the mask."""


class Fitted(NamedTuple):
    """The spaces of an agent, and the way of its actions to the environment.

    Attributes:
      observation_space: with a mask of one axis, or none.
      action_space: one choice, where the mask is of combinations.
      given: the action space that the environment has.
    """

    observation_space: spaces.Space
    action_space: spaces.Space
    given: spaces.Space

    def observation(self, value: Any) -> Any:
        """Flattens the mask in observations [B, ...]."""
        if not _has_mask(self.observation_space):
            return value
        mask = np.asarray(value[NAME])
        return {**value, NAME: mask.reshape(len(mask), -1)}

    def actions(self, actions: ArrayTree) -> ArrayTree:
        """Splits actions int32 [B] into choices [B, heads] where they stand for combinations."""
        if self.action_space is self.given:  # every step of an actor: a comparison takes microseconds
            return actions
        return np.stack(np.unravel_index(np.asarray(actions), self.given.num_values), -1)  # type: ignore[union-attr]


def fit(observation_space: spaces.Space, action_space: spaces.Space, name: str, shape: Shape) -> Fitted:
    """Finds the form of an environment's mask.

    Raises:
      ValueError: for a mask that may be read in two ways, is not of the shape that `shape` says, or has too many
        combinations.
    """
    plain = Fitted(observation_space, action_space, action_space)
    if not _has_mask(observation_space):
        return plain
    members: dict[str, Any] = dict(observation_space.items)  # type: ignore[union-attr]
    mask = members[NAME]
    if shape == "none":
        return plain._replace(observation_space=spaces.Dict({key: x for key, x in members.items() if key != NAME}))
    if not isinstance(mask, spaces.Box) or not isinstance(action_space, spaces.MultiDiscrete):
        return plain
    counts = action_space.num_values
    joint, flat_heads = math.prod(counts), mask.shape == (sum(counts),)
    ways = {"joint": mask.shape == counts, "heads": mask.shape == (len(counts), counts[0]) and len(set(counts)) == 1}
    if shape == "joint":  # a mask of one axis is of heads, if nothing is said
        ways["joint"] |= mask.shape == (joint,)
    if all(ways.values()) and shape == "auto":
        raise ValueError(
            f"{name}: {NAME} {list(mask.shape)} may be of {joint} combinations or of {len(counts)} choices "
            f'of {counts[0]}; say mask="joint" or mask="heads".'
        )
    way = next((key for key, fits in ways.items() if fits and shape in ("auto", key)), "")
    if not way and shape != "auto" and not (shape == "heads" and flat_heads):
        form = f"{list(counts)} or [{joint}]" if shape == "joint" else f"[{sum(counts)}], or a row for each choice"
        raise ValueError(f'{name}: {NAME} is {list(mask.shape)}, and mask="{shape}" needs {form}; leave it out.')
    if not way:
        return plain  # of one axis; or `nets.action_masks.check` says what is wrong
    size = joint if way == "joint" else sum(counts)
    if way == "joint" and size > spaces.MOST_COMBINATIONS:
        raise ValueError(
            f"{name}: {NAME} {list(mask.shape)} is of {size:,} combinations, of which at most "
            f'{spaces.MOST_COMBINATIONS:,} become one choice; hide it by mask="none".'
        )
    members[NAME] = dataclasses.replace(mask, shape=(size,), low=0, high=1)
    return Fitted(spaces.Dict(members), spaces.Discrete(size) if way == "joint" else action_space, action_space)


def _has_mask(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Dict) and NAME in dict(space.items)


def shown(environment: gymnasium.Env, from_info: bool) -> gymnasium.Env:
    """Shows a mask that an environment of Gymnasium has beside its observations.

    Args:
      environment: one lane.
      from_info: True takes it from `info`, where it is no member; False from a method `action_masks`, if there is one.
    """
    # An environment of one's own may have none: the check says so.
    space, actions = (getattr(environment, f"{name}_space", None) for name in ("observation", "action"))
    choices = gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete | gymnasium.spaces.MultiBinary
    member = isinstance(space, gymnasium.spaces.Dict) and NAME in space.spaces
    if member or not isinstance(actions, choices):
        return environment
    return _Shown(environment, from_info) if from_info or method(environment) else environment


def method(environment: Any) -> Any:
    """Returns the method `action_masks` of an environment or of one of its wrappers, the outermost first; or None."""
    while True:
        # Not by getattr of the environment: old wrappers forward names, and would be taken for it.
        if callable(getattr(type(environment), METHOD, None) or vars(environment).get(METHOD)):
            return getattr(environment, METHOD)
        if not isinstance(environment, gymnasium.Wrapper):
            return None
        environment = environment.env


def sample(space: Any, observation: Any) -> Any:
    """Draws an action of a space of Gymnasium, a legal one where the observation has a mask."""
    mask = np.asarray(observation[NAME]) > 0 if isinstance(observation, Mapping) and NAME in observation else None
    if mask is None or not mask.any():
        return space.sample()
    if isinstance(space, gymnasium.spaces.Discrete) and mask.shape == (space.n,):
        return space.sample(mask.astype(np.int8))
    if isinstance(space, gymnasium.spaces.MultiDiscrete) and space.nvec.ndim == 1:
        # Of combinations; where heads have this shape too, one is as good.
        if mask.shape == tuple(space.nvec) or mask.size == np.prod(space.nvec) != sum(space.nvec):
            legal = np.argwhere(mask.reshape(space.nvec))
            return (legal[space.np_random.integers(len(legal))] + space.start).astype(space.dtype)
        if mask.size == sum(space.nvec):
            heads = np.split(mask.ravel().astype(np.int8), np.cumsum(space.nvec)[:-1])
            return space.sample(tuple(heads))
    return space.sample()


class _Shown(gymnasium.Wrapper):
    """Adds the mask to observations: a member of a `Dict`, beside the others or beside "observation"."""

    def __init__(self, environment: gymnasium.Env, from_info: bool):
        super().__init__(environment)
        self._name = type(environment.unwrapped).__name__
        self._masks = None if from_info else method(environment)
        self._size = sum(_counts(environment.action_space))
        space = environment.observation_space
        self._named = isinstance(space, gymnasium.spaces.Dict)
        others: Any = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {"observation": space}
        mask = gymnasium.spaces.Box(0, 1, (self._size,), np.int8)
        self.observation_space = gymnasium.spaces.Dict({**others, NAME: mask})

    @property
    def spec(self) -> Any:
        return self.env.spec

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = self.env.reset(seed=seed, options=options)
        if not (isinstance(result, tuple) and len(result) == 2):
            return result  # the lane says what is wrong
        return self._show(result[0], result[1]), result[1]

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        if not (isinstance(result, tuple) and len(result) == 5):
            return result
        return self._show(result[0], result[4]), *result[1:]

    def _show(self, observation: Any, info: Mapping[str, Any]) -> dict[str, Any]:
        source = f"{METHOD}()" if self._masks else f"info[{NAME!r}]"
        if not self._masks and NAME not in info:
            raise ValueError(f'{self._name}: info has no {NAME!r}, which mask="info" needs at every reset and step.')
        mask = np.asarray(self._masks() if self._masks else info[NAME])
        if mask.dtype.kind not in "biu" or mask.size != self._size:
            raise ValueError(
                f"{self._name}: {source} returned {mask.dtype} {list(mask.shape)}: return truth values [{self._size}]."
            )
        return {
            **(observation if self._named else {"observation": observation}),
            NAME: (mask.ravel() > 0).astype(np.int8),
        }


def _counts(space: Any) -> list[int]:
    """The number of values of each choice."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    return [int(n) for n in np.ravel(space.nvec)]
