"""EfficientZero: targets by age against a loop, the loss against a loop, and what moves statistics and the target."""

import dataclasses
import functools
import types
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets, spaces
from podracer.agents import EfficientZeroConfig, efficientzero
from podracer.learning import gradients, replay_steps, update_from_replay
from podracer.search import prefix_models, search, windows
from podracer.types import Agent, Batch, EnvSpec, TimeStep
from tests.support import harness, tiers

SPEC = EnvSpec("rows", spaces.Box(-5.0, 5.0, (3,)), spaces.Discrete(4), None)
IMAGES = EnvSpec("images", spaces.Box(0, 255, (16, 16, 1), np.uint8), spaces.Discrete(4), None)
A = 4
SIZES: dict[str, Any] = {"hidden_sizes": (8,), "state_size": 6, "head_size": 8, "num_bins": 11, "lstm_size": 5}
SIZES |= {"projection_size": 7, "forecast_size": 6}
SMALL: dict[str, Any] = SIZES | {"n_step": 3, "correction_interval": 30_000}
BATCH: dict[str, Any] = {"norm": "batch", "channels": 4, "unroll_length": 1, "n_step": 1, "augment": False}


@functools.cache
def made(spec: EnvSpec = SPEC, **overrides: Any) -> Agent:
    return agents.efficientzero.make(spec, EfficientZeroConfig(**(SMALL | overrides)))


def learning() -> Agent:
    """An agent whose update has all that tests of it look at: they share its program."""
    schedule = {"warmup_updates": 4, "final_scale": 0.1, "max_grad_norm": np.inf}
    return made(unroll_length=2, refresh_interval=10, optimizer="sgd", **schedule)


learner_of = harness.learner_of


def learn(agent: Agent, batch: Batch, learner: Any = None, key: int = 0) -> Any:
    learner = learner_of(agent) if learner is None else learner
    return harness.alone(agent.learn)(learner, batch, jnp.float32(0), jax.random.key(key))


def targets_of(agent: Agent, batch: Batch) -> windows.Targets:
    found = jax.jit(lambda discount, batch: efficientzero._targets(discount, batch, agent.config))
    return jax.tree.map(np.asarray, found(jnp.float32(agent.hyper["discount"]), batch))


@pytest.mark.parametrize("horizon", [2, 5])
def test_targets_are_the_loops(horizon: int) -> None:
    agent = made(horizon=horizon, discount=0.9, unroll_length=5)
    batch = harness.batch_of(agent, A)
    K, n = 5, 3
    found = targets_of(agent, batch)
    rows, extras = jax.tree.map(np.asarray, (batch.trajectory.timesteps, batch.trajectory.extras))
    kinds = set()
    for i in range(len(batch.weight)):
        going, m = True, min(max(n - int(batch.age[i]) // 30_000, 1), n)
        for k in range(K + 1):
            last = bool(rows.first[k + 1, i])
            assert float(found.valid[k, i]) == going
            assert float(found.acted[k, i]) == (going and not last)
            if going:
                z, scale, row = 0.0, 1.0, k
                while row < k + m and not rows.first[row + 1, i]:
                    z += scale * rows.reward[row + 1, i]
                    scale *= 0.9 * rows.discount[row + 1, i]
                    row += 1
                z += scale * extras["value"][row, i] * (row > k or rows.discount[row, i])
                assert float(found.value[k, i]) == pytest.approx(z, abs=1e-5)
                if k:
                    begin = horizon * ((k - 1) // horizon) + 1
                    assert float(found.reward[k, i]) == pytest.approx(rows.reward[begin : k + 1, i].sum(), abs=1e-5)
                kinds.add((last, bool(rows.discount[k, i]), m))
            going = going and not last
    assert {(last, going, m) for last in (False, True) for going in (True,) for m in (1, 2, 3)} <= kinds
    assert (True, False, 3) in kinds
    np.testing.assert_array_equal(found.policy, extras["policy"][: K + 1])


def test_values_have_fewer_rewards_the_older_they_are() -> None:
    age = jnp.asarray([0, 29_999, 30_000, 59_999, 60_000, 89_999, 90_000, 10**9], jnp.int32)
    config = EfficientZeroConfig(n_step=5, correction_interval=30_000)
    np.testing.assert_array_equal(windows.rewards_in_values(age, config), [5, 5, 4, 4, 3, 3, 2, 1])
    config = EfficientZeroConfig(n_step=5, correction_interval=0)
    np.testing.assert_array_equal(windows.rewards_in_values(age, config), 5)


@pytest.mark.slow
def test_the_loss_is_the_loops() -> None:
    """Sample by sample, step by step, with the model called as in acting, one state at a time."""
    agent = made(unroll_length=3, horizon=2, max_value=2.0)
    batch, learner = harness.batch_of(agent, A), learner_of(agent)
    config = agent.config
    model = prefix_models.make(SPEC, prefix_models.Sizes(**SIZES))
    bins = efficientzero._bins(config)
    at = np.arange(0, len(batch.weight), len(batch.weight) // 5)
    batch = harness.taken(batch, at)
    target = targets_of(agent, batch)
    hot = {name: np.asarray(bins.two_hot(jnp.asarray(getattr(target, name)))) for name in ("value", "reward")}
    call = jax.jit(lambda name, *arguments: model.call(name, learner.params, {}, *arguments), static_argnums=0)
    observation, actions = batch.trajectory.timesteps.observation, batch.trajectory.actions
    total, errors = 0.0, []
    for i in range(len(at)):
        state, memory = call("represent", observation[0, i : i + 1]), model.empty(1)
        each, prefix = 0.0, np.zeros(11)
        for k in range(4):
            policy, value = (np.asarray(x[0]) for x in call("predict", state))
            each += config.value_cost * cross_entropy(hot["value"][k, i], value) * target.valid[k, i]
            each += cross_entropy(target.policy[k, i], policy) * target.acted[k, i]
            if k:
                forecast = np.asarray(call("forecast", call("project", state))[0])
                seen = np.asarray(call("project", call("represent", observation[k, i : i + 1]))[0])
                cosine = forecast @ seen / (np.linalg.norm(forecast) * np.linalg.norm(seen))
                each += target.valid[k, i] * (cross_entropy(hot["reward"][k, i], prefix) + 2.0 * (1.0 - cosine))
            else:
                errors.append(abs(float(bins.expectation(jnp.asarray(value))) - target.value[0, i]))
            memory = model.empty(1) if k % 2 == 0 else memory
            state = call("advance", state, actions[k, i : i + 1])
            said, memory = call("prefix", state, memory)
            prefix = np.asarray(said[0])
        total += each * float(batch.weight[i]) / 3
    _, metrics, priorities = learn(agent, batch, learner)
    assert float(metrics["loss/total"]) == pytest.approx(total / len(at), rel=1e-4)
    np.testing.assert_allclose(priorities, errors, rtol=1e-3, atol=1e-4)
    outside = np.maximum(np.abs(target.value), np.abs(target.reward)) > 2.0
    shares = np.sum(outside * target.valid, axis=0) / np.sum(target.valid, axis=0)
    assert 0 < float(metrics["value/outside"]) < 1
    np.testing.assert_allclose(metrics["value/outside"], np.mean(shares), rtol=1e-5)


def test_what_bins_cover_by_default() -> None:
    """Values and sums of a horizon's rewards, of rewards in [-1, 1]; 1,000 of them where nothing is discounted."""
    for settings, largest in (
        ({"discount": 0.99}, 100.0),
        ({"discount": 1.0}, 1000.0),
        ({"discount": 0.5, "horizon": 5}, 5.0),
        ({"discount": 0.5, "max_value": 7.0}, 7.0),
    ):
        assert efficientzero._bins(EfficientZeroConfig(**settings)).largest == pytest.approx(largest)


def cross_entropy(weights: np.ndarray, logits: np.ndarray) -> float:
    return float(-np.sum(weights * (logits - np.log(np.sum(np.exp(logits))))))


@pytest.mark.slow
def test_nothing_is_learnt_behind_the_end_of_an_episode() -> None:
    """Records and observations after the end change no bit of the update."""
    agent = learning()
    batch = harness.batch_of(agent, A)
    rows, extras = batch.trajectory.timesteps, batch.trajectory.extras
    over = np.cumsum(np.asarray(rows.first)[1:], axis=0) > 0  # transitions that are masked or lie behind one
    assert over.any()
    assert not over.all(axis=1).any()
    behind = np.concatenate([np.zeros_like(over[:1]), over[:-1]]) & over
    row_over = np.concatenate([np.zeros_like(over[:1]), over])
    noise = jnp.asarray(np.random.default_rng(7).dirichlet(np.ones(A), over.shape), jnp.float32)
    seen = row_over[: len(rows.observation), :, None]
    changed = batch.trajectory._replace(
        extras={
            "policy": jnp.where(over[..., None], noise, extras["policy"]),
            "value": jnp.where(behind, 5.0, extras["value"]),
        },
        timesteps=rows._replace(
            reward=jnp.where(row_over, 7.0, rows.reward), observation=jnp.where(seen, -3.0, rows.observation)
        ),
        actions=jnp.where(over, 0, batch.trajectory.actions),
    )
    expected, found = learn(agent, batch), learn(agent, batch._replace(trajectory=changed))
    jax.tree.map(np.testing.assert_array_equal, found[0].params, expected[0].params)
    elsewhere = batch.trajectory._replace(timesteps=rows._replace(observation=rows.observation + 1.0))
    moved = learn(agent, batch._replace(trajectory=elsewhere))[0].params
    assert any(np.any(x != y) for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(expected[0].params)))


@pytest.mark.slow
@pytest.mark.nightly
def test_without_a_forecast_nothing_is_consistent() -> None:
    """Only the weight of consistency moves projections; the branch of what was seen has no gradient."""
    agent = learning()
    batch, begin = harness.batch_of(agent, A), learner_of(agent)
    for cost, still in ((2.0, False), (0.0, True)):
        learner = begin._replace(hyper=begin.hyper | {"consistency_cost": jnp.float32(cost)})
        params = learn(agent, batch, learner)[0].params["params"]
        for name in ("p_0", "q"):
            same = np.array_equal(params[name]["kernel"], learner.params["params"][name]["kernel"])
            assert same == still


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
    counts = []
    for updates, evaluation in ((0, False), (1, False), (0, True)):
        params = agent.actor_params(learner._replace(num_updates=jnp.int32(updates)), jnp.float32(0))
        with jax.debug_key_reuse(True):
            action = act(params, memory, rows, jax.random.key(0), evaluation)[0]
        counts.append(np.bincount(np.asarray(action), minlength=A))
    assert counts[0].min() > 70
    assert counts[1].min() < 50
    assert counts[2].max() == B


def test_bad_settings_are_one_sentence() -> None:
    wrong: Any = {"num_bins": (40, "must be odd"), "horizon": (0, "at least 1"), "norm": ("group", "norm")}
    wrong |= {"embedding_dtype": ("float64", "expected one of 'float32', 'bfloat16', 'float16' or None")}
    for name, (value, words) in wrong.items():
        with pytest.raises(ValueError, match=words):
            EfficientZeroConfig(**{name: value})
    for name in ("target_interval", "refresh_interval"):
        with pytest.raises(ValueError, match=f"reanalyse_group=4 must divide {name}=10, so that"):
            EfficientZeroConfig(**({"target_interval": 8, "reanalyse_group": 4} | {name: 10}))
    with pytest.raises(ValueError, match="Discrete ones: use ppo"):
        agents.efficientzero.make(SPEC._replace(action_space=spaces.Box(-1.0, 1.0, (2,))))
    with pytest.raises(ValueError, match="efficientzero cannot play against itself"):
        agents.efficientzero.make(SPEC._replace(num_players=2))


def test_trees_are_kept_as_the_config_says() -> None:
    for dtype in ("bfloat16", None):
        config = EfficientZeroConfig(**SMALL, embedding_dtype=dtype)
        assert efficientzero.planner(SPEC, config).config.embedding_dtype == dtype


def test_clipped_lars_needs_heads_by_name() -> None:
    config = EfficientZeroConfig(**SMALL, optimizer="clipped_lars")
    agent = efficientzero.make(SPEC, config, prefix_models.PrefixModel(Table(), 1))
    with pytest.raises(ValueError, match=r"needs parameters \[head\]\['last'\]\['kernel'\] .* policy, prefix, value"):
        jax.eval_shape(agent.init, jax.random.key(0), harness.hyper(agent))


@pytest.mark.parametrize("name", ["sgd", "clipped_lars"])
def test_decay_is_behind_the_clip(name: Any) -> None:
    """With a gradient of zero, the decay shrinks parameters by its full amount, and the norm is 0."""
    config = EfficientZeroConfig(optimizer=name, l2_cost=5e-5)
    rule = efficientzero._optimizer(config)
    params = {"params": {head: {"last": {"kernel": jnp.full((3, 3), 200.0)}} for head in ("policy", "prefix", "value")}}
    nothing, hyper = jax.tree.map(jnp.zeros_like, params), {"learning_rate": jnp.float32(0.5), "max_grad_norm": 1e-3}
    packed, restore = rule.pack(params)
    state, gradient = rule.init(params, hyper), rule.pack(nothing)[0]
    new, _, norm = rule.step(gradient, state, packed, learning_rate=hyper["learning_rate"], hyper=hyper)
    new = restore(new)
    assert float(norm) == 0.0
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, (1 - 0.5e-4) * y, rtol=1e-6), new, params)


@pytest.mark.slow
def test_the_learning_rate_warms_up_and_falls_behind_the_last_step() -> None:
    """The first steps of SGD are as large as the learning rate says."""
    agent = learning()
    batch, begun = harness.batch_of(agent, A), learner_of(agent)

    def step(num_updates: int, progress: float) -> float:
        learner = begun._replace(num_updates=jnp.full_like(begun.num_updates, num_updates))
        after, *_ = harness.alone(agent.learn)(learner, batch, jnp.float32(progress), jax.random.key(0))
        kernel = lambda x: np.asarray(x.params["params"]["value"]["last"]["kernel"], np.float64)  # noqa: E731
        return float(np.linalg.norm(kernel(after) - kernel(begun)))

    whole = step(3, 0.5)
    assert whole > 0
    found = [step(*at) / whole for at in ((0, 0.0), (1, 0.0), (2, 0.9), (50, 0.999), (50, 1.0), (1, 1.0))]
    np.testing.assert_allclose(found, [0.25, 0.5, 0.75, 1.0, 0.1, 0.05], rtol=1e-2)


def test_importance_weights_count_fully_in_the_end() -> None:
    spec: Any = made(importance_exponent=0.4).replay
    np.testing.assert_allclose([float(spec.importance_exponent(jnp.float32(x))) for x in (0, 0.5, 1)], [0.4, 0.7, 1.0])
    none: Any = made(importance_exponent=0.0).replay
    assert float(none.importance_exponent(jnp.float32(0.5))) == 0.0


def test_clipped_rewards_are_learnt_as_if_they_came_so() -> None:
    """Targets, and priorities that are refreshed, of rewards beyond [-1, 1]."""
    plain, clipping = (made(horizon=2, refresh_interval=10, clip_rewards=clip) for clip in (False, True))
    batch = harness.batch_of(plain, A)
    rows = batch.trajectory.timesteps
    large = rows._replace(reward=3.0 * rows.reward)
    assert float(jnp.max(large.reward)) > 1
    assert float(jnp.min(large.reward)) < -1
    small = large._replace(reward=jnp.clip(large.reward, -1.0, 1.0))
    seen = [batch._replace(trajectory=batch.trajectory._replace(timesteps=steps)) for steps in (large, small)]
    jax.tree.map(np.testing.assert_array_equal, targets_of(clipping, seen[0]), targets_of(plain, seen[1]))
    assert np.any(targets_of(plain, seen[0]).reward != targets_of(clipping, seen[0]).reward)
    actor = plain.actor_params(learner_of(learning()), jnp.float32(0))

    def refreshed(agent: Any, of: Batch) -> np.ndarray:
        window = jax.tree.map(lambda x: x[: agent.config.n_step + 1], of.trajectory.timesteps)
        return np.asarray(jax.jit(agent.refresh)(actor, of.trajectory._replace(timesteps=window), batch.age[None]))

    np.testing.assert_array_equal(refreshed(clipping, seen[0]), refreshed(plain, seen[1]))
    assert np.any(refreshed(plain, seen[0]) != refreshed(clipping, seen[0]))


@pytest.mark.slow
def test_steps_of_clipped_lars_are_sorted_by_their_dims() -> None:
    """In the network for Atari biases, scales and offsets are vectors, and nothing else is; heads begin at 0."""
    spec = EnvSpec("atari", spaces.Box(0, 255, (96, 96, 12), np.uint8), spaces.Discrete(6), None)
    agent = agents.efficientzero.make(spec, EfficientZeroConfig(norm="batch", optimizer="clipped_lars"))
    learner = jax.eval_shape(agent.init, jax.random.key(0), harness.hyper(agent))
    for path, x in jax.tree_util.tree_leaves_with_path(learner.params):
        name = jax.tree_util.keystr(path)
        assert (x.ndim == 1) == name.endswith(("['bias']", "['scale']")), name
    small = made(optimizer="clipped_lars", lars_start=0, unroll_length=1)
    batch = harness.taken(harness.batch_of(small, A), np.arange(8))
    begin = jax.jit(small.init)(jax.random.key(0), harness.hyper(small))
    assert not bool(learn(small, batch, begin)[0].opt_state.active)
    assert bool(learn(small, batch, learner_of(small))[0].opt_state.active)


class Table(nn.Module):
    """Observations are cells of a board of 7, and all that is said of one stands in tables."""

    def setup(self) -> None:
        table = lambda name, size: self.param(name, nn.initializers.normal(1.0), (7, size))  # noqa: E731
        sizes = {"policy": A, "value": 11, "prefixes": 11, "projection": 5, "forecasts": 5}
        self.said = {name: table(name, size) for name, size in sizes.items()}

    def __call__(self, observation: Any, action: Any, memory: Any) -> Any:
        return self.represent(observation)

    def represent(self, observation: jax.Array) -> jax.Array:
        return jax.nn.one_hot(jnp.floor(7 * jax.nn.sigmoid(observation[:, 0])).astype(jnp.int32), 7)

    def advance(self, state: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.take_along_axis(state, (jnp.arange(7)[None] + action[:, None]) % 7, axis=1)

    def prefix(self, state: jax.Array, memory: Any) -> Any:
        return state @ self.said["prefixes"], memory

    def predict(self, state: jax.Array) -> Any:
        return state @ self.said["policy"], state @ self.said["value"]

    def project(self, state: jax.Array) -> jax.Array:
        return state @ self.said["projection"]

    def forecast(self, projection: jax.Array) -> jax.Array:
        return projection @ self.said["forecasts"][:5]


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


@pytest.mark.slow
def test_refreshed_priorities_are_those_that_learning_would_return() -> None:
    """Priorities of windows as trajectories of rows: |V - z| with V of one set of parameters, and rewards by age."""
    agent = learning()
    batch = harness.batch_of(agent, A)
    learner = learner_of(agent)
    rows = batch.trajectory
    n = agent.config.n_step
    cut = jax.tree.map(lambda x: x[: n + 1], rows.timesteps)
    trajectory = rows._replace(timesteps=cut)
    learner = learner._replace(aux=learner.aux._replace(sweep=(learner.params, {})))
    actor = agent.refresh_params(learner, jnp.float32(0))  # type: ignore[misc]
    assert int(actor.version) == 0
    found = jax.jit(agent.refresh)(actor, trajectory, batch.age[None])  # type: ignore[misc]
    values = actor_values(agent, actor, rows.timesteps.observation)
    extras = rows.extras | {"value": jnp.concatenate([values, jnp.zeros_like(rows.extras["value"][len(values) :])])}
    _, _, priorities = learn(agent, batch._replace(trajectory=rows._replace(extras=extras)), learner)
    np.testing.assert_allclose(found[0], priorities, rtol=1e-3, atol=1e-4)


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


def actor_values(agent: Agent, actor: Any, observation: jax.Array) -> jax.Array:
    """V of observations [rows, B, 3]."""
    model, flat = prefix_models.make(SPEC, prefix_models.Sizes(**SIZES)), observation.reshape(-1, 3)
    _, said = model.call("predict", actor.params, {}, model.call("represent", actor.params, {}, flat))
    return efficientzero._bins(agent.config).expectation(said).reshape(observation.shape[:2])


class NoForecast(prefix_models._Vectors):
    """A model that forecasts a projection by the projection itself."""

    def forecast(self, projection: jax.Array) -> jax.Array:
        return projection


@pytest.mark.slow
@pytest.mark.parametrize("both_move", [*tiers.nightly(False), True])
def test_projections_collapse_where_what_was_seen_moves_too(both_move: bool) -> None:
    """With no stop of gradients and no forecast in between, all projections become one (Chen and He 2021).

    By the agent's own loss, in 500 updates on what can be forecast.
    """
    spec = EnvSpec("rows", spaces.Box(-5.0, 5.0, (12,)), spaces.Discrete(A))
    sizes: dict[str, Any] = {"hidden_sizes": (32,), "state_size": 16, "head_size": 8, "lstm_size": 8, "num_bins": 11}
    sizes |= {"projection_size": 32, "forecast_size": 16, "unroll_length": 1, "n_step": 1, "reanalyse": 0.0}
    config = EfficientZeroConfig(**sizes, optimizer="sgd", learning_rate=0.05, correction_interval=0)
    model = prefix_models.make(spec, config)
    if both_move:
        shape = {f.name: getattr(model.module, f.name) for f in dataclasses.fields(model.module) if f.name not in PARTS}
        model = model._replace(module=NoForecast(**shape))
    agent = efficientzero.make(spec, config, model)
    batch = harness.batch_of(agent, A, shape=(12,))
    rows = batch.trajectory.timesteps
    action = batch.trajectory.actions[0][:, None].astype(jnp.float32)
    later = jnp.roll(rows.observation[0], 1, axis=1) + 0.3 * action
    observation = rows.observation.at[1].set(later)
    batch = batch._replace(trajectory=batch.trajectory._replace(timesteps=rows._replace(observation=observation)))

    def run(learner: Any) -> Any:
        update = lambda _, learner: agent.learn(learner, batch, jnp.float32(0), jax.random.key(0))[0]  # noqa: E731
        learner = jax.lax.fori_loop(0, 500, update, learner)
        return agent.learn(learner, batch, jnp.float32(0), jax.random.key(0))[1]

    moves = types.SimpleNamespace(stop_gradient=lambda x: x, rsqrt=jax.lax.rsqrt)
    with mock.patch.object(prefix_models, "lax", moves if both_move else prefix_models.lax):
        metrics = harness.alone(run)(jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent)))
    spread = float(metrics["consistency/std"]) * np.sqrt(32)
    assert float(metrics["loss/consistency"]) < 0.3
    assert spread < 0.05 if both_move else spread > 0.25, spread


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


PARTS = ("parent", "name")
"""The fields that Linen adds to a module."""
