"""The V-trace agent: its loss and gradients against the oracles, on-policy ratios, masks, rewards and schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, distributions, nets, returns, spaces
from podracer.agents import VTraceConfig
from podracer.agents.vtrace import loss, transform_reward
from podracer.topology import collectives
from podracer.types import ActorParams, EnvSpec, TimeStep, Trajectory
from tests.support import harness, oracles

T, B, A = 6, 8, 4
GAMMA = 0.9
NUMBERS = {
    "discount": GAMMA,
    "value_cost": 0.7,
    "entropy_cost": 0.05,
    "trace_lambda": 0.9,
    "rho_bar": 1.2,
    "c_bar": 0.8,
    "rho_bar_pg": 1.1,
}
KEY = jax.random.key(0)
SPEC = EnvSpec("test", spaces.Box(-9.0, 9.0, (3,)), spaces.Discrete(A))


def trajectory_of(seed: int = 0) -> tuple[np.ndarray, np.ndarray, Trajectory]:
    """The learner's logits [T+1, B, A] and values, and a trajectory from another policy."""
    rng = np.random.default_rng(seed)
    rows = harness.timesteps(seed, T, B)
    actions = rng.integers(0, A, (T, B), np.int32)
    behaviour = oracles.categorical_log_prob(rng.normal(size=(T, B, A)), actions)
    trajectory = Trajectory(
        timesteps=rows,
        actions=jnp.asarray(actions),
        extras={"log_prob": jnp.asarray(behaviour, jnp.float32)},
        actor_state=(),
        policy_version=jnp.zeros((T, B), jnp.int32),
        lane=jnp.arange(B, dtype=jnp.int32),
    )
    return rng.normal(size=(T + 1, B, A)), rng.normal(size=(T + 1, B)), trajectory


def oracle(
    logits: np.ndarray, values: np.ndarray, trajectory: Trajectory, config: VTraceConfig, numbers: dict[str, float]
) -> dict[str, Any]:
    """Losses of IMPALA section 4.2 (and table 2), float64; `constants` are the targets and advantages."""
    rows = jax.tree.map(np.asarray, trajectory.timesteps)
    actions, behaviour = np.asarray(trajectory.actions), np.asarray(trajectory.extras["log_prob"], np.float64)
    mask = ~rows.first[1:]
    log_probs = oracles.categorical_log_prob(logits[:-1], actions)
    rho = np.exp(log_probs - behaviour)
    corrected = config.correction == "vtrace"
    clips = {name: numbers[name] if corrected else 1.0 for name in ("rho_bar", "c_bar", "rho_bar_pg")}
    targets, advantages = oracles.vtrace(
        values,
        rows.reward[1:],
        numbers["discount"] * rows.discount[1:],
        rho if corrected else np.ones_like(rho),
        rows.first,
        lambda_=numbers["trace_lambda"],
        **clips,
    )
    if config.correction == "one_step":
        advantages = advantages * np.minimum(numbers["rho_bar_pg"], rho)
    if config.correction == "epsilon":
        log_probs = np.log(np.exp(log_probs) + 1e-6)
    scale = 1.0 if config.loss_reduction == "sum" else 1.0 / mask.sum()
    entropies = oracles.categorical_entropy(logits[:-1])
    policy = -scale * (mask * log_probs * advantages).sum()
    value = 0.5 * scale * (mask * (targets - values[:-1]) ** 2).sum()
    entropy = scale * (mask * entropies).sum()
    return {
        "policy": policy,
        "value": value,
        "entropy": entropies[mask].mean(),
        "total": policy + numbers["value_cost"] * value - numbers["entropy_cost"] * entropy,
        "ratio": np.minimum(numbers["rho_bar"], rho)[mask].mean(),
        "mean": values[:-1][mask].mean(),
        "constants": (mask * scale, targets, advantages, entropies),
    }


def whole_loss(logits: Any, values: Any, trajectory: Trajectory, numbers: Any, config: VTraceConfig) -> Any:
    """This shard's loss, and metrics over all shards."""
    count = jnp.maximum(collectives.global_sum(jnp.sum(returns.transitions(trajectory).mask)), 1.0)
    total, metrics = loss(logits, values, trajectory, distributions.categorical(A), numbers, config, count)
    return total, collectives.global_sum(metrics)


def compiled(config: VTraceConfig) -> Callable[..., Any]:
    """`(logits, values, trajectory, numbers) -> (loss, metrics), gradients by logits, values and numbers`."""

    def total(logits: jax.Array, values: jax.Array, numbers: Any, trajectory: Trajectory) -> Any:
        return whole_loss(logits, values, trajectory, numbers, config)

    gradient = harness.alone(jax.value_and_grad(total, (0, 1, 2), has_aux=True))

    def run(logits: np.ndarray, values: np.ndarray, trajectory: Trajectory, numbers: dict[str, float]) -> Any:
        plain = (jnp.asarray(x, jnp.float32) for x in (logits, values))
        return gradient(*plain, {name: jnp.float32(x) for name, x in numbers.items()}, trajectory)

    return run


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("correction", ["vtrace", "one_step", "epsilon", "none"])
def test_loss_and_gradients_are_the_oracle(correction: Any, reduction: Any) -> None:
    config = VTraceConfig(correction=correction, loss_reduction=reduction, rho_bar=NUMBERS["rho_bar"])
    used = {name: x for name, x in NUMBERS.items() if name in agents.vtrace.make(SPEC, config).hyper}
    logits, values, trajectory = trajectory_of()
    logits[2, :, 0] -= 16.0  # probabilities near 1e-6, where `epsilon` tells
    trajectory = trajectory._replace(actions=trajectory.actions.at[2].set(0))
    assert not trajectory.timesteps.first[2, 3]
    trajectory.extras["log_prob"] = trajectory.extras["log_prob"].at[1, 3].set(-200.0)  # a ratio beyond float32
    (total, metrics), (by_logits, by_values, by_numbers) = compiled(config)(logits, values, trajectory, used)
    expected = oracle(logits, values, trajectory, config, NUMBERS)
    np.testing.assert_allclose(total, expected["total"], rtol=1e-4)
    names = {
        "loss/total": "total",
        "loss/policy": "policy",
        "loss/value": "value",
        "policy/entropy": "entropy",
        "policy/importance_ratio": "ratio",
        "value/mean": "mean",
    }
    for name, key in names.items():
        np.testing.assert_allclose(metrics[name], expected[key], rtol=1e-4, err_msg=name)

    # Gradients, with targets and advantages constant: d log p(a) = onehot - p, d H = -p (log p + H).
    weights, targets, advantages, entropies = expected["constants"]
    p = oracles.categorical_probs(logits[:-1])
    chosen = np.eye(A)[np.asarray(trajectory.actions)]
    score = chosen - p
    if correction == "epsilon":
        taken = (p * chosen).sum(-1, keepdims=True)
        score = score * taken / (taken + 1e-6)
    d_entropy = -p * (np.log(p) + entropies[..., None])
    gradient = -weights[..., None] * (advantages[..., None] * score + NUMBERS["entropy_cost"] * d_entropy)
    np.testing.assert_allclose(by_logits[:-1], gradient, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(
        by_values[:-1], NUMBERS["value_cost"] * weights * (values[:-1] - targets), rtol=1e-3, atol=1e-5
    )
    assert not np.any(by_logits[-1])  # the bootstrap row is nobody's prediction
    assert not np.any(by_values[-1])

    # Meta-gradients: through targets and advantages, by every number that the loss reads.
    for name, gradient in by_numbers.items():
        width = 1e-4
        low, high = (
            oracle(logits, values, trajectory, config, NUMBERS | {name: NUMBERS[name] + d})["total"]
            for d in (-width, width)
        )
        np.testing.assert_allclose(gradient, (high - low) / (2 * width), rtol=2e-2, atol=2e-2, err_msg=name)
        assert gradient != 0, f"{name} is not used, and the agent says that it is"
    assert abs(float(by_numbers["discount"])) > 1e-2
    assert abs(float(by_numbers["trace_lambda"])) > 1e-3


def test_mean_is_over_all_shards() -> None:
    """The sum over shards of the parts is the loss of the whole batch, also where shards hold unequal many masks."""
    config = VTraceConfig()
    logits, values, trajectory = trajectory_of(3)
    numbers = {name: jnp.float32(x) for name, x in NUMBERS.items()}

    def split(x: Any, axis: int) -> jax.Array:
        x = jnp.moveaxis(jnp.asarray(x), axis, 0)
        return jnp.moveaxis(x.reshape(2, 2, B // 4, *x.shape[1:]), 2, axis + 2)

    parts = jax.tree.map(lambda x: split(x, 0 if x.ndim == 1 else 1), trajectory)
    outputs = (split(jnp.asarray(x, jnp.float32), 1) for x in (logits, values))
    function = lambda *x: whole_loss(*x, numbers, config)  # noqa: E731
    totals, metrics = harness.over_axes(function)(*outputs, parts)
    expected = oracle(logits, values, trajectory, config, NUMBERS)
    np.testing.assert_allclose(np.sum(totals), expected["total"], rtol=1e-4)
    np.testing.assert_allclose(metrics["loss/total"], np.full((2, 2), expected["total"]), rtol=1e-4)
    np.testing.assert_allclose(metrics["policy/entropy"], np.full((2, 2), expected["entropy"]), rtol=1e-4)


# The whole agent.


@functools.cache
def made(config: VTraceConfig, action_space: spaces.Space = SPEC.action_space) -> Any:
    """An agent, its state, and compiled `record(learner, rows)` and `learn(learner, trajectory, progress)`."""
    agent = agents.vtrace.make(SPEC._replace(action_space=action_space), config)
    learner = jax.jit(agent.init)(KEY, harness.hyper(agent))
    lanes = jnp.arange(B, dtype=jnp.int32)

    @jax.jit
    def record(learner: Any, rows: TimeStep) -> Any:
        params = agent.actor_params(learner, jnp.float32(0))
        return harness.record(agent, params, agent.start(lanes, B), rows, KEY)[0]

    def learn(learner: Any, trajectory: Trajectory, progress: jax.Array) -> Any:
        return harness.alone(agent.learn)(learner, trajectory, progress, KEY)

    return agent, learner, record, learn


SMALL = {"hidden_sizes": (8,), "rollout_length": T}


@pytest.mark.parametrize(
    ("action_space", "core"),
    [
        (SPEC.action_space, "none"),
        pytest.param(SPEC.action_space, "lstm", marks=pytest.mark.slow),
        (spaces.Box(-2.0, 1.0, (2,)), "lstm"),
    ],
    ids=["discrete", "recurrent", "continuous recurrent"],
)
def test_ratios_are_one_on_policy(action_space: spaces.Space, core: nets.CoreName) -> None:
    """The learner's log-probabilities of a rollout by the same parameters are those that acting recorded."""
    agent, learner, record, learn = made(VTraceConfig(core=core, core_size=5, **SMALL), action_space)
    rows = harness.timesteps(1, T, B)
    trajectory = record(learner, rows)
    after, metrics = learn(learner, trajectory, jnp.float32(0))
    np.testing.assert_allclose(metrics["policy/importance_ratio"], 1.0, atol=1e-6)
    assert int(after.num_updates) == 1
    assert int(agent.actor_params(after, jnp.float32(0)).version) == 1
    # Had another policy acted, they would not be.
    extras = trajectory.extras | {"log_prob": trajectory.extras["log_prob"] + 0.1}
    _, metrics = learn(learner, trajectory._replace(extras=extras), jnp.float32(0))
    np.testing.assert_allclose(metrics["policy/importance_ratio"], np.exp(-0.1), rtol=1e-5)


@pytest.fixture(scope="module")
def recurrent() -> Any:
    return made(VTraceConfig(core="lstm", core_size=5, learning_rate_schedule="linear", **SMALL))


def test_masked_rows_change_nothing(recurrent: Any) -> None:
    """Not the action taken at a last row, nor its log-probability; nor anything before a break."""
    _, learner, record, learn = recurrent
    rows = harness.timesteps(2, T, B)
    trajectory = record(learner, rows)
    masked = rows.first[1:]
    assert 3 < int(masked.sum()) < T * B - 3
    spoiled = trajectory._replace(
        actions=jnp.where(masked, (trajectory.actions + 1) % A, trajectory.actions),
        extras={"log_prob": jnp.where(masked, trajectory.extras["log_prob"] + 5.0, trajectory.extras["log_prob"])},
    )
    at = jnp.float32(0.1)
    harness.assert_same(learn(learner, trajectory, at), learn(learner, spoiled, at))
    other = trajectory._replace(extras={"log_prob": trajectory.extras["log_prob"] + 5.0})
    assert not np.allclose(learn(learner, other, at)[1]["loss/total"], learn(learner, trajectory, at)[1]["loss/total"])


def test_rewards_on_first_rows_change_nothing() -> None:
    """This holds for feed-forward networks: a recurrent one reads the reward, which the contract makes 0 there."""
    _, learner, record, learn = made(VTraceConfig(**SMALL))
    rows = harness.timesteps(3, T, B)
    trajectory = record(learner, rows)
    garbage = rows._replace(
        reward=jnp.where(rows.first, 100.0, rows.reward), discount=jnp.where(rows.first, 0.0, rows.discount)
    )
    at = jnp.float32(0.1)
    harness.assert_same(learn(learner, trajectory, at), learn(learner, trajectory._replace(timesteps=garbage), at))


def test_learning_rate_decays_to_nothing(recurrent: Any) -> None:
    _, learner, record, learn = recurrent
    trajectory = record(learner, harness.timesteps(4, T, B))
    for progress, rate in ((0.0, 2e-3), (0.25, 1.5e-3), (1.0, 0.0)):
        after, metrics = learn(learner, trajectory, jnp.float32(progress))
        np.testing.assert_allclose(metrics["grad/learning_rate"], rate, rtol=1e-6)
        moved = any(np.any(a != b) for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(learner.params)))
        assert moved == (rate > 0)
        assert int(after.num_updates) == 1


def test_numbers_come_from_the_learner_state(recurrent: Any) -> None:
    """Not from the config: a population varies them."""
    agent, learner, record, learn = recurrent
    trajectory = record(learner, harness.timesteps(5, T, B))
    trajectory = trajectory._replace(extras={"log_prob": trajectory.extras["log_prob"] - 0.3})
    before, _ = learn(learner, trajectory, jnp.float32(0))
    for name, value in agent.hyper.items():
        changed = learner._replace(hyper=learner.hyper | {name: jnp.float32(0.5 * value)})
        after, _ = learn(changed, trajectory, jnp.float32(0))
        assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(before.params))), name
        assert float(after.hyper[name]) == np.float32(0.5 * value)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam", "sgd"])
def test_optimizers_can_be_chosen(optimizer: Any) -> None:
    agent = agents.vtrace.make(SPEC, VTraceConfig(optimizer=optimizer, **SMALL))
    jax.eval_shape(lambda: agent.init(KEY, harness.hyper(agent)))


# Rewards.


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("none", lambda r: r),
        ("abs_one", lambda r: max(-1.0, min(1.0, r))),
        ("asymmetric_paper", lambda r: 0.3 * min(np.tanh(r), 0.0) + 5.0 * max(np.tanh(r), 0.0)),
        ("asymmetric_code", lambda r: (0.3 if r < 0 else 1.0) * 5.0 * np.tanh(r / 5.0)),
    ],
)
def test_reward_transforms(name: Any, formula: Callable[[float], float]) -> None:
    rewards = [-10.0, -1.5, -0.4, 0.0, 0.3, 1.0, 7.0]
    result = transform_reward(jnp.asarray(rewards), name)
    np.testing.assert_allclose(result, [formula(r) for r in rewards], rtol=1e-5)


def test_acting_and_learning_transform_rewards_alike() -> None:
    """A recurrent network reads the reward: on-policy ratios are 1 only if both see the transformed one."""
    _, learner, record, learn = made(VTraceConfig(core="lstm", core_size=5, reward_transform="abs_one", **SMALL))
    rows = harness.timesteps(6, T, B)
    large = rows._replace(reward=50.0 * rows.reward)
    params = jax.tree.map(lambda x: 3.0 * x, learner.params)
    learner = learner._replace(params=params)
    trajectory = record(learner, large)
    _, metrics = learn(learner, trajectory, jnp.float32(0))
    np.testing.assert_allclose(metrics["policy/importance_ratio"], 1.0, atol=1e-5)
    clipped = large._replace(reward=jnp.clip(large.reward, -1.0, 1.0))
    _, same = learn(learner, trajectory._replace(timesteps=clipped), jnp.float32(0))
    harness.assert_same(metrics, same)


# Settings.


def test_atari_settings_are_the_papers() -> None:
    config = VTraceConfig.atari(learning_rate=1e-4)
    assert (config.rollout_length, config.envs_per_device, config.discount) == (20, 32, 0.99)
    assert (config.value_cost, config.entropy_cost, config.max_grad_norm) == (0.5, 0.01, 40.0)
    assert (config.optimizer, config.optimizer_eps, config.rmsprop_decay, config.momentum) == ("rmsprop", 1e-4, 0.99, 0)
    assert (config.loss_reduction, config.reward_transform, config.torso) == ("sum", "abs_one", "shallow")
    assert (config.trace_lambda, config.rho_bar, config.c_bar, config.rho_bar_pg) == (1.0, 1.0, 1.0, 1.0)
    assert config.learning_rate_schedule == "linear"
    assert config.learning_rate == 1e-4
    assert VTraceConfig.atari().learning_rate == 6e-4


def test_the_policys_head_begins_as_the_papers_where_asked() -> None:
    """LeCun's weights have a variance of one over the inputs, here 64."""
    assert (VTraceConfig.atari().init, VTraceConfig().init) == ("lecun", "orthogonal")
    for init, rms in (("lecun", 1 / 8), ("orthogonal", 0.01 / 8)):
        params = made(VTraceConfig(hidden_sizes=(64,), init=init))[1].params
        kernel = params["params"]["policy"]["kernel"]
        np.testing.assert_allclose(jnp.sqrt(jnp.mean(jnp.square(kernel))), rms, rtol=0.1)


def test_evaluation_takes_the_most_likely_action() -> None:
    agent, learner, _, _ = made(VTraceConfig(**SMALL))
    params = ActorParams(jax.tree.map(lambda x: 5.0 * x, learner.params), jnp.int32(0))
    rows = harness.timesteps(7, T, B)
    state = agent.start(jnp.arange(B, dtype=jnp.int32), B)
    row = jax.tree.map(lambda x: x[0], rows)
    actions = [agent.act(params, state, row, jax.random.key(i), True)[0] for i in range(3)]
    np.testing.assert_array_equal(actions[0], actions[1])
    np.testing.assert_array_equal(actions[0], actions[2])
