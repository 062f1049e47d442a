"""Any environment of this package as a `gymnasium.Env`, for code that expects one (`pip install gymnasium`)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from podracer import spaces
from podracer.types import Environment

try:
    import gymnasium
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
        if environment.spec.num_players != 1:
            raise ValueError(
                f"{environment.spec.name} is a game for two, and Gymnasium cannot say whose turn it is; use "
                "it as it is."
            )
        assert not isinstance(environment.spec.action_space, spaces.Dict), "EnvSpec has no dictionaries of actions"
        self._actions, self._observations = environment.spec.action_space, environment.spec.observation_space
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
          ValueError: if a discrete `action` is not in the action space.
        """
        if self._over:
            raise gymnasium.error.ResetNeeded("call reset() before the first step and after an episode's end.")
        # Continuous actions may leave their box; what then happens is the environment's rule.
        if not isinstance(self._actions, spaces.Box) and not self._actions.contains(action):
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
