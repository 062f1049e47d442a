"""All agents on every probe environment: the values and the policy that they learn are the analytic ones.

The discrete probes are learnt together, in one program for each agent.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets, returns, spaces
from podracer.agents import DQNConfig, MuZeroConfig, PPOConfig, PQNConfig, R2D2Config, VTraceConfig
from podracer.learning import value_distributions
from podracer.learning.bins import Bins
from podracer.search import world_models
from podracer.types import Agent, LearnerState, TimeStep
from tests.support import harness, probes, tiers

GAMMA = 0.8
LANES, SEEDS = 16, 2
STEPS, STEPS_TOGETHER = 40_000, 60_000

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


R2D2: dict[str, Any] = {
    "discount": GAMMA,
    "rollout_length": 8,
    "burn_in": 0,
    "trace_length": 8,
    "n_step": 3,
    "learning_rate": 1e-2,
    "optimizer_eps": 1e-6,
    "replay_capacity": 8_000,
    "replay_min_size": 800,
    "batch_size": 32,
    "replay_ratio": 4.0,
    "target_interval": 20,
}


DQN: dict[str, Any] = {
    "discount": GAMMA,
    "rollout_length": 8,
    "batch_size": 32,
    "replay_ratio": 0.5,
    "target_interval": 20,
    "replay_capacity": 4_000,
    "replay_min_size": 1_000,
    "n_step": 2,
    "learning_rate": 1e-2,
    "epsilon_final": 0.3,
}
BINS: dict[str, Any] = {"num_bins": 31, "max_value": 6.0}


PQN: dict[str, Any] = {
    "discount": GAMMA,
    "rollout_length": 16,
    "num_minibatches": 4,
    "learning_rate": 1e-2,
}


MUZERO: dict[str, Any] = {
    "discount": GAMMA,
    "rollout_length": 8,
    "simulations": 6,
    "unroll_length": 2,
    "n_step": 3,
    "batch_size": 32,
    "replay_ratio": 2.0,
    "replay_capacity": 4_000,
    "replay_min_size": 500,
    "learning_rate": 1e-2,
    "hidden_sizes": (16,),
    "state_size": 16,
    "head_size": 16,
    "num_bins": 31,
    "max_reward": 1.0,
}


TOGETHER = probes.Together()
discrete = pytest.mark.parametrize("probe", probes.DISCRETE, ids=lambda probe: type(probe).__name__)


def trained(agent: Agent, environment: Any) -> list[LearnerState]:
    """Learner states of members with different seeds, trained side by side."""
    steps = STEPS_TOGETHER if environment == TOGETHER else STEPS
    prog = harness.make_program(agent, environment, num_envs=LANES, population=SEEDS)
    state = harness.initial(prog, agent, list(range(SEEDS)))
    state, report = prog.step(state, prog.limits(steps, steps, 10_000))
    assert np.all(report.finite)
    learner = state.learner
    return [jax.tree.map(lambda x, i=seed: x[i], learner) for seed in range(SEEDS)]


def expected(
    probe: probes.Probe, together: bool
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
    """Observations [N, ...] with their values [N], and observations with their best actions."""
    observations, values = zip(*probe.values(GAMMA), strict=True)
    best = probe.optimal_actions
    if together and probe.spec.action_space == spaces.Discrete(1):  # played with two actions, which are equally good
        best = None
    show = (lambda x: TOGETHER.shown(probe, x)) if together else (lambda x: x)
    actions = best and (np.stack([show(x) for x, _ in best]), np.stack([action for _, action in best]))
    return np.stack([show(x) for x in observations]), np.array(values), actions


def inputs(observation: np.ndarray) -> nets.Inputs:
    """Observations [N, ...], each as the first row of an episode."""
    N = len(observation)
    return nets.Inputs(jnp.asarray(observation)[None], jnp.zeros((1, N)), jnp.ones((1, N), bool), ())


# Action values.


@functools.cache
def trained_pqn() -> tuple[nets.Network, list[LearnerState]]:
    """As `trained_r2d2`."""
    network = nets.make_q(TOGETHER.spec, hidden_sizes=(16,), head_size=0, dueling=False, layer_norm=True, init="he")
    return network, trained(agents.pqn.make(TOGETHER.spec, PQNConfig(**PQN), network), TOGETHER)


@functools.cache
def trained_r2d2(rescaling: bool) -> tuple[nets.Network, list[LearnerState]]:
    """The network of action values, and the members' learner states."""
    network = nets.make_q(TOGETHER.spec, hidden_sizes=(16,), activation="tanh", head_size=16)
    agent = agents.r2d2.make(TOGETHER.spec, R2D2Config(**R2D2, value_rescaling=rescaling), network)
    return network, trained(agent, TOGETHER)


def check_action_values(
    probe: probes.Probe, network: nets.Network, members: list[LearnerState], rescaling: bool
) -> None:
    """The largest of them at every observation, and which it is."""
    observations, right, best = expected(probe, together=True)
    apply = jax.jit(lambda params, observation: network.apply(params, inputs(observation), ())[0][0])
    for member in members:
        values = np.asarray(apply(member.params, observations)).max(-1)
        np.testing.assert_allclose(returns.unrescale(values) if rescaling else values, right, atol=0.15)
        if best is not None:
            np.testing.assert_array_equal(np.argmax(apply(member.params, best[0]), axis=-1), best[1])


@pytest.mark.slow
@discrete
@pytest.mark.parametrize("rescaling", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_action_values_are_the_analytic_ones(probe: probes.Probe, rescaling: bool) -> None:
    check_action_values(probe, *trained_r2d2(rescaling), rescaling)


@pytest.mark.slow
@discrete
def test_action_values_of_pqn_are_the_analytic_ones(probe: probes.Probe) -> None:
    check_action_values(probe, *trained_pqn(), rescaling=False)


# DQN.


@functools.cache
def trained_dqn(environment: Any, kind: Any) -> tuple[Any, list[LearnerState]]:
    """Action values [N, A] of observations [N, ...], and the members' learner states."""
    values = value_distributions.make(kind, max_error=1.0, **BINS)
    network = nets.make_q(
        environment.spec, hidden_sizes=(16,), activation="tanh", head_size=0, dueling=False, num_bins=values.size
    )

    def apply(params: Any, observation: Any) -> jax.Array:
        outputs = network.apply(params, inputs(observation), ())[0][0]
        return values.mean(outputs.reshape(len(observation), -1, values.size))

    distribution = {} if kind == "mean" else BINS
    agent = agents.dqn.make(environment.spec, DQNConfig(**DQN, **distribution, values=kind), network)
    return jax.jit(apply), trained(agent, environment)


@pytest.mark.slow
@discrete
@pytest.mark.parametrize("kind", tiers.all_but(["quantile"], ["quantile", "mean", "categorical"]))
def test_values_of_dqn_are_the_analytic_ones(probe: probes.Probe, kind: str) -> None:
    """The largest action value at every observation, and which it is."""
    apply, members = trained_dqn(TOGETHER, kind)
    observations, right, best = expected(probe, together=True)
    for member in members:
        np.testing.assert_allclose(np.max(apply(member.params, observations), -1), right, atol=0.15)
        if best is not None:
            np.testing.assert_array_equal(np.argmax(apply(member.params, best[0]), axis=-1), best[1])


# MuZero.


@pytest.mark.slow
@pytest.mark.nightly  # in the slow tier: one batch is learnt by heart (test_muzero.py)
@discrete
def test_values_of_muzero_are_the_analytic_ones(probe: probes.Probe) -> None:
    """The network's value of every observation, and the move that the search finds."""
    agent, members = trained_muzero(TOGETHER)
    sizes = {name: MUZERO[name] for name in ("num_bins", "hidden_sizes", "state_size", "head_size")}
    model = world_models.make(TOGETHER.spec, world_models.Sizes(**sizes))
    bins = Bins(MUZERO["num_bins"], MUZERO["max_reward"] / (1 - GAMMA))
    observations, right, best = expected(probe, together=True)
    for member in members:
        value = jax.jit(lambda params: model.predict(params, model.represent(params, observations))[1])(member.params)
        np.testing.assert_allclose(bins.expectation(value), right, atol=0.15)
        if best is not None:
            N = len(best[0])
            rows = TimeStep(best[0], jnp.zeros(N), jnp.ones(N), jnp.ones(N, bool), jnp.zeros(N, bool))
            memory = agent.start(jnp.arange(N, dtype=jnp.int32), N)
            params = agent.actor_params(member, jnp.float32(1))
            action = jax.jit(agent.act, static_argnums=4)(params, memory, rows, jax.random.key(0), True)[0]
            np.testing.assert_array_equal(action, best[1])


@functools.cache
def trained_muzero(environment: Any) -> tuple[Agent, list[LearnerState]]:
    """The agent, and the members' learner states."""
    agent = agents.muzero.make(environment.spec, MuZeroConfig(**MUZERO))
    return agent, trained(agent, environment)


# Values and policies.


@functools.cache
def trained_actor_critic(
    name: str, environment: Any, core: nets.CoreSettings = nets.NO_CORE
) -> tuple[Agent, nets.Network, list[LearnerState]]:
    """An agent with a network that we can ask for values, and the members' learner states."""
    network = nets.make(environment.spec, hidden_sizes=(16,), activation="tanh", separate=True, core=core)
    if name == "vtrace":
        agent = agents.vtrace.make(environment.spec, VTraceConfig(**VTRACE), network)
    else:
        agent = agents.ppo.make(environment.spec, PPOConfig(**PPO), network)
    return agent, network, trained(agent, environment)


def check_values_and_policy(name: str, probe: probes.Probe, together: bool) -> None:
    environment = TOGETHER if together else probe
    agent, network, members = trained_actor_critic(name, environment)
    observations, right, best = expected(probe, together)
    # TruncatedReward: 5, and 2.95 at most if a time limit were a death.
    tolerance = 0.25 if isinstance(probe, probes.TruncatedReward) else 0.1
    apply = jax.jit(lambda params, observation: network.apply(params, inputs(observation), ())[:2])
    for member in members:
        outputs, values = apply(member.params, observations)
        wanted = right
        if isinstance(probe, probes.ContinuousAction):  # the policy's variance costs as much, and has become small
            wanted = right - np.exp(2.0 * np.asarray(outputs)[0, :, 1])
            assert wanted.min() > -0.2
        np.testing.assert_allclose(values[0], wanted, atol=tolerance)
        if best is not None:
            check_policy(agent, member, *best)


@discrete
@pytest.mark.parametrize("name", ["ppo", pytest.param("vtrace", marks=pytest.mark.slow)])
def test_values_and_policies_are_the_analytic_ones(name: str, probe: probes.Probe) -> None:
    check_values_and_policy(name, probe, together=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "vtrace"])
def test_means_of_continuous_actions_are_the_best_ones(name: str) -> None:
    check_values_and_policy(name, probes.ContinuousAction(), together=False)


def check_policy(agent: Agent, learner: LearnerState, observation: np.ndarray, best: np.ndarray) -> None:
    """The most likely action is the best one, and where actions are discrete the others have become rare."""
    B = len(best)
    row = TimeStep(jnp.asarray(observation), jnp.zeros(B), jnp.ones(B), jnp.ones(B, bool), jnp.zeros(B, bool))

    @jax.jit
    def act(learner: LearnerState) -> Any:
        params = agent.actor_params(learner, jnp.float32(1))
        return agent.act(params, agent.start(jnp.arange(B, dtype=jnp.int32), B), row, jax.random.key(0), True)

    chosen, extras, _ = act(learner)
    np.testing.assert_allclose(chosen, best, atol=0.1)
    if best.dtype == np.int32:
        assert float(jnp.min(extras["log_prob"])) > np.log(0.9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "vtrace"])
def test_a_recurrent_network_learns_delayed_rewards(name: str) -> None:
    """Row by row through an episode: the values are gamma and 1 with the memory that acting has there."""
    _, network, members = trained_actor_critic(name, probes.DelayedReward(), core=nets.CoreSettings("lstm", 8))
    apply = jax.jit(lambda params, rows: network.apply(params, rows, network.start(1))[1][:, 0])
    for member in members:
        for action in (0, 1):
            rows = nets.Inputs(
                observation=jnp.asarray([0.0, 1.0]).reshape(2, 1, 1),
                reward=jnp.zeros((2, 1)),
                first=jnp.asarray([[True], [False]]),
                previous_action=jnp.full((2, 1), action, jnp.int32),
            )
            np.testing.assert_allclose(apply(member.params, rows), [GAMMA, 1.0], atol=0.1)
