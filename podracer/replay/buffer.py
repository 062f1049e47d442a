"""The replay of one agent: the functions of a ring, bound once to its shape and to the agent's settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from podracer.replay import priority_refresh, sampling
from podracer.replay import ring as rings
from podracer.replay import shape as shapes
from podracer.replay.priority_refresh import NewPrioritiesFn
from podracer.replay.ring import Ring, Sample
from podracer.replay.shape import RingShape
from podracer.types import ArrayTree, ReplaySpec, Trajectory


@dataclasses.dataclass(frozen=True, eq=False)  # identity is equality, for caches of jit
class Buffer:
    """A replay buffer of one shard; its ring, a `Ring`, is an argument and a result (see `make`).

    Rings are consumed where a ring is returned. `counts`, int32 [groups], are the rollouts of each group so far.

    Attributes:
      shape: the ring's shape.
      spec: the agent's replay settings.
      num_shards: S.
      observations: tree of ShapeDtypeStruct [1, 1, ...]; the shapes of observations, which the ring stores flat.
    """

    shape: RingShape
    spec: ReplaySpec
    num_shards: int
    observations: ArrayTree

    def init(self, trajectory: Trajectory) -> Ring:
        """Makes an empty ring from an example trajectory [T, lanes] (shapes will do).

        Raises:
          ValueError: if sequences begin at every row, and the agent stores a state of every rollout.
        """
        return rings.init(self.shape, self.spec, trajectory)

    def add(self, ring: Ring, trajectory: Trajectory, actor_index: jax.Array | int, number: jax.Array | int) -> Ring:
        """Writes a rollout over the oldest one of its lanes.

        Args:
          ring: consumed; donate it.
          trajectory: [T, lanes].
          actor_index: int32 []; the actor whose lanes these are.
          number: int32 []; rollouts of this actor so far.
        """
        return rings.add(self.shape, self.spec, ring, trajectory, actor_index, number)

    def sample(self, ring: Ring, counts: jax.Array, key: jax.Array, n: int, beta: Any) -> Sample:
        """Draws n sequences with replacement, in proportion to their priority; `beta` corrects their weights.

        Args:
          ring: with at least one sequence.
          counts: int32 [groups].
          key: consumed.
          n: samples on this shard.
          beta: float32 []; exponent of the importance weights.
        """
        return sampling.sample(self.shape, ring, counts, key, n, beta)

    def gather(self, ring: Ring, samples: Sample) -> Trajectory:
        """Gathers n samples as a trajectory [length - 1, n], observations in `ReplaySpec.observation_rows`."""
        return rings.gather(self.shape, self.spec, ring, samples, self.observations)

    def write(self, ring: Ring, counts: jax.Array, samples: Sample, priority: jax.Array) -> tuple[Ring, jax.Array]:
        """Writes new priorities float32 [n] of samples, before the exponent.

        Returns:
          The ring, and the number of samples that were overwritten since they were drawn, float32 [].
        """
        return rings.write(self.shape, self.spec, ring, counts, samples, priority)

    def refresh(
        self,
        ring: Ring,
        counts: jax.Array,
        new_priorities: NewPrioritiesFn,
        version: jax.Array,
        part: tuple[jax.Array, int],
    ) -> Ring:
        """Recomputes the priorities of a part of all rows (see `podracer.replay.priority_refresh`).

        Args:
          ring: consumed.
          counts: int32 [groups].
          new_priorities: computes them; `Agent.refresh` with its parameters.
          version: int32 []; `num_updates` of these parameters.
          part: int32 [], the part from 0 on, and the number of parts of a sweep.
        """
        return priority_refresh.refresh(
            self.shape, self.spec, ring, counts, new_priorities, version, part, self.observations, self.num_shards
        )

    def num_sequences(self, counts: jax.Array) -> jax.Array:
        """Counts the sequences of this shard, masked ones included, int32 []."""
        return shapes.num_sequences(self.shape, counts)

    def transitions_since(self, samples: Sample) -> jax.Array:
        """Counts transitions of all lanes on all shards since row 0 of samples, int32 [n]."""
        return rings.transitions_since(self.shape, samples, self.num_shards)

    def generation_of(self, index: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers of the rollouts in which sequences begin, and of their lanes' newest, int32 [n] each."""
        return shapes.generation_of(self.shape, index, counts)


def make(
    spec: ReplaySpec, observation: ArrayTree, *, rollout_length: int, lanes: int, groups: int, num_shards: int
) -> Buffer:
    """Binds a replay to an agent's settings.

    Args:
      spec: the agent's replay settings.
      observation: one lane's observation (shapes will do).
      rollout_length: T.
      lanes: lanes of a group on one shard.
      groups: actors that fill the ring in turn.
      num_shards: S.

    Raises:
      ValueError: where rollouts do not fit the sequences or the capacity.
    """
    size = shapes.ring_shape(spec, rollout_length=rollout_length, lanes=lanes, groups=groups, num_shards=num_shards)
    observations = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, 1, *x.shape), x.dtype), observation)
    return Buffer(size, spec, num_shards, observations)
