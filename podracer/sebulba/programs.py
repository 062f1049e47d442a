"""The programs of a learner of Sebulba, wherever the replay is kept."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podracer.learning.learner import ReplayState
from podracer.learning.replay_steps import Counts
from podracer.topology import HostTopology, collectives
from podracer.types import ArrayTree, LearnerState, Metrics, Trajectory


class LearnPartFn(Protocol):
    """Learns from a trajectory."""

    def __call__(
        self,
        state: LearnerState,
        replay_state: ReplayState,
        trajectory: Trajectory,
        part: Any,
        progress: jax.Array,
        key: jax.Array,
        /,
    ) -> tuple[LearnerState, ReplayState, Metrics]:
        """Learns from the `part`-th (int32) of `updates_per_batch` parts of every shard's lanes."""
        ...


class AddFn(Protocol):
    """Adds a trajectory to a replay."""

    def __call__(
        self, replay_state: ReplayState, trajectory: Trajectory, num_updates: jax.Array, /
    ) -> tuple[ReplayState, Metrics]:
        """Adds a trajectory; `num_updates` are the learner's so far."""
        ...


class RunPendingFn(Protocol):
    """Does pending updates."""

    def __call__(
        self,
        state: LearnerState,
        replay_state: ReplayState,
        sums: tuple[Metrics, ...],
        num_draws: Any,
        progress: jax.Array,
        key: jax.Array,
        /,
    ) -> tuple[LearnerState, ReplayState, tuple[Metrics, ...]]:
        """Does `num_draws` (int32) draws of pending updates, and adds their metrics to `sums`."""
        ...


class Programs(NamedTuple):
    """The programs of a learner: `learn`, or where all of a batch is replayed, `add` and then
    `run_pending_updates`.

    State and replay state are donated.

    Attributes:
      learn: learns from a trajectory.
      add: adds a trajectory to the replay.
      run_pending_updates: does pending updates.
      at_once: how many draws of updates `run_pending_updates` does at most.
      seconds: how long it should take.
      zero_sums: the sums of no update; a tuple of Metrics, by the devices that they are on.
    """

    learn: LearnPartFn | None = None
    add: AddFn | None = None
    run_pending_updates: RunPendingFn | None = None
    at_once: int = 1
    seconds: float = 0.1
    zero_sums: tuple[Metrics, ...] = ()


class LearnerPrograms(Protocol):
    """A place where a learner's programs run: `learner_devices.OnDevices`, or with the replay
    elsewhere `replay_devices.SplitReplay`.

    Attributes:
      trajectory_mesh: the devices to which trajectories go.
      replay_sharding: of a ReplayState, a prefix of its tree.
    """

    trajectory_mesh: Mesh
    replay_sharding: ReplayState

    def empty_prefetched(self, state: LearnerState, counts: Counts, ring: ArrayTree) -> Any:
        """Makes an empty `ReplayState.prefetched` from the shapes of the rest; () where nothing is prefetched."""
        ...

    def trace(self, state: LearnerState, replay_state: ReplayState, trajectory: Trajectory) -> Any:
        """Traces what will be compiled for these shapes, which finds what is wrong with them."""
        ...

    def compile(self, state: LearnerState, replay_state: ReplayState, trajectory: Trajectory) -> Programs:
        """Compiles for these shapes.

        Raises:
          OutOfMemoryError: where a device has too little memory.
        """
        ...


def actor_index(trajectory: Trajectory, layout: HostTopology) -> jax.Array:
    """Returns the index of the actor in its replica that made a trajectory, int32 [], the same on all shards."""
    return trajectory.lane[0] // layout.envs_per_actor % layout.threads


def policy_lag(trajectory: Trajectory, num_updates: jax.Array) -> Metrics:
    """Mean and largest number of updates since the acting policy was published."""
    lag = (num_updates - trajectory.policy_version).astype(jnp.float32)
    return {
        "sebulba/policy_lag": collectives.global_mean(lag, jnp.ones_like(lag)),
        "sebulba/policy_lag_max": collectives.global_max(lag),
    }
