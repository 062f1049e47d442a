"""Gymnasium's environments (https://gymnasium.farama.org), registered or the user's own, as host environments."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import multiprocessing.resource_tracker
from collections.abc import Callable
from typing import Any, Literal

import gymnasium
import numpy as np

from podracer import config as configs
from podracer.environments import gymnasium_check
from podracer.environments.gymnasium_spaces import action_checker, action_space, convert, observation_space
from podracer.run.children import interrupts_blocked
from podracer.types import EnvSpec, HostStep, check_metric_names


@dataclasses.dataclass(frozen=True)
class GymnasiumOptions:
    """Options of every Gymnasium environment.

    Attributes:
      vectorization: "sync" steps lanes in turn in one thread; "async" gives every lane a process.
      max_episode_steps: the time limit; the environment's own if None.
      settings: further arguments of the environment as `name=value`.
      metrics: keys of `info` that hold numbers or truth values: each is summed over an episode, 0 where it is missing,
        and logged as `episode/<key>`.
    """

    vectorization: Literal["sync", "async"] = "sync"
    max_episode_steps: int | None = configs.field(None, low=1)
    settings: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    def __post_init__(self):
        configs.check(self)
        check_metric_names(self.metrics, "GymnasiumOptions.metrics")


def tasks() -> list[str]:
    """All IDs that are registered."""
    return list(gymnasium.registry)


Source = str | gymnasium.Env | Callable[..., gymnasium.Env]
"""An ID of Gymnasium's registry, also as `module:ID`; an environment, of which every lane is a copy; or a class or
function that makes one."""


class GymnasiumEnvironments:
    """An environment of Gymnasium (see `podracer.types.HostEnvironments`).

    Args:
      source: where it comes from.
      options: what to change.

    Raises:
      ValueError: where Gymnasium cannot make it, or a space is not supported.
      TypeError: for an environment that does not keep Gymnasium's interface, saying where and what was expected.
    """

    def __init__(self, source: Source, options: GymnasiumOptions = GymnasiumOptions()):
        self._source, self._options = source, options
        self._settings = dict(configs.assignment(setting) for setting in options.settings)
        if isinstance(source, gymnasium.Env) and self._settings:
            raise ValueError(f"settings={options.settings!r}: {source} is made already; set them on it instead.")
        single = self._one()
        name = f"gymnasium:{source}" if isinstance(source, str) else type(single.unwrapped).__name__
        try:
            gymnasium_check.check_spaces(single)
            self.spec = EnvSpec(
                name,
                observation_space(single.observation_space, name),
                action_space(single.action_space, name),
                _time_limit(single),
                options.metrics,
            )
            gymnasium_check.check_play(single)
        finally:
            single.close()

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> GymnasiumEnvironment:
        """Starts a vector environment."""
        vector = {"sync": gymnasium.vector.SyncVectorEnv, "async": gymnasium.vector.AsyncVectorEnv}
        return self._running(vector[self._options.vectorization], self._one, num_lanes, seed)

    def render(self, seed: int) -> GymnasiumEnvironment:
        """One lane that has `frame()`.

        Raises:
          ValueError: for an environment of one's own that knows no `render_mode` "rgb_array".
        """
        one = functools.partial(self._one, render_mode="rgb_array") if self._takes_render_mode() else self._one
        environment = self._running(gymnasium.vector.SyncVectorEnv, one, 1, seed)
        if environment.render_mode != "rgb_array":
            raise ValueError(f"{self.spec.name} cannot be rendered: let its __init__ take render_mode='rgb_array'.")
        return environment

    def _takes_render_mode(self) -> bool:
        if isinstance(self._source, str):
            return True
        if isinstance(self._source, gymnasium.Env):
            return False
        parameters = inspect.signature(self._source).parameters
        return "render_mode" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def _running(self, vector: Any, one: Callable[[], Any], num_lanes: int, seed: int) -> GymnasiumEnvironment:
        # Not a copy of what is copied anyway (`GymnasiumEnvironment.recv`).
        # By default processes are forks of this one, which has threads: JAX's, and others that may hold a lock.
        spawned: dict[str, Any] = {"context": "spawn"} if vector is gymnasium.vector.AsyncVectorEnv else {}
        mode = gymnasium.vector.AutoresetMode.NEXT_STEP
        if spawned:
            multiprocessing.resource_tracker.ensure_running()  # the first one would undo what is blocked
        with interrupts_blocked():
            lanes = vector([one] * num_lanes, copy=False, autoreset_mode=mode, **spawned)
        if len({id(lane) for lane in getattr(lanes, "envs", range(num_lanes))}) < num_lanes:
            raise ValueError(f"{self._source} returned the same {self.spec.name} twice; every lane needs its own.")
        return GymnasiumEnvironment(lanes, self.spec, num_lanes, seed)

    def _one(self, **more: Any) -> gymnasium.Env:
        """One environment, unbatched."""
        source, limit = self._source, self._options.max_episode_steps
        if isinstance(source, str):
            arguments: dict[str, Any] = self._settings | ({"max_episode_steps": limit} if limit else {}) | more
            try:
                return gymnasium.make(source, **arguments)
            except (gymnasium.error.Error, ImportError, TypeError) as error:
                raise ValueError(f"Gymnasium cannot make {source!r}: {str(error).rstrip('.')}.") from None
        made = copy.deepcopy(source) if isinstance(source, gymnasium.Env) else source(**self._settings, **more)
        return gymnasium.wrappers.TimeLimit(made, limit) if limit else made


def _time_limit(environment: gymnasium.Env) -> int | None:
    """After how many steps an environment truncates, where a wrapper or its registration says so."""
    if environment.spec is not None and environment.spec.max_episode_steps:
        return environment.spec.max_episode_steps
    while isinstance(environment, gymnasium.Wrapper):
        if isinstance(environment, gymnasium.wrappers.TimeLimit):
            return environment._max_episode_steps
        environment = environment.env
    return None


class GymnasiumEnvironment:
    """A running vector environment (see `podracer.types.HostEnvironment`)."""

    def __init__(self, vector: Any, spec: EnvSpec, num_lanes: int, seed: int):
        self._vector, self.spec, self._seed = vector, spec, seed
        self._lanes = np.arange(num_lanes, dtype=np.int32)
        self._last = np.zeros(num_lanes, bool)
        self._check = action_checker(spec.action_space)
        self._actions: np.ndarray | None = None
        self._metrics = np.zeros((len(spec.metrics), num_lanes))

    def recv(self) -> tuple[np.ndarray, HostStep]:
        if self._actions is None:
            observation, info = self._vector.reset(seed=[self._seed + int(i) for i in self._lanes])
            reward, terminated, truncated = np.zeros(len(self._lanes), np.float32), self._last, self._last
            first = ~self._last
        else:
            observation, reward, terminated, truncated, info = self._vector.step(self._actions)
            first = self._last
        self._last = terminated | truncated
        metrics = self._measure(info, first) if self.spec.metrics else None
        observation = self._convert(observation)
        return self._lanes, HostStep.of(observation, reward, terminated, first, self._last, metrics=metrics)

    def _measure(self, info: dict[str, Any], first: np.ndarray) -> np.ndarray:
        """The metrics [M, B] of this episode so far."""
        now = np.stack([_numbers(info, name, len(first)) for name in self.spec.metrics])
        self._metrics = np.where(first, 0.0, self._metrics + now)
        return self._metrics

    def _convert(self, observation: Any) -> Any:
        # The vector environment writes its next observations into the same arrays.
        return convert(observation, self.spec.observation_space, copy=True)

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        self._actions = self._check(actions)

    @property
    def render_mode(self) -> str | None:
        return self._vector.render_mode

    def frame(self) -> np.ndarray:
        """Lane 0 as a picture, uint8 [H, W, 3], where the environments were made for it."""
        try:
            return self._vector.render()[0]
        except gymnasium.error.Error as error:  # mostly a package that is missing, with how to install it
            raise ValueError(f"{self.spec.name} cannot be rendered: {str(error).rstrip('.')}.") from None

    def close(self) -> None:
        self._vector.close()


def _numbers(info: dict[str, Any], name: str, num_lanes: int) -> np.ndarray:
    """What the lanes [B] say of a metric.

    Raises:
      ValueError: where it is no number.
    """
    if name not in info:
        return np.zeros(num_lanes)
    try:
        # Lanes that say nothing have None among objects, and 0 among numbers.
        return np.asarray([0.0 if value is None else float(value) for value in info[name]])
    except (TypeError, ValueError):
        raise ValueError(f"info[{name!r}] holds {info[name]!r}, which are no numbers; metrics need them.") from None
