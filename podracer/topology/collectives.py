"""Reductions over all shards of all devices, for `learn` under `DATA_AXES` (docs/glossary.md: shard)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer.topology.anakin_mesh import DATA_AXIS
from podracer.topology.backend import on_cpu
from podracer.types import ArrayTree

DATA_AXES = (DATA_AXIS, "shard")
"""The axes that a learner reduces over: devices (a mesh axis) and logical shards within a device (a vmap axis)."""


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Puts a function of positional arguments under `DATA_AXES`, where its shard is the only one."""
    # Nothing is mapped: the axes only have their names, and no dims of size one.
    for axis in reversed(DATA_AXES):
        function = jax.vmap(function, in_axes=None, out_axes=None, axis_name=axis, axis_size=1)
    return function


def local_sums(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Sums each of some float32 arrays of one shape, on this shard alone.

    Off CPU it is one reduction for all, because each alone would take two kernel launches.
    """
    if on_cpu() or not arrays:
        return [jnp.sum(x) for x in arrays]
    return list(jnp.sum(jnp.stack(arrays).reshape(len(arrays), -1), axis=1))


def global_sum(tree: ArrayTree) -> ArrayTree:
    """Sums every leaf over all shards of all devices."""
    return lax.psum(tree, DATA_AXES)


def global_size(size: int) -> jax.Array:
    """Multiplies a size, such as a batch's, by the number of all shards; the devices do not meet for it, float32 []."""
    return jnp.float32(lax.psum(size, DATA_AXES))


def global_average(tree: ArrayTree) -> ArrayTree:
    """Averages every leaf over all shards of all devices."""
    return lax.pmean(tree, DATA_AXES)


def global_mean(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes the mean of `x` weighted by `weight` (same shape) over all shards; 0 if all weights are 0."""
    total, count = global_sum((jnp.sum(x * weight), jnp.sum(weight)))
    return total / jnp.maximum(count, 1e-8)


def global_max(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Computes the largest element over all shards, along an axis or of all."""
    return lax.pmax(jnp.max(x, axis), DATA_AXES)


def global_moments(x: jax.Array, weight: jax.Array, axis: Any = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the weighted mean, variance and total weight of `x` over `axis` and all shards.

    Args:
      x: float32 array.
      weight: float32 of the same rank as `x`, broadcastable to it.
      axis: the axes to reduce, all by default.
    """
    weight = jnp.broadcast_to(weight, x.shape)
    total, count = global_sum((jnp.sum(x * weight, axis), jnp.sum(weight, axis)))
    mean = total / jnp.maximum(count, 1e-8)
    centred = jnp.square(x - (mean if axis is None else jnp.expand_dims(mean, axis))) * weight
    variance = global_sum(jnp.sum(centred, axis)) / jnp.maximum(count, 1e-8)
    return mean, variance, count
