"""Learning from rollouts: at once, or from samples of a replay to which they are added.

How many updates follow a rollout is decided by counting what went into the replay and what came out, never by time:
runs repeat, and the replay ratio is what the configuration says. Updates that are due are a number in the run's state
(`Counts.pending`), so that a driver may do them all at once, a few at a time, or beside the next rollout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from podracer import replay, topology
from podracer.learning.replay_steps import LARGEST, Counts, Steps, mixed, sampled
from podracer.types import Agent, ArrayTree, LearnerState, Metrics, Trajectory


class Experience(NamedTuple):
    """The replay state of a learner.

    Attributes:
      counts: without leading dims.
      ring: `replay.Ring` of every shard, or () without replay.
      ahead: what was prepared of the next group of updates before it was due, or () where nothing is
        (`podracer.sebulba.replay_devices`).
    """

    counts: Counts
    ring: Any
    ahead: Any = ()


class LearnFn(Protocol):
    """Learns once a rollout is there."""

    def __call__(
        self,
        state: LearnerState,
        counts: Counts,
        ring: Any,
        trajectory: Trajectory,
        group: jax.Array | int,
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
          group: int32 []; the actor of its replica that made it.
          progress: float32 []; of the run.
          key: consumed.
        """
        ...


class Learner(NamedTuple):
    """The functions of a learner, on one shard, under `collectives.DATA_AXES`.

    Metrics are sums over updates (see `means`).

    Attributes:
      counts: `() -> Counts`; at the beginning.
      ring: `(Trajectory) -> ring`; empty, from the shapes of a trajectory of a shard.
      learn: from a rollout, or after adding it, all that is due.
      steps: what `learn` is made of with a replay, else None.
    """

    counts: Callable[[], Counts]
    ring: Callable[[Trajectory], ArrayTree]
    learn: LearnFn
    steps: Steps | None = None

    @property
    def drains(self) -> bool:
        """True if updates may wait (see `Counts.pending`)."""
        return self.steps is not None and self.steps.drain is not None


def require_room(experience: Experience, devices: list[Any], *, on_host: bool = False, memory: ArrayTree = ()) -> None:
    """Checks that a replay fits, and the memory that an agent has of its lanes.

    Args:
      experience: shapes; its ring, and what is prepared ahead, are spread evenly over the devices.
      devices: all of one kind.
      on_host: whether the ring is in the host's memory instead.
      memory: shapes of the agent's memory of all lanes, spread evenly as well.

    Raises:
      ValueError: where a device, or the host, has less memory than its part needs.
    """
    size, lanes = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 2**30 for tree in (experience[1:], memory)
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
            f"has {there:.1f} GiB; lower core_memory or num_envs, or use more devices."
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


def final_groups(agent: Agent, updates: int) -> int:
    """Groups of updates behind the last step, of so many updates.

    Raises:
      ValueError: where the agent cannot do them.
    """
    if not updates:
        return 0
    if agent.replay is None or agent.replay.fraction:
        raise ValueError(
            f"final_updates={updates}: {agent.name} learns from every rollout once, and has none behind the last step; "
            "leave it out."
        )
    if updates % agent.replay.group:
        raise ValueError(
            f"final_updates={updates} is not a multiple of the {agent.replay.group} updates that are drawn at once."
        )
    return updates // agent.replay.group


def owing(experience: Experience, groups: int) -> Experience:
    """With so many more groups of updates that are due, unless there is not enough to learn from."""
    counts = experience.counts
    more = jax.jit(lambda pending, filled: pending + groups * filled, out_shardings=counts.pending.sharding)
    return experience._replace(counts=counts._replace(pending=more(counts.pending, counts.filled)))


PER_CALL = ("replay/size", "replay/updates", "replay/ratio", "sebulba/policy_lag", "sebulba/policy_lag_max")
"""Metrics of a call of `learn`; others are of its updates, of which an agent with replay may do none or several."""


def means(sums: Mapping[str, Any], calls: int) -> dict[str, np.ndarray]:
    """Means of metrics from their sums over calls of `learn` (see `steps.added`); NaN without anything to average."""
    updates = sums.get("replay/updates", np.float64(calls))
    with np.errstate(invalid="ignore", divide="ignore"):
        # Of the largest, x u / u: NaN where there was no update.
        sums = {name: np.asarray(x) * (updates if name in LARGEST else 1.0) for name, x in sums.items()}
        return {name: x / (calls if name in PER_CALL else updates) for name, x in sums.items()}


def make(agent: Agent, observation: ArrayTree, *, lanes: int, groups: int, num_shards: int) -> Learner:
    """The learner of an agent.

    Args:
      agent: the agent.
      observation: what a lane shows (shapes will do).
      lanes: of a trajectory on one shard.
      groups: actors whose trajectories come in turn, each with lanes of its own.
      num_shards: S.

    Raises:
      ValueError: where a replay does not fit the rollouts or the shards.
    """
    spec = agent.replay
    if spec is None:
        return Learner(lambda: Counts(jnp.int32(0)), lambda trajectory: (), _at_once(agent))
    plan = replay.layout(
        spec, rollout_length=agent.config.rollout_length, lanes=lanes, groups=groups, num_shards=num_shards
    )
    make_steps = mixed if spec.fraction else sampled
    steps = make_steps(agent, spec, plan, num_shards, observation)

    def counts() -> Counts:
        waiting = [jnp.int32(0) for _ in range(5)] if steps.drain else ()
        return Counts(jnp.int32(0), jnp.zeros(groups, jnp.int32), *waiting)

    return Learner(
        counts,
        lambda trajectory: replay.init(plan, spec, trajectory),
        _with_replay(steps),
        steps,
    )


def _at_once(agent: Agent) -> LearnFn:
    """Learning from every rollout once."""

    def learn(
        learner: LearnerState, counts: Counts, ring: Any, trajectory: Trajectory, group: Any, *rest: Any
    ) -> tuple[LearnerState, Counts, Any, Metrics]:
        learner, metrics = agent.learn(learner, trajectory, *rest)
        return learner, counts._replace(batches=counts.batches + 1), ring, metrics

    return learn


def _with_replay(steps: Steps) -> LearnFn:
    """Adding every rollout, and as many updates as are due."""

    def learn(
        state: LearnerState,
        counts: Counts,
        ring: replay.Ring,
        trajectory: Trajectory,
        group: jax.Array | int,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Counts, replay.Ring, Metrics]:
        counts, ring, call = steps.add(counts, ring, trajectory, group)
        if steps.drain:
            state, counts, ring, metrics = steps.drain(state, counts, ring, counts.pending, progress, key)
            return state, counts, ring, metrics | call
        elders = steps.elders(state, progress)
        ring, at, prepared, drawn = steps.prepare(elders, counts, ring, trajectory, progress, key)
        state, metrics, priorities = steps.learn(state, prepared, progress)
        ring, written = steps.write(counts, ring, at, priorities)
        return state, counts, ring, metrics | drawn | written | call

    return learn
