"""What a driver does with a rollout: learn from it at once, or add it to a replay and learn from samples.

How many updates follow a rollout is decided by counting what went into the replay and what came out, never by time:
runs repeat, and the replay ratio is what the configuration says.
"""

from __future__ import annotations

import fractions
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import ops, replay
from podracer.types import Agent, ArrayTree, Batch, LearnerState, Metrics, Replay, Trajectory


class Counts(NamedTuple):
    """What has happened, the same on all shards of all devices and for all members of a population.

    Attributes:
      batches: int32 []; calls of `learn` since the run began.
      rollouts: int32 [groups]; rollouts of each group since the replay was empty, or () without replay.
      owed: int32 []; the part of an update that is owed, in units of the replay ratio's denominator, or ().
    """

    batches: jax.Array
    rollouts: Any = ()
    owed: Any = ()

    def emptied(self) -> Counts:
        """The counts once the replay was lost."""
        return self._replace(**jax.tree.map(jnp.zeros_like, {"rollouts": self.rollouts, "owed": self.owed}))


class Experience(NamedTuple):
    """What learning keeps of what was lived through.

    Attributes:
      counts: without leading dims.
      ring: `replay.Ring` of every shard, or () without replay.
    """

    counts: Counts
    ring: Any


class Learner(NamedTuple):
    """The functions of a learner; `ring` is one shard's.

    Attributes:
      counts: `() -> Counts`; at the beginning.
      ring: `(Trajectory) -> ring`; empty, from the shapes of a trajectory of a shard.
      learn: `(LearnerState, Counts, ring, Trajectory, group int32, progress, key) -> (LearnerState, Counts, ring,
        Metrics)`; runs under `ops.DATA_AXES`. Metrics are sums over the updates of this call (see `means`).
    """

    counts: Callable[[], Counts]
    ring: Callable[[Trajectory], ArrayTree]
    learn: Callable[..., tuple[LearnerState, Counts, ArrayTree, Metrics]]


def require_room(experience: Experience, devices: list[Any]) -> None:
    """Checks that a replay fits.

    Args:
      experience: shapes; its ring is spread evenly over the devices.
      devices: all of one kind.

    Raises:
      ValueError: where a device has less memory than its part needs.
    """
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(experience.ring)) / len(devices)
    stats = devices[0].memory_stats() or {}
    # CPU devices share the machine's memory, and say nothing of it.
    shared = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
    there = stats.get("bytes_limit", shared)
    if needed > there:
        raise ValueError(
            f"the replay needs {needed / 2**30:.1f} GiB on each device, and {devices[0]} has {there / 2**30:.1f} GiB; "
            "lower replay_capacity, or use more devices."
        )


PER_CALL = ("replay/size", "replay/updates", "sebulba/policy_lag", "sebulba/policy_lag_max")
"""Metrics of a call of `learn`; all others are of its updates, of which an agent with replay may do none or several."""


def means(sums: Mapping[str, Any], calls: int) -> dict[str, np.ndarray]:
    """Means of metrics from their sums over calls of `learn`; NaN where there was nothing to average."""
    updates = sums.get("replay/updates", np.float64(calls))
    with np.errstate(invalid="ignore", divide="ignore"):
        return {name: np.asarray(x) / (calls if name in PER_CALL else updates) for name, x in sums.items()}


def make(agent: Agent, *, lanes: int, groups: int, num_shards: int) -> Learner:
    """The learner of an agent.

    Args:
      agent: the agent.
      lanes: of a trajectory on one shard.
      groups: actors whose trajectories come in turn, each with lanes of its own.
      num_shards: S.

    Raises:
      ValueError: where a replay does not fit the rollouts or the shards.
    """
    spec = agent.replay
    if spec is None:
        return Learner(lambda: Counts(jnp.int32(0)), lambda trajectory: (), _at_once(agent))
    counts = lambda: Counts(jnp.int32(0), jnp.zeros(groups, jnp.int32), jnp.int32(0))  # noqa: E731
    plan = replay.layout(
        spec, rollout_length=agent.config.rollout_length, lanes=lanes, groups=groups, num_shards=num_shards
    )
    make_learn = _mixed if spec.fraction else _replayed
    ring = lambda trajectory: replay.init(plan, spec, trajectory)  # noqa: E731
    return Learner(counts, ring, make_learn(agent, spec, plan, num_shards))


def _added(
    spec: Replay, plan: replay.Layout, ring: replay.Ring, counts: Counts, trajectory: Trajectory, group: jax.Array
) -> tuple[replay.Ring, Counts]:
    """The ring and the counts with one more rollout."""
    number = counts.rollouts[group]
    # A loop of one turn whose length XLA does not know. Left to itself, XLA:CPU writes the rollout twice, for what this
    # call samples and for what it returns, and copies the whole ring to do so.
    one_turn = 1 + jnp.minimum(counts.batches, 0)
    add = lambda _, ring: replay.add(plan, spec, ring, trajectory, group, number)  # noqa: E731
    ring = lax.fori_loop(0, one_turn, add, ring)
    rollouts = counts.rollouts.at[group].add(1)
    return ring, counts._replace(rollouts=rollouts, batches=counts.batches + 1)


def _at_once(agent: Agent) -> Callable[..., Any]:
    """Learning from every rollout once."""

    def learn(
        learner: LearnerState, counts: Counts, ring: Any, trajectory: Trajectory, group: Any, *rest: Any
    ) -> tuple[LearnerState, Counts, Any, Metrics]:
        learner, metrics = agent.learn(learner, trajectory, *rest)
        return learner, counts._replace(batches=counts.batches + 1), ring, metrics

    return learn


def _mixed(agent: Agent, spec: Replay, plan: replay.Layout, num_shards: int) -> Callable[..., Any]:
    """Learning from every rollout once, next to replayed ones."""
    lanes = plan.lanes
    n = round(lanes * spec.fraction / (1.0 - spec.fraction))
    if not 0 < n <= lanes or not np.isclose(n / (n + lanes), spec.fraction):
        raise ValueError(
            f"replay_fraction={spec.fraction} of a batch cannot join {lanes} new lanes per shard: use 0.5, or "
            f"n / (n + {lanes}) with n up to {lanes}."
        )

    def learn(
        learner: LearnerState,
        counts: Counts,
        ring: replay.Ring,
        trajectory: Trajectory,
        group: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Counts, replay.Ring, Metrics]:
        sample_key, learn_key = jax.random.split(key)
        ring, counts = _added(spec, plan, ring, counts, trajectory, group)
        size = num_shards * replay.num_sequences(plan, counts.rollouts)
        at = replay.sample(plan, spec, ring, counts.rollouts, sample_key, n)
        # Before there is anything to replay, the newest rollout is seen twice.
        new = ops.by_lane(lambda axis, x: lax.slice_in_dim(x, 0, n, axis=axis), trajectory)
        old = jax.tree.map(lambda x, y: jnp.where(size > 0, x, y), replay.gather(plan, spec, ring, at), new)
        both = ops.by_lane(lambda axis, *x: jnp.concatenate(x, axis), trajectory, old)
        learner, metrics = agent.learn(learner, both, progress, learn_key)
        age = jnp.where(size > 0, at.age, 0).astype(jnp.float32)
        metrics |= {
            "replay/size": size.astype(jnp.float32),
            "replay/age": ops.global_mean(age, jnp.ones(n)),
        }
        return learner, counts, ring, metrics

    return learn


def _replayed(agent: Agent, spec: Replay, plan: replay.Layout, num_shards: int) -> Callable[..., Any]:
    """Learning from samples alone, as often as the replay ratio says."""
    if spec.batch_size % num_shards:
        raise ValueError(f"batch_size={spec.batch_size} is not divisible by the {num_shards} shards.")
    n = spec.batch_size // num_shards
    per_call = fractions.Fraction(spec.ratio).limit_denominator(10_000) * plan.lanes * num_shards / spec.batch_size

    def due(counts: Counts, size: jax.Array) -> tuple[jax.Array, jax.Array]:
        """How many updates this call owes, and the part of one that is owed from then on."""
        whole, part = divmod(per_call.numerator, per_call.denominator)
        ready, owed = size >= spec.min_size, counts.owed + part
        more = owed >= per_call.denominator
        owed = jnp.where(more, owed - per_call.denominator, owed)
        return jnp.where(ready, whole + more.astype(jnp.int32), 0), jnp.where(ready, owed, counts.owed)

    def update(
        learner: LearnerState, ring: replay.Ring, counts: Counts, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, jax.Array, Metrics]:
        """One update; returns the priorities of the ring, all that it changes there."""
        sample_key, learn_key = jax.random.split(key)
        at = replay.sample(plan, spec, ring, counts.rollouts, sample_key, n)
        batch = Batch(replay.gather(plan, spec, ring, at), at.weight)
        learner, metrics, priorities = agent.learn(learner, batch, progress, learn_key)
        ring, overwritten = replay.update(plan, spec, ring, counts.rollouts, at, priorities)
        even = jnp.ones(n)
        metrics |= {
            "replay/age": ops.global_mean(at.age.astype(jnp.float32), even),
            "replay/priority": ops.global_mean(priorities, even),
            "replay/priority_max": ops.global_max(priorities),
            "replay/weight": ops.global_mean(at.weight, even),
            "replay/overwritten": ops.global_sum(overwritten),
        }
        return learner, ring.priority, metrics

    def learn(
        learner: LearnerState,
        counts: Counts,
        ring: replay.Ring,
        trajectory: Trajectory,
        group: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Counts, replay.Ring, Metrics]:
        ring, counts = _added(spec, plan, ring, counts, trajectory, group)
        size = num_shards * replay.num_sequences(plan, counts.rollouts)
        num_updates, owed = due(counts, size)

        def body(i: jax.Array, carry: Any) -> Any:
            learner, priority, sums = carry
            learner, priority, metrics = update(
                learner, ring._replace(priority=priority), counts, progress, jax.random.fold_in(key, i)
            )
            return learner, priority, jax.tree.map(jnp.add, sums, metrics)

        shapes = jax.eval_shape(update, learner, ring, counts, progress, key)[2]
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        learner, priority, metrics = lax.fori_loop(0, num_updates, body, (learner, ring.priority, nothing))
        metrics |= {"replay/size": size.astype(jnp.float32), "replay/updates": num_updates.astype(jnp.float32)}
        return learner, counts._replace(owed=owed), ring._replace(priority=priority), metrics

    return learn
