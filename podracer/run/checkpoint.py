"""Checkpoints of a whole run with Orbax: parameters, optimiser, keys, environment states and counters.

Every leaf is stored with a checksum. A checkpoint that cannot be read, or whose bytes changed, is passed over for the
one before it, and set aside when a run goes on from there. Where none can be read, all stay where they are: the fault
may lie in what they are read into.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import pathlib
import secrets
import shutil
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from podracer.errors import CheckpointError
from podracer.run.checksums import checksum, crc, flatten, named, unflatten
from podracer.run.orbax_calls import ELSEWHERE, QUIET, attempt
from podracer.system import console, files
from podracer.system.spans import span
from podracer.topology import is_key
from podracer.topology.processes import ALONE, Processes
from podracer.types import ArrayTree

PAUSES = (1.0, 4.0)
"""Seconds before a checkpoint is read again after an error that may pass."""

AGREEMENT_SECONDS = 60.0
"""Seconds in which all processes must see what process 0 sees in a directory, over a network."""


class UnknownStepError(CheckpointError, ValueError):
    """There is no checkpoint of the step that was asked for."""


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
      directory: the run directory.
      keep: how many of the newest to keep; all if None.
      name: of the folder in it.
      read_only: changes nothing in the directory, in which another process may be writing.
      processes: those that share the run, which all write what they hold, and must all make this object and call its
        methods alike.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        keep: int | None = 3,
        *,
        name: str = "checkpoints",
        read_only: bool = False,
        processes: Processes = ALONE,
    ):
        self.directory = pathlib.Path(directory).absolute() / name
        self._beside, self._removed = self.directory.with_name(f"{name}-new"), self.directory.with_name("removed")
        self._read_only, self._processes = read_only, processes
        self.keep, self._gone, self._stuck = keep, set[int](), False
        self._opened: Any = None
        try:
            if not read_only:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._finish_replacing()
            # Of a new run there is nothing to read, and Orbax takes a while to import. It must be there at the end.
            if importlib.util.find_spec("orbax.checkpoint") is None:
                raise ModuleNotFoundError("no package orbax-checkpoint is installed")
            is_filled = self.directory.is_dir() and any(self.directory.iterdir())
            self._is_empty = processes.count == 1 and not is_filled
        except (OSError, ModuleNotFoundError) as error:
            raise CheckpointError(f"cannot use {self.directory} for checkpoints: {error}") from error
        if not self._is_empty:
            self._manager  # noqa: B018
            self._require_same_steps()

    @property
    def _ocp(self) -> Any:
        with span("import of orbax"):
            import orbax.checkpoint as ocp
        return ocp

    @property
    def _manager(self) -> Any:
        """Orbax's manager of the folder, which is made when it is needed."""
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> Any:
        """Makes Orbax's manager of the folder.

        Raises:
          CheckpointError: where the folder cannot be used.
        """
        try:
            with QUIET:
                options = self._ocp.CheckpointManagerOptions(
                    max_to_keep=None,  # it takes one that cannot be removed for a new one that was not written
                    enable_async_checkpointing=False,  # it counts only once it is on disk, and a run writes few
                    cleanup_tmp_directories=not self._read_only,  # what a process that was killed had begun to write
                    read_only=self._read_only,
                    **self._together(),
                )
                return self._ocp.CheckpointManager(self.directory, options=options)
        except OSError as error:
            raise CheckpointError(f"cannot use {self.directory} for checkpoints: {error}") from error

    def _together(self) -> dict[str, Any]:
        """Options by which processes wait for each other on the board: Orbax's own barrier has no end."""
        if self._processes.count == 1:
            return {}
        everyone = set(range(self._processes.count))
        together = self._ocp.options.MultiprocessingOptions(primary_host=0, active_processes=everyone)
        self._processes.barrier()  # the directory is there
        return {"multiprocessing_options": together, "create": False}

    def _require_same_steps(self) -> None:
        """Waits until this process sees the steps that process 0 sees, for they decide what all of them do.

        Later ones are known from what all did, without another look at the directory.

        Raises:
          CheckpointError: in all processes, where one does not see them in time.
        """
        steps = self._processes.broadcast(self.steps())
        until = time.monotonic() + AGREEMENT_SECONDS
        while self.steps() != steps and time.monotonic() < until:
            time.sleep(0.1)
            with contextlib.suppress(FileNotFoundError):  # one that is going just now
                self._manager.reload()
        steps_of_all = self._processes.all_gather(self.steps())
        if late := [i for i, own_steps in enumerate(steps_of_all) if own_steps != steps]:
            raise CheckpointError(
                f"process {late[0]} sees checkpoints {steps_of_all[late[0]]} in {self.directory}, and process 0 "
                f"{steps}, for {AGREEMENT_SECONDS:g} s: is it one directory, and how long does its file system keep "
                "what it has seen?"
            )

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first; the same in all processes."""
        return [] if self._is_empty else sorted(set(self._manager.all_steps()) - self._gone)

    def newest(self) -> pathlib.Path | None:
        """The folder of the newest checkpoint, if there is one."""
        steps = self.steps()
        return self.directory / str(steps[-1]) if steps else None

    def save(self, step: int, state: ArrayTree) -> None:
        """Writes `state` as checkpoint `step`, unless that exists; the write is atomic.

        Raises:
          CheckpointError: where the disk refuses; earlier checkpoints are intact.
        """
        if step in self.steps():
            return
        leaves = flatten(state)
        self._compare(leaves)
        checksums = self._checksums(leaves)
        with span("checkpoint"):
            _, problem = attempt(lambda: self._write(step, leaves, checksums))
        if problem:
            raise CheckpointError(
                f"could not write checkpoint {step} in {self.directory}: {problem}. Earlier checkpoints are intact."
            )
        self._is_empty = False
        old = self.steps()[: -self.keep] if self.keep else []
        self._gone |= set(old)
        if self._processes.is_first:
            self._remove(old)

    def _remove(self, steps: Iterable[int]) -> None:
        """Removes checkpoints, each by one rename first, so that none is there in part; says what cannot be removed."""
        problem = ""
        for step in steps:
            try:
                self._withdraw(step)
            except OSError as error:
                problem = f"{self.directory / str(step)} ({error.strerror})"
        shutil.rmtree(self._removed, ignore_errors=True)
        if self._removed.exists():
            problem = problem or str(self._removed)
        if problem and not self._stuck:
            self._stuck = True
            with contextlib.suppress(OSError):
                message = f"an old checkpoint cannot be removed, and stays: {problem}; newer ones are whole."
                console.say(message)

    def _withdraw(self, step: int) -> None:
        self._removed.mkdir(exist_ok=True)
        (self.directory / str(step)).rename(self._removed / f"{self.directory.name}-{step}-{secrets.token_hex(4)}")

    def replace(self, step: int, state: ArrayTree) -> None:
        """Writes `state` as checkpoint `step`, of which there is one; that stays until the new one is whole.

        Raises:
          CheckpointError: where the disk refuses; the old one is intact.
        """
        beside = Checkpoints(self.directory.parent, None, name=self._beside.name, processes=self._processes)
        try:
            beside.save(step, state)
        except CheckpointError:
            self._finish_replacing()
            raise
        finally:
            beside.close()
        if self._processes.is_first:
            try:
                self._withdraw(step)
                self._finish_replacing()
                files.to_disk(self.directory / str(step))
            except OSError as error:
                reason = f"{error.strerror or error}. A resumed run moves it there from {self._beside}."
                raise CheckpointError(f"could not move checkpoint {step} to {self.directory}: {reason}") from error
            shutil.rmtree(self._removed, ignore_errors=True)
        self._processes.barrier()
        self._manager.reload()
        self._require_same_steps()

    def _finish_replacing(self) -> None:
        """Moves a new checkpoint to the place of one that is gone, also where a process was killed before it could."""
        if self._processes.is_first and self._beside.is_dir():
            for path in self._beside.iterdir():
                if path.name.isdigit() and not (self.directory / path.name).exists():
                    path.rename(self.directory / path.name)
            shutil.rmtree(self._beside, ignore_errors=True)

    def _write(self, step: int, leaves: dict[str, jax.Array], checksums: dict[str, int]) -> None:
        arguments = self._ocp.args
        parts = {"state": arguments.PyTreeSave(leaves), "checksums": arguments.JsonSave(checksums)}
        self._manager.save(step, args=arguments.Composite(**parts))
        if self._processes.is_first:
            files.to_disk(self.directory / str(step))

    def delete(self, step: int) -> None:
        """Removes a checkpoint."""
        attempt(lambda: self._manager.delete(step))

    def forget(self, env_steps: int) -> None:
        """Removes those of later steps, for a run that stands at `env_steps` and does what follows again."""
        for step in self.steps():
            if step > env_steps:
                self.delete(step)

    def restore(self, like: ArrayTree, step: int | None = None) -> tuple[int, ArrayTree, list[str]]:
        """The newest checkpoint that is whole; newer ones move out of the way of those that will be written.

        Args:
          like: a state of the same structure, or parts of it, concrete or abstract, with shapes, dtypes and shardings.
            Other parts are not read.
          step: that checkpoint and no other.

        Returns:
          The step, the state, and one line for every newer checkpoint that is damaged.

        Raises:
          CheckpointError: where none can be read.
          UnknownStepError: where there is none of that step.
        """
        damaged: dict[int, str] = {}
        steps = self.steps()
        if step is not None and step not in steps:
            available = ", ".join(map(str, steps)) or "none"
            raise UnknownStepError(f"no checkpoint {step} in {self.directory}; there are {available}.")
        for number in reversed(steps if step is None else [step]):
            found, problem = self._tried(number, like)
            problem = problem or self._changed(found)
            if problem:
                damaged[number] = f"checkpoint {number} is damaged ({problem})"
                continue
            moved = {} if self._read_only or not damaged else self._set_aside(damaged)
            moves = {damaged_step: f"; moved it to {target}" for damaged_step, target in moved.items()}
            messages = [
                f"{problem}{moves.get(damaged_step, '')}; used {number}." for damaged_step, problem in damaged.items()
            ]
            return number, unflatten(like, found["state"]), messages
        detail = f" can be read: {'; '.join(damaged.values())}" if damaged else " yet"
        raise CheckpointError(f"no checkpoint in {self.directory}{detail}.")

    def _tried(self, step: int, like: ArrayTree) -> tuple[Any, str | None]:
        """Reads a checkpoint, or says why a process cannot. An error that may pass is tried again.

        Raises:
          CheckpointError: where it is of something else, or what is wrong says nothing of the checkpoint.
        """
        for pause in (*PAUSES, None):
            found, problem = attempt(lambda: self._read(step, like))
            if isinstance(found, CheckpointError):
                raise found
            problem = next((text for text in self._processes.all_gather(problem) if text), None)
            if problem not in (*ELSEWHERE, os.strerror(errno.EIO)) or pause is None:
                break
            time.sleep(pause)
        if problem in ELSEWHERE:
            raise CheckpointError(
                f"cannot read checkpoint {step} in {self.directory}: {problem}. It may be whole: mend that and try "
                "again, or move it elsewhere to go on from the one before."
            )
        return found, problem

    def _read(self, step: int, like: ArrayTree) -> Any:
        """Reads a checkpoint, or returns the text of an error if it is whole but of another run."""
        wanted = {}
        for name, x in named(like):
            data = jax.eval_shape(jax.random.key_data, x) if is_key(x) else x
            wanted[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
        stored = self._ocp.PyTreeCheckpointHandler().metadata(self.directory / str(step) / "state").tree
        for name, x in wanted.items():
            if name in stored and (stored[name].shape, stored[name].dtype) != (x.shape, x.dtype):
                return CheckpointError(
                    f"checkpoint {step} in {self.directory} is of another layout: {name} is {stored[name].dtype} "
                    f"{list(stored[name].shape)} there and {x.dtype} {list(x.shape)} here; it needs the network, "
                    "devices and actors that it was written with."
                )
        if missing := wanted.keys() - stored.keys():
            raise ValueError(f"it has no {min(missing)}")
        arrays = {
            name: self._ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape) for name, x in wanted.items()
        }
        parts = self._ocp.args.PyTreeRestore(wanted, restore_args=arrays, partial_restore=True)
        return self._manager.restore(
            step, args=self._ocp.args.Composite(state=parts, checksums=self._ocp.args.JsonRestore())
        )

    def _changed(self, found: Any) -> str | None:
        """Names the first array whose bytes changed; None if none did."""
        stored = found["checksums"]
        changed = (n for n, checksum in self._checksums(found["state"]).items() if checksum != stored.get(n))
        return next((f"the bytes of {name} changed since they were written" for name in changed), None)

    def _checksums(self, leaves: dict[str, jax.Array]) -> dict[str, int]:
        """The checksum of each array by name, whatever devices and processes hold it."""
        parts = self._processes.all_gather({name: checksum(x) for name, x in leaves.items()})
        return {name: sum(part[name] for part in parts) % 2**32 for name in leaves}

    def _compare(self, leaves: dict[str, jax.Array]) -> None:
        """Checks that the processes of a pod have the same parameters, and whatever else each has a copy of.

        Raises:
          CheckpointError: in all processes, naming who has others.
        """
        if self._processes.count == 1:
            return
        copies = {
            n: x.addressable_data(0) for n, x in leaves.items() if x.is_fully_replicated and not x.is_fully_addressable
        }
        found = self._processes.all_gather({name: crc(np.asarray(x)) for name, x in copies.items()})
        for name in copies:
            values = [each[name] for each in found]
            if len(set(values)) > 1:
                usual = max(values, key=values.count)
                odd = next(i for i, value in enumerate(values) if value != usual)
                others = "the others have" if len(values) > 2 else f"process {1 - odd} has"
                raise CheckpointError(
                    f"process {odd} has another {name} than {others}, which is a fault of its machine or of a program; "
                    "nothing was written."
                )

    def _set_aside(self, steps: Iterable[int]) -> dict[int, str]:
        """Moves checkpoints out of the way; returns where to."""
        moved = {}
        for step in steps if self._processes.is_first else ():
            target = self.directory.parent / "damaged" / str(step)
            while target.exists():
                target = target.with_name(target.name + "-again")
            target.parent.mkdir(exist_ok=True)
            (self.directory / str(step)).rename(target)
            moved[step] = str(target)
        # No process looks at the directory before all of them are gone.
        moved = {int(step): target for step, target in self._processes.broadcast(moved).items()}
        self._manager.reload()
        self._require_same_steps()
        return moved

    def close(self) -> None:
        """Releases what Orbax holds."""
        if self._opened is not None:
            self._opened.close()


def has_checkpoints(directory: pathlib.Path) -> bool:
    """Returns True if a run directory holds any checkpoint, whole or not."""
    folder = directory / "checkpoints"
    return folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())
