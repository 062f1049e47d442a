"""The leaves of a state by name, and checksums of them that do not depend on how devices share them."""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.topology import is_key
from podracer.types import ArrayTree


def named(tree: ArrayTree) -> list[tuple[str, Any]]:
    """Leaves with their paths, such as `learner.params.params.value.bias`; Orbax refuses empty ones, so not those."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in pairs if leaf.size]


def flatten(tree: ArrayTree) -> dict[str, jax.Array]:
    """Leaves by path, random keys as their data."""
    return {name: jax.random.key_data(x) if is_key(x) else x for name, x in named(tree)}


def unflatten(like: ArrayTree, leaves: dict[str, jax.Array]) -> ArrayTree:
    """The tree of leaves by path, with the structure of `like`."""
    names, values = (name for name, _ in named(like)), []
    for x in jax.tree.leaves(like):
        if not x.size:
            values.append(jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding))
        elif is_key(x):
            values.append(jax.random.wrap_key_data(leaves[next(names)]))
        else:
            values.append(leaves[next(names)])
    return jax.tree.unflatten(jax.tree.structure(like), values)


def checksum(x: jax.Array) -> int:
    """This process's part of an array's checksum, whose parts add up to it modulo 2^32.

    The sum of a CRC for each index of the leading dims, which are what shards divide: of a vector for a member, of a
    ring for each shard. The devices that hold the shards do not enter it.
    """
    total, whole = 0, _leading(x.shape)
    for shard in x.addressable_shards:
        if shard.replica_id:
            continue
        data = np.asarray(shard.data)
        starts = [part.indices(size)[0] for part, size in zip(shard.index, x.shape)]
        if any(data.shape[k] != x.shape[k] for k in range(len(whole), x.ndim)):
            raise NotImplementedError(f"an array {list(x.shape)} is divided behind its first {len(whole)} dims")
        for index in np.ndindex(data.shape[: len(whole)]):
            place = np.ravel_multi_index([i + start for i, start in zip(index, starts)], whole) if whole else 0
            total += crc(np.asarray(data[index]), int(place) + 1)
    return total % 2**32


def crc(data: np.ndarray, start: int = 0) -> int:
    """The CRC of an array's bytes, continued from `start`."""
    # Seen as bytes, not copied: a replay may fill most of the memory.
    return zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data, start)


def _leading(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dims that shards may divide: up to two, the second where it is small."""
    return shape[:2] if len(shape) > 2 or math.prod(shape) <= 4096 else shape[: len(shape) - 1]
