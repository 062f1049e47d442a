"""The contracts of environments: time steps, trajectories, and environments on devices and on hosts.

Import them from `podracer.types`, which says how rows are aligned and has the contracts of agents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from podracer import spaces

if TYPE_CHECKING:
    import jax  # which what steps host environments has no use for

ArrayTree = Any
"""A nested structure (dict, tuple, NamedTuple) of arrays."""

Metrics: TypeAlias = "dict[str, jax.Array]"
"""Flat names such as `loss/value` to float32 scalars."""

NO_METRICS: Metrics = {}


class TimeStep(NamedTuple):
    """What a lane shows at one step: leading dims [B] when stepped, [T+1, B] in a trajectory.

    Attributes:
      observation: a tree of arrays; single frames (stacking is the agent's).
      reward: float32; arrived together with this observation, 0 on a `first` row.
      discount: float32; 0 where the episode terminated, else 1 (gamma is the agent's). Where two play, -1 says that the
        other one is to move now: the reward is that of the player who acted, and so is this row's value times -1
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
      extras: tree of [T, B, ...]; what `act` recorded at row t (behaviour log-probabilities, values, ...).
      actor_state: tree of [B, ...]; the agent's recurrent state BEFORE row 0.
      policy_version: int32 [T, B]; which published parameters chose each action.
      lane: int32 [B]; the global index of each environment lane.
    """

    timesteps: TimeStep
    actions: ArrayTree
    extras: ArrayTree
    actor_state: ArrayTree
    policy_version: jax.Array
    lane: jax.Array


class EnvSpec(NamedTuple):
    """What an agent must know of an environment.

    Attributes:
      name: how people call it; it appears in run directories and error messages.
      observation_space: a space, or `spaces.Dict` of named spaces.
      action_space: `Discrete`, `MultiDiscrete` or `Box`.
      max_episode_steps: an upper bound on the transitions of one episode, or None where there is none.
      metrics: names of the environment's own numbers, each logged as `episode/<name>`: the sum over an episode, and of
        that the mean over the episodes that ended.
      num_players: 1, or 2 who play a zero-sum game in turns: then discounts may be -1, and an episode's return is that
        of the player who moves first.
      raw_scores: whether the rows of host environments have raw scores and ends of games too (see `HostStep`).
    """

    name: str
    observation_space: spaces.Space
    action_space: spaces.Space
    max_episode_steps: int | None = None
    metrics: tuple[str, ...] = ()
    num_players: int = 1
    raw_scores: bool = False


def check_one_player(spec: EnvSpec, agent: str) -> None:
    """Checks that an environment is for an agent that cannot play against itself.

    Raises:
      ValueError: where it is for two players.
    """
    if spec.num_players != 1:
        raise ValueError(
            f"{spec.name} is a game for two, and {agent} cannot play against itself; use an environment for one player."
        )


def check_metric_names(names: Any, where: str) -> None:
    """Checks names of metrics (see `EnvSpec`).

    Raises:
      ValueError: where they are not distinct strings, or `episode/<name>` is taken.
    """
    sound = isinstance(names, tuple) and all(isinstance(name, str) and name for name in names)
    if not sound or len(set(names)) < len(names) or {"return", "length", "count"} & set(names):
        raise ValueError(
            f"{where} is {names!r} (expected a tuple of distinct names, without return, length and count)."
        )


class Transition(NamedTuple):
    """What `Environment.step` returns next to the new state: unbatched scalars.

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

    Random keys live outside the state, so that a search over states cannot foresee chance. `render(state)`, which
    returns uint8 [H, W, 3], and `symmetries`, of board games (`envs_jax.board_game.Symmetries`), are optional.
    """

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self, key: jax.Array) -> Any:
        """The state that opens an episode."""
        ...

    def step(self, state: Any, action: ArrayTree, key: jax.Array) -> tuple[Any, Transition]:
        """One transition. The driver never steps a state that is `last`; it resets it."""
        ...

    def observe(self, state: Any) -> ArrayTree:
        """The observation of `state`, within `spec.observation_space`."""
        ...


class HostStep(NamedTuple):
    """What a batch of host lanes shows, [B]: NumPy arrays, made by `HostStep.of`, which an actor's device takes as is.

    Attributes:
      observation: tree of arrays.
      scalars: float32 [4, B] or [6, B]; reward, discount, first, last, and raw score and game over where they differ
        from reward and last. One array, for on small environments the time of a step goes into passing arguments.
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
        """Rows that follow the trajectory contract.

        Args:
          observation: tree of [B, ...], in the dtypes of the observation space.
          reward: number [B]; taken for 0 on `first` rows.
          terminated: bool [B]; the discount is 0 here.
          first: bool [B].
          last: bool [B]; terminated or truncated.
          score: number [B]; the raw reward, where the agent's is another one.
          over: bool [B]; a real episode ended here, where `last` may say so of less (in some protocols, losing a life
            is a `last` row, but ends no game). Goes with `score`.
          metrics: number [M, B]; those of `EnvSpec.metrics`, summed over the (real) episode so far.
          discount: number [B]; where two play, for it is not `~terminated` then.
        """
        scalars = np.empty((4 if score is None else 6, *reward.shape), np.float32)
        # The cheapest calls that do this: each is a few microseconds of every step.
        scalars[0] = reward
        np.putmask(scalars[0], first, 0.0)
        scalars[1] = ~terminated if discount is None else discount
        scalars[2], scalars[3] = first, last
        if score is not None:
            scalars[4], scalars[5] = score, over
        return HostStep(observation, scalars, () if metrics is None else np.asarray(metrics, np.float32))

    @staticmethod
    def zeros(spec: EnvSpec, num_lanes: int) -> HostStep:
        """Rows of zeros, in the shapes and dtypes that the rows of an environment have."""

        def zeros(space: spaces.Space) -> Any:
            if isinstance(space, spaces.Dict):
                return {name: zeros(item) for name, item in space.items}
            return np.zeros((num_lanes, *space.shape), space.dtype)

        scalars = np.zeros((6 if spec.raw_scores else 4, num_lanes), np.float32)
        metrics = np.zeros((len(spec.metrics), num_lanes), np.float32) if spec.metrics else ()
        return HostStep(zeros(spec.observation_space), scalars, metrics)

    @property
    def timestep(self) -> TimeStep:
        """What the agent sees."""
        reward, discount, first, last = (self.scalars[i] for i in range(4))
        return TimeStep(self.observation, reward, discount, first > 0, last > 0)

    @property
    def raw_reward(self) -> Any:
        """The raw rewards [B]."""
        return self.scalars[4 if self.scalars.shape[0] > 4 else 0]

    @property
    def game_over(self) -> Any:
        """Whether a real episode ended, bool [B]."""
        return self.scalars[5 if self.scalars.shape[0] > 4 else 3] > 0


@runtime_checkable
class HostEnvironment(Protocol):
    """A batch of running environments outside JAX: NumPy in and out, in C++, in Python or on another machine.

    The rows follow the trajectory contract, NEXT_STEP reset included. All calls come from one thread, but those of
    `wake`. Two things are optional:

    *   `save()` and `load(saved)`, a tree of arrays with everything that decides the rows to come: lockstep runs on
        environments that have them, as `HostEnvironments.saved` says, resume bit for bit.
    *   `wake()`, for environments that watch themselves: nobody else asks how long they take to answer, and a `recv`
        that waits raises when another thread calls it.
    """

    @property
    def spec(self) -> EnvSpec: ...

    def recv(self) -> tuple[np.ndarray, HostStep]:
        """Waits for rows: the local indices int32 [b] of their lanes, and the rows [b]; the `first` ones to begin with.

        The arrays are the caller's: they are not written to again.
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
    """Where host environments come from: every actor thread and every evaluation makes its own.

    Four things are optional:

    *   `shared_by(actors) -> HostEnvironments`, the same for so many actors at a time: environments with threads of
        their own can share the cores.
    *   `lanes_at_once(num_lanes) -> int | None`: of how many lanes a `recv` may return rows, if not always of all.
    *   `saved`, True where the environments that it makes have `save` and `load`.
    *   `metrics() -> dict[str, float]`, numbers that are logged with those of training.
    """

    @property
    def spec(self) -> EnvSpec: ...

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> HostEnvironment:
        """Starts environments.

        Args:
          num_lanes: B.
          seed: lane i gets seed + i; callers give disjoint ranges below 2**31.
          evaluation: whether they are for evaluation, where training's shortcuts (a lost life as an end) do not apply.
        """
        ...


class EpisodeStats(NamedTuple):
    """Sums over the episodes that ended: divide by `count`. float32 scalars; returns of raw, undiscounted rewards.

    `metrics` are those of `EnvSpec.metrics`, by name.
    """

    return_sum: jax.Array
    length_sum: jax.Array
    count: jax.Array
    metrics: Metrics = NO_METRICS
