"""SAC and TD3 on tasks whose soft optima are known, and in other units, numbers of members, shards and files."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, spaces
from podracer.agents import SACConfig
from podracer.types import Agent, EnvSpec, LearnerState, TimeStep, Transition
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


def test_a_bandits_alpha_and_std_are_those_of_its_target_entropy() -> None:
    """Reward -(a - x)^2: the law is a Gaussian of variance alpha / 2, and one of entropy -1 has the std 0.0890."""
    agent, (learner,) = trained(probes.ContinuousAction(), 60_000)
    assert np.exp(learner.params["log_alpha"]) == pytest.approx(0.0159, rel=0.12)
    for x in (-0.5, 0.5):
        found = actions(agent, learner, x, evaluation=False)
        assert found.mean() == pytest.approx(x, abs=0.03)
        assert found.std() == pytest.approx(0.0890, rel=0.12)
        assert actions(agent, learner, x, evaluation=True)[0] == pytest.approx(x, abs=0.03)


def test_the_gain_of_a_linear_quadratic_regulator() -> None:
    agent, (learner,) = trained(LinearQuadratic(), 60_000, discount=GAMMA)
    low, high = (actions(agent, learner, x, evaluation=True)[0] for x in (-0.7, 0.7))
    assert (low - high) / 1.4 == pytest.approx(0.6277, rel=0.06)
    assert np.exp(learner.params["log_alpha"]) == pytest.approx(0.02367, rel=0.15)
    assert actions(agent, learner, 0.3, evaluation=False).std() == pytest.approx(0.0890, rel=0.15)


def test_a_truncation_is_not_the_end() -> None:
    agent, (learner,) = trained(
        TruncatedReward(), 30_000, discount=GAMMA, policy="deterministic", policy_interval=2, noise=(0.1, 0.1)
    )
    del agent
    critic = agents.sac.make(TruncatedReward().spec, SACConfig(**QUICK, policy="deterministic"))
    assert critic.replay is not None
    assert value(learner, TruncatedReward().spec) == pytest.approx(1 / (1 - GAMMA), rel=0.03)


def value(learner: LearnerState, spec: EnvSpec) -> float:
    """The first critic's value of action 0 at observation 0."""
    from podracer import nets

    network = nets.critics.make(spec, (16, 16), "tanh", num_critics=2, num_actions=1, with_std=False)
    rows = nets.Inputs(jnp.zeros((1, 1, 1)), jnp.zeros((1, 1)), jnp.ones((1, 1), bool), ())
    return float(network.critic.apply(learner.params["critic"], rows, jnp.zeros((1, 1)))[0, 0, 0])


def test_units_do_not_matter() -> None:
    """Actions in +-1 that the environment doubles, and actions in +-2: powers of two round alike."""
    doubled, (a,) = trained(LinearQuadratic(scale=2.0), 1_600)
    plain, (b,) = trained(LinearQuadratic(bound=2.0), 1_600)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), a.params, b.params)
    np.testing.assert_allclose(
        2.0 * actions(doubled, a, 0.3, evaluation=False), actions(plain, b, 0.3, evaluation=False), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("policy_interval", [1, 3])
def test_members_are_the_single_runs(policy_interval: int) -> None:
    """Also where a delayed policy update is a branch for one run and a choice for several."""
    config = {"policy_interval": policy_interval, "target_policy": True, "policy": "deterministic", "noise": (0.1, 0.2)}
    _, members = trained(LinearQuadratic(), 1_600, population=2, **config)
    _, (single,) = trained(LinearQuadratic(), 1_600, **config)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), members[0], single)
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (members[0].params, members[1].params))))


def test_the_policy_learns_in_every_second_update() -> None:
    agent = agents.sac.make(LinearQuadratic().spec, SACConfig(**QUICK, policy_interval=2))
    learner = harness.learner_of(agent)
    counts = {name: int(jax.tree.leaves(state)[0]) for name, state in learner.opt_state.items()}
    assert set(counts.values()) == {0}
    _, (after,) = trained(LinearQuadratic(), 800, policy_interval=2)
    updates = int(after.num_updates)
    counts = {name: int(jax.tree.leaves(state)[0]) for name, state in after.opt_state.items()}
    assert counts == {"critic": updates, "policy": updates // 2, "log_alpha": updates // 2}
    assert updates > 10
