"""Any environment of this package as a `gymnasium.Env`, or lanes of it as a `gymnasium.vector.VectorEnv`.

For code that expects one of these (`pip install gymnasium`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.environments import autoreset
from podracer.types import Environment, TimeStep

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError as error:
    raise ImportError("envs_jax.gym needs gymnasium: pip install gymnasium") from error


class GymnasiumEnv(gymnasium.Env):
    """A pure-JAX environment with Gymnasium's interface.

    `terminated` is discount 0, `truncated` is a last step with discount 1. All chance comes from `np_random`, so the
    seeding rules are Gymnasium's. With an environment that can render, `render_mode` is "rgb_array".
    """

    def __init__(self, environment: Environment, seed: int | None = None):
        """Wraps `environment`; `seed` is that of the first episodes until `reset(seed=...)` gives another.

        Raises:
          ValueError: for a game for two.
        """
        self._actions, self._observations = _action_space(environment), environment.spec.observation_space
        self.action_space = _convert(self._actions)
        self.observation_space = _convert(self._observations)
        render = getattr(environment, "render", None)
        self.metadata = {"render_modes": ["rgb_array"] if render else [], "render_fps": 15}
        self.render_mode = "rgb_array" if render else None
        self._render = jax.jit(render) if render else None
        self._state: Any = None
        self._over = True

        # The key is made inside, from an integer: outside it would cost as much as the step itself.
        def reset(seed: jax.Array) -> Any:
            state = environment.reset(jax.random.key(seed))
            return state, environment.observe(state)

        def step(state: Any, action: Any, seed: jax.Array) -> Any:
            state, transition = environment.step(state, action, jax.random.key(seed))
            return state, environment.observe(state), transition

        self._reset, self._step = jax.jit(reset), jax.jit(step)
        if seed is not None:
            super().reset(seed=seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation of a new episode; `options` is ignored."""
        super().reset(seed=seed)
        self._state, observation = self._reset(self._draw())
        self._over = False
        return _to_numpy(self._observations, observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """(observation, reward, terminated, truncated, info) of one transition; `info` holds the metrics.

        Raises:
          gymnasium.error.ResetNeeded: before the first `reset`, and after an episode's end.
          ValueError: for a discrete `action` that is not in the action space, or a continuous one of another shape or
            that is not finite.
        """
        if self._over:
            raise gymnasium.error.ResetNeeded("call reset() before the first step and after an episode's end.")
        if isinstance(self._actions, spaces.Box):
            if np.shape(action) != self._actions.shape:
                raise ValueError(f"action has shape {np.shape(action)}; it must be {self._actions.shape}.")
            action = _finite(self._actions, action)
        elif not self._actions.contains(action):
            raise ValueError(f"action {action!r} is not in {self._actions}.")
        action = np.asarray(action, self._actions.dtype)
        self._state, observation, transition = self._step(self._state, action, self._draw())
        transition = jax.device_get(transition)
        info = {name: float(value) for name, value in transition.metrics.items()}
        terminated = bool(transition.discount == 0)
        self._over = bool(transition.last)
        observation = _to_numpy(self._observations, observation)
        return observation, float(transition.reward), terminated, self._over and not terminated, info

    def render(self) -> np.ndarray | None:
        """The current state, uint8 [H, W, 3], or None if the environment cannot render."""
        if self._render is None:
            return None
        if self._state is None:
            raise gymnasium.error.ResetNeeded("call reset() before render().")
        return np.array(self._render(self._state))

    def _draw(self) -> np.uint32:
        return np.uint32(self.np_random.integers(2**32))


class GymnasiumVectorEnv(VectorEnv):
    """Lanes of a pure-JAX environment with Gymnasium's interface for vectors of environments.

    After a row that ends an episode, the next step ignores the lane's action and returns the first row of its next
    episode, with reward 0 (`AutoresetMode.NEXT_STEP`). A step is one compiled call, and all results are NumPy arrays of
    the caller's own. All chance comes from `np_random`, so the seeding rules are Gymnasium's.
    """

    def __init__(self, environment: Environment, num_envs: int, seed: int | None = None):
        """Makes lanes.

        Args:
          environment: the environment.
          num_envs: number of lanes.
          seed: seed of the first episodes until `reset(seed=...)` gives another.

        Raises:
          ValueError: for a game for two, or fewer lanes than one.
        """
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs}: must be at least 1.")
        self._actions, self._observations = _action_space(environment), environment.spec.observation_space
        self.num_envs = num_envs
        self.single_action_space = _convert(self._actions)
        self.single_observation_space = _convert(self._observations)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        render = getattr(environment, "render", None)
        modes = ["rgb_array"] if render else []
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": modes, "render_fps": 15}
        self.render_mode = "rgb_array" if render else None
        self._render = jax.jit(jax.vmap(render)) if render else None
        self._everywhere = np.ones(num_envs, bool)
        self._lanes: Any = None
        reset, step = _vector_functions(environment, num_envs)
        self._reset, self._step = jax.jit(reset), jax.jit(step, donate_argnums=0)
        if seed is not None:
            super().reset(seed=seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observations of new episodes in all lanes, [B, ...]; `options` is ignored."""
        super().reset(seed=seed)
        self._lanes, observation = self._reset(np.uint32(self.np_random.integers(2**32)))
        return _to_numpy(self._observations, observation), {}

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """(observations, rewards, terminations, truncations, infos) of the next row of each lane.

        Args:
          actions: [B, ...]; ignored where the last row ended an episode.

        Returns:
          Arrays [B, ...]: rewards float32, ends bool. `infos` holds the metrics.

        Raises:
          gymnasium.error.ResetNeeded: before the first `reset`.
          ValueError: for actions of another shape, discrete ones that are not in the action space, or continuous ones
            that are not finite.
        """
        if self._lanes is None:
            raise gymnasium.error.ResetNeeded("call reset() before the first step.")
        self._lanes, row = self._step(self._lanes, self._checked(actions))
        observation, row = _to_numpy(self._observations, row[0]), jax.tree.map(np.array, row[1:])
        reward, terminated, truncated, metrics = row
        infos = dict(metrics) | {f"_{name}": self._everywhere.copy() for name in metrics}
        return observation, reward, terminated, truncated, infos

    def render(self) -> tuple[np.ndarray, ...] | None:
        """The current state of each lane, uint8 [H, W, 3], or None if the environment cannot render."""
        if self._render is None:
            return None
        if self._lanes is None:
            raise gymnasium.error.ResetNeeded("call reset() before render().")
        return tuple(np.array(self._render(self._lanes[0])))

    def _checked(self, actions: Any) -> np.ndarray:
        """Converts actions to the dtype of their space, and refuses those that no lane could take."""
        actions, shape = np.asarray(actions), (self.num_envs, *self._actions.shape)
        if actions.shape != shape:
            raise ValueError(f"actions have shape {actions.shape}; give one for each lane, {shape}.")
        if isinstance(self._actions, spaces.Box):
            return _finite(self._actions, actions)
        if actions.dtype.kind not in "iu" or (actions < 0).any() or (actions >= self._actions.num_values).any():
            raise ValueError(f"actions {actions!r} are not in {self._actions}.")
        return actions.astype(np.int32)


def _finite(space: spaces.Box, actions: Any) -> np.ndarray:
    """Converts actions to the dtype of a Box, which they may leave: what then happens is the environment's rule."""
    with np.errstate(over="ignore"):
        converted = np.asarray(actions).astype(space.dtype)
    if not np.isfinite(converted).all():
        raise ValueError(f"action {actions!r} is not finite.")
    return converted


def _vector_functions(environment: Environment, num_envs: int) -> tuple[Any, Any]:
    """Makes `seed -> (lanes, observations)` and `(lanes, actions) -> (lanes, row)`.

    Lanes are environment states [B], bool [B] that is True where an episode is over, and a key.
    """
    zero, metric_names = jnp.zeros(num_envs), environment.spec.metrics

    def reset(seed: jax.Array) -> Any:
        key, reset_key = jax.random.split(jax.random.key(seed))
        states = jax.vmap(environment.reset)(jax.random.split(reset_key, num_envs))
        return (states, jnp.zeros(num_envs, bool), key), jax.vmap(environment.observe)(states)

    def step(lanes: Any, actions: jax.Array) -> Any:
        states, over, key = lanes
        key, step_key, reset_key = jax.random.split(key, 3)
        # Without sums of earlier rows, the metrics of the next one are those of its transition.
        before = TimeStep((), zero, zero, ~over, over)
        current = autoreset.Lane(states, before, zero, zero, dict.fromkeys(metric_names, zero))
        keys, reset_keys = jax.random.split(step_key, num_envs), jax.random.split(reset_key, num_envs)
        after = autoreset.step_lanes(environment, current, actions, keys, reset_keys)
        row = after.timestep
        terminated = row.last & (row.discount == 0)
        ends = terminated, row.last & ~terminated
        return (after.env, row.last, key), (row.observation, row.reward, *ends, after.metrics)

    return reset, step


def _action_space(environment: Environment) -> spaces.Discrete | spaces.MultiDiscrete | spaces.Box:
    """Returns the action space of an environment for one player.

    Raises:
      ValueError: for a game for two.
    """
    if environment.spec.num_players != 1:
        raise ValueError(
            f"{environment.spec.name} is a game for two, and Gymnasium cannot say whose turn it is; use it as it is."
        )
    assert not isinstance(environment.spec.action_space, spaces.Dict), "EnvSpec has no dictionaries of actions"
    return environment.spec.action_space


def _convert(space: spaces.Space) -> gymnasium.Space:
    """Converts a space to Gymnasium's."""
    match space:
        case spaces.Discrete():
            return gymnasium.spaces.Discrete(space.num_values)
        case spaces.MultiDiscrete():
            return gymnasium.spaces.MultiDiscrete(list(space.num_values), dtype=np.int32)
        case spaces.Box():
            low, high = (np.asarray(x, space.dtype) if isinstance(x, tuple) else x for x in (space.low, space.high))
            return gymnasium.spaces.Box(low, high, space.shape, space.dtype.type)
        case spaces.Dict():
            return gymnasium.spaces.Dict({name: _convert(item) for name, item in space.items})


def _to_numpy(space: spaces.Space, observation: Any) -> Any:
    """Copies an observation to NumPy, because a view of a JAX array is read-only; a choice is a number, np.int64."""
    if isinstance(space, spaces.Dict):
        return {name: _to_numpy(item, observation[name]) for name, item in space.items}
    return np.int64(observation) if isinstance(space, spaces.Discrete) else np.array(observation)
