"""The learning program of Sebulba: the agent's own `learn`, under `shard_map` over the learner devices.

A trajectory [T, B] arrives spread along B. Each device runs its logical shards side by side, as in Anakin, so equal
shards give equal results on any number of learner devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from podracer import learner, ops
from podracer.gradients import split_lanes
from podracer.learner import Experience
from podracer.sebulba.host_replay import HostReplay
from podracer.topology import DATA_AXIS, HostTopology
from podracer.types import ActorParams, Agent, ArrayTree, LearnerState, Metrics, Trajectory


class Learning(NamedTuple):
    """The compiled functions of a learner.

    Attributes:
      init: `(key, hyper) -> LearnerState`, a copy on every learner device.
      experience: `() -> Experience`; at the beginning, ring [S] over the learner devices.
      update: `(LearnerState, Experience, Trajectory, part int32, progress, key) -> (LearnerState, Experience,
        Metrics)`; learns from the `part`-th of `updates_per_batch` parts of every shard's lanes. State and experience
        are donated.
      trace: `(LearnerState, Experience, Trajectory)`, shapes all; finds what is wrong with them.
      compile: `(LearnerState, Experience, Trajectory) -> update`, compiled for these shapes.
      publish: `(LearnerState, progress) -> ActorParams`; a copy that survives the donation of the state.
      like: the shapes of a trajectory, with the shardings of one that was spread.
      spread: puts a trajectory of one device where it is learnt from, or replayed, without waiting.
      state_sharding: of a LearnerState.
      experience_sharding: of an Experience.
    """

    init: Callable[..., LearnerState]
    experience: Callable[[], Experience]
    update: Callable[..., tuple[LearnerState, Experience, Metrics]]
    trace: Callable[..., Any]
    compile: Callable[..., Callable[..., tuple[LearnerState, Experience, Metrics]]]
    publish: Callable[[LearnerState, float], ActorParams]
    like: Callable[[Trajectory], Trajectory]
    spread: Callable[[Trajectory], Trajectory]
    state_sharding: NamedSharding
    experience_sharding: Experience


def make(
    agent: Agent,
    layout: HostTopology,
    trajectory: Trajectory,
    updates_per_batch: int = 1,
    replay_memory: Literal["device", "host"] = "device",
) -> Learning:
    """The learning functions on the learner mesh, whose only axis is `data`.

    Args:
      agent: the agent.
      layout: actors and learners.
      trajectory: of one actor, for its shapes.
      updates_per_batch: parts of a trajectory that are learnt from in turn.
      replay_memory: where a replay is kept.

    Raises:
      ValueError: where a replay does not fit the layout.
    """
    mesh, num_shards = layout.mesh, layout.num_shards
    if agent.replay is not None and updates_per_batch > 1:
        raise ValueError(
            f"updates_per_batch={updates_per_batch}: {agent.name} replays; its replay_ratio says how often."
        )
    core = learner.make(
        agent,
        lanes=layout.envs_per_actor // num_shards,
        groups=len(layout.actors),
        num_shards=num_shards,
    )
    by_lane = Trajectory(*(PartitionSpec(None, DATA_AXIS) for _ in Trajectory._fields))._replace(  # type: ignore[arg-type]
        actor_state=PartitionSpec(DATA_AXIS), lane=PartitionSpec(DATA_AXIS)
    )
    everywhere, over_shards = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    experience_specs = Experience(PartitionSpec(), PartitionSpec(DATA_AXIS))  # type: ignore[arg-type]
    shards_here = num_shards // mesh.size

    def update(
        state: LearnerState,
        experience: Experience,
        trajectory: Trajectory,
        part: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Experience, Metrics]:
        first_shard = lax.axis_index(DATA_AXIS) * shards_here
        counts = experience.counts
        key = jax.random.fold_in(key, counts.batches)
        # Which actor's lanes they are, the same on all shards.
        group = trajectory.lane[0] // layout.envs_per_actor

        def shard(trajectory: Trajectory, ring: ArrayTree, index: jax.Array) -> Any:
            shard_key = jax.random.fold_in(key, first_shard + index)
            new, now, ring, metrics = core.learn(
                state, counts, ring, _part(trajectory, part), group, progress, shard_key
            )
            return ring, (new, now, metrics | _lag(trajectory, state.num_updates))

        # What learning returns is reduced over shards and so has no shard axis: out_axes=None refuses anything else.
        split = split_lanes(trajectory, shards_here)
        ring, (new, now, metrics) = jax.vmap(shard, axis_name="shard", out_axes=(0, None))(
            split, experience.ring, jnp.arange(shards_here, dtype=jnp.int32)
        )
        return new, Experience(now, ring), metrics

    def _part(trajectory: Trajectory, part: jax.Array) -> Trajectory:
        if updates_per_batch == 1:
            return trajectory
        size = trajectory.lane.shape[0] // updates_per_batch
        cut = lambda axis, x: lax.dynamic_slice_in_dim(x, part * size, size, axis)  # noqa: E731
        return ops.by_lane(cut, trajectory)

    mapped = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(PartitionSpec(), experience_specs, by_lane, PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=(PartitionSpec(), experience_specs, PartitionSpec()),
        # Gradients are reduced by hand (ops.global_sum); with the check on, JAX would add a second reduction.
        check_vma=False,
    )

    def publish(learner: LearnerState, progress: jax.Array) -> ActorParams:
        # Copied: the learner's own arrays are donated to the next update, and jit passes inputs on without a copy.
        return jax.tree.map(jnp.copy, agent.actor_params(learner, progress))

    step: Any = jax.jit(mapped, donate_argnums=(0, 1))
    trajectory_sharding: Any = Trajectory(*(NamedSharding(mesh, spec) for spec in by_lane))  # type: ignore[arg-type]
    ring_sharding: Any = over_shards
    trace = lambda *shapes: jax.eval_shape(step, *shapes, *_numbers())  # noqa: E731
    compile_ = lambda *shapes: step.lower(*shapes, *_numbers()).compile()  # noqa: E731
    if replay_memory == "host":
        if core.steps is None:
            raise ValueError(f"replay_memory='host': {agent.name} has no replay here; use 'device'.")
        there = HostReplay(core.steps, layout, _lag)
        step, trace, compile_ = there.update, there.trace, there.compile
        trajectory_sharding, ring_sharding = there.sharding, there.sharding

    def like(trajectory: Trajectory) -> Trajectory:
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        return jax.tree.map(place, trajectory, _spread(trajectory_sharding, trajectory))

    def spread(trajectory: Trajectory) -> Trajectory:
        learners = set(mesh.devices.flat) if replay_memory == "device" else trajectory_sharding.device_set
        if len(learners) == 1 and trajectory.lane.devices() == learners:
            return trajectory  # it is there
        return jax.device_put(trajectory, trajectory_sharding)

    def experience() -> Experience:
        on_a_shard = jax.eval_shape(lambda t: jax.tree.map(lambda x: x[0], split_lanes(t, num_shards)), trajectory)
        ring = jax.eval_shape(core.ring, on_a_shard)
        return Experience(core.counts(), jax.tree.map(lambda x: jnp.zeros((num_shards, *x.shape), x.dtype), ring))

    counts_sharding: Any = everywhere if replay_memory == "device" else ring_sharding
    experience_sharding = _spread(Experience(counts_sharding, ring_sharding), jax.eval_shape(experience))
    publish_jit = jax.jit(publish)
    return Learning(
        init=jax.jit(agent.init, out_shardings=everywhere),
        experience=jax.jit(experience, out_shardings=experience_sharding),
        update=step,
        trace=trace,
        compile=compile_,
        publish=lambda learner, progress: jax.tree.map(
            lambda x: x.addressable_shards[0].data, publish_jit(learner, jnp.float32(progress))
        ),
        like=like,
        spread=spread,
        state_sharding=everywhere,
        experience_sharding=experience_sharding,
    )


def _lag(trajectory: Trajectory, num_updates: jax.Array) -> Metrics:
    """How many updates older than the learner the policy was that acted."""
    lag = (num_updates - trajectory.policy_version).astype(jnp.float32)
    return {
        "sebulba/policy_lag": ops.global_mean(lag, jnp.ones_like(lag)),
        "sebulba/policy_lag_max": ops.global_max(lag),
    }


def _numbers() -> tuple[Any, ...]:
    """Examples of the last three arguments of an update."""
    return jnp.int32(0), jnp.float32(0), jax.random.key(0)


def _spread(prefix: Any, tree: ArrayTree) -> Any:
    """A tree of shardings from a prefix of it."""
    is_leaf = lambda x: isinstance(x, Sharding)  # noqa: E731
    return jax.tree.map(lambda sharding, part: jax.tree.map(lambda _: sharding, part), prefix, tree, is_leaf=is_leaf)
