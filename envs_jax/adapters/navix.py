"""Navix (Pignatelli et al. 2024, https://github.com/epignatelli/navix): MiniGrid's tasks in JAX.

By name, `navix:Navix-DoorKey-6x6-v0`. It is not MiniGrid: the reward is 1 at the goal at whatever time, the time limits
are Navix's own, and by default the whole grid is seen. Scores of the two do not compare.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any, Literal

import jax
import jax.numpy as jnp

from envs_jax.adapters import convert
from podracer import configs, spaces

LARGEST_CODE = 10
"""The code of the player's tile; those of colours and directions are smaller."""

View = Literal[
    "symbolic", "symbolic_first_person", "categorical", "categorical_first_person", "rgb", "rgb_first_person"
]


@dataclasses.dataclass(frozen=True)
class NavixOptions:
    """Options of Navix.

    Attributes:
      max_steps: the time limit, a truncation; by default the task's, which before navix 4 is 4 x height x width.
      observation: the function of `navix.observations` that shows the grid.
    """

    max_steps: int | None = configs.field(None, low=1)
    observation: View = "symbolic"

    def __post_init__(self):
        configs.check(self)


def tasks() -> list[str]:
    """Returns the ids of Navix's environments."""
    return list(importlib.import_module("navix").registry())


def make(name: str, options: NavixOptions) -> convert.Adapted:
    """Builds an environment of Navix.

    Raises:
      ValueError: for an unknown id.
    """
    convert.check_known("navix", name, tasks())
    navix = importlib.import_module("navix")
    limit = {"max_steps": options.max_steps}
    with convert.making(f"navix:{name}"):
        # A None that is given stands for 4 x height x width. From navix 4 on, `make` has no limit of its own, and some
        # tasks have; before, it gives all of them 100 steps.
        if options.max_steps is None and "max_steps" not in inspect.signature(navix.make).parameters:
            limit = {}
        view = getattr(navix.observations, options.observation)
        env = navix.make(name, observation_fn=view, **limit)
    return from_navix(env, name=f"navix:{name}", codes=not options.observation.startswith("rgb"))


def from_navix(env: Any, *, name: str = "", codes: bool = False) -> convert.Adapted:
    """Adapts an environment of Navix.

    Args:
      env: the environment.
      name: for run directories and messages; by default the class's.
      codes: True where the observation is of the codes of tiles: it needs none of the pictures in a state, which are
        most of its bytes, and Navix's bounds of it are too narrow.

    Raises:
      ValueError: for a wrapper, or an environment without `max_steps`.
    """
    name = name or type(env).__name__
    convert.check_bare(env, name)
    with convert.making(name):
        max_steps = int(env.max_steps)
        cache = jax.eval_shape(env.reset, jax.eval_shape(lambda: jax.random.key(0))).state.cache

    def bare(timestep: Any) -> Any:
        return timestep.replace(state=timestep.state.replace(cache=None)) if codes else timestep

    def step(timestep: Any, action: jax.Array, key: jax.Array) -> convert.Step:
        del key  # theirs is in the state
        if codes:
            blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)
            timestep = timestep.replace(state=timestep.state.replace(cache=blank))
        timestep = env._step(timestep, action)
        return convert.Step(bare(timestep), timestep.reward, timestep.is_termination(), timestep.is_truncation())

    return convert.Adapted(
        name,
        lambda key: bare(env.reset(key)),
        step,
        lambda timestep: timestep.observation,
        convert.action_space(env.action_space, name),
        declared=spaces.Box(0, LARGEST_CODE) if codes else env.observation_space,
        max_steps=max_steps,
    )
