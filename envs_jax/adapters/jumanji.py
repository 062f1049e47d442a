"""Environments of Jumanji (Bonnet et al. 2024, https://github.com/instadeepai/jumanji): puzzles, packing and routing.

By name, `jumanji:Game2048-v1`; as an object, `podracer.from_jumanji(env)`. The rules are theirs. Most of their time
limits are terminations, so the environment gets a limit one step later, and ours comes first. Masks of actions become
the member `action_mask`; one of combinations makes a single choice of all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from envs_jax.adapters import convert
from podracer import configs, spaces

MASK = "action_mask"


@dataclasses.dataclass(frozen=True)
class JumanjiOptions:
    """Options of environments of Jumanji.

    Attributes:
      max_steps: the time limit, a truncation; by default Jumanji's.
      mask: False hides `action_mask`.
    """

    max_steps: int | None = configs.field(None, low=1)
    mask: bool = True

    def __post_init__(self):
        configs.check(self)


def tasks() -> list[str]:
    """Returns the ids of Jumanji's environments."""
    return sorted(importlib.import_module("jumanji").registered_environments())


def make(name: str, options: JumanjiOptions) -> convert.Adapted:
    """Builds an environment of Jumanji.

    Raises:
      ValueError: for an unknown id, levels that cannot be downloaded (Sokoban), and as `from_jumanji`.
    """
    convert.check_known("jumanji", name, tasks())
    with convert.making(f"jumanji:{name}"):
        env = importlib.import_module("jumanji").make(name)
    return from_jumanji(env, max_steps=options.max_steps, mask=options.mask, name=f"jumanji:{name}")


def from_jumanji(env: Any, *, max_steps: int | None = None, mask: bool = True, name: str = "") -> convert.Adapted:
    """Adapts an environment with Jumanji's interface: `reset`, `step`, `observation_spec` and `action_spec`.

    Args:
      env: the environment, which does not reset itself.
      max_steps: the time limit; by default its `time_limit`, if it has one.
      mask: False hides `action_mask`.
      name: for run directories and messages; by default the class's.

    Raises:
      ValueError: for rewards of several agents, a space that is not supported, or `max_steps` for which the states have
        no room.
    """
    name = name or type(env).__name__
    convert.check_bare(env, name)
    if getattr(env, "time_limit", None) is not None:
        max_steps = int(env.time_limit) if max_steps is None else max_steps
        room = getattr(getattr(env, "_generator", None), "_max_step", max_steps)
        if max_steps > room:  # MMST
            raise ValueError(
                f"{name}: max_steps={max_steps}: its states have room for {room} steps; give fewer, or an environment "
                f"that is made with time_limit={max_steps}."
            )
        env = _with_limit(env, max_steps + 1)
    with convert.making(name):
        declared, actions, rewards = env.observation_spec, env.action_spec, env.reward_spec
    if rewards.shape != ():
        raise ValueError(f"{name} gives a reward to each of {rewards.shape[0]} agents; wrap it to give one for all.")
    given = convert.action_space(actions, name)
    counts = given.num_values if isinstance(given, spaces.MultiDiscrete) else ()
    joint = mask and bool(counts) and getattr(getattr(declared, MASK, None), "shape", ()) == counts
    if joint and counts == (2, 2):
        raise ValueError(
            f"{name} has an action_mask of shape (2, 2), which may be of the 4 pairs or of each choice by itself; hide "
            "it by mask=False, or give it another shape: (4,) is of each choice by itself."
        )
    if joint and math.prod(counts) > spaces.MOST_COMBINATIONS:
        raise ValueError(
            f"{name} masks {math.prod(counts):,} combinations of choices; only {spaces.MOST_COMBINATIONS:,} become "
            "one choice: hide the mask by mask=False."
        )

    def reset(key: jax.Array) -> Any:
        state, timestep = env.reset(key)
        return state, _shown(timestep.observation, mask, jnp.asarray(False))

    def step(inner: Any, action: jax.Array, key: jax.Array) -> convert.Step:
        del key  # theirs is in the state
        state, timestep = env.step(inner[0], jnp.stack(jnp.unravel_index(action, counts)) if joint else action)
        over = timestep.last() & (timestep.discount == 0)
        inner = state, _shown(timestep.observation, mask, over)
        return convert.Step(inner, timestep.reward, over, timestep.last())

    one = spaces.Discrete(math.prod(counts)) if joint else given
    return convert.Adapted(name, reset, step, lambda inner: inner[1], one, declared=declared, max_steps=max_steps)


def _shown(observation: Any, mask: bool, terminated: jax.Array) -> Any:
    """The observation with a mask of one axis, all 1 where the task has ended; without one if it is hidden."""
    members = convert.named(observation)
    if not isinstance(members, dict) or MASK not in members:
        return members
    legal = members.pop(MASK).astype(bool).reshape(-1)
    return members | {MASK: legal | terminated} if mask else members


def _with_limit(env: Any, limit: int) -> Any:
    """Copies an environment, and those inside of it, with another time limit."""
    env = copy.copy(env)
    vars(env).pop("observation_spec", None)  # cached: its largest number of steps is the limit
    if "_env" in vars(env):
        env._env = _with_limit(env._env, limit)
    else:
        env.time_limit = limit
    return env
