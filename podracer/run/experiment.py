"""A run's parts, resolved from names, objects and defaults, and checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from podracer import agents, environments, gate, topology
from podracer import config as configs
from podracer.anakin.driver import Anakin
from podracer.driver import Driver
from podracer.environments.stepped import SteppedEnvironments
from podracer.nets import Network
from podracer.run import choices, imports
from podracer.search import Planner
from podracer.sebulba.actor import Mode
from podracer.sebulba.driver import Sebulba
from podracer.types import Agent, Environment, HostEnvironments
from podracer.version import __version__

AGENTS: dict[str, tuple[type, Callable[..., Agent]]] = {
    "alphazero": (agents.AlphaZeroConfig, agents.alphazero.make),
    "dqn": (agents.DQNConfig, agents.dqn.make),
    "efficientzero": (agents.EfficientZeroConfig, agents.efficientzero.make),
    "muzero": (agents.MuZeroConfig, agents.muzero.make),
    "ppo": (agents.PPOConfig, agents.ppo.make),
    "pqn": (agents.PQNConfig, agents.pqn.make),
    "r2d2": (agents.R2D2Config, agents.r2d2.make),
    "vtrace": (agents.VTraceConfig, agents.vtrace.make),
}
"""Agents that have a name: their config and what makes them."""

MAX_UPDATES = 2**31 - 1
"""The most updates of a run: `LearnerState.num_updates` is an int32. Steps (`learning.counter`) may be more."""

PLANNERS: dict[str, Callable[..., Planner]] = {
    "alphazero": agents.alphazero.planner,
    "efficientzero": agents.efficientzero.planner,
    "muzero": agents.muzero.planner,
}
"""How those search that do."""


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
      arch: "anakin", for pure-JAX environments, or "sebulba", for all; "auto" chooses by the environment.
      mode: in which order acting and learning go (docs/glossary.md). Of Sebulba: "async" learns from rollouts as they
        come; "lockstep" and "serial" keep a fixed order, bit for bit: in "lockstep" rollouts are acted while the ones
        before are learnt from, in "serial" afterwards. Anakin is serial by itself; with "lockstep" agents that replay
        learn as late as in Sebulba.
      replicas: of Sebulba; parts that each have actor threads, environments and shards of their own, whose rollouts are
        learnt from together. One per process if None; equal replicas give equal results on any number of processes.
      actor_devices: of Sebulba; a quarter of the devices of a process if None.
      actor_threads: of Sebulba, per actor device.
      reanalyser_devices: of Sebulba, with agents that reanalyse; devices of a process that hold the replay and
        reanalyse; 0 leaves that to the learners.
      prepare_ahead: with these; whether they work on the next group of updates while this one is learnt from.
      updates_per_batch: of Sebulba; parts of each batch that are learnt from in turn.
      queue_capacity: of Sebulba; rollouts of each actor thread that may wait for the learner.
      env_timeout: of Sebulba; seconds that environments may take to answer, in evaluations too.
      env_restarts: of Sebulba; how often environments that do not answer are replaced, as a break in their streams,
        before the run ends with an error; and as often, an evaluation is begun again.
      updates_per_call: of Sebulba, with agents that replay; updates that are done before the learner looks at signals
        again, a tenth of a second of them if None.
      final_updates: with agents that replay; updates behind the last step, in which nobody acts.
      replay_memory: of Sebulba; "host" keeps a replay that is too large for the learner devices in the host's memory.
      eval_every: steps between evaluations; a tenth of `total_steps` if None.
      eval_episodes: episodes of each evaluation; 128, or 32 on the host, if None.
      checkpoint_every: steps between checkpoints; a fifth of `total_steps` if None.
      checkpoint_minutes: a run that dies loses no more than what it did in this time, whatever `checkpoint_every` is.
      checkpoint_replay: whether checkpoints hold the replay of agents that have one; without it they are small, and a
        run that goes on fills a new one before it learns.
      keep_checkpoints: how many of the newest are kept.
    """

    total_steps: int = configs.field(500_000, low=1, high=2**50)
    seed: int = configs.field(0, low=0, high=2**31 - 1)
    num_envs: int | None = configs.field(None, low=1)
    num_shards: int | None = configs.field(None, low=1)
    population: int = configs.field(1, low=1)
    reset_pool: int = configs.field(0, low=0)
    arch: Literal["auto", "anakin", "sebulba"] = "auto"
    mode: Mode = "async"
    replicas: int | None = configs.field(None, low=1)
    actor_devices: int | None = configs.field(None, low=1)
    actor_threads: int = configs.field(1, low=1)
    reanalyser_devices: int = configs.field(0, low=0)
    prepare_ahead: bool = True
    updates_per_batch: int = configs.field(1, low=1)
    queue_capacity: int = configs.field(1, low=1)
    env_timeout: float = configs.field(60.0, low=0.1)
    env_restarts: int = configs.field(0, low=0)
    updates_per_call: int | None = configs.field(None, low=1)
    final_updates: int = configs.field(0, low=0)
    replay_memory: Literal["device", "host"] = "device"
    eval_every: int | None = configs.field(None, low=1)
    eval_episodes: int | None = configs.field(None, low=1)
    checkpoint_every: int | None = configs.field(None, low=1)
    checkpoint_minutes: float = configs.field(15.0, low=0.001)
    checkpoint_replay: bool = True
    keep_checkpoints: int = configs.field(3, low=1)

    def __post_init__(self):
        configs.check(self)


def make_agent(
    agent: str, environment: Environment | HostEnvironments, config: Any = None, network: Network | None = None
) -> Agent:
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
    return make(_rules(agent, environment), config, network)


def make_planner(agent: Agent, environment: Environment | HostEnvironments, network: Any = None) -> Planner:
    """How an agent that was made by name searches.

    Raises:
      ValueError: where it does not.
    """
    if agent.name not in PLANNERS:
        raise ValueError(f"{agent.name} does not search; {', '.join([*PLANNERS][:-1])} and {[*PLANNERS][-1]} do.")
    return PLANNERS[agent.name](_rules(agent.name, environment), agent.config, network)


def _rules(agent: str, environment: Environment | HostEnvironments) -> Any:
    """What an agent has to know of an environment: AlphaZero's model is the environment itself."""
    return environment if agent == "alphazero" else environment.spec


def stored_options(name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The `env_options` of a description, which JSON has turned into lists and dicts."""
    hints = typing.get_type_hints(environments.options(name))
    return {field: _revive(value, hints[field]) for field, value in stored.items()}


def _revive(value: Any, expected: Any) -> Any:
    if isinstance(value, list):
        (item, *_) = typing.get_args(expected)
        return tuple(_revive(v, item) for v in value)
    if isinstance(value, Mapping) and dataclasses.is_dataclass(expected):
        hints = typing.get_type_hints(expected)
        return expected(**{name: _revive(v, hints[name]) for name, v in value.items()})  # type: ignore[operator]
    return value


RemotelyStepped = Callable[[str, Any, dict[str, Any] | None, RunConfig], HostEnvironments]
"""`(name, environment as it is made here or None, its options, run) -> HostEnvironments` that others step."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run's parts, resolved from names and defaults."""

    agent: Agent
    environment: Environment | HostEnvironments
    run: RunConfig
    driver: Driver
    hyper: dict[str, np.ndarray]
    description: dict[str, Any]
    network: Any = None

    @property
    def seeds(self) -> np.ndarray:
        return self.run.seed + np.arange(self.run.population, dtype=np.int32)


def resolve(
    agent: str | Agent,
    environment: Any,
    run: RunConfig,
    *,
    config: Any = None,
    env_options: Mapping[str, Any] | None = None,
    network: Network | None = None,
    hyper: Mapping[str, Any] | None = None,
    devices: list[Any] | None = None,
    remote: RemotelyStepped | None = None,
) -> Experiment:
    """A run's parts; `remote` makes environments that others step of those that this process would.

    Raises:
      ValueError: for what makes no sense.
      TypeError: for what is none of the things that were expected.
    """
    from envs_jax import testing  # which imports podracer

    path = imports.import_path(environment)
    own = [name for name, part in (("agent", agent), ("environment", environment)) if not isinstance(part, str)]
    own += ["network"] if network is not None else []
    env_name, options = "", {}
    if isinstance(environment, str):
        env_name, unknown_here = environment, remote and environment.startswith(environments.REMOTE)
        environment = None if unknown_here else environments.make(environment, **(env_options or {}))
        options = configs.to_json(environments.options(env_name)(**(env_options or {})))
    else:
        environment = environments.adopt(environment, env_options)
        options = configs.to_json(dict(env_options or {}))
    if remote:
        environment = remote(env_name or environment.spec.name, environment, options if environment else None, run)
    on_host = isinstance(environment, HostEnvironments)
    if on_host and run.arch == "anakin":
        raise ValueError(f"arch='anakin' needs a pure-JAX environment, which {environment.spec.name} is not.")
    if not on_host:
        testing.validate_protocol(environment)
    else:
        gate.check_dtypes(environment.spec)
    if isinstance(agent, str):
        agent = make_agent(agent, environment, config, network)
    elif not isinstance(agent, Agent):
        raise TypeError(
            f"agent is a {type(agent).__name__}; give a name ({', '.join(AGENTS)}) or a podracer.types.Agent, such as "
            "podracer.agents.ppo.make(environment.spec, podracer.agents.PPOConfig())."
        )
    elif config is not None or network is not None:
        raise ValueError("config and network belong to an agent given by name; pass them to the agent you made.")
    hypers = configs.population_hyper(agent.config, run.population, hyper)
    run = dataclasses.replace(
        run,
        arch="sebulba" if on_host or run.arch == "sebulba" else "anakin",
        eval_episodes=run.eval_episodes or (32 if on_host else 128),
        eval_every=run.eval_every or max(1, run.total_steps // 10),
        checkpoint_every=run.checkpoint_every or max(1, run.total_steps // 5),
    )
    make = _sebulba if run.arch == "sebulba" else _anakin
    driver, resolved = make(agent, environment, run, hypers, devices)  # type: ignore[arg-type]
    run = dataclasses.replace(run, **resolved)
    _check_updates(agent, run)
    description = {
        "podracer": __version__,
        "agent": agent.name,
        "agent_config": configs.to_json(agent.config),
        "env": env_name or environment.spec.name,
        "env_options": options,
        "own": own,
        "hyper": configs.to_json({name: np.asarray(value).tolist() for name, value in (hyper or {}).items()}),
        "run": configs.to_json(run),
        "chosen": choices.of(agent, environment.spec, run.arch, network is not None),
    }
    if path:
        description["imports"] = {"environment": path}
    return Experiment(agent, environment, run, driver, hypers, description, network)


def _check_updates(agent: Agent, run: RunConfig) -> None:
    """Refuses a run of more updates than their counter holds, which would go on from a negative number."""
    replay, rows = agent.replay, run.total_steps
    if replay is None or replay.fraction:
        updates = rows * run.updates_per_batch / (run.num_envs * agent.config.rollout_length)  # type: ignore[operator]
    else:
        sequences = rows if replay.starts == "rows" else rows / agent.config.rollout_length
        updates = sequences * replay.ratio / replay.batch_size
    if updates + run.final_updates > MAX_UPDATES:
        raise ValueError(
            f"total_steps={run.total_steps:,} are {updates:,.0f} updates, and their counter holds {MAX_UPDATES:,}: use "
            "more num_envs, a longer rollout or larger batches, or fewer total_steps."
        )


def _anakin(
    agent: Agent, environment: Environment, run: RunConfig, hyper: dict[str, np.ndarray], devices: list[Any] | None
) -> tuple[Driver, dict[str, int]]:
    if run.replicas is not None:
        raise ValueError(f"replicas={run.replicas}: only Sebulba has them; leave it out, or add arch='sebulba'.")
    if run.reanalyser_devices:
        raise ValueError(f"reanalyser_devices={run.reanalyser_devices}: only Sebulba has them; add arch='sebulba'.")
    if run.replay_memory != "device":
        raise ValueError(f"replay_memory={run.replay_memory!r}: only Sebulba has it; add arch='sebulba'.")
    if run.updates_per_call is not None:
        raise ValueError(
            f"updates_per_call={run.updates_per_call}: only Sebulba has it, whose learner looks at signals in between; "
            "leave it out, or add arch='sebulba'."
        )
    layout = topology.make(
        num_envs=run.num_envs,
        envs_per_device=agent.config.envs_per_device,
        num_shards=run.num_shards,
        population=run.population,
        devices=devices,
    )
    seeds = run.seed + np.arange(run.population, dtype=np.int32)
    driver = Anakin(
        agent,
        environment,
        layout,
        reset_pool=run.reset_pool,
        seeds=seeds,
        hyper=hyper,
        lockstep=run.mode == "lockstep",
        final_updates=run.final_updates,
    )
    return driver, {"num_envs": layout.num_envs, "num_shards": layout.num_shards}


def _sebulba(
    agent: Agent,
    environment: Environment | HostEnvironments,
    run: RunConfig,
    hyper: dict[str, np.ndarray],
    devices: list[Any] | None,
) -> tuple[Driver, dict[str, int]]:
    for name, plain in (("population", 1), ("reset_pool", 0)):
        if getattr(run, name) != plain:
            seeds = "; several seeds or values (hyper) are several runs (--seeds 0 1 2)" if name == "population" else ""
            raise ValueError(
                f"{name}={getattr(run, name)}: only Anakin has it; use {plain} with host environments{seeds}."
            )
    if not isinstance(environment, HostEnvironments):
        environment = SteppedEnvironments(environment)
    layout = topology.make_host(
        num_envs=run.num_envs,
        envs_per_actor=agent.config.envs_per_device,
        num_shards=run.num_shards,
        replicas=run.replicas,
        actor_devices=run.actor_devices,
        actor_threads=run.actor_threads,
        reanalyser_devices=run.reanalyser_devices,
        updates_per_batch=run.updates_per_batch,
        devices=devices or jax.local_devices(),
    )
    driver = Sebulba(
        agent,
        environment,
        layout,
        run,
        hyper={name: float(value[0]) for name, value in hyper.items()},
    )
    return driver, {"num_envs": layout.num_envs, "num_shards": layout.num_shards, "replicas": layout.replicas}
