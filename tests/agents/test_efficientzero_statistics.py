"""Statistics of batch norm in EfficientZero: the parts that move them, and the parts that keep theirs."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import spaces
from podracer.learning import gradients
from podracer.search import prefix_models
from podracer.types import TimeStep
from tests.support import harness
from tests.support.harness import learner_of
from tests.support.small_efficientzero import BATCH, IMAGES, A, learn, made


@pytest.mark.slow
@pytest.mark.nightly
def test_statistics_are_state() -> None:
    """Statistics of batch norm: learning moves them; published and copied parameters keep their own."""
    agent = made(IMAGES, **BATCH, target_interval=2)
    batch = harness.taken(harness.batch_of(agent, A, shape=(16, 16, 1)), np.arange(6))
    first = learner_of(agent)
    second = learn(agent, batch, first)[0]
    third = learn(agent, batch, second, 1)[0]
    differ = lambda x, y: all(np.any(a != b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y)))  # noqa: E731
    published = agent.actor_params(second, jnp.float32(0))
    assert len(jax.tree.leaves(first.aux.statistics)) > 20
    assert differ(published.aux["statistics"], third.aux.statistics)
    assert differ(first.aux.statistics, second.aux.statistics)
    harness.assert_same(second.aux.target, first.aux.target)
    harness.assert_same(third.aux.target, (third.params, third.aux.statistics))
    harness.assert_same(published.aux["statistics"], second.aux.statistics)
    target = agent.target_params(second, jnp.float32(0))  # type: ignore[misc]
    harness.assert_same((target.params, target.aux["statistics"]), first.aux.target)
    assert [int(agent.target_params(x, jnp.float32(0)).version) for x in (first, second, third)] == [0, 0, 2]  # type: ignore[misc]
    # A row that is reanalysed is what it is by itself.
    reanalyse, key = jax.jit(agent.reanalyse), jax.random.key(2)  # type: ignore[arg-type]
    target = agent.target_params(third, jnp.float32(0))  # type: ignore[misc]
    together, alone = (
        reanalyse(target, samples, key).trajectory.extras["value"]
        for samples in (batch, harness.taken(batch, np.arange(1)))
    )
    np.testing.assert_allclose(alone[:3, 0], together[:3, 0], rtol=1e-5, atol=1e-5)
    assert not np.allclose(together[:3, 0], together[:3, 1], atol=1e-3)


@pytest.mark.slow
@pytest.mark.nightly
def test_statistics_move_with_all_rows_in_the_order_of_the_unroll() -> None:
    """h of o_0 and f; at each step g, the prefix, f, P and q; then h and P once, of all that was seen later."""
    agent = made(IMAGES, **(BATCH | {"unroll_length": 2}))
    batch, learner = harness.batch_of(agent, A, shape=(16, 16, 1)), learner_of(agent)
    K, B = 2, 18
    batch = harness.taken(batch, np.arange(B))
    seen = batch.trajectory.timesteps.observation
    with mock.patch.dict(gradients.ROWS_IN_CACHE, {"unrolled": 48}):  # without batch norm they would not go at once
        assert gradients.at_a_time(seen, 2 * K + 1, B, unrolled=True) < B
    model = prefix_models.make(IMAGES, agent.config)

    @jax.jit
    def in_order(statistics: Any) -> Any:
        def call(name: str, *arguments: Any) -> Any:
            nonlocal statistics
            found, statistics = model.learning(
                lambda module, *x: getattr(module, name)(*x), learner.params, statistics, *arguments
            )
            return found

        state, memory = call("represent", seen[0]), model.empty(B)
        call("predict", state)
        for k in range(K):
            state = call("advance", state, batch.trajectory.actions[k])
            _, memory = call("prefix", state, memory)
            call("predict", state)
            call("forecast", call("project", state))
        call("project", call("represent", seen[1 : K + 1].reshape(K * B, 16, 16, 1)))
        return statistics

    with mock.patch.dict(gradients.ROWS_IN_CACHE, {"unrolled": 48}):
        found = learn(agent, batch, learner)[0].aux.statistics
    for a, b in zip(*map(jax.tree.leaves, (found, in_order(learner.aux.statistics)))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # quick: running statistics of a layer (test_prefix_models.py)
def test_acting_sees_one_row_alone() -> None:
    """With running statistics, whatever the other rows are."""
    agent = made(IMAGES, **BATCH, target_interval=2)
    published = agent.actor_params(learner_of(agent), jnp.float32(0))
    B = 4
    images = np.random.default_rng(0).integers(0, 256, (B, 16, 16, 1), np.uint8)
    rows = TimeStep(images, np.zeros(B), np.ones(B), np.ones(B, bool), np.zeros(B, bool))
    act = jax.jit(agent.act, static_argnums=4)
    memory = agent.start(jnp.arange(B, dtype=jnp.int32), B)
    together = act(published, memory, rows, jax.random.key(0), True)[1]["value"]
    other = rows._replace(observation=np.concatenate([images[:1], 255 - images[1:]]))
    alone = act(published, memory, other, jax.random.key(0), True)[1]["value"]
    np.testing.assert_allclose(together[0], alone[0], rtol=1e-5)
    assert not np.allclose(together[1:], alone[1:], rtol=1e-3)


@pytest.mark.slow
def test_statistics_are_those_of_shards() -> None:
    """Each shard normalises by its own rows; the running ones are their mean, so the state is one."""
    agent = made(IMAGES, **BATCH, target_interval=2)
    batch = harness.taken(harness.batch_of(agent, A, shape=(16, 16, 1)), np.arange(12))
    learner = learner_of(agent)
    halves = [harness.taken(batch, part) for part in (np.arange(6), np.arange(6, 12))]
    found = harness.over_shards(
        lambda state, batch: agent.learn(state, batch, jnp.float32(0), jax.random.key(0))[0].aux.statistics,
        learner,
        jax.tree.map(lambda *x: jnp.stack(x), *halves),
    )
    each = [learn(agent, half, learner)[0].aux.statistics for half in halves]
    for both, left, right in zip(*map(jax.tree.leaves, (found, *each))):
        np.testing.assert_allclose(both[0], (left + right) / 2, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(both[0], both[1])


@pytest.mark.slow
def test_a_sweep_keeps_the_statistics_it_began_with() -> None:
    """Statistics of batch norm: the learner's newer ones change no priority of the sweep."""
    agent = made(IMAGES, **BATCH, refresh_interval=10)
    batch = harness.taken(harness.batch_of(agent, A, shape=(16, 16, 1)), np.arange(6))
    begun = learner_of(agent)
    later = jax.tree.map(lambda x: 2.0 * x + 1.0, begun.aux.statistics)

    @jax.jit
    def priorities(of_learner: Any, of_sweep: Any) -> jax.Array:
        learner = begun._replace(aux=begun.aux._replace(statistics=of_learner, sweep=(begun.params, of_sweep)))
        actor: Any = agent.refresh_params(learner, jnp.float32(0))  # type: ignore[misc]
        window = jax.tree.map(lambda x: x[:2], batch.trajectory.timesteps)
        return agent.refresh(actor, batch.trajectory._replace(timesteps=window), batch.age[None])  # type: ignore[misc]

    found = priorities(begun.aux.statistics, begun.aux.statistics)
    np.testing.assert_array_equal(priorities(later, begun.aux.statistics), found)
    assert np.all(np.abs(priorities(begun.aux.statistics, later) - found) > 1e-6)


@pytest.mark.slow
@pytest.mark.nightly
def test_images_of_one_channel_are_learnt_from_as_with_an_axis_for_it() -> None:
    """Shifts and brightness too."""
    results = []
    for space in (IMAGES.observation_space, spaces.Box(0, 255, (16, 16), np.uint8)):
        agent = made(IMAGES._replace(observation_space=space), channels=4, unroll_length=1, n_step=1)
        batch = harness.taken(harness.batch_of(agent, A, shape=(16, 16, 1)), np.arange(6))
        rows = batch.trajectory.timesteps
        seen = rows.observation.reshape(*rows.observation.shape[:2], *space.shape)
        trajectory = batch.trajectory._replace(timesteps=rows._replace(observation=seen))
        learner, _, errors = learn(agent, batch._replace(trajectory=trajectory))
        results.append((learner.params, errors))
    jax.tree.map(np.testing.assert_array_equal, *results)
