"""The learning program of Sebulba: the agent's own `learn`, under `shard_map` over the learner devices.

A trajectory [T, B] arrives spread along B. Each device runs its logical shards side by side, as in Anakin, so equal
shards give equal results on any number of learner devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer import ops
from podracer.gradients import split_lanes
from podracer.topology import DATA_AXIS
from podracer.types import ActorParams, Agent, LearnerState, Metrics, Trajectory


class Learning(NamedTuple):
    """The compiled functions of a learner.

    Attributes:
      init: `(key, hyper) -> LearnerState`, a copy on every learner device.
      update: `(LearnerState, Trajectory, part int32, progress, key) -> (LearnerState, Metrics)`; learns from the
        `part`-th of `updates_per_batch` parts of every shard's lanes. The state is donated.
      publish: `(LearnerState, progress) -> ActorParams`; a copy that survives the donation of the state.
      like: the shapes of a trajectory, with the shardings of one that was spread.
      spread: puts a trajectory of one device on the learner devices, without waiting.
      state_sharding: of a LearnerState.
    """

    init: Callable[..., LearnerState]
    update: Callable[..., tuple[LearnerState, Metrics]]
    publish: Callable[[LearnerState, float], ActorParams]
    like: Callable[[Trajectory], Trajectory]
    spread: Callable[[Trajectory], Trajectory]
    state_sharding: NamedSharding


def make(agent: Agent, mesh: Mesh, num_shards: int, updates_per_batch: int = 1) -> Learning:
    """The learning functions on a mesh whose only axis is `data`."""
    by_lane = Trajectory(*(PartitionSpec(None, DATA_AXIS) for _ in Trajectory._fields))._replace(  # type: ignore[arg-type]
        actor_state=PartitionSpec(DATA_AXIS), lane=PartitionSpec(DATA_AXIS)
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    shards_here = num_shards // mesh.size

    def update(
        learner: LearnerState, trajectory: Trajectory, part: jax.Array, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics]:
        first_shard = lax.axis_index(DATA_AXIS) * shards_here

        def shard(trajectory: Trajectory, index: jax.Array) -> tuple[LearnerState, Metrics]:
            shard_key = jax.random.fold_in(jax.random.fold_in(key, learner.num_updates), first_shard + index)
            new, metrics = agent.learn(learner, _part(trajectory, part), progress, shard_key)
            lag = (learner.num_updates - trajectory.policy_version).astype(jnp.float32)
            metrics |= {
                "sebulba/policy_lag": ops.global_mean(lag, jnp.ones_like(lag)),
                "sebulba/policy_lag_max": ops.global_max(lag),
            }
            return new, metrics

        # What learning returns is reduced over shards and so has no shard axis: out_axes=None refuses anything else.
        split = split_lanes(trajectory, shards_here)
        return jax.vmap(shard, axis_name="shard", in_axes=(0, 0), out_axes=None)(
            split, jnp.arange(shards_here, dtype=jnp.int32)
        )

    def _part(trajectory: Trajectory, part: jax.Array) -> Trajectory:
        if updates_per_batch == 1:
            return trajectory
        size = trajectory.lane.shape[0] // updates_per_batch
        cut = lambda axis, x: lax.dynamic_slice_in_dim(x, part * size, size, axis)  # noqa: E731
        return _by_lane(cut, trajectory)

    mapped = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(PartitionSpec(), by_lane, PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        # Gradients are reduced by hand (ops.global_sum); with the check on, JAX would add a second reduction.
        check_vma=False,
    )

    def publish(learner: LearnerState, progress: jax.Array) -> ActorParams:
        # Copied: the learner's own arrays are donated to the next update, and jit passes inputs on without a copy.
        return jax.tree.map(jnp.copy, agent.actor_params(learner, progress))

    def shardings(trajectory: Trajectory) -> Trajectory:
        parts = zip((NamedSharding(mesh, spec) for spec in by_lane), trajectory)  # type: ignore[arg-type]
        return Trajectory(*(jax.tree.map(lambda _, s=s: s, x) for s, x in parts))

    def like(trajectory: Trajectory) -> Trajectory:
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        return jax.tree.map(place, trajectory, shardings(trajectory))

    def spread(trajectory: Trajectory) -> Trajectory:
        if mesh.size == 1 and trajectory.lane.devices() == set(mesh.devices.flat):
            return trajectory  # it is there
        return jax.device_put(trajectory, shardings(trajectory))

    publish_jit = jax.jit(publish)
    return Learning(
        init=jax.jit(agent.init, out_shardings=everywhere),
        update=jax.jit(mapped, donate_argnums=0),
        publish=lambda learner, progress: jax.tree.map(
            lambda x: x.addressable_shards[0].data, publish_jit(learner, jnp.float32(progress))
        ),
        like=like,
        spread=spread,
        state_sharding=everywhere,
    )


def _by_lane(function: Callable[[int, jax.Array], jax.Array], trajectory: Trajectory) -> Trajectory:
    """Applies `function(axis of the lanes, leaf)` to all leaves of a trajectory."""
    axes = {"actor_state": 0, "lane": 0}
    parts = zip((axes.get(name, 1) for name in Trajectory._fields), trajectory)
    return Trajectory(*(jax.tree.map(lambda x, a=a: function(a, x), part) for a, part in parts))
