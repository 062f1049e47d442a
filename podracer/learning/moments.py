"""Running means and variances of what agents normalise, over all shards."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer.topology import collectives
from podracer.types import ArrayTree


class Moments(NamedTuple):
    """Running mean and variance, merged in parallel (Chan et al. 1979)."""

    mean: ArrayTree
    variance: ArrayTree
    count: jax.Array


def initial(shape: tuple[int, ...]) -> Moments:
    """Zero mean and unit variance, with next to no weight."""
    return Moments(jnp.zeros(shape), jnp.ones(shape), jnp.float32(1e-4))


def merge(moments: Moments, x: jax.Array, weight: jax.Array) -> Moments:
    """Adds [T, B, ...] samples of all shards with weights [T, B] to the running moments."""
    weight = weight.reshape(weight.shape + (1,) * (x.ndim - 2))
    mean, variance, count = collectives.global_moments(x, weight, axis=(0, 1))
    count = count.reshape(-1)[0]
    # A float32 count stops growing at 2**24. Capped below that, the moments become an exponential average over the
    # last ten million samples.
    total = moments.count + count
    delta = mean - moments.mean
    new_mean = moments.mean + delta * (count / total)
    spread = moments.variance * moments.count + variance * count + jnp.square(delta) * (moments.count * count / total)
    return Moments(new_mean, spread / total, jnp.minimum(total, 1e7))


def normalize(x: jax.Array, moments: Moments, *, min_std: float = 1e-4, largest: float | None = 10.0) -> jax.Array:
    """(x - mean) / sqrt(variance + min_std^2), clipped to [-largest, largest] unless that is None.

    The moments' shape is that of x's last dims.
    """
    shape = (1,) * (x.ndim - moments.mean.ndim) + moments.mean.shape
    scale = lax.rsqrt(moments.variance + min_std**2).reshape(shape)
    normalized = (x - moments.mean.reshape(shape)) * scale
    return normalized if largest is None else jnp.clip(normalized, -largest, largest)
