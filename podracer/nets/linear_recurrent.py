"""Cores whose recurrence is linear, so that all of its rows are one scan: minGRU and the LRU, in one or more layers."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podracer.nets.layers import Dense, LayerNorm, Weights, product
from podracer.topology import scans
from podracer.types import ArrayTree


class MinGRU(nn.Module):
    """minGRU over [T, B, F] (Feng et al. 2024, https://arxiv.org/abs/2410.01201) with resets; weights as in `Dense`.

    Gates see the row and not the state, so that what one layer keeps does not depend on what it keeps already: counting
    needs two. Layers from the second on add their input. Biases of the gates begin at -log(tau), tau uniform in [1,
    99], so that units forget over about tau rows; biases of 0 forget over two.
    """

    size: int
    scale: Weights = 1.0
    layers: int = 1

    def start(self, num_lanes: int) -> ArrayTree:
        """Returns h of all layers, zeros [num_lanes, layers, size]."""
        return jnp.zeros((num_lanes, self.layers, self.size))

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array, state: ArrayTree) -> tuple[jax.Array, ArrayTree]:
        after = []
        for layer in range(self.layers):
            rows = Dense(2 * self.size, self.scale, bias=_keep_long, name=f"input_{layer}")(x)
            z, candidate = jnp.split(rows, 2, axis=-1)
            # h_t = (1 - z_t) h_{t-1} + z_t g(c_t). Not in logarithms: gates are at most 1, and both are as exact.
            keep = jnp.where(first[..., None], 0.0, nn.sigmoid(-z))
            h = scans.linear_recurrence(keep, nn.sigmoid(z) * _positive(candidate), _begun(state[:, layer], first))
            after.append(h[-1])
            x = x + h if layer else h
        return x, jnp.stack(after, axis=1)


def _positive(x: jax.Array) -> jax.Array:
    """Computes g(x): x + 1/2 from 0 on, below it the logistic function (Feng et al. 2024, appendix B)."""
    return jnp.where(x >= 0.0, x + 0.5, nn.sigmoid(x))


def _keep_long(key: jax.Array, shape: tuple[int], dtype: Any = jnp.float32) -> jax.Array:
    """Biases [2 size] of z and c: those of z are -log(tau)."""
    tau = jax.random.uniform(key, (shape[0] // 2,), dtype, 1.0, 99.0)
    return jnp.concatenate([-jnp.log(tau), jnp.zeros_like(tau)])


def _begun(state: ArrayTree, first: jax.Array) -> ArrayTree:
    """The state [B, ...] before row 0, zeros where row 0 opens an episode; a gate of 0 alone would keep a NaN."""
    return jax.tree.map(lambda s: jnp.where(first[0, :, None], 0.0, s), state)


RADII = (0.9, 0.999)
"""Absolute values of the LRU's lambda at first: what is left of a bit after a row."""
PHASE = np.pi / 10
"""Largest phase of lambda at first."""


class LRU(nn.Module):
    """Linear recurrent units over [T, B, F] (Orvieto et al. 2023, https://arxiv.org/abs/2303.06349) with resets.

    Layers have residual connections and a gated output. Complex numbers are pairs of float32 (`scans.Numbers`).
    """

    size: int
    scale: Weights = 1.0
    layers: int = 1

    def start(self, num_lanes: int) -> ArrayTree:
        """Returns the units of all layers, a pair of zeros [num_lanes, layers, size]."""
        return tuple(jnp.zeros((num_lanes, self.layers, self.size)) for _ in range(2))

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array, state: ArrayTree) -> tuple[jax.Array, ArrayTree]:
        x = Dense(self.size, self.scale, name="input")(x)
        after = []
        for layer in range(self.layers):
            before = jax.tree.map(lambda s, layer=layer: s[:, layer], state)
            x, units = _LRULayer(self.size, self.scale, name=f"layer_{layer}")(x, first, before)
            after.append(units)
        return x, jax.tree.map(lambda *s: jnp.stack(s, axis=1), *after)


class _LRULayer(nn.Module):
    """A layer of D complex units: [T, B, D] and the units before row 0, a pair of [B, D], to the same after."""

    size: int
    scale: Weights

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array, state: ArrayTree) -> tuple[jax.Array, ArrayTree]:
        D = self.size
        v = LayerNorm(name="norm")(x)
        lambda_, strength = self.eigenvalues()
        # s_t = lambda s_{t-1} + e^gamma B v_t
        weights = self.param("B", nn.initializers.normal(np.sqrt(0.5 / D)), (D, 2 * D))
        entering = product(v, weights) * jnp.tile(strength, 2)[None, None]
        gate = jax.tree.map(lambda part: jnp.where(first[..., None], 0.0, part[None, None]), lambda_)
        units = scans.linear_recurrence(gate, tuple(jnp.split(entering, 2, axis=-1)), _begun(state, first))
        # q_t = gelu(Re(C s_t) + d v_t); the imaginary half of the weights has its sign in it.
        weights = self.param("C", nn.initializers.normal(np.sqrt(1.0 / D)), (2 * D, D))
        d = self.param("d", nn.initializers.normal(1.0), (D,))
        q = nn.gelu(product(jnp.concatenate(units, axis=-1), weights) + d[None, None] * v)
        # x_t + (W_1 q_t + b_1) sigmoid(W_2 q_t + b_2)
        value, gate_out = jnp.split(Dense(2 * D, self.scale, name="output")(q), 2, axis=-1)
        return x + value * nn.sigmoid(gate_out), jax.tree.map(lambda s: s[-1], units)

    def eigenvalues(self) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Computes lambda = exp(-e^nu + i e^theta), a pair of [D], and e^gamma [D]: the scale of the input."""
        squares = tuple(np.square(RADII))

        def ring(key: jax.Array) -> jax.Array:
            return jnp.log(-0.5 * jnp.log(jax.random.uniform(key, (self.size,), jnp.float32, *squares)))

        # On a ring in the complex plane; gamma makes units of all radii as large as their input (section 3.3).
        nu = self.param("nu", ring)
        radius = jnp.exp(-jnp.exp(nu))
        gamma = self.param("gamma", lambda _: 0.5 * jnp.log(1.0 - jnp.square(radius)))
        theta = self.param("theta", lambda k: jnp.log(PHASE * jax.random.uniform(k, (self.size,), minval=1e-6)))
        phase = jnp.exp(theta)
        return (radius * jnp.cos(phase), radius * jnp.sin(phase)), jnp.exp(gamma)
