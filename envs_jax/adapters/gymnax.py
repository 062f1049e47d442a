"""Environments of gymnax (Lange 2022, https://github.com/RobertTLange/gymnax), and a paper's own with its interface.

By name, `gymnax:CartPole-v1`; as an object, `podracer.from_gymnax(env, params)`. The rules are theirs. gymnax's own
time limits only truncate. Those of other environments may be part of their `step_env`, so these get a limit one step
later, and ours comes first.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax

from envs_jax import adapters
from envs_jax.adapters import convert
from podracer import configs

LIMITS = ("max_steps_in_episode", "max_timesteps")
"""Names of the time limit among the parameters, gymnax's and Craftax's."""


@dataclasses.dataclass(frozen=True)
class GymnaxOptions:
    """Options of environments of gymnax.

    Attributes:
      max_steps: the time limit, a truncation; by default gymnax's.
    """

    max_steps: int | None = configs.field(None, low=1)

    def __post_init__(self):
        configs.check(self)


def tasks() -> list[str]:
    """Returns the ids of gymnax's environments."""
    return list(importlib.import_module("gymnax").registered_envs)


def make(name: str, options: GymnaxOptions) -> convert.Adapted:
    """Builds an environment of gymnax.

    Raises:
      ValueError: for an unknown id, or a space that is not supported.
    """
    convert.check_known("gymnax", name, tasks())
    with convert.making(f"gymnax:{name}"):
        env, params = importlib.import_module("gymnax").make(name)
    return from_gymnax(env, params, max_steps=options.max_steps, name=f"gymnax:{name}")


def from_gymnax(
    env: Any,
    params: Any = None,
    *,
    max_steps: int | None = None,
    limit_in_step: bool = True,
    name: str = "",
    costly_reset: bool = False,
) -> convert.Adapted:
    """Adapts an environment with gymnax's interface: `reset_env`, `step_env`, `default_params` and two spaces.

        result = podracer.train("ppo", podracer.from_gymnax(MyEnv()))

    Args:
      env: the environment, without wrappers.
      params: its parameters; by default `env.default_params`.
      max_steps: T, the time limit; by default that of the parameters, `max_steps_in_episode`.
      limit_in_step: False for a `step_env` that does not end an episode at its limit. If it does, its parameters say
        T + 1, which an observation of the time that is left also sees. Those of gymnax itself never do.
      name: for run directories and messages; by default the class's.
      costly_reset: True where a reset costs much more than a step.

    Raises:
      ValueError: for a wrapper, an old version of gymnax, parameters without a limit that can be set, or a space that
        is not supported.
    """
    name = name or type(env).__name__
    if hasattr(env, "_env"):  # its `step_env` would be that of the environment inside
        raise ValueError(f"{name} is a wrapper, which gymnax's interface does not pass through; give what is inside.")
    natural = type(env).__module__.startswith("gymnax.")
    if natural:
        adapters.check("gymnax")
    later = limit_in_step and not natural
    with convert.making(name):
        params = env.default_params if params is None else params
        field = next((field for field in LIMITS if hasattr(params, field)), None)
        T = int(getattr(params, field)) if field and max_steps is None else max_steps
    if field and T is not None and (max_steps == T or later):
        if not dataclasses.is_dataclass(params) or isinstance(params, type):
            kind = type(params).__name__
            raise ValueError(f"{name}: params={kind}: must be a dataclass, so that {field} can be set.")
        params = dataclasses.replace(params, **{field: T + later})

    def reset(key: jax.Array) -> Any:
        observation, state = env.reset_env(key, params)
        return state, observation

    def step(inner: Any, action: jax.Array, key: jax.Array) -> convert.Step:
        observation, state, reward, terminated, _ = env.step_env(key, inner[0], action, params)
        return convert.Step((state, observation), reward, terminated)

    with convert.making(name):
        actions, declared = env.action_space(params), env.observation_space(params)
    return convert.Adapted(
        name,
        reset,
        step,
        lambda inner: inner[1],  # gymnax's observations may need a key
        convert.action_space(actions, name),
        declared=declared,
        max_steps=T,
        costly_reset=costly_reset,
    )
