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

from podracer import replay, topology
from podracer.learning import collectives, trajectories
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
        Metrics)`; runs under `collectives.DATA_AXES`. Metrics are sums over the updates of this call (see `means`).
      steps: what `learn` is made of, or None without replay.
    """

    counts: Callable[[], Counts]
    ring: Callable[[Trajectory], ArrayTree]
    learn: Callable[..., tuple[LearnerState, Counts, ArrayTree, Metrics]]
    steps: Steps | None = None


class Steps(NamedTuple):
    """The steps of learning with a replay, on one shard, each under `collectives.DATA_AXES`.

    Attributes:
      add: `(Counts, ring, Trajectory, group) -> (Counts, ring, num_updates int32, Metrics)`; the metrics of a call.
      draw: `(Counts, ring, Trajectory, key) -> (Sample, what Agent.learn takes, Metrics)`.
      learn: `(LearnerState, what was drawn, progress, key) -> (LearnerState, Metrics, priorities [n] or ())`.
      write: `(Counts, ring, Sample, priorities) -> (Ring.priority, Metrics)`.
    """

    add: Callable[..., tuple[Counts, replay.Ring, jax.Array, Metrics]]
    draw: Callable[..., tuple[replay.Sample, Any, Metrics]]
    learn: Callable[..., tuple[LearnerState, Metrics, Any]]
    write: Callable[..., tuple[jax.Array, Metrics]]


def update_keys(key: jax.Array, number: Any) -> tuple[jax.Array, jax.Array]:
    """The keys of `draw` and `learn` for one of the updates of a call."""
    sample_key, learn_key = jax.random.split(jax.random.fold_in(key, number))
    return sample_key, learn_key


def require_room(experience: Experience, devices: list[Any], *, on_host: bool = False) -> None:
    """Checks that a replay fits.

    Args:
      experience: shapes; its ring is spread evenly over the devices.
      devices: all of one kind.
      on_host: whether the ring is in the host's memory instead.

    Raises:
      ValueError: where a device, or the host, has less memory than its part needs.
    """
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(experience.ring)) / 2**30
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if on_host:
        if size > machine:
            raise ValueError(
                f"the replay needs {size:.1f} GiB, and the host has {machine:.1f} GiB; lower replay_capacity."
            )
        return
    # CPU devices share the machine's memory, and say nothing of it.
    needed, limit = size / len(devices), topology.memory_limit(devices)
    there = limit / 2**30 if limit is not None else machine / len(devices)
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


PER_CALL = ("replay/size", "replay/updates", "replay/ratio", "sebulba/policy_lag", "sebulba/policy_lag_max")
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
    make_steps = _mixed if spec.fraction else _sampled
    steps = make_steps(agent, spec, plan, num_shards)
    ring = lambda trajectory: replay.init(plan, spec, trajectory)  # noqa: E731
    return Learner(counts, ring, _with_replay(steps), steps)


def _at_once(agent: Agent) -> Callable[..., Any]:
    """Learning from every rollout once."""

    def learn(
        learner: LearnerState, counts: Counts, ring: Any, trajectory: Trajectory, group: Any, *rest: Any
    ) -> tuple[LearnerState, Counts, Any, Metrics]:
        learner, metrics = agent.learn(learner, trajectory, *rest)
        return learner, counts._replace(batches=counts.batches + 1), ring, metrics

    return learn


def _with_replay(steps: Steps) -> Callable[..., Any]:
    """Adding every rollout, and as many updates as are due."""

    def learn(
        learner: LearnerState,
        counts: Counts,
        ring: replay.Ring,
        trajectory: Trajectory,
        group: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Counts, replay.Ring, Metrics]:
        counts, ring, num_updates, call = steps.add(counts, ring, trajectory, group)

        def update(number: Any, learner: LearnerState, priority: jax.Array) -> tuple[LearnerState, jax.Array, Metrics]:
            # Of the ring, an update changes nothing but the priorities.
            now = ring._replace(priority=priority)
            sample_key, learn_key = update_keys(key, number)
            at, batch, drawn = steps.draw(counts, now, trajectory, sample_key)
            learner, metrics, priorities = steps.learn(learner, batch, progress, learn_key)
            priority, written = steps.write(counts, now, at, priorities)
            return learner, priority, metrics | drawn | written

        def body(i: jax.Array, carry: Any) -> Any:
            learner, priority, sums = carry
            learner, priority, metrics = update(i, learner, priority)
            return learner, priority, jax.tree.map(jnp.add, sums, metrics)

        shapes = jax.eval_shape(update, jnp.int32(0), learner, ring.priority)[2]
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        learner, priority, metrics = lax.fori_loop(0, num_updates, body, (learner, ring.priority, nothing))
        return learner, counts, ring._replace(priority=priority), metrics | call

    return learn


def _added(
    spec: Replay, plan: replay.Layout, ring: replay.Ring, counts: Counts, trajectory: Trajectory, group: jax.Array
) -> tuple[replay.Ring, Counts]:
    """The ring and the counts with one more rollout."""
    number = counts.rollouts[group]
    add = lambda _, ring: replay.add(plan, spec, ring, trajectory, group, number)  # noqa: E731
    # On CPU, a loop of one turn whose length XLA does not know. Left to itself, XLA:CPU writes the rollout twice, for
    # what this call samples and for what it returns, and copies the whole ring to do so. On GPU it would stop the host.
    ring = lax.fori_loop(0, 1 + jnp.minimum(counts.batches, 0), add, ring) if topology.on_cpu() else add(0, ring)
    rollouts = counts.rollouts.at[group].add(1)
    return ring, counts._replace(rollouts=rollouts, batches=counts.batches + 1)


def _mixed(agent: Agent, spec: Replay, plan: replay.Layout, num_shards: int) -> Steps:
    """One update for every rollout, on that rollout next to replayed ones."""
    lanes = plan.lanes
    n = round(lanes * spec.fraction / (1.0 - spec.fraction))
    if not 0 < n <= lanes or not np.isclose(n / (n + lanes), spec.fraction):
        raise ValueError(
            f"replay_fraction={spec.fraction} of a batch cannot join {lanes} new lanes per shard: use 0.5, or "
            f"n / (n + {lanes}) with n up to {lanes}."
        )

    def size_of(counts: Counts) -> jax.Array:
        return num_shards * replay.num_sequences(plan, counts.rollouts)

    def add(counts: Counts, ring: replay.Ring, trajectory: Trajectory, group: jax.Array) -> Any:
        ring, counts = _added(spec, plan, ring, counts, trajectory, group)
        return counts, ring, jnp.int32(1), {"replay/size": size_of(counts).astype(jnp.float32)}

    def draw(counts: Counts, ring: replay.Ring, trajectory: Trajectory, key: jax.Array) -> Any:
        there = size_of(counts) > 0
        at = replay.sample(plan, spec, ring, counts.rollouts, key, n)
        # Before there is anything to replay, the newest rollout is seen twice.
        observations = trajectory.timesteps.observation
        new = trajectories.by_lane(lambda axis, x: lax.slice_in_dim(x, 0, n, axis=axis), trajectory)
        old = jax.tree.map(lambda x, y: jnp.where(there, x, y), replay.gather(plan, spec, ring, at, observations), new)
        both = trajectories.by_lane(lambda axis, *x: jnp.concatenate(x, axis), trajectory, old)
        age = jnp.where(there, at.age, 0).astype(jnp.float32)
        return at, both, {"replay/age": collectives.global_mean(age, jnp.ones(n))}

    def learn(learner: LearnerState, both: Trajectory, progress: jax.Array, key: jax.Array) -> Any:
        return *agent.learn(learner, both, progress, key), ()

    return Steps(add, draw, learn, lambda counts, ring, at, priorities: (ring.priority, {}))


def _sampled(agent: Agent, spec: Replay, plan: replay.Layout, num_shards: int) -> Steps:
    """Updates on samples alone, as often as the replay ratio says."""
    if spec.batch_size % num_shards:
        raise ValueError(f"batch_size={spec.batch_size} is not divisible by the {num_shards} shards.")
    n = spec.batch_size // num_shards
    per_call = fractions.Fraction(spec.ratio).limit_denominator(10_000) * plan.lanes * num_shards / spec.batch_size
    mean = lambda x: collectives.global_mean(x, jnp.ones(n))  # noqa: E731

    def add(counts: Counts, ring: replay.Ring, trajectory: Trajectory, group: jax.Array) -> Any:
        ring, counts = _added(spec, plan, ring, counts, trajectory, group)
        size = num_shards * replay.num_sequences(plan, counts.rollouts)
        whole, part = divmod(per_call.numerator, per_call.denominator)
        ready, owed = size >= spec.min_size, counts.owed + part
        more = owed >= per_call.denominator
        owed = jnp.where(ready, jnp.where(more, owed - per_call.denominator, owed), counts.owed)
        num_updates = jnp.where(ready, whole + more.astype(jnp.int32), 0)
        updates = num_updates.astype(jnp.float32)
        call = {
            "replay/size": size.astype(jnp.float32),
            "replay/updates": updates,
            "replay/ratio": updates * (spec.batch_size / (plan.lanes * num_shards)),
        }
        return counts._replace(owed=owed), ring, num_updates, call

    def draw(counts: Counts, ring: replay.Ring, trajectory: Trajectory, key: jax.Array) -> Any:
        at = replay.sample(plan, spec, ring, counts.rollouts, key, n)
        metrics = {"replay/age": mean(at.age.astype(jnp.float32)), "replay/weight": mean(at.weight)}
        observations = trajectory.timesteps.observation
        return at, Batch(replay.gather(plan, spec, ring, at, observations), at.weight), metrics

    def write(counts: Counts, ring: replay.Ring, at: replay.Sample, priorities: jax.Array) -> Any:
        ring, overwritten = replay.update(plan, spec, ring, counts.rollouts, at, priorities)
        average = mean(priorities)
        return ring.priority, {
            "replay/priority": average,
            "replay/priority_std": jnp.sqrt(mean(jnp.square(priorities - average))),
            "replay/priority_max": collectives.global_max(priorities),
            "replay/overwritten": collectives.global_sum(overwritten),
        }

    return Steps(add, draw, agent.learn, write)
