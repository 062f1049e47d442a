"""Learning with a replay that is not on the learners: in the hosts' memory, or on devices that reanalyse.

The steps are those of `podracer.learning.replay_steps`. Rollouts are added and samples prepared where the replay is;
samples are learnt from on the learner devices. Results are those of a replay on the learners.

    replay     add | prepare 1 | prepare 2 | write 1 | prepare 3 | write 2 | ...
    learners                   | learn 1             | learn 2             | ...

With `ahead`, the next group of updates is prepared while this one is learnt from, by parameters and priorities of a
group earlier. No thread does that: programs on different devices run side by side, in the order in which they were
dispatched, so runs repeat, and what was prepared too early for a stop is in the checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from podracer import replay, topology
from podracer.learning.learner import Experience
from podracer.learning.replay_steps import Counts, Elders, Prepared, Steps, added
from podracer.run.driver import program_bytes, require_memory
from podracer.sebulba.programs import Programs, policy_lag
from podracer.sebulba.sharding import by_lane
from podracer.topology import DATA_AXIS, HostTopology, compiling_for
from podracer.trajectories import split_lanes
from podracer.types import ArrayTree, LearnerState, Metrics, Trajectory


class Ahead(NamedTuple):
    """A group of updates that is prepared before it is due.

    Attributes:
      there: bool []; whether it is.
      at: where its samples are, [S].
      prepared: what is learnt from, [S].
      seen: metrics of preparing it.
    """

    there: jax.Array
    at: Any
    prepared: Prepared
    seen: Metrics


class SplitReplay:
    """Learning on the learner devices from a ring [S] on others (compare `learner_program.OnDevices`).

    What a process prepares goes to its own learner devices: of a pod, shards stay where they are.

    Args:
      steps: the agent's.
      layout: actors and learners.
      mesh: where the replay is, with the one axis `data`: devices of every process.
      reanalyses: whether samples are reanalysed there and priorities refreshed, or on the learners.
      ahead: whether the next group of updates is prepared while this one is learnt from.

    Attributes:
      trajectory_mesh: where a Trajectory goes.
      experience_sharding: of an Experience, a prefix of its tree.
    """

    def __init__(
        self, steps: Steps, layout: HostTopology, mesh: Mesh, *, reanalyses: bool = False, ahead: bool = False
    ):
        self._steps, self._layout, self._mesh, self._ahead = steps, layout, mesh, ahead and steps.drain is not None
        self.trajectory_mesh = mesh
        everywhere, by_shard = PartitionSpec(), PartitionSpec(DATA_AXIS)
        self._here, self._here_by_shard = NamedSharding(mesh, everywhere), NamedSharding(mesh, by_shard)
        aside: Any = Ahead(self._here, self._here_by_shard, self._here_by_shard, self._here)  # type: ignore[arg-type]
        self.experience_sharding = Experience(self._here, self._here_by_shard, aside if self._ahead else ())  # type: ignore[arg-type]
        self._everywhere = NamedSharding(layout.mesh, everywhere)
        self._by_shard = NamedSharding(layout.mesh, by_shard)

        def there(step: Callable[..., Any], donate: tuple[int, ...], in_specs: Any, out_specs: Any) -> Any:
            mapped = jax.shard_map(
                compiling_for(mesh.devices.flat[0].platform)(step),
                mesh=mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                # As in podracer.sebulba.learner_program.
                check_vma=False,
            )
            return jax.jit(mapped, donate_argnums=donate)

        def elders(state: LearnerState, progress: jax.Array) -> Elders:
            elders = steps.elders(state, progress)
            elders = elders if reanalyses else Elders(number=elders.number)
            # Copied: the learner's own arrays are donated to the update, and jit passes inputs on without a copy.
            return jax.tree.map(jnp.copy, elders)

        newest = () if steps.drain else by_lane()
        ring = (everywhere, by_shard)
        self._jitted = _Steps(
            add=there(self._add_shards, (1,), (*ring, by_lane(), everywhere), (*ring, everywhere)),
            elders=jax.jit(elders, out_shardings=self._everywhere),
            prepare=there(
                self._prepare_shards,
                (),
                (everywhere, *ring, newest, *[everywhere] * 3),
                (by_shard, by_shard, by_shard, everywhere),
            ),
            learn=jax.jit(self._learn_shards(), donate_argnums=0),
            write=there(self._write_shards, (1,), (*ring, by_shard, by_shard), (*ring, everywhere)),
        )

    # The steps over the shards of a process

    def _over_shards(self, step: Callable[..., Any], *by_shard: Any) -> Any:
        """`step(*of a shard)`; its first result [shards], and its second."""
        return jax.vmap(step, out_axes=(0, None), axis_name="shard")(*by_shard)

    @property
    def _shards(self) -> int:
        """On a device."""
        return self._layout.num_shards // self._mesh.size

    def _add_shards(self, counts: Counts, ring: ArrayTree, trajectory: Trajectory, num_updates: jax.Array) -> Any:
        group = trajectory.lane[0] // self._layout.envs_per_actor % self._layout.threads

        def add(ring: ArrayTree, trajectory: Trajectory) -> Any:
            now, ring, metrics = self._steps.add(counts, ring, trajectory, group)
            return ring, (now, metrics | policy_lag(trajectory, num_updates))

        ring, (now, metrics) = self._over_shards(add, ring, split_lanes(trajectory, self._shards))
        return now, ring, metrics

    def _prepare_shards(
        self,
        elders: Elders,
        counts: Counts,
        ring: Any,
        newest: Any,
        progress: jax.Array,
        key: jax.Array,
        later: jax.Array,
    ) -> Any:
        """Changes of the ring and the other results of `Steps.prepare`, for the group `later` groups after the next."""
        rest = (later,) if self._steps.drain else ()

        def prepare(ring: Any, newest: Any, shard: jax.Array) -> Any:
            own = jax.random.fold_in(key, shard)
            ring, at, prepared, metrics = self._steps.prepare(elders, counts, ring, newest, progress, own, *rest)
            return (replay.changes(ring), at, prepared), metrics

        index = lax.axis_index(DATA_AXIS) * self._shards + jnp.arange(self._shards, dtype=jnp.int32)
        newest = split_lanes(newest, self._shards) if newest else ()
        (changes, at, prepared), metrics = self._over_shards(prepare, ring, newest, index)
        return changes, at, prepared, metrics

    def _learn_shards(self) -> Callable[..., Any]:
        def learn(state: LearnerState, prepared: Prepared, progress: jax.Array) -> Any:
            def shard(prepared: Prepared) -> Any:
                new, metrics, priorities = self._steps.learn(state, prepared, progress)
                return priorities, (new, metrics)

            priorities, (new, metrics) = self._over_shards(shard, prepared)
            return new, metrics, priorities

        everywhere, by_shard = PartitionSpec(), PartitionSpec(DATA_AXIS)
        return jax.shard_map(
            compiling_for(self._layout.platform)(learn),
            mesh=self._layout.mesh,
            in_specs=(everywhere, by_shard, everywhere),
            out_specs=(everywhere, everywhere, by_shard),
            # As in podracer.sebulba.learner_program.
            check_vma=False,
        )

    def _write_shards(self, counts: Counts, ring: ArrayTree, at: Any, priorities: Any) -> Any:
        write = functools.partial(self._steps.write, counts)
        ring, metrics = self._over_shards(write, ring, at, priorities)
        if self._steps.drain:
            counts = counts._replace(pending=counts.pending - 1, updates=counts.updates + 1)
        return counts, ring, metrics

    # Between the two

    def _told(self, tree: Any, sharding: NamedSharding) -> Any:
        """Copies replicated arrays to another sharding."""
        if self._layout.processes == 1:
            return jax.device_put(tree, sharding)
        return jax.tree.map(lambda x: _whole(topology.here(x), sharding), tree)

    def _sent(self, tree: Any, sharding: NamedSharding) -> Any:
        """Copies sharded arrays to another sharding; shards stay in their process."""
        if self._layout.processes == 1:
            return jax.device_put(tree, sharding)
        devices: Any = sharding.mesh.devices
        own = [device for device in devices.flat if device.process_index == jax.process_index()]
        local = NamedSharding(Mesh(np.asarray(own), (DATA_AXIS,), axis_types=(AxisType.Auto,)), sharding.spec)

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
        experience: Experience,
        trajectory: Trajectory,
        part: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Experience, Metrics]:
        """An update on a rollout next to replayed ones; there is one part."""
        key = jax.random.fold_in(key, experience.counts.batches)
        experience, call = self._add(steps.add, experience, trajectory, state.num_updates)
        state, experience, sums = self._update(steps, state, experience, trajectory, progress, key)
        for metrics in sums:
            call = call | metrics
        return state, experience, call

    def _add(
        self, add: Callable[..., Any], experience: Experience, trajectory: Trajectory, num_updates: jax.Array
    ) -> tuple[Experience, Metrics]:
        counts, ring, ahead = experience
        counts, ring, metrics = add(counts, ring, trajectory, self._told(num_updates, self._here))
        return Experience(counts, ring, ahead), metrics

    def _drain(
        self,
        steps: _Steps,
        state: LearnerState,
        experience: Experience,
        sums: tuple[Metrics, ...],
        number: int,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Experience, tuple[Metrics, ...]]:
        for _ in range(number):
            state, experience, metrics = self._update(steps, state, experience, (), progress, key)
            sums = tuple(_added(*pair) for pair in zip(sums, metrics))
        return state, experience, sums

    def _update(
        self, steps: _Steps, state: LearnerState, experience: Experience, newest: Any, progress: jax.Array, key: Any
    ) -> tuple[LearnerState, Experience, tuple[Metrics, Metrics]]:
        """One group of updates; its metrics on the learners, and where the replay is."""
        counts, ring, ahead = experience
        there = self._told(progress, self._everywhere)
        elders = self._told(steps.elders(state, there), self._here)
        here = self._told((progress, key), self._here)

        def prepare(ring: Any, later: int) -> Any:
            number = self._told(jnp.int32(later), self._here)
            changes, *made = steps.prepare(elders, counts, ring, newest, *here, number)
            return replay.changed(ring, changes), made

        if self._ahead and bool(topology.here(ahead.there)):
            at, prepared, seen = ahead.at, ahead.prepared, ahead.seen
        else:
            ring, (at, prepared, seen) = prepare(ring, 0)
        if self._ahead:
            ring, made = prepare(ring, 1)
            ahead = Ahead(self._told(jnp.bool_(True), self._here), *made)
        state, learnt, priorities = steps.learn(state, self._sent(prepared, self._by_shard), there)
        counts, ring, written = steps.write(counts, ring, at, self._sent(priorities, self._here_by_shard))
        return state, Experience(counts, ring, ahead), (learnt, seen | written)

    def ahead(self, state: LearnerState, counts: Counts, ring: Any) -> Any:
        """Nothing that is prepared, from shapes of the rest."""
        if not self._ahead:
            return ()
        arguments = self._shapes_of_prepare(state, counts, ring, ())
        _, *made = jax.eval_shape(self._jitted.prepare, *arguments)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), Ahead(jnp.bool_(False), *made))

    def _shapes_of_prepare(self, state: LearnerState, counts: Counts, ring: Any, newest: Any) -> tuple[Any, ...]:
        place = lambda sharding: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        here = lambda tree: jax.tree.map(place(self._here), tree)  # noqa: E731
        key, progress = jax.eval_shape(lambda: (jax.random.key(0), jnp.float32(0)))
        elders = here(jax.eval_shape(self._jitted.elders, state, progress))
        ring = jax.tree.map(place(self._here_by_shard), ring)
        later = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._here)
        return elders, here(counts), ring, newest, here(progress), here(key), later

    def trace(self, state: LearnerState, experience: Experience, trajectory: Trajectory) -> Any:
        """See `Learning.trace`; returns the arguments of every step, and the metrics of an update, as shapes."""
        place = lambda sharding: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        here = lambda tree: jax.tree.map(place(self._here), tree)  # noqa: E731
        by_shard = lambda tree: jax.tree.map(place(self._here_by_shard), tree)  # noqa: E731
        everywhere = lambda tree: jax.tree.map(place(self._everywhere), tree)  # noqa: E731
        progress = jax.eval_shape(lambda: jnp.float32(0))
        newest = () if self._steps.drain else trajectory
        prepare = self._shapes_of_prepare(state, experience.counts, experience.ring, newest)
        counts, ring = prepare[1:3]
        add = (counts, ring, trajectory, here(state.num_updates))
        jax.eval_shape(self._jitted.add, *add)
        _, at, prepared, seen = jax.eval_shape(self._jitted.prepare, *prepare)
        learn = (everywhere(state), jax.tree.map(place(self._by_shard), prepared), everywhere(progress))
        _, learnt, priorities = jax.eval_shape(self._jitted.learn, *learn)
        write = (counts, ring, by_shard(at), by_shard(priorities))
        written = jax.eval_shape(self._jitted.write, *write)[2]
        elders = (everywhere(state), everywhere(progress))
        return _Steps(add, elders, prepare, learn, write), (everywhere(learnt), here(seen | written))

    def compile(self, state: LearnerState, experience: Experience, trajectory: Trajectory) -> Programs:
        """See `Learning.compile`."""
        wanted, sums = self.trace(state, experience, trajectory)
        steps = _Steps(*(step.lower(*arguments).compile() for step, arguments in zip(self._jitted, wanted)))
        for program, mesh in ((steps.learn, self._layout.mesh), (steps.prepare, self._mesh)):
            require_memory(program_bytes(program), mesh.devices.flat[0])
        if not self._steps.drain:
            return Programs(learn=functools.partial(self._learn, steps))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), sums)
        add, drain = functools.partial(self._add, steps.add), functools.partial(self._drain, steps)
        return Programs(add=add, drain=drain, nothing=nothing)


class _Steps(NamedTuple):
    """The steps over all shards (or their arguments)."""

    add: Any
    elders: Any
    prepare: Any
    learn: Any
    write: Any


_added = jax.jit(added)


def _whole(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array that all processes have alike, on every device of a mesh."""
    if topology.is_key(x):
        return jax.random.wrap_key_data(_whole(jax.random.key_data(x), sharding))
    return topology.spread(x, sharding)
