"""One lane of a vector environment of Gymnasium: what its environment returns has the types that arrays need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from podracer.environments import gymnasium_check

NUMBERS = (float, int, np.number, np.bool_)


def lane(make: Callable[[], gymnasium.Env]) -> gymnasium.Env:
    """An environment as a lane."""
    return _Lane(make())


class _Lane(gymnasium.Wrapper):
    """Rewards and ends in arrays of one number are numbers, and what has another shape than before is refused by name.

    Raises:
      InterfaceError: for a result that the vector environment could not hold.
    """

    def __init__(self, environment: gymnasium.Env):
        super().__init__(environment)
        self._space, self._name = environment.observation_space, type(environment.unwrapped).__name__

    @property
    def spec(self) -> Any:
        return self.env.spec

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = self.env.reset(seed=seed, options=options)
        if not (isinstance(result, tuple) and len(result) == 2 and _plain(result[0], self._space)):
            gymnasium_check.check_reset(result, self._space, self._name)
        return result

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        if not (len(result) == 5 and isinstance(result[1], NUMBERS) and _plain(result[0], self._space)):
            gymnasium_check.check_step(result, self._space, self._name)
        observation, reward, terminated, truncated, info = result
        return observation, _number(reward), _number(terminated), _number(truncated), info


def _plain(observation: Any, space: gymnasium.Space) -> bool:
    """Whether an observation has its space's shape, or arrays by name have, and needs no further look."""
    if isinstance(space, gymnasium.spaces.Dict):
        return isinstance(observation, Mapping) and all(
            key in observation and _plain(observation[key], item) for key, item in space.spaces.items()
        )
    return getattr(observation, "shape", ()) == space.shape


def _number(value: Any) -> Any:
    return value if isinstance(value, bool | float | int) else np.asarray(value).item()
