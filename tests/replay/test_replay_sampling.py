"""Draws from a replay by priority, their weights, and the priorities that are written back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax import lax

from podracer import replay
from podracer.replay import sampling
from tests.support import harness, tiers
from tests.support.small_replay import B, T, eligible, filled, rows_of, sampled, spec_of


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
    u = u.at[:, :3].set(jnp.array([0.0, 1.0 - 2**-24, 1.0]))
    for m in (replay.BLOCK, 250, 17, 16):  # each draw from a row of its own
        rows = np.repeat(blocks[:, :m], 400, axis=0)
        within = np.asarray(jax.jit(sampling._invert)(rows, u.reshape(-1)))
        sums, drawn = np.cumsum(rows, axis=1, dtype=np.float64), np.arange(len(rows))
        assert np.all(rows[drawn, within] > 0)
        threshold, error = np.asarray(u, np.float64).reshape(-1) * sums[:, -1], 1e-6 * sums[:, -1]
        assert np.all(threshold <= sums[drawn, within] + error)
        assert np.all(threshold >= sums[drawn, within] - rows[drawn, within] - error)
    sums = jnp.asarray(masses.reshape(-1, replay.BLOCK).sum(1))
    strata = (jnp.arange(4096, dtype=jnp.float32) + 0.5) / 4096
    drawn = np.bincount(np.asarray(sampling._invert(sums[None], strata)), minlength=len(sums))
    expected = np.asarray(sums, np.float64) / np.sum(np.asarray(sums, np.float64)) * 4096
    assert np.max(np.abs(drawn - expected)) <= 1.5
    for edge in (0.0, 1.0 - 2**-24, 1.0):
        assert masses.reshape(-1)[sampling._invert(jnp.asarray(masses[None, :4096]), jnp.array([edge]))[0]] > 0


def test_a_fraction_that_rounds_up_to_the_end_of_a_group_draws_no_priority_of_0():
    """Fractions whose float32 products with the total are a whole number of groups, and whose true products are less."""
    rows, fractions, place = [], [], np.arange(256)
    for total, end in ((n, end) for n in range(18, 240) for end in range(16, n - 1, 16)):
        nearest = np.float32(end / total)
        for u in (np.nextafter(nearest, np.float32(0)), nearest):
            if u * np.float32(total) == end > np.float64(u) * total:
                rows.append((place <= total) & (place != end))  # the group after the end begins with a priority of 0
                fractions.append(u)
    rows, u = np.stack(rows).astype(np.float32), np.stack(fractions)
    drawn = np.asarray(jax.jit(sampling._invert)(rows, u))
    assert len(rows) > 100
    assert np.all(rows[np.arange(len(rows)), drawn] > 0)


@pytest.mark.parametrize("m", [1, 2, 255, 1000])
def test_a_row_is_searched_as_rows_of_their_own_are(m):
    """One row of priorities, and as many equal rows as draws: zeros among them, also at the ends."""
    rng = np.random.default_rng(m)
    priorities = rng.random(m, np.float32) ** 4 * (rng.random(m) < 0.6)
    priorities[m // 2] = 1.0
    if m > 2:
        priorities[[0, -1]] = 0.0
    u = jnp.asarray(np.append(rng.random(400, np.float32), [0.0, np.nextafter(np.float32(1), np.float32(0))]))
    row = jnp.asarray(priorities)[None]
    one, each = (jax.jit(sampling._invert)(x, u) for x in (row, jnp.broadcast_to(row, (len(u), m))))
    np.testing.assert_array_equal(one, each)
    assert np.all(priorities[np.asarray(one)] > 0)


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
