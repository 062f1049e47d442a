"""Reductions over all shards of all devices, for `learn` under `DATA_AXES` (docs/glossary.md: shard)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer.topology.anakin_mesh import DATA_AXIS
from podracer.topology.backend import on_cpu, platform
from podracer.types import ArrayTree

DATA_AXES = (DATA_AXIS, "shard")
"""The axes that a learner reduces over: devices (a mesh axis) and logical shards within a device (a vmap axis)."""


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Puts a function of positional arguments under `DATA_AXES`, where its shard is the only one."""
    # Nothing is mapped: the axes only have their names, and no dims of size one.
    for axis in reversed(DATA_AXES):
        function = jax.vmap(function, in_axes=None, out_axes=None, axis_name=axis, axis_size=1)
    return function


def over_shards(function: Callable[..., tuple[ArrayTree, ArrayTree]], *by_shard: ArrayTree) -> tuple[ArrayTree, Any]:
    """Calls a function for each logical shard of a device, under the axis "shard".

    Args:
      function: `(*of a shard) -> (own, shared)`; `shared` is reduced over all shards.
      by_shard: its arguments, leading dim [shards].

    Returns:
      What belongs to the shards, leading dim [shards], and what they share.

    Raises:
      ValueError: where there are several shards, on one device or many, and `shared` is not reduced.
    """
    # What is shared has no axis of shards: out_axes=None refuses what was not reduced.
    mapped = jax.vmap(function, axis_name="shard", out_axes=(0, None))
    if jax.tree.leaves(by_shard)[0].shape[0] > 1 or platform() == "tpu":
        return _reduced(mapped, *by_shard)
    if lax.psum(1, DATA_AXIS) > 1:
        jax.eval_shape(
            functools.partial(_reduced, mapped), *by_shard
        )  # traced for its refusal alone: copies on other devices would drift apart
    # A vmap over one shard gives XLA arrays with a dim of one. On a GPU JAX then scatters rows into buffers, which
    # takes further launches, and on CPU PQN with convolutions takes 1.3 times as long (docs/adr/0048).
    one = jax.vmap(function, in_axes=None, out_axes=None, axis_name="shard", axis_size=1)
    own, shared = one(*jax.tree.map(lambda x: x[0], by_shard))
    return jax.tree.map(lambda x: x[None], own), shared


def _reduced(mapped: Callable[..., Any], *by_shard: ArrayTree) -> Any:
    """Calls a function under `vmap`, whose error for what was not reduced is of its own words."""
    try:
        return mapped(*by_shard)
    except ValueError as error:
        if "out_axes is None" not in str(error):
            raise
        raise ValueError(
            "learn returns parameters, numbers or metrics that differ between shards: sum the gradient and metrics "
            "over all of them, as podracer.learning.update.apply or podracer.topology.collectives.global_sum does."
        ) from error


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
