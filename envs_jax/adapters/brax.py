"""Environments of brax (Freeman et al. 2021, https://github.com/google/brax): robots in MuJoCo's physics or brax's own.

By name, `brax:ant`; as an object, `podracer.from_brax(env)`. Observations, rewards and ends are theirs. Every episode
begins in a state drawn anew, where brax's training returns each lane to its first one.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Literal

import jax

from envs_jax.adapters import convert
from podracer import configs, spaces

MAX_STEPS = 1000
"""The time limit of brax's training, which its environments do not know."""


@dataclasses.dataclass(frozen=True)
class BraxOptions:
    """Options of environments of brax.

    Attributes:
      backend: the physics, MuJoCo's or one of brax's own.
      max_steps: the time limit, a truncation.
    """

    backend: Literal["mjx", "generalized", "spring", "positional"] = "mjx"
    max_steps: int = configs.field(MAX_STEPS, low=1)

    def __post_init__(self):
        configs.check(self)


def tasks() -> list[str]:
    """Returns the names of brax's environments."""
    return list(importlib.import_module("brax.envs")._envs)


def make(name: str, options: BraxOptions) -> convert.Adapted:
    """Builds an environment of brax.

    Raises:
      ValueError: for an unknown name, or physics that the environment does not have.
    """
    convert.check_known("brax", name, tasks())
    with convert.making(f"brax:{name} with backend={options.backend!r}"):
        env = importlib.import_module("brax.envs").get_environment(name, backend=options.backend)
    return from_brax(env, max_steps=options.max_steps, name=f"brax:{name}")


def from_brax(env: Any, *, max_steps: int | None = MAX_STEPS, name: str = "") -> convert.Adapted:
    """Adapts an environment with brax's interface: `reset(rng)`, `step(state, action)` and `action_size`.

    Actions are those of brax, in [-1, 1]. The state's `info` and `metrics` are kept and not logged.

    Args:
      env: the environment, such as `brax.envs.get_environment("ant")`, without the wrappers of training.
      max_steps: the time limit, a truncation; None for none.
      name: for run directories and messages; by default the class's.

    Raises:
      ValueError: for a wrapper of training, or observations that are not supported.
    """
    name = name or type(env).__name__
    convert.check_bare(env, name)

    def step(state: Any, action: jax.Array, key: jax.Array) -> convert.Step:
        del key  # theirs, if they have one, is in the state
        state = env.step(state, action)
        return convert.Step(state, state.reward, state.done)

    with convert.making(name):
        actions = spaces.Box(-1.0, 1.0, (int(env.action_size),))
    return convert.Adapted(name, env.reset, step, lambda state: state.obs, actions, max_steps=max_steps)
