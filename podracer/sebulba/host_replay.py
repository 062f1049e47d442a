"""Learning with a replay that is kept in the host's memory, for what is larger than the memory of the learners.

The steps are those of `podracer.learner`: rollouts are added and sequences drawn on the host's CPU, and what was drawn
is learnt from on the learner devices. Results are those of a replay on the devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from podracer import learner
from podracer.gradients import split_lanes
from podracer.learner import Counts, Experience
from podracer.topology import DATA_AXIS, HostTopology
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
        cpu = jax.local_devices(backend="cpu")[0]
        self._cpu: Any = SingleDeviceSharding(cpu)
        self.trajectory_sharding = Trajectory(*(self._cpu for _ in Trajectory._fields))
        self.experience_sharding = Experience(self._cpu, self._cpu)
        self._everywhere = NamedSharding(layout.mesh, PartitionSpec())
        self._by_shard = NamedSharding(layout.mesh, PartitionSpec(DATA_AXIS))
        self._add: Any = jax.jit(self._add_shards, donate_argnums=1)
        self._draw: Any = jax.jit(self._draw_shards)
        self._learn: Any = jax.jit(self._learn_shards(), donate_argnums=0)
        self._write: Any = jax.jit(self._write_shards, donate_argnums=1)
        self._nothing: Metrics = {}

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
            learn,
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

    def update(
        self,
        state: LearnerState,
        experience: Experience,
        trajectory: Trajectory,
        part: jax.Array,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[LearnerState, Experience, Metrics]:
        """See `Learning.update`; there is one part."""
        del part
        here = lambda tree: jax.device_put(tree, self._cpu)  # noqa: E731
        version, key, progress = here(state.num_updates), here(key), jax.device_put(progress, self._everywhere)
        counts, ring, due, call, key = self._add(experience.counts, experience.ring, trajectory, version, key)
        sums = self._nothing
        for number in range(int(due)):
            (at, batch), drawn = self._draw(counts, ring, trajectory, key, here(jnp.int32(number)))
            state, learnt, priorities = self._learn(state, jax.device_put(batch, self._by_shard), progress)
            ring, written = self._write(counts, ring, at, here(priorities))
            metrics = here(drawn | learnt | written)
            sums = jax.tree.map(jnp.add, sums, metrics) if sums else metrics
        return state, Experience(counts, ring), sums | call

    def trace(self, state: LearnerState, experience: Experience, trajectory: Trajectory) -> dict[str, Any]:
        """The shapes of the arguments of every step, on their devices."""
        place = lambda sharding: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        here = lambda tree: jax.tree.map(place(self._cpu), tree)  # noqa: E731
        key, number = here(jax.eval_shape(lambda: jax.random.key(0))), here(jax.ShapeDtypeStruct((), jnp.int32))
        counts, ring, trajectory = here((experience.counts, experience.ring, trajectory))
        add = (counts, ring, trajectory, number, key)
        draw = (counts, ring, trajectory, key, number)
        jax.eval_shape(self._add_shards, *add)
        (at, batch), drawn = here(jax.eval_shape(self._draw_shards, *draw))
        progress = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._everywhere)
        learn = (jax.tree.map(place(self._everywhere), state), jax.tree.map(place(self._by_shard), batch), progress)
        _, learnt, priorities = jax.eval_shape(self._learn, *learn)
        write = (counts, ring, at, here(priorities))
        written = jax.eval_shape(self._write_shards, *write)[1]
        return {"_add": add, "_draw": draw, "_learn": learn, "_write": write, "metrics": drawn | learnt | written}

    def compile(self, state: LearnerState, experience: Experience, trajectory: Trajectory) -> Callable[..., Any]:
        """`update`, compiled."""
        shapes = self.trace(state, experience, trajectory)
        metrics = shapes.pop("metrics")
        for name, arguments in shapes.items():
            setattr(self, name, getattr(self, name).lower(*arguments).compile())
        # So that reports of calls without an update name the same metrics.
        self._nothing = jax.device_put({name: jnp.zeros(x.shape, x.dtype) for name, x in metrics.items()}, self._cpu)
        return self.update


def _on_host(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step over arguments [S, ...], under the learner's axes; returns its first result [S, ...] and its second."""
    over_shards = jax.vmap(step, out_axes=(0, None), axis_name="shard")
    return jax.vmap(over_shards, in_axes=None, out_axes=None, axis_size=1, axis_name="data")  # type: ignore[arg-type]
