"""Learning on Sebulba's learner devices, where the replay is too, if there is one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from podracer import trajectories
from podracer.learning import learner
from podracer.learning.learner import ReplayState
from podracer.learning.replay_steps import add_metrics
from podracer.run.driver import program_bytes, require_memory
from podracer.sebulba.programs import Programs, actor_index, policy_lag
from podracer.sebulba.sharding import by_lane
from podracer.topology import DATA_AXIS, HostTopology, collectives, compiling_for
from podracer.trajectories import split_lanes
from podracer.types import ArrayTree, LearnerState, Metrics, Trajectory


class OnDevices:
    """Learning on the learner devices, where the replay is too, if there is one.

    Args:
      core: the agent's learner.
      layout: actors and learners.
      updates_per_batch: parts of a trajectory that are learnt from in turn.
      at_once: how many pending updates a call may do.

    Attributes:
      trajectory_mesh: where a Trajectory goes.
      replay_sharding: of a ReplayState, a prefix of its tree.
    """

    def __init__(self, core: learner.Learner, layout: HostTopology, updates_per_batch: int, at_once: int):
        self._core, self._layout, self._parts, self._at_once = core, layout, updates_per_batch, at_once
        shared = layout.platform != "cpu" and not set(layout.actors).isdisjoint(layout.mesh.devices.flat)
        self._seconds = 0.005 if shared else 0.1  # actions wait for what was dispatched before them
        everywhere, by_shard = PartitionSpec(), PartitionSpec(DATA_AXIS)
        whole: Any = NamedSharding(layout.mesh, everywhere)
        self.replay_sharding = ReplayState(whole, NamedSharding(layout.mesh, by_shard))
        replay_spec: Any = ReplayState(everywhere, by_shard)  # type: ignore[arg-type]

        def jitted(function: Any, donate: tuple[int, ...], in_specs: Any, out_specs: Any) -> Any:
            mapped = jax.shard_map(
                compiling_for(layout.platform)(function),
                mesh=layout.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                # Gradients are reduced by hand (collectives); with the check on, JAX would add a second reduction.
                check_vma=False,
            )
            return jax.jit(mapped, donate_argnums=donate)

        both = (everywhere, replay_spec)
        self._learn = jitted(
            self._learn_shards, (0, 1), (*both, by_lane(), everywhere, everywhere, everywhere), (*both, everywhere)
        )
        self._add = jitted(self._add_shards, (0,), (replay_spec, by_lane(), everywhere), (replay_spec, everywhere))
        self._sums = jax.jit(self._sum_over_pending)  # traced once, whether there are sums or not
        self._run_pending = jitted(self._run_pending_shards, (0, 1), (*both, *[everywhere] * 4), (*both, everywhere))
        self.trajectory_mesh = layout.mesh

    # On one device: its shards side by side.

    def _over_shards(self, function: Any, *by_shard: Any) -> Any:
        """Calls `function(index of the shard, *of the shard)`; returns its first result [shards], and its second."""
        shards_here = self._layout.num_shards // self._layout.mesh.size
        index = lax.axis_index(DATA_AXIS) * shards_here + jnp.arange(shards_here, dtype=jnp.int32)
        return collectives.over_shards(function, index, *by_shard)

    def _split(self, trajectory: Trajectory) -> Trajectory:
        return split_lanes(trajectory, self._layout.num_shards // self._layout.mesh.size)

    def _learn_shards(
        self,
        state: LearnerState,
        replay_state: ReplayState,
        trajectory: Trajectory,
        part: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, ReplayState, Metrics]:
        counts, index = replay_state.counts, actor_index(trajectory, self._layout)
        key = jax.random.fold_in(key, counts.batches)

        def learn(shard: jax.Array, trajectory: Trajectory, ring: ArrayTree) -> Any:
            rest = self._part(trajectory, part), index, progress, jax.random.fold_in(key, shard)
            new_state, new_counts, ring, metrics = self._core.learn(state, counts, ring, *rest)
            return ring, (new_state, new_counts, metrics | policy_lag(trajectory, state.num_updates))

        ring, (state, counts, metrics) = self._over_shards(learn, self._split(trajectory), replay_state.ring)
        return state, ReplayState(counts, ring), metrics

    def _part(self, trajectory: Trajectory, part: jax.Array) -> Trajectory:
        if self._parts == 1:
            return trajectory
        size = trajectory.lane.shape[0] // self._parts
        cut = lambda axis, x: lax.dynamic_slice_in_dim(x, part * size, size, axis)  # noqa: E731
        return trajectories.by_lane(cut, trajectory)

    def _add_shards(self, replay_state: ReplayState, trajectory: Trajectory, num_updates: jax.Array) -> Any:
        assert self._core.steps is not None
        steps, index = self._core.steps, actor_index(trajectory, self._layout)

        def add(shard: jax.Array, trajectory: Trajectory, ring: ArrayTree) -> Any:
            counts, ring, metrics = steps.add(replay_state.counts, ring, trajectory, index)
            return ring, (counts, metrics | policy_lag(trajectory, num_updates))

        ring, (counts, metrics) = self._over_shards(add, self._split(trajectory), replay_state.ring)
        return ReplayState(counts, ring), metrics

    def _run_pending_shards(
        self,
        state: LearnerState,
        replay_state: ReplayState,
        sums: tuple[Metrics, ...],
        num_draws: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> Any:
        state, replay_state, metrics = self._sums(state, replay_state, num_draws, progress, key)
        return state, replay_state, (add_metrics(sums[0], metrics),) if sums else (metrics,)

    def _sum_over_pending(
        self, state: LearnerState, replay_state: ReplayState, num_draws: jax.Array, progress: jax.Array, key: jax.Array
    ) -> Any:
        assert self._core.steps is not None
        assert self._core.steps.run_pending_updates is not None
        run_pending, number = self._core.steps.run_pending_updates, 1 if self._at_once == 1 else num_draws

        def update(shard: jax.Array, ring: ArrayTree) -> Any:
            shard_key = jax.random.fold_in(key, shard)
            new_state, counts, ring, metrics = run_pending(
                state, replay_state.counts, ring, number, progress, shard_key
            )
            return ring, (new_state, counts, metrics)

        ring, (state, counts, metrics) = self._over_shards(update, replay_state.ring)
        return state, ReplayState(counts, ring), metrics

    def empty_prefetched(self, state: LearnerState, counts: Any, ring: ArrayTree) -> tuple[()]:
        """Returns (): nothing is prepared before it is due."""
        return ()

    def trace(self, state: LearnerState, replay_state: ReplayState, trajectory: Trajectory) -> Any:
        """See `Learning.trace`."""
        number, progress, key = jnp.int32(0), jnp.float32(0), jax.random.key(0)
        if not self._core.defers_updates:
            return jax.eval_shape(self._learn, state, replay_state, trajectory, number, progress, key)
        jax.eval_shape(self._add, replay_state, trajectory, number)
        return jax.eval_shape(self._run_pending, state, replay_state, (), number, progress, key)

    def compile(self, state: LearnerState, replay_state: ReplayState, trajectory: Trajectory) -> Programs:
        """See `Learning.compile`."""
        number, progress, key = jnp.int32(0), jnp.float32(0), jax.random.key(0)
        if not self._core.defers_updates:
            learn = self._learn.lower(state, replay_state, trajectory, number, progress, key).compile()
            require_memory(program_bytes(learn), self._layout.mesh.devices.flat[0])
            return Programs(learn)
        everywhere = NamedSharding(self._layout.mesh, PartitionSpec())
        sums = self.trace(state, replay_state, trajectory)[2]
        zero_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=everywhere), sums)
        add = self._add.lower(replay_state, trajectory, state.num_updates).compile()
        run_pending = self._run_pending.lower(state, replay_state, zero_sums, number, progress, key).compile()
        require_memory(program_bytes(run_pending), self._layout.mesh.devices.flat[0])
        return Programs(None, add, run_pending, self._at_once, self._seconds, zero_sums)
