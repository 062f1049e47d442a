"""Checkpoints that stay when newer ones come: the best evaluation's, and the snapshots of a game's players."""

from __future__ import annotations

import contextlib
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer.run.checkpoint import Checkpoints
from podracer.run.checksums import flatten
from podracer.run.driver import crossed
from podracer.topology import spread
from podracer.topology.processes import ALONE, Processes
from podracer.types import ArrayTree

BEST = "best"
"""The folder of the checkpoint whose evaluation was the best."""

SNAPSHOTS = "snapshots"
"""The folder of what acted at `SNAPSHOTS_A_RUN` steps of a game's run, evenly spaced: its history of players."""

SNAPSHOTS_A_RUN = 10

SOON_SECONDS = 10.0
"""Seconds in which a second best state waits for a checkpoint, and a second checkpoint for later unless
`checkpoint_every` says when."""


class Best:
    """The checkpoint in `best/`: what learning had made when an evaluation was the best so far.

    Args:
      directory: the run directory.
      scores: the evaluations so far, as (steps, score).
      env_steps: where the run stands; a checkpoint of a later step, of a part that is done again, is removed.
      processes: the processes that share the run.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        scores: Sequence[tuple[int, float]],
        env_steps: int,
        processes: Processes = ALONE,
    ):
        self._checkpoints = Checkpoints(directory, keep=1, name=BEST, processes=processes)
        self._checkpoints.forget(env_steps)
        kept = self._checkpoints.steps()
        self._score = max((score for steps, score in scores if steps in kept), default=-math.inf)
        self._held: tuple[int, dict[str, np.ndarray], dict[str, Any]] | None = None
        # In a pod nothing is held: the processes would have to agree on the time.
        self._seconds, self._written_at = SOON_SECONDS if processes.count == 1 else 0.0, time.monotonic()

    def wants(self, score: float) -> bool:
        """True for a score that is better than that of the state that is kept."""
        return score > self._score

    def offer(self, env_steps: int, score: float, state: ArrayTree) -> None:
        """Writes a state, if it is better than the one that is kept."""
        if self.wants(score):
            self._checkpoints.save(env_steps, state)
            self._score, self._held, self._written_at = score, None, time.monotonic()

    def waits(self) -> bool:
        """True where a state that is better is to be held, because the last one was written just now."""
        return time.monotonic() - self._written_at < self._seconds

    def hold(self, env_steps: int, score: float, state: ArrayTree) -> None:
        """Keeps a copy of a better state in memory, until `write_held` at the next checkpoint."""
        leaves = flatten(state)
        copies = {name: np.array(x) for name, x in leaves.items()}
        self._score, self._held = score, (env_steps, copies, {name: x.sharding for name, x in leaves.items()})

    @property
    def held(self) -> bool:
        """True where a state is held that is not on the disk."""
        return self._held is not None

    def write_held(self) -> None:
        """Writes the state that is held; nothing if there is none."""
        if self._held:
            env_steps, copies, shardings = self._held
            state = {name: jax.device_put(copy, shardings[name]) for name, copy in copies.items()}
            self._checkpoints.save(env_steps, state)
            self._held, self._written_at = None, time.monotonic()

    def close(self) -> None:
        """Writes the state that is held, however the run ends, where that can be; releases what Orbax holds.

        The best one before stays beside it, because a run that goes on may begin before the step of the held one.
        """
        self._checkpoints.keep = 2
        with contextlib.suppress(Exception):  # an error that ends the run is told, and not this one
            self.write_held()
        self._checkpoints.close()


class Snapshots:
    """The checkpoints in `snapshots/`: what acted, at `SNAPSHOTS_A_RUN` steps of a game's run.

    Args:
      directory: the run directory.
      total_steps: of the run.
      env_steps: where the run stands; snapshots of later steps are removed.
      processes: those that share the run.

    Attributes:
      every: steps between two of them.
    """

    def __init__(self, directory: pathlib.Path, total_steps: int, env_steps: int, processes: Processes):
        self.every = max(1, total_steps // SNAPSHOTS_A_RUN)
        self._checkpoints = Checkpoints(directory, keep=None, name=SNAPSHOTS, processes=processes)
        self._checkpoints.forget(env_steps)

    def is_due(self, env_steps: int) -> bool:
        """True where a multiple of `every` was passed since the newest one."""
        return crossed(max(self._checkpoints.steps(), default=-1), env_steps, self.every)

    def save(self, env_steps: int, params: ArrayTree, mesh: Mesh) -> None:
        """Writes parameters of this process's own as a snapshot.

        Args:
          env_steps: its step.
          params: what acted.
          mesh: of the devices that learn, over which all processes of a pod write.
        """
        # A copy on every device, for no process writes arrays that the others do not know of.
        self._checkpoints.save(env_steps, spread(params, NamedSharding(mesh, PartitionSpec())))

    def close(self) -> None:
        """Releases what Orbax holds."""
        self._checkpoints.close()
