"""SAC and TD3 on tasks whose soft optima are known, and in other units, numbers of members, shards and files."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets, spaces
from podracer.agents import SACConfig
from podracer.types import Agent, Batch, EnvSpec, LearnerState, TimeStep, Trajectory, Transition
from tests.support import harness, probes

pytestmark = pytest.mark.slow

QUICK: dict[str, Any] = {
    "hidden_sizes": (16, 16),
    "activation": "tanh",
    "batch_size": 64,
    "replay_ratio": 16.0,
    "replay_capacity": 10_000,
    "replay_min_size": 500,
    "learning_rate": 3e-3,
    "tau": 0.02,
}
GAMMA = 0.9


class LinearState(NamedTuple):
    """Unbatched: `x` float32 []; `time` int32 []."""

    x: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class LinearQuadratic:
    """x' = 0.95 x + 0.5 a + w with reward -(x^2 + a^2), truncated after 8 steps.

    With a discount of 0.9 the value is -P x^2 + constant, P = 2.1926 from its Riccati equation, and the best action is
    -0.6277 x. The soft law around it has the variance alpha / (2 (1 + 0.9 P 0.25)) = alpha / 2.98666.
    """

    scale: float = 1.0  # of the action: the environment multiplies it
    bound: float = 1.0  # of the action space

    @property
    def spec(self) -> EnvSpec:
        action = spaces.Box(-self.bound, self.bound, (1,))
        return EnvSpec("linear", spaces.Box(-2.0, 2.0, (1,)), action, 8)

    def reset(self, key: jax.Array) -> LinearState:
        return LinearState(jax.random.uniform(key, (), minval=-1.0, maxval=1.0), jnp.int32(0))

    def step(self, state: LinearState, action: jax.Array, key: jax.Array) -> tuple[LinearState, Transition]:
        a = self.scale * action[0]
        x = 0.95 * state.x + 0.5 * a + 0.05 * jax.random.normal(key)
        after = LinearState(jnp.clip(x, -2.0, 2.0), state.time + 1)
        return after, Transition(-(state.x**2) - a**2, jnp.float32(1), after.time == 8)

    def observe(self, state: LinearState) -> jax.Array:
        return state.x[None]


@dataclasses.dataclass(frozen=True)
class TruncatedReward(probes.TruncatedReward):
    """Reward 1 a step, truncated after 4, with an action that has no effect: Q = 1 / (1 - gamma)."""

    @property
    def spec(self) -> EnvSpec:
        return super().spec._replace(action_space=spaces.Box(-1.0, 1.0, (1,)))


def trained(environment: Any, steps: int, population: int = 1, **config: Any) -> tuple[Agent, list[LearnerState]]:
    """The agent, and members of different seeds after so many transitions of 16 lanes."""
    agent = agents.sac.make(environment.spec, SACConfig(**QUICK | config))
    prog = harness.make_program(agent, environment, num_envs=16, population=population)
    state = harness.initial(prog, agent, list(range(population)))
    state, report = prog.step(state, prog.limits(steps, steps, 10_000))
    assert np.all(report.finite)
    return agent, [jax.tree.map(lambda x, i=i: x[i], state.learner) for i in range(population)]


def actions(agent: Agent, learner: LearnerState, x: float, evaluation: bool) -> np.ndarray:
    """4,000 actions at an observation."""
    N = 4_000
    rows = TimeStep(jnp.full((N, 1), x), jnp.zeros(N), jnp.ones(N), jnp.ones(N, bool), jnp.zeros(N, bool))
    memory = agent.start(jnp.arange(N, dtype=jnp.int32), N)
    act = jax.jit(agent.act, static_argnums=4)
    params = agent.actor_params(learner, jnp.float32(1))
    return np.asarray(act(params, memory, rows, jax.random.key(7), evaluation)[0])[:, 0]


@pytest.mark.nightly
def test_a_bandits_alpha_and_std_are_those_of_its_target_entropy() -> None:
    """Reward -(a - x)^2: the law is a Gaussian of variance alpha / 2, and one of entropy -1 has the std 0.0890."""
    agent, (learner,) = trained(probes.ContinuousAction(), 14_000, alpha_init=0.1)
    assert np.exp(learner.params["log_alpha"]) == pytest.approx(0.0159, rel=0.12)
    stds = []
    for x in (-0.5, 0.5):
        found = actions(agent, learner, x, evaluation=False)
        stds.append(found.std())
        assert found.mean() == pytest.approx(x, abs=0.03)
        assert actions(agent, learner, x, evaluation=True)[0] == pytest.approx(x, abs=0.03)
    # The target is of the mean entropy of the observations.
    assert np.exp(np.mean(np.log(stds))) == pytest.approx(0.0890, rel=0.08)
    np.testing.assert_allclose(stds, 0.0890, rtol=0.25)


@pytest.mark.nightly
def test_the_gain_of_a_linear_quadratic_regulator() -> None:
    agent, (learner,) = trained(LinearQuadratic(), 20_000, discount=GAMMA, alpha_init=0.1)
    low, high = (actions(agent, learner, x, evaluation=True)[0] for x in (-0.7, 0.7))
    assert (low - high) / 1.4 == pytest.approx(0.6277, rel=0.06)
    assert np.exp(learner.params["log_alpha"]) == pytest.approx(0.02367, rel=0.15)
    assert actions(agent, learner, 0.3, evaluation=False).std() == pytest.approx(0.0890, rel=0.15)


@pytest.mark.nightly
def test_a_truncation_is_not_the_end() -> None:
    """Taken for the end, Q would be 3.077."""
    environment = TruncatedReward()
    noise = {"policy": "deterministic", "policy_interval": 2, "noise": (0.1, 0.1)}
    _, (learner,) = trained(environment, 12_000, discount=GAMMA, **noise)
    network = nets.critics.make(environment.spec, (16, 16), "tanh", num_critics=2, num_actions=1, with_std=False)
    rows = nets.Inputs(jnp.zeros((1, 1, 1)), jnp.zeros((1, 1)), jnp.ones((1, 1), bool), ())
    q = network.critic.apply(learner.params["critic"], rows, jnp.zeros((1, 1)))
    np.testing.assert_allclose(q, 1 / (1 - GAMMA), rtol=0.03)


def test_units_do_not_matter() -> None:
    """Actions in +-1 that the environment doubles, and actions in +-2: acting and learning are the same."""
    B, ends = 16, []
    rows = TimeStep(*(x[:, :B] for x in harness.timesteps(0, 1, 64, (1,))))  # type: ignore[arg-type]
    unit = np.random.default_rng(0).uniform(-1.0, 1.0, (1, B, 1)).astype(np.float32)
    for environment in (LinearQuadratic(scale=2.0), LinearQuadratic(bound=2.0)):
        agent = agents.sac.make(environment.spec, SACConfig(**QUICK))
        learner, state = harness.learner_of(agent), nets.ActorState((), (), ())
        version: Any = np.zeros((1, B), np.int32)
        trajectory = Trajectory(rows, environment.bound * unit, {}, state, version, version[0])
        batch = Batch(trajectory, np.ones(B, np.float32), np.ones(B, np.int32))  # type: ignore[arg-type]
        learner, *_ = harness.alone(agent.learn)(learner, batch, jnp.float32(0), jax.random.key(1))
        ends.append((learner.params, environment.scale * actions(agent, learner, 0.3, evaluation=False)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *ends)


@pytest.mark.nightly
def test_members_are_the_single_runs() -> None:
    """Updates in blocks, and statistics of a member's own rows."""
    config = {"policy_interval": 3, "target_policy": True, "policy": "deterministic", "noise": (0.1, 0.2)}
    config |= {"normalize_observations": True, "normalize_rewards": True}
    _, members = trained(LinearQuadratic(), 1_600, population=2, **config)
    _, (single,) = trained(LinearQuadratic(), 1_600, **config)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), members[0], single)
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (members[0].params, members[1].params))))
    # floor(updates / D) steps of the policy.
    updates = int(single.num_updates)
    counts = {name: int(state[0].count) for name, state in single.opt_state.items()}
    assert counts == {"critic": updates, "policy": updates // 3}
    assert updates > 30
