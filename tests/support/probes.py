"""Probe environments: so small that the right value function and policy are known exactly.

Each probe fails for one kind of bug (in the order that an agent should pass them), after the probe environments of
rejax and Andy Jones. Every probe has

*   `values(gamma) -> [(observation, value), ...]`, the value of the optimal policy at each non-terminal observation
    (of any policy where `optimal_actions` is None);
*   `optimal_actions`, `[(observation, action), ...]`, or None where all actions are equally good.

Observations are float32 [1]. The observation of a terminal state repeats an earlier one on purpose: an agent that
bootstraps through a termination is then far from the right value, instead of extrapolating to nearly 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

ValueTable = list[tuple[np.ndarray, float]]
ActionTable = list[tuple[np.ndarray, np.ndarray]]

OBSERVATIONS = spaces.Box(-1.0, 1.0, (1,))


class State(NamedTuple):
    """Unbatched: `observation` float32 [1]; `time` int32 [], the transitions so far in this episode."""

    observation: jax.Array
    time: jax.Array


def _array(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def _state(observation: float | jax.Array) -> State:
    return State(jnp.full((1,), observation, jnp.float32), jnp.int32(0))


def _random_sign(key: jax.Array) -> jax.Array:
    """-1 or +1 with equal probability, float32 []."""
    return jnp.where(jax.random.bernoulli(key), jnp.float32(1), jnp.float32(-1))


def _transition(reward: float | jax.Array, terminated: bool | jax.Array, truncated: bool | jax.Array) -> Transition:
    terminated, truncated = jnp.asarray(terminated), jnp.asarray(truncated)
    discount = jnp.where(terminated, jnp.float32(0), jnp.float32(1))
    return Transition(jnp.asarray(reward, jnp.float32), discount, terminated | truncated)


@dataclasses.dataclass(frozen=True)
class ConstantReward:
    """One step, one action, reward 1, terminated: V(0) = 1. Fails if the value loss or its optimiser is wrong.

    The observation is always 0, also at the end: ignoring the termination gives 1 / (1 - gamma).
    """

    optimal_actions = ((_array(0), np.int32(0)),)

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("probe:constant_reward", OBSERVATIONS, spaces.Discrete(1), 1)

    def values(self, gamma: float) -> ValueTable:
        del gamma
        return [(_array(0), 1.0)]

    def reset(self, key: jax.Array) -> State:
        del key
        return _state(0.0)

    def step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, Transition]:
        del action, key
        return State(state.observation, state.time + 1), _transition(1.0, True, False)

    def observe(self, state: State) -> jax.Array:
        return state.observation


@dataclasses.dataclass(frozen=True)
class ObservationReward:
    """One step; the observation is -1 or +1 at random and the reward equals it: V(x) = x for every policy.

    Fails if the value does not depend on the observation, or if observations and rewards of different lanes or rows
    are mixed up. Two actions, both without effect.
    """

    optimal_actions = None

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("probe:observation_reward", OBSERVATIONS, spaces.Discrete(2), 1)

    def values(self, gamma: float) -> ValueTable:
        del gamma
        return [(_array(-1), -1.0), (_array(1), 1.0)]

    def reset(self, key: jax.Array) -> State:
        return _state(_random_sign(key))

    def step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, Transition]:
        del action, key
        return State(state.observation, state.time + 1), _transition(state.observation[0], True, False)

    def observe(self, state: State) -> jax.Array:
        return state.observation


@dataclasses.dataclass(frozen=True)
class DelayedReward:
    """Two steps with observations 0, then 1; reward 1 for the second: V(0) = gamma, V(1) = 1, for every policy.

    Fails if the discount or the bootstrap is wrong, or if rewards are a row off. Two actions, both without effect.
    The terminal observation is 1.
    """

    optimal_actions = None

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("probe:delayed_reward", OBSERVATIONS, spaces.Discrete(2), 2)

    def values(self, gamma: float) -> ValueTable:
        return [(_array(0), gamma), (_array(1), 1.0)]

    def reset(self, key: jax.Array) -> State:
        del key
        return _state(0.0)

    def step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, Transition]:
        del action, key
        done = state.time == 1
        return State(jnp.ones_like(state.observation), state.time + 1), _transition(
            done.astype(jnp.float32), done, False
        )

    def observe(self, state: State) -> jax.Array:
        return state.observation


@dataclasses.dataclass(frozen=True)
class ActionReward:
    """One step, observation 0, two actions: action 1 gives +1, action 0 gives -1. The best policy takes 1: V(0) = 1.

    Fails if the policy gradient has the wrong sign, or if actions are a row off. A policy that takes action 1 with
    probability p has V(0) = 2 p - 1.
    """

    optimal_actions = ((_array(0), np.int32(1)),)

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("probe:action_reward", OBSERVATIONS, spaces.Discrete(2), 1)

    def values(self, gamma: float) -> ValueTable:
        del gamma
        return [(_array(0), 1.0)]

    def reset(self, key: jax.Array) -> State:
        del key
        return _state(0.0)

    def step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, Transition]:
        del key
        reward = jnp.where(action == 1, jnp.float32(1), jnp.float32(-1))
        return State(state.observation, state.time + 1), _transition(reward, True, False)

    def observe(self, state: State) -> jax.Array:
        return state.observation


@dataclasses.dataclass(frozen=True)
class ObservationActionReward:
    """One step, observation -1 or +1: reward +1 if the action is 0 at -1 or 1 at +1, else -1. V(-1) = V(+1) = 1.

    Fails if the policy does not depend on the observation, or if advantages meet another row's or lane's actions.
    """

    optimal_actions = ((_array(-1), np.int32(0)), (_array(1), np.int32(1)))

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("probe:observation_action_reward", OBSERVATIONS, spaces.Discrete(2), 1)

    def values(self, gamma: float) -> ValueTable:
        del gamma
        return [(_array(-1), 1.0), (_array(1), 1.0)]

    def reset(self, key: jax.Array) -> State:
        return _state(_random_sign(key))

    def step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, Transition]:
        del key
        match = (action == 1) == (state.observation[0] > 0)
        reward = jnp.where(match, jnp.float32(1), jnp.float32(-1))
        return State(state.observation, state.time + 1), _transition(reward, True, False)

    def observe(self, state: State) -> jax.Array:
        return state.observation


@dataclasses.dataclass(frozen=True)
class TruncatedReward:
    """Reward 1 a step, observation always 0, truncated after `length` steps: V(0) = 1 / (1 - gamma) for every policy.

    A time limit is no death. Taken for one, V(0) is at most `finite_sum(gamma)` = (1 - gamma^length) / (1 - gamma)
    (Monte Carlo gives the mean of that sum over the positions in the episode, TD(0) gives
    1 / (1 - gamma (1 - 1 / length))). Two actions, both without effect.
    """

    length: int = 4

    optimal_actions = None

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("probe:truncated_reward", OBSERVATIONS, spaces.Discrete(2), self.length)

    def values(self, gamma: float) -> ValueTable:
        return [(_array(0), 1.0 / (1.0 - gamma))]

    def finite_sum(self, gamma: float) -> float:
        """An upper bound of the wrong value that treating truncation as termination converges to."""
        return (1.0 - gamma**self.length) / (1.0 - gamma)

    def reset(self, key: jax.Array) -> State:
        del key
        return _state(0.0)

    def step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, Transition]:
        del action, key
        time = state.time + 1
        return State(state.observation, time), _transition(1.0, False, time == self.length)

    def observe(self, state: State) -> jax.Array:
        return state.observation


@dataclasses.dataclass(frozen=True)
class ContinuousAction:
    """One step, observation x = -0.5 or +0.5, action a in [-1, 1]: reward -(a - x)^2. Best is a = x, with V(x) = 0.

    The best action lies inside the bounds, so that neither clipping nor squashing can find it by accident. A Gaussian
    policy with mean x and standard deviation s (far from the bounds) has V(x) = -s^2.
    """

    optimal_actions = ((_array(-0.5), _array(-0.5)), (_array(0.5), _array(0.5)))

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("probe:continuous_action", OBSERVATIONS, spaces.Box(-1.0, 1.0, (1,)), 1)

    def values(self, gamma: float) -> ValueTable:
        del gamma
        return [(_array(-0.5), 0.0), (_array(0.5), 0.0)]

    def reset(self, key: jax.Array) -> State:
        return _state(0.5 * _random_sign(key))

    def step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, Transition]:
        del key
        reward = -((action[0] - state.observation[0]) ** 2)
        return State(state.observation, state.time + 1), _transition(reward, True, False)

    def observe(self, state: State) -> jax.Array:
        return state.observation


Probe = (
    ConstantReward
    | ObservationReward
    | DelayedReward
    | ActionReward
    | ObservationActionReward
    | TruncatedReward
    | ContinuousAction
)

DISCRETE: tuple[Probe, ...] = (
    ConstantReward(),
    ObservationReward(),
    DelayedReward(),
    ActionReward(),
    ObservationActionReward(),
    TruncatedReward(),
)
ALL: tuple[Probe, ...] = (*DISCRETE, ContinuousAction())


class TogetherState(NamedTuple):
    """Unbatched: `which` int32 []; the state of that probe."""

    which: jax.Array
    inner: State


@dataclasses.dataclass(frozen=True)
class Together:
    """All discrete probes in one: each episode is of one of them, drawn at reset, so that one program learns them all.

    The observation is float32 [7]: a one for the probe that is played, then its own observation. What is right for a
    probe's own observation is right for `shown(probe, observation)`.
    """

    @property
    def spec(self) -> EnvSpec:
        longest = max(probe.spec.max_episode_steps or 0 for probe in DISCRETE)
        return EnvSpec("probe:together", spaces.Box(-1.0, 1.0, (len(DISCRETE) + 1,)), spaces.Discrete(2), longest)

    @staticmethod
    def shown(probe: Probe, observation: np.ndarray) -> np.ndarray:
        """A probe's own observation as it is shown here."""
        return np.concatenate([np.eye(len(DISCRETE), dtype=np.float32)[DISCRETE.index(probe)], observation])

    def reset(self, key: jax.Array) -> TogetherState:
        which_key, key = jax.random.split(key)
        which = jax.random.randint(which_key, (), 0, len(DISCRETE))
        return TogetherState(which, self._of(which, [probe.reset(key) for probe in DISCRETE]))

    def step(self, state: TogetherState, action: jax.Array, key: jax.Array) -> tuple[TogetherState, Transition]:
        steps = [probe.step(state.inner, action, key) for probe in DISCRETE]
        inner, transition = self._of(state.which, steps)
        return TogetherState(state.which, inner), transition

    def observe(self, state: TogetherState) -> jax.Array:
        one = (jnp.arange(len(DISCRETE)) == state.which).astype(jnp.float32)
        return jnp.concatenate([one, state.inner.observation])

    @staticmethod
    def _of(which: jax.Array, choices: list[Any]) -> Any:
        return jax.tree.map(lambda *x: jnp.stack(x)[which], *choices)
