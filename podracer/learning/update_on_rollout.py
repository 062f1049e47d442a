"""The steps of an agent that learns from every rollout once, next to replayed ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import trajectories
from podracer.learning.replay_steps import (
    Counts,
    Prepared,
    Steps,
    TargetParams,
    add_rollout,
    importance_exponent,
    update_keys,
)
from podracer.replay import Buffer, Ring
from podracer.topology import collectives
from podracer.types import Agent, LearnerState, Metrics, Trajectory


def make(agent: Agent, buffer: Buffer) -> Steps:
    """Makes the steps of one update for every rollout, on that rollout next to replayed ones.

    Raises:
      ValueError: where no whole number of replayed lanes makes up `ReplaySpec.fraction` of a batch.
    """
    spec, lanes = buffer.spec, buffer.shape.lanes
    n = round(lanes * spec.fraction / (1.0 - spec.fraction))
    if not 0 < n <= lanes or not np.isclose(n / (n + lanes), spec.fraction):
        raise ValueError(
            f"replay_fraction={spec.fraction} of a batch cannot join {lanes} new lanes per shard: use 0.5, or "
            f"n / (n + {lanes}) with n up to {lanes}."
        )

    def size_of(counts: Counts) -> jax.Array:
        return buffer.num_shards * buffer.num_sequences(counts.rollouts)

    def add(
        counts: Counts, ring: Ring, trajectory: Trajectory, actor_index: jax.Array | int
    ) -> tuple[Counts, Ring, Metrics]:
        ring, counts = add_rollout(buffer, ring, counts, trajectory, actor_index)
        return counts, ring, {"replay/size": size_of(counts).astype(jnp.float32)}

    def prepare(
        target: TargetParams,
        counts: Counts,
        ring: Ring,
        rollout: Trajectory,
        progress: jax.Array,
        key: jax.Array,
        draws_ahead: Any = 0,  # always 0: there is one update at a time
    ) -> Any:
        sample_key, learn_key = update_keys(key, 0)
        available = size_of(counts) > 0
        samples = buffer.sample(ring, counts.rollouts, sample_key, n, importance_exponent(spec, progress))
        replayed = buffer.gather(ring, samples)
        # Before there is anything to replay, lanes of the newest rollout are learnt from twice.
        newest = trajectories.by_lane(lambda axis, x: lax.slice_in_dim(x, 0, n, axis=axis), rollout)
        replayed = jax.tree.map(lambda x, y: jnp.where(available, x, y), replayed, newest)
        batch = trajectories.by_lane(lambda axis, *x: jnp.concatenate(x, axis), rollout, replayed)
        age = jnp.where(available, samples.age, 0).astype(jnp.float32)
        metrics = {"replay/age": collectives.global_mean(age, jnp.ones(n))}
        return ring, samples, Prepared(batch, jax.random.key_data(learn_key)), metrics

    def learn(state: LearnerState, prepared: Prepared, progress: jax.Array) -> tuple[LearnerState, Metrics, Any]:
        return *agent.learn(state, prepared.batch, progress, jax.random.wrap_key_data(prepared.key)), ()

    return Steps(
        add,
        lambda state, progress: TargetParams(),
        prepare,
        learn,
        write=lambda counts, ring, samples, priorities: (ring, {}),
    )
