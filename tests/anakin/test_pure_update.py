"""Anakin's pure update: the same numbers as the program's, on any number of devices."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from podracer import agents, anakin
from podracer.anakin import loop
from podracer.environments.tasks import Tasks
from podracer.types import Agent
from tests.support import counting, harness

COUNTING = counting.CountingEnvironment()
T, B, S = 5, 8, 2
TOTAL_STEPS = 300
NIGHTLY = (pytest.mark.nightly, pytest.mark.slow)


@functools.cache
def agent_of(name: str, **fields: Any) -> Agent:
    small = {"rollout_length": T, "hidden_sizes": (8,)} | fields
    if name == "vtrace":
        return agents.vtrace.make(COUNTING.spec, agents.VTraceConfig(**small))
    if name == "pqn":
        return agents.pqn.make(COUNTING.spec, agents.PQNConfig(num_minibatches=2, **small))
    return agents.ppo.make(COUNTING.spec, agents.PPOConfig(num_epochs=2, num_minibatches=2, **small))


def progress_of(member: loop.Member) -> jax.Array:
    return jnp.minimum(member.env_steps.to_float() / TOTAL_STEPS, 1.0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("vtrace", marks=pytest.mark.slow),
        pytest.param("ppo", marks=NIGHTLY),
        pytest.param("pqn", marks=NIGHTLY),
    ],
)
def test_steps_are_the_programs_updates(name: str) -> None:
    """Bit by bit: learner, actors, counts, and the sums of metrics and episodes."""
    agent = agent_of(name)
    program = harness.make_program(agent, COUNTING, num_envs=B, num_shards=S)
    state, report = program.step(harness.initial(program, agent, [3]), program.limits(10**9, TOTAL_STEPS, 3))

    update = anakin.update(agent, COUNTING, num_envs=B, num_shards=S)
    step = jax.jit(lambda member: update.step(member, progress_of(member)))
    member, reports = jax.jit(update.init)(3), []
    for _ in range(3):
        ahead = jax.jit(update.rollout)(member, progress_of(member))
        member, trajectory, numbers = step(member)
        assert trajectory.timesteps.reward.shape == (T + 1, B)
        np.testing.assert_array_equal(trajectory.lane, np.arange(B))
        counting.check_trajectory(harness.numbers_of(trajectory))
        harness.assert_same(
            ahead, (ahead[0]._replace(actors=member.actors, env_steps=member.env_steps), trajectory, numbers.episodes)
        )
        reports.append(numbers)
    sums = jax.tree.map(lambda *x: functools.reduce(np.add, x), *jax.device_get(reports))
    whole = jax.tree.map(lambda x: x[0], loop.Member.from_state(state))
    harness.assert_same(
        (member, sums.metrics, sums.episodes), (whole, *(jax.tree.map(lambda x: x[0], part) for part in report[:2]))
    )


def test_an_agent_with_replay_is_refused() -> None:
    agent = agents.dqn.make(COUNTING.spec, agents.DQNConfig(hidden_sizes=(8,)))
    with pytest.raises(ValueError, match="agent='dqn' has a replay"):
        anakin.update(agent, COUNTING)


def test_numbers_that_the_agent_does_not_have_are_refused() -> None:
    update = anakin.update(agent_of("vtrace"), COUNTING, num_envs=B)
    with pytest.raises(ValueError, match=r"hyper has gamma: the tunable numbers of vtrace are c_bar, discount"):
        update.init(0, {"gamma": 0.9})


def test_a_learning_rate_that_the_agent_sets_itself_is_refused() -> None:
    agent = agent_of("ppo", target_kl=0.01, learning_rate_schedule="constant")
    update = anakin.update(agent, COUNTING, num_envs=B)
    member = jax.eval_shape(lambda: update.init(0, {"learning_rate": 1e-3}))
    with pytest.raises(ValueError, match=r"hyper has learning_rate, which target_kl=0.01 sets in every update; use"):
        update.step(member, 0.0, {"discount": 0.9, "learning_rate": 1e-3})


def test_parameters_of_an_environment_without_them_are_refused() -> None:
    update = anakin.update(agent_of("vtrace"), COUNTING, num_envs=B)
    with pytest.raises(ValueError, match="parameters: counting takes none"):
        update.init(0, parameters=jnp.float32(1))


def test_lanes_that_do_not_divide_among_tasks_are_refused() -> None:
    tasks = Tasks({"one": COUNTING, "other": COUNTING})
    with pytest.raises(
        ValueError, match="num_envs=6: 3 lanes of a shard do not divide among 2 tasks; use num_envs=4 or"
    ):
        anakin.update(agent_of("vtrace"), tasks, num_envs=6, num_shards=2)  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_population_of_grids_is_single_grids() -> None:
    """Each member plays in its own one."""
    grid = envs_jax.make("gridworld", task="random_goals", height=3, width=4)
    config = agents.VTraceConfig(rollout_length=T, hidden_sizes=(8,))
    update = anakin.update(agents.vtrace.make(grid.spec, config), grid, num_envs=B)

    def play(seed: jax.Array) -> Any:
        parameters = grid.parameters(jax.random.key(seed))
        member = update.init(seed, parameters=parameters)
        member, trajectory, _ = update.step(member, 0.0, parameters=parameters)
        return member.learner.params, trajectory.timesteps.reward, parameters.reward

    seeds = jnp.arange(3)
    together, alone = jax.jit(jax.vmap(play))(seeds), jax.jit(play)
    for seed in range(3):
        one, part = alone(seeds[seed]), jax.tree.map(operator.itemgetter(seed), together)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), part, one)
        paid = np.asarray(one[1])
        assert np.isin(paid[paid != 0], np.asarray(one[2])).all()
    assert len(np.unique(together[1])) > 3
