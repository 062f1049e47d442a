"""One trajectory for the learners, of the rollouts of all replicas."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer import trajectories
from podracer.topology import DATA_AXIS, HostTopology, data_mesh
from podracer.types import Trajectory


def by_lane() -> Trajectory:
    """Partition specs of a trajectory over devices, a prefix of its tree."""
    along: Any = lambda axis, _: PartitionSpec(*[None] * axis, DATA_AXIS)  # noqa: E731
    return trajectories.by_lane(along, _FIELDS)


class SpreadFn(Protocol):
    """Sends a rollout's trajectory to the learners."""

    def __call__(self, trajectory: Trajectory, replica: int = 0, /) -> Trajectory:
        """Sends it where it is learnt from, or replayed, without waiting.

        Args:
          trajectory: on the actor's device.
          replica: of this process.
        """
        ...


class Assembly:
    """Brings a rollout [T, B] of every replica together as one trajectory [T, R B], replica after replica.

    What crosses devices does so when a rollout is spread, in its actor's thread. Joining copies at most within a
    device, and no process waits for another.

    Args:
      layout: actors and learners.
      mesh: the devices [data] where a trajectory goes.
    """

    def __init__(self, layout: HostTopology, mesh: Mesh):
        self._layout, self._mesh = layout, mesh
        devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
        own, n = layout.replicas_here, len(devices)
        meshes = [data_mesh(devices[r * n // own :][: max(1, n // own)]) for r in range(own)]
        along: Any = _along
        self._parts = [trajectories.by_lane(functools.partial(along, m), _FIELDS) for m in meshes]
        self._on_a_device = max(1, own // n)

    def sharding(self, axis: int) -> NamedSharding:
        """The sharding of an array of a trajectory whose lanes are at `axis`."""
        return _along(self._mesh, axis)

    def spread(self, rollout: Trajectory, replica: int = 0) -> Trajectory:
        """Sends the rollout of a replica, by its number in this process, where its shards are, without waiting."""
        sharding: Any = self._parts[replica]
        devices = sharding.lane.device_set
        if len(devices) == 1 and rollout.lane.devices() == devices:
            return rollout  # it is there
        return jax.device_put(rollout, sharding)

    def join(self, rollouts: list[Trajectory]) -> Trajectory:
        """The trajectory, of rollouts that were spread, one of each of this process's replicas."""
        if self._layout.replicas == 1:
            return rollouts[0]
        n = self._on_a_device
        if n > 1:
            rollouts = [_joined(*rollouts[i : i + n]) for i in range(0, len(rollouts), n)]

        def whole(axis: int, *parts: jax.Array) -> jax.Array:
            shape = list(parts[0].shape)
            shape[axis] = sum(part.shape[axis] for part in parts) * self._layout.processes
            arrays = [shard.data for part in parts for shard in part.addressable_shards]
            return jax.make_array_from_single_device_arrays(tuple(shape), self.sharding(axis), arrays)

        return trajectories.by_lane(whole, *rollouts)


_FIELDS: Any = Trajectory(*Trajectory._fields)  # type: ignore[arg-type]


def _along(mesh: Mesh, axis: int, _: Any = None) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA_AXIS))


@jax.jit
def _joined(*rollouts: Trajectory) -> Trajectory:
    return trajectories.by_lane(lambda axis, *parts: jnp.concatenate(parts, axis), *rollouts)
