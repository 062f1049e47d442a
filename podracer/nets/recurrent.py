"""Recurrent layers, the memory of networks: the LSTM (Hochreiter and Schmidhuber 1997), with resets."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from podracer import topology
from podracer.nets.layers import Dense, Weights, orthogonal
from podracer.types import ArrayTree


class LSTM(nn.Module):
    """An LSTM over [T, B, F] that restarts from zeros before every `first` row; input weights as in `Dense`."""

    size: int
    scale: Weights = 1.0

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array, state: ArrayTree) -> tuple[jax.Array, ArrayTree]:
        # The input projection does not depend on the recurrence: one large product before the scan.
        gates_x = Dense(4 * self.size, self.scale, name="input")(x)
        kernel = self.param("recurrent", orthogonal(1.0), (self.size, 4 * self.size))

        def step(carry: ArrayTree, now: tuple[jax.Array, jax.Array]) -> tuple[ArrayTree, jax.Array]:
            gates, reset = now
            h, c = jax.tree.map(lambda s: jnp.where(reset[:, None], 0.0, s), carry)
            h, c = _after_gates(gates + h @ kernel, c)
            return (h, c), h

        if topology.platform() in ("cpu", "tpu"):
            return lax.scan(step, state, (gates_x, first))[::-1]  # type: ignore[return-value]
        # On GPU a launch costs more than the arithmetic in it: 13 of 18 kernels of a step only saved what its gradient
        # can compute again, and three steps at a time share what they read and write (docs/adr/0011).
        step = jax.checkpoint(step, prevent_cse=False)
        return lax.scan(step, state, (gates_x, first), unroll=3)[::-1]  # type: ignore[return-value]


class LSTMCell(nn.Module):
    """One step of an LSTM, without resets: x [N, F] and its state (h, c), [N, size] each, to the next state."""

    size: int

    @nn.compact
    def __call__(self, x: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, c = state
        kernel = self.param("recurrent", orthogonal(1.0), (self.size, 4 * self.size))
        return _after_gates(Dense(4 * self.size, 1.0, name="input")(x) + h @ kernel, c)


def _after_gates(gates: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes h and c from the gates [N, 4 size]; forget gates have a bias of 1."""
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = nn.sigmoid(f + 1.0) * c + nn.sigmoid(i) * jnp.tanh(g)
    return nn.sigmoid(o) * jnp.tanh(c), c
