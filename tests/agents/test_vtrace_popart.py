"""V-trace with PopArt: targets, statistics and losses against the oracle, and probes, for lanes of two tasks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax import wrappers
from podracer import agents, nets, spaces
from podracer.agents import VTraceConfig
from podracer.environments.tasks import Tasks
from podracer.learning import popart
from podracer.types import EnvSpec, Trajectory
from tests.support import harness, oracles, probes

T, B, A = 6, 8, 4
GAMMA = 0.9
SPEC = EnvSpec("test", spaces.Box(-9.0, 9.0, (3,)), spaces.Discrete(A), tasks=("large", "small"))
CONFIG = VTraceConfig(popart=True, popart_step_size=0.03, discount=GAMMA, hidden_sizes=(8,), rollout_length=T)
TASK = np.arange(B) % 2
SCALES = np.array([1000.0, 0.1], np.float32)


def rows_of(network: nets.Network, learner: Any, trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities [T, B], and the values n [T+1, B] and V [T+1, B] of each lane's own task, float64."""
    logits, normalized = nets.unroll(network, learner.params, trajectory)
    n = np.asarray(normalized, np.float64)[:, np.arange(B), TASK]
    mean, scale = (np.asarray(x, np.float64)[TASK] for x in (learner.aux.mean, learner.aux.scale))
    log_probs = oracles.categorical_log_prob(np.asarray(logits[:-1], np.float64), np.asarray(trajectory.actions))
    return log_probs, n, scale * n + mean


def test_an_update_is_that_of_normalised_targets() -> None:
    """By V-trace of raw rewards; without a gradient step, V after it is V before it."""
    agent = agents.vtrace.make(SPEC, CONFIG)
    network = CONFIG.actor_critic("vtrace", SPEC, None, num_values=2)
    learner = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent, learning_rate=0.0))
    learner = harness.moved(learner, 1.0)
    learner = learner._replace(aux=popart.Statistics(jnp.asarray([300.0, -1.0]), jnp.asarray([1e4, 4.0])))
    rows = harness.timesteps(1, T, B)
    rows = rows._replace(reward=rows.reward * SCALES[TASK][None])
    start = agent.start(jnp.arange(B, dtype=jnp.int32), B)
    params = agent.actor_params(learner, jnp.float32(0))
    record = jax.jit(lambda params, rows: harness.record(agent, params, start, rows, jax.random.key(1))[0])
    trajectory = record(params, rows)
    behaviour = trajectory.extras["log_prob"] - 0.3 * rows.reward[1:] / SCALES[TASK][None]
    trajectory = trajectory._replace(extras={"log_prob": behaviour})
    after, metrics = harness.alone(agent.learn)(learner, trajectory, jnp.float32(0), jax.random.key(2))

    # The targets of all rows, and the statistics of those of each task.
    log_probs, _, values = rows_of(network, learner, trajectory)
    host = jax.tree.map(np.asarray, rows)
    ratios = np.exp(log_probs - np.asarray(behaviour, np.float64))
    targets, advantages = oracles.vtrace(values, host.reward[1:], GAMMA * host.discount[1:], ratios, host.first)
    mask = ~host.first[1:]
    for k in range(2):
        mine = targets[mask & (k == TASK)]
        a = 1.0 - (1.0 - CONFIG.popart_step_size) ** len(mine)
        mean, second = float(learner.aux.mean[k]), float(learner.aux.variance[k] + learner.aux.mean[k] ** 2)
        mean, second = mean + a * (mine.mean() - mean), second + a * ((mine**2).mean() - second)
        np.testing.assert_allclose(after.aux.mean[k], mean, rtol=1e-4)
        np.testing.assert_allclose(after.aux.variance[k], second - mean**2, rtol=1e-4)

    # The values are as before, and nothing but their head has moved.
    _, n, same = rows_of(network, after, trajectory)
    mean, scale = (np.asarray(x, np.float64)[TASK] for x in (after.aux.mean, after.aux.scale))
    np.testing.assert_allclose((same - values) / scale, 0.0, atol=1e-5)
    heads = [nets.value_head(x.params) for x in (learner, after)]
    assert all(np.all(np.any(np.asarray(x != y).reshape(-1, 2), axis=0)) for x, y in zip(*map(jax.tree.leaves, heads)))
    harness.assert_same(nets.with_value_head(after.params, heads[0]), learner.params)

    # The losses are those of (G - mu) / sigma and of advantages / sigma.
    value = 0.5 * np.square((targets - mean) / scale - n[:-1])[mask].mean()
    np.testing.assert_allclose(metrics["loss/value"], value, rtol=1e-3)
    policy = -(log_probs * advantages / scale)[mask].mean()
    np.testing.assert_allclose(metrics["loss/policy"], policy, rtol=1e-3)
    np.testing.assert_allclose(metrics["value/mean"], values[:-1][mask].mean(), rtol=1e-4)


def test_a_task_has_a_head_and_statistics() -> None:
    shapes = lambda agent: jax.eval_shape(agent.init, jax.random.key(0), harness.hyper(agent))  # noqa: E731
    for tasks, K in (((), 1), (("one",), 1), (("a", "b", "c"), 3)):
        learner = shapes(agents.vtrace.make(SPEC._replace(tasks=tasks), CONFIG))
        assert nets.value_head(learner.params)["kernel"].shape == (8, K)
        assert [x.shape for x in learner.aux] == [(K,), (K,)]
    learner = shapes(agents.vtrace.make(SPEC, VTraceConfig()))
    assert learner.aux == ()
    assert nets.value_head(learner.params)["kernel"].shape[1] == 1


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"popart=True learns the scale of rewards, .*use reward_transform='none'"):
        VTraceConfig.atari(popart=True)
    assert VTraceConfig.atari(popart=True, reward_transform="none").popart
    with pytest.raises(ValueError, match=r"popart=True moves the weights of the value head, .*leave network out"):
        agents.vtrace.make(SPEC, CONFIG, nets.make(SPEC))
    with pytest.raises(ValueError, match="popart_step_size=0.001 is of popart=True; leave it out"):
        VTraceConfig(popart_step_size=1e-3)
    with pytest.raises(ValueError, match="replay_capacity=10 is of a replay, which replay_fraction=0 does without"):
        VTraceConfig(replay_capacity=10)


@pytest.mark.slow
@pytest.mark.nightly
def test_values_of_both_scales_are_the_analytic_ones() -> None:
    """All discrete probes at once, as one task with rewards of 1,000 and one with rewards of 1, of one network."""
    together, gamma, steps = probes.Together(), 0.8, 120_000
    environment = Tasks({"large": wrappers.scale_reward(1000.0)(together), "small": together})
    settings: dict[str, Any] = {"discount": gamma, "entropy_cost": 0.0, "max_grad_norm": 10.0, "learning_rate": 1e-2}
    config = VTraceConfig(popart=True, hidden_sizes=(16,), activation="tanh", rollout_length=8, **settings)
    agent = agents.vtrace.make(environment.spec, config)
    network = config.actor_critic("vtrace", environment.spec, None, num_values=2)
    program = harness.make_program(agent, environment, num_envs=32)  # type: ignore[arg-type]
    state, report = program.step(harness.initial(program, agent, [0]), program.limits(steps, steps, 10_000))
    assert np.all(report.finite)
    learner = jax.tree.map(lambda x: x[0], state.learner)
    for probe in probes.DISCRETE:
        seen, right = zip(*((together.shown(probe, x), value) for x, value in probe.values(gamma)))
        inputs = nets.Inputs(jnp.asarray(seen)[None], jnp.zeros((1, len(seen))), jnp.ones((1, len(seen)), bool), ())
        normalized = np.asarray(network.apply(learner.params, inputs, ())[1][0])
        values = np.asarray(learner.aux.scale) * normalized + np.asarray(learner.aux.mean)
        tolerance = 0.25 if isinstance(probe, probes.TruncatedReward) else 0.1
        for k, scale in enumerate((1000.0, 1.0)):
            np.testing.assert_allclose(values[:, k] / scale, right, atol=tolerance, err_msg=f"{probe} times {scale}")
