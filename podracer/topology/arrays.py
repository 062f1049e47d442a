"""Arrays across processes, and the host's own devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@functools.cache
def _replicate(sharding: NamedSharding) -> Any:
    # Cached, because a new function would be compiled at every call.
    return jax.jit(lambda tree: tree, out_shardings=sharding)


def here(tree: Any) -> Any:
    """Gathers whole arrays into this process's memory; all processes of a pod must call it together."""
    remote = [x for x in jax.tree.leaves(tree) if not x.is_fully_addressable]
    if not remote:
        return tree
    if not all(x.is_fully_replicated for x in remote):
        tree = _replicate(NamedSharding(remote[0].sharding.mesh, PartitionSpec()))(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def spread(tree: Any, where: NamedSharding) -> Any:
    """Puts arrays that are equal in every process onto a mesh."""
    return jax.tree.map(lambda x: jax.make_array_from_callback(np.shape(x), where, np.asarray(x).__getitem__), tree)


def to_global(tree: Any, where: NamedSharding) -> Any:
    """Puts arrays onto a mesh, of which every process has its own part."""

    def whole(x: Any) -> jax.Array:
        if is_key(x):
            return jax.random.wrap_key_data(whole(jax.random.key_data(x)))
        return jax.make_array_from_process_local_data(where, np.asarray(x))

    return jax.tree.map(whole, tree)


def is_key(x: Any) -> bool:
    """Returns True for an array of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def host_cpu(what: str) -> Any:
    """Returns the host's CPU as a device.

    Args:
      what: the user of the device, for the message.

    Raises:
      ValueError: if JAX_PLATFORMS excludes it.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        raise ValueError(
            f"{what} needs JAX's CPU backend beside the accelerator's: add it to JAX_PLATFORMS, as in "
            "JAX_PLATFORMS=cuda,cpu."
        ) from None


def host_cpus(what: str, mesh: Mesh) -> list[Any]:
    """Returns a CPU of every process with devices in a mesh, in the order of the mesh.

    Args:
      what: the user of the devices, for the message.
      mesh: the mesh.

    Raises:
      ValueError: if JAX_PLATFORMS excludes them.
    """
    processes = dict.fromkeys(device.process_index for device in mesh.devices.flat)
    if len(processes) == 1:
        return [host_cpu(what)]
    host_cpu(what)
    cpus = {device.process_index: device for device in reversed(jax.devices("cpu"))}
    return [cpus[process] for process in processes]
