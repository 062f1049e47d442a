"""Priority Refresh: sweeps over a replay that recompute all priorities (Mei et al. 2023, SpeedyZero, section 4.3)."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from podracer.replay import ring as rings
from podracer.replay.ring import Ring, Sample
from podracer.replay.shape import RingShape, generation_of
from podracer.types import ArrayTree, ReplaySpec, Trajectory

SEGMENT = 64
"""Rows of every lane whose priorities are recomputed together."""


class NewPrioritiesFn(Protocol):
    """Computes priorities from one set of parameters."""

    def __call__(self, trajectory: Trajectory, age: jax.Array, /) -> jax.Array:
        """Computes priorities [m, L] of the sequences that begin at the first m rows.

        Args:
          trajectory: [m + reach - 1, L].
          age: int32 [m, L]; as in `Batch`.
        """
        ...


def refresh(
    shape: RingShape,
    spec: ReplaySpec,
    ring: Ring,
    counts: jax.Array,
    new_priorities: NewPrioritiesFn,
    version: jax.Array,
    part: tuple[jax.Array, int],
    observations: ArrayTree,
    num_shards: int,
) -> Ring:
    """Runs a part of a sweep, which recomputes the priorities of all rows from one set of parameters.

    The new priorities replace the old ones when the sweep ends (Mei et al. 2023, SpeedyZero, section 4.3). A row added
    during the sweep is swept if the sweep has yet to pass it, and else keeps its first priority. Parts are shares of
    the ring's capacity: while it fills, the first parts have all the rows, and the last none.

    Args:
      shape: the ring's shape.
      spec: the agent's replay settings, with `starts="rows"`.
      ring: consumed.
      counts: int32 [groups]; rollouts of each group so far.
      new_priorities: computes them; `Agent.refresh` with its parameters.
      version: int32 []; `num_updates` of the parameters in `new_priorities`.
      part: int32 [], the part from 0 on, and the number of parts of a sweep (`refresh_interval` / `updates_per_draw`).
      observations: as in `podracer.replay.ring.gather`.
      num_shards: S.
    """
    number, num_parts = part
    rows = shape.slots * shape.rollout_length
    segments = -(-rows // SEGMENT)
    filled = -(-jnp.minimum(jnp.max(counts), shape.slots) * shape.rollout_length // SEGMENT)
    lane = jnp.arange(shape.groups * shape.lanes, dtype=jnp.int32)

    def segment(i: jax.Array, next_priority: jax.Array) -> jax.Array:
        # The last segment ends with the ring, and so may repeat rows of the one before.
        start = jnp.minimum(i * SEGMENT, max(rows - SEGMENT, 0))
        row = start + jnp.arange(min(SEGMENT, rows), dtype=jnp.int32)
        index = lane[None] * shape.starts_per_lane + row[:, None]
        starts = jnp.broadcast_to(start, lane.shape)
        trajectory = rings.cut(shape, spec, ring, lane, starts, row.size + spec.reach, observations)
        generation, newest = generation_of(shape, index, counts)
        sequences = Sample(index, generation, jnp.ones(()), newest - generation)
        age = rings.transitions_since(shape, sequences, num_shards)
        priority = rings.scaled_priority(spec, new_priorities(trajectory, age))
        # 0 stays 0: no complete sequence begins there.
        old = ring.priority[index]
        return next_priority.at[index].set(jnp.where(old > 0, priority, 0.0))

    begin, end = (jnp.minimum(segments * p // num_parts, filled) for p in (number, number + 1))
    ring = ring._replace(next_priority=lax.fori_loop(begin, end, segment, ring.next_priority))
    over = number + 1 == num_parts
    # The sweep's version is the oldest of its parameters.
    oldest = jnp.where(number == 0, version, jnp.minimum(ring.version[1], version))
    # At the end the new priorities replace the old ones, except of rows that the sweep missed or that were overwritten.
    swapped = jnp.where((ring.next_priority > 0) & (ring.priority > 0), ring.next_priority, ring.priority)
    return ring._replace(
        priority=jnp.where(over, swapped, ring.priority),
        largest=jnp.where(over & jnp.any(ring.next_priority > 0), jnp.max(ring.next_priority), ring.largest),
        next_priority=jnp.where(over, 0.0, ring.next_priority),
        version=jnp.stack([jnp.where(over, oldest, ring.version[0]), oldest]),
    )
