"""The learning program of Sebulba: the agent's own `learn`, under `shard_map` over the learner devices.

A trajectory [T, R B], of a rollout of every replica, arrives spread along its lanes. Each device runs its logical
shards side by side, as in Anakin, so equal shards give equal results on any number of learner devices. A replay may be
in the hosts' memory, or on devices that reanalyse, instead (`podracer.sebulba.replay_devices`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from podracer import trajectories
from podracer.learning import learner
from podracer.learning.learner import Experience
from podracer.learning.replay_steps import added
from podracer.run.driver import program_bytes, require_memory
from podracer.sebulba.programs import LearnerPrograms, Programs, policy_lag
from podracer.sebulba.replay_devices import SplitReplay
from podracer.sebulba.sharding import Assembly, by_lane
from podracer.topology import DATA_AXIS, HostTopology, compiling_for, host_cpus, quick_to_compile
from podracer.trajectories import split_lanes
from podracer.types import ActorParams, Agent, ArrayTree, InitFn, LearnerState, Metrics, Trajectory


class SpreadFn(Protocol):
    """Sends a rollout's trajectory to the learners."""

    def __call__(self, trajectory: Trajectory, replica: int = 0, /) -> Trajectory:
        """Sends it where it is learnt from, or replayed, without waiting.

        Args:
          trajectory: on the actor's device.
          replica: of this process.
        """
        ...


class Learning(NamedTuple):
    """The functions of a learner.

    Attributes:
      init: makes the first state, a copy on every learner device.
      experience: `() -> Experience`; at the beginning, ring [S] over the learner devices, or on the host.
      trace: as `LearnerPrograms.trace`.
      compile: as `LearnerPrograms.compile`.
      publish: `(LearnerState, progress) -> ActorParams`; a copy that survives the donation of the state.
      like: the shapes and shardings of a trajectory, from those of the rollout of an actor.
      spread: sends a rollout's trajectory to the learners.
      join: the trajectory, of rollouts that were spread, one of each of this process's replicas.
      state_sharding: of a LearnerState.
      experience_sharding: of an Experience.
    """

    init: InitFn
    experience: Callable[[], Experience]
    trace: Callable[[LearnerState, Experience, Trajectory], Any]
    compile: Callable[[LearnerState, Experience, Trajectory], Programs]
    publish: Callable[[LearnerState, float], ActorParams]
    like: Callable[[Trajectory], Trajectory]
    spread: SpreadFn
    join: Callable[[list[Trajectory]], Trajectory]
    state_sharding: NamedSharding
    experience_sharding: Experience


def make(
    agent: Agent,
    layout: HostTopology,
    rollout: Trajectory,
    updates_per_batch: int = 1,
    replay_memory: Literal["device", "host"] = "device",
    updates_per_call: int | None = None,
    prepare_ahead: bool = False,
) -> Learning:
    """The learning functions on the learner mesh, whose only axis is `data`.

    Args:
      agent: the agent.
      layout: actors and learners.
      rollout: of one actor, for its shapes.
      updates_per_batch: parts of a trajectory that are learnt from in turn.
      replay_memory: where a replay is kept.
      updates_per_call: pending updates that are done in one call at most; as many as take a moment, if None.
      prepare_ahead: whether reanalysers work on the next group of updates while this one is learnt from.

    Raises:
      ValueError: where a replay does not fit the layout.
    """
    mesh, num_shards = layout.mesh, layout.num_shards
    if agent.replay is not None and updates_per_batch > 1:
        raise ValueError(
            f"updates_per_batch={updates_per_batch}: {agent.name} replays, and its replay's settings say how often it "
            "learns; use 1."
        )
    core = learner.make(
        agent,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), rollout.timesteps.observation),
        lanes=layout.envs_per_actor // layout.shards_per_replica,
        groups=layout.threads,
        num_shards=num_shards,
    )
    if not core.drains and updates_per_call is not None:
        raise ValueError(f"updates_per_call={updates_per_call}: {agent.name} has no pending updates; leave it out.")
    place = _place(agent, core, layout, rollout, updates_per_batch, replay_memory, updates_per_call, prepare_ahead)

    def experience() -> Experience:
        shards = layout.shards_per_replica
        on_a_shard = jax.eval_shape(lambda t: jax.tree.map(lambda x: x[0], split_lanes(t, shards)), rollout)
        ring = jax.eval_shape(core.ring, on_a_shard)
        ring = jax.tree.map(lambda x: jnp.zeros((num_shards, *x.shape), x.dtype), ring)
        hyper = {name: jnp.float32(0) for name in agent.hyper}
        state = jax.eval_shape(agent.init, jax.random.key(0), hyper)
        return Experience(core.counts(), ring, place.ahead(state, core.counts(), ring))

    def publish(learner: LearnerState, progress: jax.Array) -> ActorParams:
        # Copied: the learner's own arrays are donated to the next update, and jit passes inputs on without a copy.
        return jax.tree.map(jnp.copy, agent.actor_params(learner, progress))

    assembly = Assembly(layout, place.trajectory_mesh)

    def like(rollout: Trajectory) -> Trajectory:
        def whole(axis: int, x: Any) -> Any:
            shape = (*x.shape[:axis], layout.replicas * x.shape[axis], *x.shape[axis + 1 :])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=assembly.sharding(axis))

        return trajectories.by_lane(whole, rollout)

    everywhere = NamedSharding(mesh, PartitionSpec())
    experience_sharding = _spread(place.experience_sharding, jax.eval_shape(experience))
    publish_jit = jax.jit(publish)
    return Learning(
        init=jax.jit(agent.init, out_shardings=everywhere, compiler_options=quick_to_compile(layout.platform)),
        experience=jax.jit(experience, out_shardings=experience_sharding),
        trace=place.trace,
        compile=place.compile,
        publish=lambda learner, progress: jax.tree.map(
            lambda x: x.addressable_shards[0].data, publish_jit(learner, jnp.float32(progress))
        ),
        like=like,
        spread=assembly.spread,
        join=assembly.join,
        state_sharding=everywhere,
        experience_sharding=experience_sharding,
    )


def _place(
    agent: Agent,
    core: learner.Learner,
    layout: HostTopology,
    rollout: Trajectory,
    updates_per_batch: int,
    replay_memory: Literal["device", "host"],
    updates_per_call: int | None,
    prepare_ahead: bool,
) -> LearnerPrograms:
    """The place of learning and replay that settings ask for (arguments and errors as in `make`)."""
    if layout.reanalysers is not None:
        if replay_memory == "host":
            raise ValueError("replay_memory='host': the replay is where it is reanalysed; use 'device'.")
        if agent.reanalyse is None or core.steps is None:
            raise ValueError(
                f"reanalyser_devices={layout.reanalysers.size}: {agent.name} does not reanalyse; leave it out."
            )
        if updates_per_call is not None:
            raise ValueError(f"updates_per_call={updates_per_call}: reanalysers go one by one; leave it out.")
        return SplitReplay(core.steps, layout, layout.reanalysers, reanalyses=True, ahead=prepare_ahead)
    if replay_memory == "device":
        return OnDevices(core, layout, updates_per_batch, updates_per_call or _at_once(layout, rollout))
    if agent.replay is not None and agent.replay.refresh_interval:
        raise ValueError("replay_memory='host': priorities are refreshed where the network is; use 'device'.")
    if core.steps is None:
        raise ValueError(f"replay_memory='host': {agent.name} has no replay here; use 'device'.")
    hosts = Mesh(np.asarray(host_cpus("replay_memory='host'", layout.mesh)), (DATA_AXIS,), axis_types=(AxisType.Auto,))
    return SplitReplay(core.steps, layout, hosts)


MOST_AT_ONCE = 256
"""Pending updates in one call, of which the runner asks for as many as take a moment."""


def _at_once(layout: HostTopology, trajectory: Trajectory) -> int:
    """The largest number of pending updates in a call."""
    images = any(x.dtype == jnp.uint8 and x.ndim >= 4 for x in jax.tree.leaves(trajectory.timesteps.observation))
    # XLA:CPU is slow at convolutions in loops (podracer/nets/convolutions.py), next to which a call costs nothing.
    return 1 if images and layout.platform == "cpu" else MOST_AT_ONCE


class OnDevices:
    """Learning on the learner devices, where the replay is too, if there is one.

    Args:
      core: the agent's learner.
      layout: actors and learners.
      updates_per_batch: parts of a trajectory that are learnt from in turn.
      at_once: how many pending updates a call may do.

    Attributes:
      trajectory_mesh: where a Trajectory goes.
      experience_sharding: of an Experience, a prefix of its tree.
    """

    def __init__(self, core: learner.Learner, layout: HostTopology, updates_per_batch: int, at_once: int):
        self._core, self._layout, self._parts, self._at_once = core, layout, updates_per_batch, at_once
        shared = layout.platform != "cpu" and not set(layout.actors).isdisjoint(layout.mesh.devices.flat)
        self._seconds = 0.005 if shared else 0.1  # actions wait for what was dispatched before them
        everywhere, by_shard = PartitionSpec(), PartitionSpec(DATA_AXIS)
        whole: Any = NamedSharding(layout.mesh, everywhere)
        self.experience_sharding = Experience(whole, NamedSharding(layout.mesh, by_shard))
        experience: Any = Experience(everywhere, by_shard)  # type: ignore[arg-type]

        def jitted(function: Callable[..., Any], donate: tuple[int, ...], in_specs: Any, out_specs: Any) -> Any:
            mapped = jax.shard_map(
                compiling_for(layout.platform)(function),
                mesh=layout.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                # Gradients are reduced by hand (collectives); with the check on, JAX would add a second reduction.
                check_vma=False,
            )
            return jax.jit(mapped, donate_argnums=donate)

        both = (everywhere, experience)
        self._learn = jitted(
            self._learn_shards, (0, 1), (*both, by_lane(), everywhere, everywhere, everywhere), (*both, everywhere)
        )
        self._add = jitted(self._add_shards, (0,), (experience, by_lane(), everywhere), (experience, everywhere))
        self._drained = jax.jit(self._drained_shards)  # traced once, whether there are sums or not
        self._drain = jitted(self._drain_shards, (0, 1), (*both, *[everywhere] * 4), (*both, everywhere))
        self.trajectory_mesh = layout.mesh

    # On one device: its shards side by side. What learning returns is reduced over shards and so has no shard axis:
    # out_axes=None refuses anything else.

    def _over_shards(self, shard: Callable[..., Any], *by_shard: Any) -> Any:
        """`shard(index of the shard, *of the shard)`; its first result [shards], and its second."""
        shards_here = self._layout.num_shards // self._layout.mesh.size
        index = lax.axis_index(DATA_AXIS) * shards_here + jnp.arange(shards_here, dtype=jnp.int32)
        return jax.vmap(shard, axis_name="shard", out_axes=(0, None))(index, *by_shard)

    def _split(self, trajectory: Trajectory) -> Trajectory:
        return split_lanes(trajectory, self._layout.num_shards // self._layout.mesh.size)

    def _group(self, trajectory: Trajectory) -> jax.Array:
        """The thread of its replica that acted, int32 [], the same on all shards."""
        return trajectory.lane[0] // self._layout.envs_per_actor % self._layout.threads

    def _learn_shards(
        self,
        state: LearnerState,
        experience: Experience,
        trajectory: Trajectory,
        part: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Experience, Metrics]:
        counts, group = experience.counts, self._group(trajectory)
        key = jax.random.fold_in(key, counts.batches)

        def shard(index: jax.Array, trajectory: Trajectory, ring: ArrayTree) -> Any:
            rest = self._part(trajectory, part), group, progress, jax.random.fold_in(key, index)
            new, now, ring, metrics = self._core.learn(state, counts, ring, *rest)
            return ring, (new, now, metrics | policy_lag(trajectory, state.num_updates))

        ring, (new, now, metrics) = self._over_shards(shard, self._split(trajectory), experience.ring)
        return new, Experience(now, ring), metrics

    def _part(self, trajectory: Trajectory, part: jax.Array) -> Trajectory:
        if self._parts == 1:
            return trajectory
        size = trajectory.lane.shape[0] // self._parts
        cut = lambda axis, x: lax.dynamic_slice_in_dim(x, part * size, size, axis)  # noqa: E731
        return trajectories.by_lane(cut, trajectory)

    def _add_shards(self, experience: Experience, trajectory: Trajectory, num_updates: jax.Array) -> Any:
        assert self._core.steps is not None
        add, group = self._core.steps.add, self._group(trajectory)

        def shard(index: jax.Array, trajectory: Trajectory, ring: ArrayTree) -> Any:
            now, ring, metrics = add(experience.counts, ring, trajectory, group)
            return ring, (now, metrics | policy_lag(trajectory, num_updates))

        ring, (now, metrics) = self._over_shards(shard, self._split(trajectory), experience.ring)
        return Experience(now, ring), metrics

    def _drain_shards(
        self,
        state: LearnerState,
        experience: Experience,
        sums: tuple[Metrics, ...],
        number: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> Any:
        new, now, metrics = self._drained(state, experience, number, progress, key)
        return new, now, (added(sums[0], metrics),) if sums else (metrics,)

    def _drained_shards(
        self, state: LearnerState, experience: Experience, number: jax.Array, progress: jax.Array, key: jax.Array
    ) -> Any:
        assert self._core.steps is not None
        assert self._core.steps.drain is not None
        drain, many = self._core.steps.drain, 1 if self._at_once == 1 else number

        def shard(index: jax.Array, ring: ArrayTree) -> Any:
            new, now, ring, metrics = drain(
                state, experience.counts, ring, many, progress, jax.random.fold_in(key, index)
            )
            return ring, (new, now, metrics)

        ring, (new, now, metrics) = self._over_shards(shard, experience.ring)
        return new, Experience(now, ring), metrics

    def ahead(self, state: LearnerState, counts: Any, ring: ArrayTree) -> tuple[()]:
        """Nothing is prepared before it is due."""
        return ()

    def trace(self, state: LearnerState, experience: Experience, trajectory: Trajectory) -> Any:
        """See `Learning.trace`."""
        number, progress, key = jnp.int32(0), jnp.float32(0), jax.random.key(0)
        if not self._core.drains:
            return jax.eval_shape(self._learn, state, experience, trajectory, number, progress, key)
        jax.eval_shape(self._add, experience, trajectory, number)
        return jax.eval_shape(self._drain, state, experience, (), number, progress, key)

    def compile(self, state: LearnerState, experience: Experience, trajectory: Trajectory) -> Programs:
        """See `Learning.compile`."""
        number, progress, key = jnp.int32(0), jnp.float32(0), jax.random.key(0)
        if not self._core.drains:
            learn = self._learn.lower(state, experience, trajectory, number, progress, key).compile()
            require_memory(program_bytes(learn), self._layout.mesh.devices.flat[0])
            return Programs(learn)
        everywhere = NamedSharding(self._layout.mesh, PartitionSpec())
        sums = self.trace(state, experience, trajectory)[2]
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=everywhere), sums)
        add = self._add.lower(experience, trajectory, state.num_updates).compile()
        drain = self._drain.lower(state, experience, nothing, number, progress, key).compile()
        require_memory(program_bytes(drain), self._layout.mesh.devices.flat[0])
        return Programs(None, add, drain, self._at_once, self._seconds, nothing)


def _spread(prefix: Any, tree: ArrayTree) -> Any:
    """A tree of shardings from a prefix of it."""
    is_leaf = lambda x: isinstance(x, Sharding)  # noqa: E731
    return jax.tree.map(lambda sharding, part: jax.tree.map(lambda _: sharding, part), prefix, tree, is_leaf=is_leaf)
