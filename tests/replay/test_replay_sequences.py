"""Sequences of a replay against a plain record of everything that was ever added."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import replay
from tests.support import tiers
from tests.support.small_replay import GROUPS, SQUARE, B, Streams, T, eligible, filled, rows_of, spec_of

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
