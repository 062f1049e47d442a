"""Residual convolutions of world models (Ye et al. 2021, EfficientZero, appendix A), with either norm."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from podracer.nets.convolutions import Conv, average_pool
from podracer.nets.layers import Dense, NormName, normalization


def conv3x3(channels: int, stride: int = 1) -> Conv:
    """Makes a convolution without bias, for a norm after it that has one."""
    return Conv(channels, 3, stride, "SAME", "he", bias=False)


class Encoder(nn.Module):
    """Images [N, H, W, C] to planes [N, h, w, `channels`].

    Images of at most 10x10 keep their size: in MinAtar every pixel counts, as on a board, for which Schrittwieser et
    al. 2020 have no strides either. Larger ones become planes of at most 6x6.

    Attributes:
      channels: of the planes.
      norm: of all layers.
      largest: the largest value of a pixel.
    """

    channels: int
    norm: NormName
    largest: float = 255.0

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.astype(jnp.float32) / self.largest
        small = max(x.shape[1:3]) <= 10
        stride = 1 if small else 2
        x = nn.relu(normalization(self.norm)(conv3x3(self.channels // 2, stride=stride)(x)))
        x = Block(self.channels // 2, self.norm)(x)
        x = Block(self.channels, self.norm, stride)(x)
        while max(x.shape[1:3]) > 6 and not small:
            x = average_pool(Block(self.channels, self.norm)(x))
        return Block(self.channels, self.norm)(x)


class Block(nn.Module):
    """Two convolutions beside a skip connection."""

    channels: int
    norm: NormName
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(normalization(self.norm)(conv3x3(self.channels, self.stride)(x)))
        y = normalization(self.norm)(conv3x3(self.channels)(y))
        resized = self.stride > 1 or x.shape[-1] != self.channels
        return nn.relu(y + (conv3x3(self.channels, self.stride)(x) if resized else x))


class Flatten(nn.Module):
    """Planes [N, h, w, C] to features [N, 16 h w] of a head."""

    norm: NormName

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.relu(normalization(self.norm)(Conv(16, 1, 1, scale="he")(x))).reshape(len(x), -1)


class Head(nn.Module):
    """Features [N, F] to one number per output, all 0 at first."""

    size: int
    hidden: int
    norm: NormName

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Dense(self.size, 0.0, name="last")(nn.relu(normalization(self.norm)(Dense(self.hidden)(x))))
