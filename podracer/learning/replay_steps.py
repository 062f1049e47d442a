"""The steps of learning with a replay: rollouts are added; samples are prepared, learnt from, and get new priorities.

Two modules make them. With `update_on_rollout` an agent learns from every rollout once, next to replayed ones; with
`update_from_replay` from samples alone, as often as the replay ratio says. A driver makes one program of them
(`podracer.learning.learner`), or runs some elsewhere (`podracer.sebulba.replay_devices`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from podracer import topology
from podracer.replay import Buffer, Ring, Sample
from podracer.types import LearnerState, Metrics, ReplaySpec, Trajectory


class Counts(NamedTuple):
    """Counts of batches, rollouts and updates, the same on all shards, devices and members of a population.

    Updates on samples are counted in draws: G updates whose samples are drawn together (`ReplaySpec.updates_per_draw`).

    Attributes:
      batches: int32 []; rollouts that were learnt from or added since the run began.
      rollouts: int32 [groups]; rollouts of each group since the replay was empty, or () without replay.
      fractional_updates: int32 []; numerator of the fraction of a draw that is carried over to the next rollout, or ().
        Its denominator is that of the draws due for a rollout, `ratio * starts / (batch_size * G)` in lowest terms.
      pending_updates: int32 []; draws that are due, or () where updates are on the newest rollout.
      deferred_updates: int32 []; draws that were due when the replay was lost, and are again once it is filled, or ().
      draws: int32 []; draws since the run began, or (); the keys of updates are made from it.
      filled: int32 []; 1 once the replay has enough to learn from, or ().
    """

    batches: jax.Array
    rollouts: Any = ()
    fractional_updates: Any = ()
    pending_updates: Any = ()
    deferred_updates: Any = ()
    draws: Any = ()
    filled: Any = ()

    def without_rollouts(self) -> Counts:
        """Returns the counts of a lost replay. Updates are deferred, not lost: target networks stay on schedule."""
        deferred = jax.tree.map(jnp.add, self.deferred_updates, self.pending_updates)
        empty = {name: getattr(self, name) for name in ("rollouts", "pending_updates", "filled")}
        return self._replace(**jax.tree.map(jnp.zeros_like, empty), deferred_updates=deferred)


class TargetParams(NamedTuple):
    """Parameters of earlier updates with which samples are prepared: ActorParams, or () for agents without them.

    Attributes:
      reanalyse: `Agent.reanalyse` acts with them.
      refresh: `Agent.refresh` computes priorities with them.
      num_updates: int32 []; the learner's updates when these samples are drawn, of an agent that has either.
    """

    reanalyse: Any = ()
    refresh: Any = ()
    num_updates: Any = ()


class Prepared(NamedTuple):
    """The samples of a draw, ready to learn from.

    Attributes:
      batch: the argument of `Agent.learn`, for all updates of the draw.
      key: uint32; data of the key that they consume, because keys are no arrays on their way between devices.
      target_version: int32 []; `num_updates` of the target parameters that reanalysed the samples; () before that.
      drawn_at: int32 []; the learner's updates when the samples were drawn, or ().
    """

    batch: Any
    key: jax.Array
    target_version: Any = ()
    drawn_at: Any = ()


class AddFn(Protocol):
    """Adds a rollout to a replay."""

    def __call__(
        self, counts: Counts, ring: Ring, trajectory: Trajectory, actor_index: jax.Array | int, /
    ) -> tuple[Counts, Ring, Metrics]:
        """Adds a rollout, and raises `Counts.pending_updates` by the updates that are due for it.

        Args:
          counts: of the replay.
          ring: of the shard; consumed.
          trajectory: [T, lanes].
          actor_index: int32 []; the actor of its replica that made it.
        """
        ...


class TargetParamsFn(Protocol):
    """Takes target parameters out of a learner's state."""

    def __call__(self, state: LearnerState, progress: jax.Array, /) -> TargetParams:
        """Takes them out; `progress` float32 [] is the share of the run that is done."""
        ...


class PrepareFn(Protocol):
    """Prepares the samples of a draw."""

    def __call__(
        self,
        target: TargetParams,
        counts: Counts,
        ring: Ring,
        rollout: Any,
        progress: jax.Array,
        key: jax.Array,
        draws_ahead: Any = 0,
        /,
    ) -> tuple[Ring, Sample, Prepared, Metrics]:
        """Draws samples, does a part of a sweep and reanalyses; of the ring it changes priorities only.

        Args:
          target: target parameters.
          counts: of the replay.
          ring: of the shard.
          rollout: the newest Trajectory, to learn from next to replayed ones, or ().
          progress: float32 []; the share of the run that is done.
          key: consumed.
          draws_ahead: int32 []; 0 for the next draw, 1 for the one after it.
        """
        ...


class UpdateFn(Protocol):
    """Learns from prepared samples."""

    def __call__(
        self, state: LearnerState, prepared: Prepared, progress: jax.Array, /
    ) -> tuple[LearnerState, Metrics, Any]:
        """Does the updates of a draw; samples that are not reanalysed yet are before.

        Returns:
          The new state, metrics, and the samples' new priorities [n], or () where the agent has none.
        """
        ...


class WriteFn(Protocol):
    """Writes new priorities."""

    def __call__(self, counts: Counts, ring: Ring, samples: Sample, priorities: Any, /) -> tuple[Ring, Metrics]:
        """Writes the priorities [n] of samples [n], or leaves all as it is for ()."""
        ...


class RunPendingFn(Protocol):
    """Does pending updates."""

    def __call__(
        self, state: LearnerState, counts: Counts, ring: Ring, num_draws: Any, progress: jax.Array, key: jax.Array, /
    ) -> tuple[LearnerState, Counts, Ring, Metrics]:
        """Prepares, learns and writes, `num_draws` times: a Python integer, or int32 []."""
        ...


class Steps(NamedTuple):
    """The steps of learning with a replay, on one shard (see `podracer.learning.learner.Learner`).

    Attributes:
      add: adds a rollout.
      target_params: takes the parameters for `prepare` out of the learner's state.
      prepare: prepares the samples of a draw.
      learn: does the updates of a draw.
      write: writes new priorities.
      run_pending_updates: does pending updates. None where there is one update for every rollout, on that rollout next
        to replayed ones.
    """

    add: AddFn
    target_params: TargetParamsFn
    prepare: PrepareFn
    learn: UpdateFn
    write: WriteFn
    run_pending_updates: RunPendingFn | None = None


LARGEST = ("reanalyse/staleness_max", "replay/priority_staleness_max", "refresh/age_max", "reset/count")
"""Metrics that are the largest of all updates, and no mean."""


def add_metrics(sums: Metrics, metrics: Metrics) -> Metrics:
    """Adds the metrics of further updates to sums of metrics; of those in `LARGEST` it keeps the larger one."""
    joins = {name: jnp.maximum if name in LARGEST else jnp.add for name in sums}
    return {name: join(sums[name], metrics[name]) for name, join in joins.items()}


def update_keys(key: jax.Array, number: Any) -> tuple[jax.Array, jax.Array]:
    """Makes the keys of drawing and of learning, for a draw by its number since the run began."""
    sample_key, learn_key = jax.random.split(jax.random.fold_in(key, number))
    return sample_key, learn_key


def add_rollout(
    buffer: Buffer, ring: Ring, counts: Counts, trajectory: Trajectory, actor_index: jax.Array | int
) -> tuple[Ring, Counts]:
    """Adds a rollout to the ring, and to the counts."""
    number = counts.rollouts[actor_index]
    add = lambda _, ring: buffer.add(ring, trajectory, actor_index, number)  # noqa: E731
    # On CPU, a loop of one turn whose length XLA does not know. Left to itself, XLA:CPU writes the rollout twice, for
    # what this call samples and for what it returns, and copies the whole ring to do so. On GPU it would stop the host.
    ring = lax.fori_loop(0, 1 + jnp.minimum(counts.batches, 0), add, ring) if topology.on_cpu() else add(0, ring)
    rollouts = counts.rollouts.at[actor_index].add(1)
    return ring, counts._replace(rollouts=rollouts, batches=counts.batches + 1)


def importance_exponent(spec: ReplaySpec, progress: jax.Array) -> jax.Array:
    """Computes beta, the exponent of importance weights."""
    beta = spec.importance_exponent
    return beta(progress) if callable(beta) else jnp.float32(beta)
