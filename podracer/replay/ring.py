"""Replay: a ring of rollouts per lane, from which overlapping sequences are sampled, uniformly or by priority.

A sequence has `length` rows. It begins where a rollout of T rows began (`starts="rollouts"`), so that the recurrent
state that belongs to it is the one the rollout came with; or at any row (`starts="rows"`) whose transition is real, of
agents that have no such state. Observations are stored once, as single frames: the frames before a sequence are rebuilt
from its `context` rows.

    rollout      |  j-1  |   j   |  j+1  |  j+2  |  j+3  |      T = 40
    "rollouts"        ccc|===========================|          length 121, context 3, stride 40
    "rows"            ccc|==|                                   length 4, context 3, stride 1
                       ccc|==|

Everything is a pure function of arrays of one shard, to be donated; which rollouts are there is a count that is the
same everywhere (`Counts`), so that branches around collectives may read it. Lanes, groups, slots: docs/glossary.md.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from podracer.topology import collectives
from podracer.trajectories import flat, shaped
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
      priority: float32 [L P]; of the P places of a lane where sequences may begin, to the power of the exponent; 0
        where none begins that is all there.
      largest: float32 []; the largest priority so far, where new sequences get that; 0 stands for 1.
      fresh: float32 [L P]; priorities to be, of those that this sweep has come by, else 0; () without
        (see `podracer.replay.refresh`).
      version: int32 [2]; the updates that the parameters were of by which priorities were made, those that are and
        those to be; () without.

    An empty ring is all zeros.
    """

    rows: TimeStep
    actions: ArrayTree
    extras: ArrayTree
    policy_version: jax.Array
    actor_state: ArrayTree
    lane: jax.Array
    priority: jax.Array
    largest: jax.Array
    fresh: Any = ()
    version: Any = ()


class Sample(NamedTuple):
    """Where sampled sequences are, [n].

    Attributes:
      index: int32; into `Ring.priority`.
      generation: int32; the number of the rollout that the sequence begins in.
      weight: float32; importance weight, at most 1 over the samples of all shards.
      age: int32; rollouts of that lane since that one.
    """

    index: jax.Array
    generation: jax.Array
    weight: jax.Array
    age: jax.Array


class Layout(NamedTuple):
    """The static numbers of a ring (see `layout`).

    Attributes:
      rollout_length: T.
      stride: rows from one start to the next; divides T.
      length: rows of a sequence.
      context: rows before a sequence that its frames are rebuilt from.
      lanes: lanes of a group, the lanes of one trajectory on one shard.
      groups: actors that fill the ring in turn; L = groups * lanes.
      slots: W.
    """

    rollout_length: int
    stride: int
    length: int
    context: int
    lanes: int
    groups: int
    slots: int

    @property
    def starts(self) -> int:
        """Sequences that begin in a rollout."""
        return self.rollout_length // self.stride

    @property
    def places(self) -> int:
        """P: where in a lane's ring sequences may begin."""
        return self.slots * self.starts

    @property
    def open(self) -> int:
        """Sequences of a lane that have begun and are not all there yet."""
        return (self.length - 1) // self.stride

    @property
    def before(self) -> int:
        """Starts that a sequence's context touches."""
        return -(-self.context // self.stride)

    @property
    def size(self) -> int:
        """Sequences of a lane that can be there at once."""
        return self.places - self.open - self.before


def layout(replay: Replay, *, rollout_length: int, lanes: int, groups: int, num_shards: int) -> Layout:
    """The numbers of a shard's ring, for at least `replay.capacity` sequences over all shards.

    Raises:
      ValueError: where sequences that begin with rollouts are shorter than one and its last row, or where rollouts are
        longer than what is kept.
    """
    rows, T = replay.starts == "rows", rollout_length
    if not rows and replay.length <= T:
        raise ValueError(
            f"sequences of {replay.length} rows do not hold a rollout of {T} transitions; lower rollout_length to "
            f"{replay.length - 1} or less."
        )
    all_lanes = lanes * groups * num_shards
    per_lane = -(-replay.capacity // all_lanes)
    if rows and per_lane < T:
        raise ValueError(
            f"replay_capacity={replay.capacity} is less than one rollout: {all_lanes} lanes of rollout_length={T} "
            f"bring {all_lanes * T} rows; raise it to {all_lanes * T} or more, or lower rollout_length."
        )
    plan = Layout(T, 1 if rows else T, replay.length, replay.context, lanes, groups, 0)
    return plan._replace(slots=-(-(per_lane + plan.open + plan.before) // plan.starts))


def init(plan: Layout, replay: Replay, trajectory: Trajectory) -> Ring:
    """An empty ring for trajectories like this one, [T, lanes] (shapes will do).

    Raises:
      ValueError: where sequences begin at every row, and the agent keeps a state of every rollout.
    """
    L, rows = plan.groups * plan.lanes, plan.slots * plan.rollout_length
    by_row = lambda tree: jax.tree.map(lambda x: jnp.zeros((L, rows, *x.shape[2:]), x.dtype), tree)  # noqa: E731
    timesteps = trajectory.timesteps
    kept_rows = timesteps._replace(observation=jax.eval_shape(lambda x: flat(x, 2), timesteps.observation))
    kept = jax.eval_shape(replay.keep, trajectory.actor_state)
    if replay.starts == "rows" and jax.tree.leaves(kept):
        raise ValueError("sequences begin at every row: recurrent networks, whose state only rollouts have, cannot.")
    return Ring(
        rows=by_row(kept_rows),
        actions=by_row(trajectory.actions),
        extras=by_row(trajectory.extras),
        policy_version=by_row(trajectory.policy_version),
        actor_state=jax.tree.map(lambda x: jnp.zeros((L, plan.slots, *x.shape[1:]), x.dtype), kept),
        lane=jnp.zeros(L, jnp.int32),
        priority=jnp.zeros(L * plan.places),
        largest=jnp.float32(0),
        fresh=jnp.zeros(L * plan.places) if replay.refresh_interval else (),
        version=jnp.zeros(2, jnp.int32) if replay.refresh_interval else (),
    )


def add(plan: Layout, replay: Replay, ring: Ring, trajectory: Trajectory, group: jax.Array, number: jax.Array) -> Ring:
    """Writes a rollout over the oldest one of its lanes; sequences that it completes get their first priority.

    Args:
      plan: the numbers.
      replay: the agent's.
      ring: consumed; donate it.
      trajectory: [T, lanes]; row T is not stored, for it is row 0 of the lane's next rollout.
      group: int32 []; whose lanes they are.
      number: int32 []; rollouts of this group before.
    """
    T, B = plan.rollout_length, plan.lanes
    chex.assert_tree_shape_prefix(trajectory.timesteps, (T + 1, B))
    chex.assert_tree_shape_prefix((trajectory.actions, trajectory.extras, trajectory.policy_version), (T, B))
    chex.assert_shape(trajectory.lane, (B,))
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
    lanes = group * B + jnp.arange(B, dtype=jnp.int32)[None]
    # Starts are counted from the slot's first, so that no number grows with the run.
    new = slot * plan.starts - plan.open + jnp.arange(plan.starts, dtype=jnp.int32)
    lost = slot * plan.starts + jnp.arange(plan.starts + plan.before, dtype=jnp.int32)
    at = lambda starts: lanes * plan.places + starts[:, None] % plan.places  # noqa: E731
    take = lambda rows: lambda x: x[lanes, rows[:, None] % (plan.slots * T)]  # noqa: E731
    there = (new - slot * plan.starts + jnp.minimum(number, plan.slots) * plan.starts >= plan.before)[:, None]
    if replay.starts == "rows":
        there = there & ~take(new + 1)(ring.rows.first)
    if replay.priority is None:
        mass = _largest(ring)
    else:
        rows = new[0] * plan.stride + jnp.arange(plan.starts - 1 + plan.length, dtype=jnp.int32)
        seen = jax.tree.map(take(rows), ring.rows._replace(observation=()))
        mass = mass_of(replay, replay.priority(seen, jax.tree.map(take(rows), ring.extras)))
    priority = ring.priority.at[at(lost)].set(0.0)
    # What is new keeps its first priority until it is swept by.
    fresh = ring.fresh.at[at(lost)].set(0.0) if replay.refresh_interval else ()
    return ring._replace(priority=priority.at[at(new)].set(jnp.where(there, mass, 0.0)), fresh=fresh)


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


def sample(plan: Layout, ring: Ring, counts: jax.Array, key: jax.Array, n: int, beta: Any) -> Sample:
    """Draws sequences with replacement, with probability in proportion to their priority, stratified over the ring.

    Args:
      plan: the numbers.
      ring: with at least one sequence.
      counts: int32 [groups]; rollouts of each group so far.
      key: consumed.
      n: how many, on this shard.
      beta: float32 []; exponent of the importance weights.
    """
    chex.assert_shape(counts, (plan.groups,))
    chex.assert_shape(ring.priority, (plan.groups * plan.lanes * plan.places,))
    places = ring.priority.shape[0]
    blocks = jnp.pad(ring.priority, (0, -places % BLOCK)).reshape(-1, BLOCK)
    first_key, second_key = jax.random.split(key)
    strata = (jnp.arange(n, dtype=jnp.float32) + jax.random.uniform(first_key, (n,))) / n
    sums = jnp.sum(blocks, axis=1)
    block = _invert(sums[None], strata)
    within = _invert(blocks[block], jax.random.uniform(second_key, (n,)))
    index = block * BLOCK + within
    # Factors that all shards share, such as how many sequences there are, cancel in the end.
    weight = (ring.priority[index] / jnp.sum(sums)) ** -beta
    generation, newest = generation_of(plan, index, counts)
    return Sample(index, generation, weight / collectives.global_max(weight), newest - generation)


def _invert(masses: jax.Array, u: jax.Array) -> jax.Array:
    """Where in `masses` [n or 1, m] the running sum passes the fraction `u` [n] of the total, int32 [n].

    Sums that are computed in parallel may rise by an ulp where a mass is 0: it is not drawn for that.
    """
    sums = lax.cummax(jnp.where(masses > 0, jnp.cumsum(masses, axis=1), 0.0), axis=1)
    total = sums[:, -1:]
    threshold = jnp.minimum(u[:, None] * total, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.sum((sums <= threshold).astype(jnp.int32), axis=1)


def transitions_since(plan: Layout, at: Sample, num_shards: int) -> jax.Array:
    """Transitions of all lanes on all shards since row 0 of sampled sequences, int32 [n]."""
    row = at.index % plan.places * plan.stride % plan.rollout_length
    return ((at.age + 1) * plan.rollout_length - row) * (plan.groups * plan.lanes * num_shards)


def gather(plan: Layout, replay: Replay, ring: Ring, at: Sample, observations: ArrayTree) -> Trajectory:
    """The sampled sequences as a trajectory [length - 1, n], with the observations of `Replay.observed` rows.

    Args:
      plan: the numbers.
      replay: the agent's.
      ring: what is there.
      at: where they are.
      observations: tree of [any, any, ...]; what observations look like (shapes will do), for the ring has them flat.
    """
    lane, place = at.index // plan.places, at.index % plan.places
    return cut(plan, replay, ring, lane, place * plan.stride, plan.length, observations, replay.observed)


def cut(
    plan: Layout,
    replay: Replay,
    ring: Ring,
    lane: jax.Array,
    start: jax.Array,
    length: int,
    observations: ArrayTree,
    observed: int | None = None,
) -> Trajectory:
    """Rows of lanes `lane` [n] from rows `start` [n] on, as a trajectory [length - 1, n]; the rest as in `gather`."""
    take = lambda rows: lambda x: x[lane[None], rows]  # noqa: E731
    before = _rows(plan, start, range(-plan.context, 0))
    rows = _rows(plan, start, range(length))
    kept = jax.tree.map(lambda x: x[lane, start // plan.rollout_length], ring.actor_state)
    seen = lambda where: shaped(jax.tree.map(take(where), ring.rows.observation), 2, observations)  # noqa: E731
    context = (seen(before), take(before)(ring.rows.first))
    timesteps = jax.tree.map(take(rows), ring.rows._replace(observation=()))
    return Trajectory(
        timesteps=timesteps._replace(observation=seen(rows[:observed])),
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

    With an exponent of 0 there is nothing to write. Rollouts may have been added since the sample was drawn.

    Returns:
      The ring, and how many sequences had been overwritten since they were sampled (their priorities are dropped).
    """
    chex.assert_equal_shape([at.index, at.generation, priority])
    generation, _ = generation_of(plan, at.index, counts)
    there = (generation == at.generation) & (ring.priority[at.index] > 0)
    overwritten = jnp.sum((~there).astype(jnp.float32))
    if replay.priority_exponent == 0:  # all are 1 for ever
        return ring, overwritten
    # Of several for one sequence the last counts: in which order a GPU would write them, nobody knows.
    again = jnp.any(jnp.triu(at.index[:, None] == at.index[None], k=1), axis=1)
    # Those that do not count are sent out of bounds, where nothing is written.
    index = jnp.where(there & ~again, at.index, ring.priority.shape[0])
    mass = mass_of(replay, priority)
    ring = ring._replace(priority=ring.priority.at[index].set(mass, mode="drop"))
    if replay.priority is None:
        ring = ring._replace(largest=jnp.maximum(_largest(ring), jnp.max(mass)))
    return ring, overwritten


def changes(ring: Ring) -> tuple[Any, ...]:
    """All that learning changes of a ring, where nothing is added."""
    return ring.priority, ring.largest, ring.fresh, ring.version


def changed(ring: Ring, changes: tuple[Any, ...]) -> Ring:
    """A ring with `changes` in it."""
    priority, largest, fresh, version = changes
    return ring._replace(priority=priority, largest=largest, fresh=fresh, version=version)


def _largest(ring: Ring) -> jax.Array:
    return jnp.where(ring.largest > 0, ring.largest, 1.0)


def mass_of(replay: Replay, priority: jax.Array) -> jax.Array:
    """What stands in `Ring.priority` for priorities before the exponent, of any shape."""
    return jnp.maximum(priority, LEAST_PRIORITY) ** replay.priority_exponent


def num_sequences(plan: Layout, counts: jax.Array) -> jax.Array:
    """How many sequences a shard has, int32 [], for rollouts `counts` [groups]; those that are masked count too."""
    begun = jnp.minimum(counts, plan.slots) * plan.starts - plan.open - plan.before
    return plan.lanes * jnp.sum(jnp.maximum(begun, 0))


def generation_of(plan: Layout, index: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers of the rollouts that sequences begin in, and of the newest ones of their lanes, int32 [n]."""
    lane, slot = index // plan.places, index % plan.places // plan.starts
    newest = counts[lane // plan.lanes] - 1
    return newest - (newest - slot) % plan.slots, newest


def _rows(plan: Layout, start: jax.Array, offsets: range) -> jax.Array:
    """Where the rows are that lie `offsets` [m] after rows `start` [n], [m, n]."""
    rows = start[None] + jnp.arange(offsets.start, offsets.stop, dtype=jnp.int32)[:, None]
    return rows % (plan.slots * plan.rollout_length)
