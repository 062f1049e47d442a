"""One lane of a vector environment of Gymnasium, whose results have the types that arrays need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from podracer.environments import gymnasium_check

NUMBERS = frozenset({bool, int, float, np.bool_, np.float32, np.float64, np.int64})
"""Types of nearly all rewards and ends, which need no further look."""


def lane(make: Callable[[], gymnasium.Env]) -> gymnasium.Env:
    """Wraps an environment as a lane."""
    return _Lane(make())


class _Lane(gymnasium.Wrapper):
    """Turns rewards and ends in arrays of one number into numbers, and refuses observations of other shapes by name.

    Raises:
      InterfaceError: for a result that the vector environment could not hold.
    """

    def __init__(self, environment: gymnasium.Env):
        super().__init__(environment)
        self._space, self._name = environment.observation_space, type(environment.unwrapped).__name__
        self._fits = _fits_space(self._space)

    @property
    def spec(self) -> Any:
        return self.env.spec

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = self.env.reset(seed=seed, options=options)
        if not (isinstance(result, tuple) and len(result) == 2 and self._fits(result[0])):
            gymnasium_check.check_reset(result, self._space, self._name)
        return result

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        if (
            isinstance(result, tuple | list)
            and len(result) == 5
            and NUMBERS.issuperset(map(type, result[1:4]))
            and self._fits(result[0])
        ):
            return result
        gymnasium_check.check_step(result, self._space, self._name)
        observation, *numbers, info = result
        return observation, *(np.asarray(number).item() for number in numbers), info


def _fits_space(space: gymnasium.Space) -> Callable[[Any], bool]:
    """Makes a quick test: an observation, or each array of a `Dict`, has the shape of its space."""
    if isinstance(space, gymnasium.spaces.Dict):
        items = {key: _fits_space(item) for key, item in space.spaces.items()}
        return lambda value: (
            type(value) is dict and all(key in value and fits(value[key]) for key, fits in items.items())
        )
    shape = space.shape
    return lambda value: getattr(value, "shape", ()) == shape
