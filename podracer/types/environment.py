"""The contracts of environments: time steps, trajectories, and environments on devices and on hosts.

Import them from `podracer.types`, whose docstring says how rows are aligned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from podracer import spaces

if TYPE_CHECKING:
    import jax  # not needed by processes that only step environments

ArrayTree = Any
"""A nested structure (dict, tuple, NamedTuple) of arrays."""

Metrics: TypeAlias = "dict[str, jax.Array]"
"""Flat names such as `loss/value` to float32 scalars."""

NO_METRICS: Metrics = {}


class TimeStep(NamedTuple):
    """One row of a lane: leading dims [B] in a step, [T+1, B] in a trajectory.

    Attributes:
      observation: a tree of arrays; single frames (the agent stacks them).
      reward: float32; of the transition into this row, 0 on a `first` row.
      discount: float32; 0 if the episode terminated, else 1 (gamma is the agent's). With two players, -1 if the other
        one is to move now: the reward is the acting player's, to whom this row's value counts times -1
        (docs/adr/0019-signed-discount.md).
      first: bool; this observation opens an episode, or follows a break in the stream.
      last: bool; this observation closes an episode. `last` with a discount other than 0 means truncated.
    """

    observation: ArrayTree
    reward: jax.Array
    discount: jax.Array
    first: jax.Array
    last: jax.Array


class Trajectory(NamedTuple):
    """T transitions of B lanes, time-major.

    Attributes:
      timesteps: TimeStep [T+1, B]; row T is the bootstrap row, and row 0 of the next trajectory.
      actions: [T, B, ...]; the action taken AT row t, as the environment received it.
      extras: tree of [T, B, ...]; records of `act` at row t (behaviour log-probabilities, values, ...).
      actor_state: tree of [B, ...]; the agent's recurrent state BEFORE row 0.
      policy_version: int32 [T, B]; version of the parameters that chose each action.
      lane: int32 [B]; the global index of each environment lane.
    """

    timesteps: TimeStep
    actions: ArrayTree
    extras: ArrayTree
    actor_state: ArrayTree
    policy_version: jax.Array
    lane: jax.Array


class EnvSpec(NamedTuple):
    """The static description of an environment.

    Attributes:
      name: the name in run directories and error messages.
      observation_space: a space, or `spaces.Dict` of named spaces.
      action_space: `Discrete`, `MultiDiscrete` or `Box`.
      max_episode_steps: an upper bound on the transitions of one episode, or None for no bound.
      metrics: names of the environment's own numbers, each summed over an episode and logged as `episode/<name>`, the
        mean over episodes that ended.
      num_players: 1, or 2 for a zero-sum game in turns: then discounts may be -1, and an episode's return is the first
        mover's.
      raw_scores: True if rows of host environments have raw scores and ends of games too (see `HostStep`).
      tasks: names of the K tasks that lanes play side by side, () for one task. The task of a lane is its global number
        mod K (`task_of`), on all shards and actors; `Trajectory.lane` tells it to the learner.
    """

    name: str
    observation_space: spaces.Space
    action_space: spaces.Space
    max_episode_steps: int | None = None
    metrics: tuple[str, ...] = ()
    num_players: int = 1
    raw_scores: bool = False
    tasks: tuple[str, ...] = ()


def task_of(lane: Any, num_tasks: int) -> Any:
    """The task of each lane: its place in `EnvSpec.tasks`, int32 [B], from global lane numbers int32 [B].

    All are 0 where `num_tasks`, the length of `EnvSpec.tasks`, is 0 or 1.
    """
    return lane % max(num_tasks, 1)


def check_one_player(spec: EnvSpec, agent: str) -> None:
    """Checks that an environment has one player, for agents that cannot play against themselves.

    Raises:
      ValueError: for an environment with two players.
    """
    if spec.num_players != 1:
        raise ValueError(
            f"{spec.name} is a game for two, and {agent} cannot play against itself; use an environment for one player."
        )


def check_metric_names(names: Any, where: str) -> None:
    """Checks names of metrics (see `EnvSpec`).

    Raises:
      ValueError: if they are not distinct strings, or `episode/<name>` is taken.
    """
    sound = isinstance(names, tuple) and all(isinstance(name, str) and name for name in names)
    if not sound or len(set(names)) < len(names) or {"return", "length", "count"} & set(names):
        raise ValueError(
            f"{where} is {names!r} (expected a tuple of distinct names, without return, length and count)."
        )


class Transition(NamedTuple):
    """The result of `Environment.step` besides the new state: unbatched scalars.

    Attributes:
      reward: float32 []; of the player who acted.
      discount: float32 []; 0 if the episode terminated in the new state, else 1, or -1 if the other player is to move.
      last: bool []; the new state closes the episode (terminated, or truncated if discount is not 0).
      metrics: float32 []; of every name in `EnvSpec.metrics`.
    """

    reward: jax.Array
    discount: jax.Array
    last: jax.Array
    metrics: Metrics = NO_METRICS


@runtime_checkable
class Environment(Protocol):
    """A pure-JAX environment: unbatched pure functions, made parallel by the driver.

    Random keys live outside the state, so that a search over states cannot foresee chance. Four things are optional:

    *   `render(state)`, which returns uint8 [H, W, 3];
    *   `symmetries`, of board games (`envs_jax.board_game.Symmetries`);
    *   `costly_reset`, True if `reset` takes much longer than `step`, so that only lanes that are over are reset;
    *   `parameters(key) -> tree` and `with_parameters(tree) -> Environment`, of a family with one spec: numbers to
        draw, and the environment with them, also where they are traced (`podracer.anakin.update`).
    """

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self, key: jax.Array) -> Any:
        """Returns the first state of an episode."""
        ...

    def step(self, state: Any, action: ArrayTree, key: jax.Array) -> tuple[Any, Transition]:
        """Makes one transition.

        A state that is `last` is stepped too, for all lanes go together, and a fresh state takes the place of the
        result. Such a step must not fail, and its numbers do not matter; but a gradient through it
        (`podracer.anakin.update`) may be NaN where it divides by zero.
        """
        ...

    def observe(self, state: Any) -> ArrayTree:
        """Returns the observation of `state`, within `spec.observation_space`."""
        ...


class HostStep(NamedTuple):
    """Rows of a batch of host lanes, [B]: NumPy arrays, made by `HostStep.of`, for an actor's device.

    Attributes:
      observation: tree of arrays.
      scalars: float32 [4, B] or [6, B]; reward, discount, first, last, and raw score and game over if they differ from
        reward and last. One array, because in small environments passing arguments takes most of a step's time.
      metrics: float32 [M, B]; `EnvSpec.metrics`, summed over the episode so far; () where there are none.
    """

    observation: ArrayTree
    scalars: Any
    metrics: Any = ()

    @staticmethod
    def of(
        observation: ArrayTree,
        reward: np.ndarray,
        terminated: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        score: np.ndarray | None = None,
        over: np.ndarray | None = None,
        metrics: np.ndarray | None = None,
        discount: np.ndarray | None = None,
    ) -> HostStep:
        """Makes rows that follow the trajectory contract.

        Args:
          observation: tree of [B, ...], in the dtypes of the observation space.
          reward: number [B]; ignored on `first` rows.
          terminated: bool [B]; the discount is 0 here.
          first: bool [B].
          last: bool [B]; terminated or truncated.
          score: number [B]; the raw reward, if it differs from the agent's.
          over: bool [B]; a real episode ended here. Other rows may be `last` too: in some protocols, those that lose a
            life. Goes with `score`.
          metrics: number [M, B]; those of `EnvSpec.metrics`, summed over the (real) episode so far.
          discount: number [B]; needed with two players, `~terminated` by default.
        """
        scalars = np.empty((4 if score is None else 6, *reward.shape), np.float32)
        # The cheapest calls, because each takes a few microseconds of every step.
        scalars[0] = reward
        np.putmask(scalars[0], first, 0.0)
        scalars[1] = ~terminated if discount is None else discount
        scalars[2], scalars[3] = first, last
        if score is not None:
            scalars[4], scalars[5] = score, over
        return HostStep(observation, scalars, () if metrics is None else np.asarray(metrics, np.float32))

    @staticmethod
    def zeros(spec: EnvSpec, num_lanes: int) -> HostStep:
        """Makes rows of zeros, in the shapes and dtypes of an environment's rows."""

        def zeros(space: spaces.Space) -> Any:
            if isinstance(space, spaces.Dict):
                return {name: zeros(item) for name, item in space.items}
            return np.zeros((num_lanes, *space.shape), space.dtype)

        scalars = np.zeros((6 if spec.raw_scores else 4, num_lanes), np.float32)
        metrics = np.zeros((len(spec.metrics), num_lanes), np.float32) if spec.metrics else ()
        return HostStep(zeros(spec.observation_space), scalars, metrics)

    @property
    def timestep(self) -> TimeStep:
        """The agent's rows."""
        reward, discount, first, last = (self.scalars[i] for i in range(4))
        return TimeStep(self.observation, reward, discount, first > 0, last > 0)

    @property
    def raw_reward(self) -> Any:
        """The raw rewards [B]."""
        return self.scalars[4 if self.scalars.shape[0] > 4 else 0]

    @property
    def game_over(self) -> Any:
        """True if a real episode ended, bool [B]."""
        return self.scalars[5 if self.scalars.shape[0] > 4 else 3] > 0


@runtime_checkable
class HostEnvironment(Protocol):
    """A batch of running environments outside JAX: NumPy in and out, in C++, in Python or on another machine.

    The rows follow the trajectory contract, NEXT_STEP reset included. All calls come from one thread, except those of
    `wake`. Two things are optional:

    *   `save()` and `load(saved)`, the whole state as a tree of arrays: lockstep runs on environments that have them
        (`HostEnvironments.saved`) resume bit for bit.
    *   `wake()`, for environments with timeouts of their own, which nobody else then watches: another thread calls it
        to make a waiting `recv` raise.
    """

    @property
    def spec(self) -> EnvSpec: ...

    def recv(self) -> tuple[np.ndarray, HostStep]:
        """Waits for rows; returns the local indices int32 [b] of their lanes, and the rows [b].

        The first rows of a lane are `first` ones. The arrays are the caller's and are not written to again.
        """
        ...

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        """Passes the actions [b] for the rows that `recv` returned."""
        ...

    def close(self) -> None:
        """Ends the environments; they are not used again."""
        ...


@runtime_checkable
class HostEnvironments(Protocol):
    """A maker of host environments: every actor thread and every evaluation makes its own.

    Five things are optional:

    *   `alone() -> dict[str, HostEnvironments]`, each task by itself and by name, to evaluate it; needed where
        `EnvSpec.tasks` is set.
    *   `shared_by(actors) -> HostEnvironments`, the same for several actors in parallel: environments with threads of
        their own can share the cores.
    *   `lanes_at_once(num_lanes) -> int | None`: the number of lanes in a `recv`, None for all.
    *   `saved`, True if its environments have `save` and `load`.
    *   `metrics() -> dict[str, float]`, numbers that are logged with those of training.
    """

    @property
    def spec(self) -> EnvSpec: ...

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> HostEnvironment:
        """Starts environments.

        Args:
          num_lanes: B.
          seed: lane i gets seed + i; callers give disjoint ranges below 2**31.
          evaluation: True for evaluation, without training's shortcuts (a lost life as an end).
        """
        ...


class EpisodeStats(NamedTuple):
    """Sums over the episodes that ended: divide by `count`. float32 scalars; returns of raw, undiscounted rewards.

    Of several tasks they are float32 [K], in the order of `EnvSpec.tasks`. `metrics` are those of `EnvSpec.metrics`, by
    name.
    """

    return_sum: jax.Array
    length_sum: jax.Array
    count: jax.Array
    metrics: Metrics = NO_METRICS
