"""Learning with a replay that is not on the learners: in the hosts' memory, or on devices that reanalyse.

The steps are those of `podracer.learning.replay_steps`. Rollouts are added and samples prepared where the replay is;
samples are learnt from on the learner devices. Results are those of a replay on the learners.

    replay     add | prepare 1 | prepare 2 | write 1 | prepare 3 | write 2 | ...
    learners                   | learn 1             | learn 2             | ...

With `prefetch`, the samples of the next draw are prepared while those of this one are learnt from, by parameters and
priorities of a draw earlier. No thread does that: programs on different devices run side by side, in the order in
which they were dispatched, so runs repeat, and what was prepared too early for a stop is in the checkpoint.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer import replay, topology
from podracer.learning.learner import ReplayState
from podracer.learning.replay_steps import Counts, Prepared, Steps, TargetParams, add_metrics
from podracer.run.driver import program_bytes, require_memory
from podracer.sebulba.programs import Programs, actor_index, policy_lag
from podracer.sebulba.sharding import by_lane
from podracer.topology import DATA_AXIS, HostTopology, collectives, compiling_for, data_mesh
from podracer.trajectories import split_lanes
from podracer.types import ArrayTree, LearnerState, Metrics, Trajectory


class Prefetched(NamedTuple):
    """The samples of a draw that is not due yet.

    Attributes:
      available: bool []; False where nothing is prepared.
      samples: their positions in the ring, [S].
      prepared: the samples, [S].
      metrics: of preparing them.
    """

    available: jax.Array
    samples: Any
    prepared: Prepared
    metrics: Metrics


class SplitReplay:
    """Learning on the learner devices from a ring [S] on others (compare `learner_devices.OnDevices`).

    What a process prepares goes to its own learner devices: of a pod, shards stay where they are.

    Args:
      steps: the agent's.
      layout: actors and learners.
      mesh: where the replay is, with the one axis `data`: devices of every process.
      reanalyses: whether samples are reanalysed there and priorities refreshed, or on the learners.
      prefetch: whether the next draw is prepared while this one is learnt from.

    Attributes:
      trajectory_mesh: where a Trajectory goes.
      replay_sharding: of a ReplayState, a prefix of its tree.
    """

    def __init__(
        self, steps: Steps, layout: HostTopology, mesh: Mesh, *, reanalyses: bool = False, prefetch: bool = False
    ):
        self._steps, self._layout, self._mesh = steps, layout, mesh
        self._prefetches = prefetch and steps.run_pending_updates is not None
        self.trajectory_mesh = mesh
        everywhere, by_shard = PartitionSpec(), PartitionSpec(DATA_AXIS)
        self._here, self._here_by_shard = NamedSharding(mesh, everywhere), NamedSharding(mesh, by_shard)
        aside: Any = Prefetched(self._here, self._here_by_shard, self._here_by_shard, self._here)  # type: ignore[arg-type]
        self.replay_sharding = ReplayState(self._here, self._here_by_shard, aside if self._prefetches else ())  # type: ignore[arg-type]
        self._everywhere = NamedSharding(layout.mesh, everywhere)
        self._by_shard = NamedSharding(layout.mesh, by_shard)

        def jitted(step: Any, donate: tuple[int, ...], in_specs: Any, out_specs: Any) -> Any:
            mapped = jax.shard_map(
                compiling_for(mesh.devices.flat[0].platform)(step),
                mesh=mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                # As in podracer.sebulba.learner_devices.
                check_vma=False,
            )
            return jax.jit(mapped, donate_argnums=donate)

        def target_params(state: LearnerState, progress: jax.Array) -> TargetParams:
            target = steps.target_params(state, progress)
            target = target if reanalyses else TargetParams(num_updates=target.num_updates)
            # Copied: the learner's own arrays are donated to the update, and jit passes inputs on without a copy.
            return jax.tree.map(jnp.copy, target)

        rollout = () if steps.run_pending_updates else by_lane()
        ring = (everywhere, by_shard)
        self._jitted = _Steps(
            add=jitted(self._add_shards, (1,), (*ring, by_lane(), everywhere), (*ring, everywhere)),
            target_params=jax.jit(target_params, out_shardings=self._everywhere),
            prepare=jitted(
                self._prepare_shards,
                (),
                (everywhere, *ring, rollout, *[everywhere] * 3),
                (by_shard, by_shard, by_shard, everywhere),
            ),
            learn=jax.jit(self._learn_shards(), donate_argnums=0),
            write=jitted(self._write_shards, (1,), (*ring, by_shard, by_shard), (*ring, everywhere)),
        )

    # The steps over the shards of a process

    @property
    def _shards(self) -> int:
        """On a device."""
        return self._layout.num_shards // self._mesh.size

    def _add_shards(self, counts: Counts, ring: ArrayTree, trajectory: Trajectory, num_updates: jax.Array) -> Any:
        index = actor_index(trajectory, self._layout)

        def add(ring: ArrayTree, trajectory: Trajectory) -> Any:
            new_counts, ring, metrics = self._steps.add(counts, ring, trajectory, index)
            return ring, (new_counts, metrics | policy_lag(trajectory, num_updates))

        ring, (new_counts, metrics) = collectives.over_shards(add, ring, split_lanes(trajectory, self._shards))
        return new_counts, ring, metrics

    def _prepare_shards(
        self,
        target: TargetParams,
        counts: Counts,
        ring: Any,
        rollout: Any,
        progress: jax.Array,
        key: jax.Array,
        draws_ahead: jax.Array,
    ) -> Any:
        """Returns the ring's priorities and the other results of `Steps.prepare`."""
        rest = (draws_ahead,) if self._steps.run_pending_updates else ()

        def prepare(ring: Any, rollout: Any, shard: jax.Array) -> Any:
            own = jax.random.fold_in(key, shard)
            ring, samples, prepared, metrics = self._steps.prepare(target, counts, ring, rollout, progress, own, *rest)
            return (replay.priority_state(ring), samples, prepared), metrics

        index = lax.axis_index(DATA_AXIS) * self._shards + jnp.arange(self._shards, dtype=jnp.int32)
        rollout = split_lanes(rollout, self._shards) if rollout else ()
        (priorities, samples, prepared), metrics = collectives.over_shards(prepare, ring, rollout, index)
        return priorities, samples, prepared, metrics

    def _learn_shards(self) -> Any:
        def learn(state: LearnerState, prepared: Prepared, progress: jax.Array) -> Any:
            def shard(prepared: Prepared) -> Any:
                new, metrics, priorities = self._steps.learn(state, prepared, progress)
                return priorities, (new, metrics)

            priorities, (new, metrics) = collectives.over_shards(shard, prepared)
            return new, metrics, priorities

        everywhere, by_shard = PartitionSpec(), PartitionSpec(DATA_AXIS)
        return jax.shard_map(
            compiling_for(self._layout.platform)(learn),
            mesh=self._layout.mesh,
            in_specs=(everywhere, by_shard, everywhere),
            out_specs=(everywhere, everywhere, by_shard),
            # As in podracer.sebulba.learner_devices.
            check_vma=False,
        )

    def _write_shards(self, counts: Counts, ring: ArrayTree, samples: Any, priorities: Any) -> Any:
        write = functools.partial(self._steps.write, counts)
        ring, metrics = collectives.over_shards(write, ring, samples, priorities)
        if self._steps.run_pending_updates:
            counts = counts._replace(pending_updates=counts.pending_updates - 1, draws=counts.draws + 1)
        return counts, ring, metrics

    # Between the two

    def _replicate(self, tree: Any, sharding: NamedSharding) -> Any:
        """Copies replicated arrays to another sharding."""
        if self._layout.processes == 1:
            return jax.device_put(tree, sharding)
        return jax.tree.map(lambda x: _whole(topology.here(x), sharding), tree)

    def _send(self, tree: Any, sharding: NamedSharding) -> Any:
        """Copies sharded arrays to another sharding; shards stay in their process."""
        if self._layout.processes == 1:
            return jax.device_put(tree, sharding)
        devices: Any = sharding.mesh.devices
        own = [device for device in devices.flat if device.process_index == jax.process_index()]
        local = NamedSharding(data_mesh(own), sharding.spec)

        def send(x: jax.Array) -> jax.Array:
            shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
            parts = [np.asarray(shard.data) for shard in shards]
            there = jax.device_put(np.concatenate(parts), local)
            arrays = [shard.data for shard in there.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, sharding, arrays)

        return jax.tree.map(send, tree)

    # As the driver calls them

    def _learn(
        self,
        steps: _Steps,
        state: LearnerState,
        replay_state: ReplayState,
        trajectory: Trajectory,
        part: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, ReplayState, Metrics]:
        """An update on a rollout next to replayed ones; there is one part."""
        key = jax.random.fold_in(key, replay_state.counts.batches)
        replay_state, metrics = self._add(steps.add, replay_state, trajectory, state.num_updates)
        state, replay_state, sums = self._update(steps, state, replay_state, trajectory, progress, key)
        for update_metrics in sums:
            metrics = metrics | update_metrics
        return state, replay_state, metrics

    def _add(
        self, add: Any, replay_state: ReplayState, trajectory: Trajectory, num_updates: jax.Array
    ) -> tuple[ReplayState, Metrics]:
        counts, ring, prefetched = replay_state
        counts, ring, metrics = add(counts, ring, trajectory, self._replicate(num_updates, self._here))
        return ReplayState(counts, ring, prefetched), metrics

    def _run_pending(
        self,
        steps: _Steps,
        state: LearnerState,
        replay_state: ReplayState,
        sums: tuple[Metrics, ...],
        num_draws: int,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, ReplayState, tuple[Metrics, ...]]:
        for _ in range(num_draws):
            state, replay_state, metrics = self._update(steps, state, replay_state, (), progress, key)
            sums = tuple(_add_metrics(*pair) for pair in zip(sums, metrics))
        return state, replay_state, sums

    def _update(
        self,
        steps: _Steps,
        state: LearnerState,
        replay_state: ReplayState,
        rollout: Any,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, ReplayState, tuple[Metrics, Metrics]]:
        """Does the updates of a draw; returns their metrics on the learners, and where the replay is."""
        counts, ring, prefetched = replay_state
        learner_progress = self._replicate(progress, self._everywhere)
        target = self._replicate(steps.target_params(state, learner_progress), self._here)
        replay_progress, replay_key = self._replicate((progress, key), self._here)

        def prepare(ring: Any, draws_ahead: int) -> Any:
            number = self._replicate(jnp.int32(draws_ahead), self._here)
            priorities, *draw = steps.prepare(target, counts, ring, rollout, replay_progress, replay_key, number)
            return replay.with_priority_state(ring, priorities), draw

        if self._prefetches and bool(topology.here(prefetched.available)):
            samples, prepared, prepare_metrics = prefetched[1:]
        else:
            ring, (samples, prepared, prepare_metrics) = prepare(ring, 0)
        if self._prefetches:
            ring, draw = prepare(ring, 1)
            prefetched = Prefetched(self._replicate(jnp.bool_(True), self._here), *draw)
        state, metrics, priorities = steps.learn(state, self._send(prepared, self._by_shard), learner_progress)
        priorities = self._send(priorities, self._here_by_shard)
        counts, ring, write_metrics = steps.write(counts, ring, samples, priorities)
        return state, ReplayState(counts, ring, prefetched), (metrics, prepare_metrics | write_metrics)

    def empty_prefetched(self, state: LearnerState, counts: Counts, ring: Any) -> Any:
        """Makes an empty `Prefetched` from the shapes of the rest; () without prefetching."""
        if not self._prefetches:
            return ()
        arguments = self._shapes_of_prepare(state, counts, ring, ())
        _, *draw = jax.eval_shape(self._jitted.prepare, *arguments)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), Prefetched(jnp.bool_(False), *draw))

    def _shapes_of_prepare(self, state: LearnerState, counts: Counts, ring: Any, rollout: Any) -> tuple[Any, ...]:
        place = lambda sharding: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        here = lambda tree: jax.tree.map(place(self._here), tree)  # noqa: E731
        key, progress = jax.eval_shape(lambda: (jax.random.key(0), jnp.float32(0)))
        target = here(jax.eval_shape(self._jitted.target_params, state, progress))
        ring = jax.tree.map(place(self._here_by_shard), ring)
        draws_ahead = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._here)
        return target, here(counts), ring, rollout, here(progress), here(key), draws_ahead

    def trace(self, state: LearnerState, replay_state: ReplayState, trajectory: Trajectory) -> Any:
        """See `Learning.trace`; returns the arguments of every step, and the metrics of an update, as shapes."""
        place = lambda sharding: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        here = lambda tree: jax.tree.map(place(self._here), tree)  # noqa: E731
        by_shard = lambda tree: jax.tree.map(place(self._here_by_shard), tree)  # noqa: E731
        everywhere = lambda tree: jax.tree.map(place(self._everywhere), tree)  # noqa: E731
        progress = jax.eval_shape(lambda: jnp.float32(0))
        rollout = () if self._steps.run_pending_updates else trajectory
        prepare = self._shapes_of_prepare(state, replay_state.counts, replay_state.ring, rollout)
        counts, ring = prepare[1:3]
        add = (counts, ring, trajectory, here(state.num_updates))
        jax.eval_shape(self._jitted.add, *add)
        _, samples, prepared, prepare_metrics = jax.eval_shape(self._jitted.prepare, *prepare)
        learn = (everywhere(state), jax.tree.map(place(self._by_shard), prepared), everywhere(progress))
        _, metrics, priorities = jax.eval_shape(self._jitted.learn, *learn)
        write = (counts, ring, by_shard(samples), by_shard(priorities))
        write_metrics = jax.eval_shape(self._jitted.write, *write)[2]
        target_params = (everywhere(state), everywhere(progress))
        arguments = _Steps(add, target_params, prepare, learn, write)
        return arguments, (everywhere(metrics), here(prepare_metrics | write_metrics))

    def compile(self, state: LearnerState, replay_state: ReplayState, trajectory: Trajectory) -> Programs:
        """See `Learning.compile`."""
        shapes, sums = self.trace(state, replay_state, trajectory)
        steps = _Steps(*(step.lower(*arguments).compile() for step, arguments in zip(self._jitted, shapes)))
        for program, mesh in ((steps.learn, self._layout.mesh), (steps.prepare, self._mesh)):
            require_memory(program_bytes(program), mesh.devices.flat[0])
        if not self._steps.run_pending_updates:
            return Programs(learn=functools.partial(self._learn, steps))
        zero_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), sums)
        add, run_pending = functools.partial(self._add, steps.add), functools.partial(self._run_pending, steps)
        return Programs(add=add, run_pending_updates=run_pending, zero_sums=zero_sums)


class _Steps(NamedTuple):
    """The steps over all shards (or their arguments)."""

    add: Any
    target_params: Any
    prepare: Any
    learn: Any
    write: Any


_add_metrics = jax.jit(add_metrics)


def _whole(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array that all processes have alike, on every device of a mesh."""
    if topology.is_key(x):
        return jax.random.wrap_key_data(_whole(jax.random.key_data(x), sharding))
    return topology.spread(x, sharding)
