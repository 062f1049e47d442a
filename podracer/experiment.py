"""A run's parts, resolved from names, objects and defaults, and checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

import envs_jax
import envs_jax.testing
from podracer import agents, topology
from podracer import config as configs
from podracer.anakin import program as anakin
from podracer.nets import Network
from podracer.types import Agent, Environment
from podracer.version import __version__

AGENTS: dict[str, tuple[type, Callable[..., Agent]]] = {
    "ppo": (agents.PPOConfig, agents.ppo),
    "vtrace": (agents.VTraceConfig, agents.vtrace),
}
"""Agents that have a name: their config and what makes them."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Settings of a run, whatever its agent.

    Attributes:
      total_steps: real transitions to train for, over all environments and devices (per member of a population).
      seed: of everything random; member i of a population has seed + i.
      num_envs: environment lanes over all devices; the agent's `envs_per_device` times the devices if None.
      num_shards: logical shards; one per device if None. Equal shards give equal results on any number of devices.
      population: members that train side by side in one program.
      reset_pool: fresh environment states per shard and rollout to start episodes from, for environments whose reset
        is expensive; 0 resets exactly.
      arch: "anakin"; "auto" chooses.
      eval_every: steps between evaluations; a tenth of `total_steps` if None.
      eval_episodes: episodes of each evaluation.
      checkpoint_every: steps between checkpoints; a fifth of `total_steps` if None.
      keep_checkpoints: how many of the newest are kept.
    """

    total_steps: int = configs.field(500_000, low=1, high=2**50)
    seed: int = configs.field(0, low=0, high=2**31 - 1)
    num_envs: int | None = configs.field(None, low=1)
    num_shards: int | None = configs.field(None, low=1)
    population: int = configs.field(1, low=1)
    reset_pool: int = configs.field(0, low=0)
    arch: Literal["auto", "anakin"] = "auto"
    eval_every: int | None = configs.field(None, low=1)
    eval_episodes: int = configs.field(128, low=1)
    checkpoint_every: int | None = configs.field(None, low=1)
    keep_checkpoints: int = configs.field(3, low=1)

    def __post_init__(self):
        configs.check(self)


def make_agent(agent: str, environment: Environment, config: Any = None, network: Network | None = None) -> Agent:
    """An agent by name for an environment; `config` is its config dataclass or a mapping of fields.

    Raises:
      ValueError: for an unknown name (with the nearest ones), or settings that do not fit.
    """
    if agent not in AGENTS:
        raise ValueError(f"unknown agent {agent!r}; {configs.suggest(agent, AGENTS)}")
    cls, make = AGENTS[agent]
    if config is None or isinstance(config, Mapping):
        config = configs.from_json(cls, config or {})
    if not isinstance(config, cls):
        raise ValueError(f"agent {agent!r} takes a {cls.__name__}, not {type(config).__name__}.")
    return make(environment.spec, config, network)


def stored_options(name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The `env_options` of a description, which JSON has turned into lists and dicts."""
    hints = typing.get_type_hints(envs_jax.options(name))
    return {field: _revive(value, hints[field]) for field, value in stored.items()}


def _revive(value: Any, expected: Any) -> Any:
    if isinstance(value, list):
        (item, *_) = typing.get_args(expected)
        return tuple(_revive(v, item) for v in value)
    if isinstance(value, Mapping) and dataclasses.is_dataclass(expected):
        hints = typing.get_type_hints(expected)
        return expected(**{name: _revive(v, hints[name]) for name, v in value.items()})  # type: ignore[operator]
    return value


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run's parts, resolved from names and defaults."""

    agent: Agent
    environment: Environment
    run: RunConfig
    layout: topology.Topology
    program: anakin.Program
    hyper: dict[str, np.ndarray]
    description: dict[str, Any]

    @property
    def seeds(self) -> np.ndarray:
        return self.run.seed + np.arange(self.run.population, dtype=np.int32)


def resolve(
    agent: str | Agent,
    environment: str | Environment,
    run: RunConfig,
    *,
    config: Any = None,
    env_options: Mapping[str, Any] | None = None,
    network: Network | None = None,
    hyper: Mapping[str, Any] | None = None,
    devices: list[Any] | None = None,
) -> Experiment:
    own = [name for name, part in (("agent", agent), ("environment", environment)) if not isinstance(part, str)]
    own += ["network"] if network is not None else []
    env_name, options = "", {}
    if isinstance(environment, str):
        env_name, environment = environment, envs_jax.make(environment, **(env_options or {}))
        options = configs.to_json(envs_jax.options(env_name)(**(env_options or {})))
    elif env_options:
        raise ValueError("env_options belong to an environment given by name; set them on your environment instead.")
    envs_jax.testing.validate_protocol(environment)
    if isinstance(agent, str):
        agent = make_agent(agent, environment, config, network)
    elif not isinstance(agent, Agent):
        raise TypeError(
            f"agent is a {type(agent).__name__}; give a name ({', '.join(AGENTS)}) or a podracer.types.Agent, such as "
            "podracer.agents.ppo(environment.spec, podracer.agents.PPOConfig())."
        )
    elif config is not None or network is not None:
        raise ValueError("config and network belong to an agent given by name; pass them to the agent you made.")
    hypers = configs.population_hyper(agent.config, run.population, hyper)
    layout = topology.make(
        num_envs=run.num_envs,
        envs_per_device=agent.config.envs_per_device,
        num_shards=run.num_shards,
        population=run.population,
        devices=devices,
    )
    run = dataclasses.replace(
        run,
        num_envs=layout.num_envs,
        num_shards=layout.num_shards,
        arch="anakin",
        eval_every=run.eval_every or max(1, run.total_steps // 10),
        checkpoint_every=run.checkpoint_every or max(1, run.total_steps // 5),
    )
    settings = anakin.Settings(agent.config.rollout_length, run.reset_pool)
    description = {
        "podracer": __version__,
        "agent": agent.name,
        "agent_config": configs.to_json(agent.config),
        "env": env_name or environment.spec.name,
        "env_options": options,
        "own": own,
        "hyper": configs.to_json({name: np.asarray(value).tolist() for name, value in (hyper or {}).items()}),
        "run": configs.to_json(run),
    }
    return Experiment(
        agent, environment, run, layout, anakin.make(agent, environment, layout, settings), hypers, description
    )
