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
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.types import ArrayTree

BEST = "best"
"""The folder of the checkpoint whose evaluation was the best."""

SNAPSHOTS = "snapshots"
"""The folder of what acted at `SNAPSHOTS_A_RUN` steps of a game's run, evenly spaced: its history of players."""

SNAPSHOTS_A_RUN = 10


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
    """

    def __init__(
        self, directory: str | pathlib.Path, keep: int | None = 3, *, name: str = "checkpoints", read_only: bool = False
    ):
        import orbax.checkpoint as ocp

        self.directory = pathlib.Path(directory).absolute() / name
        self._ocp, self._read_only = ocp, read_only
        try:
            if not read_only:
                self.directory.mkdir(parents=True, exist_ok=True)
            with _quiet():
                options = ocp.CheckpointManagerOptions(
                    max_to_keep=keep,
                    enable_async_checkpointing=False,  # it counts only once it is on disk, and a run writes few
                    cleanup_tmp_directories=not read_only,  # what a process that was killed had begun to write
                    read_only=read_only,
                )
                self._manager = ocp.CheckpointManager(self.directory, options=options)
        except OSError as error:
            raise CheckpointError(f"cannot use {self.directory} for checkpoints: {error}") from error

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: ArrayTree) -> None:
        """Writes `state` as checkpoint `step`, unless that exists; the write is atomic.

        Raises:
          CheckpointError: where the disk refuses; earlier checkpoints are intact.
        """
        if step in self.steps():
            return
        leaves = _flatten(state)
        arguments = self._ocp.args.Composite(
            state=self._ocp.args.PyTreeSave(leaves),
            checksums=self._ocp.args.JsonSave({name: _checksum(x) for name, x in leaves.items()}),
        )
        _, problem = _attempt(lambda: self._manager.save(step, args=arguments))
        if problem:
            raise CheckpointError(
                f"could not write checkpoint {step} in {self.directory}: {problem}. Earlier checkpoints are intact."
            )

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
            state, problem = _attempt(lambda each=each: self._read(each, like))
            if isinstance(state, CheckpointError):
                raise state
            if problem:
                damaged[each] = f"checkpoint {each} is damaged ({problem})"
                continue
            moved = {bad: f"; moved it to {self._set_aside(bad)}" for bad in damaged if not self._read_only}
            return each, state, [f"{why}{moved.get(bad, '')}; used {each}." for bad, why in damaged.items()]
        detail = f" can be read: {'; '.join(damaged.values())}" if damaged else " yet"
        raise CheckpointError(f"no checkpoint in {self.directory}{detail}.")

    def _read(self, step: int, like: ArrayTree) -> ArrayTree | CheckpointError:
        """A checkpoint, or what to say where it is whole but of something else."""
        wanted = {}
        for name, x in _named(like):
            data = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
            wanted[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)
        there = self._ocp.PyTreeCheckpointHandler().metadata(self.directory / str(step) / "state").tree
        for name, x in wanted.items():
            if name in there and (there[name].shape, there[name].dtype) != (x.shape, x.dtype):
                return CheckpointError(
                    f"checkpoint {step} in {self.directory} is of another layout: {name} is {there[name].dtype} "
                    f"{list(there[name].shape)} there and {x.dtype} {list(x.shape)} here; it needs the network, "
                    "devices and actors that it was written with."
                )
        arrays = {
            name: self._ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape) for name, x in wanted.items()
        }
        parts = self._ocp.args.PyTreeRestore(wanted, restore_args=arrays, partial_restore=True)
        found = self._manager.restore(
            step, args=self._ocp.args.Composite(state=parts, checksums=self._ocp.args.JsonRestore())
        )
        for name, x in found["state"].items():
            if _checksum(x) != found["checksums"][name]:
                raise ValueError(f"the bytes of {name} changed since they were written")
        return _unflatten(like, found["state"])

    def _set_aside(self, step: int) -> pathlib.Path:
        target = self.directory.parent / "damaged" / str(step)
        target.parent.mkdir(exist_ok=True)
        while target.exists():
            target = target.with_name(target.name + "-again")
        (self.directory / str(step)).rename(target)
        self._manager.reload()
        return target

    def close(self) -> None:
        """Releases what Orbax holds."""
        self._manager.close()


class Best:
    """The checkpoint in `best/`: what learning had made when an evaluation was the best so far.

    Args:
      directory: the run directory.
      scores: of the evaluations so far.
      env_steps: where the run stands; a checkpoint of a later step, of a part that is done again, is removed.
    """

    def __init__(self, directory: pathlib.Path, scores: Sequence[float], env_steps: int):
        self._checkpoints = Checkpoints(directory, keep=1, name=BEST)
        self._checkpoints.forget(env_steps)
        self._score = max(scores, default=-math.inf) if self._checkpoints.steps() else -math.inf

    def offer(self, env_steps: int, score: float, state: ArrayTree) -> None:
        """Keeps a state, if it is better than the one that is kept."""
        if score > self._score:
            self._checkpoints.save(env_steps, state)
            self._score = score

    def close(self) -> None:
        self._checkpoints.close()


def there_are(directory: pathlib.Path) -> bool:
    """Whether a run directory holds any checkpoint, whole or not."""
    folder = directory / "checkpoints"
    return folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _named(tree: ArrayTree) -> list[tuple[str, Any]]:
    """Leaves with their paths, such as `learner.params.params.value.bias`; Orbax refuses empty ones, so not those."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in pairs if leaf.size]


def _flatten(tree: ArrayTree) -> dict[str, jax.Array]:
    """Leaves by path, random keys as their data."""
    return {name: jax.random.key_data(x) if _is_key(x) else x for name, x in _named(tree)}


def _unflatten(like: ArrayTree, leaves: dict[str, jax.Array]) -> ArrayTree:
    named, values = iter(_named(like)), []
    for x in jax.tree.leaves(like):
        if not x.size:
            values.append(jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding))
        elif _is_key(x):
            values.append(jax.device_put(jax.random.wrap_key_data(leaves[next(named)[0]]), x.sharding))
        else:
            values.append(leaves[next(named)[0]])
    return jax.tree.unflatten(jax.tree.structure(like), values)


def _checksum(x: jax.Array) -> int:
    # Seen as bytes, not copied: a replay may fill most of the memory.
    return zlib.crc32(np.ascontiguousarray(jax.device_get(x)).reshape(-1).view(np.uint8).data)


def _attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """What Orbax returns, or one line about why it failed: with a full disk or a damaged file it raises anything."""
    with _quiet():
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
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES):
        if os.strerror(code) in text:
            return os.strerror(code)
    lines = text.partition(". See full TensorStore details")[0].strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


@contextlib.contextmanager
def _quiet():
    """Orbax warns and logs about things that a user of ours cannot act on."""
    level, hook = logging.root.manager.disable, sys.unraisablehook
    logging.disable(logging.ERROR)
    sys.unraisablehook = lambda unraisable: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        sys.unraisablehook = hook
