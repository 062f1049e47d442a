"""Checkpoints that stay when newer ones come: the best evaluation's, and the snapshots of a game's players."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer.run.checkpoint import Checkpoints
from podracer.run.driver import crossed
from podracer.topology import spread
from podracer.topology.processes import ALONE, Processes
from podracer.types import ArrayTree

BEST = "best"
"""The folder of the checkpoint whose evaluation was the best."""

SNAPSHOTS = "snapshots"
"""The folder of what acted at `SNAPSHOTS_A_RUN` steps of a game's run, evenly spaced: its history of players."""

SNAPSHOTS_A_RUN = 10


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

    def wants(self, score: float) -> bool:
        """True for a score that is better than that of the state that is kept."""
        return score > self._score

    def offer(self, env_steps: int, score: float, state: ArrayTree) -> None:
        """Keeps a state, if it is better than the one that is kept."""
        if self.wants(score):
            self._checkpoints.save(env_steps, state)
            self._score = score

    def close(self) -> None:
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
