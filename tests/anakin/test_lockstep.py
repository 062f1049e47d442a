"""Anakin in lockstep: a rollout, then the updates that are due, and only then the rollout joins the replay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import agents, spaces
from podracer.anakin import program, rollout
from podracer.learning import learner
from podracer.topology import collectives
from tests.support import counting, harness

T, B, DUE = 5, 4, 3
COUNTING = counting.CountingEnvironment()


def agent_of():
    replayed = {"batch_size": 8, "replay_capacity": 100 * T, "replay_min_size": 1, "replay_ratio": DUE * 8 / B}
    config = agents.R2D2Config(
        rollout_length=T, hidden_sizes=(8,), core="none", head_size=8, burn_in=0, trace_length=T, **replayed
    )
    agent = agents.r2d2.make(COUNTING.spec, config)

    def learn(state, batch, progress, key):
        """Tells the newest parameters that any row of the batch was acted by."""
        newest = collectives.global_max(batch.trajectory.policy_version.astype(jnp.float32))
        state, metrics, priorities = agent.learn(state, batch, progress, key)
        return state, metrics | {"newest": newest}, priorities

    return agent._replace(learn=learn)


@pytest.mark.slow
def test_it_is_a_rollout_the_updates_and_then_the_adding():
    """Composed by hand, as is its other order; and the newest rollout is not in the replay that is learnt from."""
    agent = agent_of()
    prog = harness.make_program(agent, COUNTING, num_envs=B, lockstep=True)
    observation = spaces.zeros(COUNTING.spec.observation_space)
    core = learner.make(agent, observation, lanes=B, groups=1, num_shards=1)
    settings = rollout.RolloutSettings(T)

    def by_hand(state):
        member = jax.tree.map(lambda x: x[0], program.Member.from_state(state))
        counts, before = state.replay_state.counts, member.learner
        actors, ring = jax.tree.map(lambda x: x[0], (member.actors, member.ring))
        keys = jax.random.split(actors.key, 4 + T)
        _, trajectory, _ = rollout.rollout(agent, COUNTING, settings, before, actors, jnp.float32(0), keys[2:])
        after, counts, ring, _ = core.steps.run_pending_updates(
            before, counts, ring, counts.pending_updates, jnp.float32(0), keys[1]
        )
        counts, ring, _ = core.steps.add(counts, ring, trajectory, 0)
        return after, counts, ring

    by_hand = harness.alone(by_hand)
    state = harness.initial(prog, agent, [0])
    for i in range(6):
        expected = by_hand(state)
        before = int(state.learner.num_updates[0])
        state, report = prog.step(state, prog.limits(10**6, 10**6, 1))
        found = jax.tree.map(lambda x: x[0], state.learner), state.replay_state.counts
        ring = jax.tree.map(lambda x: x[0, 0], state.replay_state.ring)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
            harness.numbers_of((*found, ring)),
            harness.numbers_of(expected),
        )
        done = int(state.learner.num_updates[0]) - before
        assert int(state.replay_state.counts.pending_updates) == (DUE if i > 0 else 0)
        assert done == (DUE if i > 1 else 0)
        if done:  # what was acted since the updates before these is not there yet
            assert float(report.metrics["newest"][0]) / done <= max(0, before - DUE)


def test_agents_without_updates_that_wait_are_refused():
    with pytest.raises(ValueError, match=r"mode='lockstep': ppo has no updates that could wait in Anakin; use mode='a"):
        podracer.train("ppo", "catch", mode="lockstep", progress=False)
    with pytest.raises(ValueError, match=r"updates_per_call=2 has no effect without arch='sebulba'; leave it out"):
        podracer.train("r2d2", "catch", updates_per_call=2, progress=False)
    with pytest.raises(ValueError, match=r"updates_per_call=2: vtrace has no pending updates; leave it out"):
        podracer.train("vtrace", "catch", arch="sebulba", updates_per_call=2, progress=False)
    with pytest.raises(ValueError, match=r"updates_per_batch=2: with mode='serial' actors wait for the learner.* or 1"):
        podracer.train("vtrace", "catch", arch="sebulba", mode="serial", updates_per_batch=2, progress=False)
