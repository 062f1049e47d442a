"""The state of a run under Sebulba, as checkpoints hold it: the learner, and in a fixed order also what acts next."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer import topology
from podracer.learning.counter import Counter
from podracer.learning.learner import ReplayState
from podracer.run.driver import RunState
from podracer.sebulba.actor import ActorSnapshot
from podracer.sebulba.learner_program import Learning
from podracer.topology import HostTopology
from podracer.types import ActorParams, Agent, LearnerState


class LockstepState(NamedTuple):
    """The acting side of a run in a fixed order whose environments can be saved.

    Attributes:
      published: the A parameter sets published last, where a replica has A threads, oldest first, on the learner
        devices. The newest is not among them, for it is made of the learner's state again.
      snapshots: where the next rollout of each actor begins, [R, A, ...], by process.
    """

    published: tuple[ActorParams, ...]
    snapshots: ActorSnapshot


class States:
    """Makes the states of a run, and takes them apart.

    Args:
      agent: the agent.
      layout: actors and learners.
      learning: the learner's functions.
    """

    def __init__(self, agent: Agent, layout: HostTopology, learning: Learning):
        self._agent, self._layout, self._learning = agent, layout, learning
        # One device of each process, for what every process has of its own.
        first = {device.process_index: device for device in layout.mesh.devices[::-1]}
        processes = Mesh(np.asarray([first[index] for index in sorted(first)]), ("process",))
        self._by_process = NamedSharding(processes, PartitionSpec("process"))

    def make(self, learner: LearnerState, acting: Any, env_steps: int, replay_state: ReplayState) -> RunState:
        """A state with the leading dim of a population of one.

        The learner's is a copy, which outlives its donation; the replay state may be too large for that.
        """
        counter = topology.spread(Counter.of(env_steps), self._learning.state_sharding)
        return RunState(_with_member_axis(learner), acting, _with_member_axis(counter), replay_state)

    def like(self, learner: LearnerState, snapshots: list[ActorSnapshot]) -> RunState:
        """The shapes, dtypes and shardings of a state.

        Args:
          learner: its shapes.
          snapshots: where the actors of this process begin; [] where that is not saved.
        """
        everywhere = self._learning.state_sharding
        abstract = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        acting: Any = ()
        if snapshots:
            params = jax.eval_shape(self._agent.actor_params, learner, jnp.float32(0))
            params = jax.tree.map(lambda x: abstract(x, everywhere), params)
            R, A = self._layout.replicas, self._layout.threads
            of_all = lambda x: jax.ShapeDtypeStruct((R, A, *x.shape), x.dtype, sharding=self._by_process)  # noqa: E731
            acting = LockstepState((params,) * A, jax.tree.map(of_all, snapshots[0]))
        lead = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype, sharding=everywhere)  # noqa: E731
        counter = jax.eval_shape(lambda: Counter.of(0))
        shapes, shardings = jax.eval_shape(self._learning.replay_state), self._learning.replay_sharding
        replay_state = jax.tree.map(abstract, shapes, shardings)
        return RunState(jax.tree.map(lead, learner), acting, jax.tree.map(lead, counter), replay_state)

    def acting(self, published: list[ActorParams], snapshots: list[ActorSnapshot]) -> LockstepState:
        """The acting side of a state: parameters, oldest first, and where each actor of this process goes on."""
        copies = [topology.spread(params, self._learning.state_sharding) for params in published]
        return LockstepState(tuple(copies), self._join(snapshots))

    def _join(self, snapshots: list[ActorSnapshot]) -> ActorSnapshot:
        """The snapshots of this process's actors as its part of those of all, [R, A, ...]."""
        shape = (self._layout.replicas_here, self._layout.threads)
        # Actors may be on devices of their own.
        snapshots = jax.device_put(snapshots, self._layout.actors[0])
        stacked = jax.tree.map(lambda *x: jnp.stack(x).reshape(*shape, *x[0].shape), *snapshots)
        return topology.to_global(stacked, self._by_process)

    def split(self, snapshots: ActorSnapshot) -> list[ActorSnapshot]:
        """The snapshots of this process's actors, from those of all, [R, A, ...]."""
        mine = jax.tree.map(lambda x: x.addressable_data(0), snapshots)
        threads = self._layout.threads
        return [jax.tree.map(lambda x: x[i // threads, i % threads], mine) for i in range(len(self._layout.actors))]  # noqa: B023


@jax.jit
def _with_member_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


@jax.jit
def without_member_axis(tree: Any) -> Any:
    """A learner's state of a run's, whose population is one."""
    return jax.tree.map(lambda x: x[0], tree)
