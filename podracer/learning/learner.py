"""Learning from rollouts: at once, or from samples of a replay to which they are added.

How many updates follow a rollout is decided by counting what went into the replay and what came out, never by time:
runs repeat, and the replay ratio is what the configuration says. Updates that are due are a number in the run's state
(`Counts.pending_updates`), so that a driver may do them all at once, a few at a time, or beside the next rollout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from podracer import replay, topology
from podracer.learning import update_from_replay, update_on_rollout
from podracer.learning.replay_steps import LARGEST, Counts, Steps
from podracer.types import Agent, ArrayTree, LearnerState, Metrics, Trajectory


class ReplayState(NamedTuple):
    """The replay state of a learner: counts, the ring, and samples prepared before they are due.

    Attributes:
      counts: without leading dims.
      ring: `replay.Ring` of every shard, or () without replay.
      prefetched: `podracer.sebulba.replay_devices.Prefetched`, the samples of the next draw, or () where none are.
    """

    counts: Counts
    ring: Any
    prefetched: Any = ()


class LearnRolloutFn(Protocol):
    """Learns once a rollout is there."""

    def __call__(
        self,
        state: LearnerState,
        counts: Counts,
        ring: Any,
        trajectory: Trajectory,
        actor_index: jax.Array | int,
        progress: jax.Array,
        key: jax.Array,
        /,
    ) -> tuple[LearnerState, Counts, Any, Metrics]:
        """Learns from a rollout, or adds it to the ring of the shard and does all updates that are due.

        Args:
          state: the learner's.
          counts: of batches, and of the replay.
          ring: of the shard, or ().
          trajectory: the rollout.
          actor_index: int32 []; the actor of its replica that made it.
          progress: float32 []; of the run.
          key: consumed.
        """
        ...


class CountsFn(Protocol):
    """Makes the counts of a run."""

    def __call__(self) -> Counts:
        """Makes the counts at the beginning."""
        ...


class RingFn(Protocol):
    """Makes the ring of a shard."""

    def __call__(self, trajectory: Trajectory, /) -> ArrayTree:
        """Makes an empty ring from the shapes of a trajectory of a shard; () without replay."""
        ...


class Learner(NamedTuple):
    """The functions of a learner, on one shard, under `collectives.DATA_AXES`.

    Metrics are sums over updates (see `means`).

    Attributes:
      counts: makes the counts at the beginning.
      ring: makes an empty ring.
      learn: learns from a rollout, or adds it and does all updates that are due.
      steps: the steps of `learn` with a replay, else None.
    """

    counts: CountsFn
    ring: RingFn
    learn: LearnRolloutFn
    steps: Steps | None = None

    @property
    def defers_updates(self) -> bool:
        """True if updates may wait (see `Counts.pending_updates`)."""
        return self.steps is not None and self.steps.run_pending_updates is not None


def require_room(
    replay_state: ReplayState, devices: list[Any], *, on_host: bool = False, memory: ArrayTree = ()
) -> None:
    """Checks that a replay fits, and the memory that an agent has of its lanes.

    Args:
      replay_state: shapes; its ring and prefetched samples are spread evenly over the devices.
      devices: all of one kind.
      on_host: whether the ring is in the host's memory instead.
      memory: shapes of the agent's memory of all lanes, spread evenly as well.

    Raises:
      ValueError: where a device, or the host, has less memory than its part needs.
    """
    size, lanes = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 2**30 for tree in (replay_state[1:], memory)
    )
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if on_host:
        if size > machine:
            raise ValueError(
                f"the replay needs {size:.1f} GiB, and the host has {machine:.1f} GiB; lower replay_capacity."
            )
        return
    # CPU devices share the machine's memory, and say nothing of it.
    needed, limit = (size + lanes) / len(devices), topology.memory_limit(devices)
    there = limit / 2**30 if limit is not None else machine / len(devices)
    if needed > there and lanes > size:
        raise ValueError(
            f"the agent's memory of its lanes needs {lanes / len(devices):.1f} GiB on each device, and {devices[0]} "
            f"has {there:.1f} GiB; lower num_envs, frame_stack or core_memory, or use more devices."
        )
    if needed > there:
        elsewhere = (
            f", or keep it in the host's memory ({machine:.1f} GiB) with arch='sebulba' and replay_memory='host'"
            if size <= machine
            else ""
        )
        raise ValueError(
            f"the replay needs {needed:.1f} GiB on each device, and {devices[0]} has {there:.1f} GiB; lower "
            f"replay_capacity, use more devices{elsewhere}."
        )


def require_room_for_all(members: ArrayTree, devices: list[Any]) -> None:
    """Checks that a device could hold a tree of all members: to copy between members XLA may gather it on each.

    Raises:
      ValueError: where a device has less memory.
    """
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(members)) / 2**30
    limit = topology.memory_limit(devices)
    if limit is not None and needed > limit / 2**30:
        raise ValueError(
            f"pbt: parameters and optimiser of all members need {needed:.1f} GiB, and {devices[0]} has "
            f"{limit / 2**30:.1f} GiB, where they meet to be copied; use a smaller population or network."
        )


def final_draws(agent: Agent, updates: int) -> int:
    """Counts the draws (`ReplaySpec.updates_per_draw`) of so many updates after the last step.

    Raises:
      ValueError: where the agent cannot do them, or would learn nothing in them.
    """
    if not updates:
        return 0
    if agent.replay is None or agent.replay.fraction:
        raise ValueError(
            f"final_updates={updates}: {agent.name} learns from every rollout once, and has none after the last step; "
            "leave it out."
        )
    # `progress` stays 1 after the last step, where these schedules end.
    names = ("learning_rate_schedule", "final_rate", "learning_rate_warmup")
    schedule, final_rate, warmup = (getattr(agent.config, name, 0) for name in names)
    if schedule in ("linear", "cosine") and not final_rate and warmup < 1:
        raise ValueError(
            f"final_updates={updates}: learning_rate_schedule={schedule!r} falls to 0 at the last step, after which "
            "updates would learn nothing; use learning_rate_schedule='constant', or 'linear' with a final_rate above "
            "0, such as 0.1."
        )
    G = agent.replay.updates_per_draw
    if updates % G:
        raise ValueError(f"final_updates={updates} is not a multiple of the {G} updates that are drawn at once.")
    return updates // G


def add_updates(replay_state: ReplayState, draws: int) -> ReplayState:
    """Makes the updates of further draws due, unless there is not enough to learn from."""
    counts = replay_state.counts
    sharding = counts.pending_updates.sharding
    add = jax.jit(lambda pending, filled: pending + draws * filled, out_shardings=sharding)
    return replay_state._replace(counts=counts._replace(pending_updates=add(counts.pending_updates, counts.filled)))


PER_CALL = ("replay/size", "replay/updates", "replay/ratio", "sebulba/policy_lag", "sebulba/policy_lag_max")
"""Metrics of a call of `learn`; others are of its updates, of which an agent with replay may do none or several."""


def means(sums: Mapping[str, Any], calls: int) -> dict[str, np.ndarray]:
    """Computes means of metrics from their sums over calls of `learn` (`replay_steps.add_metrics`); NaN without any."""
    updates = sums.get("replay/updates", np.float64(calls))
    with np.errstate(invalid="ignore", divide="ignore"):
        # Of the largest, x u / u: NaN where there was no update.
        sums = {name: np.asarray(x) * (updates if name in LARGEST else 1.0) for name, x in sums.items()}
        return {name: x / (calls if name in PER_CALL else updates) for name, x in sums.items()}


def make(agent: Agent, observation: ArrayTree, *, lanes: int, groups: int, num_shards: int) -> Learner:
    """Makes the learner of an agent.

    Args:
      agent: the agent.
      observation: one lane's observation (shapes will do).
      lanes: of a trajectory on one shard.
      groups: actors whose trajectories come in turn, each with lanes of its own.
      num_shards: S.

    Raises:
      ValueError: where a replay does not fit the rollouts or the shards.
    """
    spec = agent.replay
    if spec is None:
        return Learner(lambda: Counts(jnp.int32(0)), lambda trajectory: (), _learn_at_once(agent))
    buffer = replay.make(
        spec,
        observation,
        rollout_length=agent.config.rollout_length,
        lanes=lanes,
        groups=groups,
        num_shards=num_shards,
    )
    steps = (update_on_rollout if spec.fraction else update_from_replay).make(agent, buffer)

    def counts() -> Counts:
        of_draws = [jnp.int32(0) for _ in range(5)] if steps.run_pending_updates else ()
        return Counts(jnp.int32(0), jnp.zeros(groups, jnp.int32), *of_draws)

    return Learner(counts, buffer.init, _learn_with_replay(steps), steps)


def _learn_at_once(agent: Agent) -> LearnRolloutFn:
    """Makes a function that learns from every rollout once."""

    def learn(
        learner: LearnerState, counts: Counts, ring: Any, trajectory: Trajectory, actor_index: Any, *rest: Any
    ) -> tuple[LearnerState, Counts, Any, Metrics]:
        learner, metrics = agent.learn(learner, trajectory, *rest)
        return learner, counts._replace(batches=counts.batches + 1), ring, metrics

    return learn


def _learn_with_replay(steps: Steps) -> LearnRolloutFn:
    """Makes a function that adds every rollout, and does as many updates as are due."""

    def learn(
        state: LearnerState,
        counts: Counts,
        ring: replay.Ring,
        trajectory: Trajectory,
        actor_index: jax.Array | int,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Counts, replay.Ring, Metrics]:
        # Add first, so that an update may draw the rows of its own rollout.
        counts, ring, add_metrics = steps.add(counts, ring, trajectory, actor_index)
        if steps.run_pending_updates:
            state, counts, ring, metrics = steps.run_pending_updates(
                state, counts, ring, counts.pending_updates, progress, key
            )
            return state, counts, ring, metrics | add_metrics
        # Else one update follows each rollout: draw, learn from both, write priorities back.
        target = steps.target_params(state, progress)
        ring, samples, prepared, prepare_metrics = steps.prepare(target, counts, ring, trajectory, progress, key)
        state, metrics, priorities = steps.learn(state, prepared, progress)
        ring, write_metrics = steps.write(counts, ring, samples, priorities)
        return state, counts, ring, metrics | prepare_metrics | write_metrics | add_metrics

    return learn
