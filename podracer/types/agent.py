"""The contracts of agents: the bundle of functions, the learner's state, replay and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from podracer.types.environment import (
    ArrayTree,
    EnvSpec,
    Metrics,
    TimeStep,
    Trajectory,
)

if TYPE_CHECKING:
    import jax  # not needed by processes that only step environments


class LearnerState(NamedTuple):
    """Everything that learning changes; replicated over devices.

    Attributes:
      params: the network's parameters.
      opt_state: the optimiser's state.
      hyper: the tunable numbers as float32 scalars, by name; a population varies them.
      num_updates: int32 []; updates so far: calls of `learn`, or all updates of a call that makes several, as SAC's
        with `policy_interval`; published as the policy version.
      aux: further state of an agent (normalisation statistics, a target network), or ().
    """

    params: ArrayTree
    opt_state: ArrayTree
    hyper: dict[str, jax.Array]
    num_updates: jax.Array
    aux: ArrayTree = ()


class ActorParams(NamedTuple):
    """The parameters that a learner publishes to actors.

    Attributes:
      params: the network's parameters.
      version: int32 []; the update that made them.
      aux: further inputs of acting (normalisation statistics, epsilon, temperature), or ().
    """

    params: ArrayTree
    version: jax.Array
    aux: ArrayTree = ()


class Batch(NamedTuple):
    """A batch of samples for an agent with replay.

    Attributes:
      trajectory: sequences [T, B].
      weight: float32 [B]; importance weights.
      age: int32 [B]; transitions, of all lanes on all devices, since row 0.
    """

    trajectory: Trajectory
    weight: jax.Array
    age: jax.Array


class ReplaySpec(NamedTuple):
    """The settings of an agent's replay (see `podracer.replay`); numbers are over all devices.

    Attributes:
      capacity: sequences in the ring.
      length: rows of a sequence, the bootstrap row included.
      context: rows before a sequence, for `restore`.
      keep: `(actor_state [B]) -> tree [B]`; the part of the state before a rollout to store; no leaves with "rows".
      restore: `(kept [B], observations [context, B], first [context, B]) -> actor_state [B]`.
      fraction: replayed share of every batch; the newest rollout is the rest, and there is one update for each rollout.
        0 learns from samples only, by the next three numbers.
      min_size: sequences in the ring (with "rows": rows added) before the first update.
      batch_size: sequences sampled for an update.
      ratio: sequences sampled per sequence added.
      priority_exponent: alpha; 0 samples uniformly.
      importance_exponent: beta, or `progress -> beta`.
      priority: `(TimeStep [m - 1 + length, B] without observations, extras [m - 1 + length, B]) -> [m, B]`; the first
        priorities of the m sequences that a rollout completes, from the records of acting: m is 1, or with "rows" T,
        each sequence a row later than the one before. None gives them the largest priority so far.
      acting_numbers: names of extras that only first priorities read, and that are equal in all rows of a run, such as
        a discount. They are not stored: `priority` gets those of the newest rollout, for all rows.
      observation_rows: number of first rows of a sequence that come with observations; None for all.
      starts: "rollouts" begins sequences at row 0 of rollouts, "rows" at every row whose transition is not masked;
        numbers of sequences are then numbers of rows.
      updates_per_draw: G, updates whose samples are drawn and reanalysed together, then learnt from in turn; with
        samples only.
      whole_draws: whether `Agent.learn` takes the samples of all G updates at once, in their order, and makes the G
        updates itself; metrics are then sums over them.
      refresh_interval: updates of a sweep that recomputes the priorities of all rows (`Agent.refresh`), in multiples of
        G; priorities from learning are then logged and not written. 0 for no sweeps.
      reach: rows after row 0 of a sequence that its priority depends on.
      target_interval: updates between two versions of `Agent.target_params`, for metrics; 0 without them.
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
    acting_numbers: tuple[str, ...] = ()
    observation_rows: int | None = None
    starts: Literal["rollouts", "rows"] = "rollouts"
    updates_per_draw: int = 1
    whole_draws: bool = False
    refresh_interval: int = 0
    reach: int = 0
    target_interval: int = 0


class Caution(NamedTuple):
    """A metric of training that shows that a setting does not fit the task. A run warns once.

    Attributes:
      metric: the metric's name.
      above: the value from which on to warn.
      advice: a sentence on the problem and the remedy.
    """

    metric: str
    above: float
    advice: str


class InitFn(Protocol):
    """Makes a learner's first state."""

    def __call__(self, key: jax.Array, hyper: Mapping[str, jax.Array], /) -> LearnerState:
        """Makes the state; `hyper` are the tunable numbers, float32 scalars."""
        ...


class ActorParamsFn(Protocol):
    """Takes what acting needs out of a learner's state."""

    def __call__(self, learner: LearnerState, progress: jax.Array, /) -> ActorParams:
        """Takes it out; `progress` float32 [] is the share of the run that is done."""
        ...


class StartFn(Protocol):
    """Makes the memory of lanes before an episode."""

    def __call__(self, lanes: jax.Array, num_lanes: int, /) -> ArrayTree:
        """Makes the actor state, tree of [B, ...].

        Args:
          lanes: int32 [B]; their global indices.
          num_lanes: lanes of the whole run.
        """
        ...


class ActFn(Protocol):
    """Chooses actions."""

    def __call__(
        self,
        params: ActorParams,
        state: ArrayTree,
        timestep: TimeStep,
        key: jax.Array,
        evaluation: bool,
        /,
    ) -> tuple[ArrayTree, ArrayTree, ArrayTree]:
        """Chooses an action for each lane.

        Args:
          params: what the learner has published.
          state: the actor state, tree of [B, ...].
          timestep: the newest rows [B].
          key: consumed.
          evaluation: whether to play as well as can be, and not to explore.

        Returns:
          The actions [B, ...], the extras [B, ...] to record, and the next actor state.
        """
        ...


class LearnFn(Protocol):
    """Learns from experience, under `topology.collectives.DATA_AXES`."""

    def __call__(self, learner: LearnerState, experience: Any, progress: jax.Array, key: jax.Array, /) -> Any:
        """Updates the learner's state.

        Args:
          learner: the state.
          experience: a Trajectory; where all of a batch is replayed, a Batch.
          progress: float32 []; the share of the run that is done.
          key: consumed.

        Returns:
          The new LearnerState and Metrics; where all of a batch is replayed, also priorities [B].
        """
        ...


class LossFn(Protocol):
    """Computes the loss of a trajectory for an objective of one's own; under no axes, of one device alone."""

    def __call__(
        self, params: ArrayTree, learner: LearnerState, trajectory: Trajectory, progress: jax.Array, /
    ) -> tuple[jax.Array, Metrics]:
        """Computes the loss whose gradient by `params` `learn` takes, over all lanes at once.

        With V-trace's `popart`, `learn` first moves the statistics and the value head by the trajectory, and takes the
        gradient there.

        Its value is no return, and its differences are not its gradient: targets, advantages and ratios are constants.

        Args:
          params: the network's parameters.
          learner: the tunable numbers and normalisation statistics; constants, but for the numbers.
          trajectory: [T, B].
          progress: float32 []; the share of the run that is done.

        Returns:
          The loss, float32 [], and metrics.
        """
        ...


class ReanalyseFn(Protocol):
    """Renews samples before they are learnt from."""

    def __call__(self, params: ActorParams, batch: Batch, key: jax.Array, /) -> Batch:
        """Returns samples as newer parameters would have acted, one by one and without collectives."""
        ...


class RefreshFn(Protocol):
    """Renews priorities."""

    def __call__(self, params: ActorParams, trajectory: Trajectory, age: jax.Array, /) -> jax.Array:
        """Computes priorities [m, B] of the sequences that begin at the first m rows.

        Args:
          params: those of `Agent.refresh_params`.
          trajectory: [m + reach - 1, B].
          age: int32 [m, B]; as in `Batch`.
        """
        ...


class BestFn(Protocol):
    """Chooses the best actions, without chance."""

    def __call__(self, params: ActorParams, state: ArrayTree, timestep: TimeStep, /) -> tuple[ArrayTree, ArrayTree]:
        """Returns the actions [B, ...] and the next actor state."""
        ...


class Agent(NamedTuple):
    """A bundle of pure functions that knows no device, thread, jit or file.

    Attributes:
      name: the agent's name, for run directories and messages.
      config: the agent's frozen config; the drivers read `envs_per_device` and `rollout_length` from it.
      init: makes the learner's first state.
      actor_params: takes the parameters for acting.
      start: the agent's per-lane memory before an episode.
      act: chooses actions.
      learn: learns from a trajectory, or where all of a batch is replayed, from a batch of samples.
      hyper: `dict[str, float]`; the default value of every tunable number.
      replay: the replay's settings, or None to learn from every rollout once.
      target_params: the parameters that `reanalyse` acts by.
      reanalyse: samples as newer parameters would have acted, whatever else is in the batch. None leaves them as they
        are.
      refresh_params: parameters as they were when the current sweep of `refresh` began, after a multiple of
        `ReplaySpec.refresh_interval` updates.
      refresh: renews the priorities of stored sequences.
      best: the best actions, without chance, for greedy policies and exports. None where they are those of `act` in
        evaluation.
      cautions: metrics to look at for the user.
      loss: the loss whose gradient `learn` takes, for outer objectives (`podracer.anakin.update`); None without one.
      spec: of the environment that it was made for, to be compared with the one that it is trained in; None for any.
    """

    name: str
    config: Any
    init: InitFn
    actor_params: ActorParamsFn
    start: StartFn
    act: ActFn
    learn: LearnFn
    hyper: dict[str, float]
    replay: ReplaySpec | None = None
    target_params: ActorParamsFn | None = None
    reanalyse: ReanalyseFn | None = None
    refresh_params: ActorParamsFn | None = None
    refresh: RefreshFn | None = None
    best: BestFn | None = None
    cautions: tuple[Caution, ...] = ()
    loss: LossFn | None = None
    spec: EnvSpec | None = None
