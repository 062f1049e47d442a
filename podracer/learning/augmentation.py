"""Images as they might have been seen as well: shifted by a few pixels, a little brighter or darker.

The transformations of Yarats et al. 2021 (DrQ) that EfficientZero's consistency is learnt with (Ye et al. 2021).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

PAD = 4
"""Pixels that an image is moved by at most."""

LEAST = 21
"""Rows or columns that an image has for each pixel that it is moved by: DrQ's 84 have 4. In one of 16x16, a pixel may
be all there is of a thing."""


class Changes(NamedTuple):
    """Random changes of B images.

    Attributes:
      shift: int32 [B, 2]; rows and columns to move by.
      gain: float32 [B]; factor of the pixels.
    """

    shift: jax.Array
    gain: jax.Array


def draw(key: jax.Array, num_images: int, size: tuple[int, ...]) -> Changes:
    """Random changes: any shift as likely as another, gains of 1 + 0.05 N(0, 1), the normal number cut at 2.

    Args:
      key: consumed.
      num_images: B.
      size: height and width of the images.
    """
    shift_key, gain_key = jax.random.split(key)
    reach = jnp.array([[min(PAD, n // LEAST) for n in size]], jnp.int32)
    shift = jax.random.randint(shift_key, (num_images, 2), 0, 2 * reach + 1) - reach
    return Changes(shift, 1.0 + 0.05 * jnp.clip(jax.random.normal(gain_key, (num_images,)), -2.0, 2.0))


def apply(changes: Changes, images: jax.Array) -> jax.Array:
    """Changed images, float32 [..., B, H, W, C] of any number: what moves in repeats the pixels at the edge."""
    H, W = images.shape[-3:-1]

    def change(shift: jax.Array, gain: jax.Array, image: jax.Array) -> jax.Array:
        rows, columns = (jnp.clip(jnp.arange(n) + s, 0, n - 1) for n, s in zip((H, W), shift))
        return gain * image.astype(jnp.float32)[..., rows, :, :][..., columns, :]

    return jax.vmap(change, in_axes=(0, 0, -4), out_axes=-4)(*changes, images)
