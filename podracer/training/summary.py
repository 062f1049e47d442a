"""The summary of a run: the figures of `summary.json`."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from podracer.evaluation import evaluation
from podracer.run import metrics, rundir
from podracer.run.record import Experiment
from podracer.topology.processes import Processes
from podracer.training.evaluations import Evaluations
from podracer.training.training_log import TrainingLog
from podracer.version import __version__

FILE = "summary.json"


def stored(
    directory: pathlib.Path | None, experiment: Experiment, processes: Processes, env_steps: int
) -> dict[str, Any] | None:
    """The summary that a finished run has left, or None where there is something to do yet.

    Args:
      directory: the run directory.
      experiment: the run, as it was asked for now.
      processes: those that share the run; what process 0 finds counts.
      env_steps: where the run stands.
    """
    path = directory / FILE if directory else None
    if path is None or env_steps < experiment.run.total_steps:
        return None
    is_stored = processes.is_first and path.exists()
    summary = processes.broadcast(json.loads(path.read_text()) if is_stored else {})
    episodes = (experiment.run.eval_episodes or 0) * max(1, len(experiment.environment.spec.tasks))  # of all tasks
    wanted = {"complete": True, "env_steps": env_steps, "eval_episodes": episodes}
    return summary if wanted.items() <= summary.items() else None


def of_state(directory: pathlib.Path, env_steps: int, updates: int) -> dict[str, Any]:
    """The summary in a run directory where it is of this state; {} where it is of another, with another return.

    Args:
      directory: the run directory.
      env_steps: steps that every member has taken.
      updates: updates so far.
    """
    path = directory / FILE
    summary = json.loads(path.read_text()) if path.exists() else {}
    return summary if (summary.get("env_steps"), summary.get("updates")) == (env_steps, updates) else {}


def write(directory: pathlib.Path, summary: dict[str, Any]) -> None:
    """Writes `summary.json`.

    Raises:
      WriteError: where the disk refuses.
    """
    with rundir.writing(directory / FILE):
        rundir.write_json(directory / FILE, summary)


def make(
    experiment: Experiment,
    processes: Processes,
    training: TrainingLog,
    evaluations: Evaluations,
    rows: list[metrics.Row],
    *,
    compile_seconds: float,
    env_steps: int,
    updates: int,
    complete: bool,
    stopped_by: int,
    hyper: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """The summary of a run that ends now.

    Args:
      experiment: the run.
      processes: those that share it.
      training: its clocks.
      evaluations: its evaluations.
      rows: its history.
      compile_seconds: seconds that compiling took.
      env_steps: steps that every member has taken.
      updates: updates so far.
      complete: whether nothing is left to do.
      stopped_by: the number of the signal that stopped it, or 0.
      hyper: the tunable numbers of the members as they are now, [P] by name.
    """
    rates = any("time/steps_per_second" in row for row in rows)
    devices = experiment.driver.devices
    summary = {
        "agent": experiment.agent.name,
        "env": experiment.description["env"],
        **experiment.description["chosen"],
        "seed": experiment.run.seed,
        "complete": complete,
        "stopped_by": signal.Signals(stopped_by).name if stopped_by and not complete else None,
        "env_steps": env_steps,
        "updates": updates,
        "wall_seconds": training.wall_seconds,
        "compile_seconds": compile_seconds,
        "train_seconds": training.train_seconds,
        "cpu_seconds": training.cpu_seconds,
        "steps_per_second": env_steps * experiment.run.population / training.train_seconds if rates else 0.0,
        "devices": len(devices),
        "processes": processes.count,
        "hosts": processes.hosts,
        "replicas": experiment.description["run"].get("replicas"),
        "device": f"{devices[0].platform}: {devices[0].device_kind}",
        "deterministic_ops": deterministic_ops(os.environ.get("XLA_FLAGS", "")),
        "jax": jax.__version__,
        "podracer": __version__,
    }
    return summary | _scores(experiment, evaluations, rows, hyper)


def _scores(
    experiment: Experiment, evaluations: Evaluations, rows: list[metrics.Row], hyper: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """The figures of the newest evaluation."""
    if not evaluations.newest:  # stopped before the first
        return {"eval_return_mean": None, "eval_return_std": None, "eval_episodes": 0}
    found = evaluation.scores(evaluations.newest)
    if experiment.run.population > 1:
        found["best_member"] = metrics.best_member(rows)
        found["members"] = [
            {"seed": int(seed), "eval_return_mean": e.mean, "diverged": bool(evaluations.diverged[i])}
            | {name: float(values[i]) for name, values in hyper.items()}
            | ({"tasks": {name: task.mean for name, task in e.tasks.items()}} if e.tasks else {})
            for i, (seed, e) in enumerate(zip(experiment.seeds, evaluations.newest))
        ]
    return found


def deterministic_ops(flags: str) -> bool:
    """True where XLA was told to repeat itself bit for bit on a GPU; on CPUs it does so anyway."""
    values = re.findall(r"--xla_gpu_deterministic_ops(?:=(\S+))?(?=\s|$)", flags)
    return bool(values) and values[-1].lower() in ("", "true", "1")
