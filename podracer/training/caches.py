"""The caches of compiled programs, in `~/.cache/podracer` or where `XDG_CACHE_HOME` says."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax

import envs_jax
from podracer import configs
from podracer.evaluation.evaluation import step_limit
from podracer.run.record import Experiment
from podracer.system import command
from podracer.topology.executables import Executables, is_sure, kind

NO_PROGRAM = (
    *("seed", "total_steps", "eval_every"),
    *("checkpoint_every", "checkpoint_minutes", "checkpoint_replay", "keep_checkpoints"),
)
"""Settings of a run that no program depends on, but for the longest episode of an evaluation."""


def folder() -> pathlib.Path | None:
    """The folder of the caches; None for a container's user without a home, who keeps none."""
    try:
        return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "podracer"
    except RuntimeError:
        return None


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, unless the user has set a cache of their own."""
    found = folder()
    if jax.config.jax_compilation_cache_dir is not None or found is None:  # type: ignore[attr-defined]
        return
    jax.config.update("jax_compilation_cache_dir", str(found / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def executables(experiment: Experiment, processes: int) -> Executables | None:
    """The executables of runs of this kind; None where there are none.

    There are in a process of the command line, on CPUs, for an agent and an environment of ours by name, without
    parts of the user's own, where the user has set no cache of their own, and where all that decides a program is
    known.
    """
    found, description = folder(), experiment.description
    if not command.IS_COMMAND or processes > 1 or found is None or not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return None
    if jax.config.jax_compilation_cache_dir != str(found / "xla"):  # type: ignore[attr-defined]
        return None
    devices = experiment.driver.devices
    ours = not description["own"] and description["env"] in envs_jax.names() and experiment.driver.arch == "anakin"
    if not ours or any(device.platform != "cpu" for device in devices):
        return None
    run = experiment.run
    limit = step_limit(experiment.environment.spec, run.eval_episodes, run.eval_every)  # type: ignore[arg-type]
    settings: dict[str, Any] = {**description, "limit": limit}
    settings["run"] = {name: value for name, value in description["run"].items() if name not in NO_PROGRAM}
    found_kind = kind(configs.to_json(settings), devices)
    return Executables(found / "programs", found_kind) if is_sure() else None
