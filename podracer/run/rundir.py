"""The description of a run in its directory, and the check that a resumed run is the same."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podracer import configs
from podracer.learning.optimizer import first_difference
from podracer.run.config import RunConfig
from podracer.system import files
from podracer.topology import LayoutError, continues_on

FREE_TO_CHANGE = (
    *("eval_every", "eval_episodes", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints"),
    *("env_timeout", "env_restarts"),
)
"""Run settings that do not change the result, so that a resumed run may have others."""

LONGEST_NAME = 100
"""Letters of the names of several tasks in a directory's name; of more, their number is there."""

KEYS = ("podracer", "agent", "agent_config", "env", "env_options", "own", "hyper", "run")
"""The keys of a description. `own` lists the parts that were given as objects, which a file cannot hold. Optional keys:
`imports`, the modules of such parts; `wrap`, wrappers of the environment by name; `optimizer_state`, the arrays of an
own optimiser's state; `pbt`, the settings of population based training, and `pbt_dir`, the directory of its members;
`init_from`, the run whose parameters this one began with; `extended`, the former values of `total_steps`; `chosen`, the
values that "auto" was resolved to; and `NAMES`, which repeat what the settings say."""

NAMES = ("preset", "protocol")
"""The names of a run's settings when it began."""


class WriteError(OSError):
    """A file of a run could not be written; the message says which, and what to do."""


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """A context that names the file which could not be written.

    Raises:
      WriteError: for an OSError.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(f"could not write {path}: {error.strerror or error}.") from error


def how_to_resume(directory: pathlib.Path, own: Sequence[str]) -> str:
    """The line to type to continue a run; `own` names the parts that were given as objects."""
    if own:
        return f"podracer.resume('{directory}', {', '.join(f'{part}=...' for part in own)})"
    return f"podracer resume {directory}"


def has_run(directory: pathlib.Path) -> bool:
    """True for the directory of a run."""
    return (directory / "config.json").exists()


def read(directory: pathlib.Path) -> dict[str, Any]:
    """The description of the run in a directory.

    Raises:
      ValueError: if there is none, it is not JSON, or it is not a run's.
    """
    path = directory / "config.json"
    if not path.exists():
        raise ValueError(f"{directory} holds no run: there is no config.json in it.")
    try:
        description = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); restore it from a backup or begin a new run.") from None
    if not isinstance(description, dict) or not set(KEYS) <= set(description):
        raise ValueError(f"{directory} holds no run of podracer: its config.json describes something else.")
    return description


def stored_names(directory: pathlib.Path) -> dict[str, str]:
    """The names of the settings (`NAMES`) of the run in a directory; {} if there is no run yet."""
    stored = read(directory) if has_run(directory) else {}
    return {name: stored[name] for name in NAMES if name in stored}


def adopt_layout(run: RunConfig, directory: pathlib.Path) -> RunConfig:
    """The settings of a resumed run with its own lanes, shards and replicas, which its devices may not suggest by
    themselves."""
    if not has_run(directory):
        return run
    stored = read(directory)["run"]
    layout = ("num_envs", "num_shards", "replicas")
    return dataclasses.replace(run, **{name: getattr(run, name) or stored.get(name) for name in layout})


@contextlib.contextmanager
def layout_explained(directory: pathlib.Path | None) -> Iterator[None]:
    """A context that names the devices on which the run in a directory can continue, if these do not fit; other
    settings would make another run.

    Raises:
      LayoutError: for a LayoutError, if there is a run in the directory.
    """
    try:
        yield
    except LayoutError as error:
        if directory is None or not has_run(directory):
            raise
        stored = read(directory)["run"]
        remedy = continues_on(stored["num_shards"], stored.get("replicas"), stored.get("population", 1))
        raise LayoutError(f"{str(error).partition('; use ')[0]}; {remedy}.") from None


def prepare(directory: pathlib.Path, description: dict[str, Any], resume: bool) -> list[str]:
    """Makes a run directory, or checks that the existing one is of the same run, which may now be longer.

    Returns:
      Messages about it.

    Raises:
      ValueError: for a run of another configuration (the message says what differs), an existing one without `resume`,
        or a directory that cannot be written.
    """
    path = directory / "config.json"
    if path.exists():
        stored = read(directory)
        before, new_steps = stored["run"]["total_steps"], description["run"]["total_steps"]
        longer = resume and new_steps > before
        same_length = stored | {"run": stored["run"] | {"total_steps": new_steps if longer else before}}
        different = configs.differences(essence(same_length), essence(description))
        states = (x.get("optimizer_state", {}) for x in (stored, description))
        if not different and (leaf := first_difference(*states)):
            different = [f"the state of optimizer=: {leaf}"]
        if different:
            raise ValueError(
                f"{directory} holds a run of another configuration: {'; '.join(different)}. "
                f"Use another run directory, or `{how_to_resume(directory, stored['own'])}`, which goes on with its "
                "settings."
            )
        if not resume:
            raise ValueError(
                f"{directory} already holds this run; use --resume (resume=True) or another run directory."
            )
        notes = _other_version(stored, description)
        if not longer:
            return notes
        with writing(path):
            extended = [*stored.get("extended", []), before]
            write_json(path, same_length | {"extended": extended})
        return [
            *notes,
            f"total_steps grows from {before:,} to {new_steps:,}: what decays over a run goes on along the longer one",
        ]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(path, description)
    except OSError as error:
        raise ValueError(f"cannot write to run directory {directory}: {error}.") from error
    return []


def _other_version(stored: Mapping[str, Any], description: Mapping[str, Any]) -> list[str]:
    """A message if another version of the library continues a run."""
    before, new_version = stored["podracer"], description["podracer"]
    if before == new_version:
        return []
    return [f"the run was begun with podracer {before}, and podracer {new_version} goes on with it"]


def essence(description: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a description that decides the result of a run."""
    run = {k: v for k, v in description["run"].items() if k not in FREE_TO_CHANGE}
    run["reset_pool"] = run.get("reset_pool") or 0  # None and 0 give equal results
    run["member_seeds"] = list(run.get("member_seeds") or ())  # runs of earlier versions have none
    keys = {*KEYS, "wrap", "pbt"} - {"podracer", "run"}
    return {k: v for k, v in description.items() if k in keys} | {"run": run}


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file, which others see as a whole or not at all."""
    files.write(path, json.dumps(configs.to_json(value), indent=2) + "\n")


@contextlib.contextmanager
def new_default(agent: str, environment: str, seed: int) -> Iterator[pathlib.Path]:
    """The directory of `default`, made at once, so that runs that start together have one each; removed if it stays
    empty."""
    while True:
        directory = default(agent, environment, seed)
        first = not directory.parent.exists()
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir()
            break
        except FileExistsError:
            if directory.parent.exists() and not directory.parent.is_dir():
                raise ValueError(f"cannot write to run directory {directory}: runs is a file.") from None
        except OSError as error:
            raise ValueError(f"cannot write to run directory {directory}: {error}.") from error
    try:
        yield directory
    finally:
        for path in (directory, directory.parent) if first else (directory,):
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()


def name_of(agent: str, environment: str) -> str:
    """The words `ENV-AGENT` in the names of directories."""
    words = re.sub("[:/]", "-", environment).replace(",", "+")
    if "+" in words and len(words) > LONGEST_NAME:
        words = f"{words.count('+') + 1}-tasks"
    return f"{words}-{agent}"


def default(agent: str, environment: str, seed: int, *, resume: bool = False) -> pathlib.Path:
    """The path `runs/ENV-AGENT-SEED`, numbered if it exists; with `resume`, the newest that exists."""
    plain = pathlib.Path("runs") / f"{name_of(agent, environment)}-{seed}"
    candidates = [plain, *(plain.with_name(f"{plain.name}-{i}") for i in range(2, 10_000))]
    free = next(i for i, path in enumerate(candidates) if not os.path.lexists(path))
    return candidates[max(free - 1, 0) if resume else free]
