"""The programs of a learner of Sebulba, wherever the replay is kept."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podracer.learning.learner import Experience
from podracer.learning.replay_steps import Counts
from podracer.topology import collectives
from podracer.types import ArrayTree, LearnerState, Metrics, Trajectory


class LearnFn(Protocol):
    """Learns from a trajectory."""

    def __call__(
        self,
        state: LearnerState,
        experience: Experience,
        trajectory: Trajectory,
        part: Any,
        progress: jax.Array,
        key: jax.Array,
        /,
    ) -> tuple[LearnerState, Experience, Metrics]:
        """Learns from the `part`-th (int32) of `updates_per_batch` parts of every shard's lanes."""
        ...


class AddFn(Protocol):
    """Adds a trajectory to a replay."""

    def __call__(
        self, experience: Experience, trajectory: Trajectory, num_updates: jax.Array, /
    ) -> tuple[Experience, Metrics]:
        """Adds a trajectory; `num_updates` are the learner's so far."""
        ...


class DrainFn(Protocol):
    """Does pending updates."""

    def __call__(
        self,
        state: LearnerState,
        experience: Experience,
        sums: tuple[Metrics, ...],
        number: Any,
        progress: jax.Array,
        key: jax.Array,
        /,
    ) -> tuple[LearnerState, Experience, tuple[Metrics, ...]]:
        """Does `number` (int32) of the pending updates, and adds their metrics to `sums`."""
        ...


class Programs(NamedTuple):
    """The programs of a learner: `learn`, or where all of a batch is replayed, `add` and then `drain`.

    State and experience are donated.

    Attributes:
      learn: learns from a trajectory.
      add: adds a trajectory to the replay.
      drain: does pending updates.
      at_once: how many updates `drain` does at most.
      seconds: how long it should take.
      nothing: the sums of no update; a tuple of Metrics, by the devices that they are on.
    """

    learn: LearnFn | None = None
    add: AddFn | None = None
    drain: DrainFn | None = None
    at_once: int = 1
    seconds: float = 0.1
    nothing: tuple[Metrics, ...] = ()


class LearnerPrograms(Protocol):
    """A place where a learner's programs run: `learner_program.OnDevices`, or with the replay elsewhere `SplitReplay`.

    Attributes:
      trajectory_mesh: the devices to which trajectories go.
      experience_sharding: of an Experience, a prefix of its tree.
    """

    trajectory_mesh: Mesh
    experience_sharding: Experience

    def ahead(self, state: LearnerState, counts: Counts, ring: ArrayTree) -> Any:
        """The part of an Experience that holds updates prepared before they are due, empty; from shapes of the rest."""
        ...

    def trace(self, state: LearnerState, experience: Experience, trajectory: Trajectory) -> Any:
        """Traces what will be compiled for these shapes, which finds what is wrong with them."""
        ...

    def compile(self, state: LearnerState, experience: Experience, trajectory: Trajectory) -> Programs:
        """Compiles for these shapes.

        Raises:
          OutOfMemoryError: where a device has too little memory.
        """
        ...


def policy_lag(trajectory: Trajectory, num_updates: jax.Array) -> Metrics:
    """Mean and largest number of updates since the acting policy was published."""
    lag = (num_updates - trajectory.policy_version).astype(jnp.float32)
    return {
        "sebulba/policy_lag": collectives.global_mean(lag, jnp.ones_like(lag)),
        "sebulba/policy_lag_max": collectives.global_max(lag),
    }
