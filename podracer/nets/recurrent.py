"""Recurrent cores, with resets: the LSTM (Hochreiter and Schmidhuber 1997) and the GRU (Cho et al. 2014)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

    def start(self, num_lanes: int) -> ArrayTree:
        """Returns (h, c), zeros [num_lanes, size] each."""
        return jnp.zeros((num_lanes, self.size)), jnp.zeros((num_lanes, self.size))

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

        return _over_rows(step, state, (gates_x, first))


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


class GRU(nn.Module):
    """A GRU over [T, B, F] (Cho et al. 2014, reset after the product) with resets; input weights as in `Dense`.

    Update gates begin with biases log(tau), tau uniform in [1, 99]: units forget over about tau rows (Tallec and
    Ollivier 2018), where a bias of 0 forgets over two.
    """

    size: int
    scale: Weights = 1.0

    def start(self, num_lanes: int) -> ArrayTree:
        """Returns h, zeros [num_lanes, size]."""
        return jnp.zeros((num_lanes, self.size))

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array, state: ArrayTree) -> tuple[jax.Array, ArrayTree]:
        D = self.size
        gates_x = Dense(3 * D, self.scale, bias=_keep_long, name="input")(x)  # r, z, n of all rows at once
        kernel = self.param("recurrent", _blocks, (D, 3 * D))
        bias = self.param("recurrent_bias", nn.initializers.zeros, (D,))

        def step(h: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            gates, reset = now
            h = jnp.where(reset[:, None], 0.0, h)
            r_x, z_x, n_x = jnp.split(gates, 3, axis=-1)
            r_h, z_h, n_h = jnp.split(h @ kernel, 3, axis=-1)
            z = nn.sigmoid(z_x + z_h)
            n = jnp.tanh(n_x + nn.sigmoid(r_x + r_h) * (n_h + bias[None]))
            h = (1.0 - z) * n + z * h
            return h, h

        return _over_rows(step, state, (gates_x, first))


def _keep_long(key: jax.Array, shape: tuple[int], dtype: Any = jnp.float32) -> jax.Array:
    """Biases [3 size] of r, z and n: those of z are log(tau)."""
    tau = jax.random.uniform(key, (shape[0] // 3,), dtype, 1.0, 99.0)
    return jnp.concatenate([jnp.zeros_like(tau), jnp.log(tau), jnp.zeros_like(tau)])


def _blocks(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Orthogonal square blocks side by side, [size, n size]."""
    D, keys = shape[0], jax.random.split(key, shape[1] // shape[0])
    return jnp.concatenate([orthogonal(1.0)(k, (D, D)) for k in keys], axis=1)


def _over_rows(step: Callable[..., Any], state: ArrayTree, rows: Any) -> tuple[jax.Array, ArrayTree]:
    """Scans `step(state, row) -> (state, output)` over rows [T, ...]: the outputs, and the state after the last."""
    if topology.platform() in ("cpu", "tpu"):
        return lax.scan(step, state, rows)[::-1]  # type: ignore[return-value]
    # On GPU a launch costs more than the arithmetic in it: 13 of 18 kernels of an LSTM's step only saved what its
    # gradient can compute again, and three steps at a time share what they read and write (docs/adr/0011).
    step = jax.checkpoint(step, prevent_cse=False)
    return lax.scan(step, state, rows, unroll=3)[::-1]  # type: ignore[return-value]
