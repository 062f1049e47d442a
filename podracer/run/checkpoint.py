"""Checkpoints of a whole run with Orbax: parameters, optimiser, keys, environment states and counters.

Every leaf is stored with a checksum. A checkpoint that cannot be read, or whose bytes changed, is passed over for the
one before it, and set aside when a run goes on from there. Where none can be read, all stay where they are: the fault
may lie in what they are read into.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import math
import os
import pathlib
import secrets
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import console, files
from podracer.run.processes import ALONE, Processes
from podracer.topology import is_key
from podracer.types import ArrayTree

ELSEWHERE = tuple(
    os.strerror(code)
    for code in (errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT)
)
"""Why a file cannot be read although it may be whole."""

PAUSES = (1.0, 4.0)
"""Seconds before a checkpoint is read again after an error that may pass."""

SEEN_SECONDS = 60.0
"""How long what process 0 sees in a directory may take to be seen by the others, over a network."""


LOGGERS = ("absl", "asyncio", "orbax")
"""The loggers of Orbax and its tasks. Records of other libraries are shown."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or none could be read; the message says where and what to do."""


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
        import orbax.checkpoint as ocp

        self.directory = pathlib.Path(directory).absolute() / name
        self._ocp, self._read_only, self._processes = ocp, read_only, processes
        self._keep, self._gone, self._stuck = keep, set[int](), False
        try:
            if not read_only:
                self.directory.mkdir(parents=True, exist_ok=True)
            with _QUIET:
                options = ocp.CheckpointManagerOptions(
                    max_to_keep=None,  # it takes one that cannot be removed for a new one that was not written
                    enable_async_checkpointing=False,  # it counts only once it is on disk, and a run writes few
                    cleanup_tmp_directories=not read_only,  # what a process that was killed had begun to write
                    read_only=read_only,
                    **self._together(),
                )
                self._manager = ocp.CheckpointManager(self.directory, options=options)
        except OSError as error:
            raise CheckpointError(f"cannot use {self.directory} for checkpoints: {error}") from error
        self._see_alike()

    def _together(self) -> dict[str, Any]:
        """Options by which processes wait for each other on the board: Orbax's own barrier has no end."""
        if self._processes.count == 1:
            return {}
        everyone = set(range(self._processes.count))
        together = self._ocp.options.MultiprocessingOptions(primary_host=0, active_processes=everyone)
        self._processes.barrier()  # the directory is there
        return {"multiprocessing_options": together, "create": False}

    def _see_alike(self) -> None:
        """Waits until this process sees the steps that process 0 sees, for they decide what all of them do.

        Later ones are known from what all did, without another look at the directory.

        Raises:
          CheckpointError: in all processes, where one does not see them in time.
        """
        steps = self._processes.told(self.steps())
        until = time.monotonic() + SEEN_SECONDS
        while self.steps() != steps and time.monotonic() < until:
            time.sleep(0.1)
            with contextlib.suppress(FileNotFoundError):  # one that is going just now
                self._manager.reload()
        seen = self._processes.everyones(self.steps())
        if late := [i for i, there in enumerate(seen) if there != steps]:
            raise CheckpointError(
                f"process {late[0]} sees checkpoints {seen[late[0]]} in {self.directory}, and process 0 {steps}, for "
                f"{SEEN_SECONDS:g} s: is it one directory, and how long does its file system keep what it has seen?"
            )

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first; the same in all processes."""
        return sorted(set(self._manager.all_steps()) - self._gone)

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
        leaves = _flatten(state)
        self._compare(leaves)
        arguments = self._ocp.args.Composite(
            state=self._ocp.args.PyTreeSave(leaves),
            checksums=self._ocp.args.JsonSave(self._checksums(leaves)),
        )
        _, problem = _attempt(lambda: self._write(step, arguments))
        if problem:
            raise CheckpointError(
                f"could not write checkpoint {step} in {self.directory}: {problem}. Earlier checkpoints are intact."
            )
        old = self.steps()[: -self._keep] if self._keep else []
        self._gone |= set(old)
        if self._processes.is_first:
            self._remove(old)

    def _remove(self, steps: Iterable[int]) -> None:
        """Removes checkpoints, each by one rename first, so that none is there in part; says what cannot be removed."""
        removed, problem = self.directory.parent / "removed", ""
        for step in steps:
            try:
                removed.mkdir(exist_ok=True)
                (self.directory / str(step)).rename(removed / f"{self.directory.name}-{step}-{secrets.token_hex(4)}")
            except OSError as error:
                problem = f"{self.directory / str(step)} ({error.strerror})"
        shutil.rmtree(removed, ignore_errors=True)
        if removed.exists():
            problem = problem or str(removed)
        if problem and not self._stuck:
            self._stuck = True
            with contextlib.suppress(OSError):
                why = f"an old checkpoint cannot be removed, and stays: {problem}; newer ones are whole."
                console.say(why)

    def _write(self, step: int, arguments: Any) -> None:
        self._manager.save(step, args=arguments)
        if self._processes.is_first:
            files.to_disk(self.directory / str(step))

    def delete(self, step: int) -> None:
        """Removes a checkpoint."""
        _attempt(lambda: self._manager.delete(step))

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
            there = ", ".join(map(str, steps)) or "none"
            raise UnknownStepError(f"no checkpoint {step} in {self.directory}; there are {there}.")
        for each in reversed(steps if step is None else [step]):
            found, problem = self._tried(each, like)
            problem = problem or self._changed(found)
            if problem:
                damaged[each] = f"checkpoint {each} is damaged ({problem})"
                continue
            moved = {} if self._read_only or not damaged else self._set_aside(damaged)
            where = {bad: f"; moved it to {target}" for bad, target in moved.items()}
            said = [f"{why}{where.get(bad, '')}; used {each}." for bad, why in damaged.items()]
            return each, _unflatten(like, found["state"]), said
        detail = f" can be read: {'; '.join(damaged.values())}" if damaged else " yet"
        raise CheckpointError(f"no checkpoint in {self.directory}{detail}.")

    def _tried(self, step: int, like: ArrayTree) -> tuple[Any, str | None]:
        """Reads a checkpoint, or says why a process cannot. An error that may pass is tried again.

        Raises:
          CheckpointError: where it is of something else, or what is wrong says nothing of the checkpoint.
        """
        for pause in (*PAUSES, None):
            found, problem = _attempt(lambda: self._read(step, like))
            if isinstance(found, CheckpointError):
                raise found
            problem = next((there for there in self._processes.everyones(problem) if there), None)
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
        """What is in a checkpoint, or what to say where it is whole but of something else."""
        wanted = {}
        for name, x in _named(like):
            data = jax.eval_shape(jax.random.key_data, x) if is_key(x) else x
            wanted[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
        there = self._ocp.PyTreeCheckpointHandler().metadata(self.directory / str(step) / "state").tree
        for name, x in wanted.items():
            if name in there and (there[name].shape, there[name].dtype) != (x.shape, x.dtype):
                return CheckpointError(
                    f"checkpoint {step} in {self.directory} is of another layout: {name} is {there[name].dtype} "
                    f"{list(there[name].shape)} there and {x.dtype} {list(x.shape)} here; it needs the network, "
                    "devices and actors that it was written with."
                )
        if missing := wanted.keys() - there.keys():
            raise ValueError(f"it has no {min(missing)}")
        arrays = {
            name: self._ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape) for name, x in wanted.items()
        }
        parts = self._ocp.args.PyTreeRestore(wanted, restore_args=arrays, partial_restore=True)
        return self._manager.restore(
            step, args=self._ocp.args.Composite(state=parts, checksums=self._ocp.args.JsonRestore())
        )

    def _changed(self, found: Any) -> str | None:
        """What is wrong with the bytes of a checkpoint, if anything."""
        there = found["checksums"]
        changed = (n for n, checksum in self._checksums(found["state"]).items() if checksum != there.get(n))
        return next((f"the bytes of {name} changed since they were written" for name in changed), None)

    def _checksums(self, leaves: dict[str, jax.Array]) -> dict[str, int]:
        """Of each array, whatever devices and processes hold it."""
        parts = self._processes.everyones({name: _checksum(x) for name, x in leaves.items()})
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
        found = self._processes.everyones({name: _crc(np.asarray(x)) for name, x in copies.items()})
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
        moved = {int(step): target for step, target in self._processes.told(moved).items()}
        self._manager.reload()
        self._see_alike()
        return moved

    def close(self) -> None:
        """Releases what Orbax holds."""
        self._manager.close()


def there_are(directory: pathlib.Path) -> bool:
    """Whether a run directory holds any checkpoint, whole or not."""
    folder = directory / "checkpoints"
    return folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())


def _named(tree: ArrayTree) -> list[tuple[str, Any]]:
    """Leaves with their paths, such as `learner.params.params.value.bias`; Orbax refuses empty ones, so not those."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in pairs if leaf.size]


def _flatten(tree: ArrayTree) -> dict[str, jax.Array]:
    """Leaves by path, random keys as their data."""
    return {name: jax.random.key_data(x) if is_key(x) else x for name, x in _named(tree)}


def _unflatten(like: ArrayTree, leaves: dict[str, jax.Array]) -> ArrayTree:
    named, values = iter(_named(like)), []
    for x in jax.tree.leaves(like):
        if not x.size:
            values.append(jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding))
        elif is_key(x):
            values.append(jax.random.wrap_key_data(leaves[next(named)[0]]))
        else:
            values.append(leaves[next(named)[0]])
    return jax.tree.unflatten(jax.tree.structure(like), values)


def _checksum(x: jax.Array) -> int:
    """This process's part of an array's checksum, whose parts add up to it modulo 2^32.

    The sum of a CRC for each index of the leading dims, which are what shards divide: of a vector for a member, of a
    ring for each shard. Who holds which is not in it.
    """
    total, whole = 0, _leading(x.shape)
    for shard in x.addressable_shards:
        if shard.replica_id:
            continue
        data = np.asarray(shard.data)
        starts = [part.indices(size)[0] for part, size in zip(shard.index, x.shape)]
        if any(data.shape[k] != x.shape[k] for k in range(len(whole), x.ndim)):
            raise NotImplementedError(f"an array {list(x.shape)} is divided behind its first {len(whole)} dims")
        for index in np.ndindex(data.shape[: len(whole)]):
            place = np.ravel_multi_index([i + start for i, start in zip(index, starts)], whole) if whole else 0
            total += _crc(np.asarray(data[index]), int(place) + 1)
    return total % 2**32


def _crc(data: np.ndarray, start: int = 0) -> int:
    # Seen as bytes, not copied: a replay may fill most of the memory.
    return zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data, start)


def _leading(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dims that shards may divide: up to two, the second where it is small."""
    return shape[:2] if len(shape) > 2 or math.prod(shape) <= 4096 else shape[: len(shape) - 1]


def _attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """What Orbax returns, or one line about why it failed: with a full disk or a damaged file it raises anything."""
    with _QUIET:
        try:
            return function(), None
        except Exception as error:
            problem = _reason(error)
        # The other arrays' tasks complain when they end, or are collected, after the first has failed: let them do so
        # here, unheard.
        time.sleep(0.2)
        gc.collect()
        return None, problem


def _reason(error: Exception) -> str:
    """The disk's own words, if it was the disk; else the first line, whole."""
    text = str(error)
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO):
        if os.strerror(code) in text:
            return os.strerror(code)
    for reason in ELSEWHERE:
        if reason in text:
            return reason
    lines = text.partition(". See full TensorStore details")[0].strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


class _Quiet:
    """Orbax warns and logs about things that a user of ours cannot act on.

    Silence is the process': threads that overlap share it, and the last one out gives back what the first one found.
    """

    def __init__(self):
        self._lock, self._inside, self._before = threading.Lock(), 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            self._before.enter_context(warnings.catch_warnings())
            for logger in map(logging.getLogger, LOGGERS):
                self._before.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.CRITICAL)
            self._before.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
            warnings.simplefilter("ignore")
            sys.unraisablehook = lambda unraisable: None

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._before.close()


_QUIET = _Quiet()
