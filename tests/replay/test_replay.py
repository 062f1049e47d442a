"""Replay against a plain record of everything that was ever added."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax import lax

import envs_jax
import podracer
from podracer import agents, nets, replay
from podracer.learning import learner
from podracer.replay import sampling
from podracer.types import ReplaySpec, TimeStep, Trajectory
from tests.support import harness, tiers

T, B, GROUPS = 4, 3, 2


def rows_of(length=4, capacity=30, **more):
    """A replay whose sequences begin at every row."""
    return spec_of(length=length, capacity=capacity, starts="rows", **more)


def spec_of(length=11, context=3, capacity=18, alpha=0.9, beta=0.6, priority=None, **more):
    frames = context + 1
    settings = {"min_size": 1, "batch_size": 8, "ratio": 1.0} | more
    return ReplaySpec(
        capacity=capacity,
        length=length,
        context=context,
        priority_exponent=alpha,
        importance_exponent=beta,
        keep=nothing if more.get("starts") == "rows" else nets.without_frames,
        restore=lambda kept, observation, first: nets.with_frames(kept, observation, first, frames),
        priority=priority,
        **settings,
    )


SQUARE = np.array([[0.0, 0.25], [0.5, 0.75]], np.float32)
"""The offsets of an observation from its row's number: it has a shape, which the ring does not keep."""


class Streams:
    """Endless streams of rows, every number of which is another; a rollout of any group can be cut off next."""

    def __init__(self, seed, context, T=T):
        self.rng, self.context, self.T = np.random.default_rng(seed), context, T
        self.rows = [
            [] for _ in range(GROUPS * B)
        ]  # of each lane: (observation, reward, discount, first, last, action)
        self.counts = np.zeros(GROUPS, np.int32)

    def _row(self, lane, t):
        # A break here and there, without a last row before it.
        first = t == 0 or self.rng.random() < 0.15
        number = np.float32(1000 * lane + t)
        return (number + SQUARE, number + 0.25, 1.0, first, False, 10_000 * lane + t)

    def rollout(self, group):
        lanes, T = np.arange(group * B, (group + 1) * B), self.T
        begin = self.counts[group] * T
        for lane in lanes:
            while len(self.rows[lane]) < begin + T + 1:
                self.rows[lane].append(self._row(lane, len(self.rows[lane])))
        columns = [
            np.stack([np.stack([self.rows[l][begin + t][i] for l in lanes]) for t in range(T + 1)]) for i in range(6)
        ]
        observation, reward, discount, first, last = (np.asarray(c) for c in columns[:5])
        actions = columns[5][:T].astype(np.int32)
        self.counts[group] += 1
        frames = np.stack([self.frames(lane, begin) for lane in lanes])
        state = nets.ActorState((jnp.asarray(observation[0, :, 0, 0]) + 0.5,), (), jnp.asarray(frames))
        steps = TimeStep(*map(jnp.asarray, (
            observation.astype(np.float32), reward.astype(np.float32), discount.astype(np.float32), first, last
        )))  # fmt: skip
        version = jnp.broadcast_to(jnp.int32(self.counts[group]), (T, B))
        extras = {"double": jnp.asarray(2.0 * actions, jnp.float32)}
        return Trajectory(steps, jnp.asarray(actions), extras, state, version, jnp.asarray(lanes, jnp.int32))

    @property
    def observations(self):
        return jax.ShapeDtypeStruct((T + 1, B, *SQUARE.shape), jnp.float32)

    def frames(self, lane, row):
        """The `context` observations before a row in its episode, zeros where there are none."""
        out = []
        for back in range(self.context, 0, -1):
            # An observation counts if no episode opened between it and the row before.
            inside = row - back >= 0 and not any(self.rows[lane][r][3] for r in range(row - back + 1, row))
            out.append(self.rows[lane][row - back][0] if inside else np.zeros_like(SQUARE))
        return np.array(out, np.float32)


def nothing(state):
    return nets.ActorState((), ())


def filled(spec, order, seed=0, T=T):
    streams = Streams(seed, spec.context, T)
    buffer = replay.make(spec, SQUARE, rollout_length=T, lanes=B, groups=GROUPS, num_shards=1)
    add = jax.jit(lambda ring, trajectory, group, number: buffer.add(ring, trajectory, group, number))
    ring = None
    for group in order:
        number = int(streams.counts[group])
        trajectory = streams.rollout(group)
        ring = buffer.init(trajectory) if ring is None else ring
        ring = add(ring, trajectory, jnp.int32(group), jnp.int32(number))
    return buffer, ring, streams


def eligible(buffer, spec, streams):
    """(lane, row) of all sequences that are all there, by brute force."""
    found, T = set(), streams.T
    every_row = spec.starts == "rows"
    for lane in range(GROUPS * B):
        end = int(streams.counts[lane // B]) * T
        for start in range(0, end, 1 if every_row else T):
            rows = range(start - spec.context, start + spec.length)
            there = rows[0] >= 0 and rows[-1] < end and rows[0] // T > end // T - 1 - buffer.shape.slots
            if there and not (every_row and streams.rows[lane][start + 1][3]):
                found.add((lane, start))
    return found


ORDERS = {
    "in turn": [0, 1] * 9,
    "one ahead": [0] * 11 + [1] * 3 + [0, 1, 1, 0],
    "few": [0, 0, 0, 1],
    "wrapped twice": [0, 1, 1] * 12,
}


@pytest.mark.parametrize("context", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "order",
    [
        pytest.param(order, id=name, marks=pytest.mark.slow if name != "wrapped twice" else ())
        for name, order in ORDERS.items()
    ],
)
def test_sequences_are_the_streams(order, context):
    check_sequences(spec_of(context=context), order, T)


@pytest.mark.parametrize(
    ("length", "context", "T", "order"),
    [
        (4, 3, 4, "wrapped twice"),
        *tiers.slow((2, 0, 1, "in turn")),
        *tiers.slow(*itertools.product((4,), (0, 3), (3, 4), ORDERS)),
        *tiers.nightly(*itertools.product((2,), (0, 3), (1, 3, 4), ORDERS)),
        *tiers.nightly(*itertools.product((4,), (0, 3), (1,), ORDERS)),
        *tiers.nightly(*itertools.product((11,), (3,), (1, 3, 4), ORDERS)),
    ],
)
def test_sequences_at_every_row_are_the_streams(length, context, T, order):
    """Rollouts shorter and longer than a sequence and its context; those whose transition is masked are not there."""
    check_sequences(rows_of(length=length, context=context, observation_rows=2), ORDERS[order], T)


def check_sequences(spec, order, T):
    buffer, ring, streams = filled(spec, order, T=T)
    counts, context = jnp.asarray(streams.counts), spec.context
    index = np.flatnonzero(np.asarray(ring.priority) > 0)
    lanes = index // buffer.shape.starts_per_lane
    slot, within = np.divmod(index % buffer.shape.starts_per_lane, buffer.shape.starts_per_rollout)
    newest = streams.counts[lanes // B] - 1
    rollouts = newest - (newest - slot) % buffer.shape.slots
    starts = rollouts * T + within * buffer.shape.stride
    assert set(zip(lanes, starts)) == eligible(buffer, spec, streams)
    there = int(buffer.num_sequences(counts))
    assert len(index) <= there <= buffer.shape.size * B * GROUPS
    assert len(index) == there or spec.starts == "rows"
    if not len(index):
        return
    at = replay.Sample(jnp.asarray(index, jnp.int32), jnp.asarray(rollouts, jnp.int32), None, None)
    np.testing.assert_array_equal(buffer.generation_of(at.index, counts)[0], rollouts)
    found = buffer.gather(ring, at)
    for i, (lane, start) in enumerate(zip(lanes, starts)):
        rows = streams.rows[lane][start : start + spec.length]
        for column, got in enumerate(found.timesteps):
            known = rows[: spec.observation_rows] if column == 0 else rows
            np.testing.assert_array_equal(np.asarray(got)[:, i], np.stack([row[column] for row in known]))
        actions = np.array([row[5] for row in rows[:-1]])
        np.testing.assert_array_equal(np.asarray(found.actions)[:, i], actions)
        np.testing.assert_array_equal(np.asarray(found.extras["double"])[:, i], 2.0 * actions)
        versions = 1 + (start + np.arange(spec.length - 1)) // T
        np.testing.assert_array_equal(np.asarray(found.policy_version)[:, i], versions)
        if spec.starts == "rollouts":
            assert float(found.actor_state.core[0][i]) == rows[0][0][0, 0] + 0.5, "the state before row 0"
        assert int(found.lane[i]) == lane
        if context:
            np.testing.assert_array_equal(found.actor_state.frames[i], streams.frames(lane, start))


def test_what_is_new_is_as_likely_as_the_likeliest():
    """Without a first priority of their own, sequences get the largest there has been; with one, each row its own."""
    spec = rows_of(alpha=0.5, length=3, context=0)
    buffer, ring, streams = filled(spec, [0, 1] * 3)
    assert set(np.unique(ring.priority)) == {0.0, 1.0}
    there = jnp.asarray(np.flatnonzero(np.asarray(ring.priority) > 0)[:2], jnp.int32)
    counts = jnp.asarray(streams.counts)
    at = replay.Sample(there, buffer.generation_of(there, counts)[0], None, None)
    update = jax.jit(lambda ring, priorities: buffer.write(ring, counts, at, priorities)[0])
    for priorities in (jnp.array([9.0, 0.25]), jnp.array([4.0, 4.0])):
        ring = update(ring, priorities)
    add = jax.jit(lambda ring, trajectory: buffer.add(ring, trajectory, jnp.int32(0), counts[0]))
    ring = add(ring, streams.rollout(0))
    assert set(np.unique(ring.priority)) == {0.0, 1.0, 2.0, 3.0}
    of_rows = lambda rows, extras: jax.vmap(  # noqa: E731
        lambda i: jnp.sum(lax.dynamic_slice_in_dim(extras["double"], i, 2), axis=0)
    )(jnp.arange(T))
    spec = rows_of(alpha=1.0, length=3, context=0, priority=of_rows)
    buffer, ring, streams = filled(spec, [0, 1] * 3)
    masses = np.asarray(ring.priority)
    for lane, row in eligible(buffer, spec, streams):
        index = lane * buffer.shape.starts_per_lane + row % buffer.shape.starts_per_lane
        assert masses[index] == max(sum(2.0 * streams.rows[lane][row + i][5] for i in range(2)), 1e-6)


def test_capacity_is_what_was_asked_for():
    for capacity in (1, 6, 7, 100):
        spec = spec_of(capacity=capacity)
        ring = filled(spec, [0, 1] * 40)[1]
        there = int(jnp.sum(ring.priority > 0))
        assert capacity <= there < capacity + B * GROUPS
    for capacity in (B * GROUPS * T, 100):
        buffer, _, streams = filled(rows_of(capacity=capacity), [0, 1] * 20)
        assert capacity <= buffer.num_sequences(jnp.asarray(streams.counts)) < capacity + B * GROUPS * T
    with pytest.raises(
        ValueError, match="replay_capacity=18 is less than one rollout: 6 lanes of rollout_length=4 .* 24"
    ):
        filled(rows_of(capacity=18), [0])


def sampled(buffer, spec, ring, counts, n, times, num_shards=1):
    draw = lambda ring, key: buffer.sample(ring, counts, key, n, spec.importance_exponent)  # noqa: E731
    keys = jax.random.split(jax.random.key(1), (times, num_shards))
    rings = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_shards, *x.shape)), ring)
    run = jax.jit(
        lambda keys: jax.lax.map(lambda key: harness.over_shards(lambda _, r, k: draw(r, k), 0, rings, key), keys)
    )
    return run(keys)


@pytest.mark.parametrize(
    ("alpha", "make"),
    [
        (0.6, rows_of),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.9, spec_of), (0.0, spec_of), (0.0, rows_of))),
    ],
)
def test_sequences_are_drawn_by_priority(alpha, make):
    spec = make(alpha=alpha, capacity=900)
    buffer, ring, streams = filled(spec, [0, 1] * 180)
    counts = jnp.asarray(streams.counts)
    there = np.flatnonzero(np.asarray(ring.priority) > 0)
    rng = np.random.default_rng(0)
    raw = rng.exponential(size=len(there)).astype(np.float32) + np.float32(0.2)
    at = replay.Sample(jnp.asarray(there, jnp.int32), buffer.generation_of(jnp.asarray(there), counts)[0], None, None)
    ring, overwritten = buffer.write(ring, counts, at, jnp.asarray(raw))
    assert float(overwritten) == 0
    drawn = sampled(buffer, spec, ring, counts, n=16, times=2000)
    seen = np.bincount(np.asarray(drawn.index).ravel(), minlength=len(ring.priority))
    assert set(np.flatnonzero(seen)) <= set(there), "a sequence that is not there was drawn"
    expected = raw.astype(np.float64) ** alpha
    expected *= 32_000 / expected.sum()
    assert expected.min() > 5
    # Strata make the counts steadier than independent draws: only too much variation is a failure.
    assert scipy.stats.chisquare(seen[there], expected).pvalue > 1e-3
    # And importance weights undo it.
    chance = np.asarray(ring.priority)[np.asarray(drawn.index)] / np.sum(np.asarray(ring.priority))
    weights = (len(there) * chance) ** -spec.importance_exponent
    weights /= weights.max(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(drawn.weight, weights, rtol=1e-4)
    np.testing.assert_array_equal(
        drawn.age,
        np.asarray(streams.counts)[np.asarray(drawn.index) // buffer.shape.starts_per_lane // B] - 1 - drawn.generation,
    )


def test_weights_are_normalised_over_all_shards():
    spec = spec_of(capacity=60)
    buffer, ring, streams = filled(spec, [0, 1] * 20)
    counts = jnp.asarray(streams.counts)
    rings = [ring, ring._replace(priority=ring.priority * jnp.linspace(0.1, 3.0, len(ring.priority)))]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rings)
    keys = jax.random.split(jax.random.key(0), 2)
    drawn = harness.over_shards(
        lambda _, r, k: buffer.sample(r, counts, k, 8, spec.importance_exponent), 0, stacked, keys
    )
    raw = []
    for shard in range(2):
        mass = np.asarray(rings[shard].priority)
        size = 2 * np.sum(mass > 0)
        raw.append((size * mass[np.asarray(drawn.index[shard])] / (2 * mass.sum())) ** -0.6)
    np.testing.assert_allclose(drawn.weight, np.array(raw) / np.max(raw), rtol=1e-5)
    assert float(jnp.max(drawn.weight)) == 1.0


def test_small_masses_and_large_ones():
    """A million priorities over nine orders of magnitude: nothing of mass 0 is drawn, and blocks get their share."""
    rng = np.random.default_rng(3)
    masses = (10.0 ** rng.uniform(-6, 3, 1_024_000)).astype(np.float32)
    masses[rng.random(1_024_000) < 0.5] = 0.0
    blocks = masses.reshape(-1, replay.BLOCK)[:64]
    u = jnp.asarray(rng.random((64, 400)), jnp.float32)
    within = jax.jit(jax.vmap(lambda m, u: sampling._invert(m[None], u)))(blocks, u)
    assert np.all(np.take_along_axis(blocks, np.asarray(within), 1) > 0)
    sums = jnp.asarray(masses.reshape(-1, replay.BLOCK).sum(1))
    strata = (jnp.arange(4096, dtype=jnp.float32) + 0.5) / 4096
    drawn = np.bincount(np.asarray(sampling._invert(sums[None], strata)), minlength=len(sums))
    expected = np.asarray(sums, np.float64) / np.sum(np.asarray(sums, np.float64)) * 4096
    assert np.max(np.abs(drawn - expected)) <= 1.5
    for edge in (0.0, 1.0 - 2**-24, 1.0):
        assert masses.reshape(-1)[sampling._invert(jnp.asarray(masses[None, :4096]), jnp.array([edge]))[0]] > 0


@pytest.mark.parametrize(
    ("make", "all_of_them"),
    [
        (spec_of, True),
        *tiers.slow((rows_of, True), (spec_of, False), (rows_of, False)),
    ],
)
def test_priorities_of_what_is_gone_are_dropped(make, all_of_them):
    """Priorities are dropped where nothing is now, and where other sequences are."""
    spec = make(alpha=1.0)
    buffer, ring, streams = filled(spec, [0, 1] * 9)
    before = jnp.asarray(streams.counts)
    drawn = jax.tree.map(lambda x: x[0, 0], sampled(buffer, spec, ring, before, n=64, times=1))
    index = np.asarray(drawn.index)
    lanes, starts = (
        index // buffer.shape.starts_per_lane,
        np.asarray(drawn.generation) * T + index % buffer.shape.starts_per_rollout * buffer.shape.stride,
    )
    assert set(zip(lanes, starts)) <= eligible(buffer, spec, streams)
    for i in range(buffer.shape.slots if all_of_them else 1):
        ring = buffer.add(ring, streams.rollout(0), jnp.int32(0), before[0] + i)
    counts = jnp.asarray(streams.counts)
    left = eligible(buffer, spec, streams)
    gone = np.array([at not in left for at in zip(lanes, starts)])
    assert np.array_equal(gone, lanes < B) if all_of_them else 0 < gone.sum() < np.sum(lanes < B)
    assert not np.any(gone[lanes >= B])
    priority = jnp.arange(1.0, 65.0)
    after, overwritten = buffer.write(ring, counts, drawn, priority)
    assert int(overwritten) == gone.sum() > 0
    written, old = np.asarray(after.priority), np.asarray(ring.priority)
    for i in np.unique(index):
        mine = (index == i) & ~gone
        assert written[i] == (np.asarray(priority)[mine][-1] if mine.any() else old[i])
    untouched = np.setdiff1d(np.arange(len(old)), index)
    np.testing.assert_array_equal(written[untouched], old[untouched])


@pytest.mark.parametrize("make", [spec_of, rows_of])
def test_replay_that_draws_all_alike_writes_no_priorities(make):
    """Nor does it compare each sample of a batch with each other to do so."""
    spec = make(alpha=0.0)
    buffer, ring, streams = filled(spec, [0, 1] * 9)
    counts = jnp.asarray(streams.counts)
    drawn = jax.tree.map(lambda x: x[0, 0], sampled(buffer, spec, ring, counts, n=64, times=1))
    assert set(np.unique(ring.priority)) == {0.0, 1.0}
    written = jax.make_jaxpr(lambda ring, at, new: buffer.write(ring, counts, at, new))
    assert "64,64" not in str(written(ring, drawn, jnp.arange(64.0)))
    after, overwritten = buffer.write(ring, counts + 100, drawn, jnp.arange(64.0))
    assert overwritten == 64
    np.testing.assert_array_equal(after.priority, ring.priority)


@pytest.mark.slow
def test_what_is_learnt_to_the_last_bit_does_no_harm():
    """Priorities of 0 can be drawn, and weights stay finite."""
    spec = spec_of(priority=lambda rows, extras: jnp.zeros((1, rows.reward.shape[1])))
    buffer, ring, streams = filled(spec, [0, 1] * 9)
    counts = jnp.asarray(streams.counts)
    assert int(jnp.sum(ring.priority > 0)) == int(buffer.num_sequences(counts))
    drawn = jax.tree.map(lambda x: x[0, 0], sampled(buffer, spec, ring, counts, n=8, times=1))
    ring, _ = buffer.write(ring, counts, drawn, jnp.where(jnp.arange(8) < 4, 0.0, 1e4))
    drawn = sampled(buffer, spec, ring, counts, n=8, times=20)
    assert np.all(np.isfinite(drawn.weight))
    assert np.max(drawn.weight) == 1.0


def test_the_ring_is_written_in_place():
    """Adding to a large ring allocates next to nothing: all of it is donated."""
    spec = spec_of(capacity=30_000)
    buffer = replay.make(spec, SQUARE, rollout_length=T, lanes=B, groups=GROUPS, num_shards=1)
    trajectory = Streams(0, spec.context).rollout(0)
    ring = jax.eval_shape(lambda: buffer.init(trajectory))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(ring))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    add = jax.jit(buffer.add, donate_argnums=0)
    memory = add.lower(ring, trajectory, number, number).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 100


def test_shards_of_one_device_are_written_by_slices():
    """Mapped over shards that all write at one place, rows stay slice updates: a scatter of images is not in place."""
    spec = spec_of()
    buffer = replay.make(spec, SQUARE, rollout_length=T, lanes=B, groups=GROUPS, num_shards=2)
    first, second = (Streams(seed, spec.context).rollout(1) for seed in (0, 1))
    rings = [buffer.init(trajectory) for trajectory in (first, second)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rings), jax.tree.map(lambda *x: jnp.stack(x), first, second)
    add = buffer.add
    mapped = jax.vmap(add, in_axes=(0, 0, None, None))
    at = jnp.int32(1), jnp.int32(2)
    written = [jax.tree.map(lambda x, i=i: x[i], jax.jit(mapped)(*stacked, *at)) for i in range(2)]
    for ring, trajectory, got in zip(rings, (first, second), written):
        jax.tree.map(np.testing.assert_array_equal, got, jax.jit(add)(ring, trajectory, *at))
    jaxpr = jax.make_jaxpr(mapped)(*stacked, *at)
    scattered = [
        e.invars[0].aval.shape for e in harness.equations(jaxpr.jaxpr) if e.primitive.name.startswith("scatter")
    ]
    assert set(scattered) == {stacked[0].priority.shape}


@pytest.mark.slow
def test_more_than_two_billion_numbers():
    """A replay of 310,000 rows of 84x84 frames: rows written after the 2^31st number are read there."""
    rows, frame = 500, (84, 84)
    spec = rows_of(length=2, context=0, capacity=310_000)
    buffer = replay.make(spec, np.zeros(frame, np.uint8), rollout_length=rows, lanes=1, groups=1, num_shards=1)
    assert buffer.shape.slots * rows * np.prod(frame) > 2**31
    pictures = np.random.default_rng(0).integers(0, 256, (rows + 1, 1, *frame), np.uint8)
    number = lambda dtype, n=rows: jnp.zeros((n, 1), dtype)  # noqa: E731
    steps = TimeStep(jnp.asarray(pictures), *(number(d, rows + 1) for d in (jnp.float32, jnp.float32, bool, bool)))
    state = nets.ActorState((), ())
    trajectory = Trajectory(steps, number(jnp.int32), (), state, number(jnp.int32), jnp.zeros(1, jnp.int32))
    ring = jax.jit(lambda: buffer.init(trajectory))()
    add = jax.jit(buffer.add, donate_argnums=0)
    ring = add(ring, trajectory, jnp.int32(0), jnp.int32(buffer.shape.slots - 1))
    within = np.array([0, 7, rows - 2], np.int32)
    index = jnp.asarray(buffer.shape.starts_per_lane - rows + within)
    assert np.all(np.asarray(ring.priority)[index] == 1)
    at = replay.Sample(index, jnp.full(3, buffer.shape.slots - 1, jnp.int32), None, None)
    found = jax.jit(lambda ring: buffer.gather(ring, at))(ring)
    for i, row in enumerate(within):
        np.testing.assert_array_equal(found.timesteps.observation[:, i], pictures[row : row + 2, 0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r2d2", "vtrace"])
def test_a_run_copies_no_ring(name):
    """Also where a call adds and samples: the program's scratch memory is a small part of the ring."""
    catch = envs_jax.make("catch")
    if name == "vtrace":
        config = agents.VTraceConfig(replay_fraction=0.5, replay_capacity=500_000, rollout_length=5)
        agent = agents.vtrace.make(catch.spec, config)
    else:
        config = agents.R2D2Config(replay_capacity=250_000, rollout_length=5, burn_in=2, trace_length=8)
        agent = agents.r2d2.make(catch.spec, config)
    prog = harness.make_program(agent, catch, num_envs=8)
    like = prog.like()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(like.replay_state.ring))
    memory = prog.step.lower(like, prog.like_limits()).compile().memory_analysis()
    assert size > 5e7
    assert memory.temp_size_in_bytes < size / 5


def test_bytes_are_those_of_the_frames():
    """1e5 sequences of 84x84 frames, 40 new rows each, with an LSTM of 512: at most 1.1 times the bytes of the frames."""
    lanes, rows = 256, 40
    frame = jax.ShapeDtypeStruct((rows + 1, lanes, 84, 84), jnp.uint8)
    number = lambda dtype, n: jax.ShapeDtypeStruct((n, lanes), dtype)  # noqa: E731
    steps = TimeStep(frame, *(number(d, rows + 1) for d in (jnp.float32, jnp.float32, bool, bool)))
    core = jax.ShapeDtypeStruct((lanes, 512), jnp.float32)
    state = nets.ActorState(
        (core, core), jax.ShapeDtypeStruct((lanes,), jnp.int32), jax.ShapeDtypeStruct((lanes, 3, 84, 84), jnp.uint8)
    )
    extras = {name: number(jnp.float32, rows) for name in ("q_taken", "q_max", "discount")}
    lane = jax.ShapeDtypeStruct((lanes,), jnp.int32)
    trajectory = Trajectory(steps, number(jnp.int32, rows), extras, state, number(jnp.int32, rows), lane)
    spec = spec_of(length=121, capacity=100_000)
    buffer = replay.make(spec, np.zeros((84, 84), np.uint8), rollout_length=rows, lanes=lanes, groups=1, num_shards=1)
    ring = jax.eval_shape(lambda t: buffer.init(t), trajectory)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(ring))
    assert buffer.shape.size * lanes >= 100_000
    assert size <= 1.1 * 100_000 * rows * 84 * 84


class Learns:
    """An agent that learns nothing and tells what it was given."""

    class config:  # noqa: N801
        rollout_length = T

    reanalyse = target_params = refresh = refresh_params = None

    def __init__(self, spec):
        self.replay, self.name = spec, "learns"

    def learn(self, state, batch, progress, key):
        seen = jnp.sum(batch.trajectory.timesteps.reward)
        return state + 1, {"seen": seen}, jnp.ones(batch.weight.shape)


@pytest.mark.parametrize(
    ("ratio", "batch"),
    [(0.75, 8), *tiers.slow((2.5, 2), (1.0, 6), (0.1, 8), (3.0, 1))],
)
def test_the_ratio_is_counted(ratio, batch):
    spec = spec_of(ratio=ratio, batch_size=batch, min_size=12, capacity=60)
    core = learner.make(Learns(spec), SQUARE, lanes=B, groups=GROUPS, num_shards=1)
    streams = Streams(0, spec.context)
    learn = harness.alone(core.learn)
    state, counts, ring = jnp.int32(0), core.counts(), None
    updates, added = [], 0
    for i in range(60):
        group = i % GROUPS
        trajectory = streams.rollout(group)
        ring = core.ring(trajectory) if ring is None else ring
        state, counts, ring, metrics = learn(
            state, counts, ring, trajectory, jnp.int32(group), jnp.float32(0), jax.random.key(i)
        )
        ready = int(metrics["replay/size"]) >= 12
        updates.append(int(metrics["replay/updates"]))
        assert float(metrics["replay/ratio"]) == pytest.approx(updates[-1] * batch / B)
        added += B * ready
        assert int(metrics["replay/size"]) == int(jnp.sum(ring.priority > 0))
        assert ready or updates[-1] == 0
        assert sum(updates) * batch <= ratio * added + 1e-6 < (sum(updates) + 1) * batch
    assert int(state) == sum(updates) > 0
    np.testing.assert_array_equal(counts.rollouts, streams.counts)
    assert int(counts.batches) == 60


def test_a_ratio_that_never_learns_is_refused():
    """Also one of an agent's own, and R2D2's, which is made of sequences and rounded."""
    for config in (
        *(agents.DQNConfig, agents.R2D2Config, agents.AlphaZeroConfig),
        *(agents.EfficientZeroConfig, agents.MuZeroConfig),
    ):
        with pytest.raises(ValueError, match=f"{config.__name__}.replay_ratio=0.0: must be at least 0.0001"):
            config(replay_ratio=0.0)
    for ratio in (0.0, 32 / 1e6):
        with pytest.raises(ValueError, match="learns would never learn: it samples .* sequences per sequence added"):
            learner.make(Learns(spec_of(ratio=ratio)), SQUARE, lanes=B, groups=GROUPS, num_shards=1)


def test_old_rollouts_join_new_ones():
    """Half of a batch is a rollout from before, or the newest one again while there is none."""
    spec = spec_of(length=T + 1, capacity=30, alpha=0.0, beta=0.0, fraction=0.5)
    agent = Learns(spec)
    seen = []
    agent.learn = lambda state, trajectory, progress, key: (state + 1, {"rows": trajectory.timesteps.observation})
    core = learner.make(agent, SQUARE, lanes=B, groups=GROUPS, num_shards=1)
    streams = Streams(0, spec.context)
    learn = harness.alone(core.learn)
    state, counts, ring = jnp.int32(0), core.counts(), None
    for i in range(40):
        trajectory = streams.rollout(i % GROUPS)
        ring = core.ring(trajectory) if ring is None else ring
        state, counts, ring, metrics = learn(
            state, counts, ring, trajectory, jnp.int32(i % GROUPS), jnp.float32(0), jax.random.key(i)
        )
        rows = np.asarray(metrics["rows"])[..., 0, 0]
        new = np.asarray(trajectory.timesteps.observation)[..., 0, 0]
        np.testing.assert_array_equal(rows[:, :B], new)
        if int(metrics["replay/size"]) == 0:
            assert i < 2 * GROUPS
            np.testing.assert_array_equal(rows[:, B:], new)
        else:
            # Stretches of streams that begin where rollouts do, older than the newest of that lane.
            np.testing.assert_array_equal(np.diff(rows[:, B:], axis=0), 1)
            lane, row = np.divmod(rows[0, B:].astype(int), 1000)
            np.testing.assert_array_equal(row % T, 0)
            assert np.all(row // T < streams.counts[lane // B] - 1)
            seen += list(zip(lane, row))
    assert int(state) == 40
    assert len(set(seen)) > 30
    with pytest.raises(ValueError, match=r"use 0.5, or n / \(n \+ 4\)"):
        learner.make(Learns(spec._replace(fraction=0.3)), SQUARE, lanes=4, groups=1, num_shards=1)


class Extras(NamedTuple):
    double: jax.Array


def test_extras_are_any_tree():
    spec, streams = rows_of(), Streams(0, 3)
    buffer = replay.make(spec, SQUARE, rollout_length=T, lanes=B, groups=GROUPS, num_shards=1)
    rollout = streams.rollout(0)
    rollout = rollout._replace(extras=Extras(rollout.extras["double"]))
    add = lambda ring, rollout: buffer.add(ring, rollout, jnp.int32(0), jnp.int32(0))  # noqa: E731
    ring = jax.eval_shape(lambda rollout: add(buffer.init(rollout), rollout), rollout)
    assert isinstance(ring.extras, Extras)
    assert ring.extras.double.shape == ring.actions.shape


def test_a_rollout_must_fit_into_a_sequence():
    with pytest.raises(ValueError, match="lower rollout_length to 3 or less"):
        replay.make(spec_of(length=4), SQUARE, rollout_length=4, lanes=1, groups=1, num_shards=1)
    with pytest.raises(ValueError, match="batch_size=8 is not divisible by the 3 shards"):
        learner.make(Learns(spec_of()), SQUARE, lanes=1, groups=1, num_shards=3)


@pytest.mark.parametrize("arch", ["anakin", "sebulba"])
def test_a_replay_that_does_not_fit_is_refused(arch):
    """Before anything is made."""
    message = r"the replay needs [0-9.]+ GiB on each device, and \S+ has [0-9.]+ GiB; lower replay_capacity, use more devices\.$"
    large = {"config": {"replay_capacity": 10**8}, "progress": False}
    with pytest.raises(ValueError, match=message):
        podracer.train("r2d2", "pixel_catch", arch=arch, **large)
    with pytest.raises(ValueError, match=r"the replay needs [0-9.]+ GiB, and the host has [0-9.]+ GiB; lower"):
        podracer.train("r2d2", "pixel_catch", arch="sebulba", replay_memory="host", **large)


@pytest.mark.parametrize("arch", ["anakin", "sebulba"])
def test_a_window_that_does_not_fit_is_refused(arch):
    """The memory that an agent has of its lanes."""
    message = r"the agent's memory of its lanes needs [0-9.]+ GiB on each device, .*; lower num_envs, frame_stack or core_memory, or use"
    with pytest.raises(ValueError, match=message):
        podracer.train("ppo", "catch", arch=arch, config={"core": "gtrxl", "core_memory": 10**8}, progress=False)


def test_an_accelerator_offers_the_hosts_memory():
    """Not where there is too little of it."""

    class Accelerator:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 2**20}

        def __repr__(self):
            return "gpu:0"

    def of(n):
        return learner.ReplayState((), jax.ShapeDtypeStruct((n,), jnp.uint8))

    message = (
        r"the replay needs 0\.1 GiB on each device, and gpu:0 has 0\.0 GiB; lower replay_capacity, use more devices, or "
        r"keep it in the host's memory \([0-9.]+ GiB\) with arch='sebulba' and replay_memory='host'\."
    )
    with pytest.raises(ValueError, match=message):
        learner.require_room(of(2**27), [Accelerator()])
    with pytest.raises(ValueError, match=r"use more devices\.$"):
        learner.require_room(of(2**50), [Accelerator()])
    learner.require_room(of(2**21), [Accelerator()] * 2)
    with pytest.raises(ValueError, match="the replay needs"):  # with prefetched samples
        learner.require_room(of(2**21)._replace(prefetched=of(2**20).ring), [Accelerator()] * 2)


def test_replays_in_the_hosts_memory_are_sebulbas():
    with pytest.raises(ValueError, match=r"replay_memory='host': only Sebulba has it; add arch='sebulba'"):
        podracer.train("r2d2", "catch", replay_memory="host", progress=False)
    with pytest.raises(ValueError, match=r"replay_memory='host': vtrace has no replay here; use 'device'"):
        podracer.train("vtrace", "catch", arch="sebulba", replay_memory="host", progress=False)


def test_means_are_of_updates():
    sums = {"loss/total": np.array([6.0]), "replay/updates": np.array([3.0]), "replay/size": np.array([40.0])}
    means = learner.means(sums, 4)
    assert {name: float(x[0]) for name, x in means.items()} == {
        "loss/total": 2.0, "replay/updates": 0.75, "replay/size": 10.0
    }  # fmt: skip
    nothing = {"loss/total": np.array([0.0]), "replay/updates": np.array([0.0])}
    assert np.isnan(learner.means(nothing, 4)["loss/total"][0])
    assert float(learner.means({"loss/total": np.array([6.0])}, 4)["loss/total"][0]) == 1.5


def test_rollouts_that_do_not_fit_are_refused():
    """A rollout without its last row, or of a lane less, would be written over a part of the oldest one."""
    spec, streams = spec_of(), Streams(0, 3)
    buffer = replay.make(spec, SQUARE, rollout_length=T, lanes=B, groups=GROUPS, num_shards=1)
    trajectory = streams.rollout(0)
    ring = jax.eval_shape(lambda trajectory: buffer.init(trajectory), trajectory)
    add = lambda ring, trajectory: buffer.add(ring, trajectory, jnp.int32(0), jnp.int32(0))  # noqa: E731
    jax.eval_shape(add, ring, trajectory)
    cut = lambda tree: jax.tree.map(lambda x: x[:-1], tree)  # noqa: E731
    for part in ("timesteps", "actions", "policy_version", "lane"):
        with pytest.raises(AssertionError):
            jax.eval_shape(add, ring, trajectory._replace(**{part: cut(getattr(trajectory, part))}))
    with pytest.raises(AssertionError):
        jax.eval_shape(lambda ring, counts: buffer.sample(ring, counts, jax.random.key(0), 4, 0.5), ring, jnp.zeros(GROUPS + 1, jnp.int32))  # fmt: skip


@pytest.mark.parametrize("m", [1, 2, 255, 1000])
def test_a_binary_search_draws_what_comparisons_draw(m):
    """One row of priorities, searched, and as many equal rows as draws, compared: zeros among them, also at the ends."""
    rng = np.random.default_rng(m)
    priorities = rng.random(m, np.float32) ** 4 * (rng.random(m) < 0.6)
    priorities[m // 2] = 1.0
    if m > 2:
        priorities[[0, -1]] = 0.0
    u = jnp.asarray(np.append(rng.random(400, np.float32), [0.0, np.nextafter(np.float32(1), np.float32(0))]))
    row = jnp.asarray(priorities)[None]
    searched, compared = (jax.jit(sampling._invert)(x, u) for x in (row, jnp.broadcast_to(row, (len(u), m))))
    np.testing.assert_array_equal(searched, compared)
    assert np.all(priorities[np.asarray(searched)] > 0)
