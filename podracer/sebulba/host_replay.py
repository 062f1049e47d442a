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
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from podracer.driver import program_bytes, require_memory
from podracer.learning import learner
from podracer.learning.learner import Counts, Experience
from podracer.learning.trajectories import split_lanes
from podracer.sebulba.programs import Programs, policy_lag
from podracer.topology import DATA_AXIS, HostTopology, compiling_for, host_cpu
from podracer.types import ArrayTree, LearnerState, Metrics, Trajectory


class HostReplay:
    """Learning on the learner devices from a ring [S] on the host's CPU (compare `learning.OnDevices`).

    Args:
      steps: the agent's.
      layout: actors and learners.

    Attributes:
      trajectory_sharding: of a Trajectory, a prefix of its tree.
      experience_sharding: of an Experience, a prefix of its tree.
    """

    def __init__(self, steps: learner.Steps, layout: HostTopology):
        self._steps, self._layout = steps, layout
        self._cpu: Any = SingleDeviceSharding(host_cpu("replay_memory='host'"))
        self.trajectory_sharding = Trajectory(*(self._cpu for _ in Trajectory._fields))
        self.experience_sharding = Experience(self._cpu, self._cpu)
        self._everywhere = NamedSharding(layout.mesh, PartitionSpec())
        self._by_shard = NamedSharding(layout.mesh, PartitionSpec(DATA_AXIS))
        self._jitted = _Steps(
            add=jax.jit(self._add_shards, donate_argnums=1),
            draw=jax.jit(self._draw_shards),
            learn=jax.jit(self._learn_shards(), donate_argnums=0),
            write=jax.jit(self._write_shards, donate_argnums=1),
        )

    # The steps over all shards

    def _add_shards(self, counts: Counts, ring: ArrayTree, trajectory: Trajectory, num_updates: jax.Array) -> Any:
        group = trajectory.lane[0] // self._layout.envs_per_actor

        def add(ring: ArrayTree, trajectory: Trajectory) -> Any:
            now, ring, metrics = self._steps.add(counts, ring, trajectory, group)
            return ring, (now, metrics | policy_lag(trajectory, num_updates))

        ring, (now, metrics) = _on_host(add)(ring, split_lanes(trajectory, self._layout.num_shards))
        return now, ring, metrics

    def _draw_shards(self, counts: Counts, ring: ArrayTree, newest: Any, progress: jax.Array, key: jax.Array) -> Any:
        number = counts.updates if self._steps.drain else 0

        def draw(ring: ArrayTree, newest: Any, shard: jax.Array) -> Any:
            sample_key, learn_key = learner.update_keys(jax.random.fold_in(key, shard), number)
            at, batch, metrics = self._steps.draw(counts, ring, newest, progress, sample_key)
            return (at, (batch, learn_key)), metrics

        S = self._layout.num_shards
        newest = split_lanes(newest, S) if newest else ()
        return _on_host(draw)(ring, newest, jnp.arange(S, dtype=jnp.int32))

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
        ring, metrics = _on_host(functools.partial(self._steps.write, counts))(ring, at, priorities)
        if self._steps.drain:
            counts = counts._replace(pending=counts.pending - 1, updates=counts.updates + 1)
        return counts, ring, metrics

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
        counts, ring, metrics = add(*experience, trajectory, jax.device_put(num_updates, self._cpu))
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
        here = jax.device_put((progress, key), self._cpu)
        (at, drawn), seen = steps.draw(*experience, newest, *here)
        drawn, there = jax.device_put(drawn, self._by_shard), jax.device_put(progress, self._everywhere)
        state, learnt, priorities = steps.learn(state, drawn, there)
        counts, ring, written = steps.write(*experience, at, jax.device_put(priorities, self._cpu))
        return state, Experience(counts, ring), (learnt, seen | written)

    def trace(self, state: LearnerState, experience: Experience, trajectory: Trajectory) -> Any:
        """See `Learning.trace`; returns the arguments of every step, and the metrics of an update, as shapes."""
        place = lambda sharding: lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        here = lambda tree: jax.tree.map(place(self._cpu), tree)  # noqa: E731
        everywhere = lambda tree: jax.tree.map(place(self._everywhere), tree)  # noqa: E731
        key, progress = jax.eval_shape(lambda: (jax.random.key(0), jnp.float32(0)))
        counts, ring, trajectory = here((experience.counts, experience.ring, trajectory))
        add = (counts, ring, trajectory, here(state.num_updates))
        draw = (counts, ring, () if self._steps.drain else trajectory, here(progress), here(key))
        jax.eval_shape(self._add_shards, *add)
        (at, drawn), seen = here(jax.eval_shape(self._draw_shards, *draw))
        learn = (everywhere(state), jax.tree.map(place(self._by_shard), drawn), everywhere(progress))
        _, learnt, priorities = jax.eval_shape(self._jitted.learn, *learn)
        write = (counts, ring, at, here(priorities))
        written = jax.eval_shape(self._write_shards, *write)[2]
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


def _on_host(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step over arguments [S, ...], under the learner's axes; returns its first result [S, ...] and its second."""
    over_shards = jax.vmap(step, out_axes=(0, None), axis_name="shard")
    alone = jax.vmap(over_shards, in_axes=None, out_axes=None, axis_size=1, axis_name="data")  # type: ignore[arg-type]
    return compiling_for("cpu")(alone)
