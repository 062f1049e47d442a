"""Settings to begin with, by name: what differs from the defaults of an agent for a kind of task.

`atari` is what the agent's paper says of Atari (podracer/atari). `classic` is for tasks of classic control that
defaults do not solve, each with a measured row in README.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from podracer import config as configs
from podracer import environments

NAMES = ("atari", "classic")


class Preset(NamedTuple):
    """What differs from the defaults.

    Attributes:
      agent: fields of the agent's config.
      run: fields of `RunConfig`.
      env: fields of the environment's options.
    """

    agent: Mapping[str, Any] = {}
    run: Mapping[str, Any] = {}
    env: Mapping[str, Any] = {}


CLASSIC: dict[tuple[str, str], Preset] = {
    ("ppo", "Acrobot"): Preset(
        {
            "rollout_length": 256,
            "gae_lambda": 0.94,
            "learning_rate": 3e-4,
            "entropy_cost": 0.0,
            "normalize_observations": True,
        },
        {"num_envs": 16, "total_steps": 500_000},
    ),
    ("ppo", "MountainCar"): Preset(
        {"rollout_length": 128, "gae_lambda": 0.98, "entropy_cost": 0.0, "normalize_observations": True},
        {"num_envs": 16, "total_steps": 1_000_000},
    ),
    ("ppo", "LunarLander"): Preset(
        {"rollout_length": 1024, "num_minibatches": 64, "discount": 0.999, "gae_lambda": 0.98, "learning_rate": 3e-4},
        {"num_envs": 16, "total_steps": 1_000_000},
    ),
    ("ppo", "Pendulum"): Preset(
        {"rollout_length": 256, "num_epochs": 10, "discount": 0.9, "entropy_cost": 0.0},
        {"num_envs": 16, "total_steps": 500_000},
    ),
}
"""By agent and task, whose version and kind of environment (`envpool:`, `gymnasium:` or our own) do not matter."""


def find(name: str, agent: str, environment: str) -> Preset:
    """A preset by name for an agent by name and an environment by name.

    Raises:
      ValueError: where there is none.
    """
    if name == "atari":
        return _atari(agent, environment)
    if name != "classic":
        raise ValueError(f"preset={name!r}: unknown; {configs.suggest(name, NAMES)}")
    task = environment.rpartition(":")[2].partition("-v")[0].replace("_", "")
    for (whose, known), preset in CLASSIC.items():
        if whose == agent and known.lower() == task.lower():
            return preset
    there = ", ".join(f"{whose} on {known}" for whose, known in CLASSIC)
    raise ValueError(f"preset='classic': there is none for {agent} on {environment}; there are {there}.")


def _atari(agent: str, environment: str) -> Preset:
    if environment.startswith("envpool:"):
        from podracer import atari  # which needs Gymnasium

        config, options = atari.preset(agent)
        if type(options) is environments.options(environment):
            return Preset(_changes(config), {}, _changes(options))
    raise ValueError(f"preset='atari': {environment} is not a game of Atari, such as envpool:Pong-v5.")


def _changes(config: Any) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    defaults = type(config)()
    return {name: value for name, value in vars(config).items() if value != getattr(defaults, name)}
