"""Gymnasium's vector environments (https://gymnasium.farama.org), for what EnvPool lacks."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import gymnasium
import numpy as np

from podracer import config as configs
from podracer.environments.gymnasium_spaces import action_checker, action_space, convert, observation_space
from podracer.types import EnvSpec, HostStep


@dataclasses.dataclass(frozen=True)
class GymnasiumOptions:
    """Options of every Gymnasium environment.

    Attributes:
      vectorization: "sync" steps lanes in turn in one thread; "async" gives every lane a process.
      max_episode_steps: the time limit; the environment's own if None.
      settings: further arguments of the environment as `name=value`.
    """

    vectorization: Literal["sync", "async"] = "sync"
    max_episode_steps: int | None = configs.field(None, low=1)
    settings: tuple[str, ...] = ()

    def __post_init__(self):
        configs.check(self)


class GymnasiumEnvironments:
    """An environment of Gymnasium's registry (see `podracer.types.HostEnvironments`)."""

    def __init__(self, name: str, options: GymnasiumOptions):
        self._name, self._options = name, options
        try:
            self._limit = options.max_episode_steps or gymnasium.spec(name).max_episode_steps
            single = self._vector(1)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"Gymnasium cannot make {name!r}: {str(error).rstrip('.')}.") from None
        self.spec = EnvSpec(
            f"gymnasium:{name}",
            observation_space(single.single_observation_space, name),
            action_space(single.single_action_space, name),
            self._limit,
        )
        single.close()

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> GymnasiumEnvironment:
        """Starts a vector environment."""
        return GymnasiumEnvironment(self._vector(num_lanes), self.spec, num_lanes, seed)

    def render(self, seed: int) -> GymnasiumEnvironment:
        """One lane that has `frame()`."""
        return GymnasiumEnvironment(self._vector(1, render_mode="rgb_array"), self.spec, 1, seed)

    def _vector(self, num_lanes: int, **more: Any) -> Any:
        options = self._options
        settings = dict(configs.assignment(setting) for setting in options.settings)
        if options.max_episode_steps:
            settings["max_episode_steps"] = options.max_episode_steps
        vector_kwargs = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        return gymnasium.make_vec(
            self._name,
            num_envs=num_lanes,
            vectorization_mode=options.vectorization,
            vector_kwargs=vector_kwargs,
            **settings,
            **more,
        )


class GymnasiumEnvironment:
    """A running vector environment (see `podracer.types.HostEnvironment`)."""

    def __init__(self, vector: Any, spec: EnvSpec, num_lanes: int, seed: int):
        self._vector, self.spec, self._seed = vector, spec, seed
        self._lanes = np.arange(num_lanes, dtype=np.int32)
        self._last = np.zeros(num_lanes, bool)
        self._check = action_checker(spec.action_space)
        self._actions: np.ndarray | None = None

    def recv(self) -> tuple[np.ndarray, HostStep]:
        if self._actions is None:
            observation, _ = self._vector.reset(seed=[self._seed + int(i) for i in self._lanes])
            reward, terminated, truncated = np.zeros(len(self._lanes), np.float32), self._last, self._last
            first = ~self._last
        else:
            observation, reward, terminated, truncated, _ = self._vector.step(self._actions)
            first = self._last
        self._last = terminated | truncated
        return self._lanes, HostStep.of(self._convert(observation), reward, terminated, first, self._last)

    def _convert(self, observation: Any) -> Any:
        # The vector environment writes its next observations into the same arrays.
        return convert(observation, self.spec.observation_space, copy=True)

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        self._actions = self._check(actions)

    def frame(self) -> np.ndarray:
        """Lane 0 as a picture, uint8 [H, W, 3], where the environments were made for it."""
        try:
            return self._vector.render()[0]
        except gymnasium.error.Error as error:  # mostly a package that is missing, with how to install it
            raise ValueError(f"{self.spec.name} cannot be rendered: {str(error).rstrip('.')}.") from None

    def close(self) -> None:
        self._vector.close()
