"""Layers that networks are made of: dense, LSTM with resets, convolutions; each as fast on CPU as we know how."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import topology
from podracer.types import ArrayTree


def orthogonal(scale: float) -> Callable[..., jax.Array]:
    """An initialiser for [inputs, outputs] with orthonormal rows or columns, whichever are fewer, times `scale`.

    The orthogonal factor of a Gaussian matrix by Newton-Schulz iterations, X <- 1.5 X - 0.5 X X' X, which drive every
    singular value to 1. Products only: a QR decomposition takes longer to compile than the rest of the network, and
    XLA:CPU can deadlock on several of them at once when there are few cores.
    """

    def init(key: jax.Array, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
        x = jax.random.normal(key, (max(shape), min(shape)), dtype)
        x = lax.fori_loop(0, 40, lambda _, x: 1.5 * x - 0.5 * x @ (x.T @ x), x / jnp.linalg.norm(x))
        return scale * (x if shape[0] >= shape[1] else x.T)

    return init


class Dense(nn.Module):
    """A dense layer on the last axis; orthogonal weights times `scale`, or Glorot's uniform ones if None."""

    size: int
    scale: float | None = np.sqrt(2)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.glorot_uniform() if self.scale is None else orthogonal(self.scale)
        weights = self.param("kernel", init, (x.shape[-1], self.size))
        bias = self.param("bias", nn.initializers.zeros, (self.size,))
        product = _product_with_cpu_gradient if topology.on_cpu() else jnp.matmul
        y = product(x.reshape(-1, x.shape[-1]), weights)
        return y.reshape(*x.shape[:-1], self.size) + bias.reshape((1,) * (x.ndim - 1) + (self.size,))


# XLA:CPU has a fast kernel for x @ y but not for x.T @ y, which the gradient of the weights is: transposing the
# narrower operand for real, behind barriers that keep it from being folded back, makes that gradient 1.35 times faster
# on two cores.
@jax.custom_vjp
def _product_with_cpu_gradient(x: jax.Array, weights: jax.Array) -> jax.Array:
    return x @ weights


def _product_forward(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
    return x @ weights, (x, weights)


def _product_backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weights = residuals
    if x.shape[1] <= cotangent.shape[1]:
        gradient = lax.optimization_barrier(x.T) @ cotangent
    else:
        gradient = lax.optimization_barrier(lax.optimization_barrier(cotangent.T) @ x).T
    return cotangent @ weights.T, gradient


_product_with_cpu_gradient.defvjp(_product_forward, _product_backward)


class MLP(nn.Module):
    """Dense layers; weights as in `Dense`."""

    sizes: tuple[int, ...]
    activation: str
    scale: float | None = np.sqrt(2)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        activation = {"relu": nn.relu, "tanh": nn.tanh}[self.activation]
        for size in self.sizes:
            x = activation(Dense(size, self.scale)(x))
        return x


class LSTM(nn.Module):
    """An LSTM over [T, B, F] that restarts from zeros before every `first` row; input weights as in `Dense`."""

    size: int
    scale: float | None = 1.0

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array, state: ArrayTree) -> tuple[jax.Array, ArrayTree]:
        # The input projection does not depend on the recurrence: one large product before the scan.
        gates_x = Dense(4 * self.size, self.scale, name="input")(x)
        kernel = self.param("recurrent", orthogonal(1.0), (self.size, 4 * self.size))

        def step(carry: ArrayTree, now: tuple[jax.Array, jax.Array]) -> tuple[ArrayTree, jax.Array]:
            gates, reset = now
            h, c = jax.tree.map(lambda s: jnp.where(reset[:, None], 0.0, s), carry)
            i, f, g, o = jnp.split(gates + h @ kernel, 4, axis=-1)
            c = nn.sigmoid(f + 1.0) * c + nn.sigmoid(i) * jnp.tanh(g)
            h = nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        state, outputs = lax.scan(step, state, (gates_x, first))
        return outputs, state


# Convolutions


@dataclasses.dataclass(frozen=True)
class ConvNetSpec:
    """Layers as (features, kernel, stride), and the units of the dense layer behind them."""

    layers: tuple[tuple[int, int, int], ...]
    dense: int


CONVNETS = {
    "shallow": ConvNetSpec(((16, 8, 4), (32, 4, 2)), 256),
    "nature": ConvNetSpec(((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
}


class ConvNet(nn.Module):
    """Plain valid convolutions and a dense layer; images [N, H, W, C] to features [N, dense]."""

    layout: ConvNetSpec
    scale: float | None = np.sqrt(2)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features, kernel, stride in self.layout.layers:
            x = nn.relu(Conv(features, kernel, stride, glorot=self.scale is None)(x))
        return nn.relu(Dense(self.layout.dense, self.scale)(x.reshape(x.shape[0], -1)))


class ResNet(nn.Module):
    """IMPALA's deep network (figure 3, right): images [N, H, W, C] to features [N, 256]."""

    scale: float | None = np.sqrt(2)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (16, 32, 32):
            x = Conv(features, 3, 1, padding="SAME", glorot=self.scale is None)(x)
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                y = Conv(features, 3, 1, padding="SAME", glorot=self.scale is None)(nn.relu(x))
                x = x + Conv(features, 3, 1, padding="SAME", glorot=self.scale is None)(nn.relu(y))
        x = nn.relu(x)
        return nn.relu(Dense(256, self.scale)(x.reshape(x.shape[0], -1)))


class Conv(nn.Module):
    """A 2-D convolution of [N, H, W, C]; its gradient is by matrix products on CPU (see `_conv_with_cpu_gradient`)."""

    features: int
    kernel: int
    stride: int
    padding: str = "VALID"
    glorot: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.kernel, self.kernel, x.shape[-1], self.features)
        init = nn.initializers.glorot_uniform() if self.glorot else nn.initializers.lecun_normal()
        weights = self.param("kernel", init, shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        conv = _conv_with_cpu_gradient if topology.on_cpu() else _conv
        return conv(x, weights, self.stride, self.padding) + bias.reshape(1, 1, 1, -1)  # type: ignore[operator]


def _conv(x: jax.Array, weights: jax.Array, stride: int, padding: str) -> jax.Array:
    return lax.conv_general_dilated(x, weights, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _conv_by_shifts(x: jax.Array, weights: jax.Array, stride: int, padding: str) -> jax.Array:
    """The same convolution as a sum of matrix products, one for each block of `stride` pixels within the kernel."""
    kernel = weights.shape[0]
    if padding == "SAME":
        pads = lax.padtype_to_pads(x.shape[1:3], (kernel, kernel), (stride, stride), padding)
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    height, width = ((n - kernel) // stride + 1 for n in x.shape[1:3])
    blocks = -(-kernel // stride)
    rows, columns = (n + blocks - 1 for n in (height, width))

    def fit(x: jax.Array, axis: int, size: int) -> jax.Array:
        x = lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
        return jnp.pad(x, [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)])

    # Pixels of a block become channels, so that every shift is a slice without strides.
    x = fit(fit(x, 1, rows * stride), 2, columns * stride)
    n, channels = x.shape[0], x.shape[-1]
    x = x.reshape(n, rows, stride, columns, stride, channels).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(n, rows, columns, -1)
    weights = fit(fit(weights, 0, blocks * stride), 1, blocks * stride)
    weights = weights.reshape(blocks, stride, blocks, stride, channels, -1).transpose(0, 2, 1, 3, 4, 5)
    weights = weights.reshape(blocks, blocks, stride * stride * channels, -1)
    shifts = [(i, j) for i in range(blocks) for j in range(blocks)]
    return sum(x[:, i : i + height, j : j + width] @ weights[i, j] for i, j in shifts)  # type: ignore[return-value]


# XLA:CPU runs the gradient of a convolution inside a loop 8 to 20 times slower than outside, and Anakin is one loop
# (https://github.com/jax-ml/jax/issues/12868). The forward pass stays a convolution, which is the faster there.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv_with_cpu_gradient(x: jax.Array, weights: jax.Array, stride: int, padding: str) -> jax.Array:
    return _conv(x, weights, stride, padding)


def _conv_forward(x: jax.Array, weights: jax.Array, stride: int, padding: str) -> tuple[jax.Array, Any]:
    return _conv(x, weights, stride, padding), (x, weights)


def _conv_backward(stride: int, padding: str, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, vjp = jax.vjp(lambda x, w: _conv_by_shifts(x, w, stride, padding), *residuals)
    return vjp(cotangent)


_conv_with_cpu_gradient.defvjp(_conv_forward, _conv_backward)
