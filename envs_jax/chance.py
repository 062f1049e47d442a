"""Bounded draws from random words: as many words for every draw, whatever they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["below", "choose", "digits", "ranks"]


def below(word: jax.Array, number: int | jax.Array) -> jax.Array:
    """A number of [0, `number`) from a random word, int32; its bias is below number / 2**24."""
    unit = (word >> 8).astype(jnp.float32) * np.float32(2**-24)
    return (unit * jnp.asarray(number, jnp.float32)).astype(jnp.int32)


def digits(word: jax.Array, *numbers: int | jax.Array) -> list[jax.Array]:
    """Independent numbers of [0, n) for each n of `numbers`, int32; their bias is below the product / 2**24."""
    unit, found = (word >> 8).astype(jnp.float32) * np.float32(2**-24), []
    for number in numbers:
        scaled = unit * jnp.asarray(number, jnp.float32)
        found.append(scaled.astype(jnp.int32))
        unit = scaled - jnp.floor(scaled)
    return found


def choose(word: jax.Array, allowed: jax.Array) -> jax.Array:
    """The index of one of the True elements of a bool [N], all equally likely, int32; N if there is none."""
    place = jnp.cumsum(allowed, dtype=jnp.int32)
    return jnp.sum(place <= below(word, place[-1]), dtype=jnp.int32)


def ranks(words: jax.Array) -> jax.Array:
    """The place of each of N words in ascending order, a random permutation, int32 [N]; equal ones keep their order."""
    index = np.arange(len(words))
    earlier = (words[None] < words[:, None]) | ((words[None] == words[:, None]) & (index[None] < index[:, None]))
    return jnp.sum(earlier, axis=1, dtype=jnp.int32)
