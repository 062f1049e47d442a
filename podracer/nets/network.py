"""The contract of networks: plain functions `init`, `apply` and `start` of a policy and value, or of action values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracer.types import ArrayTree


class Inputs(NamedTuple):
    """The inputs of a network, [T, B, ...].

    Attributes:
      observation: tree of arrays.
      reward: float32; of the transition into the row.
      first: bool; recurrent state resets before these rows.
      previous_action: the action that led here (ignored on first rows), or () for feed-forward networks.
    """

    observation: ArrayTree
    reward: jax.Array
    first: jax.Array
    previous_action: ArrayTree


class NetworkError(ValueError):
    """A user's own network is not what an agent needs."""


class Network(NamedTuple):
    """An actor-critic network, or one of action values.

    Attributes:
      init: `(key) -> params`.
      apply: `(params, Inputs [T, B], state [B]) -> (policy outputs [T, B, P], values [T, B], state [B])`; of action
        values, the outputs are those and `values` the state's.
      start: `(num_lanes) -> state [num_lanes]`, the state at an episode's start; `()` makes it feed-forward.
    """

    init: Callable[[jax.Array], ArrayTree]
    apply: Callable[[ArrayTree, Inputs, ArrayTree], tuple[jax.Array, jax.Array, ArrayTree]]
    start: Callable[[int], ArrayTree]

    @property
    def recurrent(self) -> bool:
        """True if rows depend on earlier rows."""
        return bool(jax.tree.leaves(jax.eval_shape(lambda: self.start(1))))


def feed_forward(
    init: Callable[[jax.Array], ArrayTree], apply: Callable[[ArrayTree, ArrayTree], tuple[jax.Array, jax.Array]]
) -> Network:
    """A `Network` from a user's own `init(key) -> params` and `apply(params, observation [N, ...])`.

    `apply` returns policy outputs [N, P] (see `podracer.distributions` for what P must be) and values [N]. Those of 16
    bits become float32.
    """

    def unroll(params: ArrayTree, inputs: Inputs, state: ArrayTree) -> tuple[jax.Array, jax.Array, ArrayTree]:
        T, B = inputs.reward.shape
        flat = jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), inputs.observation)
        match apply(params, flat):
            case (jax.Array(ndim=2) as outputs, jax.Array() as values) if values.shape == (T * B,):
                # Sums over many actions, and ratios of probabilities, need more than 16 bits.
                widened = lambda x: x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x  # noqa: E731
                outputs, values = widened(outputs), widened(values)
                return outputs.reshape(T, B, -1), values.reshape(T, B), state
            case other:
                raise NetworkError(
                    f"the network returned {jax.tree.map(lambda x: getattr(x, 'shape', x), other)} for {T * B} "
                    f"observations; it must return outputs [{T * B}, P] and values [{T * B}]."
                )

    return Network(init, unroll, lambda num_lanes: ())
