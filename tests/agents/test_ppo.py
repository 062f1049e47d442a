"""PPO: its loss against the oracle, the first epoch, advantages, running moments, masks and clipping."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, distributions, nets, spaces
from podracer.agents import PPOConfig
from podracer.agents.ppo import Samples, loss, normalize_minibatch
from podracer.types import Trajectory
from tests.support import harness, oracles, tiers
from tests.support.small_ppo import KEY, NUMBERS, ONCE, SPEC, A, B, T, made, samples_of, small


def oracle(logits: np.ndarray, values: np.ndarray, samples: Samples, config: PPOConfig) -> dict[str, Any]:
    """Equations 7 and 9, float64."""
    batch = Samples(*(np.asarray(x, np.float64) if hasattr(x, "shape") else x for x in samples))
    mask = batch.weight.astype(bool)
    advantage = batch.advantage
    if config.normalize_advantages:
        advantage = (advantage - advantage[mask].mean()) / advantage[mask].std()
    log_prob = oracles.categorical_log_prob(logits, np.asarray(samples.sample))
    policy = oracles.ppo_clip_loss(log_prob, batch.log_prob, advantage, NUMBERS["clip_epsilon"], mask)
    errors = (values - batch.target) ** 2
    if config.value_clip_epsilon is not None:
        clipped = np.clip(values, batch.value - config.value_clip_epsilon, batch.value + config.value_clip_epsilon)
        errors = np.maximum(errors, (clipped - batch.target) ** 2)
    value = 0.5 * errors[mask].mean()
    entropy = oracles.categorical_entropy(logits)[mask].mean()
    ratio = np.exp(log_prob - batch.log_prob)[mask]
    return {
        "loss/policy": policy,
        "loss/value": value,
        "policy/entropy": entropy,
        "loss/total": policy + NUMBERS["value_cost"] * value - NUMBERS["entropy_cost"] * entropy,
        "policy/kl": (ratio - 1 - np.log(ratio)).mean(),
        "policy/clip_fraction": (np.abs(ratio - 1) > NUMBERS["clip_epsilon"]).mean(),
        "value/mean": values[mask].mean(),
    }


def loss_of(config: PPOConfig) -> Any:
    numbers = {name: jnp.float32(x) for name, x in NUMBERS.items()}
    return lambda outputs, values, batch: loss(
        outputs, values, normalize_minibatch(batch, config), distributions.categorical(A), numbers, config
    )


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("normalized", [True, False])
def test_loss_is_the_oracle(normalized: bool, value_clip: float | None) -> None:
    config = PPOConfig(normalize_advantages=normalized, value_clip_epsilon=value_clip)
    logits, values, samples = samples_of()
    outputs, predicted = (jnp.asarray(x, jnp.float32) for x in (logits, values))
    gradient = harness.alone(jax.value_and_grad(loss_of(config), (0, 1), has_aux=True))
    (total, metrics), (by_logits, by_values) = gradient(outputs, predicted, samples)
    expected = oracle(logits, values, samples, config)
    assert set(metrics) == set(expected)
    np.testing.assert_allclose(total, expected["loss/total"], rtol=1e-4)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    assert 0.2 < expected["policy/clip_fraction"] < 0.8

    # A ratio beyond float32 that the loss clips is no part of anything.
    t, b = np.argwhere((np.asarray(samples.weight) > 0) & (np.asarray(samples.advantage) > 1.0))[0]
    far = samples._replace(log_prob=samples.log_prob.at[t, b].set(-200.0))
    (total, metrics), gradients = gradient(outputs, predicted, far)
    np.testing.assert_allclose(total, oracle(logits, values, far, config)["loss/total"], rtol=1e-4)
    assert np.isfinite(jax.tree.leaves(metrics)).all()
    assert all(np.isfinite(x).all() for x in gradients)

    # Gradients: finite differences of the oracle at a few elements, and none through masked samples.
    masked = ~np.asarray(samples.weight, bool)
    assert not np.asarray(by_logits)[masked].any()
    assert not np.asarray(by_values)[masked].any()
    for t, b in itertools.product(range(T), (0, 3, 5)):
        for array, gradient, index in ((logits, by_logits, (t, b, 1)), (values, by_values, (t, b))):
            moved = []
            for width in (-1e-5, 1e-5):
                other = array.copy()
                other[index] += width
                pair = (other, values) if array is logits else (logits, other)
                moved.append(oracle(*pair, samples, config)["loss/total"])
            np.testing.assert_allclose(gradient[index], (moved[1] - moved[0]) / 2e-5, rtol=1e-3, atol=1e-5)


def test_means_are_over_all_shards() -> None:
    """The sum over shards is the loss of the whole batch, advantages normalised over all of it."""
    config = PPOConfig()
    logits, values, samples = samples_of(1)

    def split(x: Any) -> jax.Array:
        x = jnp.moveaxis(jnp.asarray(x), 1, 0)
        return jnp.moveaxis(x.reshape(2, 2, B // 4, *x.shape[1:]), 2, 3)

    outputs, predicted = (split(jnp.asarray(x, jnp.float32)) for x in (logits, values))
    parts = jax.tree.map(split, samples)
    totals, metrics = harness.over_axes(loss_of(config))(outputs, predicted, parts)
    expected = oracle(logits, values, samples, config)
    np.testing.assert_allclose(np.sum(totals), expected["loss/total"], rtol=1e-4)
    for name, value in expected.items():
        np.testing.assert_allclose(np.sum(metrics[name]), value, rtol=1e-4, err_msg=name)


# The whole agent.


@pytest.mark.parametrize(
    ("action_space", "fields"),
    [
        (SPEC.action_space, {}),
        *tiers.nightly(
            *(
                (SPEC.action_space, {"core": core, "core_size": 5, "core_memory": 4})
                for core in ("lstm", "gru", "mingru", "lru", "gtrxl")
            )
        ),
        pytest.param(
            spaces.Box(-2.0, 1.0, (2,)),
            {"core": "lstm", "core_size": 5, "separate": False, "normalize_observations": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["discrete", "lstm", "gru", "mingru", "lru", "gtrxl", "continuous recurrent normalised"],
)
def test_the_first_epoch_is_on_policy(action_space: spaces.Space, fields: dict[str, Any]) -> None:
    """One epoch of one minibatch: ratios are 1, nothing is clipped, and the policy loss of unit advantages is 0."""
    agent, learner, record, learn = made(small(**ONCE, **fields), SPEC._replace(action_space=action_space))
    trajectory, _ = record(learner, harness.timesteps(1, T, B))
    after, metrics = learn(learner, trajectory)
    assert abs(float(metrics["policy/kl"])) < 1e-6
    assert float(metrics["policy/clip_fraction"]) == 0.0
    np.testing.assert_allclose(metrics["loss/policy"], 0.0, atol=1e-5)
    assert int(after.num_updates) == 1
    assert int(agent.actor_params(after, jnp.float32(0)).version) == 1
    extras = trajectory.extras | {"log_prob": trajectory.extras["log_prob"] + 0.5}
    _, metrics = learn(learner, trajectory._replace(extras=extras))
    assert float(metrics["policy/clip_fraction"]) == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_the_first_epoch_is_on_policy_with_a_mask(core: nets.CoreName) -> None:
    """Rows differ in what is legal, and some have nothing legal."""
    mask = spaces.Box(0, 1, (A,), np.int8)
    spec = SPEC._replace(observation_space=spaces.Dict({"seen": SPEC.observation_space, "action_mask": mask}))
    _, learner, record, learn = made(small(**ONCE, core=core, core_size=5), spec)
    rows = harness.timesteps(1, T, B)
    drawn = jnp.asarray(np.random.default_rng(1).random((T + 1, B, A)) < 0.6, jnp.int8)
    learner = harness.moved(learner, 1.0)
    trajectory, _ = record(learner, rows._replace(observation={"seen": rows.observation, "action_mask": drawn}))
    _, metrics = learn(learner, trajectory)
    assert abs(float(metrics["policy/kl"])) < 1e-6
    assert float(metrics["policy/clip_fraction"]) == 0.0
    assert 0.0 < metrics["mask/none_legal"] < 0.2


def spoiled(trajectory: Trajectory, **fields: Any) -> Trajectory:
    """Garbage in the masked transitions: actions, log-probabilities and what else `act` recorded."""
    masked = trajectory.timesteps.first[1:]
    extras = jax.tree.map(lambda x: jnp.where(masked, x + 5.0, x), trajectory.extras)
    actions = jnp.where(masked, (trajectory.actions + 1) % A, trajectory.actions)
    return trajectory._replace(actions=actions, extras=trajectory.extras | extras, **fields)


@pytest.mark.parametrize("core", [pytest.param("none", marks=pytest.mark.slow), "lstm"])
def test_masked_rows_change_nothing(core: nets.CoreName) -> None:
    """In any epoch; reward and discount of a first row neither (a recurrent network reads its reward)."""
    _, learner, record, learn = made(small(core=core, core_size=5))
    rows = harness.timesteps(2, T, B)
    trajectory, _ = record(learner, rows)
    assert 3 < int(rows.first[1:].sum()) < T * B - 3
    reward = jnp.where(rows.first, 100.0 if core == "none" else 0.0, rows.reward)
    garbage = rows._replace(reward=reward, discount=jnp.where(rows.first, 0.0, rows.discount))
    harness.assert_same(learn(learner, trajectory), learn(learner, spoiled(trajectory, timesteps=garbage)))


def test_masked_rows_change_no_moments() -> None:
    _, learner, record, learn = made(small(normalize_rewards=True, normalize_observations=True))
    rows = harness.timesteps(3, T, B)
    trajectory, _ = record(learner, rows)
    masked = rows.first[1:]
    extras = trajectory.extras | {"log_prob": jnp.where(masked, 5.0, trajectory.extras["log_prob"])}
    first = rows.first[:-1]  # the running return of a first row has seen no reward
    extras["discounted_return"] = jnp.where(first, 77.0, extras["discounted_return"])
    harness.assert_same(learn(learner, trajectory), learn(learner, trajectory._replace(extras=extras)))


def test_advantages_and_targets_go_by_the_oracle() -> None:
    """One step of one minibatch, gamma and lambda from the state: the value loss is that to GAE's targets."""
    gamma, lambda_ = 0.8, 0.6
    config = small(**ONCE, normalize_advantages=False, discount=gamma, gae_lambda=lambda_, separate=False)
    network = nets.make(SPEC, hidden_sizes=(8,), activation="tanh")
    agent = agents.ppo.make(SPEC, config, network)
    learner = jax.jit(agent.init)(KEY, harness.hyper(agent))
    rows = harness.timesteps(4, T, B)
    trajectory, _ = harness.record(
        agent, agent.actor_params(learner, jnp.float32(0)), agent.start(jnp.arange(B), B), rows, KEY
    )
    _, metrics = harness.alone(agent.learn)(learner, trajectory, jnp.float32(0), KEY)

    inputs = nets.Inputs(rows.observation, rows.reward, rows.first, ())
    values = np.asarray(network.apply(learner.params, inputs, ())[1], np.float64)
    reward, discount, first = (np.asarray(x) for x in (rows.reward, rows.discount, rows.first))
    last = np.asarray(rows.last)[1:]
    assert (last & (discount[1:] == 1)).any()  # truncations
    assert (last & (discount[1:] == 0)).any()
    advantages = oracles.gae(values, reward[1:], gamma * discount[1:], first, lambda_)
    mask = ~first[1:]
    np.testing.assert_allclose(metrics["loss/value"], 0.5 * (advantages[mask] ** 2).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["loss/policy"], -advantages[mask].mean(), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(metrics["value/mean"], values[:-1][mask].mean(), rtol=1e-4)


def test_learning_rate_decays_to_nothing() -> None:
    _, learner, record, learn = made(small(**ONCE))
    trajectory, _ = record(learner, harness.timesteps(5, T, B))
    for progress, rate in ((0.0, 1e-3), (0.25, 0.75e-3), (1.0, 0.0)):
        after, metrics = learn(learner, trajectory, progress)
        np.testing.assert_allclose(metrics["grad/learning_rate"], rate, rtol=1e-6)
        moved = any(np.any(a != b) for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(learner.params)))
        assert moved == (rate > 0)


def test_numbers_come_from_the_learner_state() -> None:
    """Not from the config: a population varies them."""
    agent, learner, record, learn = made(small())
    trajectory, _ = record(learner, harness.timesteps(6, T, B))
    extras = trajectory.extras | {"log_prob": trajectory.extras["log_prob"] + 0.15}
    trajectory = trajectory._replace(extras=extras)
    before, _ = learn(learner, trajectory)
    for name, value in agent.hyper.items():
        changed = learner._replace(hyper=learner.hyper | {name: jnp.float32(0.5 * value)})
        after, _ = learn(changed, trajectory)
        assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(before.params))), name


# Running moments.


def test_observations_are_normalised_by_what_was_seen() -> None:
    """Moments over rows 0..T-1 of every trajectory that were played; acting and learning use those from before."""
    agent, learner, record, learn = made(small(normalize_observations=True, **ONCE))
    seen, state = [], None
    for i in range(3):
        rows = harness.timesteps(10 + i, T, B)
        rows = rows._replace(observation=5.0 + 2.0 * rows.observation)
        trajectory, state = record(learner, rows, state)
        learner, metrics = learn(learner, trajectory)
        # On policy only if acting and learning normalise alike.
        assert abs(float(metrics["policy/kl"])) < 1e-6
        played = ~(rows.first[:-1] & rows.first[1:])  # a lane that waits shows one `first` row after another
        seen.append(np.asarray(rows.observation)[:-1][played])
    kept = np.concatenate(seen)
    assert 0 < len(kept) < 3 * T * B
    moments = learner.aux.observation
    np.testing.assert_allclose(moments.mean, kept.mean(0), rtol=1e-4)
    np.testing.assert_allclose(moments.variance, kept.var(0), rtol=1e-3)
    np.testing.assert_allclose(moments.count, len(kept), rtol=1e-5)
    published = agent.actor_params(learner, jnp.float32(0))
    harness.assert_same(published.aux[0], moments)


@pytest.mark.slow
def test_rewards_are_scaled_by_the_deviation_of_returns() -> None:
    """The running discounted return restarts with every episode and goes on over rollouts."""
    gamma = 0.8
    config = small(normalize_rewards=True, normalize_advantages=False, discount=gamma, **ONCE)
    _, learner, record, learn = made(config)
    running, returns, state = np.zeros(B), [], None
    for i in range(3):
        rows = harness.timesteps(20 + i, T, B)
        rows = rows._replace(reward=3.0 * rows.reward)
        trajectory, state = record(learner, rows, state)
        reward, first = np.asarray(rows.reward), np.asarray(rows.first)
        for t in range(T):
            running = np.where(first[t], 0.0, gamma * running) + reward[t]
            returns += running[~first[t]].tolist()
        before = learner
        learner, metrics = learn(learner, trajectory)
    np.testing.assert_allclose(learner.aux.returns.mean, np.mean(returns), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(learner.aux.returns.variance, np.var(returns), rtol=1e-3)

    # The loss is that of rewards divided by the deviation, this batch included, without the normalisation.
    plain, _, _, learn_plain = made(small(normalize_advantages=False, discount=gamma, **ONCE))
    scaled = rows._replace(reward=rows.reward / jnp.float32(np.std(returns)))
    without = trajectory._replace(
        timesteps=scaled,
        actor_state=trajectory.actor_state._replace(discounted_return=()),
        extras={name: x for name, x in trajectory.extras.items() if name != "discounted_return"},
    )
    hyper = before.hyper | {"reward_scale": jnp.float32(1.0)}
    _, expected = learn_plain(before._replace(aux=plain.init(KEY, hyper).aux, hyper=hyper), without)
    np.testing.assert_allclose(metrics["loss/value"], expected["loss/value"], rtol=1e-3)
    np.testing.assert_allclose(metrics["loss/policy"], expected["loss/policy"], rtol=1e-3, atol=1e-5)


def test_bytes_cannot_be_normalised() -> None:
    spec = SPEC._replace(observation_space=spaces.Box(0, 255, (4, 4), np.uint8))
    with pytest.raises(ValueError, match="normalize_observations=True needs float32 observations, which test"):
        agents.ppo.make(spec, small(normalize_observations=True))


def test_dicts_can_be_normalised() -> None:
    """One pair of moments a name of floats; choices and bytes stay as they are."""
    floats = {"a": spaces.Box(-9.0, 9.0, (2,)), "b": spaces.Box(-9.0, 9.0, ())}
    others = {"arm": spaces.Discrete(3), "image": spaces.Dict({"seen": spaces.Box(0, 255, (2, 2), np.uint8)})}
    space = spaces.Dict(floats | others)
    agent = agents.ppo.make(SPEC._replace(observation_space=space), small(normalize_observations=True, **ONCE))
    learner = jax.jit(agent.init)(KEY, harness.hyper(agent))
    rows = harness.timesteps(30, T, B)
    observation = {"a": 2.0 + rows.observation[..., :2], "b": rows.observation[..., 2] - 3.0}
    observation["arm"] = jnp.ones((T + 1, B), jnp.int32)
    rows = rows._replace(observation=observation | {"image": {"seen": jnp.ones((T + 1, B, 2, 2), jnp.uint8)}})
    params, state = agent.actor_params(learner, jnp.float32(0)), agent.start(jnp.arange(B, dtype=jnp.int32), B)
    trajectory, _ = harness.record(agent, params, state, rows, KEY)
    learner, _ = harness.alone(agent.learn)(learner, trajectory, jnp.float32(0), KEY)
    assert (learner.aux.observation["arm"], learner.aux.observation["image"]) == ((), {"seen": ()})
    for name in floats:
        moments = learner.aux.observation[name]
        x = np.asarray(rows.observation[name])[:-1]
        np.testing.assert_allclose(moments.mean, x.mean((0, 1)), rtol=1e-3)
        np.testing.assert_allclose(moments.variance, x.var((0, 1)), rtol=1e-2)


@pytest.mark.slow
def test_clipped_rewards_are_those_of_an_environment_that_clips() -> None:
    """All of it: acting (the running return) and learning."""
    _, learner, record, learn = made(small(clip_rewards=True, normalize_rewards=True))
    rows = harness.timesteps(5, T, B)
    rows = rows._replace(reward=3.0 * rows.reward)
    clipped = rows._replace(reward=jnp.clip(rows.reward, -1.0, 1.0))
    trajectory, expected = record(learner, rows)[0], record(learner, clipped)[0]
    assert (trajectory.timesteps.reward != clipped.reward).any()
    harness.assert_same(trajectory.extras, expected.extras)
    harness.assert_same(learn(learner, trajectory), learn(learner, expected))
    plain = made(small(normalize_rewards=True))[3]
    harness.assert_same(learn(learner, trajectory), plain(learner, expected))


def test_atari_settings_are_the_papers() -> None:
    """Table 5: batches of 8 x 128 in 4 minibatches of 256, 3 epochs."""
    config = PPOConfig.atari(discount=0.5)
    assert config.envs_per_device * config.rollout_length // config.num_minibatches == 256
    assert (config.num_epochs, config.clip_epsilon, config.learning_rate, config.discount) == (3, 0.1, 2.5e-4, 0.5)
    assert (config.entropy_cost, config.gae_lambda, config.frame_stack, config.torso) == (0.01, 0.95, 4, "nature")
    assert config.clip_rewards
    assert not config.normalize_rewards
