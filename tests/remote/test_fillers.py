"""Filler rows, which stand for those of a lost worker: whatever they show, nothing is learnt from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, replay, spaces
from podracer.types import Batch, EnvSpec, TimeStep
from tests.support import harness, tiers

SPEC = EnvSpec("rows", spaces.Box(-9.0, 9.0, (3,)), spaces.Discrete(3))
T, B, LANE, FILLERS = 12, 4, 1, slice(4, 7)
SMALL = {"hidden_sizes": (8,), "core": "lstm", "core_size": 6}
MADE = {
    "vtrace": lambda: agents.vtrace.make(SPEC, agents.VTraceConfig(rollout_length=T, **SMALL)),
    "ppo": lambda: agents.ppo.make(
        SPEC,
        agents.PPOConfig(
            rollout_length=T, num_minibatches=2, normalize_observations=True, normalize_rewards=True, hidden_sizes=(8,)
        ),
    ),
    "pqn": lambda: agents.pqn.make(
        SPEC, agents.PQNConfig(rollout_length=T, num_minibatches=2, num_epochs=1, hidden_sizes=(8,))
    ),
    "r2d2": lambda: agents.r2d2.make(
        SPEC,
        agents.R2D2Config(
            rollout_length=T,
            burn_in=2,
            trace_length=T - 2,
            n_step=3,
            head_size=8,
            batch_size=B,
            replay_min_size=4 * T,
            **SMALL,
        ),
    ),
}

SEARCHED = {
    **{"unroll_length": 2, "n_step": 2, "simulations": 3, "reanalyse": 0.5, "priority_exponent": 1.0, "frame_stack": 2},
    **{"hidden_sizes": (8,), "state_size": 6, "head_size": 8, "num_bins": 11, "replay_capacity": T * B},
    **{"replay_min_size": 4, "rollout_length": T},
}
BY_ROWS = {
    "dqn": lambda: agents.dqn.make(
        SPEC,
        agents.DQNConfig(
            rollout_length=T,
            n_step=3,
            frame_stack=2,
            priority_exponent=0.5,
            replay_capacity=T * B,
            replay_min_size=4,
            hidden_sizes=(8,),
        ),
    ),
    "muzero": lambda: agents.muzero.make(SPEC, agents.MuZeroConfig(**SEARCHED)),
    "efficientzero": lambda: agents.efficientzero.make(
        SPEC,
        agents.EfficientZeroConfig(**SEARCHED, lstm_size=6, projection_size=8, forecast_size=4, refresh_interval=1),
    ),
}


def rows(rng, waiting=True):
    """Rows [T+1, B] of which a lane's are fillers for a while, with what they show."""
    numbers = np.random.default_rng(0)
    observation = numbers.normal(size=(T + 1, B, 3)).astype(np.float32)
    reward = numbers.normal(size=(T + 1, B)).astype(np.float32)
    first, last = np.zeros((T + 1, B), bool), np.zeros((T + 1, B), bool)
    first[0], last[5, 2], first[6, 2] = True, True, True
    first[FILLERS.stop, LANE] = True  # of the next worker
    observation[FILLERS, LANE] = rng.normal(size=(3, 3))
    first[FILLERS, LANE] = waiting
    reward[first] = 0.0
    return TimeStep(*map(jnp.asarray, (observation, reward, np.where(last, 0.0, 1.0).astype(np.float32), first, last)))


def recorder(agent):
    """Parameters, and `(seed, waiting) -> Trajectory` of what acting by them makes of rows; seeds differ in fillers."""
    learner = harness.moved(jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent)))
    params = jax.jit(agent.actor_params)(learner, jnp.float32(0))
    record = jax.jit(functools.partial(harness.record, agent))

    def recorded(seed, waiting=True):
        rng = np.random.default_rng(seed)
        state = agent.start(jnp.arange(B, dtype=jnp.int32), B)
        trajectory, _ = record(params, state, rows(rng, waiting), jax.random.key(1))

        def other(x):
            there = x[FILLERS, LANE]
            whole = jnp.issubdtype(x.dtype, jnp.integer)
            return x.at[FILLERS, LANE].set((there + seed) % 3 if whole else rng.normal(size=there.shape))

        actions, extras = jax.tree.map(other, (trajectory.actions, trajectory.extras))
        return trajectory._replace(actions=actions, extras=extras)

    return learner, recorded


def assert_close(one, other):
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-7)


def differ(one, other):
    return any(not np.allclose(*pair) for pair in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vtrace", "ppo", "pqn", "r2d2"])
def test_what_fillers_show_changes_no_loss_and_no_priority(name):
    """Nor the moments of observations and rewards, nor what acting made of them."""
    agent = MADE[name]()
    learner, recorded = recorder(agent)

    def learnt(seed, waiting=True):
        trajectory = recorded(seed, waiting)
        first = ()
        if agent.replay:
            first = jax.jit(agent.replay.priority)(
                trajectory.timesteps._replace(observation=None), with_last(trajectory)
            )
            none = jax.tree.map(lambda x: x[:0], (trajectory.timesteps.observation, trajectory.timesteps.first))
            restored = agent.replay.restore(agent.replay.keep(trajectory.actor_state), *none)
            trajectory = Batch(trajectory._replace(actor_state=restored), jnp.ones(B), jnp.zeros(B, jnp.int32))
        return first, harness.alone(agent.learn)(learner, trajectory, jnp.float32(0), jax.random.key(2))

    one, other, played = learnt(1), learnt(2), learnt(1, waiting=False)
    assert_close(one, other)
    assert differ(one, played), "they would, were they played"
    if agent.replay:
        (first,), priorities = one[0], one[1][2]
        assert not np.allclose(first[LANE], played[0][0][LANE])
        assert not np.allclose(priorities[LANE], played[1][2][LANE])
        np.testing.assert_array_equal(np.delete(first, LANE), np.delete(played[0][0], LANE))


@pytest.mark.parametrize("name", ["dqn", *tiers.slow("muzero"), *tiers.nightly("efficientzero")])
def test_no_sample_begins_in_fillers_and_none_learns_of_them(name):
    """This holds for all first priorities, with samples or of a sweep, and for all stacks of frames."""
    agent = BY_ROWS[name]()
    spec, (learner, recorded) = agent.replay, recorder(agent)
    buffer = replay.make(
        spec, jnp.zeros(SPEC.observation_space.shape), rollout_length=T, lanes=B, groups=1, num_shards=1
    )
    counts, none, now = jnp.array([2], jnp.int32), jnp.int32(0), jnp.float32(0)
    starts = np.zeros((B, buffer.shape.starts_per_lane), bool)
    starts[:, 1 : 2 * T - buffer.shape.incomplete] = True  # after the context, and as far as all rows are there
    for begin in (0, T):  # what comes before a `first` row
        starts[:, begin + T - 1] = starts[2, begin + 5] = starts[LANE, begin + FILLERS.stop - 1] = False
    played_starts = starts.copy()
    for begin in (0, T):
        starts[LANE, begin + FILLERS.start - 1 : begin + FILLERS.stop] = False
    index = jnp.asarray(np.flatnonzero(starts), jnp.int32)

    @jax.jit
    def remembered(trajectory):
        ring = buffer.init(trajectory)
        for number in range(2):
            ring = buffer.add(ring, trajectory, none, jnp.int32(number))
        at = replay.Sample(index, jnp.zeros_like(index), jnp.ones(index.shape), jnp.zeros_like(index))
        batch = Batch(buffer.gather(ring, at), at.weight, at.index)
        if agent.reanalyse:
            batch = agent.reanalyse(agent.target_params(learner, now), batch, jax.random.key(3))
        swept = ()
        if agent.refresh:
            renew = functools.partial(agent.refresh, agent.refresh_params(learner, now))
            after = buffer.refresh(ring, counts, renew, none, (none, 1))
            swept = (after.priority, after.largest)
        return ring.priority, swept, batch

    def learnt(seed, waiting=True):
        priority, swept, batch = remembered(recorded(seed, waiting))
        learner_after, metrics, errors = harness.alone(agent.learn)(learner, batch, now, jax.random.key(2))
        metrics.pop("consistency/std", None)  # of all that is seen, learnt from or not
        return priority, swept, learner_after, metrics, errors

    one, other, played = learnt(1), learnt(2), learnt(1, waiting=False)
    np.testing.assert_array_equal(one[0].reshape(starts.shape) > 0, starts)
    np.testing.assert_array_equal(played[0].reshape(starts.shape) > 0, played_starts)
    assert_close(one, other)
    for part, those in zip(one, played, strict=True):
        assert differ(part, those) or not jax.tree.leaves(part), "they would, were they played"


def with_last(trajectory):
    """Extras of T + 1 rows: those of the last one are what the next rollout records."""
    return jax.tree.map(lambda x: jnp.concatenate([x, x[-1:]]), trajectory.extras)
