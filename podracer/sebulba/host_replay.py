"""Learning with a replay that is kept in the host's memory, for what is larger than the memory of the learners.

The steps are those of `podracer.learning.learner`: rollouts are added and sequences drawn on the host's CPU, and what
was drawn is learnt from on the learner devices. Results are those of a replay on the devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from podracer.driver import program_bytes, require_memory
from podracer.learning import learner
from podracer.learning.learner import Counts, Experience
from podracer.learning.trajectories import split_lanes
from podracer.topology import DATA_AXIS, HostTopology, compiling_for, host_cpu
from podracer.types import ArrayTree, LearnerState, Metrics, Trajectory


class HostReplay:
    """Learning on the learner devices from a ring [S] on the host's CPU (compare `learning.OnDevices`).

    Args:
      steps: the agent's.
      layout: actors and learners.
      lag: `(Trajectory of a shard, num_updates) -> Metrics`.

    Attributes:
      trajectory_sharding: of a Trajectory, a prefix of its tree.
      experience_sharding: of an Experience, a prefix of its tree.
    """

    def __init__(self, steps: learner.Steps, layout: HostTopology, lag: Callable[[Trajectory, jax.Array], Metrics]):
        self._steps, self._layout, self._lag = steps, layout, lag
        self._newest: tuple[Any, int] = (None, 0)  # the number of updates of the newest state, and its value
        self._cpu: Any = SingleDeviceSharding(host_cpu("replay_memory='host'"))
        self.trajectory_sharding = Trajectory(*(self._cpu for _ in Trajectory._fields))
        self.experience_sharding = Experience(self._cpu, self._cpu)
        self._everywhere = NamedSharding(layout.mesh, PartitionSpec())
        self._by_shard = NamedSharding(layout.mesh, PartitionSpec(DATA_AXIS))
        self._jitted = _Programs(
            add=jax.jit(self._add_shards, donate_argnums=1),
            draw=jax.jit(self._draw_shards),
            learn=jax.jit(self._learn_shards(), donate_argnums=0),
            write=jax.jit(self._write_shards, donate_argnums=1),
        )

    # The steps over all shards

    def _add_shards(
        self, counts: Counts, ring: ArrayTree, trajectory: Trajectory, num_updates: jax.Array, key: jax.Array
    ) -> Any:
        group = trajectory.lane[0] // self._layout.envs_per_actor

        def add(ring: ArrayTree, trajectory: Trajectory) -> Any:
            now, ring, due, metrics = self._steps.add(counts, ring, trajectory, group)
            return ring, (now, due, metrics | self._lag(trajectory, num_updates))

        ring, (now, due, metrics) = _on_host(add)(ring, split_lanes(trajectory, self._layout.num_shards))
        return now, ring, due, metrics, jax.random.fold_in(key, counts.batches)

    def _draw_shards(
        self, counts: Counts, ring: ArrayTree, trajectory: Trajectory, key: jax.Array, number: jax.Array
    ) -> Any:
        def draw(ring: ArrayTree, trajectory: Trajectory, shard: jax.Array) -> Any:
            sample_key, learn_key = learner.update_keys(jax.random.fold_in(key, shard), number)
            at, batch, metrics = self._steps.draw(counts, ring, trajectory, sample_key)
            return (at, (batch, learn_key)), metrics

        S = self._layout.num_shards
        return _on_host(draw)(ring, split_lanes(trajectory, S), jnp.arange(S, dtype=jnp.int32))

    def _learn_shards(self) -> Callable[..., Any]:
        def learn(state: LearnerState, drawn: Any, progress: jax.Array) -> Any:
            def shard(batch: Any, key: jax.Array) -> Any:
                new, metrics, priorities = self._steps.learn(state, batch, progress, key)
                return priorities, (new, metrics)

            priorities, (new, metrics) = jax.vmap(shard, axis_name="shard", out_axes=(0, None))(*drawn)
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
        priority, metrics = _on_host(write)(ring, at, priorities)
        return ring._replace(priority=priority), metrics

    # As the driver calls them

    def update(self, *arguments: Any) -> tuple[LearnerState, Experience, Metrics]:
        """See `Learning.update`; there is one part. Of the experience, the ring is donated."""
        return self._run(self._jitted, *arguments)

    def _run(
        self,
        steps: _Programs,
        state: LearnerState,
        experience: Experience,
        trajectory: Trajectory,
        part: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Experience, Metrics]:
        del part
        here = lambda tree: jax.device_put(tree, self._cpu)  # noqa: E731
        # Read once and then counted: reading what the last update returned would wait for it.
        newest, updates = self._newest
        if newest is not state.num_updates:
            updates = int(state.num_updates)
        version, key, progress = here(np.int32(updates)), here(key), jax.device_put(progress, self._everywhere)
        counts, ring, due, call, key = steps.add(experience.counts, experience.ring, trajectory, version, key)
        # Summed where they are: fetching the learners' once is enough.
        learnt, seen = steps.nothing
        due = int(due)
        for number in range(due):
            (at, batch), drawn = steps.draw(counts, ring, trajectory, key, here(np.int32(number)))
            state, metrics, priorities = steps.learn(state, jax.device_put(batch, self._by_shard), progress)
            ring, written = steps.write(counts, ring, at, here(priorities))
            learnt, seen = _sum(learnt, metrics), _sum(seen, drawn | written)
        self._newest = state.num_updates, updates + due
        return state, Experience(counts, ring), here(learnt) | seen | call

    def trace(self, state: LearnerState, experience: Experience, trajectory: Trajectory) -> Any:
        """See `Learning.trace`; returns the arguments of every step, and the metrics of an update, as shapes."""
        place = lambda sharding: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        here = lambda tree: jax.tree.map(place(self._cpu), tree)  # noqa: E731
        everywhere = lambda tree: jax.tree.map(place(self._everywhere), tree)  # noqa: E731
        key, number = here(jax.eval_shape(lambda: jax.random.key(0))), here(jax.ShapeDtypeStruct((), jnp.int32))
        counts, ring, trajectory = here((experience.counts, experience.ring, trajectory))
        add = (counts, ring, trajectory, number, key)
        draw = (counts, ring, trajectory, key, number)
        jax.eval_shape(self._add_shards, *add)
        (at, batch), drawn = here(jax.eval_shape(self._draw_shards, *draw))
        progress = everywhere(jax.ShapeDtypeStruct((), jnp.float32))
        learn = (everywhere(state), jax.tree.map(place(self._by_shard), batch), progress)
        _, learnt, priorities = jax.eval_shape(self._jitted.learn, *learn)
        write = (counts, ring, at, here(priorities))
        written = jax.eval_shape(self._write_shards, *write)[1]
        return _Programs(add, draw, learn, write, (everywhere(learnt), here(drawn | written)))

    def compile(self, *shapes: Any) -> Callable[..., Any]:
        """See `Learning.compile`."""
        wanted = self.trace(*shapes)
        compiled: Any = [step.lower(*arguments).compile() for step, arguments in zip(self._jitted[:-1], wanted[:-1])]
        require_memory(program_bytes(compiled[2]), self._layout.mesh.devices.flat[0])
        # So that calls without an update name the same metrics.
        zeros = lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding)  # noqa: E731
        return functools.partial(self._run, _Programs(*compiled)._replace(nothing=jax.tree.map(zeros, wanted.nothing)))


class _Programs(NamedTuple):
    """The steps over all shards (or their arguments), and the metrics of no update: the learners' and the host's."""

    add: Any
    draw: Any
    learn: Any
    write: Any
    nothing: Any = ({}, {})


def _sum(sums: Metrics, metrics: Metrics) -> Metrics:
    return _add(sums, metrics) if sums else metrics


@jax.jit
def _add(sums: Metrics, metrics: Metrics) -> Metrics:
    return jax.tree.map(jnp.add, sums, metrics)


def _on_host(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step over arguments [S, ...], under the learner's axes; returns its first result [S, ...] and its second."""
    over_shards = jax.vmap(step, out_axes=(0, None), axis_name="shard")
    alone = jax.vmap(over_shards, in_axes=None, out_axes=None, axis_size=1, axis_name="data")  # type: ignore[arg-type]
    return compiling_for("cpu")(alone)
