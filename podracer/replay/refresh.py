"""Priority Refresh: sweeps over a replay that renew all priorities (Mei et al. 2023, SpeedyZero, section 4.3)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from podracer import replay
from podracer.types import ArrayTree, Replay, Trajectory

SEGMENT = 64
"""Rows of every lane whose priorities are renewed together."""


def refresh(
    plan: replay.Layout,
    spec: Replay,
    ring: replay.Ring,
    counts: jax.Array,
    renew: Callable[[Trajectory, jax.Array], jax.Array],
    version: jax.Array,
    part: tuple[jax.Array, int],
    observations: ArrayTree,
    num_shards: int,
) -> replay.Ring:
    """A part of a sweep over all rows, which gives each a new priority from one set of parameters; its end swaps them
    in (Mei et al. 2023, SpeedyZero, section 4.3).

    What was added since the sweep began keeps its first priority where the sweep has been, and is swept where it still
    comes. Parts are of the ring's capacity: while it fills, the first ones do all there is, the last nothing.

    Args:
      plan: the numbers.
      spec: the agent's, with `starts="rows"`.
      ring: what is there.
      counts: int32 [groups]; rollouts of each group so far.
      renew: `(Trajectory [m + reach - 1, L], age int32 [m, L]) -> priorities [m, L]`; `Agent.refresh`.
      version: int32 []; the update that the parameters of `renew` are of.
      part: int32 [] p, of the I parts of a sweep (`refresh_interval` / `group`), from 0, and I.
      observations: as in `podracer.replay.gather`.
      num_shards: S.
    """
    number, of = part
    rows = plan.slots * plan.rollout_length
    segments = -(-rows // SEGMENT)
    filled = -(-jnp.minimum(jnp.max(counts), plan.slots) * plan.rollout_length // SEGMENT)
    lane = jnp.arange(plan.groups * plan.lanes, dtype=jnp.int32)

    def segment(i: jax.Array, fresh: jax.Array) -> jax.Array:
        # The last one ends with the ring, and so may go over rows that the one before went over.
        start = jnp.minimum(i * SEGMENT, max(rows - SEGMENT, 0))
        at = start + jnp.arange(min(SEGMENT, rows), dtype=jnp.int32)
        index = lane[None] * plan.places + at[:, None]
        starts = jnp.broadcast_to(start, lane.shape)
        trajectory = replay.cut(plan, spec, ring, lane, starts, at.size + spec.reach, observations)
        generation, newest = replay.generation_of(plan, index, counts)
        here = replay.Sample(index, generation, jnp.ones(()), newest - generation)
        mass = replay.mass_of(spec, renew(trajectory, replay.transitions_since(plan, here, num_shards)))
        old = ring.priority[index]
        return fresh.at[index].set(jnp.where(old > 0, mass, 0.0))

    begin, end = (jnp.minimum(segments * p // of, filled) for p in (number, number + 1))
    ring = ring._replace(fresh=lax.fori_loop(begin, end, segment, ring.fresh))
    over = number + 1 == of
    # Were the parameters of a sweep ever several, all of it would be as old as the oldest.
    oldest = jnp.where(number == 0, version, jnp.minimum(ring.version[1], version))
    swapped = jnp.where((ring.fresh > 0) & (ring.priority > 0), ring.fresh, ring.priority)
    return ring._replace(
        priority=jnp.where(over, swapped, ring.priority),
        largest=jnp.where(over & jnp.any(ring.fresh > 0), jnp.max(ring.fresh), ring.largest),
        fresh=jnp.where(over, 0.0, ring.fresh),
        version=jnp.stack([jnp.where(over, oldest, ring.version[0]), oldest]),
    )
