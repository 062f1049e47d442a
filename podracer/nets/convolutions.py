"""Convolutions, pooling, and the networks of Atari that are made of them; each as fast on CPU as we know how."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import topology
from podracer.nets.layers import Dense, LayerNorm, Weights, bias_initializer, initializer


@dataclasses.dataclass(frozen=True)
class ConvNetSpec:
    """Layers as (features, kernel, stride), and the units of the dense layer after them, 0 for none.

    The first `num_padded` layers, of stride 1, keep the size of images.
    """

    layers: tuple[tuple[int, int, int], ...]
    dense: int
    num_padded: int = 0

    @property
    def least_side(self) -> int:
        """Pixels of the smallest square image that leaves one pixel after the last layer."""
        side = 1
        for _, kernel, stride in reversed(self.layers[self.num_padded :]):
            side = (side - 1) * stride + kernel
        return side


CONVNETS = {
    "shallow": ConvNetSpec(((16, 8, 4), (32, 4, 2)), 256),
    "nature": ConvNetSpec(((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
    "nature_conv": ConvNetSpec(((32, 8, 4), (64, 4, 2), (64, 3, 1)), 0),
    "small": ConvNetSpec(((16, 3, 1), (32, 3, 1)), 128, num_padded=1),
    "minatar": ConvNetSpec(((16, 3, 1),), 128),
}


class ConvNet(nn.Module):
    """Plain convolutions and a dense layer, if any; images [N, H, W, C] to features [N, dense] of `dtype`.

    `norm` as in `MLP`: over the channels of each pixel. With `embedding`, a dense layer of so many units, the same for
    all pixels, comes first.
    """

    layout: ConvNetSpec
    scale: Weights = np.sqrt(2)
    dtype: Any = jnp.float32
    norm: bool = False
    embedding: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = lambda x: LayerNorm(self.dtype)(x) if self.norm else x  # noqa: E731
        if self.embedding:
            x = Dense(self.embedding, self.scale, self.dtype, name="embedding")(x)
        for i, (features, kernel, stride) in enumerate(self.layout.layers):
            padding = "SAME" if i < self.layout.num_padded else "VALID"
            x = nn.relu(norm(Conv(features, kernel, stride, padding, self.scale, self.dtype)(x)))
        x = x.reshape(x.shape[0], -1)
        return nn.relu(norm(Dense(self.layout.dense, self.scale, self.dtype)(x))) if self.layout.dense else x


class ResNet(nn.Module):
    """IMPALA's deep network (figure 3, right): images [N, H, W, C] to features [N, 256] of `dtype`.

    Its three sections have `depth` residual blocks each. `width` multiplies the channels (SEED RL, table 4). With
    `norm`, `LayerNorm` follows every layer.
    """

    width: int = 1
    depth: int = 2
    scale: Weights = np.sqrt(2)
    dtype: Any = jnp.float32
    norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = lambda x: LayerNorm(self.dtype)(x) if self.norm else x  # noqa: E731
        conv = lambda features, x: norm(Conv(features, 3, 1, "SAME", self.scale, self.dtype)(x))  # noqa: E731
        for features in (16 * self.width, 32 * self.width, 32 * self.width):
            x = max_pool(conv(features, x))
            for _ in range(self.depth):
                y = conv(features, nn.relu(x))
                x = x + conv(features, nn.relu(y))
        x = nn.relu(x)
        return nn.relu(norm(Dense(256, self.scale, self.dtype)(x.reshape(x.shape[0], -1))))


class Conv(nn.Module):
    """A 2-D convolution of [N, H, W, C], with ways of its own on CPU (`_conv_with_cpu_gradient`).

    Weights and `dtype` as in `Dense`; without `bias`, none is added.
    """

    features: int
    kernel: int
    stride: int
    padding: str = "VALID"
    scale: Weights = 1.0
    dtype: Any = jnp.float32
    bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.kernel, self.kernel, x.shape[-1], self.features)
        init = initializer(self.scale, nn.initializers.lecun_normal())
        weights = self.param("kernel", init, shape)
        x, weights = x.astype(self.dtype), weights.astype(self.dtype)
        conv = _conv_with_cpu_gradient if topology.on_cpu() else _conv
        y: jax.Array = conv(x, weights, self.stride, self.padding)
        if not self.bias:
            return y
        bias = self.param("bias", bias_initializer(self.scale, math.prod(shape[:3])), (self.features,))
        return y + bias.astype(self.dtype).reshape(1, 1, 1, -1)


def _conv(x: jax.Array, weights: jax.Array, stride: int, padding: str) -> jax.Array:
    return lax.conv_general_dilated(x, weights, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


FEW_CHANNELS = 12
"""Channels up to which a product with patches is faster than XLA:CPU's convolution without strides."""


# XLA:CPU runs the gradient of a convolution inside a loop 8 to 20 times slower than outside, and Anakin is one loop
# (https://github.com/jax-ml/jax/issues/12868). Forwards, its own convolution is the faster there, but for few channels.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv_with_cpu_gradient(x: jax.Array, weights: jax.Array, stride: int, padding: str) -> jax.Array:
    if stride > 1 or x.shape[-1] > FEW_CHANNELS:
        return _conv(x, weights, stride, padding)
    patches = _patches(x, weights.shape[0], padding)
    y = patches.reshape(-1, patches.shape[-1]) @ weights.reshape(-1, weights.shape[-1])
    return y.reshape(*patches.shape[:3], -1)


def _conv_forward(x: jax.Array, weights: jax.Array, stride: int, padding: str) -> tuple[jax.Array, Any]:
    return _conv_with_cpu_gradient(x, weights, stride, padding), (x, weights)


def _conv_backward(stride: int, padding: str, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weights = residuals
    if stride > 1:
        return _strided_backward(x, weights, stride, padding, cotangent)
    return _unit_stride_backward(x, weights, padding, cotangent)


def _unit_stride_backward(
    x: jax.Array, weights: jax.Array, padding: str, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Both gradients where the stride is 1: a product with patches, and a convolution.

    The transpose of such a convolution is a convolution of the cotangent with the kernel turned round.
    """
    kernel = weights.shape[0]
    patches = _patches(x, kernel, padding)
    of_weights = patches.reshape(-1, patches.shape[-1]).T @ cotangent.reshape(-1, cotangent.shape[-1])
    borders = [(kernel - 1 - low, kernel - 1 - high) for low, high in _borders(x, kernel, padding)]
    turned = weights[::-1, ::-1].swapaxes(2, 3)
    of_x = lax.conv_general_dilated(cotangent, turned, (1, 1), borders, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return of_x, of_weights.reshape(weights.shape)


def _patches(x: jax.Array, kernel: int, padding: str) -> jax.Array:
    """[N, H, W, C] to the kernel's pixels at each of its places, [N, rows, columns, kernel^2 C]."""
    x = jnp.pad(x, ((0, 0), *_borders(x, kernel, padding), (0, 0)))
    (n, height, width, channels), cells = x.shape, kernel * kernel
    rows, columns = height - kernel + 1, width - kernel + 1
    # Written part by part: a concatenation looks for each number's part, and took up to three times as long.
    patches = jnp.zeros((n, rows, columns, cells * channels), x.dtype)
    for cell in range(cells):
        i, j = divmod(cell, kernel)
        part = x[:, i : i + rows, j : j + columns]
        patches = lax.dynamic_update_slice(patches, part, (0, 0, 0, cell * channels))
    return patches


def _borders(x: jax.Array, kernel: int, padding: str) -> list[tuple[int, int]]:
    """Pixels around images [N, H, W, C] for a stride of 1: before and after, for height and width."""
    return list(lax.padtype_to_pads(x.shape[1:3], (kernel, kernel), (1, 1), padding))


def _strided_backward(
    x: jax.Array, weights: jax.Array, stride: int, padding: str, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Both gradients by one matrix product each.

    With pixels in blocks of `stride` x `stride`, whose pixels are channels, the kernel is k x k blocks and the
    convolution has no stride: block (r, c) adds to pixel (r - i, c - j) of the result by the kernel's block (i, j).
    So of the cotangent moved by each (i, j), side by side as channels, a product with the blocks is the gradient of the
    kernel, and one with the kernel is the gradient of the blocks. Two larger products took 0.55 to 0.9 of the time
    of 2 k^2 smaller ones on two cores.
    """
    kernel = weights.shape[0]
    blocks, to_image = jax.vjp(lambda x: _image_in_blocks(x, kernel, stride, padding), x)
    matrix, to_kernel = jax.vjp(lambda w: _kernel_in_blocks(w, stride), weights)
    k = -(-kernel // stride)
    shifts = [(i, j) for i in range(k) for j in range(k)]
    moved = [jnp.pad(cotangent, ((0, 0), (i, k - 1 - i), (j, k - 1 - j), (0, 0))) for i, j in shifts]
    moved = jnp.concatenate(moved, axis=-1).reshape(-1, matrix.shape[1])
    (gradient_of_x,) = to_image((moved @ matrix.T).reshape(blocks.shape))
    (gradient_of_weights,) = to_kernel(blocks.reshape(-1, blocks.shape[-1]).T @ moved)
    return gradient_of_x, gradient_of_weights


_conv_with_cpu_gradient.defvjp(_conv_forward, _conv_backward)


def _image_in_blocks(x: jax.Array, kernel: int, stride: int, padding: str) -> jax.Array:
    """[N, H, W, C] to [N, rows, columns, stride^2 C], of those blocks that a convolution uses."""
    if padding == "SAME":
        pads = lax.padtype_to_pads(x.shape[1:3], (kernel, kernel), (stride, stride), padding)
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    rows, columns = ((n - kernel) // stride + -(-kernel // stride) for n in x.shape[1:3])
    x = _fit(x, rows * stride, columns * stride, 1)
    n, channels = x.shape[0], x.shape[-1]
    x = x.reshape(n, rows, stride, columns, stride, channels).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(n, rows, columns, -1)


def _kernel_in_blocks(weights: jax.Array, stride: int) -> jax.Array:
    """[kernel, kernel, C, O] to [stride^2 C, k k O], with zeros where the kernel does not fill its k x k blocks."""
    k = -(-weights.shape[0] // stride)
    weights = _fit(weights, k * stride, k * stride, 0)
    weights = weights.reshape(k, stride, k, stride, *weights.shape[2:]).transpose(1, 3, 4, 0, 2, 5)
    return weights.reshape(math.prod(weights.shape[:3]), -1)


def _fit(x: jax.Array, height: int, width: int, start: int) -> jax.Array:
    """Cuts or pads `x` with zeros to `height` and `width` elements along the axes `start` and `start + 1`."""
    for axis, size in ((start, height), (start + 1, width)):
        x = lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
        x = jnp.pad(x, [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)])
    return x


# Pooling


def max_pool(x: jax.Array) -> jax.Array:
    """The largest of 3x3 pixels every 2 pixels, [N, H, W, C] to [N, ceil(H / 2), ceil(W / 2), C] ("SAME" padding).

    Values and gradients are those of `flax.linen.max_pool`: of equal pixels the first, row by row, has the gradient.
    XLA:GPU writes that gradient as a scatter, with atomic additions whose order no one knows; here it is a sum of
    shifted slices, which is deterministic, and six times faster on CPU. XLA:TPU has an operation for it that takes
    half as long as slices do there (docs/adr/0011).
    """
    if topology.platform() == "tpu":
        return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
    return _max_pool_by_slices(x)


def average_pool(x: jax.Array) -> jax.Array:
    """The sum of 3x3 pixels over 9, every 2 pixels, [N, H, W, C] to [N, ceil(H / 2), ceil(W / 2), C]; zeros around."""
    sums = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    return sums / 9.0


@jax.custom_vjp
def _max_pool_by_slices(x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.maximum, _pool_slices(x))


def _pool_slices(x: jax.Array) -> list[jax.Array]:
    """The nine pixels of every window, row by row, each [N, h, w, C]."""
    (top, left), (h, w) = _pool_geometry(x.shape)
    pads = ((0, 0), (top, 2 * h + 1 - top - x.shape[1]), (left, 2 * w + 1 - left - x.shape[2]), (0, 0))
    x = jnp.pad(x, pads, constant_values=-jnp.inf)
    return [x[:, i : i + 2 * h - 1 : 2, j : j + 2 * w - 1 : 2] for i in range(3) for j in range(3)]


def _pool_geometry(shape: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Padding before the first pixel, and the number of windows, along height and width."""
    return (shape[1] % 2, shape[2] % 2), (-(-shape[1] // 2), -(-shape[2] // 2))


def _pool_forward(x: jax.Array) -> tuple[jax.Array, Any]:
    slices = _pool_slices(x)
    largest, which = slices[0], jnp.zeros(slices[0].shape, jnp.int8)
    for k, pixels in enumerate(slices[1:], 1):
        which = jnp.where(pixels > largest, jnp.int8(k), which)
        largest = jnp.maximum(largest, pixels)
    return largest, (which, jnp.zeros((0, *x.shape[1:3]), x.dtype))


def _pool_backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array]:
    which, like = residuals
    (top, left), (h, w) = _pool_geometry(like.shape)
    part = lambda i, j: jnp.where(which == 3 * i + j, cotangent, jnp.zeros((), cotangent.dtype))  # noqa: E731

    def later(x: jax.Array, axis: int) -> jax.Array:
        """Shifts to the next window, whose first row or column is the third of this one."""
        pads = [(1, 0) if i == axis else (0, 0) for i in range(x.ndim)]
        return lax.slice_in_dim(jnp.pad(x, pads), 0, x.shape[axis], axis=axis)

    # By the parity of padded rows and columns: even ones are in two windows, odd ones in one.
    even_even = part(0, 0) + later(part(0, 2), 2) + later(part(2, 0) + later(part(2, 2), 2), 1)
    even_odd, odd_even = part(0, 1) + later(part(2, 1), 1), part(1, 0) + later(part(1, 2), 2)
    rows = [jnp.stack(pair, axis=3) for pair in ((even_even, even_odd), (odd_even, part(1, 1)))]
    x = jnp.stack(rows, axis=2).reshape(which.shape[0], 2 * h, 2 * w, -1)
    return (x[:, top : top + like.shape[1], left : left + like.shape[2]],)


_max_pool_by_slices.defvjp(_pool_forward, _pool_backward)
