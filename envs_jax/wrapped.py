"""Wrapped environments, which the functions of `envs_jax.wrappers` make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import configs, spaces
from podracer.types import Environment, Transition


class _Wrapped:
    """An environment around another one, and like it in all that a subclass does not change.

    Attributes:
      environment: the one inside.
      spec: its spec, which subclasses change.
      costly_reset: its `costly_reset` (see `podracer.types.Environment`).
    """

    def __init__(self, environment: Environment):
        """Wraps an environment.

        Raises:
          ValueError: for a game for two, a class, or an environment that is not in pure JAX.
        """
        if isinstance(environment, type):
            raise ValueError(f"{environment.__name__} is a class; wrap an environment that it makes.")
        if not isinstance(environment, Environment):
            raise ValueError(
                f"{type(environment).__name__} is no environment in pure JAX, which wrappers need; use Gymnasium's own "
                "wrappers, or the options of EnvPool."
            )
        if environment.spec.num_players != 1:
            raise ValueError(f"{environment.spec.name} is a game for two, whose rules a wrapper would break.")
        self.environment = environment
        self.spec = environment.spec
        self.costly_reset = getattr(environment, "costly_reset", False)

    def reset(self, key: jax.Array) -> Any:
        """The first state of an episode."""
        return self.environment.reset(key)

    def step(self, state: Any, action: Any, key: jax.Array) -> tuple[Any, Transition]:
        """One transition."""
        return self.environment.step(state, action, key)

    def observe(self, state: Any) -> Any:
        """The observation of a state."""
        return self.environment.observe(self._inner(state))

    def _inner(self, state: Any) -> Any:
        """Returns the state of the environment inside."""
        return state

    def __getattr__(self, name: str) -> Any:
        # Looked up in vain: `render`, which is here only if the environment inside has it.
        if name != "render":
            raise AttributeError(f"{type(self).__name__} has no {name}")
        render: Callable[[Any], jax.Array] = self.environment.render  # type: ignore[attr-defined]
        return lambda state: render(self._inner(state))


MASK = "action_mask"
"""The member of a `Dict` of observations that marks legal actions by 1 (docs/masks.md)."""


def _has_mask(environment: Environment) -> bool:
    space = environment.spec.observation_space
    return isinstance(space, spaces.Dict) and MASK in dict(space.items)


def _is_legal(environment: Environment, state: Any, action: jax.Array) -> jax.Array:
    """Returns True if the mask of a state allows an action, all choices of it; bool []."""
    space: Any = environment.spec.action_space
    counts = space.num_values if isinstance(space, spaces.MultiDiscrete) else (space.num_values,)
    first = np.cumsum((0, *counts[:-1])).astype(np.int32)  # of each choice among the values of all
    return jnp.all(environment.observe(state)[MASK].astype(jnp.int32)[action.reshape(-1) + first] > 0)


class TimeLimitState(NamedTuple):
    """The state inside and the clock.

    Attributes:
      inner: the state of the environment inside.
      num_steps: int32 []; steps taken so far.
    """

    inner: Any
    num_steps: jax.Array


class TimeLimit(_Wrapped):
    """An environment whose episodes are truncated after `limit` steps."""

    def __init__(self, environment: Environment, limit: int):
        super().__init__(environment)
        self.spec = self.spec._replace(max_episode_steps=min(limit, self.spec.max_episode_steps or limit))
        self._limit = limit

    def reset(self, key: jax.Array) -> TimeLimitState:
        return TimeLimitState(self.environment.reset(key), jnp.int32(0))

    def step(self, state: TimeLimitState, action: Any, key: jax.Array) -> tuple[TimeLimitState, Transition]:
        inner, transition = self.environment.step(state.inner, action, key)
        num_steps = state.num_steps + 1
        # The discount is that of the environment: 0 if it terminates on this very step.
        last = transition.last | (num_steps >= self._limit)
        return TimeLimitState(inner, num_steps), transition._replace(last=last)

    def _inner(self, state: TimeLimitState) -> Any:
        return state.inner


class ScaleReward(_Wrapped):
    """An environment whose rewards are multiplied by a factor."""

    def __init__(self, environment: Environment, factor: float):
        super().__init__(environment)
        self._factor = factor

    def step(self, state: Any, action: Any, key: jax.Array) -> tuple[Any, Transition]:
        state, transition = self.environment.step(state, action, key)
        return state, transition._replace(reward=transition.reward * self._factor)


class ClipReward(_Wrapped):
    """An environment whose rewards are clipped."""

    def __init__(self, environment: Environment, low: float, high: float):
        super().__init__(environment)
        self._low, self._high = low, high

    def step(self, state: Any, action: Any, key: jax.Array) -> tuple[Any, Transition]:
        state, transition = self.environment.step(state, action, key)
        return state, transition._replace(reward=jnp.clip(transition.reward, self._low, self._high))


class StickyActionsState(NamedTuple):
    """The state inside and the action executed last.

    Attributes:
      inner: the state of the environment inside.
      action: the action executed last; zeros before the first step.
      has_action: bool []; False before the first step.
    """

    inner: Any
    action: jax.Array
    has_action: jax.Array


class StickyActions(_Wrapped):
    """An environment that executes the action executed last, instead of the agent's, with some probability."""

    def __init__(self, environment: Environment, probability: float):
        super().__init__(environment)
        self._probability, self._masked = probability, _has_mask(environment)

    def reset(self, key: jax.Array) -> StickyActionsState:
        space: Any = self.spec.action_space
        action = jax.tree.map(jnp.asarray, spaces.zeros(space))
        return StickyActionsState(self.environment.reset(key), action, jnp.asarray(False))

    def step(self, state: StickyActionsState, action: Any, key: jax.Array) -> tuple[StickyActionsState, Transition]:
        sticky_key, step_key = jax.random.split(key)
        sticks = state.has_action & jax.random.bernoulli(sticky_key, self._probability)
        if self._masked:
            sticks &= _is_legal(self.environment, state.inner, state.action)
        executed = jnp.where(sticks, state.action, jnp.asarray(action, state.action.dtype))
        inner, transition = self.environment.step(state.inner, executed, step_key)
        return StickyActionsState(inner, executed, jnp.asarray(True)), transition

    def _inner(self, state: StickyActionsState) -> Any:
        return state.inner


class ActionRepeat(_Wrapped):
    """An environment that executes every action several times."""

    def __init__(self, environment: Environment, repeats: int):
        super().__init__(environment)
        if _has_mask(environment):
            raise ValueError(
                f"{self.spec.name}: action_repeat would execute actions that its {MASK} forbids by then; wrap it with "
                "another wrapper, or an environment that shows no mask."
            )
        limit = self.spec.max_episode_steps
        self.spec = self.spec._replace(max_episode_steps=-(-limit // repeats) if limit else None)
        self._repeats = repeats

    def step(self, state: Any, action: Any, key: jax.Array) -> tuple[Any, Transition]:
        def once(carry: Any, key: jax.Array) -> Any:
            state, total = carry
            stepped, transition = self.environment.step(state, action, key)
            # A state that is over stays: what a step makes of it counts for nothing.
            keep = lambda old, new: jnp.where(total.last, old, new)  # noqa: E731
            added = Transition(
                reward=keep(total.reward, total.reward + transition.reward),
                discount=keep(total.discount, transition.discount),
                last=total.last | transition.last,
                metrics={k: keep(x, x + transition.metrics[k]) for k, x in total.metrics.items()},
            )
            return (jax.tree.map(keep, state, stepped), added), None

        metrics = {name: jnp.float32(0) for name in self.spec.metrics}
        nothing = Transition(jnp.float32(0), jnp.float32(1), jnp.asarray(False), metrics)
        return jax.lax.scan(once, (state, nothing), jax.random.split(key, self._repeats))[0]


class Flatten(_Wrapped):
    """An environment whose observations are one array, float32 [n]."""

    def __init__(self, environment: Environment):
        super().__init__(environment)
        space = self.spec.observation_space
        if _has_mask(environment):
            raise ValueError(
                f"{self.spec.name}: flatten would make its {MASK} numbers to see; agents take the Dict as it is, and "
                "pick(name) shows one member and the mask."
            )
        low, high = (np.concatenate(bounds) for bounds in zip(*_bounds(space)))
        self.spec = self.spec._replace(observation_space=spaces.Box(low, high, low.shape))

    def observe(self, state: Any) -> jax.Array:
        """float32 [n]."""
        return jnp.concatenate(_flat(self.environment.spec.observation_space, self.environment.observe(state)))


def _bounds(space: spaces.Space) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the bounds of each flat part of an observation: pairs of float64 [n]."""
    if isinstance(space, spaces.Dict):
        return [bounds for _, item in space.items for bounds in _bounds(item)]
    if isinstance(space, spaces.Box):
        bounds = np.asarray(space.low, float), np.asarray(space.high, float)
        return [tuple(np.broadcast_to(bound, space.shape).ravel() for bound in bounds)]  # type: ignore[list-item]
    total = int(np.sum(space.num_values))
    return [(np.zeros(total), np.ones(total))]


def _flat(space: spaces.Space, value: Any) -> list[jax.Array]:
    """Returns the flat parts of an observation, float32 [n] each."""
    if isinstance(space, spaces.Dict):
        return [part for name, item in space.items for part in _flat(item, value[name])]
    if isinstance(space, spaces.Box):
        return [value.astype(jnp.float32).reshape(-1)]
    counts = space.num_values if isinstance(space, spaces.MultiDiscrete) else (space.num_values,)
    choices = value.reshape(-1)
    return [jax.nn.one_hot(choices[i], n, dtype=jnp.float32) for i, n in enumerate(counts)]


class Pick(_Wrapped):
    """An environment that shows one member of its observations, and the mask of actions if it has one."""

    def __init__(self, environment: Environment, name: str):
        super().__init__(environment)
        space = self.spec.observation_space
        if not isinstance(space, spaces.Dict):
            raise ValueError(f"pick({name!r}): observations of {self.spec.name} are {space}, not a Dict.")
        members = dict(space.items)
        if name not in members:
            raise ValueError(f"pick({name!r}): {self.spec.name} does not show it; {configs.suggest(name, members)}")
        self._name, self._masked = name, MASK in members and name != MASK
        shown = spaces.Dict({each: members[each] for each in (name, MASK)}) if self._masked else members[name]
        self.spec = self.spec._replace(observation_space=shown)

    def observe(self, state: Any) -> Any:
        """The member, or with a mask a dict of the two."""
        observation = self.environment.observe(state)
        return {each: observation[each] for each in (self._name, MASK)} if self._masked else observation[self._name]


class Hide(_Wrapped):
    """An environment that does not show some elements of its observations."""

    def __init__(self, environment: Environment, indices: tuple[int, ...]):
        super().__init__(environment)
        space = self.spec.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ValueError(
                f"hide({list(indices)}): observations of {self.spec.name} are {space}, not a Box [n]; flatten() makes "
                "them one."
            )
        n = space.shape[0]
        self._shown = np.asarray([i for i in range(n) if i not in indices], np.int32)
        if max(indices) >= n or not len(self._shown):
            raise ValueError(
                f"hide({list(indices)}): observations of {self.spec.name} have {n} elements, from 0; hide some of them."
            )
        low, high = (np.broadcast_to(bound, space.shape)[self._shown] for bound in (space.low, space.high))
        shown = spaces.Box(low, high, low.shape, space.dtype)
        self.spec = self.spec._replace(observation_space=shown)

    def observe(self, state: Any) -> jax.Array:
        """The elements that are shown."""
        return self.environment.observe(state)[self._shown]


class RandomiseState(NamedTuple):
    """The state inside and the parameters of this episode.

    Attributes:
      inner: the state of the environment inside.
      parameters: a tree of arrays.
    """

    inner: Any
    parameters: Any


class Randomise(_Wrapped):
    """An environment with other parameters in every episode."""

    def __init__(
        self, environment: Environment, sample: Callable[[Any], Any], apply: Callable[[Any, Any], Environment]
    ):
        super().__init__(environment)
        self._sample, self._apply = sample, apply

    def reset(self, key: jax.Array) -> RandomiseState:
        sample_key, reset_key = jax.random.split(key)
        parameters = jax.tree.map(jnp.asarray, self._sample(sample_key))
        return RandomiseState(self._apply(self.environment, parameters).reset(reset_key), parameters)

    def step(self, state: RandomiseState, action: Any, key: jax.Array) -> tuple[RandomiseState, Transition]:
        inner, transition = self._apply(self.environment, state.parameters).step(state.inner, action, key)
        return RandomiseState(inner, state.parameters), transition

    def observe(self, state: RandomiseState) -> Any:
        return self._apply(self.environment, state.parameters).observe(state.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "render" and hasattr(self.environment, "render"):
            return lambda state: self._apply(self.environment, state.parameters).render(state.inner)  # type: ignore[attr-defined]
        return super().__getattr__(name)
