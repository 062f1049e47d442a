"""A run's parts, resolved from names, objects and defaults, and checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import pathlib
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import envs_jax
from podracer import configs, environments, topology
from podracer.agents.registry import AGENTS, make_agent
from podracer.anakin.driver import Anakin
from podracer.environments import gate, imports, task_lists, tasks, wrapping
from podracer.environments.from_jax import SteppedEnvironments
from podracer.environments.host_tasks import HostTasks
from podracer.learning.optimizer import Own, described
from podracer.nets import Network
from podracer.population import config as population
from podracer.population.config import PBT
from podracer.run.config import SEBULBA, RunConfig
from podracer.run.driver import Driver
from podracer.run.record import Experiment
from podracer.sebulba.driver import Sebulba
from podracer.training import choices
from podracer.types import Agent, Environment, EnvSpec, HostEnvironments
from podracer.version import __version__

MAX_UPDATES = 2**31 - 1
"""The most updates of a run: `LearnerState.num_updates` is an int32. Steps (`learning.counter`) may be more."""


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


def resolve(
    agent: str | Agent,
    environment: Any,
    run: RunConfig,
    *,
    config: Any = None,
    env_options: Mapping[str, Any] | None = None,
    wrap: wrapping.Wrap = (),
    network: Network | None = None,
    optimizer: Own | None = None,
    hyper: Mapping[str, Any] | None = None,
    devices: list[Any] | None = None,
    remote: RemotelyStepped | None = None,
    pbt: PBT | None = None,
    pbt_dir: pathlib.Path | None = None,
    is_new: bool = True,
) -> Experiment:
    """A run's parts; `remote` makes environments that others step of those that this process would.

    A run that is not new may have settings of Sebulba without effect, which earlier versions let pass.

    Raises:
      ValueError: for what makes no sense.
      TypeError: for what is none of the things that were expected.
    """
    environment = task_lists.text(environment)
    path = imports.import_path(environment)
    own = [name for name, part in (("agent", agent), ("environment", environment)) if not isinstance(part, str)]
    own += [name for name, part in (("network", network), ("optimizer", optimizer)) if part is not None]
    wrap = wrapping.texts(wrap)
    env_name, environment, options = _environment(environment, env_options, wrap, run, remote)
    agent = _agent(agent, environment, config, network, optimizer)
    hypers = configs.population_hyper(agent.config, run.population, hyper, agent.hyper)
    on_host = isinstance(environment, HostEnvironments)
    run = dataclasses.replace(
        run,
        arch="sebulba" if on_host or run.arch == "sebulba" else "anakin",
        eval_episodes=run.eval_episodes or (32 if on_host else 128),
        eval_every=run.eval_every or max(1, run.total_steps // 10),
    )
    _check_members(run, pbt, pbt_dir, getattr(environment.spec, "tasks", ()))
    if run.arch == "anakin":
        if is_new:
            configs.require_defaults(run, SEBULBA, "has no effect without arch='sebulba'")
        driver, resolved = _anakin(agent, environment, run, hypers, devices, pbt)
    else:
        driver, resolved = _sebulba(agent, environment, run, hypers, devices)
    run = dataclasses.replace(run, **resolved)
    if pbt and pbt_dir:
        rows = run.num_envs * agent.config.rollout_length  # type: ignore[operator]
        population.check(pbt, agent, environment.spec, None, rows)
    if pbt:
        population.check_start(pbt, hypers)
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
    if wrap:
        description["wrap"] = wrap
    if optimizer is not None:
        of_member = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), driver.like().learner.opt_state)
        description["optimizer_state"] = described(of_member)
    if path:
        description["imports"] = {"environment": path}
    if pbt:
        description["pbt"] = configs.to_json(pbt)
    if pbt_dir:
        description["pbt_dir"] = str(pbt_dir)
    return Experiment(agent, environment, run, driver, hypers, description, network, pbt, pbt_dir)


def _check_members(run: RunConfig, pbt: PBT | None, pbt_dir: pathlib.Path | None, tasks: Sequence[str]) -> None:
    """Checks where the members of population based training are: in one program, or runs of their own.

    Raises:
      ValueError: for both, or neither, and for several tasks in a directory.
    """
    if pbt_dir and not pbt:
        raise ValueError("pbt_dir needs pbt: interval and score=(low, high) at least, and rule='impala'.")
    if pbt_dir and run.arch == "anakin":
        raise ValueError("pbt_dir is for runs of Sebulba; members of one program (population=) need no directory.")
    if pbt and not pbt_dir and run.arch == "sebulba":
        raise ValueError(
            "pbt: only Anakin has populations in one program. Start several runs with a directory in common, pbt_dir=, "
            "or use an environment in pure JAX."
        )
    if pbt_dir and jax.process_count() > 1:
        raise ValueError("pbt_dir: a member is a run of one process; leave topology out.")
    if pbt_dir and len(tasks) > 1:
        raise ValueError(
            f"pbt_dir: runs with a directory compare the return of one task, not of {len(tasks)}; use one "
            "environment, or tasks in pure JAX with population= in place of pbt_dir."
        )


def _environment(
    environment: Any,
    env_options: Mapping[str, Any] | None,
    wrap: list[str],
    run: RunConfig,
    remote: RemotelyStepped | None,
) -> tuple[str, Any, Any]:
    """Makes or adopts the environment; returns its name ("" for an object), itself wrapped, and its options for a file.

    Raises:
      ValueError: for a name or options that there are not, or an architecture that cannot have it.
      TypeError: for an object that breaks the protocol.
    """
    from envs_jax import testing  # which imports podracer

    name, options = "", {}
    if (things := task_lists.split(environment)) is not None:
        # Of the options, those that were given: tasks may have other defaults of one name.
        name, options = environment if isinstance(environment, str) else "", configs.to_json(dict(env_options or {}))
        environment, wrap = task_lists.make(things, env_options or {}, wrap, testing.validate_protocol), []
    elif isinstance(environment, str):
        name, unknown_here = environment, remote and environment.startswith(environments.REMOTE)
        environment = None if unknown_here else environments.make(environment, **(env_options or {}))
        options = configs.to_json(environments.options(name)(**(env_options or {})))
    else:
        environment = environments.adopt(environment, env_options)
        options = configs.to_json(dict(env_options or {}))
    if wrap and environment is not None and not isinstance(environment, HostEnvironments | tasks.Tasks):
        testing.validate_protocol(environment)  # a mistake is its own, and not that of a wrapper
    environment = wrapping.wrapped(environment, wrap)
    if remote and isinstance(environment, HostTasks | tasks.Tasks):
        raise ValueError("remote: workers step one environment, not several tasks; leave listen out.")
    if remote:
        environment = remote(name or environment.spec.name, environment, options if environment else None, run)
    if not isinstance(environment, HostEnvironments):
        if name not in envs_jax.names():  # those keep it, and tracing takes a while
            for task in tasks.parts(environment):
                testing.validate_protocol(task)
    elif run.arch == "anakin":
        raise ValueError(f"arch='anakin' needs a pure-JAX environment, which {environment.spec.name} is not.")
    else:
        gate.check_dtypes(environment.spec)
    return name, environment, options


def _agent(agent: Any, environment: Any, config: Any, network: Network | None, optimizer: Any) -> Agent:
    """Makes the agent if it is a name.

    Raises:
      TypeError: for neither a name nor an agent.
      ValueError: for settings of an agent that is made already, or that make no sense.
    """
    if isinstance(agent, str):
        return make_agent(agent, environment, config, network, optimizer)
    if not isinstance(agent, Agent):
        raise TypeError(
            f"agent is a {type(agent).__name__}; give a name ({', '.join(AGENTS)}) or a podracer.types.Agent, such as "
            "podracer.agents.ppo.make(environment.spec, podracer.agents.PPOConfig())."
        )
    if any(part is not None for part in (config, network, optimizer)):
        raise ValueError(
            "config, network and optimizer belong to an agent given by name; pass them to the agent you made."
        )
    _check_spec(agent.spec, environment.spec)
    return agent


def _check_spec(made_for: EnvSpec | None, here: EnvSpec) -> None:
    """Checks that an agent that is made already was made for an environment like this one.

    Raises:
      ValueError: where observations, actions, tasks or the number of players differ.
    """
    if made_for is None:
        return
    for name in ("observation_space", "action_space", "tasks", "num_players"):
        there, found = getattr(made_for, name), getattr(here, name)
        if there != found:
            raise ValueError(
                f"agent: it was made for {made_for.name}, whose {name} is {there}, and {here.name} has {found}; make "
                "it with the spec of the environment that it is trained in."
            )


def num_updates(agent: Agent, run: RunConfig) -> float:
    """Counts the updates of all steps of a run, as if its replay were filled from the beginning."""
    replay, rows = agent.replay, run.total_steps
    if replay is None or replay.fraction:
        return rows * run.updates_per_batch / (run.num_envs * agent.config.rollout_length)  # type: ignore[operator]
    sequences = rows if replay.starts == "rows" else rows / agent.config.rollout_length
    return sequences * replay.ratio / replay.batch_size


def _check_updates(agent: Agent, run: RunConfig) -> None:
    """Refuses a run of more updates than their counter holds, which would go on from a negative number."""
    updates = num_updates(agent, run)
    if updates + run.final_updates > MAX_UPDATES:
        raise ValueError(
            f"total_steps={run.total_steps:,} are {updates:,.0f} updates, and their counter holds {MAX_UPDATES:,}: use "
            "more num_envs, a longer rollout or larger batches, or fewer total_steps."
        )


def _anakin(
    agent: Agent,
    environment: Environment,
    run: RunConfig,
    hyper: dict[str, np.ndarray],
    devices: list[Any] | None,
    pbt: PBT | None,
) -> tuple[Driver, dict[str, int]]:
    layout = topology.make(
        num_envs=run.num_envs,
        envs_per_device=agent.config.envs_per_device,
        num_shards=run.num_shards,
        population=run.population,
        devices=devices,
    )
    tasks.check_lanes(environment.spec, layout.num_envs, layout.envs_per_shard, "a shard")
    if pbt:
        rows = layout.num_envs * agent.config.rollout_length
        population.check(pbt, agent, environment.spec, run.population, rows)
    driver = Anakin(
        agent,
        environment,
        layout,
        reset_pool=run.reset_pool,
        seeds=run.seeds,
        hyper=hyper,
        lockstep=run.mode == "lockstep",
        final_updates=run.final_updates,
        pbt=pbt,
    )
    return driver, {"num_envs": layout.num_envs, "num_shards": layout.num_shards}


def _sebulba(
    agent: Agent,
    environment: Environment | HostEnvironments,
    run: RunConfig,
    hyper: dict[str, np.ndarray],
    devices: list[Any] | None,
) -> tuple[Driver, dict[str, int]]:
    for name, plain in (("population", 1), ("member_seeds", ()), ("reset_pool", 0)):
        if (getattr(run, name) or plain) != plain:
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
    parts = layout.shards_per_replica * run.updates_per_batch
    where = "an actor" if parts == 1 else "a shard of an actor"
    tasks.check_lanes(environment.spec, layout.num_envs, layout.envs_per_actor // parts, where)
    driver = Sebulba(
        agent,
        environment,
        layout,
        run,
        hyper={name: float(value[0]) for name, value in hyper.items()},
    )
    return driver, {"num_envs": layout.num_envs, "num_shards": layout.num_shards, "replicas": layout.replicas}
