"""An environment's own numbers, on every way from `step` to `episode/<name>`: sums that are known from others."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax import gym, testing
from podracer import agents
from podracer.environments import adopt, gate
from podracer.environments.from_jax import SteppedEnvironments
from podracer.environments.gymnasium import GymnasiumOptions
from podracer.run.driver import episode_means
from podracer.sebulba import actor_program
from podracer.types import EnvSpec, EpisodeStats, HostStep, Transition
from tests.support import counting, harness

T, B = 5, 8


@dataclasses.dataclass(frozen=True)
class Measured(counting.CountingEnvironment):
    """Each episode has 1 end, as many steps as it is long, and twice its return."""

    @property
    def spec(self) -> EnvSpec:
        return super().spec._replace(metrics=("ends", "steps", "twice"))

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Transition]:
        state, transition = super().step(state, action, key)
        metrics = {
            "twice": 2 * transition.reward,
            "ends": transition.last.astype(jnp.float32),
            "steps": jnp.float32(1),
        }
        return state, transition._replace(metrics=metrics)


def check(episodes: EpisodeStats) -> None:
    """The known sums, and their means."""
    assert float(np.sum(episodes.count)) > 3
    np.testing.assert_array_equal(episodes.metrics["ends"], episodes.count)
    np.testing.assert_array_equal(episodes.metrics["steps"], episodes.length_sum)
    np.testing.assert_array_equal(episodes.metrics["twice"], 2 * np.asarray(episodes.return_sum))
    means = episode_means(episodes)
    assert list(means) == [f"episode/{name}" for name in ("return", "length", "ends", "steps", "twice", "count")]
    np.testing.assert_array_equal(means["episode/ends"], 1.0)
    np.testing.assert_array_equal(means["episode/twice"], 2 * means["episode/return"])


def test_anakin() -> None:
    environment = Measured()
    config = agents.VTraceConfig(rollout_length=T, hidden_sizes=(8,))
    agent = agents.vtrace.make(environment.spec, config)
    prog = harness.make_program(agent, environment, num_envs=B)
    _, report = prog.step(harness.initial(prog, agent, [0]), prog.limits(10**9, 10**9, 4))
    check(jax.device_get(report.episodes))
    plain = harness.make_program(agent, counting.CountingEnvironment(), num_envs=B)
    names = [str(path) for path, _ in jax.tree.leaves_with_path(plain.like())]
    assert not any("metrics" in name for name in names), "a state that was saved before there were metrics is no other"


@functools.cache
def acting_program() -> Any:
    """The functions of an actor, jitted, and parameters."""
    spec = Measured().spec
    agent = agents.vtrace.make(spec, agents.VTraceConfig(rollout_length=T, hidden_sizes=(8,)))
    functions = actor_program.make(agent, spec, T, B)
    params = agent.actor_params(agent.init(jax.random.key(0), harness.hyper(agent)), jnp.float32(0))
    return actor_program.Acting(*map(jax.jit, functions)), params


def sebulba(source: Any, rollouts: int = 8) -> EpisodeStats:
    """The sums of Sebulba's acting program over some rollouts."""
    (start, begin, act, finish), params = acting_program()
    environment = source.make(B, 3)
    lanes, row = environment.recv()
    carry = start(lanes, jax.random.key(0))
    buffer = begin(carry)
    sums = []
    for _ in range(rollouts):
        for _ in range(T):
            buffer, actions = act(buffer, params, carry.keys, row)
            environment.send(lanes, np.asarray(actions))
            _, row = environment.recv()
        _, episodes, buffer, carry = finish(buffer, carry, jnp.asarray(lanes), jnp.zeros(T, jnp.int32), row)
        sums.append(jax.device_get(episodes))
    environment.close()
    return jax.tree.map(lambda *x: np.asarray([sum(x)]), *sums)


@pytest.mark.slow
def test_sebulba() -> None:
    """A pure-JAX environment stepped from the host, and the same as one of Gymnasium."""
    check(sebulba(SteppedEnvironments(Measured())))
    as_gymnasium = adopt(gym.GymnasiumEnv(Measured()), {"metrics": ["ends", "steps", "twice"]})
    assert as_gymnasium.spec.metrics == ("ends", "steps", "twice")
    check(sebulba(as_gymnasium))


def test_rows_that_are_not_what_the_spec_says() -> None:
    spec, zeros = Measured().spec, np.zeros(2)
    row = HostStep.of(np.zeros((2, 3), np.float32), zeros, zeros > 0, zeros == 0, zeros > 0, metrics=np.zeros((3, 2)))
    lanes = np.arange(2)
    gate.check_rows(lanes, row, spec)
    with pytest.raises(ValueError, match=r"rows have nothing in metrics, where its spec says float32\[3, 2\]"):
        gate.check_rows(lanes, row._replace(metrics=()), spec)
    with pytest.raises(ValueError, match=r"float64\[2, 3\] in observation, where its spec says float32\[2, 3\]"):
        gate.check_rows(lanes, row._replace(observation=np.zeros((2, 3))), spec)
    with pytest.raises(ValueError, match=r"\[6, 2\] in scalars.*raw_scores=True"):
        gate.check_rows(lanes, row._replace(scalars=np.zeros((6, 2), np.float32)), spec)
    with pytest.raises(ValueError, match="need all 2, in order"):
        gate.check_rows(lanes[::-1], row, spec)


class Talkative(gymnasium.Env):
    """Says something of itself now and then."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, said: Any = True):
        self.said = said

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), {"success": 7.0}

    def step(self, action: Any) -> Any:
        self.t += 1
        info = {"success": self.said} if self.t > 3 else {"other": "text"}
        return np.zeros(1, np.float32), 1.0, self.t == 5, False, info


@pytest.mark.parametrize("said", [True, np.True_, 1, np.float32(1)])
def test_info_of_gymnasium(said: Any) -> None:
    """Missing is 0, what is said of a reset does not count, and the row that ends an episode has its sum."""
    environment = adopt(lambda: Talkative(said), {"metrics": ("success", "never")}).make(2, 0)
    sums = []
    for _ in range(8):
        lanes, row = environment.recv()
        assert (row.metrics.shape, row.metrics.dtype) == ((2, 2), np.float32)
        sums.append(row.metrics[0, 1])
        environment.send(lanes, np.zeros(2))
    assert sums == [0, 0, 0, 0, 1, 2, 0, 0]
    np.testing.assert_array_equal(row.metrics[1], 0)


def test_metrics_that_cannot_be_had() -> None:
    environment = adopt(lambda: Talkative("yes"), {"metrics": ("success",)}).make(1, 0)
    for _ in range(4):
        lanes, _ = environment.recv()
        environment.send(lanes, np.zeros(1))
    with pytest.raises(ValueError, match=r"info\['success'\] holds .*yes.*, which are no numbers; metrics need them"):
        environment.recv()
    for names in (("return",), ("a", "a"), ("",)):
        with pytest.raises(ValueError, match=r"GymnasiumOptions\.metrics is .* \(expected a tuple of distinct names"):
            GymnasiumOptions(metrics=names)


def returning(**metrics: Any) -> Any:
    class Mine(Measured):
        def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Transition]:
            state, transition = super().step(state, action, key)
            return state, transition._replace(metrics={**transition.metrics, **metrics})

    return Mine()


def with_names(names: Any) -> Any:
    return type("Mine", (Measured,), {"spec": Measured().spec._replace(metrics=names)})()


def test_the_contract_is_checked() -> None:
    testing.validate_protocol(Measured())
    for environment, message in (
        (returning(twice=jnp.int32(1)), r"Mine\.step returned metrics\['twice'\] int32 \[\] \(expected float32 \[\]\)"),
        (
            returning(more=jnp.float32(1)),
            r"Mine\.step returned metrics \['ends', 'more', .*\(expected \['ends', 'steps'",
        ),
        (with_names(()), r"Mine\.step returned metrics \['ends', 'steps', 'twice'\] \(expected \[\] as in the spec"),
        (with_names(["ends"]), r"Mine\.spec\.metrics is \['ends'\] \(expected a tuple of distinct names"),
        (with_names(("count",)), r"Mine\.spec\.metrics is \('count',\) \(expected a tuple of distinct names"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            testing.validate_protocol(environment)
    with pytest.raises(testing.ConformanceError, match=r"Mine\.step returned metrics\['twice'\] nan after 1 steps"):
        testing.check_environment(returning(twice=jnp.float32(jnp.nan)), episodes=1, steps=2)
