"""Environments of MuJoCo Playground (Zakka et al. 2025, https://github.com/google-deepmind/mujoco_playground).

By name, `playground:CheetahRun`; as an object, `podracer.from_playground(env)`. Physics is MuJoCo's in JAX (MJX), where
Playground's own default is Warp, for CUDA alone. Every episode begins in a state drawn anew, where Playground's
training returns each lane to its first one. Robots that are not of the control suite are downloaded once, by git.

Two tasks of manipulation end at their `episode_length` as if they were over, so it is set one step later, and our limit
comes first.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import Any

import jax

from envs_jax.adapters import brax, convert
from podracer import configs


@dataclasses.dataclass(frozen=True)
class PlaygroundOptions:
    """Options of environments of Playground.

    Attributes:
      config: changes of the task's configuration, each `name=value`, such as `ctrl_dt=0.02` or
        `episode_length=500`; `impl=warp` computes the physics by Warp, on CUDA.
      max_steps: the time limit, a truncation; by default the configuration's `episode_length`.
    """

    config: tuple[str, ...] = ()
    max_steps: int | None = configs.field(None, low=1)

    def __post_init__(self):
        configs.check(self)
        for text in self.config:
            configs.assignment(text, "config")


def tasks() -> list[str]:
    """Returns the names of Playground's environments."""
    return list(importlib.import_module("mujoco_playground").registry.ALL_ENVS)


def make(name: str, options: PlaygroundOptions) -> convert.Adapted:
    """Builds an environment of Playground.

    Raises:
      ValueError: for an unknown name, a configuration that the task does not have, or an environment that cannot be
        made here.
    """
    convert.check_known("playground", name, tasks())
    registry = importlib.import_module("mujoco_playground").registry
    changes = {"impl": "jax"} | dict(map(configs.assignment, options.config))
    _check_physics(f"playground:{name}", changes["impl"])
    with convert.making(f"playground:{name}"):
        env = registry.load(name, config_overrides=changes)
    return from_playground(env, max_steps=options.max_steps, name=f"playground:{name}")


def from_playground(env: Any, *, max_steps: int | None = None, name: str = "") -> convert.Adapted:
    """Adapts an environment with Playground's interface (`MjxEnv`), as `from_brax` does.

    Args:
      env: the environment, such as `registry.load("CheetahRun", config_overrides={"impl": "jax"})`, without the
        wrappers of training.
      max_steps: the time limit, a truncation; by default its configuration's `episode_length`, if it has one.
      name: for run directories and messages; by default the class's.

    Raises:
      ValueError: for a wrapper of training, Warp without CUDA, or observations that are not supported.
    """
    name = name or type(env).__name__
    convert.check_bare(env, name)
    physics = getattr(getattr(env, "mjx_model", None), "impl", "jax")
    _check_physics(name, getattr(physics, "value", physics))
    limit = getattr(env, "_config", {}).get("episode_length")
    max_steps = limit if max_steps is None else max_steps
    if limit is not None and max_steps is not None and limit <= max_steps:
        env = _with_limit(env, max_steps + 1)
    return brax.from_brax(env, max_steps=max_steps, name=name)


def _with_limit(env: Any, limit: int) -> Any:
    """Copies an environment, and those inside of it, with another time limit."""
    env = copy.copy(env)
    if "env" in vars(env):
        env.env = _with_limit(env.env, limit)
    else:
        env._config = copy.deepcopy(env._config)
        env._config["episode_length"] = limit
    return env


def _check_physics(name: str, impl: str) -> None:
    if str(impl).lower() == "warp" and jax.default_backend() not in ("gpu", "cuda"):
        raise ValueError(
            f'{name}: impl="warp" runs on CUDA alone, and this is {jax.default_backend()}; give impl="jax" (by name it '
            'is the default, for an object config_overrides={"impl": "jax"}).'
        )
