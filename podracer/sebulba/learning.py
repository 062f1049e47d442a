"""The learning program of Sebulba: the agent's own `learn`, under `shard_map` over the learner devices.

A trajectory [T, B] arrives spread along B. Each device runs its logical shards side by side, as in Anakin, so equal
shards give equal results on any number of learner devices. A replay may be in the host's memory instead
(`podracer.sebulba.host_replay`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from podracer.driver import program_bytes, require_memory
from podracer.learning import collectives, learner, trajectories
from podracer.learning.learner import Experience
from podracer.learning.trajectories import split_lanes
from podracer.sebulba.host_replay import HostReplay
from podracer.topology import DATA_AXIS, HostTopology, compiling_for, quick_to_compile
from podracer.types import ActorParams, Agent, ArrayTree, LearnerState, Metrics, Trajectory


class Learning(NamedTuple):
    """The compiled functions of a learner.

    Attributes:
      init: `(key, hyper) -> LearnerState`, a copy on every learner device.
      experience: `() -> Experience`; at the beginning, ring [S] over the learner devices, or on the host.
      update: `(LearnerState, Experience, Trajectory, part int32, progress, key) -> (LearnerState, Experience,
        Metrics)`; learns from the `part`-th of `updates_per_batch` parts of every shard's lanes. State and ring are
        donated.
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
    if replay_memory == "device":
        place: Any = OnDevices(core, layout, updates_per_batch)
    elif core.steps is not None:
        place = HostReplay(core.steps, layout, _lag)
    else:
        raise ValueError(f"replay_memory='host': {agent.name} has no replay here; use 'device'.")

    def experience() -> Experience:
        on_a_shard = jax.eval_shape(lambda t: jax.tree.map(lambda x: x[0], split_lanes(t, num_shards)), trajectory)
        ring = jax.eval_shape(core.ring, on_a_shard)
        return Experience(core.counts(), jax.tree.map(lambda x: jnp.zeros((num_shards, *x.shape), x.dtype), ring))

    def publish(learner: LearnerState, progress: jax.Array) -> ActorParams:
        # Copied: the learner's own arrays are donated to the next update, and jit passes inputs on without a copy.
        return jax.tree.map(jnp.copy, agent.actor_params(learner, progress))

    def like(trajectory: Trajectory) -> Trajectory:
        shaped = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        return jax.tree.map(shaped, trajectory, _spread(place.trajectory_sharding, trajectory))

    def spread(trajectory: Trajectory) -> Trajectory:
        devices = place.trajectory_sharding.lane.device_set
        if len(devices) == 1 and trajectory.lane.devices() == devices:
            return trajectory  # it is there
        return jax.device_put(trajectory, place.trajectory_sharding)

    everywhere = NamedSharding(mesh, PartitionSpec())
    experience_sharding = _spread(place.experience_sharding, jax.eval_shape(experience))
    publish_jit = jax.jit(publish)
    return Learning(
        init=jax.jit(agent.init, out_shardings=everywhere, compiler_options=quick_to_compile(layout.platform)),
        experience=jax.jit(experience, out_shardings=experience_sharding),
        update=place.update,
        trace=place.trace,
        compile=place.compile,
        publish=lambda learner, progress: jax.tree.map(
            lambda x: x.addressable_shards[0].data, publish_jit(learner, jnp.float32(progress))
        ),
        like=like,
        spread=spread,
        state_sharding=everywhere,
        experience_sharding=experience_sharding,
    )


class OnDevices:
    """Learning on the learner devices, where the replay is too, if there is one: one program.

    Args:
      core: the agent's learner.
      layout: actors and learners.
      updates_per_batch: parts of a trajectory that are learnt from in turn.

    Attributes:
      update: see `Learning`.
      trajectory_sharding: of a Trajectory, a prefix of its tree.
      experience_sharding: of an Experience, a prefix of its tree.
    """

    def __init__(self, core: learner.Learner, layout: HostTopology, updates_per_batch: int):
        self._core, self._layout, self._parts = core, layout, updates_per_batch
        everywhere, by_shard = PartitionSpec(), PartitionSpec(DATA_AXIS)
        by_lane: Any = Trajectory(*(PartitionSpec(None, DATA_AXIS) for _ in Trajectory._fields))  # type: ignore[arg-type]
        by_lane = by_lane._replace(actor_state=by_shard, lane=by_shard)
        experience: Any = Experience(everywhere, by_shard)  # type: ignore[arg-type]
        mapped = jax.shard_map(
            compiling_for(layout.platform)(self._update),
            mesh=layout.mesh,
            in_specs=(everywhere, experience, by_lane, everywhere, everywhere, everywhere),
            out_specs=(everywhere, experience, everywhere),
            # Gradients are reduced by hand (collectives); with the check on, JAX would add a second reduction.
            check_vma=False,
        )
        self.update = jax.jit(mapped, donate_argnums=(0, 1))
        self.trajectory_sharding = Trajectory(*(NamedSharding(layout.mesh, spec) for spec in by_lane))  # type: ignore[arg-type]
        self.experience_sharding = Experience(*(NamedSharding(layout.mesh, spec) for spec in experience))  # type: ignore[arg-type]

    def _update(
        self,
        state: LearnerState,
        experience: Experience,
        trajectory: Trajectory,
        part: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Experience, Metrics]:
        """On one device: its shards side by side."""
        shards_here = self._layout.num_shards // self._layout.mesh.size
        first_shard = lax.axis_index(DATA_AXIS) * shards_here
        counts = experience.counts
        key = jax.random.fold_in(key, counts.batches)
        # Which actor's lanes they are, the same on all shards.
        group = trajectory.lane[0] // self._layout.envs_per_actor

        def shard(trajectory: Trajectory, ring: ArrayTree, index: jax.Array) -> Any:
            shard_key = jax.random.fold_in(key, first_shard + index)
            new, now, ring, metrics = self._core.learn(
                state, counts, ring, self._part(trajectory, part), group, progress, shard_key
            )
            return ring, (new, now, metrics | _lag(trajectory, state.num_updates))

        # What learning returns is reduced over shards and so has no shard axis: out_axes=None refuses anything else.
        split = split_lanes(trajectory, shards_here)
        ring, (new, now, metrics) = jax.vmap(shard, axis_name="shard", out_axes=(0, None))(
            split, experience.ring, jnp.arange(shards_here, dtype=jnp.int32)
        )
        return new, Experience(now, ring), metrics

    def _part(self, trajectory: Trajectory, part: jax.Array) -> Trajectory:
        if self._parts == 1:
            return trajectory
        size = trajectory.lane.shape[0] // self._parts
        cut = lambda axis, x: lax.dynamic_slice_in_dim(x, part * size, size, axis)  # noqa: E731
        return trajectories.by_lane(cut, trajectory)

    def trace(self, *shapes: Any) -> Any:
        """See `Learning.trace`."""
        return jax.eval_shape(self.update, *shapes, jnp.int32(0), jnp.float32(0), jax.random.key(0))

    def compile(self, *shapes: Any) -> Callable[..., Any]:
        """See `Learning.compile`."""
        compiled = self.update.lower(*shapes, jnp.int32(0), jnp.float32(0), jax.random.key(0)).compile()
        require_memory(program_bytes(compiled), self._layout.mesh.devices.flat[0])
        return compiled


def _lag(trajectory: Trajectory, num_updates: jax.Array) -> Metrics:
    """How many updates older than the learner the policy was that acted."""
    lag = (num_updates - trajectory.policy_version).astype(jnp.float32)
    return {
        "sebulba/policy_lag": collectives.global_mean(lag, jnp.ones_like(lag)),
        "sebulba/policy_lag_max": collectives.global_max(lag),
    }


def _spread(prefix: Any, tree: ArrayTree) -> Any:
    """A tree of shardings from a prefix of it."""
    is_leaf = lambda x: isinstance(x, Sharding)  # noqa: E731
    return jax.tree.map(lambda sharding, part: jax.tree.map(lambda _: sharding, part), prefix, tree, is_leaf=is_leaf)
