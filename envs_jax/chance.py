"""Bounded draws from random words: as many words for every draw, whatever they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["below"]


def below(word: jax.Array, number: int | jax.Array) -> jax.Array:
    """A number of [0, `number`) from a random word, int32; its bias is below number / 2**24."""
    unit = (word >> 8).astype(jnp.float32) * np.float32(2**-24)
    return (unit * jnp.asarray(number, jnp.float32)).astype(jnp.int32)
