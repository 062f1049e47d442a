"""Sweeps that renew priorities, against what they should be of every row by itself."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from podracer import nets, replay, spaces
from podracer.agents import EfficientZeroConfig, efficientzero
from podracer.learning import learner
from podracer.replay import priority_refresh
from podracer.search import prefix_models
from podracer.types import EnvSpec, Trajectory
from tests.support import harness
from tests.support.small_replay import GROUPS, B, eligible, filled, rows_of

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
        self.buffer, self.ring, self.streams = filled(spec, list(order), T=T)
        self.sweep = jax.jit(
            lambda ring, counts, part, version: self.buffer.refresh(
                ring, counts, renew(version), version.astype(jnp.int32), (part, PARTS)
            )
        )

    def __call__(self, part, version):
        self.ring = self.sweep(self.ring, jnp.asarray(self.streams.counts), jnp.int32(part), jnp.float32(version))

    def add(self, group):
        number = jnp.int32(self.streams.counts[group])
        trajectory = self.streams.rollout(group)
        add = jax.jit(lambda ring: self.buffer.add(ring, trajectory, jnp.int32(group), number))
        self.ring = add(self.ring)

    def found(self):
        """Priorities by lane and row; all others are 0."""
        priority, there = np.asarray(self.ring.priority), eligible(self.buffer, self.spec, self.streams)
        at = {
            (lane, row): lane * self.buffer.shape.starts_per_lane + row % self.buffer.shape.starts_per_lane
            for lane, row in there
        }
        assert np.count_nonzero(priority) == len(at)
        return {key: priority[index] for key, index in at.items()}


@pytest.mark.parametrize("context", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_sweep_renews_all_priorities_at_its_end(context):
    sweeper = Sweeper(rows_of(capacity=900, refresh_interval=PARTS, reach=REACH, alpha=0.5, context=context))
    assert sweeper.buffer.shape.slots * 8 > 2 * priority_refresh.SEGMENT, "several segments"
    before = sweeper.found()
    for part in range(PARTS - 1):
        sweeper(part, 2.0)
        assert sweeper.found() == before
        np.testing.assert_array_equal(sweeper.ring.version, [0, 2])
    sweeper(PARTS - 1, 2.0)
    after = sweeper.found()
    np.testing.assert_array_equal(sweeper.ring.version, [2, 2])
    for key, priority in after.items():
        assert priority == pytest.approx(expected(sweeper.streams, *key, 2.0), rel=1e-5)
    assert float(sweeper.ring.largest) == max(after.values())
    assert not np.any(sweeper.ring.next_priority)
    for part in range(PARTS):
        sweeper(part, 2.0)
    assert sweeper.found() == after, "a second changes nothing"
    n, mass = 20_000, np.asarray(sweeper.ring.priority, np.float64)
    keys = jax.random.split(jax.random.key(0), n // 8)
    draw = lambda key: buffer.sample(sweeper.ring, counts, key, 8, jnp.float32(0)).index  # noqa: E731
    buffer, counts = sweeper.buffer, jnp.asarray(sweeper.streams.counts)
    drawn = np.bincount(np.ravel(harness.alone(jax.vmap(draw))(keys)), minlength=len(mass))
    assert drawn[mass == 0].sum() == 0
    expect = n * mass[mass > 0] / mass.sum()
    assert scipy.stats.chisquare(drawn[mass > 0], expect).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("frames", [1, 2])
def test_sweeps_of_the_agent_are_brute_force(frames):
    """|V - z| of every row of a ring, of one network, by a loop over what was added."""
    T, L, n, gamma = 4, 3, 3, 0.9
    spec = EnvSpec("rows", spaces.Box(-5.0, 5.0, (2, 2)), spaces.Discrete(3))
    config = EfficientZeroConfig(
        **{"hidden_sizes": (8,), "state_size": 6, "head_size": 8, "num_bins": 11, "lstm_size": 5, "discount": gamma},
        **{"projection_size": 7, "forecast_size": 6, "n_step": n, "unroll_length": 2, "correction_interval": 30},
        **{
            "refresh_interval": 10,
            "rollout_length": T,
            "replay_capacity": 120,
            "replay_min_size": 60,
            "frame_stack": frames,
        },
    )
    agent = efficientzero.make(spec, config)
    rollouts = 14
    rows = harness.timesteps(0, rollouts * T, L, (2, 2))
    core = learner.make(agent, jnp.zeros((2, 2)), lanes=L, groups=1, num_shards=1)
    buffer = replay.make(agent.replay, jnp.zeros((2, 2)), rollout_length=T, lanes=L, groups=1, num_shards=1)
    assert buffer.shape.slots < rollouts, "some are overwritten"
    lane, version = jnp.arange(L, dtype=jnp.int32), jnp.zeros((T, L), jnp.int32)
    extras = {"policy": jnp.ones((T, L, 3)) / 3, "value": jnp.zeros((T, L))}
    state, counts, ring, add = agent.start(lane, L), core.counts(), None, harness.alone(core.steps.add)
    stacks = np.zeros((rollouts * T + 1, L, 2, 2, frames), np.float32)
    for t in range(rollouts * T + 1):
        stacks[t, ..., -1] = rows.observation[t]
        if frames > 1 and t > 0:
            stacks[t, ..., :-1] = np.where(np.asarray(rows.first)[t, :, None, None, None], 0.0, stacks[t - 1, ..., 1:])
    for i in range(rollouts):
        part = jax.tree.map(lambda x, i=i: x[i * T : (i + 1) * T + 1], rows)
        trajectory = Trajectory(part, jnp.zeros((T, L), jnp.int32), extras, state, version, lane)
        ring = core.ring(trajectory) if ring is None else ring
        counts, ring, _ = add(counts, ring, trajectory, jnp.int32(0))
    learned = harness.moved(jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent)))
    learned = learned._replace(aux=learned.aux._replace(sweep=(learned.params, {})))
    actor = agent.refresh_params(learned, jnp.float32(0))
    renew = functools.partial(agent.refresh, actor)
    sweep = jax.jit(lambda ring: buffer.refresh(ring, counts.rollouts, renew, jnp.int32(7), (jnp.int32(0), 1)))
    found = np.asarray(sweep(ring).priority).reshape(L, buffer.shape.starts_per_lane)
    model = prefix_models.make(nets.stacked_spec(spec, frames), config)
    flat = jnp.asarray(stacks.reshape(-1, *nets.stacked_spec(spec, frames).observation_space.shape))
    said = model.call("predict", actor.params, {}, model.call("represent", actor.params, {}, flat))[1]
    value = np.asarray(efficientzero._bins(config).expectation(said)).reshape(-1, L)
    assert np.std(value) > 0.01
    x = jax.tree.map(np.asarray, rows)
    seen, horizons = 0, set()
    for i, row in itertools.product(range(L), range(rollouts * T)):
        if found[i, row % buffer.shape.starts_per_lane] == 0 or row + buffer.shape.starts_per_lane < rollouts * T:
            continue
        horizon = min(max(n - (rollouts * T - row) * L // 30, 1), n)
        z, scale, at = 0.0, 1.0, row
        while at < row + horizon and not x.first[at + 1, i]:
            z += scale * x.reward[at + 1, i]
            scale *= gamma * x.discount[at + 1, i]
            at += 1
        z += scale * value[at, i] * (at > row or x.discount[row, i])
        priority = max(abs(value[row, i] - z), 1e-6) ** config.priority_exponent
        assert found[i, row % buffer.shape.starts_per_lane] == pytest.approx(priority, rel=1e-5, abs=1e-5)
        horizons.add(horizon)
        seen += 1
    assert seen == np.count_nonzero(found) > 60
    assert horizons == {1, 2, 3}


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
        segment = row % (sweeper.buffer.shape.slots * 8) // priority_refresh.SEGMENT
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
