"""The static shape of a replay's ring, and the counts of sequences and rollouts that follow from it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracer.types import ReplaySpec


class RingShape(NamedTuple):
    """The static shape of a ring (see `ring_shape`).

    Attributes:
      rollout_length: T, rows of a rollout.
      stride: rows from one start to the next; divides T.
      length: rows of a sequence.
      context: rows before a sequence, to rebuild its frames from.
      lanes: lanes of a group, the lanes of one trajectory on one shard.
      groups: actors that fill the ring in turn; L = groups * lanes.
      slots: W, rollouts of a lane.
    """

    rollout_length: int
    stride: int
    length: int
    context: int
    lanes: int
    groups: int
    slots: int

    @property
    def starts_per_rollout(self) -> int:
        """Starts of sequences in a rollout."""
        return self.rollout_length // self.stride

    @property
    def starts_per_lane(self) -> int:
        """P, starts of sequences in a lane's ring."""
        return self.slots * self.starts_per_rollout

    @property
    def incomplete(self) -> int:
        """Sequences of a lane whose last rows are still to come."""
        return (self.length - 1) // self.stride

    @property
    def context_starts(self) -> int:
        """Starts within the context of a sequence."""
        return -(-self.context // self.stride)

    @property
    def size(self) -> int:
        """Complete sequences that a lane's full ring holds."""
        return self.starts_per_lane - self.incomplete - self.context_starts


def ring_shape(spec: ReplaySpec, *, rollout_length: int, lanes: int, groups: int, num_shards: int) -> RingShape:
    """Computes the shape of a shard's ring, for at least `spec.capacity` sequences over all shards.

    Args:
      spec: the agent's replay settings.
      rollout_length: T.
      lanes: lanes of a group on one shard.
      groups: actors that fill the ring in turn.
      num_shards: S.

    Raises:
      ValueError: for sequences of "rollouts" that are shorter than a rollout and its last row, or a capacity of less
        than one rollout.
    """
    rows, T = spec.starts == "rows", rollout_length
    if not rows and spec.length <= T:
        raise ValueError(
            f"sequences of {spec.length} rows do not hold a rollout of {T} transitions; lower rollout_length to "
            f"{spec.length - 1} or less."
        )
    all_lanes = lanes * groups * num_shards
    per_lane = -(-spec.capacity // all_lanes)
    if rows and per_lane < T:
        raise ValueError(
            f"replay_capacity={spec.capacity} is less than one rollout: {all_lanes} lanes of rollout_length={T} "
            f"bring {all_lanes * T} rows; raise it to {all_lanes * T} or more, or lower rollout_length."
        )
    shape = RingShape(T, 1 if rows else T, spec.length, spec.context, lanes, groups, 0)
    return shape._replace(slots=-(-(per_lane + shape.incomplete + shape.context_starts) // shape.starts_per_rollout))


def num_sequences(shape: RingShape, counts: jax.Array) -> jax.Array:
    """Counts the sequences of a shard, masked ones included, int32 [], after rollouts `counts` int32 [groups]."""
    starts = jnp.minimum(counts, shape.slots) * shape.starts_per_rollout
    complete = starts - shape.incomplete - shape.context_starts
    return shape.lanes * jnp.sum(jnp.maximum(complete, 0))


def generation_of(shape: RingShape, index: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of the rollouts in which sequences begin, and of their lanes' newest ones, int32 [n] each."""
    lane, slot = index // shape.starts_per_lane, index % shape.starts_per_lane // shape.starts_per_rollout
    newest = counts[lane // shape.lanes] - 1
    return newest - (newest - slot) % shape.slots, newest
