"""SimbaV2 (Lee et al. 2025, arXiv 2502.15280): features and weights on the unit sphere.

    x  = unit(scaler(W unit([observation; 3])))
    x <- unit(x + a (f(x) - x)),   f(x) = unit(W_2 (relu(scaler(W_1 x)) + 1e-8)),   W_1 to 4 times the width
    head: scaler(W x), then a dense layer, plus a bias; no activation

The weights into each unit have norm 1. They begin so, and `project` restores that after every step of an optimiser.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer.nets.layers import orthogonal, product
from podracer.types import ArrayTree

SHIFT = 3.0
"""The element beside an observation, so that its norm is not lost."""

EXPANSION = 4
"""Units within a block, in widths."""


def unit(x: jax.Array, axis: int = -1) -> jax.Array:
    """`x` with norm 1 along an axis; 0 stays 0."""
    return x * lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=axis, keepdims=True), 1e-16))


def project(params: ArrayTree) -> ArrayTree:
    """Parameters whose kernels [..., inputs, outputs] have weights of norm 1 into each output; others as they are."""

    def of(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return unit(x, axis=-2) if path[-1].key == "kernel" else x

    return jax.tree.map_with_path(of, params)


class UnitDense(nn.Module):
    """A dense layer on the last axis without biases, with weights of norm 1 into each unit."""

    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = lambda key, shape: unit(orthogonal(1.0)(key, shape), axis=-2)  # noqa: E731
        return product(x, self.param("kernel", init, (x.shape[-1], self.size)))


class Scaler(nn.Module):
    """A vector to multiply by, at first `value` everywhere. Its parameter begins at `scale`, by which it learns."""

    value: float
    scale: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.constant(self.scale), x.shape[-1:])
        return x * (scale * (self.value / self.scale)).reshape((1,) * (x.ndim - 1) + (-1,))


class Torso(nn.Module):
    """Features [..., F] to [..., width], through `blocks` residual blocks."""

    width: int
    blocks: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        root = float(np.sqrt(2.0 / self.width))
        x = unit(jnp.concatenate([x, jnp.full((*x.shape[:-1], 1), SHIFT)], axis=-1))
        x = unit(Scaler(root, root)(UnitDense(self.width)(x)))
        for _ in range(self.blocks):
            hidden = Scaler(root / 2, root / 2)(UnitDense(EXPANSION * self.width)(x))
            f = unit(UnitDense(self.width)(nn.relu(hidden) + 1e-8))
            # A step towards f along the sphere (section 3.3).
            a = Scaler(1.0 / (self.blocks + 1), float(1.0 / np.sqrt(self.width)))
            x = unit(x + a(f - x))
        return x


class Head(nn.Module):
    """`size` numbers of features [..., width]."""

    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = UnitDense(x.shape[-1])(x)
        y = UnitDense(self.size)(Scaler(1.0, 1.0)(y))
        bias = self.param("bias", nn.initializers.zeros, (self.size,))
        return y + bias.reshape((1,) * (y.ndim - 1) + (-1,))
