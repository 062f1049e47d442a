"""The interface between a session and a driver: the state of a run, its progress, and the ways in which it can fail."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from podracer.atari import scores
from podracer.errors import OutOfMemoryError
from podracer.learning.counter import COUNTER_BASE, Counter
from podracer.learning.learner import ReplayState
from podracer.population.evolution import Lineage
from podracer.topology import here, memory_limit
from podracer.topology.processes import ALONE, Processes
from podracer.types import EpisodeStats, LearnerState, ReplaySpec


class RunState(NamedTuple):
    """The state of a run, and the content of a checkpoint.

    Attributes:
      learner: leading dim [P], the population.
      actors: the state of acting, of the driver's own kind; () if it begins anew.
      env_steps: real transitions so far, [P].
      replay_state: the replay's state; leading dims of its ring are the driver's.
      evolution: `podracer.population.evolution.Evolution` of population based training, else ().
    """

    learner: LearnerState
    actors: Any
    env_steps: Counter
    replay_state: ReplayState
    evolution: Any = ()


def without_replay(state: RunState) -> RunState:
    """The state without the replay's content."""
    return state._replace(replay_state=state.replay_state._replace(ring=(), prefetched=()))


def only_learner(state: RunState) -> RunState:
    """The learner and the steps, without what may be large and belongs to the run's own devices."""
    return state._replace(actors=(), replay_state=(), evolution=())


def episode_means(episodes: EpisodeStats, tasks: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The metrics `episode/...` [P] from sums [P] over the episodes that ended; NaN if none did.

    Of several tasks there are the means over tasks, each of which counts once, `episode/return/<task>`, and scores
    (`atari.scores.of_returns`).

    Args:
      episodes: sums [P], or of several tasks [P, K].
      tasks: `EnvSpec.tasks`.
    """
    count = np.asarray(episodes.count)
    totals = {"return": episodes.return_sum, "length": episodes.length_sum, **episodes.metrics}
    with np.errstate(invalid="ignore", divide="ignore"):
        if len(tasks) < 2:
            means = {f"episode/{name}": np.asarray(total) / count for name, total in totals.items()}
            return means | {"episode/count": count}
        counts = _by_name(count, tasks)
        of_tasks = {name: _by_name(np.asarray(total), tasks) / counts for name, total in totals.items()}
    returns = dict(zip(dict.fromkeys(tasks), np.moveaxis(of_tasks["return"], -1, 0)))
    means = {f"episode/{name}": mean.mean(axis=-1) for name, mean in of_tasks.items()}
    means |= {"episode/count": count.sum(axis=-1)} | {f"episode/return/{name}": x for name, x in returns.items()}
    return means | {f"score/{name}": x for name, x in scores.of_returns(returns).items()}


def _by_name(sums: np.ndarray, tasks: Sequence[str]) -> np.ndarray:
    """Adds up those of [P, K] that are of tasks of one name."""
    names = np.asarray(tasks)
    return np.stack([sums[..., names == name].sum(axis=-1) for name in dict.fromkeys(tasks)], axis=-1)


WHAT_TO_LOWER = (
    "lower num_envs, rollout_length or, with a replay, batch_size and replay_capacity; choose a smaller network, or "
    "use more devices."
)
"""The settings that decide how much memory a program takes."""


def program_bytes(compiled: Any) -> int | None:
    """Bytes of a compiled program's arguments and temporary buffers on each device; None if unknown."""
    try:
        analysis = compiled.memory_analysis()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        return None
    return analysis.temp_size_in_bytes + analysis.argument_size_in_bytes if analysis else None


def require_memory(needed: int | None, device: Any) -> None:
    """Checks that a program fits into memory: XLA would fail in the middle of the first call, with a long message.

    Args:
      needed: bytes; None if unknown.
      device: one of the program's devices; not all kinds report their memory.

    Raises:
      OutOfMemoryError: if it does not fit.
    """
    limit = memory_limit([device])
    if needed and limit and needed > limit:
        raise OutOfMemoryError(
            f"the program needs {needed / 2**30:.1f} GiB on each device, and {device} has {limit / 2**30:.1f} GiB: "
            f"{WHAT_TO_LOWER}"
        )


@contextlib.contextmanager
def memory_explained() -> Iterator[None]:
    """A context that explains in one line how to help if XLA, here or in an actor, runs out of memory.

    Raises:
      OutOfMemoryError: for XLA's own error.
    """
    try:
        yield
    except RuntimeError as error:
        cause = error if isinstance(error, jax.errors.JaxRuntimeError) else error.__cause__
        if not isinstance(cause, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in str(cause):
            raise
        reason = str(cause).strip().partition("\n")[0].rstrip(".")
        raise OutOfMemoryError(f"a device is out of memory ({reason}): {WHAT_TO_LOWER}") from error


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a run after some updates, as the host knows it.

    Attributes:
      env_steps: real transitions of the member with the fewest.
      updates: updates since the run began.
      metrics: [P], by name; means over these updates.
      member_steps: real transitions of each member, int64 [P].
      seconds: seconds since the last report with seconds; 0 if some of these updates are not done yet.
      transitions: real transitions in these seconds, over all members.
    """

    env_steps: int
    updates: int
    metrics: dict[str, np.ndarray]
    member_steps: np.ndarray
    seconds: float
    transitions: int


@dataclasses.dataclass(frozen=True)
class RunHooks:
    """The calls by which whoever runs a driver follows and steers it.

    Attributes:
      next_milestone: `(env_steps) -> env_steps` at which `on_milestone` is next, at most `total_steps`.
      on_progress: called every now and then.
      on_milestone: called with a state that is safe to read until it returns, and the steps done; returns the state to
        go on with, or None for the same.
      should_stop: polled; True ends the run in good order.
      should_save: polled; where it is true in process 0, `on_milestone` is called as soon as a state is there.
    """

    next_milestone: Callable[[int], int]
    on_progress: Callable[[Progress], None]
    on_milestone: Callable[[RunState, int], RunState | None]
    should_stop: Callable[[], bool]
    should_save: Callable[[], bool] = lambda: False


class Driver(Protocol):
    """Runs an agent in an environment on devices."""

    arch: str

    @property
    def devices(self) -> list[Any]: ...

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices that learn."""
        ...

    def describe(self) -> str:
        """One line for people: lanes, shards, devices."""
        ...

    def check(self) -> None:
        """Traces the programs, which finds remaining errors of a configuration before compilation."""
        ...

    def init(self) -> RunState:
        """The first state."""
        ...

    def like(self) -> RunState:
        """The shapes, dtypes and shardings of a state, for restoring one without making one."""
        ...

    def prepare(self) -> None:
        """Begins to compile, in threads, for the first state; `compile` waits for them."""
        ...

    def compile(self, state: RunState) -> float:
        """Compiles for a state; returns how many seconds that took."""
        ...

    def run(
        self,
        state: RunState,
        hooks: RunHooks,
        *,
        total_steps: int,
        processes: Processes = ALONE,
    ) -> tuple[RunState, bool]:
        """Trains until every member has `total_steps`, or `hooks.should_stop()`.

        Args:
          state: the first state; consumed.
          hooks: called meanwhile.
          total_steps: real transitions per member.
          processes: the processes that share the run; told when this one waits for the others.

        Returns:
          The state at the end, and True unless the run was stopped.

        Raises:
          TrainingDivergedError: if a metric is not finite (in a population: in all members).
        """
        ...


class EvolvingDriver(Driver, Protocol):
    """A driver whose members copy each other."""

    def evolve(self, state: RunState) -> tuple[RunState, Lineage]:
        """Ends a generation of population based training; `state` is consumed, and the record whole on every device."""
        ...


def run_keys(seed: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The independent keys of a run: learner, actors, evaluation."""
    learner, actors, evaluation = jax.random.split(jax.random.key(seed), 3)
    return learner, actors, evaluation


def counter_values(counter: Any) -> np.ndarray:
    """A device counter [P] as int64 [P]."""
    high, low = jax.device_get((counter.high, counter.low))
    return np.asarray(high, np.int64) * COUNTER_BASE + np.asarray(low, np.int64)


def local_learner(state: RunState) -> RunState:
    """The learner and the steps [P] as this process's own arrays; what acted and the ring are left out."""
    return here(only_learner(state))


def num_updates(state: RunState) -> int:
    """Updates so far, of a state of this process's own arrays."""
    return int(np.max(jax.device_get(state.learner.num_updates)))


def crossed(before: int, now: int, every: int | None) -> bool:
    """True where a multiple of `every` lies in (before, now]; -1 is before the first step."""
    return bool(every) and now // every > max(before, 0) // every  # type: ignore[operator]


def least_env_steps(state: RunState) -> int:
    """Steps that every member has taken, by which evaluations and checkpoints are dated."""
    return int(counter_values(local_learner(state).env_steps).min())


def position(state: RunState) -> tuple[int, list[int]]:
    """The newest update and the step of each member, [P], by which rows of metrics are cut where a run goes on."""
    own = local_learner(state)
    return num_updates(own), counter_values(own.env_steps).tolist()


def empty_replay(state: RunState, like: RunState) -> RunState:
    """The state of a checkpoint without its replay, made whole by an empty one.

    Args:
      state: what was restored.
      like: shapes, dtypes and shardings of a whole state.
    """
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), like.replay_state)
    return state._replace(replay_state=empty._replace(counts=state.replay_state.counts.without_rollouts()))


def lost_updates(state: RunState, replay: ReplaySpec | None, final_updates: int) -> int:
    """Updates that a complete run owes, for its replay was lost and not filled again.

    Args:
      state: the last one.
      replay: the agent's, or None.
      final_updates: those after the last step.
    """
    counts = state.replay_state.counts
    if replay is None or isinstance(counts.filled, tuple):
        return 0
    updates, deferred, filled = (int(x) for x in here([counts.draws, counts.deferred_updates, counts.filled]))
    return deferred * replay.updates_per_draw + (final_updates if updates and not filled else 0)
