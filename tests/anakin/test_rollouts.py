"""Anakin's rollouts of the counting environment: the contract, memory, platforms, resets, and pools of states."""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import topology
from podracer.anakin import rollout
from podracer.environments import autoreset
from podracer.types import Agent
from tests.support import counting, harness, tiers
from tests.support.small_anakin import COUNTING, B, T, agent_of

FAR = 10**9
TOTAL_STEPS = 10_000


def rollouts(
    agent: Agent, number: int, environment: Any = COUNTING, reset_pool: int | None = None, length: int = T
) -> Any:
    """Contiguous trajectories of one shard by the initial parameters, with the episode sums of each."""
    prog = harness.make_program(agent, environment, num_envs=B)
    state = harness.initial(prog, agent, [0])
    learner = jax.tree.map(lambda x: x[0], state.learner)
    actors = jax.tree.map(lambda x: x[0, 0], state.actors)
    settings = rollout.RolloutSettings(length, reset_pool)

    @jax.jit
    def roll(actors: rollout.Actors, key: jax.Array) -> Any:
        keys = jax.random.split(key, 2 + length)
        return rollout.rollout(agent, environment, settings, learner, actors, jnp.float32(0), keys)

    results = []
    for i in range(number):
        before = actors
        actors, trajectory, episodes = roll(actors, jax.random.key(100 + i))
        results.append((before, trajectory, episodes, actors))
    return learner, results


@pytest.fixture(scope="module", params=["vtrace", pytest.param("ppo", marks=pytest.mark.slow)])
def rolled(request: pytest.FixtureRequest) -> Any:
    """Rollouts of recurrent agents; the runs of test_program.py are of feed-forward ones."""
    agent = agent_of(request.param, core_size=4)
    return agent, *rollouts(agent, 6)


def test_rollouts_obey_the_contract(rolled: Any) -> None:
    _, _, results = rolled
    trajectories = [harness.numbers_of(trajectory) for _, trajectory, _, _ in results]
    for trajectory in trajectories:
        counting.check_trajectory(trajectory)
        assert trajectory.policy_version.max() == 0
        np.testing.assert_array_equal(trajectory.lane, np.arange(B))
    for previous, following in itertools.pairwise(trajectories):
        counting.check_contiguous(previous, following)
    rows = [t.timesteps.observation[1:][t.timesteps.first[1:], 0] for t in trajectories]
    tags = np.concatenate(rows)
    assert len(set(tags.tolist())) > 0.9 * len(tags) > 20  # episodes are new ones, over rollouts too


def test_episode_sums_are_those_of_the_trajectory(rolled: Any) -> None:
    _, _, results = rolled
    for _, trajectory, episodes, _ in results:
        np.testing.assert_allclose(episodes[:3], counting.episode_stats(trajectory)[:3], rtol=1e-6)
    assert sum(float(episodes.count) for _, _, episodes, _ in results) > 20


def test_the_stored_memory_is_from_before_row_0(rolled: Any) -> None:
    """It is what the actors held before; the previous action in it is the one that the environment remembers."""
    _, _, results = rolled
    for before, trajectory, _, after in results:
        harness.assert_same(trajectory.actor_state, before.agent)
        row = np.asarray(trajectory.timesteps.observation[0])
        state = getattr(trajectory.actor_state, "network", trajectory.actor_state)
        going_on = row[:, 1] > 0
        np.testing.assert_array_equal(np.asarray(state.previous_action)[going_on], row[going_on, 2])
        memory = getattr(after.agent, "network", after.agent)
        np.testing.assert_array_equal(memory.previous_action, trajectory.actions[-1])


def test_log_probabilities_are_those_of_the_recorded_actions(rolled: Any) -> None:
    """Unrolled from the stored memory over the stored rows, the network gives back what `act` recorded."""
    agent, learner, results = rolled
    learn = harness.alone(agent.learn)
    for _, trajectory, _, _ in results[1:3]:
        _, metrics = learn(learner, trajectory, jnp.float32(1), jax.random.key(0))
        if agent.name == "vtrace":
            np.testing.assert_allclose(metrics["policy/importance_ratio"], 1.0, atol=1e-5)
        else:  # at progress 1 nothing moves, so all minibatches are on policy
            np.testing.assert_allclose(metrics["policy/kl"], 0.0, atol=1e-6)
            np.testing.assert_allclose(metrics["policy/clip_fraction"], 0.0, atol=1e-6)


@functools.cache
def two_rollouts() -> tuple[Agent, Any]:
    """An agent, and what the two tests below compare with."""
    agent = agent_of("vtrace")
    return agent, rollouts(agent, 2)[1]


@pytest.mark.parametrize("length", tiers.slow(8, 7))
def test_rollouts_for_a_gpu_are_those_for_a_cpu(length: int) -> None:
    """There an iteration of the loop takes several steps; those that remain follow it."""
    _, expected = rollouts(agent_of("vtrace"), 2, length=length)
    with topology.compiling_for("gpu"):
        _, results = rollouts(agent_of("vtrace"), 2, length=length)
    for (_, there, *_), (_, here, *_) in zip(results, expected):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, *map(harness.numbers_of, (there, here)))
    before, after = (harness.numbers_of(trajectory) for _, trajectory, _, _ in results)
    for trajectory, (_, _, episodes, _) in zip((before, after), results):
        assert trajectory.actions.shape == (length, B)
        counting.check_trajectory(trajectory)
        np.testing.assert_allclose(episodes[:3], counting.episode_stats(trajectory)[:3], rtol=1e-6)
    counting.check_contiguous(before, after)


def test_steps_at_once_fit_the_platform_the_rollout_and_the_agent() -> None:
    agent = agent_of("vtrace")
    searching = agent._replace(config=types.SimpleNamespace(simulations=2))  # type: ignore[arg-type]
    assert rollout._steps_at_once(agent, 20) == 1
    with topology.compiling_for("gpu"):
        assert [rollout._steps_at_once(agent, length) for length in (20, 7, 3, 1)] == [4, 4, 3, 1]
        assert rollout._steps_at_once(searching, 20) == 2


def test_steps_after_the_end_change_nothing() -> None:
    agent, plain = two_rollouts()
    _, spoiled = rollouts(agent, 2, harness.AfterTheEnd(COUNTING))
    harness.assert_same(plain, spoiled)


def test_states_made_ahead_are_those_made_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout is the same if the states that open episodes are made before it or in it."""
    agent, ahead = two_rollouts()
    monkeypatch.setattr(rollout, "SMALL_STATE_BYTES", 0)
    _, late = rollouts(agent, 2)
    harness.assert_same(ahead, late)


class Costly(counting.CountingEnvironment):
    """The counting environment, of which only lanes that are over are reset."""

    costly_reset = True


def test_costly_resets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same keys give the same states, one for each lane that is over, as for all lanes."""
    step_lanes, calls = autoreset.step_lanes, []
    monkeypatch.setattr(autoreset, "step_lanes", lambda *lanes: calls.append(1) or step_lanes(*lanes))
    _, plain = two_rollouts()
    _, costly = rollouts(agent_of("vtrace"), 2, Costly())
    harness.assert_same(plain, costly)
    assert calls


@pytest.mark.slow
def test_costly_resets_change_nothing_in_a_population_of_shards() -> None:
    """Bit for bit, over calls."""
    agent, ends = agent_of("vtrace"), []
    for environment in (COUNTING, Costly()):
        made = harness.make_program(agent, environment, num_envs=B, population=3, num_shards=2)
        state = harness.initial(made, agent, [0, 1, 2])
        for _ in range(2):
            state, report = made.step(state, made.limits(FAR, TOTAL_STEPS, 2))
        ends.append(harness.numbers_of((state, report)))
    harness.assert_same(*ends)


def test_reset_pool() -> None:
    """New episodes start from few states, other ones in every rollout; lanes do not mix."""
    _, results = rollouts(agent_of("vtrace"), 4, reset_pool=3)
    pools = []
    for _, trajectory, episodes, _ in results:
        # Not `check_trajectory`: an episode may well be opened again.
        np.testing.assert_allclose(episodes[:3], counting.episode_stats(trajectory)[:3], rtol=1e-6)
        rows = harness.numbers_of(trajectory.timesteps)
        np.testing.assert_array_equal(rows.first, rows.observation[..., 1] == 0)
        pools.append(set(rows.observation[1:, :, 0][rows.first[1:]].tolist()))
        assert 1 <= len(pools[-1]) <= 3
    assert max(len(pool) for pool in pools) > 1
    assert len(set.union(*pools)) == sum(len(pool) for pool in pools)
