"""EfficientZero's searches: in acting, again of what is replayed, and the memory of their trees."""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import nets
from podracer.agents import EfficientZeroConfig, efficientzero
from podracer.learning import gradients, replay_steps, update_from_replay
from podracer.search import prefix_models, search
from podracer.types import Batch, TimeStep
from tests.support import harness
from tests.support.harness import learner_of
from tests.support.small_efficientzero import SIZES, SMALL, SPEC, A, Table, learning, made


@pytest.mark.slow
def test_actions_are_random_until_something_was_learnt() -> None:
    """Random actions, a search's noise and its choice are drawn independently: under JAX's own checker."""
    agent = made(simulations=4)
    learner = learner_of(learning())
    B = 400
    observation = np.broadcast_to(np.float32([1.0, 2.0, 3.0]), (B, 3))
    rows = TimeStep(observation, np.zeros(B), np.ones(B), np.ones(B, bool), np.zeros(B, bool))
    act = jax.jit(agent.act, static_argnums=4)
    memory = agent.start(jnp.arange(B, dtype=jnp.int32), B)
    shares, policies = [], []
    for updates, evaluation in ((0, False), (1, False), (0, True)):
        params = agent.actor_params(learner._replace(num_updates=jnp.int32(updates)), jnp.float32(0))
        with jax.debug_key_reuse(True):
            action, extras, _ = act(params, memory, rows, jax.random.key(0), evaluation)
        shares.append(np.bincount(np.asarray(action), minlength=A) / B)
        policies.append(np.mean(extras["policy"], axis=0))
    np.testing.assert_allclose(shares[0], np.full(A, 1 / A), atol=0.07)
    np.testing.assert_allclose(shares[1], policies[1], atol=0.07)
    assert np.abs(policies[1] - 1 / A).max() > 0.15, "a search that prefers an action"
    assert shares[2].max() == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("values", ["network", "search"])
def test_reanalysis_is_what_acting_would_find_with_the_target(values: str) -> None:
    agent = made(unroll_length=2, dirichlet_fraction=0.0, value_target=values)
    K, n = 2, agent.config.n_step
    batch = harness.taken(harness.batch_of(agent, A), np.arange(5))
    learner = learner_of(learning())
    target = jax.tree.map(lambda x: 1.5 * np.asarray(x), learner.params)
    learner = learner._replace(aux=learner.aux._replace(target=(target, {})))
    actor = agent.target_params(learner, jnp.float32(0))  # type: ignore[misc]
    renewed = jax.jit(agent.reanalyse)(actor, batch, jax.random.key(0)).trajectory  # type: ignore[arg-type]
    learnt = batch.trajectory.timesteps.observation[: K + 1]
    np.testing.assert_array_equal(renewed.timesteps.observation, learnt, "what learning sees, and no more")
    extras = renewed.extras
    observation = batch.trajectory.timesteps.observation[: K + n + 1].reshape(-1, 3)
    zeros = jnp.zeros(len(observation))
    row = TimeStep(observation, zeros, zeros + 1.0, zeros == 0, zeros > 0)
    memory = agent.start(jnp.arange(len(observation), dtype=jnp.int32), len(observation))
    found = jax.jit(agent.act, static_argnums=4)(actor, memory, row, jax.random.key(1), True)[1]
    policy = np.asarray(found["policy"]).reshape(K + n + 1, 5, A)
    np.testing.assert_allclose(extras["policy"][: K + 1], policy[: K + 1], atol=1e-6)
    if values == "search":
        np.testing.assert_allclose(extras["value"][: K + n + 1].ravel(), found["value"], rtol=1e-4, atol=1e-5)
        return
    np.testing.assert_array_equal(extras["policy"][K + 1 :], batch.trajectory.extras["policy"][K + 1 :])
    model = prefix_models.make(SPEC, prefix_models.Sizes(**SIZES))
    said = jax.jit(lambda p: model.call("predict", p, {}, model.call("represent", p, {}, observation))[1])(target)
    value = efficientzero._bins(agent.config).expectation(said)
    np.testing.assert_allclose(extras["value"][: K + n + 1].ravel(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # quick: a group is as if one by one
def test_reanalysis_does_not_depend_on_what_is_searched_from_together() -> None:
    """Nor on what else there is, with noise at the roots; the same key gives the same, and another key another."""
    agent = made(unroll_length=2, simulations=8, frame_stack=2)
    batch = harness.taken(harness.batch_of(agent, A), np.arange(5))
    actor = agent.target_params(learner_of(agent), jnp.float32(0))  # type: ignore[misc]

    @functools.cache
    def reanalyse(together: int) -> Any:
        return jax.jit(lambda *arguments: agent.reanalyse(*arguments).trajectory.extras)  # type: ignore[misc]

    def extras(together: int, batch: Batch = batch, seed: int = 0) -> Any:
        with mock.patch.object(gradients, "at_a_time", return_value=together):
            return reanalyse(together)(actor, batch, jax.random.key(seed))

    whole = extras(5)
    harness.assert_same(extras(5), whole)
    assert not np.allclose(extras(5, seed=1)["policy"][:3], whole["policy"][:3], atol=1e-3)
    with mock.patch.object(nets, "inputs", wraps=nets.inputs) as seen:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), extras(2), whole)
    assert {call.args[1].timesteps.reward.shape[1] for call in seen.call_args_list} == {2}
    alone = extras(2, harness.taken(batch, np.arange(2)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[:, :2], atol=1e-5), alone, whole)


@pytest.mark.parametrize(
    ("reanalyse", "table"),
    [(1.0, True), *(pytest.param(x, False, marks=pytest.mark.nightly) for x in (0.0, 1.0))],
)
@pytest.mark.slow
def test_a_group_is_as_if_one_by_one(reanalyse: float, table: bool) -> None:
    """Samples that are reanalysed together and learnt from in eight updates: of tables, to the last bits, which XLA rounds
    differently in a loop."""
    G = 8
    settings = {"dirichlet_fraction": 0.0, "target_interval": G, "reanalyse_group": G, "optimizer": "sgd"}
    config = EfficientZeroConfig(**(SMALL | settings), unroll_length=1, reanalyse=reanalyse, simulations=4)
    agent = efficientzero.make(SPEC, config, prefix_models.PrefixModel(Table(), 1) if table else None)
    batch = harness.taken(harness.batch_of(agent, A), np.arange(2 * G))
    begin = learner_of(agent)
    key = jax.random.key(5)
    run = harness.alone(update_from_replay._learn_in_turn(agent, G, 0))
    prepared = replay_steps.Prepared(batch, jax.random.key_data(key), drawn_at=begin.num_updates)
    together, sums, priorities = run(begin, prepared, jnp.float32(0))
    state, each, errors, values = begin, [], [], []
    learn_key, reanalyse_key = jax.random.split(key) if reanalyse else (key, key)
    for i in range(G):
        part = harness.taken(batch, np.arange(2 * i, 2 * i + 2))
        if reanalyse:
            target = agent.target_params(state, jnp.float32(0))  # type: ignore[misc]
            assert int(target.version) == 0
            part = jax.jit(agent.reanalyse)(target, part, reanalyse_key)  # type: ignore[arg-type]
            values.append(part.trajectory.extras["value"])
        state, metrics, error = harness.alone(agent.learn)(
            state, part, jnp.float32(0), jax.random.fold_in(learn_key, i)
        )
        each.append(metrics)
        errors.append(error)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (begin.params, state.params))))
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if table else {"rtol": 1e-4, "atol": 1e-5}
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(state)):
        np.testing.assert_allclose(a, b, **tolerance)
    np.testing.assert_allclose(priorities, np.concatenate(errors), **tolerance)
    np.testing.assert_allclose(sums["loss/total"], sum(m["loss/total"] for m in each), rtol=1e-4)
    if reanalyse:
        target = agent.target_params(begin, jnp.float32(0))  # type: ignore[misc]
        renewed = jax.jit(agent.reanalyse)(target, batch, reanalyse_key)  # type: ignore[arg-type]
        np.testing.assert_allclose(
            renewed.trajectory.extras["value"], np.concatenate(values, axis=1), rtol=1e-5, atol=1e-5
        )
        assert float(sums["reanalyse/staleness"]) == float(sums["replay/priority_staleness"]) == sum(range(G))


def test_trees_are_kept_as_the_config_says() -> None:
    for dtype in ("bfloat16", None):
        config = EfficientZeroConfig(**SMALL, embedding_dtype=dtype)
        assert efficientzero.planner(SPEC, config).config.embedding_dtype == dtype


@pytest.mark.slow
def test_trees_are_no_larger_than_their_states() -> None:
    """(S + 1) (16 A + 20 + bytes of a node) a root, with states and memories in half precision (compare `test_tree`).

    Which is float16 here: as tests are compiled, XLA:CPU keeps loops' bfloat16 in single precision. As users compile, it
    does not.
    """
    width, lanes, S = 64, 64, 200
    config = EfficientZeroConfig(
        **SMALL | {"state_size": width, "lstm_size": width}, simulations=S, embedding_dtype="float16"
    )
    plan, agent = efficientzero.planner(SPEC, config), efficientzero.make(SPEC, config)
    variables = plan.variables(agent.actor_params(learner_of(agent), jnp.float32(0)))
    root = plan.model.root(variables, jnp.zeros((lanes, 3)))
    find = jax.jit(lambda variables, root: search.search(plan.model, variables, root, jax.random.key(0), plan.config))
    node = 2 * 3 * width + 4 + 4  # a state, h and c; a prefix and a depth
    assert sum(x.nbytes for x in jax.tree.leaves(root.embedding)) == lanes * (4 * 3 * width + 8)
    formula = lanes * (S + 1) * (16 * A + 20 + node)
    assert find.lower(variables, root).compile().memory_analysis().temp_size_in_bytes <= 1.3 * formula
