"""A call of Anakin's program: the limits that end it, and its report."""

from __future__ import annotations

from typing import NamedTuple

import jax

from podracer.learning.counter import Counter
from podracer.types import EpisodeStats, Metrics

SAVE = -1
"""The value of `Limits.max_updates` with which a process asks for a checkpoint."""


class Limits(NamedTuple):
    """The end of a call: after `until` environment steps or `max_updates` updates, whichever is first.

    Attributes:
      until: environment steps of each member, the same on every device.
      total_steps: length of schedules in environment steps, the same on every device.
      max_updates: int32 [population, data], one for each device of the mesh; the least one counts. Processes that share
        a program vote by it on what only they know, such as signals and clocks. 0 does no update, and stops all
        processes; `SAVE` does none either, and all save a checkpoint.
    """

    until: Counter
    total_steps: Counter
    max_updates: jax.Array


class Report(NamedTuple):
    """The results of a call, for each member [P].

    Attributes:
      metrics: sums over updates; divide by `updates`.
      episodes: sums over the episodes that ended.
      updates: int32; rollouts of this call; one update each, or as many as a replay ratio demands.
      num_updates: int32; updates of the learner since the run began.
      env_steps: real transitions since the run began.
      finite: bool; every metric of every update was a finite number.
      max_updates: int32; the least of the votes.
    """

    metrics: Metrics
    episodes: EpisodeStats
    updates: jax.Array
    num_updates: jax.Array
    env_steps: Counter
    finite: jax.Array
    max_updates: jax.Array
