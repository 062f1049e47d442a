"""Joint decisions of the processes of a run, round after round."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer.topology import DATA_AXIS


class Agreement:
    """Tells every process what all of them say, by way of the learner devices.

    The processes of a pod must launch the same programs in the same order, or they wait for each other for ever. So
    what one of them alone knows (a signal, a clock, what its actors did) decides what is launched next only after all
    have it from here (docs/adr/0024-replicas.md).

    Args:
      mesh: the learner devices [data] of all processes.
    """

    def __init__(self, mesh: Mesh):
        owners = [device.process_index for device in mesh.devices.flat]
        self._first = [owners.index(owner) for owner in dict.fromkeys(owners)]
        self._by_device = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, *own: float) -> np.ndarray:
        """Gathers the numbers of all P processes, [P, n], as float32. All must call it."""
        if len(self._first) == 1:
            return np.asarray([own], np.float64)
        values = np.asarray([own], np.float32)
        shape = (self._by_device.mesh.size, len(own))
        votes = jax.make_array_from_callback(shape, self._by_device, lambda index: values)
        return np.asarray(self._gather(votes))[self._first]
