"""Learning with a replay that is kept in the hosts' memory, for what is larger than the memory of the learners.

The steps are those of `podracer.learning.steps`: rollouts are added and sequences drawn on the host's CPU, and what
was drawn is learnt from on the learner devices. Results are those of a replay on the devices.
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

from podracer import topology
from podracer.driver import program_bytes, require_memory
from podracer.learning.learner import Experience
from podracer.learning.steps import Counts, Steps, update_keys
from podracer.learning.trajectories import split_lanes
from podracer.sebulba.assembly import by_lane
from podracer.sebulba.programs import Programs, policy_lag
from podracer.topology import DATA_AXIS, HostTopology, compiling_for, host_cpus
from podracer.types import ArrayTree, LearnerState, Metrics, Trajectory


class HostReplay:
    """Learning on the learner devices from a ring [S] in the memory of the hosts (compare `learning.OnDevices`).

    What a process draws goes to its own learner devices: of a pod, shards stay where they are.

    Args:
      steps: the agent's.
      layout: actors and learners.

    Attributes:
      trajectory_mesh: where a Trajectory goes: a CPU of every process.
      experience_sharding: of an Experience, a prefix of its tree.
    """

    def __init__(self, steps: Steps, layout: HostTopology):
        self._steps, self._layout = steps, layout
        cpus = host_cpus("replay_memory='host'", layout.mesh)
        self.trajectory_mesh = host = Mesh(np.asarray(cpus), (DATA_AXIS,), axis_types=(AxisType.Auto,))
        everywhere, by_shard = PartitionSpec(), PartitionSpec(DATA_AXIS)
        self._here, self._here_by_shard = NamedSharding(host, everywhere), NamedSharding(host, by_shard)
        self.experience_sharding = Experience(self._here, self._here_by_shard)  # type: ignore[arg-type]
        self._everywhere = NamedSharding(layout.mesh, everywhere)
        self._by_shard = NamedSharding(layout.mesh, by_shard)

        def on_hosts(step: Callable[..., Any], donate: tuple[int, ...], in_specs: Any, out_specs: Any) -> Any:
            mapped = jax.shard_map(
                compiling_for("cpu")(step),
                mesh=host,
                in_specs=in_specs,
                out_specs=out_specs,
                # As in podracer.sebulba.learning.
                check_vma=False,
            )
            return jax.jit(mapped, donate_argnums=donate)

        ring, newest = (everywhere, by_shard), () if steps.drain else by_lane()
        self._jitted = _Steps(
            add=on_hosts(self._add_shards, (1,), (*ring, by_lane(), everywhere), (*ring, everywhere)),
            draw=on_hosts(self._draw_shards, (), (*ring, newest, everywhere, everywhere), (by_shard, everywhere)),
            learn=jax.jit(self._learn_shards(), donate_argnums=0),
            write=on_hosts(self._write_shards, (1,), (*ring, by_shard, by_shard), (*ring, everywhere)),
        )

    # The steps over the shards of a process

    def _over_shards(self, step: Callable[..., Any], *by_shard: Any) -> Any:
        """`step(*of a shard)`; its first result [shards], and its second."""
        return jax.vmap(step, out_axes=(0, None), axis_name="shard")(*by_shard)

    def _split(self, trajectory: Trajectory) -> Trajectory:
        return split_lanes(trajectory, self._layout.num_shards // self._layout.processes)

    def _add_shards(self, counts: Counts, ring: ArrayTree, trajectory: Trajectory, num_updates: jax.Array) -> Any:
        group = trajectory.lane[0] // self._layout.envs_per_actor % self._layout.threads

        def add(ring: ArrayTree, trajectory: Trajectory) -> Any:
            now, ring, metrics = self._steps.add(counts, ring, trajectory, group)
            return ring, (now, metrics | policy_lag(trajectory, num_updates))

        ring, (now, metrics) = self._over_shards(add, ring, self._split(trajectory))
        return now, ring, metrics

    def _draw_shards(self, counts: Counts, ring: ArrayTree, newest: Any, progress: jax.Array, key: jax.Array) -> Any:
        number = counts.updates if self._steps.drain else 0

        def draw(ring: ArrayTree, newest: Any, shard: jax.Array) -> Any:
            sample_key, learn_key = update_keys(jax.random.fold_in(key, shard), number)
            at, batch, metrics = self._steps.draw(counts, ring, newest, progress, sample_key)
            # Keys are no arrays on their way from hosts to devices.
            return (at, (batch, jax.random.key_data(learn_key))), metrics

        shards = self._layout.num_shards // self._layout.processes
        index = lax.axis_index(DATA_AXIS) * shards + jnp.arange(shards, dtype=jnp.int32)
        return self._over_shards(draw, ring, self._split(newest) if newest else (), index)

    def _learn_shards(self) -> Callable[..., Any]:
        def learn(state: LearnerState, drawn: Any, progress: jax.Array) -> Any:
            def shard(batch: Any, key: jax.Array) -> Any:
                new, metrics, priorities = self._steps.learn(state, batch, progress, jax.random.wrap_key_data(key))
                return priorities, (new, metrics)

            priorities, (new, metrics) = self._over_shards(shard, *drawn)
            return new, metrics, priorities

        everywhere, by_shard = PartitionSpec(), PartitionSpec(DATA_AXIS)
        return jax.shard_map(
            compiling_for(self._layout.platform)(learn),
            mesh=self._layout.mesh,
            in_specs=(everywhere, by_shard, everywhere),
            out_specs=(everywhere, everywhere, by_shard),
            # As in podracer.sebulba.learning.
            check_vma=False,
        )

    def _write_shards(self, counts: Counts, ring: ArrayTree, at: Any, priorities: Any) -> Any:
        write = functools.partial(self._steps.write, counts)
        ring, metrics = self._over_shards(write, ring, at, priorities)
        if self._steps.drain:
            counts = counts._replace(pending=counts.pending - 1, updates=counts.updates + 1)
        return counts, ring, metrics

    # Between hosts and devices

    def _told(self, tree: Any, sharding: NamedSharding) -> Any:
        """What all processes have alike, somewhere else."""
        if self._layout.processes == 1:
            return jax.device_put(tree, sharding)
        return jax.tree.map(lambda x: _whole(topology.here(x), sharding), tree)

    def _sent(self, tree: Any, sharding: NamedSharding) -> Any:
        """What is by shard, from hosts to devices or back; shards stay in their process."""
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
        counts, ring, metrics = add(*experience, trajectory, self._told(num_updates, self._here))
        return Experience(counts, ring), metrics

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
            sums = tuple(_add(*pair) for pair in zip(sums, metrics))
        return state, experience, sums

    def _update(
        self, steps: _Steps, state: LearnerState, experience: Experience, newest: Any, progress: jax.Array, key: Any
    ) -> tuple[LearnerState, Experience, tuple[Metrics, Metrics]]:
        """One update; its metrics on the learners, and on the host."""
        (at, drawn), seen = steps.draw(*experience, newest, *self._told((progress, key), self._here))
        there = self._told(progress, self._everywhere)
        state, learnt, priorities = steps.learn(state, self._sent(drawn, self._by_shard), there)
        counts, ring, written = steps.write(*experience, at, self._sent(priorities, self._here_by_shard))
        return state, Experience(counts, ring), (learnt, seen | written)

    def trace(self, state: LearnerState, experience: Experience, trajectory: Trajectory) -> Any:
        """See `Learning.trace`; returns the arguments of every step, and the metrics of an update, as shapes."""
        place = lambda sharding: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        here = lambda tree: jax.tree.map(place(self._here), tree)  # noqa: E731
        by_shard = lambda tree: jax.tree.map(place(self._here_by_shard), tree)  # noqa: E731
        everywhere = lambda tree: jax.tree.map(place(self._everywhere), tree)  # noqa: E731
        key, progress = jax.eval_shape(lambda: (jax.random.key(0), jnp.float32(0)))
        counts, ring = here(experience.counts), by_shard(experience.ring)
        add = (counts, ring, trajectory, here(state.num_updates))
        draw = (counts, ring, () if self._steps.drain else trajectory, here(progress), here(key))
        jax.eval_shape(self._jitted.add, *add)
        (at, drawn), seen = jax.eval_shape(self._jitted.draw, *draw)
        learn = (everywhere(state), jax.tree.map(place(self._by_shard), drawn), everywhere(progress))
        _, learnt, priorities = jax.eval_shape(self._jitted.learn, *learn)
        write = (counts, ring, by_shard(at), by_shard(priorities))
        written = jax.eval_shape(self._jitted.write, *write)[2]
        return _Steps(add, draw, learn, write), (everywhere(learnt), here(seen | written))

    def compile(self, *shapes: Any) -> Programs:
        """See `Learning.compile`."""
        wanted, sums = self.trace(*shapes)
        steps = _Steps(*(step.lower(*arguments).compile() for step, arguments in zip(self._jitted, wanted)))
        require_memory(program_bytes(steps.learn), self._layout.mesh.devices.flat[0])
        if not self._steps.drain:
            return Programs(learn=functools.partial(self._learn, steps))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), sums)
        add, drain = functools.partial(self._add, steps.add), functools.partial(self._drain, steps)
        return Programs(add=add, drain=drain, nothing=nothing)


class _Steps(NamedTuple):
    """The steps over all shards (or their arguments)."""

    add: Any
    draw: Any
    learn: Any
    write: Any


@jax.jit
def _add(sums: Metrics, metrics: Metrics) -> Metrics:
    return jax.tree.map(jnp.add, sums, metrics)


def _whole(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array that all processes have alike, on every device of a mesh."""
    if topology.is_key(x):
        return jax.random.wrap_key_data(_whole(jax.random.key_data(x), sharding))
    return topology.spread(x, sharding)
