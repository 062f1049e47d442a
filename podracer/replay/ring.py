"""Replay: a ring of rollouts per lane, from which overlapping sequences are sampled, uniformly or by priority.

A sequence has `length` rows. With `starts="rollouts"` it begins at row 0 of a rollout of T rows, whose recurrent state
is stored. With `starts="rows"`, for agents without such a state, it begins at any row that is not masked. Observations
are stored once, as single frames: the frames before a sequence are rebuilt from its `context` rows.

    rollout      |  j-1  |   j   |  j+1  |  j+2  |  j+3  |      T = 40
    "rollouts"        ccc|===========================|          length 121, context 3, stride 40
    "rows"            ccc|==|                                   length 4, context 3, stride 1
                       ccc|==|

Everything is a pure function of arrays of one shard, to be donated. The number of rollouts so far is a count that all
shards share (`Counts`), so that branches around collectives may read it. Lanes, groups, slots: docs/glossary.md.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from podracer.replay.shape import RingShape, generation_of
from podracer.trajectories import flat, shaped
from podracer.types import ArrayTree, ReplaySpec, TimeStep, Trajectory

LEAST_PRIORITY = 1e-6
"""The smallest priority: a sequence without error can still be drawn, with a finite weight."""


class Ring(NamedTuple):
    """The ring buffer of a shard: L lanes, W rollouts of T rows each. An empty one is all zeros.

    Attributes:
      rows: TimeStep of [L, W T, ...]; observations are flat, [L, W T, F].
      actions: tree of [L, W T, ...].
      extras: tree of [L, W T, ...].
      policy_version: int32 [L, W T].
      actor_state: tree of [L, W, ...]; `ReplaySpec.keep` of the agent's state before each rollout.
      lane: int32 [L]; the global index of each lane.
      priority: float32 [L P]; scaled priorities (to the power of the exponent) of the P starts of each lane; 0 for a
        start without a complete sequence.
      largest: float32 []; the largest scaled priority so far, for new sequences if the agent gives them none; 0
        stands for 1.
      next_priority: float32 [L P]; new priorities that the sweep in progress has computed, 0 elsewhere; they replace
        `priority` when it ends (see `podracer.replay.priority_refresh`). () without sweeps.
      version: int32 [2]; `num_updates` of the parameters that computed `priority` and `next_priority`; () without
        sweeps.
    """

    rows: TimeStep
    actions: ArrayTree
    extras: ArrayTree
    policy_version: jax.Array
    actor_state: ArrayTree
    lane: jax.Array
    priority: jax.Array
    largest: jax.Array
    next_priority: Any = ()
    version: Any = ()


class Sample(NamedTuple):
    """Positions of sampled sequences in the ring, [n].

    Attributes:
      index: int32; into `Ring.priority`.
      generation: int32; the number, since the run began, of the rollout in which the sequence begins.
      weight: float32; importance weight, at most 1 over the samples of all shards.
      age: int32; rollouts of the lane since that rollout.
    """

    index: jax.Array
    generation: jax.Array
    weight: jax.Array
    age: jax.Array


def init(shape: RingShape, spec: ReplaySpec, trajectory: Trajectory) -> Ring:
    """Makes an empty ring.

    Args:
      shape: the ring's shape.
      spec: the agent's replay settings.
      trajectory: [T, lanes]; an example (shapes will do).

    Raises:
      ValueError: if sequences begin at every row, and the agent stores a state of every rollout.
    """
    L, rows = shape.groups * shape.lanes, shape.slots * shape.rollout_length
    by_row = lambda tree: jax.tree.map(lambda x: jnp.zeros((L, rows, *x.shape[2:]), x.dtype), tree)  # noqa: E731
    timesteps = trajectory.timesteps
    flat_rows = timesteps._replace(observation=jax.eval_shape(lambda x: flat(x, 2), timesteps.observation))
    stored_state = jax.eval_shape(spec.keep, trajectory.actor_state)
    if spec.starts == "rows" and jax.tree.leaves(stored_state):
        raise ValueError("sequences begin at every row: recurrent networks, whose state only rollouts have, cannot.")
    return Ring(
        rows=by_row(flat_rows),
        actions=by_row(trajectory.actions),
        extras=by_row(_stored(spec, trajectory.extras)),
        policy_version=by_row(trajectory.policy_version),
        actor_state=jax.tree.map(lambda x: jnp.zeros((L, shape.slots, *x.shape[1:]), x.dtype), stored_state),
        lane=jnp.zeros(L, jnp.int32),
        priority=jnp.zeros(L * shape.starts_per_lane),
        largest=jnp.float32(0),
        next_priority=jnp.zeros(L * shape.starts_per_lane) if spec.refresh_interval else (),
        version=jnp.zeros(2, jnp.int32) if spec.refresh_interval else (),
    )


def add(
    shape: RingShape,
    spec: ReplaySpec,
    ring: Ring,
    trajectory: Trajectory,
    actor_index: jax.Array | int,
    number: jax.Array | int,
) -> Ring:
    """Writes a rollout over the oldest one of its lanes; sequences that it completes get their first priority.

    Args:
      shape: the ring's shape.
      spec: the agent's replay settings.
      ring: consumed; donate it.
      trajectory: [T, lanes]; row T is not stored, because it is row 0 of the lane's next rollout.
      actor_index: int32 []; the actor whose lanes these are.
      number: int32 []; rollouts of this actor so far.
    """
    T, B = shape.rollout_length, shape.lanes
    chex.assert_tree_shape_prefix(trajectory.timesteps, (T + 1, B))
    chex.assert_tree_shape_prefix((trajectory.actions, trajectory.extras, trajectory.policy_version), (T, B))
    chex.assert_shape(trajectory.lane, (B,))
    slot = number % shape.slots

    def write_rows(buffer: jax.Array, x: jax.Array) -> jax.Array:
        return _write(buffer, jnp.moveaxis(x[:T], 0, 1), (actor_index * B, slot * T))

    def write_state(buffer: jax.Array, x: jax.Array) -> jax.Array:
        return _write(buffer, x[:, None], (actor_index * B, slot))

    # Lane-major: the rows of a lane are consecutive, so that a sequence is one slice of them.

    timesteps = trajectory.timesteps._replace(observation=flat(trajectory.timesteps.observation, 2))
    ring = ring._replace(
        rows=jax.tree.map(write_rows, ring.rows, timesteps),
        actions=jax.tree.map(write_rows, ring.actions, trajectory.actions),
        extras=jax.tree.map(write_rows, ring.extras, _stored(spec, trajectory.extras)),
        policy_version=write_rows(ring.policy_version, trajectory.policy_version),
        actor_state=jax.tree.map(write_state, ring.actor_state, spec.keep(trajectory.actor_state)),
        lane=_write(ring.lane, trajectory.lane, (actor_index * B,)),
    )
    lanes = actor_index * B + jnp.arange(B, dtype=jnp.int32)[None]
    # The rollout completes the sequences of the starts `new`, and overwrites rows or context of the starts `lost`.
    # Starts are counted from the slot's first, so that no number grows with the run.
    first, per_rollout = slot * shape.starts_per_rollout, shape.starts_per_rollout
    new = first - shape.incomplete + jnp.arange(per_rollout, dtype=jnp.int32)
    lost = first + jnp.arange(per_rollout + shape.context_starts, dtype=jnp.int32)
    index = lambda starts: lanes * shape.starts_per_lane + starts[:, None] % shape.starts_per_lane  # noqa: E731
    take = lambda rows: lambda x: x[lanes, rows[:, None] % (shape.slots * T)]  # noqa: E731
    # Left out: sequences with context before the run's first row, and those that begin with a masked transition.
    valid = (new - first + jnp.minimum(number, shape.slots) * per_rollout >= shape.context_starts)[:, None]
    if spec.starts == "rows":
        valid = valid & ~take(new + 1)(ring.rows.first)
    # The first priority: the agent's, or the largest so far (Schaul et al. 2016, algorithm 1).
    if spec.priority is None:
        priority = _largest(ring)
    else:
        rows = new[0] * shape.stride + jnp.arange(per_rollout - 1 + shape.length, dtype=jnp.int32)
        timesteps = jax.tree.map(take(rows), ring.rows._replace(observation=()))
        extras = jax.tree.map(take(rows), ring.extras)
        for name in spec.acting_numbers:
            extras = extras | {name: jnp.broadcast_to(trajectory.extras[name][0], (len(rows), B))}
        priority = scaled_priority(spec, spec.priority(timesteps, extras))
    cleared = ring.priority.at[index(lost)].set(0.0)
    # A new sequence keeps its first priority until a sweep passes it.
    next_priority = ring.next_priority.at[index(lost)].set(0.0) if spec.refresh_interval else ()
    return ring._replace(
        priority=cleared.at[index(new)].set(jnp.where(valid, priority, 0.0)), next_priority=next_priority
    )


def _stored(spec: ReplaySpec, extras: ArrayTree) -> ArrayTree:
    if not spec.acting_numbers:
        return extras  # any tree
    return {name: extras[name] for name in extras if name not in spec.acting_numbers}


def _write(buffer: jax.Array, x: jax.Array, start: tuple[Any, ...]) -> jax.Array:
    """Writes `x` into a buffer at index `start`; dims after those of `start` are written whole.

    `vmap` would turn the slice update into a scatter, which accelerators do not do in place. The shards of a device all
    write at the same index, so this stays one slice update for all of them.
    """
    return _writer(0)(buffer, x, *(jnp.asarray(i, jnp.int32) for i in start))


@functools.cache
def _writer(batch_dims: int) -> Any:
    """Makes a slice update for arrays with `batch_dims` leading batch dims."""

    @jax.custom_batching.custom_vmap
    def write(buffer: jax.Array, x: jax.Array, *start: jax.Array) -> jax.Array:
        zero = (jnp.int32(0),)
        rest = buffer.ndim - batch_dims - len(start)
        return lax.dynamic_update_slice(buffer, x, (*zero * batch_dims, *start, *zero * rest))

    @write.def_vmap
    def over_batch(size: int, batched: Any, buffer: jax.Array, x: jax.Array, *start: jax.Array) -> Any:
        if any(batched[2:]):  # an index of its own for each: only a scatter can do that
            axes = [0 if is_batched else None for is_batched in batched]
            return jax.vmap(write.fun, axes, axis_size=size)(buffer, x, *start), True
        buffer, x = (
            array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
            for array, is_batched in zip((buffer, x), batched[:2])
        )
        return _writer(batch_dims + 1)(buffer, x, *start), True

    return write


def transitions_since(shape: RingShape, samples: Sample, num_shards: int) -> jax.Array:
    """Counts transitions of all lanes on all shards since row 0 of sampled sequences, int32 [n]."""
    row = samples.index % shape.starts_per_lane * shape.stride % shape.rollout_length
    return ((samples.age + 1) * shape.rollout_length - row) * (shape.groups * shape.lanes * num_shards)


def gather(shape: RingShape, spec: ReplaySpec, ring: Ring, samples: Sample, observations: ArrayTree) -> Trajectory:
    """Gathers sampled sequences as a trajectory [length - 1, n], observations in `ReplaySpec.observation_rows`.

    Args:
      shape: the ring's shape.
      spec: the agent's replay settings.
      ring: the ring.
      samples: [n]; the samples.
      observations: tree of [any, any, ...]; example observations (shapes will do), because the ring stores them flat.
    """
    lane, start = samples.index // shape.starts_per_lane, samples.index % shape.starts_per_lane
    return cut(shape, spec, ring, lane, start * shape.stride, shape.length, observations, spec.observation_rows)


def cut(
    shape: RingShape,
    spec: ReplaySpec,
    ring: Ring,
    lane: jax.Array,
    start: jax.Array,
    length: int,
    observations: ArrayTree,
    observation_rows: int | None = None,
) -> Trajectory:
    """Cuts a trajectory [length - 1, n] out of the ring; further arguments as in `gather`.

    Args:
      shape: the ring's shape.
      spec: the agent's replay settings.
      ring: the ring.
      lane: int32 [n]; index of each lane in the ring.
      start: int32 [n]; row of each lane's ring to begin at.
      length: rows, the bootstrap row included.
      observations: as in `gather`.
      observation_rows: number of first rows with observations; None for all.
    """
    take = lambda rows: lambda x: x[lane[None], rows]  # noqa: E731
    # The agent's state before row 0: the stored part of it, and the frames of the context rows.
    context_rows = _rows(shape, start, range(-shape.context, 0))
    rows = _rows(shape, start, range(length))
    stored_state = jax.tree.map(lambda x: x[lane, start // shape.rollout_length], ring.actor_state)
    observation = lambda rows: shaped(jax.tree.map(take(rows), ring.rows.observation), 2, observations)  # noqa: E731
    context = (observation(context_rows), take(context_rows)(ring.rows.first))
    timesteps = jax.tree.map(take(rows), ring.rows._replace(observation=()))
    return Trajectory(
        timesteps=timesteps._replace(observation=observation(rows[:observation_rows])),
        actions=jax.tree.map(take(rows[:-1]), ring.actions),
        extras=jax.tree.map(take(rows[:-1]), ring.extras),
        actor_state=spec.restore(stored_state, *context),
        policy_version=take(rows[:-1])(ring.policy_version),
        lane=ring.lane[lane],
    )


def write(
    shape: RingShape, spec: ReplaySpec, ring: Ring, counts: jax.Array, samples: Sample, priority: jax.Array
) -> tuple[Ring, jax.Array]:
    """Writes new priorities of sampled sequences. If a sequence was sampled twice, the last one counts.

    With an exponent of 0 there is nothing to write. Rollouts may have been added since the sample was drawn.

    Args:
      shape: the ring's shape.
      spec: the agent's replay settings.
      ring: consumed.
      counts: int32 [groups]; rollouts of each group so far.
      samples: [n]; the samples.
      priority: float32 [n]; before the exponent.

    Returns:
      The ring, and the number of sequences that were overwritten after they were sampled, float32 []. Their priorities
      are dropped.
    """
    chex.assert_equal_shape([samples.index, samples.generation, priority])
    # A sequence is still in the ring if its slot has the same rollout as when it was sampled.
    generation, _ = generation_of(shape, samples.index, counts)
    valid = (generation == samples.generation) & (ring.priority[samples.index] > 0)
    overwritten = jnp.sum((~valid).astype(jnp.float32))
    if spec.priority_exponent == 0:  # every priority stays 1
        return ring, overwritten
    # Duplicates are dropped but for the last, because a GPU writes them in no fixed order.
    duplicate = jnp.any(jnp.triu(samples.index[:, None] == samples.index[None], k=1), axis=1)
    # An index out of bounds writes nothing.
    index = jnp.where(valid & ~duplicate, samples.index, ring.priority.shape[0])
    scaled = scaled_priority(spec, priority)
    ring = ring._replace(priority=ring.priority.at[index].set(scaled, mode="drop"))
    if spec.priority is None:
        ring = ring._replace(largest=jnp.maximum(_largest(ring), jnp.max(scaled)))
    return ring, overwritten


class PriorityState(NamedTuple):
    """The fields of a `Ring` that learning changes; rows stay as they are."""

    priority: jax.Array
    largest: jax.Array
    next_priority: Any
    version: Any


def priority_state(ring: Ring) -> PriorityState:
    """Takes the fields that learning changes out of a ring."""
    return PriorityState(ring.priority, ring.largest, ring.next_priority, ring.version)


def with_priority_state(ring: Ring, state: PriorityState) -> Ring:
    """Puts the fields that learning changes into a ring."""
    return ring._replace(**state._asdict())


def _largest(ring: Ring) -> jax.Array:
    return jnp.where(ring.largest > 0, ring.largest, 1.0)


def scaled_priority(spec: ReplaySpec, priority: jax.Array) -> jax.Array:
    """Computes p^alpha, as in `Ring.priority`, of priorities of any shape."""
    return jnp.maximum(priority, LEAST_PRIORITY) ** spec.priority_exponent


def _rows(shape: RingShape, start: jax.Array, offsets: range) -> jax.Array:
    """Computes ring indices int32 [m, n] of the rows at `offsets` [m] from rows `start` int32 [n]."""
    rows = start[None] + jnp.arange(offsets.start, offsets.stop, dtype=jnp.int32)[:, None]
    return rows % (shape.slots * shape.rollout_length)
