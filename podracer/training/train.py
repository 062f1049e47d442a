"""Entry points: `train`, `resume` and `load`."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import signal
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from podracer import configs, errors
from podracer.environments import imports, task_lists, tasks, wrapping
from podracer.errors import Interrupted
from podracer.learning.optimizer import Own
from podracer.nets import Network
from podracer.population import config as population
from podracer.population.config import PBT
from podracer.remote.settings import Remote
from podracer.result.result import Result
from podracer.run import checkpoint, metrics, rundir
from podracer.run.best import BEST
from podracer.run.config import RunConfig
from podracer.run.driver import memory_explained, only_learner, position
from podracer.run.record import Experiment
from podracer.system import console, files
from podracer.system.lock import RunLock
from podracer.system.spans import span
from podracer.system.stopping import StopSignal
from podracer.topology import executables
from podracer.topology.processes import ALONE, Processes
from podracer.training import caches, notes, presets, shared, summary
from podracer.training.resolve import resolve, stored_options
from podracer.training.session import Session
from podracer.training.transfer import transferred
from podracer.training.workers import Workers
from podracer.types import Agent, Environment, HostEnvironments

if TYPE_CHECKING:
    from podracer.pod.settings import Pod

    Topology = Literal["local", "pod"] | Pod


def train(
    agent: str | Agent,
    environment: str | Environment | HostEnvironments | Any,
    *,
    run_dir: str | pathlib.Path | None = None,
    resume: bool = False,
    config: Any = None,
    env_options: Mapping[str, Any] | None = None,
    wrap: wrapping.Wrap = (),
    network: Network | None = None,
    optimizer: Own | None = None,
    hyper: Mapping[str, Any] | None = None,
    preset: str | None = None,
    protocol: str | None = None,
    init_from: Result | str | pathlib.Path | None = None,
    trust: bool = False,
    check: bool = True,
    log: metrics.LogCallback | None = None,
    progress: bool = True,
    topology: Topology = "local",
    remote: Remote | Mapping[str, Any] | None = None,
    pbt: PBT | Mapping[str, Any] | None = None,
    pbt_dir: str | pathlib.Path | None = None,
    **run_settings: Any,
) -> Result:
    """Trains an agent and returns it with its history.

        result = podracer.train("ppo", "cartpole", total_steps=500_000, seed=0)

    Args:
      agent: a name, or an `Agent`.
      environment: a name; a `podracer.types.Environment` or `HostEnvironments`; a `gymnasium.Env`, of which every lane
        is a copy; a class or function without arguments that makes one of these; or a list of these (docs/tasks.md).
      run_dir: where configuration, metrics, checkpoints and pictures go; nothing is written if None.
      resume: continue the run in `run_dir` from its newest whole checkpoint (or begin it if there is none). More
        `total_steps` than it had train it further.
      config: the agent's settings, as its config dataclass or a mapping of fields.
      env_options: options of an environment given by name, or `GymnasiumOptions` of a `gymnasium.Env`.
      wrap: wrappers of a pure-JAX environment, in order, such as `{"sticky_actions": 0.25}` (`envs_jax.wrappers`).
      network: your own network, for an agent given by name.
      optimizer: your own optimiser, likewise: a function `learning_rate -> optax.GradientTransformation`, or a
        transformation with a rate of its own.
      hyper: tunable numbers that differ from the config, one or one per member: `{"learning_rate": [1e-3, 1e-4]}`
        trains two.
      preset: settings to begin with, by name (`podracer.training.presets`); what is given here goes before them.
      protocol: how a game of Atari is played and evaluated, by name (see `podracer.atari.PROTOCOLS`), instead of as the
        preset has it.
      init_from: another run, as its result or directory, whose parameters (with normalisers and targets; of its best
        member) this one begins with; the optimiser begins anew.
      trust: whether to import, and so run, the module of the environment that the run of `init_from` names.
      check: whether a pure-JAX environment of one's own is played at random for a second before
        (`envs_jax.testing.check_environment` checks more).
      log: called as `log(env_steps, row)` for every row of metrics. The run ends in good order, as with Ctrl-C, where
        it returns True, and where it raises, before the exception goes on.
      progress: whether to show a progress bar, or lines where there is no terminal, and the result in a sentence.
      topology: "local" for the devices of this process; "pod" for those of all processes of a cluster, each of which
        calls this alike; or a `podracer.Pod`, which says where they are. Process 0 writes and speaks for all.
      remote: where workers connect that step the environments (`podracer.serve_envs`), of a `HostEnvironments` or of
        `remote:NAME`, which only they can make. A resumed run listens where it did.
      pbt: population based training (docs/populations.md): at intervals, members that do badly copy better ones.
      pbt_dir: with Sebulba, the directory in which several runs are the members: each writes what it has learnt there.
      **run_settings: fields of `RunConfig`: total_steps, seed, num_envs, population, ...

    Raises:
      Interrupted: where Ctrl-C, SIGTERM or SIGHUP stopped the run, with its result; it can be resumed.
      PeerError: where another process of a pod is gone or does not answer.
      ValueError: for anything wrong in what was asked, before anything is compiled or written.
      TypeError: for an environment that breaks the protocol, saying what and where.
      TrainingDivergedError: where a metric is not finite; checkpoints until then are kept.
      OutOfMemoryError: where a device has too little memory, saying what to lower.
      CheckpointError: where a checkpoint cannot be written, or none can be read.
      RemoteError: where workers that should step environments are not there.
      OSError: where `remote` names an address that cannot be listened at.
    """
    began, environment = time.monotonic(), task_lists.text(environment)
    with (
        _start(topology) as processes,
        Workers(remote, run_dir if resume else None) as workers,
        contextlib.ExitStack() as caching,
    ):
        names: Mapping[str, str] = {}
        if preset or protocol:
            merged = presets.merge_given(agent, environment, preset, protocol, config, run_settings, env_options)
            config, run_settings, env_options, names = merged.agent, dict(merged.run), merged.env, merged.names
        run = configs.from_json(RunConfig, run_settings)
        run = dataclasses.replace(run, population=configs.members(run.population, hyper))
        directory = shared.directory(None if run_dir is None else files.local(run_dir), processes)
        if resume:
            if directory is None:
                raise ValueError("resume=True needs the run_dir of the run to continue.")
            run = rundir.adopt_layout(run, directory)
        parts = {"config": config, "env_options": env_options, "wrap": wrap, "hyper": hyper}
        parts |= {"network": network, "optimizer": optimizer, "pbt": population.of(pbt)}
        parts["pbt_dir"] = None if pbt_dir is None else files.local(pbt_dir).absolute()
        with rundir.layout_explained(directory if resume else None), span("set-up"):
            parts |= {"is_new": not (resume and directory and rundir.has_run(directory))}
            experiment = resolve(agent, environment, run, **parts, devices=_devices(), remote=workers.step)
        experiment.description.update(workers.described())
        experiment.description.update({**names, **(rundir.stored_names(directory) if resume and directory else {})})
        caches.use_compilation_cache()
        caching.enter_context(executables.using(caches.executables(experiment, processes.count)))
        if check and not resume and not isinstance(environment, str):
            _check(experiment.environment)
        if processes.is_first:
            notes.tell(experiment)
        # Tracing finds what is left to find, such as minibatches that do not divide, before anything is written.
        with span("check"):
            experiment.driver.check()
        source = _source(init_from, trust, experiment)
        processes.check_equal(workers.shared_description(configs.to_json(experiment.description)))
        hints = [] if resume or names else presets.suggestion(agent, environment)
        with contextlib.ExitStack() as stack:
            if directory is not None:
                lock = stack.enter_context(contextlib.closing(RunLock(directory)))
                shared.by_first(processes, lock.take)
                hints += shared.by_first(processes, rundir.prepare, directory, experiment.description, resume)
            stack.enter_context(memory_explained())
            stop = stack.enter_context(StopSignal())
            parts = (experiment, directory, resume, log, progress, stop, source, hints, processes, began)
            session = Session(*parts)
            result = session.run()
            if progress and result.summary["complete"] and processes.is_first:
                console.write(sys.stdout, f"{result}\n")
            session.draw(result)
        workers.finished = result.summary["complete"]
    # Outside, for the other processes of a pod stop in good order too, and have no error to hear of.
    if stop.number or result.summary["stopped_by"]:
        raise Interrupted(result, result.summary["stopped_by"] or signal.Signals(stop.number).name, _next(result))
    return result


def _source(init_from: Result | str | pathlib.Path | None, trust: bool, experiment: Experiment) -> Result | None:
    """Loads the run whose parameters this one begins with, checks that they fit, and notes it in the description.

    Raises:
      ValueError: where they do not fit.
    """
    source = load(init_from, trust=trust) if isinstance(init_from, str | pathlib.Path) else init_from
    if source:
        transferred(source, experiment.driver.like().learner)
        experiment.description["init_from"] = str(source.run_dir) if source.run_dir else "a run without a directory"
    return source


def _next(result: Result) -> str:
    """Says what to do after a run was stopped."""
    if result.summary["complete"]:
        return "the run was complete"
    if result.run_dir is None:
        return "without a run_dir only this error's `result` has what was learnt"
    return f"continue with {rundir.how_to_resume(result.run_dir, result.description['own'])}"


def _start(topology: Topology | Processes) -> contextlib.AbstractContextManager[Processes]:
    """The processes that share the run, which hear of each other's errors within.

    Raises:
      ValueError: for a topology that there is not, or no cluster.
      PeerError: where not all come.
    """
    if isinstance(topology, Processes):
        return contextlib.nullcontext(topology)  # `resume` has begun with them
    if topology == "local":
        return ALONE
    from podracer.pod import peers, settings  # which a local run has no use for

    if topology != "pod" and not isinstance(topology, settings.Pod):
        raise ValueError(f"topology={topology!r}: there are 'local', 'pod' and podracer.Pod(...).")
    return peers.start(settings.Pod() if topology == "pod" else topology)


def _devices() -> list[Any]:
    """The devices of all processes, in the same order in each."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def _check(environment: Environment | HostEnvironments) -> None:
    """Plays an environment of one's own for a second.

    Raises:
      ValueError: where it breaks its contract.
    """
    from envs_jax import testing  # which imports podracer

    try:
        for task in tasks.parts(environment):
            testing.check_briefly(task)
    except testing.ConformanceError as error:
        raise ValueError(f"{str(error).rstrip('.')}; check=False trains all the same.") from None


def resume(
    run_dir: str | pathlib.Path,
    *,
    agent: Agent | None = None,
    environment: Environment | HostEnvironments | Any = None,
    network: Network | None = None,
    optimizer: Own | None = None,
    total_steps: int | None = None,
    log: metrics.LogCallback | None = None,
    progress: bool = True,
    topology: Topology = "local",
    remote: Remote | Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Result:
    """Continues the run in a directory, with the settings that are written there.

    Args:
      run_dir: what `train` wrote.
      total_steps: to train it further than it was to be; no more than that if None.
      agent: the agent object, if the run was not given one by name.
      environment: the environment object, class or function, likewise; the run's wrappers go around it.
      network: the run's own network, if it had one.
      optimizer: the run's own optimiser, likewise.
      log: as in `train`.
      progress: as in `train`.
      topology: as in `train`; a run may be continued on other processes and devices than it began on.
      remote: as in `train`; fields that are not given, or of a `Remote` have their defaults, are as the run had them.
      trust: whether to import, and so run, the module of the environment that the run names.

    Raises:
      ValueError: where there is no run, an object is needed that was not given, or `trust` is.
      TypeError: for an environment that breaks the protocol.
      Interrupted: as in `train`.
      TrainingDivergedError: as in `train`.
      CheckpointError: as in `train`.
      PeerError: as in `train`.
    """
    with _start(topology) as processes:
        directory = files.local(run_dir)
        # Whether the others see the directory is not known yet.
        stored = shared.by_first(processes, rundir.read, directory)
        parts = _parts(
            directory, stored, trust, agent=agent, environment=environment, network=network, optimizer=optimizer
        )
        run = stored["run"] | ({} if total_steps is None else {"total_steps": total_steps})
        has_checkpoints = processes.broadcast(checkpoint.has_checkpoints(directory))
        source = None if has_checkpoints else stored.get("init_from")
        options = {"log": log, "progress": progress, "topology": processes, "remote": remote, "trust": trust}
        try:
            return train(**parts, run_dir=directory, resume=True, init_from=source, **options, **run)
        except Interrupted as error:
            interrupted = error
    raise interrupted


def load(
    run_dir: str | pathlib.Path,
    *,
    agent: Agent | None = None,
    environment: Environment | HostEnvironments | Any = None,
    network: Network | None = None,
    optimizer: Own | None = None,
    step: int | Literal["best"] | None = None,
    trust: bool = False,
) -> Result:
    """The result of a run directory, from its newest whole checkpoint or an earlier one.

    Args:
      run_dir: what `train` wrote.
      agent: the agent object, if the run was not given one by name.
      environment: the environment object, class or function, likewise; the run's wrappers go around it.
      network: the run's own network, if it had one.
      optimizer: the run's own optimiser, likewise.
      step: of the checkpoint, in environment steps; "best" for the one evaluated best. The newest if None.
      trust: whether to import, and so run, the module of the environment that the run names.

    Raises:
      ValueError: where there is no run, an object is needed that was not given, or `trust` is.
      TypeError: for an environment that breaks the protocol.
      CheckpointError: where no checkpoint can be read, or there is none of that step.
    """
    caches.use_compilation_cache()
    directory = files.local(run_dir)
    stored = rundir.read(directory)
    run = configs.from_json(RunConfig, stored["run"])
    experiment = resolve(
        **_parts(directory, stored, trust, agent=agent, environment=environment, network=network, optimizer=optimizer),
        run=dataclasses.replace(run, actor_devices=None, reanalyser_devices=0),  # for a single device
        devices=jax.local_devices()[:1],
        is_new=False,
    )
    folder = BEST if step == "best" else "checkpoints"
    if not (directory / folder).is_dir():
        raise errors.CheckpointError(f"no checkpoint in {directory / folder} yet.")
    experiment.description.update(rundir.stored_names(directory))
    checkpoints = checkpoint.Checkpoints(directory, name=folder, read_only=True)
    try:
        wanted = None if step == "best" else step
        _, state, problems = checkpoints.restore(only_learner(experiment.driver.like()), wanted)
    finally:
        checkpoints.close()
    for problem in problems:
        console.say(problem)
    updates, member_steps = position(state)
    rows = metrics.stream(directory / "metrics.jsonl") if (directory / "metrics.jsonl").exists() else []
    history = metrics.history(metrics.until(rows, updates, member_steps))
    result = Result(experiment, state.learner, history, directory)
    result.summary = summary.of_state(directory, min(member_steps), updates)
    return result


def _parts(directory: pathlib.Path, stored: Mapping[str, Any], trust: bool, **given: Any) -> dict[str, Any]:
    """A run's agent, environment, network and what goes with them, from its description and the objects given.

    Raises:
      ValueError: where an object is needed that was not given, or consent to import it.
    """
    for part in stored["own"]:
        if given[part] is None:
            given[part] = imports.restored(directory, stored, part, trust)
    by_name = given["environment"] is None
    if by_name:
        imports.check_name(directory, stored, trust)
    options = stored["env_options"] if "environment" in stored["own"] else None
    return {
        "agent": given["agent"] or stored["agent"],
        "environment": stored["env"] if by_name else given["environment"],
        "network": given["network"],
        "optimizer": given["optimizer"],
        "config": None if given["agent"] else stored["agent_config"],
        "env_options": stored_options(stored["env"], stored["env_options"]) if by_name else options,
        "wrap": stored.get("wrap", ()),
        "pbt": population.of(stored.get("pbt")),
        "pbt_dir": stored.get("pbt_dir") and pathlib.Path(stored["pbt_dir"]),
        "hyper": {name: np.asarray(value, np.float64) for name, value in stored["hyper"].items()},
    }
