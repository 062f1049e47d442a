"""EnvPool's environments (Weng et al. 2022, https://github.com/sail-sg/envpool): batches stepped by C++ threads.

Pools are synchronous. EnvPool leaves some rules to its users: here the first row of an episode carries no reward, a
game over at the step limit is a termination, a time limit is a truncation also where a task reports it as its end,
float64 becomes float32, and actions are checked.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import difflib
import functools
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np

from podracer import configs, spaces
from podracer.environments import envpool_drawing, envpool_limits, gate, host_masks
from podracer.environments.gymnasium_spaces import action_space, actions_for, observation_space
from podracer.system import machine
from podracer.types import EnvSpec, HostStep

UNBOUNDED_STEPS = 2**31 - 1
"""EnvPool's value for "no limit"."""

MINIGRID_CODES = 11
"""Codes of objects in MiniGrid; colours and states have fewer."""


@dataclasses.dataclass(frozen=True)
class EnvPoolOptions:
    """Options of every EnvPool environment.

    Attributes:
      num_threads: C++ threads of a pool, at most one per lane; if None, one per core. Of more than four cores, two are
        left for Python and XLA, and actor threads share the others.
      max_episode_steps: the time limit; the environment's own if None.
      settings: further settings of the task as `name=value`, such as `force_speed=True`.
      mask: the use of an `action_mask` of several choices: "joint" makes one choice of all combinations, "heads" masks
        each choice by itself, "auto" goes by the mask's shape, and "none" hides the mask.
    """

    num_threads: int | None = configs.field(None, low=1)
    max_episode_steps: int | None = configs.field(None, low=1)
    settings: tuple[str, ...] = ()
    mask: host_masks.Shape = "auto"

    def __post_init__(self):
        configs.check(self)


@dataclasses.dataclass(frozen=True)
class AtariOptions(EnvPoolOptions):
    """Options of Atari; the defaults are common to most papers. Protocols by name are in `podracer.atari`.

    Attributes:
      frame_skip: times each action is repeated; the last two frames are max-pooled.
      noop_max: largest number of no-op frames that a game opens with, drawn uniformly from 1 on (EnvPool has no games
        without any); also after a lost life that ends an episode. A game that ends within them is not reported.
      episodic_life: True ends the agent's episode at a lost life (not in evaluation).
      fire_reset: True opens games that have the action FIRE (with `full_action_space` all games) with it: there is then
        one no-op less, 0 to `noop_max - 1`.
      full_action_space: True for all 18 actions, False for the game's minimal set.
      sticky_actions: probability in each frame that the previous action is repeated (Machado et al. 2018).
      evaluation_max_episode_steps: the time limit in evaluation; `max_episode_steps` if None.
      image_size: rows and columns of resized frames.
      grayscale: True for frames of one channel, False for red, green and blue.
      resize: "area" averages pixels (OpenCV's INTER_AREA), "bilinear" is its INTER_LINEAR.
    """

    frame_skip: int = configs.field(4, low=1)
    noop_max: int = configs.field(30, low=1)
    episodic_life: bool = False
    fire_reset: bool = False
    full_action_space: bool = False
    sticky_actions: float = configs.field(0.0, low=0.0, high=1.0)
    evaluation_max_episode_steps: int | None = configs.field(None, low=1)
    image_size: int = configs.field(84, low=16, high=210)
    grayscale: bool = True
    resize: Literal["area", "bilinear"] = "area"


def options(task: str) -> type:
    """The dataclass of a task's options.

    Raises:
      ValueError: if EnvPool is not installed, or does not know the task.
    """
    return AtariOptions if {"noop_max", "full_action_space"} <= set(_settings(task)) else EnvPoolOptions


def tasks() -> list[str]:
    """Returns the names of all tasks.

    Raises:
      ValueError: if EnvPool is not installed.
    """
    return _import().list_all_envs()


def _import() -> Any:
    try:
        import envpool
    except ImportError as error:
        raise ValueError(f"EnvPool cannot be used here ({error}); pip install envpool gymnasium.") from None
    return envpool


@functools.cache
def _settings(task: str) -> tuple[str, ...]:
    """The names of a task's settings."""
    envpool = _import()
    known = envpool.list_all_envs()
    if task not in known:
        raise ValueError(f"EnvPool has no environment {task!r}; {_suggest(task, known)}")
    try:
        return envpool.make_spec(task).config._fields
    except (ImportError, OSError) as error:  # a family whose system libraries are missing
        raise ValueError(f"EnvPool cannot load {task!r}: {str(error).rstrip('.')}.") from None


def _suggest(task: str, known: list[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    close = [by_lower[name] for name in difflib.get_close_matches(task.lower(), by_lower, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"it has {len(known)}, such as 'Pong-v5'."


def _observations(space: Any, task: str) -> spaces.Space:
    """Returns the observation space, with bounds that EnvPool does not tell."""
    found = observation_space(space, task)
    if not isinstance(found, spaces.Dict):
        return found
    items = dict(found.items)
    if set(items) == {"direction", "image", "mission"}:  # MiniGrid and BabyAI: object, colour and state of each cell
        items["image"] = dataclasses.replace(items["image"], high=MINIGRID_CODES - 1)
    return spaces.Dict(items)


class EnvPoolEnvironments:
    """A task of EnvPool (see `podracer.types.HostEnvironments`)."""

    def __init__(self, task: str, options: EnvPoolOptions):
        self._task, self._options, self._pools = task, options, 1
        self._known = _settings(task)
        pool = self._pool(1, 0, evaluation=True)
        if pool.config.get("max_num_players", 1) > 1:
            raise ValueError(
                f"{task} of EnvPool has several players, which is not supported; `pgx:` has games for two."
            )
        limits = [pool.spec.config.max_episode_steps]
        if isinstance(options, AtariOptions) and options.evaluation_max_episode_steps:
            limits.append(self._pool(1, 0, evaluation=False).spec.config.max_episode_steps)
        longest = None if max(limits) >= UNBOUNDED_STEPS else envpool_limits.longest_episode(task, max(limits))
        observed, taken = _observations(pool.observation_space, task), action_space(pool.action_space, task)
        self._fitted = host_masks.fit(observed, taken, task, options.mask)
        self.spec = EnvSpec(
            f"envpool:{task}",
            self._fitted.observation_space,
            self._fitted.action_space,
            longest,
            raw_scores=isinstance(options, AtariOptions),
        )

    def shared_by(self, actors: int) -> EnvPoolEnvironments:
        """Returns the same environments for several actors, whose pools share the cores."""
        shared = copy.copy(self)
        shared._pools = actors
        return shared

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> EnvPoolEnvironment:
        """Starts a pool."""
        return self._running(self._pool(num_lanes, seed, evaluation), num_lanes)

    def render(self, seed: int) -> EnvPoolEnvironment:
        """Makes a pool of one lane, for evaluation, that has `frame()`.

        Raises:
          ValueError: if its pictures cannot be drawn on this machine.
        """
        if envpool_drawing.is_mujoco(self._task):
            if problem := envpool_drawing.problem(self._task):
                raise ValueError(
                    f"{self.spec.name} cannot be rendered here ({problem}): EnvPool's MuJoCo needs the system's EGL, "
                    "such as apt's libegl1 (docs/environments.md)."
                )
            for library in envpool_drawing.opengl():
                ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        return self._running(self._pool(1, seed, True, render_mode="rgb_array"), 1)

    def _running(self, pool: Any, num_lanes: int) -> EnvPoolEnvironment:
        atari = isinstance(self._options, AtariOptions)
        limit = self.spec.max_episode_steps if envpool_limits.is_reported_as_end(self._task) else None
        return EnvPoolEnvironment(pool, self.spec, num_lanes, atari, self._fitted, limit)

    def _pool(self, num_lanes: int, seed: int, evaluation: bool, **more: Any) -> Any:
        options = self._options
        settings: dict[str, Any] = {"num_threads": options.num_threads or min(num_lanes, _cores(self._pools))}
        if options.max_episode_steps:
            settings["max_episode_steps"] = options.max_episode_steps
        if "stack_num" in self._known:
            settings["stack_num"] = 1  # frames are stacked on the device
        if "use_combined_action" in self._known:
            settings["use_combined_action"] = True  # VizDoom's own actions have no bounds
        if isinstance(options, AtariOptions):
            settings |= {
                "frame_skip": options.frame_skip,
                "noop_max": options.noop_max,
                "episodic_life": options.episodic_life and not evaluation,
                "use_fire_reset": options.fire_reset,
                "full_action_space": options.full_action_space,
                "repeat_action_probability": options.sticky_actions,
                "img_height": options.image_size,
                "img_width": options.image_size,
                "gray_scale": options.grayscale,
                "use_inter_area_resize": options.resize == "area",
            }
            if evaluation and options.evaluation_max_episode_steps:
                settings["max_episode_steps"] = options.evaluation_max_episode_steps
        for setting in options.settings:
            name, value = configs.assignment(setting)
            if name not in self._known:
                raise ValueError(
                    f"settings={setting!r}: {self._task} has no setting {name!r}; {configs.suggest(name, self._known)}"
                )
            settings[name] = value
        if "max_episode_steps" in settings:
            envpool_limits.check_adjustable(self._task)
        make = _import().make
        return make(self._task, env_type="gymnasium", num_envs=num_lanes, seed=seed, **settings, **more)


def _cores(pools: int) -> int:
    """Returns the threads of each of several pools, on the cores that this process may use."""
    cores = machine.num_cores()
    # On few cores, all that can run should: on two, threads for both are fastest, also for two pools.
    return cores if cores <= 4 else max(1, (cores - 2) // pools)


class _Rows(NamedTuple):
    """The rows of a pool, [B].

    Attributes:
      observation: an array, or arrays by name.
      reward: float32.
      done: bool; terminated or truncated.
      truncated: bool.
      info: arrays by name.
    """

    observation: Any
    reward: np.ndarray
    done: np.ndarray
    truncated: np.ndarray
    info: dict[str, np.ndarray]


class _Pool:
    """A pool with EnvPool's interface of Gymnasium."""

    def __init__(self, pool: Any):
        self.pool = pool

    def reset(self) -> _Rows:
        observation, info = self.pool.reset()
        B = self.pool.config["num_envs"]
        return _Rows(observation, np.zeros(B, np.float32), np.zeros(B, bool), np.zeros(B, bool), info)

    def send(self, actions: np.ndarray) -> None:
        self.pool.send(actions)  # of all lanes, in order

    def recv(self) -> _Rows:
        observation, reward, terminated, truncated, info = self.pool.recv()
        return _Rows(observation, reward, terminated | truncated, truncated, info)


class _DirectPool(_Pool):
    """A pool without EnvPool's Python layer, which takes a sixth of a step of small environments."""

    @staticmethod
    def understands(pool: Any) -> bool:
        """Returns True if the pool has the private parts that this class uses."""
        states, actions = getattr(pool, "_state_keys", ()), getattr(pool, "_action_keys", ())
        observed = [key for key in states if key.partition(":")[0] == "obs"]
        named = isinstance(pool.observation_space, gymnasium.spaces.Dict) and not any("." in key for key in observed)
        return (
            list(actions) == ["env_id", "players.env_id", "action"]
            and {"reward", "done", "trunc", "elapsed_step"} <= set(states)
            and (observed == ["obs"] or named)
            and pool.config.get("max_num_players", 1) == 1
            and all(hasattr(pool, name) for name in ("_recv", "_send", "_spec"))
        )

    def __init__(self, pool: Any):
        super().__init__(pool)
        self._send, self._recv = pool._send, pool._recv
        self._ids = np.arange(pool.config["num_envs"], dtype=np.int32)
        self._dtype, self._shape = np.dtype(pool._spec._action_spec[-1][0]), (len(self._ids), *pool.action_space.shape)
        at = {key: i for i, key in enumerate(pool._state_keys)}
        self._reward, self._done, self._truncated = at["reward"], at["done"], at["trunc"]
        named = {key.partition(":")[2]: i for key, i in at.items() if key.startswith("obs:")}
        self._observation = named or at["obs"]
        self._info = {name: at[f"info:{name}"] for name in ("reward", "terminated") if f"info:{name}" in at}
        self._info["elapsed_step"] = at["elapsed_step"]

    def send(self, actions: np.ndarray) -> None:
        if actions.shape != self._shape:
            raise ValueError(f"actions have shape {actions.shape}, not {self._shape}.")
        # A copy: what comes from a device may not be written to, and EnvPool asks for arrays that may.
        self._send([self._ids, self._ids, np.array(actions, self._dtype, order="C")])

    def recv(self) -> _Rows:
        state, at = self._recv(), self._observation
        observation = state[at] if isinstance(at, int) else {name: state[i] for name, i in at.items()}
        info = {name: state[i] for name, i in self._info.items()}
        return _Rows(observation, state[self._reward], state[self._done], state[self._truncated], info)


class EnvPoolEnvironment:
    """A running pool (see `podracer.types.HostEnvironment`).

    Args:
      pool: EnvPool's.
      spec: of the task.
      num_lanes: of the pool.
      atari: True for a game of Atari.
      fitted: the mask, as agents see it.
      limit: the time limit of a task that reports it as its end; None for others.
    """

    def __init__(
        self, pool: Any, spec: EnvSpec, num_lanes: int, atari: bool, fitted: host_masks.Fitted, limit: int | None
    ):
        self._pool: Any = (_DirectPool if _DirectPool.understands(pool) else _Pool)(pool)
        self.spec, self._atari, self._has_reset, self._limit = spec, atari, False, limit
        self._lanes = np.arange(num_lanes, dtype=np.int32)
        self._last = np.zeros(num_lanes, bool)
        self._fitted, self._actions = fitted, actions_for(pool.action_space, fitted.given)

    def recv(self) -> tuple[np.ndarray, HostStep]:
        first = self._last if self._has_reset else ~self._last
        rows = self._pool.recv() if self._has_reset else self._pool.reset()
        self._has_reset = True
        last, truncated = rows.done | rows.truncated, rows.truncated
        if self._limit is not None:
            truncated = truncated | (rows.info["elapsed_step"] >= self._limit)
        terminated = rows.done & ~truncated
        score = over = None
        if self._atari:
            # The raw reward, and the emulator's game over, which counts even at the step limit.
            game_over = rows.info["terminated"].astype(bool)
            terminated = terminated | game_over
            score, over = rows.info["reward"], game_over | rows.truncated
            last = last | game_over
        self._last = last
        shown = self._fitted.observation(rows.observation)
        observation = gate.to_agent(shown, self.spec.observation_space, self._last.shape)
        return self._lanes, HostStep.of(observation, rows.reward, terminated, first, last, score, over)

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        self._pool.send(self._actions(self._fitted.actions(actions)))

    def frame(self) -> np.ndarray:
        """Returns lane 0 as a picture, uint8 [H, W, 3], if the pool was made by `render`."""
        return self._pool.pool.render()[0]

    def close(self) -> None:
        # An EnvPool's threads end when the object does, not in its close().
        self._pool = None
