"""DQN: what is learnt, from which rows, by which passes, and how it explores, against loops and identities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets
from podracer.agents import DQNConfig
from podracer.learning import value_distributions
from podracer.types import Batch
from tests.support import harness
from tests.support.small_dqn import SMALL, SPEC, A, K, act, batch_of, learn, learner_of, made, network_of

# Learning.


CASES: list[Any] = [
    {"n_step": 3, "double": True, "clip_rewards": True},
    pytest.param({"n_step": 1, "double": False, "frame_stack": 3}, marks=pytest.mark.slow),
    {"n_step": 3, "double": True, "values": "categorical", "dueling": True, "head_size": 6, "max_value": 1.5},
    pytest.param({"n_step": 2, "double": False, "values": "quantile"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_loss_is_the_loops(case: dict[str, Any]) -> None:
    """Row by row: up to n rewards, the target network's value of what it, or the learner, thinks best; weights."""
    agent = made(**case)
    config, learner, batch = agent.config, learner_of(agent), batch_of(agent)
    values = value_distributions.make(config.values, max_error=1.0, num_bins=K, max_value=config.max_value)
    network = network_of(agent)
    unroll = jax.jit(lambda params: nets.unroll(network, params, batch.trajectory)[0])
    said = [unroll(params).reshape(config.n_step + 1, -1, A, values.size) for params in (learner.params, learner.aux)]
    online, target = said
    worth = [np.asarray(values.mean(x)) for x in said]
    steps = jax.tree.map(lambda x: np.asarray(x), batch.trajectory.timesteps)
    taken, bootstrap, returns, discounts = [], [], [], []
    for i, action in enumerate(np.asarray(batch.trajectory.actions[0])):
        R, G, m = 0.0, 1.0, 0
        while m < config.n_step and not steps.first[m + 1, i]:
            reward = steps.reward[m + 1, i]
            R += G * (np.clip(reward, -1, 1) if config.clip_rewards else reward)
            G *= config.discount * steps.discount[m + 1, i]
            m += 1
        best = np.argmax(worth[0 if config.double else 1][m, i])
        taken.append(online[0, i, action])
        bootstrap.append(target[m, i, best])
        returns.append(R)
        discounts.append(G)
    numbers = (jnp.asarray(x, jnp.float32) for x in (returns, discounts))
    each, expected = jax.jit(values.errors)(jnp.stack(taken), jnp.stack(bootstrap), *numbers)
    if config.values == "mean":  # without the library's loss
        error = np.abs(np.array(returns) + np.array(discounts) * np.ravel(bootstrap) - np.ravel(taken))
        each, expected = np.where(error < 1, error**2 / 2, error - 0.5), error
        assert error.min() < 1 < error.max()
    _, metrics, priorities = learn(agent, learner, batch)
    np.testing.assert_allclose(metrics["loss/total"], np.mean(batch.weight * each), rtol=1e-4)
    np.testing.assert_allclose(priorities, expected, rtol=1e-3, atol=1e-5)
    chosen = np.asarray(values.mean(jnp.stack(taken)))
    np.testing.assert_allclose(metrics["value/mean"], np.mean(chosen), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["value/square"], np.mean(chosen**2), rtol=1e-4)
    assert min(discounts) == 0.0 < max(discounts), "ends, and what goes on"
    assert ("value/outside" in metrics) == (config.values == "categorical")
    if config.values == "categorical":
        beyond = (
            np.abs(np.array(returns) + np.array(discounts) * np.asarray(values.mean(jnp.stack(bootstrap))))
            > config.max_value
        )
        assert 0 < float(metrics["value/outside"]) < 1
        np.testing.assert_allclose(metrics["value/outside"], np.mean(beyond), rtol=1e-5)


def test_a_distribution_covers_what_a_discount_lets_rewards_come_to() -> None:
    for max_value, largest in ((None, 20.0), (7.0, 7.0)):
        agent = made(values="categorical", max_value=max_value, discount=0.95)
        assert f"beyond {largest:g} and cannot be told apart; set max_value" in agent.cautions[0].advice


def test_the_passes_are_of_single_rows() -> None:
    """theta- on row m, theta on row m if double, theta on row 0 with a gradient: never all n + 1 rows."""
    inner = network_of(made(n_step=3))
    shapes: list[tuple[int, ...]] = []

    def apply(params: Any, inputs: nets.Inputs, state: Any) -> Any:
        shapes.append(inputs.observation.shape)
        return inner.apply(params, inputs, state)

    network = nets.Network(inner.init, apply, inner.start)
    for double, passes in ((True, 3), (False, 2)):
        agent = agents.dqn.make(SPEC, DQNConfig(**SMALL, n_step=3, double=double), network)
        learner, batch = learner_of(agent), batch_of(agent)
        shapes.clear()
        jax.eval_shape(
            harness.over_axes(agent.learn), *jax.tree.map(lambda x: x[None, None], _arguments(learner, batch))
        )
        assert shapes == [(1, batch.weight.shape[0], 3)] * passes


def _arguments(learner: Any, batch: Batch) -> tuple[Any, ...]:
    return learner, batch, jnp.float32(0), jax.random.key(0)


def test_what_follows_row_m_changes_nothing() -> None:
    """Rows of the next episode, and what a masked transition holds."""
    agent = made(n_step=3, clip_rewards=True)
    learner, batch = learner_of(agent), batch_of(agent)
    steps = batch.trajectory.timesteps
    after = np.cumsum(np.asarray(steps.first[1:]), axis=0) > 0
    assert 0 < after.sum() < after.size
    later = np.concatenate([np.zeros_like(after[:1]), after])
    spoilt = batch.trajectory._replace(
        actions=jnp.where(np.arange(3)[:, None] > 0, 3 - batch.trajectory.actions, batch.trajectory.actions),
        timesteps=steps._replace(
            observation=jnp.where(later[..., None], 7.0, steps.observation),
            reward=jnp.where(later, 0.5, steps.reward),
            discount=jnp.where(later, 0.3, steps.discount),
        ),
    )
    harness.assert_same(learn(agent, learner, batch), learn(agent, learner, batch._replace(trajectory=spoilt)))


def test_shards_learn_as_one() -> None:
    agent = made(n_step=3, learning_rate=0.1)
    learner, batch = learner_of(agent), batch_of(agent)
    half = batch.weight.shape[0] // 2
    part = lambda start: harness.taken(batch, np.arange(start, start + half))  # noqa: E731
    whole = learn(agent, learner, batch)
    halves = jax.tree.map(lambda *x: jnp.stack(x), part(0), part(half))
    split = harness.over_shards(
        lambda state, b: agent.learn(state, b, jnp.float32(0), jax.random.key(0)), learner, halves
    )
    for shard in range(2):
        mine = jax.tree.map(lambda x, s=shard: x[s], split[:2])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5), mine, whole[:2])
    np.testing.assert_allclose(jnp.concatenate(split[2]), whole[2], rtol=1e-4)


def test_the_target_network_is_copied_every_so_many_updates() -> None:
    """Bit for bit; in between it stays."""
    agent = made(target_interval=3)
    learner, batch = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent)), batch_of(agent)
    kept = learner.params
    for i in range(1, 8):
        learner, *_ = learn(agent, learner, batch)
        kept = learner.params if i % 3 == 0 else kept
        harness.assert_same(learner.aux, kept)
        assert int(learner.num_updates) == i


def test_a_reset_follows_an_update() -> None:
    """Half of the torso is that of a fresh network, whose head, target and optimiser's state are new; else nothing."""
    agent, plain = made(reset_interval=4), made()
    learner, batch, key = learner_of(plain), batch_of(plain), jax.random.key(5)
    run = lambda agent, learner, key: harness.alone(agent.learn)(learner, batch, jnp.float32(0.1), key)  # noqa: E731
    for num_updates in (3, 4):
        learner = learner._replace(num_updates=jnp.int32(num_updates))
        expected, *results = run(plain, learner, jax.random.split(key)[0])
        after, *same = run(agent, learner, key)
        assert same[0].pop("reset/count") == 1, "that of update 4"
        harness.assert_same(same, results)
        if num_updates == 3:
            fresh = jax.jit(network_of(plain).init)(jax.random.split(key)[1])["params"]
            torsos = expected.params["params"]["torso"], fresh["torso"]
            params = {"params": fresh | {"torso": jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, *torsos)}}
            begun = jax.jit(agent.init)(key, learner.hyper)
            expected = expected._replace(params=params, aux=params, opt_state=begun.opt_state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), after, expected)


def test_one_update_by_hand() -> None:
    """The gradient is that of the value at row 0 alone; RMSProp is centred, epsilon inside its root, from moments 0."""
    agent = made(optimizer="rmsprop", optimizer_eps=1e-4, max_grad_norm=float("inf"), learning_rate=0.01)
    learner, batch = learner_of(agent), batch_of(agent)
    network, N = network_of(agent), batch.weight.shape[0]
    rows = batch.trajectory.timesteps

    @jax.jit
    def by_hand(params: Any) -> Any:
        (_, after), (_, target) = (nets.unroll(network, p, batch.trajectory)[0] for p in (learner.params, learner.aux))
        best = target[np.arange(N), jnp.argmax(after, axis=-1)]
        wanted = rows.reward[1] + 0.99 * rows.discount[1] * best

        def total(params: Any) -> jax.Array:
            before, _ = nets.unroll(network, params, batch.trajectory)[0]
            error = jnp.abs(wanted - before[np.arange(N), batch.trajectory.actions[0]])
            return jnp.mean(batch.weight * jnp.where(error < 1, 0.5 * error**2, error - 0.5))

        return jax.grad(total)(params)

    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
    gradient = flat(by_hand(learner.params))
    after, metrics, _ = learn(agent, learner, batch)
    np.testing.assert_allclose(np.linalg.norm(gradient), metrics["grad/norm"], rtol=1e-4)
    assert np.abs(gradient).max() > 0.05
    expected = -0.01 * gradient / np.sqrt(0.05 * gradient**2 - (0.05 * gradient) ** 2 + 1e-4)
    np.testing.assert_allclose(flat(after.params) - flat(learner.params), expected, rtol=1e-3, atol=1e-6)


def test_the_learning_rate_falls_to_nothing() -> None:
    agent = made(target_interval=3)
    learner, batch = learner_of(agent), batch_of(agent)
    moved = {}
    for progress in (0.0, 0.75, 1.0):
        after = learn(agent, learner, batch, progress=progress)[0].params
        moved[progress] = jax.tree.map(lambda new, old: new - old, after, learner.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 0.25 * b, atol=1e-7), moved[0.75], moved[0.0])
    assert not any(np.any(x) for x in jax.tree.leaves(moved[1.0]))


# Noise.


def test_noise_of_no_size_is_the_plain_agent() -> None:
    """With sigma 0 learning does to weights what it does without noise; with sigma every key gives another loss."""
    plain, noisy = made(learning_rate=0.1), made(noise=0.5, learning_rate=0.1)
    learner, batch = learner_of(noisy), batch_of(plain)

    def without(tree: Any) -> Any:
        return {"params": {n: {k: x for k, x in p.items() if "sigma" not in k} for n, p in tree["params"].items()}}

    still = jax.tree_util.tree_map_with_path(
        lambda path, x: 0.0 * x if "sigma" in str(path[-1]) else x, (learner.params, learner.aux)
    )
    quiet = learner_of(plain)._replace(params=without(still[0]), aux=without(still[1]))
    expected = learn(plain, quiet, batch)
    found = learn(noisy, learner._replace(params=still[0], aux=still[1]), batch)
    for name in ("loss/total", "value/td_error"):
        np.testing.assert_allclose(found[1][name], expected[1][name], rtol=1e-5)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-4)

    losses = [float(learn(noisy, learner, batch, key)[1]["loss/total"]) for key in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    moved = learn(noisy, learner, batch)[0].params["params"]["q"]["kernel_sigma"]
    assert np.count_nonzero(moved - learner.params["params"]["q"]["kernel_sigma"]) > 10, "sigma is learnt"


def test_acting_draws_noise_once_a_step_and_none_in_evaluation() -> None:
    agent = made(noise=20.0, epsilon_start=0.0, epsilon_final=0.0, evaluation_epsilon=0.0)
    learner = learner_of(agent)
    one = np.broadcast_to(np.float32([0.3, -1.0, 2.0]), (8, 3))
    trained = [act(agent, learner, one, key) for key in range(10)]
    assert all(len(set(actions)) == 1 for actions in trained), "all lanes see the same noise"
    assert len({actions[0] for actions in trained}) > 1
    assert len({act(agent, learner, one, key, True)[0] for key in range(10)}) == 1


# Exploration.


def test_epsilon_falls_with_the_rows_learnt_from() -> None:
    """By F rows an update, whatever is left of the run; before the first update it is where it starts."""
    agent = made(epsilon_start=0.9, epsilon_final=0.1, epsilon_decay=400)
    learner = learner_of(agent)
    for updates, expected in ((0, 0.9), (1, 0.9 - 0.8 * 4 / 400), (50, 0.5), (100, 0.1), (10**7, 0.1)):
        params = agent.actor_params(learner._replace(num_updates=jnp.int32(updates)), jnp.float32(0.7))
        assert float(params.aux) == pytest.approx(expected, abs=1e-6)
        assert int(params.version) == updates
    at_once = made(epsilon_start=0.0, epsilon_final=0.0, epsilon_decay=0)
    assert float(at_once.actor_params(learner, jnp.float32(0)).aux) == 0.0


@pytest.mark.parametrize(
    "values", ["categorical", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mean", "quantile"))]
)
def test_actors_take_the_best_action_but_for_epsilon(values: Any) -> None:
    agent = made(values=values, epsilon_start=1.0, epsilon_final=0.2, epsilon_decay=12, evaluation_epsilon=0.05)
    learner = learner_of(agent)  # after 3 updates of 4 rows, so epsilon is 0.2
    many = 4000
    row = np.float32([0.3, -1.0, 2.0])
    outputs = network_of(agent).apply(
        learner.params, nets.Inputs(row[None, None], jnp.zeros((1, 1)), jnp.ones((1, 1), bool), ()), ()
    )[0]
    distribution = value_distributions.make(values, max_error=1.0, num_bins=K, max_value=3.0)
    best = int(np.argmax(distribution.mean(outputs.reshape(A, -1))))
    for evaluation, epsilon in ((False, 0.2), (True, 0.05)):
        actions = act(agent, learner, np.broadcast_to(row, (many, 3)), evaluation=evaluation)
        counts = np.bincount(actions, minlength=A)
        # A quarter of the random actions are the best one.
        assert 1 - counts[best] / many == pytest.approx(0.75 * epsilon, abs=4 * np.sqrt(epsilon / many))
        others = np.delete(counts, best) / many
        np.testing.assert_allclose(others, epsilon / 4, atol=4 * np.sqrt(epsilon / 4 / many))
