"""Sampling from the ring: sequences are drawn in proportion to their priority."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from podracer.replay.ring import Ring, Sample
from podracer.replay.shape import RingShape, generation_of
from podracer.topology import collectives

BLOCK = 256
"""Priorities in a block. A sample is found by sums of blocks and then within one, so that time and precision hardly
depend on the capacity: a running sum of a million float32 would favour some sequences by more than 10%."""

GROUP = 16
"""Priorities of a block that are summed before they are searched."""


def sample(shape: RingShape, ring: Ring, counts: jax.Array, key: jax.Array, n: int, beta: Any) -> Sample:
    """Draws sequences with replacement, with probability in proportion to their priority, stratified over the ring.

    Proportional prioritised replay (Schaul et al. 2016, sections 3.3 and 3.4, and appendix B.2.1).

    Args:
      shape: the ring's shape.
      ring: with at least one sequence.
      counts: int32 [groups]; rollouts of each group so far.
      key: consumed.
      n: number of samples on this shard.
      beta: float32 []; exponent of the importance weights.
    """
    chex.assert_shape(counts, (shape.groups,))
    chex.assert_shape(ring.priority, (shape.groups * shape.lanes * shape.starts_per_lane,))
    blocks = jnp.pad(ring.priority, (0, -ring.priority.shape[0] % BLOCK)).reshape(-1, BLOCK)
    first_key, second_key = jax.random.split(key)
    # One draw from each of n equal ranges of the total: first a block, then a sequence within it.
    strata = (jnp.arange(n, dtype=jnp.float32) + jax.random.uniform(first_key, (n,))) / n
    sums = jnp.sum(blocks, axis=1)
    block = _invert(sums[None], strata)
    within = _invert(blocks[block], jax.random.uniform(second_key, (n,)))
    index = block * BLOCK + within
    # w = (N P(i))^-beta over its maximum; factors that all shards share, such as N, cancel.
    weight = (ring.priority[index] / jnp.sum(sums)) ** -beta
    generation, newest = generation_of(shape, index, counts)
    return Sample(index, generation, weight / collectives.global_max(weight), newest - generation)


def _invert(priorities: jax.Array, u: jax.Array) -> jax.Array:
    """Finds the index, int32 [n], at which the running sum passes a fraction of the total: the inverse CDF.

    Args:
      priorities: float32 [n or 1, m].
      u: float32 [n]; the fractions, in [0, 1).
    """
    if len(priorities) == 1:
        sums, total = _running_sums(priorities)
        return _count_at_most(lax.cummax(sums[0]), _below(u[:, None] * total, total)[:, 0])
    # A group of a row first, and then one in it: a running sum of the whole row would take longer.
    groups = jnp.pad(priorities, ((0, 0), (0, -priorities.shape[1] % GROUP))).reshape(len(u), -1, GROUP)
    sums, total = _running_sums(jnp.sum(groups, axis=2))
    threshold = u[:, None] * total
    group, before = _first_above(sums, _below(threshold, total))
    sums, total = _running_sums(jnp.take_along_axis(groups, group[:, :, None], axis=1)[:, 0])
    # The compiler may make u * total - before one operation, whose result may be below 0. A threshold below 0 would
    # draw a priority of 0.
    within, _ = _first_above(sums, _below(jnp.maximum(threshold - before, 0.0), total))
    return (group * GROUP + within)[:, 0]


def _running_sums(priorities: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Running sums [n or 1, m], 0 at a priority of 0, and their largest, [n or 1, 1].

    Sums that are computed in parallel may rise by an ulp at a priority of 0, which must not be drawn for that.
    """
    sums = jnp.where(priorities > 0, jnp.cumsum(priorities, axis=1), 0.0)
    return sums, jnp.max(sums, axis=1, keepdims=True)


def _below(threshold: jax.Array, total: jax.Array) -> jax.Array:
    """The threshold, or the largest number below the total, which some sum is above."""
    return jnp.minimum(threshold, jnp.nextafter(total, jnp.zeros_like(total)))


def _first_above(sums: jax.Array, threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds the first of running sums [n, m] above a threshold [n, 1]: its index, int32 [n, 1], and the sum before."""
    place = jnp.arange(sums.shape[1], dtype=jnp.int32)[None]
    index = jnp.min(jnp.where(sums > threshold, place, sums.shape[1]), axis=1, keepdims=True)
    return index, jnp.max(jnp.where(place < index, sums, 0.0), axis=1, keepdims=True)


def _count_at_most(sums: jax.Array, threshold: jax.Array) -> jax.Array:
    """Counts the elements of `sums` [m], which do not fall, that are at most each threshold [n]: int32 [n].

    A binary search of fixed depth: 16 steps for the 41,000 blocks of 10 million rows. Comparing each draw with each
    block would take longer than an update.
    """
    count = jnp.zeros(threshold.shape, jnp.int32)
    for bit in reversed(range(sums.shape[0].bit_length())):
        further = count + 2**bit
        # Element further - 1 is at most the threshold: so are at least `further` elements.
        inside = further <= sums.shape[0]
        reached = inside & (sums[jnp.where(inside, further - 1, 0)] <= threshold)
        count = jnp.where(reached, further, count)
    return count
