"""What a learner of Sebulba runs about a rollout, wherever the replay is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracer.learning.learner import Experience
from podracer.topology import collectives
from podracer.types import LearnerState, Metrics, Trajectory


class Programs(NamedTuple):
    """What a learner does about a rollout: `learn`, or where all of a batch is replayed, `add` and then `drain`.

    State and experience are donated.

    Attributes:
      learn: `(LearnerState, Experience, Trajectory, part int32, progress, key) -> (LearnerState, Experience, Metrics)`;
        learns from the `part`-th of `updates_per_batch` parts of every shard's lanes.
      add: `(Experience, Trajectory, num_updates) -> (Experience, Metrics)`; `num_updates` are the learner's so far.
      drain: `(LearnerState, Experience, sums, number int32, progress, key) -> (LearnerState, Experience, sums)`;
        so many of the pending updates, whose metrics are added.
      at_once: how many updates `drain` does at most.
      seconds: how long it should take.
      nothing: the sums of no update; a tuple of Metrics, by the devices that they are on.
    """

    learn: Callable[..., tuple[LearnerState, Experience, Metrics]] | None = None
    add: Callable[..., tuple[Experience, Metrics]] | None = None
    drain: Callable[..., tuple[LearnerState, Experience, tuple[Metrics, ...]]] | None = None
    at_once: int = 1
    seconds: float = 0.1
    nothing: tuple[Metrics, ...] = ()


def policy_lag(trajectory: Trajectory, num_updates: jax.Array) -> Metrics:
    """How many updates older than the learner the policy was that acted."""
    lag = (num_updates - trajectory.policy_version).astype(jnp.float32)
    return {
        "sebulba/policy_lag": collectives.global_mean(lag, jnp.ones_like(lag)),
        "sebulba/policy_lag_max": collectives.global_max(lag),
    }
