"""Gymnasium's environments (https://gymnasium.farama.org), registered or the user's own, as host environments."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import multiprocessing.resource_tracker
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np

from podracer import configs
from podracer.environments import (
    gate,
    gymnasium_check,
    gymnasium_processes,
    gymnasium_state,
    gymnasium_turns,
    host_masks,
)
from podracer.environments.gymnasium_lane import lane
from podracer.environments.gymnasium_spaces import action_space, actions_for, observation_space, outside
from podracer.system.children import interrupts_blocked
from podracer.system.console import note
from podracer.types import EnvSpec, HostEnvironment, HostStep, check_metric_names


@dataclasses.dataclass(frozen=True)
class GymnasiumOptions:
    """Options of every Gymnasium environment.

    Attributes:
      vectorization: "sync" steps lanes in turn in one thread; "async" gives every lane a process.
      max_episode_steps: the time limit; the environment's own if None.
      settings: further arguments of the environment as `name=value`.
      metrics: keys of `info` that hold numbers or truth values: each is summed over an episode, 0 where it is missing,
        and logged as `episode/<key>`.
      mask: the place of a mask of actions: "auto" takes an `action_mask` in a `Dict` of observations, or a method
        `action_masks()`; "info" takes `info["action_mask"]` where neither is; "joint" and "heads" are as for EnvPool;
        "none" hides it.
    """

    vectorization: Literal["sync", "async"] = "sync"
    max_episode_steps: int | None = configs.field(None, low=1)
    settings: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    mask: host_masks.Shape | Literal["info"] = "auto"

    def __post_init__(self):
        configs.check(self)
        check_metric_names(self.metrics, "GymnasiumOptions.metrics")


def tasks() -> list[str]:
    """Returns all registered IDs."""
    return list(gymnasium.registry)


Source = str | gymnasium.Env | Callable[..., gymnasium.Env]
"""An ID of Gymnasium's registry, also as `module:ID`; an environment, which every lane copies; or a class or function
that makes one."""


class GymnasiumEnvironments:
    """An environment of Gymnasium (see `podracer.types.HostEnvironments`).

    Args:
      source: the environment.
      options: its options.

    Raises:
      ValueError: if Gymnasium cannot make it, a space is not supported, a wrapper keeps running statistics, or lanes
        in processes cannot begin.
      TypeError: for an environment that cannot be copied, or does not keep Gymnasium's interface, saying where and what
        was expected.
    """

    def __init__(self, source: Source, options: GymnasiumOptions = GymnasiumOptions()):
        self._source, self._options = source, options
        self._settings = dict(configs.assignment(setting) for setting in options.settings)
        if isinstance(source, gymnasium.Env) and self._settings:
            raise ValueError(f"settings={options.settings!r}: {source} is made already; set them on it instead.")
        if options.vectorization == "async":
            gymnasium_processes.require_guard()
        self._has_warned, self._turns = False, gymnasium_turns.Turns()
        single = self._one()
        name = f"gymnasium:{source}" if isinstance(source, str) else type(single.unwrapped).__name__
        try:
            gymnasium_check.check_spaces(single)
            gymnasium_state.check_statistics(single, name)
            observed, taken = observation_space(single.observation_space, name), action_space(single.action_space, name)
            shape = "auto" if options.mask == "info" else options.mask
            self._fitted = host_masks.fit(observed, taken, name, shape)
            self.spec = EnvSpec(
                name,
                self._fitted.observation_space,
                self._fitted.action_space,
                _time_limit(single),
                options.metrics,
            )
            gymnasium_check.check_play(single)
        finally:
            single.close()

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> HostEnvironment:
        """Starts a vector environment; one for evaluation replaces training's for a while if only one can exist."""
        vector = {"sync": gymnasium.vector.SyncVectorEnv, "async": gymnasium.vector.AsyncVectorEnv}
        one = functools.partial(lane, self._one) if self._options.vectorization == "sync" else self._lane
        make = functools.partial(self._running, vector[self._options.vectorization], one, num_lanes)
        if evaluation:
            return self._turns.evaluate(functools.partial(make, seed))
        return self._turns.train(make, num_lanes, seed)

    def render(self, seed: int) -> GymnasiumEnvironment:
        """Makes one lane that has `frame()`.

        Raises:
          ValueError: for an environment of one's own that knows no `render_mode` "rgb_array".
        """
        one = functools.partial(self._one, render_mode="rgb_array") if self._takes_render_mode() else self._one
        environment = self._running(gymnasium.vector.SyncVectorEnv, functools.partial(lane, one), 1, seed)
        if environment.render_mode != "rgb_array":
            environment.close()
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
        # No copy of the observations, because `GymnasiumEnvironment.recv` copies them.
        # By default processes are forks of this one, which has threads: JAX's, and others that may hold a lock.
        spawned: dict[str, Any] = {"context": "spawn"} if vector is gymnasium.vector.AsyncVectorEnv else {}
        mode = gymnasium.vector.AutoresetMode.NEXT_STEP
        if spawned:
            multiprocessing.resource_tracker.ensure_running()  # the first one would undo what is blocked
        made: list[gymnasium.Env] = []

        def make_one() -> gymnasium.Env:
            made.append(one())
            return made[-1]

        try:
            with interrupts_blocked():
                makers = [one if spawned else make_one] * num_lanes
                lanes = vector(makers, copy=False, autoreset_mode=mode, **spawned)
        except (EOFError, ConnectionError) as error:
            if not spawned:
                _close(made)
                raise
            script = getattr(sys.modules.get("__main__"), "__file__", "the script")
            raise RuntimeError(
                f"a lane's process ended as it began; {gymnasium_processes.GUARD.format(script)}"
            ) from error
        except (TypeError, pickle.PicklingError) as error:
            if not spawned or "pickle" not in str(error):
                _close(made)
                raise
            raise TypeError(
                f"{self.spec.name} cannot be sent to the process of a lane ({error}); use a class or function that "
                'makes all of it there, or vectorization="sync".'
            ) from error
        except BaseException:
            _close(made)
            raise
        if len({id(lane.unwrapped) for lane in getattr(lanes, "envs", ())} or range(num_lanes)) < num_lanes:
            lanes.close()
            raise ValueError(f"{self._source} returned the same {self.spec.name} twice; every lane needs its own.")
        return GymnasiumEnvironment(lanes, self.spec, num_lanes, seed, self._fitted, self._warn_once)

    def _warn_once(self, lanes: Any, observation: Any, info: Mapping[str, Any]) -> None:
        """Warns once of a mask of actions that agents do not see, and of lanes that all play the same episode."""
        if self._has_warned:
            return
        self._has_warned = True
        local = isinstance(lanes, gymnasium.vector.SyncVectorEnv)
        lane = lanes.envs[0] if local else None
        mask = gymnasium_state.unseen_mask(lanes.single_observation_space, info, lane)
        if mask and self._options.mask != "none":
            note(
                f"{self.spec.name} has {mask}, which agents do not follow: they take action_mask in a Dict of "
                'observations, a method action_masks(), or with mask="info" info["action_mask"].'
            )
        states = [gymnasium_state.generators(lane) for lane in lanes.envs] if local else lanes.call("generators")
        if name := gymnasium_state.shared_generator(states, observation):
            note(
                f"all {len(states)} lanes of {self.spec.name} begin alike, for {name} is the same in each, whatever "
                "the seed of reset: they play one episode. Use self.np_random, which super().reset(seed=seed) seeds."
            )

    def _lane(self) -> gymnasium.Env:
        """Makes one environment, for a process of its own."""
        return gymnasium_processes.Lane(lane(self._one))

    def _one(self, **more: Any) -> gymnasium.Env:
        """Makes one environment, unbatched, which shows the mask of actions that it has."""
        made = self._made(**more)
        return made if self._options.mask == "none" else host_masks.shown(made, self._options.mask == "info")

    def _made(self, **more: Any) -> gymnasium.Env:
        """Makes one environment, as it is."""
        source, limit = self._source, self._options.max_episode_steps
        if isinstance(source, str):
            arguments: dict[str, Any] = self._settings | ({"max_episode_steps": limit} if limit else {}) | more
            try:
                return gymnasium.make(source, **arguments)
            except (gymnasium.error.Error, ImportError, TypeError) as error:
                raise ValueError(f"Gymnasium cannot make {source!r}: {str(error).rstrip('.')}.") from None
        made = _copy(source) if isinstance(source, gymnasium.Env) else source(**self._settings, **more)
        return gymnasium.wrappers.TimeLimit(made, limit) if limit else made


def _close(environments: Sequence[gymnasium.Env]) -> None:
    """Closes the lanes made so far when another one cannot be made."""
    for environment in environments:
        with contextlib.suppress(Exception):
            environment.close()


def _copy(source: gymnasium.Env) -> gymnasium.Env:
    try:
        return copy.deepcopy(source)
    except Exception as error:
        name = type(source.unwrapped).__name__
        raise TypeError(
            f"{name} cannot be copied ({type(error).__name__}: {error}), and every lane is a copy; give the class, or "
            "a function that makes one."
        ) from error


def _time_limit(environment: gymnasium.Env) -> int | None:
    """Returns the number of steps after which an environment truncates, by its registration or a wrapper; else None."""
    if environment.spec is not None and environment.spec.max_episode_steps:
        return environment.spec.max_episode_steps
    while isinstance(environment, gymnasium.Wrapper):
        if isinstance(environment, gymnasium.wrappers.TimeLimit):
            return environment._max_episode_steps
        environment = environment.env
    return None


class GymnasiumEnvironment:
    """A running vector environment (see `podracer.types.HostEnvironment`)."""

    def __init__(
        self,
        vector: Any,
        spec: EnvSpec,
        num_lanes: int,
        seed: int,
        fitted: host_masks.Fitted,
        warn_once: Callable[[Any, Any, Any], None],
    ):
        self._vector, self.spec, self._seed, self._warn_once = vector, spec, seed, warn_once
        self._fitted = fitted
        self._lanes = np.arange(num_lanes, dtype=np.int32)
        self._last = np.zeros(num_lanes, bool)
        self._given = actions_for(vector.single_action_space, fitted.given)
        self._actions: np.ndarray | None = None
        self._metrics = np.zeros((len(spec.metrics), num_lanes))

    def recv(self) -> tuple[np.ndarray, HostStep]:
        if self._actions is None:
            observation, info = self._vector.reset(seed=[self._seed + int(i) for i in self._lanes])
            with contextlib.suppress(Exception):  # it inspects foreign objects, only for a hint
                self._warn_once(self._vector, observation, info)
            reward, terminated, truncated = np.zeros(len(self._lanes), np.float32), self._last, self._last
            first = ~self._last
            if found := outside(observation, self._vector.single_observation_space):
                raise ValueError(
                    f"{self.spec.name}.reset returned {found}; widen the observation_space, or clip what it returns."
                )
        else:
            observation, reward, terminated, truncated, info = self._vector.step(self._actions)
            first = self._last
        self._last = terminated | truncated
        metrics = self._measure(info, first) if self.spec.metrics else None
        # The vector environment writes its next observations into the same arrays.
        shown = self._fitted.observation(observation)
        observation = gate.to_agent(shown, self.spec.observation_space, first.shape, copy=True)
        return self._lanes, HostStep.of(observation, reward, terminated, first, self._last, metrics=metrics)

    def _measure(self, info: dict[str, Any], first: np.ndarray) -> np.ndarray:
        """Returns the metrics [M, B] of this episode so far."""
        now = np.stack([_numbers(info, name, len(first)) for name in self.spec.metrics])
        self._metrics = np.where(first, 0.0, self._metrics + now)
        return self._metrics

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        self._actions = self._given(self._fitted.actions(actions))

    @property
    def render_mode(self) -> str | None:
        return self._vector.render_mode

    def frame(self) -> np.ndarray:
        """Returns lane 0 as a picture, uint8 [H, W, 3], if the environment was made by `render`."""
        try:
            return self._vector.render()[0]
        except gymnasium.error.Error as error:  # mostly a package that is missing, with how to install it
            raise ValueError(f"{self.spec.name} cannot be rendered: {str(error).rstrip('.')}.") from None
        except Exception as error:  # of a library that draws, which may be anything
            reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            hint = "; without a display, set MUJOCO_GL=egl (docs/environments.md)" if "mujoco" in sys.modules else ""
            raise ValueError(f"{self.spec.name} cannot be rendered: {type(error).__name__}: {reason}{hint}.") from error

    def close(self) -> None:
        self._vector.close()


def _numbers(info: dict[str, Any], name: str, num_lanes: int) -> np.ndarray:
    """Returns the lanes' values of a metric, float64 [B].

    Raises:
      ValueError: if one is no number.
    """
    if name not in info:
        return np.zeros(num_lanes)
    try:
        # A lane without the key has None in an array of objects, and 0 in one of numbers.
        return np.asarray([0.0 if value is None else float(value) for value in info[name]])
    except (TypeError, ValueError):
        raise ValueError(f"info[{name!r}] holds {info[name]!r}, which are no numbers; metrics need them.") from None
