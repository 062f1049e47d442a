"""Sweeps that renew priorities, against what they should be of every row by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_replay import GROUPS, B, eligible, filled, rows_of

from podracer import replay
from podracer.learning import priority_refresh

REACH, PARTS = 2, 3
SPEC = rows_of(capacity=900, refresh_interval=PARTS, reach=REACH, alpha=0.5)


def renew(version):
    """A priority that says which row it is of, how old that is, and what comes behind."""

    def renew(rows, age):
        m = age.shape[0]
        reward, seen = rows.timesteps.reward, rows.timesteps.observation[..., 0, 0]
        assert reward.shape[0] == m + REACH
        return version * (seen[:m] + 0.1 * (reward[REACH:] - reward[:m]) + 1e-2 * age.astype(jnp.float32))

    return renew


def expected(streams, lane, row, version):
    """The same of one row, when it was swept by."""
    end = int(streams.counts[lane // B]) * streams.T
    age = (end - row) * GROUPS * B
    return np.sqrt(version * (1000 * lane + row + 0.1 * REACH + 1e-2 * age))


class Sweeper:
    def __init__(self, spec=SPEC, order=(0, 1) * 20, T=8):
        self.spec = spec
        self.plan, self.ring, self.streams = filled(spec, list(order), T=T)
        self.sweep = jax.jit(
            lambda ring, counts, part, version: priority_refresh.refresh(
                self.plan, spec, ring, counts, renew(version), (part, PARTS), self.streams.observations, 1
            )
        )

    def __call__(self, part, version):
        self.ring = self.sweep(self.ring, jnp.asarray(self.streams.counts), jnp.int32(part), jnp.float32(version))

    def add(self, group):
        number = jnp.int32(self.streams.counts[group])
        trajectory = self.streams.rollout(group)
        add = jax.jit(lambda ring: replay.add(self.plan, self.spec, ring, trajectory, jnp.int32(group), number))
        self.ring = add(self.ring)

    def found(self):
        """Priorities by lane and row; all others are 0."""
        priority, there = np.asarray(self.ring.priority), eligible(self.plan, self.spec, self.streams)
        at = {(lane, row): lane * self.plan.places + row % self.plan.places for lane, row in there}
        assert np.count_nonzero(priority) == len(at)
        return {key: priority[index] for key, index in at.items()}


@pytest.mark.parametrize("context", [0, 3])
def test_a_sweep_renews_all_priorities_at_its_end(context):
    sweeper = Sweeper(rows_of(capacity=900, refresh_interval=PARTS, reach=REACH, alpha=0.5, context=context))
    assert sweeper.plan.slots * 8 > 2 * priority_refresh.SEGMENT, "several segments"
    before = sweeper.found()
    for part in range(PARTS - 1):
        sweeper(part, 2.0)
        assert sweeper.found() == before
    sweeper(PARTS - 1, 2.0)
    after = sweeper.found()
    for key, priority in after.items():
        assert priority == pytest.approx(expected(sweeper.streams, *key, 2.0), rel=1e-5)
    assert float(sweeper.ring.largest) == max(after.values())
    assert not np.any(sweeper.ring.fresh)
    for part in range(PARTS):
        sweeper(part, 2.0)
    assert sweeper.found() == after, "a second changes nothing"


def test_what_comes_during_a_sweep_keeps_its_first_priority():
    sweeper = Sweeper(order=(0, 1) * (900 // 48 + 6))
    streams, counts = sweeper.streams, {}
    old = sweeper.found()
    for part in range(PARTS):
        counts |= {part: streams.counts.copy()}
        sweeper(part, 2.0)
        if part == 0:
            for group in (0, 1, 0):
                sweeper.add(group)
    after = sweeper.found()
    assert set(after) - set(old), "something is new"
    assert set(old) - set(after), "something was overwritten"
    kinds = set()
    for (lane, row), priority in after.items():
        if (lane, row) not in old:
            assert priority == 1.0
            kinds.add("new")
            continue
        segment = row % (sweeper.plan.slots * 8) // priority_refresh.SEGMENT
        ends = {int(c[lane // B]) * 8 for c in counts.values()}
        ages = [np.sqrt(2.0 * (1000 * lane + row + 0.1 * REACH + 1e-2 * (end - row) * GROUPS * B)) for end in ends]
        assert any(priority == pytest.approx(age, rel=1e-5) for age in ages), (lane, row, segment)
        kinds.add("swept")
    assert kinds == {"new", "swept"}


def test_a_ring_that_is_hardly_filled():
    """Nothing is done for rows that are not there."""
    sweeper = Sweeper(order=(0, 1, 0))
    for part in range(PARTS):
        sweeper(part, 3.0)
    found = sweeper.found()
    assert found
    for key, priority in found.items():
        assert priority == pytest.approx(expected(sweeper.streams, *key, 3.0), rel=1e-5)
