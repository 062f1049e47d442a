"""Arrays across processes, and the host's own devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@functools.cache
def _spreader(where: NamedSharding) -> Any:
    # One function for each: a new one would be compiled at every call.
    return jax.jit(lambda tree: tree, out_shardings=where)


def here(tree: Any) -> Any:
    """Arrays, whole, as this process's own; the processes of a pod must all ask at once."""
    afar = [x for x in jax.tree.leaves(tree) if not x.is_fully_addressable]
    if not afar:
        return tree
    if not all(x.is_fully_replicated for x in afar):
        tree = _spreader(NamedSharding(afar[0].sharding.mesh, PartitionSpec()))(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def spread(tree: Any, where: NamedSharding) -> Any:
    """Arrays that every process has alike, as arrays of a mesh."""
    return jax.tree.map(lambda x: jax.make_array_from_callback(np.shape(x), where, np.asarray(x).__getitem__), tree)


def together(tree: Any, where: NamedSharding) -> Any:
    """Arrays of which every process has its part, as arrays of a mesh."""

    def whole(x: Any) -> jax.Array:
        if is_key(x):
            return jax.random.wrap_key_data(whole(jax.random.key_data(x)))
        return jax.make_array_from_process_local_data(where, np.asarray(x))

    return jax.tree.map(whole, tree)


def is_key(x: Any) -> bool:
    """Whether an array is of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def host_cpu(what: str) -> Any:
    """The host's CPU as a device.

    Args:
      what: needs it, for the message.

    Raises:
      ValueError: where JAX was told not to use it.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        raise ValueError(
            f"{what} needs JAX's CPU backend beside the accelerator's: add it to JAX_PLATFORMS, as in "
            "JAX_PLATFORMS=cuda,cpu."
        ) from None


def host_cpus(what: str, mesh: Mesh) -> list[Any]:
    """A CPU of every process that has devices of a mesh, in the order of the mesh.

    Args:
      what: needs them, for the message.
      mesh: the devices.

    Raises:
      ValueError: where JAX was told not to use them.
    """
    processes = dict.fromkeys(device.process_index for device in mesh.devices.flat)
    if len(processes) == 1:
        return [host_cpu(what)]
    host_cpu(what)
    cpus = {device.process_index: device for device in reversed(jax.devices("cpu"))}
    return [cpus[process] for process in processes]
