"""All agents on every probe environment: the values and the policy that they learn are the analytic ones."""

from __future__ import annotations

from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import probes
import pytest

from podracer import agents, nets, returns
from podracer.agents import PPOConfig, R2D2Config, VTraceConfig
from podracer.anakin import program
from podracer.types import Agent, LearnerState, TimeStep

GAMMA = 0.8
LANES, SEEDS = 16, 2
STEPS = 40_000

COMMON: dict[str, Any] = {"discount": GAMMA, "entropy_cost": 0.0, "max_grad_norm": 10.0}
VTRACE = COMMON | {"rollout_length": 8, "learning_rate": 1e-2}
PPO = COMMON | {
    "rollout_length": 16,
    "learning_rate": 1e-2,
    "num_epochs": 2,
    "num_minibatches": 2,
    "gae_lambda": 0.9,
    "normalize_rewards": False,
}


def made(name: str, probe: probes.Probe, lstm_size: int) -> tuple[Agent, nets.Network]:
    """An agent with a network that we can ask for values."""
    network = nets.make(probe.spec, hidden_sizes=(16,), activation="tanh", separate=True, lstm_size=lstm_size)
    if name == "vtrace":
        return agents.vtrace.make(probe.spec, VTraceConfig(**VTRACE), network), network
    return agents.ppo.make(probe.spec, PPOConfig(**PPO), network), network


R2D2: dict[str, Any] = {
    "discount": GAMMA,
    "rollout_length": 8,
    "burn_in": 0,
    "trace_length": 8,
    "n_step": 3,
    "learning_rate": 1e-2,
    "adam_eps": 1e-6,
    "replay_capacity": 1000,
    "replay_min_size": 100,
    "batch_size": 32,
    "replay_ratio": 8.0,
    "target_update_interval": 20,
}


@pytest.mark.parametrize("probe", probes.DISCRETE, ids=lambda probe: type(probe).__name__)
@pytest.mark.parametrize("rescaling", [True, False])
def test_action_values_are_the_analytic_ones(probe: probes.Probe, rescaling: bool) -> None:
    """The largest of them at every observation, and which it is."""
    network = nets.make_q(probe.spec, hidden_sizes=(16,), activation="tanh", head_size=16)
    agent = agents.r2d2.make(probe.spec, R2D2Config(**R2D2, value_rescaling=rescaling), network)
    prog = harness.make_program(agent, probe, num_envs=LANES, population=SEEDS)
    state, report = prog.step(harness.initial(prog, agent, list(range(SEEDS))), program.Limits.of(STEPS, STEPS, 10_000))
    assert np.all(report.finite)
    table = probe.values(GAMMA)
    N = len(table)
    rows = nets.Inputs(jnp.stack([x for x, _ in table])[None], jnp.zeros((1, N)), jnp.ones((1, N), bool), ())
    for seed in range(SEEDS):
        params = jax.tree.map(lambda x, i=seed: x[i], state.learner.params)
        values = jnp.max(network.apply(params, rows, ())[0][0], axis=-1)
        found = returns.unrescale(values) if rescaling else values
        np.testing.assert_allclose(found, [value for _, value in table], atol=0.15)
        if probe.optimal_actions is not None:
            observation, best = (np.stack(x) for x in zip(*probe.optimal_actions, strict=True))
            B = len(best)
            rows_of = nets.Inputs(jnp.asarray(observation)[None], jnp.zeros((1, B)), jnp.ones((1, B), bool), ())
            np.testing.assert_array_equal(jnp.argmax(network.apply(params, rows_of, ())[0][0], axis=-1), best)


def trained(name: str, probe: probes.Probe, lstm_size: int = 0) -> tuple[Agent, nets.Network, LearnerState]:
    """Members with different seeds, trained side by side; learner states [SEEDS]."""
    agent, network = made(name, probe, lstm_size)
    prog = harness.make_program(agent, probe, num_envs=LANES, population=SEEDS)
    state = harness.initial(prog, agent, list(range(SEEDS)))
    state, report = prog.step(state, program.Limits.of(STEPS, STEPS, 10_000))
    assert np.all(report.finite)
    return agent, network, state.learner


def check_values(probe: probes.Probe, network: nets.Network, params: Any, tolerance: float) -> None:
    """The value of every observation, each as the first row of an episode."""
    table = probe.values(GAMMA)
    observation = jnp.asarray(np.stack([observation for observation, _ in table]))[None]
    N = len(table)
    rows = nets.Inputs(observation, jnp.zeros((1, N)), jnp.ones((1, N), bool), ())
    outputs, values, _ = network.apply(params, rows, network.start(N))
    expected = np.array([value for _, value in table])
    if isinstance(probe, probes.ContinuousAction):  # the policy's variance costs as much, and has become small
        expected -= np.exp(2.0 * np.asarray(outputs)[0, :, 1])
        assert expected.min() > -0.2
    np.testing.assert_allclose(values[0], expected, atol=tolerance)


@pytest.mark.parametrize("probe", probes.ALL, ids=lambda probe: type(probe).__name__)
@pytest.mark.parametrize("name", ["vtrace", "ppo"])
def test_values_and_policies_are_the_analytic_ones(name: str, probe: probes.Probe) -> None:
    agent, network, learner = trained(name, probe)
    for seed in range(SEEDS):
        member = jax.tree.map(lambda x, i=seed: x[i], learner)
        # TruncatedReward: 5, and 2.95 at most if a time limit were a death.
        check_values(probe, network, member.params, 0.25 if isinstance(probe, probes.TruncatedReward) else 0.1)
        if probe.optimal_actions is not None:
            check_policy(probe, agent, member)


def check_policy(probe: probes.Probe, agent: Agent, learner: LearnerState) -> None:
    """The most likely action is the best one, and where actions are discrete the others have become rare."""
    actions = probe.optimal_actions or ()
    observation, best = (np.stack(x) for x in zip(*actions, strict=True))
    B = len(best)
    row = TimeStep(jnp.asarray(observation), jnp.zeros(B), jnp.ones(B), jnp.ones(B, bool), jnp.zeros(B, bool))
    params = agent.actor_params(learner, jnp.float32(1))
    state = agent.start(jnp.arange(B, dtype=jnp.int32), B)
    chosen, extras, _ = agent.act(params, state, row, jax.random.key(0), True)
    np.testing.assert_allclose(chosen, best, atol=0.1)
    if best.dtype == np.int32:
        assert float(jnp.min(extras["log_prob"])) > np.log(0.9)


@pytest.mark.parametrize("name", ["vtrace", "ppo"])
def test_a_recurrent_network_learns_delayed_rewards(name: str) -> None:
    """Row by row through an episode: the values are gamma and 1 with the memory that acting has there."""
    _, network, learner = trained(name, probes.DelayedReward(), lstm_size=8)
    for seed in range(SEEDS):
        params = jax.tree.map(lambda x, i=seed: x[i], learner.params)
        for action in (0, 1):
            rows = nets.Inputs(
                observation=jnp.asarray([0.0, 1.0]).reshape(2, 1, 1),
                reward=jnp.zeros((2, 1)),
                first=jnp.asarray([[True], [False]]),
                previous_action=jnp.full((2, 1), action, jnp.int32),
            )
            values = network.apply(params, rows, network.start(1))[1][:, 0]
            np.testing.assert_allclose(values, [GAMMA, 1.0], atol=0.1)
