"""Replay: a ring of rollouts per lane, from which overlapping sequences are sampled, uniformly or by priority.

A sequence has `length` rows and begins where a rollout of T rows began, so a new one begins every T rows, and the
recurrent state that belongs to it is the one the rollout came with. Observations are stored once, as single frames:
the frames before a sequence are rebuilt from its `context` rows.

    rollout      |  j-1  |   j   |  j+1  |  j+2  |  j+3  |      T = 40
    sequence j        ccc|===========================|          length 121, context 3

Everything is a pure function of arrays of one shard, to be donated; which rollouts are there is a count that is the
same everywhere (`Counts`), so that branches around collectives may read it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer.learning import collectives
from podracer.learning.trajectories import flat, shaped
from podracer.types import ArrayTree, Replay, TimeStep, Trajectory

BLOCK = 256
"""Priorities are summed in blocks of this many to find a sample, in time and precision that hardly depend on how many
there are: a running sum of a million float32 would favour some of them by more than 10%."""


LEAST_PRIORITY = 1e-6
"""What priorities are raised to: a sequence that is learnt to the last bit can still be drawn, with a finite weight."""


class Ring(NamedTuple):
    """What a shard remembers, of L lanes and W rollouts of T rows each.

    Attributes:
      rows: TimeStep of [L, W T, ...]; observations are flat, [L, W T, F].
      actions: tree of [L, W T, ...].
      extras: tree of [L, W T, ...].
      policy_version: int32 [L, W T].
      actor_state: tree of [L, W, ...]; what the agent keeps of its state before each rollout.
      lane: int32 [L].
      priority: float32 [L W]; to the power of the exponent; 0 where no sequence begins that is all there.
    """

    rows: TimeStep
    actions: ArrayTree
    extras: ArrayTree
    policy_version: jax.Array
    actor_state: ArrayTree
    lane: jax.Array
    priority: jax.Array


class Sample(NamedTuple):
    """Where sampled sequences are, [n].

    Attributes:
      index: int32; into `Ring.priority`.
      generation: int32; the number of the rollout that the sequence begins with.
      weight: float32; importance weight, at most 1 over the samples of all shards.
      age: int32; rollouts of that lane since the sequence began.
    """

    index: jax.Array
    generation: jax.Array
    weight: jax.Array
    age: jax.Array


class Layout(NamedTuple):
    """The static numbers of a ring (see `layout`).

    Attributes:
      rollout_length: T.
      length: rows of a sequence.
      context: rows before a sequence that its frames are rebuilt from.
      lanes: lanes of a group, the lanes of one trajectory on one shard.
      groups: actors that fill the ring in turn; L = groups * lanes.
      slots: W.
    """

    rollout_length: int
    length: int
    context: int
    lanes: int
    groups: int
    slots: int

    @property
    def span(self) -> int:
        """Rollouts that a sequence touches."""
        return -(-self.length // self.rollout_length)

    @property
    def before(self) -> int:
        """Rollouts that its context touches."""
        return -(-self.context // self.rollout_length)

    @property
    def size(self) -> int:
        """Sequences of a lane that can be there at once."""
        return self.slots - self.span - self.before + 1


def layout(replay: Replay, *, rollout_length: int, lanes: int, groups: int, num_shards: int) -> Layout:
    """The numbers of a shard's ring, for at least `replay.capacity` sequences over all shards.

    Raises:
      ValueError: where a sequence is shorter than a rollout and its last row.
    """
    if replay.length <= rollout_length:
        raise ValueError(
            f"sequences of {replay.length} rows do not hold a rollout of {rollout_length} transitions; lower "
            f"rollout_length to {replay.length - 1} or less."
        )
    per_lane = -(-replay.capacity // (lanes * groups * num_shards))
    plan = Layout(rollout_length, replay.length, replay.context, lanes, groups, 0)
    return plan._replace(slots=per_lane + plan.span + plan.before - 1)


def init(plan: Layout, replay: Replay, trajectory: Trajectory) -> Ring:
    """An empty ring for trajectories like this one, [T, lanes] (shapes will do)."""
    L, rows = plan.groups * plan.lanes, plan.slots * plan.rollout_length
    by_row = lambda tree: jax.tree.map(lambda x: jnp.zeros((L, rows, *x.shape[2:]), x.dtype), tree)  # noqa: E731
    timesteps = trajectory.timesteps
    kept_rows = timesteps._replace(observation=jax.eval_shape(lambda x: flat(x, 2), timesteps.observation))
    kept = jax.eval_shape(replay.keep, trajectory.actor_state)
    return Ring(
        rows=by_row(kept_rows),
        actions=by_row(trajectory.actions),
        extras=by_row(trajectory.extras),
        policy_version=by_row(trajectory.policy_version),
        actor_state=jax.tree.map(lambda x: jnp.zeros((L, plan.slots, *x.shape[1:]), x.dtype), kept),
        lane=jnp.zeros(L, jnp.int32),
        priority=jnp.zeros(L * plan.slots),
    )


def add(plan: Layout, replay: Replay, ring: Ring, trajectory: Trajectory, group: jax.Array, number: jax.Array) -> Ring:
    """Writes a rollout over the oldest one of its lanes; the sequence that it completes gets its first priority.

    Args:
      plan: the numbers.
      replay: the agent's.
      ring: consumed; donate it.
      trajectory: [T, lanes]; row T is not stored, for it is row 0 of the lane's next rollout.
      group: int32 []; whose lanes they are.
      number: int32 []; rollouts of this group before.
    """
    T, B = plan.rollout_length, plan.lanes
    slot = number % plan.slots

    def write(where: jax.Array, what: jax.Array) -> jax.Array:
        return _write(where, jnp.moveaxis(what[:T], 0, 1), (group * B, slot * T))

    def write_state(where: jax.Array, what: jax.Array) -> jax.Array:
        return _write(where, what[:, None], (group * B, slot))

    timesteps = trajectory.timesteps._replace(observation=flat(trajectory.timesteps.observation, 2))
    ring = ring._replace(
        rows=jax.tree.map(write, ring.rows, timesteps),
        actions=jax.tree.map(write, ring.actions, trajectory.actions),
        extras=jax.tree.map(write, ring.extras, trajectory.extras),
        policy_version=write(ring.policy_version, trajectory.policy_version),
        actor_state=jax.tree.map(write_state, ring.actor_state, replay.keep(trajectory.actor_state)),
        lane=_write(ring.lane, trajectory.lane, (group * B,)),
    )
    lanes = group * B + jnp.arange(B, dtype=jnp.int32)
    lost = lanes * plan.slots + (number + plan.before) % plan.slots
    begun = number - plan.span + 1
    complete = begun >= plan.before
    mass = jnp.ones(B)
    if replay.priority is not None:
        rows = _rows(plan, begun, jnp.arange(plan.length, dtype=jnp.int32), B)
        take = lambda x: x[lanes[None], rows]  # noqa: E731
        seen = jax.tree.map(take, ring.rows._replace(observation=()))
        mass = _mass(replay, replay.priority(seen, jax.tree.map(take, ring.extras)))
    priority = ring.priority.at[lost].set(0.0)
    index = lanes * plan.slots + begun % plan.slots
    priority = priority.at[index].set(jnp.where(complete, mass, priority[index]))
    return ring._replace(priority=priority)


def _write(where: jax.Array, what: jax.Array, start: tuple[Any, ...]) -> jax.Array:
    """An array with `what` in it, from `start` on; the dims behind those that `start` names are written whole.

    `vmap` would turn the slice update into a scatter, which accelerators do not do in place. The shards of a device all
    write at the same place, so this stays one slice update for all of them.
    """
    return _writer(0)(where, what, *(jnp.asarray(i, jnp.int32) for i in start))


@functools.cache
def _writer(batch_dims: int) -> Any:
    """A slice update of arrays with so many batch dims in front."""

    @jax.custom_batching.custom_vmap
    def write(where: jax.Array, what: jax.Array, *start: jax.Array) -> jax.Array:
        zero = (jnp.int32(0),)
        rest = where.ndim - batch_dims - len(start)
        return lax.dynamic_update_slice(where, what, (*zero * batch_dims, *start, *zero * rest))

    @write.def_vmap
    def over_batch(size: int, batched: Any, where: jax.Array, what: jax.Array, *start: jax.Array) -> Any:
        if any(batched[2:]):  # each at a place of its own: a scatter it is
            axes = [0 if has else None for has in batched]
            return jax.vmap(write.fun, axes, axis_size=size)(where, what, *start), True
        where, what = (
            x if has else jnp.broadcast_to(x, (size, *x.shape)) for x, has in zip((where, what), batched[:2])
        )
        return _writer(batch_dims + 1)(where, what, *start), True

    return write


def sample(plan: Layout, replay: Replay, ring: Ring, counts: jax.Array, key: jax.Array, n: int) -> Sample:
    """Draws sequences with replacement, with probability in proportion to their priority, stratified over the ring.

    Args:
      plan: the numbers.
      replay: the agent's.
      ring: with at least one sequence.
      counts: int32 [groups]; rollouts of each group so far.
      key: consumed.
      n: how many, on this shard.
    """
    slots = ring.priority.shape[0]
    blocks = jnp.pad(ring.priority, (0, -slots % BLOCK)).reshape(-1, BLOCK)
    first_key, second_key = jax.random.split(key)
    strata = (jnp.arange(n, dtype=jnp.float32) + jax.random.uniform(first_key, (n,))) / n
    sums = jnp.sum(blocks, axis=1)
    block = _invert(sums[None], strata)
    within = _invert(blocks[block], jax.random.uniform(second_key, (n,)))
    index = block * BLOCK + within
    # Factors that all shards share, such as how many sequences there are, cancel in the end.
    weight = (ring.priority[index] / jnp.sum(sums)) ** -replay.importance_exponent
    generation, newest = _generation(plan, index, counts)
    return Sample(index, generation, weight / collectives.global_max(weight), newest - generation)


def _invert(masses: jax.Array, u: jax.Array) -> jax.Array:
    """Where in `masses` [n or 1, m] the running sum passes the fraction `u` [n] of the total, int32 [n].

    Sums that are computed in parallel may rise by an ulp where a mass is 0: it is not drawn for that.
    """
    sums = lax.cummax(jnp.where(masses > 0, jnp.cumsum(masses, axis=1), 0.0), axis=1)
    total = sums[:, -1:]
    threshold = jnp.minimum(u[:, None] * total, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.sum((sums <= threshold).astype(jnp.int32), axis=1)


def gather(plan: Layout, replay: Replay, ring: Ring, at: Sample, observations: ArrayTree) -> Trajectory:
    """The sampled sequences as a trajectory [length - 1, n].

    Args:
      plan: the numbers.
      replay: the agent's.
      ring: what is there.
      at: where they are.
      observations: tree of [any, any, ...]; what observations look like (shapes will do), for the ring has them flat.
    """
    lane = at.index // plan.slots
    take = lambda rows: lambda x: x[lane[None], rows]  # noqa: E731
    n = lane.shape[0]
    before = _rows(plan, at.generation, jnp.arange(-plan.context, 0, dtype=jnp.int32), n)
    rows = _rows(plan, at.generation, jnp.arange(plan.length, dtype=jnp.int32), n)
    kept = jax.tree.map(lambda x: x[lane, at.generation % plan.slots], ring.actor_state)
    seen = lambda where: shaped(jax.tree.map(take(where), ring.rows.observation), 2, observations)  # noqa: E731
    context = (seen(before), take(before)(ring.rows.first))
    timesteps = jax.tree.map(take(rows), ring.rows._replace(observation=()))
    return Trajectory(
        timesteps=timesteps._replace(observation=seen(rows)),
        actions=jax.tree.map(take(rows[:-1]), ring.actions),
        extras=jax.tree.map(take(rows[:-1]), ring.extras),
        actor_state=replay.restore(kept, *context),
        policy_version=take(rows[:-1])(ring.policy_version),
        lane=ring.lane[lane],
    )


def update(
    plan: Layout, replay: Replay, ring: Ring, counts: jax.Array, at: Sample, priority: jax.Array
) -> tuple[Ring, jax.Array]:
    """Writes new priorities [n] (before the exponent) of sampled sequences; of two for one sequence, the later counts.

    Rollouts may have been added since the sample was drawn.

    Returns:
      The ring, and how many sequences had been overwritten since they were sampled (their priorities are dropped).
    """
    generation, _ = _generation(plan, at.index, counts)
    there = (generation == at.generation) & (ring.priority[at.index] > 0)
    # Of several for one sequence the last counts: in which order a GPU would write them, nobody knows.
    again = jnp.any(jnp.triu(at.index[:, None] == at.index, k=1), axis=1)
    # Those that do not count are sent out of bounds, where nothing is written.
    index = jnp.where(there & ~again, at.index, ring.priority.shape[0])
    written = ring.priority.at[index].set(_mass(replay, priority), mode="drop")
    return ring._replace(priority=written), jnp.sum((~there).astype(jnp.float32))


def _mass(replay: Replay, priority: jax.Array) -> jax.Array:
    return jnp.maximum(priority, LEAST_PRIORITY) ** replay.priority_exponent


def num_sequences(plan: Layout, counts: jax.Array) -> jax.Array:
    """How many sequences a shard has, int32 [], for rollouts `counts` [groups]."""
    return plan.lanes * jnp.sum(jnp.clip(counts - plan.span + 1 - plan.before, 0, plan.size))


def _generation(plan: Layout, index: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers of the rollout in a slot now and of the newest one of its lane."""
    newest = counts[index // plan.slots // plan.lanes] - 1
    return newest - (newest - index % plan.slots) % plan.slots, newest


def _rows(plan: Layout, number: Any, offsets: jax.Array, n: int) -> jax.Array:
    """Where the rows are that lie `offsets` [m] after the start of rollouts `number` ([n] or []), [m, n]."""
    T = plan.rollout_length
    start = jnp.broadcast_to(number % plan.slots * T, (1, n))
    return (start + offsets[:, None]) % (plan.slots * T)
