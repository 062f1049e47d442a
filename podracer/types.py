"""The contracts that environments, agents and drivers share: time steps, trajectories, environments and agents.

Rows, lanes and rollouts are terms of this library; docs/glossary.md defines them. The alignment rules hold everywhere
(docs/adr/0001-next-step-reset.md):

*   Transition t is `(observation_t, action_t) -> (reward_{t+1}, discount_{t+1}, observation_{t+1})`.
*   NEXT_STEP reset: the step after a `last` row ignores its action and returns the `first` row of the next episode
    with reward 0. The final observation of every episode is therefore in the trajectory, and a truncated episode
    bootstraps from it exactly.
*   `mask_t = ~first_{t+1}`: a transition into a `first` row joins two episodes and carries no information.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

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


class LearnerState(NamedTuple):
    """Everything that learning changes; replicated over devices.

    Attributes:
      params: the network's parameters.
      opt_state: the optimiser's state.
      hyper: the tunable numbers as float32 scalars, by name; a population varies them.
      num_updates: int32 []; calls of `learn` so far; published as the policy version.
      aux: whatever else an agent keeps (normalisation statistics, a target network), or ().
    """

    params: ArrayTree
    opt_state: ArrayTree
    hyper: dict[str, jax.Array]
    num_updates: jax.Array
    aux: ArrayTree = ()


class ActorParams(NamedTuple):
    """What a learner publishes to actors.

    Attributes:
      params: the network's parameters.
      version: int32 []; which update they come from.
      aux: whatever else acting needs (normalisation statistics, epsilon, temperature), or ().
    """

    params: ArrayTree
    version: jax.Array
    aux: ArrayTree = ()


class Batch(NamedTuple):
    """What an agent with prioritised replay learns from.

    Attributes:
      trajectory: sequences [T, B].
      weight: float32 [B]; importance weights.
      age: int32 [B]; transitions, of all lanes on all devices, since row 0.
    """

    trajectory: Trajectory
    weight: jax.Array
    age: jax.Array


class Replay(NamedTuple):
    """How an agent's experience is replayed (see `podracer.replay`); numbers are over all devices.

    Attributes:
      capacity: sequences that are kept.
      length: rows of a sequence, the bootstrap row included.
      context: rows before a sequence that `restore` sees.
      keep: `(actor_state [B]) -> tree [B]`; what is stored of the state before a rollout; no leaves with "rows".
      restore: `(kept [B], observations [context, B], first [context, B]) -> actor_state [B]`.
      fraction: of every batch that is replayed: the newest rollout is the rest, and there is one update for each
        rollout. 0 learns from samples only, of which the next three numbers say how many and when.
      min_size: sequences that must be there (with "rows": rows that were added) before the first update.
      batch_size: sequences that are sampled for an update.
      ratio: sequences sampled per sequence added.
      priority_exponent: alpha; 0 samples uniformly.
      importance_exponent: beta, or `progress -> beta`.
      priority: `(TimeStep [m - 1 + length, B] without observations, extras [m - 1 + length, B]) -> [m, B]`; from what
        acting recorded, the first priorities of the m sequences that a rollout completes: 1, or with "rows" T of them,
        each a row later than the one before. None gives them the largest that any has had so far.
      observed: rows of a sequence that come with their observations, the first ones; None for all.
      starts: where sequences begin: where "rollouts" did, or at all "rows" but those whose transition is masked.
        Numbers of sequences are numbers of rows then.
      group: G updates that are drawn for at once, reanalysed together and learnt from in turn, with samples only.
      refresh_interval: updates of a sweep that renews the priorities of all rows (`Agent.refresh`), in multiples of G;
        what learning returns is logged then, and not written. 0 for none.
      reach: rows of a sequence behind row 0 that its priority depends on.
      target_interval: updates between two versions of `Agent.target_params`, for metrics; 0 where there are none.
    """

    capacity: int
    length: int
    context: int
    keep: Callable[[ArrayTree], ArrayTree]
    restore: Callable[[ArrayTree, ArrayTree, jax.Array], ArrayTree]
    fraction: float = 0.0
    min_size: int = 1
    batch_size: int = 1
    ratio: float = 1.0
    priority_exponent: float = 0.0
    importance_exponent: float | Callable[[jax.Array], jax.Array] = 0.0
    priority: Callable[[TimeStep, ArrayTree], jax.Array] | None = None
    observed: int | None = None
    starts: Literal["rollouts", "rows"] = "rollouts"
    group: int = 1
    refresh_interval: int = 0
    reach: int = 0
    target_interval: int = 0


class Caution(NamedTuple):
    """A metric of training that says of a setting that it does not fit the task. It is said once in a run.

    Attributes:
      metric: its name.
      above: where it begins to say so.
      advice: a sentence: what is wrong, and what to set instead.
    """

    metric: str
    above: float
    advice: str


class Agent(NamedTuple):
    """An agent is a bundle of pure functions that knows no device, thread, jit or file.

    Attributes:
      name: the agent's name, for run directories and messages.
      config: the frozen config it was made from; the driver reads `num_envs`, `rollout_length` from it.
      init: `(key, hyper) -> LearnerState`.
      actor_params: `(LearnerState, progress) -> ActorParams`; what acting needs, published.
      start: `(lanes int32 [B], num_lanes) -> ActorState`; the agent's per-lane memory before an episode.
      act: `(ActorParams, ActorState, TimeStep [B], key, evaluation) -> (action, extras, ActorState)`.
      learn: `(LearnerState, Trajectory, progress, key) -> (LearnerState, Metrics)`; runs under
        `topology.collectives.DATA_AXES`. Where all of a batch is replayed,
        `(LearnerState, Batch, progress, key) -> (LearnerState, Metrics, priorities [B])`.
      hyper: `dict[str, float]`; the default value of every tunable number.
      replay: how experience is replayed, or None for learning from every rollout once.
      target_params: `(LearnerState, progress) -> ActorParams`; what `reanalyse` acts by.
      reanalyse: `(ActorParams, Batch, key) -> Batch`; samples as newer parameters would have acted, before they are
        learnt from, one by one: without collectives, and whatever else is in the batch. None leaves them as they are.
      refresh_params: `(LearnerState, progress) -> ActorParams`; those of the update that this sweep of `refresh` began
        with, a multiple of `Replay.refresh_interval`.
      refresh: `(ActorParams, Trajectory [m + reach - 1, B], age int32 [m, B]) -> [m, B]`; priorities of the sequences
        that begin at the first m rows, `age` as in `Batch`.
      best: `(ActorParams, ActorState, TimeStep [B]) -> (action, ActorState)`; the best actions, without chance, for
        greedy policies and exports. None where they are those of `act` in evaluation.
      cautions: metrics to look at for the user.
    """

    name: str
    config: Any
    init: Callable[[jax.Array, Mapping[str, jax.Array]], LearnerState]
    actor_params: Callable[[LearnerState, jax.Array], ActorParams]
    start: Callable[[jax.Array, int], ArrayTree]
    act: Callable[..., tuple[ArrayTree, ArrayTree, ArrayTree]]
    learn: Callable[..., Any]
    hyper: dict[str, float]
    replay: Replay | None = None
    target_params: Callable[[LearnerState, jax.Array], ActorParams] | None = None
    reanalyse: Callable[[ActorParams, Batch, jax.Array], Batch] | None = None
    refresh_params: Callable[[LearnerState, jax.Array], ActorParams] | None = None
    refresh: Callable[[ActorParams, Trajectory, jax.Array], jax.Array] | None = None
    best: Callable[[ActorParams, ArrayTree, TimeStep], tuple[ArrayTree, ArrayTree]] | None = None
    cautions: tuple[Caution, ...] = ()


class EpisodeStats(NamedTuple):
    """Sums over the episodes that ended: divide by `count`. float32 scalars; returns of raw, undiscounted rewards.

    `metrics` are those of `EnvSpec.metrics`, by name.
    """

    return_sum: jax.Array
    length_sum: jax.Array
    count: jax.Array
    metrics: Metrics = NO_METRICS
