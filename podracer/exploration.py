"""Acting on action values: epsilon-greedy choices, and the value of a choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def greedy(q: jax.Array) -> jax.Array:
    """The actions int32 [B] of largest value among q [B, A]."""
    return jnp.argmax(q, axis=-1).astype(jnp.int32)


def epsilon_greedy(q: jax.Array, epsilon: jax.Array | float, key: jax.Array) -> jax.Array:
    """The actions of largest value, or with probability epsilon any action.

    Args:
      q: [B, A]; action values.
      epsilon: [B], or one for all lanes.
      key: consumed.

    Returns:
      int32 [B].
    """
    B, A = q.shape
    chance, choice = jax.random.uniform(key, (2, B))
    any_action = jnp.minimum(jnp.floor(choice * A).astype(jnp.int32), A - 1)
    return jnp.where(chance < epsilon, any_action, greedy(q))


def value_of(q: jax.Array, action: jax.Array) -> jax.Array:
    """The values [...] of actions int32 [...] among q [..., A]."""
    # A comparison, not a gather: gathers of single elements are slow on CPU and TPU.
    actions = jnp.arange(q.shape[-1]).reshape((1,) * action.ndim + (-1,))
    return jnp.sum(jnp.where(action[..., None] == actions, q, 0.0), axis=-1)
