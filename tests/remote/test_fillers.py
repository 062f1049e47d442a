"""Filler rows, which stand for those of a lost worker: whatever they show, nothing is learnt from it."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, spaces
from podracer.types import Batch, EnvSpec, TimeStep

SPEC = EnvSpec("rows", spaces.Box(-9.0, 9.0, (3,)), spaces.Discrete(3))
T, B, LANE, FILLERS = 12, 4, 1, slice(4, 7)
SMALL = {"hidden_sizes": (8,), "lstm_size": 6}
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
            replay_min_size=4,
            **SMALL,
        ),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vtrace", "ppo", "pqn", "r2d2"])
def test_what_fillers_show_changes_no_loss_and_no_priority(name):
    """Nor the moments of observations and rewards, nor what acting made of them."""
    agent = MADE[name]()
    learner = harness.moved(jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent)))
    params = jax.jit(agent.actor_params)(learner, jnp.float32(0))
    record = jax.jit(functools.partial(harness.record, agent))

    def learnt(seed, waiting=True):
        rng = np.random.default_rng(seed)
        state = agent.start(jnp.arange(B, dtype=jnp.int32), B)
        trajectory, _ = record(params, state, rows(rng, waiting), jax.random.key(1))
        noise = lambda x: x.at[FILLERS, LANE].set(jnp.asarray(rng.integers(0, 3, x[FILLERS, LANE].shape), x.dtype))  # noqa: E731
        trajectory = trajectory._replace(
            actions=noise(trajectory.actions), extras=jax.tree.map(noise, trajectory.extras)
        )
        first = ()
        if agent.replay:
            first = jax.jit(agent.replay.priority)(
                trajectory.timesteps._replace(observation=None), with_last(trajectory)
            )
            none = jax.tree.map(lambda x: x[:0], (trajectory.timesteps.observation, trajectory.timesteps.first))
            restored = agent.replay.restore(agent.replay.keep(state), *none)
            trajectory = Batch(trajectory._replace(actor_state=restored), jnp.ones(B), jnp.zeros(B, jnp.int32))
        return first, harness.alone(agent.learn)(learner, trajectory, jnp.float32(0), jax.random.key(2))

    one, other, played = learnt(1), learnt(2), learnt(1, waiting=False)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-7)
    changed = [not np.allclose(left, right) for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(played))]
    assert any(changed), "they would, were they played"
    if agent.replay:
        (first,), priorities = one[0], one[1][2]
        assert not np.allclose(first[LANE], played[0][0][LANE])
        assert not np.allclose(priorities[LANE], played[1][2][LANE])
        np.testing.assert_array_equal(np.delete(first, LANE), np.delete(played[0][0], LANE))


def with_last(trajectory):
    """Extras of T + 1 rows: those of the last one are what the next rollout records."""
    return jax.tree.map(lambda x: jnp.concatenate([x, x[-1:]]), trajectory.extras)
