"""The affine map between a Box and [-1, 1]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces


class UnitBox(NamedTuple):
    """A bounded Box in units where each of its elements is in [-1, 1].

    Attributes:
      size: A, its elements.
      to_action: `(units [..., A]) -> action` within the Box; what is beyond [-1, 1] is clipped.
      to_units: `(action [..., *shape]) -> float32 [..., A]`.
    """

    size: int
    to_action: Callable[[jax.Array], jax.Array]
    to_units: Callable[[jax.Array], jax.Array]


def unit_box(space: spaces.Box) -> UnitBox:
    """Makes the affine map between a Box with finite bounds and [-1, 1] for each element.

    Raises:
      ValueError: for a Box of integers: rounding would give them unequal shares.
    """
    if not jnp.issubdtype(space.dtype, jnp.floating):
        raise ValueError(f"actions in {space} are whole numbers; a MultiDiscrete space has choices of them.")
    size = int(np.prod(space.shape))
    centre, half = _centre_and_half(space)
    least, most = (x if x.shape else x.item() for x in space.limits())

    def to_action(value: jax.Array) -> jax.Array:
        middle, scale = (_last_of(value.ndim, x) for x in (centre, half))
        action = middle + scale * jnp.clip(value, -1.0, 1.0)
        action = action.reshape(*value.shape[:-1], *space.shape).astype(space.dtype)
        # The product may round to a number beyond the bounds.
        lowest, highest = (_last_of(action.ndim, x) for x in (least, most))
        return jnp.clip(action, lowest, highest)

    def to_units(action: jax.Array) -> jax.Array:
        flat = action.reshape(*action.shape[: action.ndim - len(space.shape)], size).astype(jnp.float32)
        # An element whose bounds are equal is 0.
        width = np.maximum(half, np.finfo(np.float32).tiny)
        middle, scale = (_last_of(flat.ndim, x) for x in (centre, width if np.ndim(width) else float(width)))
        return jnp.clip((flat - middle) / scale, -1.0, 1.0)

    return UnitBox(size, to_action, to_units)


def _last_of(ndim: int, x: Any) -> Any:
    """Reshapes an array [...] to [1, ..., ...] of `ndim` dims; a number stays a number."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape) if isinstance(x, np.ndarray) else x


def _centre_and_half(space: spaces.Box) -> tuple[Any, Any]:
    """Returns the middle of a Box and half its width: numbers, or float32 [size] if its elements differ in bounds."""
    low, high = np.asarray(space.low), np.asarray(space.high)
    centre, half = (high + low) / 2, (high - low) / 2
    if not centre.shape:
        return centre.item(), half.item()
    return centre.ravel().astype(np.float32), half.ravel().astype(np.float32)
