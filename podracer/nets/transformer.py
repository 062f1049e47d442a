"""GTrXL, a transformer as a memory (Parisotto et al. 2019, https://arxiv.org/abs/1910.06764), over a window of rows."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from podracer.nets.layers import Dense, LayerNorm, Weights, product
from podracer.types import ArrayTree

HEAD_SIZE = 32
"""Units of a head of attention; fewer units in all are one head."""


def num_heads(size: int) -> int:
    """Returns the number of heads of a layer of `size` units."""
    return max(1, size // HEAD_SIZE)


class GTrXL(nn.Module):
    """GTrXL over [T, B, F] with resets: each row attends to itself and to up to M rows before it in its episode.

    Gradients go through all rows of an unroll, and none into the window. Weights as in `Dense`.

    Attributes:
      size: D, units; divisible by `num_heads(D)`.
      scale: of the weights.
      layers: L.
      memory: M, rows before a row that each layer attends to. Through layers a row sees L M rows.
    """

    size: int
    scale: Weights = 1.0
    layers: int = 1
    memory: int = 32

    def start(self, num_lanes: int) -> ArrayTree:
        """Returns the window, zeros [num_lanes, L, M, D], and its count, int32 [num_lanes].

        The window has what entered each layer in the rows before, the oldest first, at its end; slots before the last
        `count` ones are zeros. A ring would be written at a place that differs by lane, which is a scatter.
        """
        return jnp.zeros((num_lanes, self.layers, self.memory, self.size)), jnp.zeros(num_lanes, jnp.int32)

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array, state: ArrayTree) -> tuple[jax.Array, ArrayTree]:
        window, count = state
        count = jnp.where(first[0], 0, count)
        T, M = x.shape[0], self.memory
        now = jnp.arange(T, dtype=jnp.int32)
        # The row in which the episode of row t began, [T, B]; negative where that is in the window.
        began = jnp.maximum(lax.cummax(jnp.where(first, now[:, None], -M - 1)), -count[None])
        # Row t sees row s where 0 <= t - s <= M and s >= began_t: [T, B, M + T], rows of the window first.
        s = jnp.arange(-M, T, dtype=jnp.int32)
        age = now[:, None] - s[None]
        seen = ((age >= 0) & (age <= M))[:, None] & (s[None, None] >= began[..., None])

        # Slots that hold nothing are zeros here and after, whatever is in them: acting and learning leave equal states.
        held = (jnp.arange(M, dtype=jnp.int32)[None] >= M - count[:, None])[:, None, :, None]
        window = lax.stop_gradient(jnp.where(held, window, 0.0))
        x = Dense(self.size, self.scale, name="input")(x)
        after = []
        for layer in range(self.layers):
            line = jnp.concatenate([jnp.moveaxis(window[:, layer], 1, 0), x])  # [M + T, B, D]
            after.append(line[T:])
            x = _GTrXLLayer(self.size, self.scale, M, name=f"layer_{layer}")(x, line, seen)
        kept = (s[T:][:, None] >= began[-1][None])[..., None]
        window = jnp.stack([jnp.moveaxis(jnp.where(kept, rows, 0.0), 0, 1) for rows in after], axis=1)
        return x, (window, jnp.minimum(T - began[-1], M))


class _GTrXLLayer(nn.Module):
    """A layer: rows [T, B, D] that attend to a line of rows [M + T, B, D], where seen [T, B, M + T]."""

    size: int
    scale: Weights
    memory: int

    @nn.compact
    def __call__(self, x: jax.Array, line: jax.Array, seen: jax.Array) -> jax.Array:
        dense = lambda name, size=self.size: Dense(size, self.scale, name=name)  # noqa: E731
        # o = gate(x, relu(W_o attention)), gate(o, relu(W_2 relu(W_1 LayerNorm(o)))): section 3.2, figure 1
        attended = self.attention(x, line, seen)
        x = Gate(name="attention_gate")(x, nn.relu(dense("attention_output")(attended)))
        hidden = nn.relu(dense("hidden")(LayerNorm(name="hidden_norm")(x)))
        return Gate(name="output_gate")(x, nn.relu(dense("output")(hidden)))

    def attention(self, x: jax.Array, line: jax.Array, seen: jax.Array) -> jax.Array:
        """Computes attention with relative positions (Dai et al. 2019, section 3.3), [T, B, D]."""
        D, H, M = self.size, num_heads(self.size), self.memory
        T, d = x.shape[0], D // H
        weights = lambda name, n: self.param(name, nn.initializers.lecun_normal(), (D, n * D))  # noqa: E731
        heads = lambda y: y.reshape(*y.shape[:-1], H, d)  # noqa: E731
        norm = LayerNorm(name="attention_norm")
        line = norm(line)
        queries = heads(product(line[M:], weights("query", 1)))
        keys, values = (heads(y) for y in jnp.split(product(line, weights("key_value", 2)), 2, axis=-1))
        of_age = heads(product(sinusoids(M, D), weights("position", 1)))  # ages M, M - 1, ..., 0
        # Vectors, because optimisers let matrices decay, and not biases.
        biases = (self.param(name, nn.initializers.zeros, (D,)) for name in ("key_bias", "position_bias"))
        u, w = (heads(bias[None, None]) for bias in biases)
        # score_{t,s} = ((q_t + u) k_s + (q_t + w) W_r R_{t-s}) / sqrt(d)
        scores = jnp.einsum("tbhd,sbhd->tbhs", queries + u, keys)
        by_age = jnp.einsum("tbhd,ahd->tbha", queries + w, of_age)
        scores = (scores + by_row(by_age, T)) / math.sqrt(d)
        scores = jnp.where(seen[:, :, None], scores, jnp.finfo(jnp.float32).min)
        attended = jnp.einsum("tbhs,sbhd->tbhd", nn.softmax(scores), values)
        return attended.reshape(*attended.shape[:2], D)


def sinusoids(M: int, size: int) -> jax.Array:
    """Computes R, [M + 1, D]: sines and cosines of the ages M, ..., 0, at geometric frequencies of base 10,000."""
    frequencies = jnp.float32(10_000.0) ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = jnp.arange(M, -1, -1, dtype=jnp.float32)[:, None] * frequencies[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)[:, :size]


def by_row(by_age: jax.Array, T: int) -> jax.Array:
    """Puts numbers of the ages M, ..., 0 of rows [T, ..., M + 1] where those rows are in the line, [T, ..., M + T].

    Row t of the line's rows -M to T - 1 begins with age M at place t: padded to M + 1 + T places and read on in pieces
    of M + T, each row is one place further to the right. Not a gather, whose gradient is a scatter.
    """
    width = by_age.shape[-1] + T
    padded = jnp.pad(jnp.moveaxis(by_age, 0, -2), [(0, 0)] * (by_age.ndim - 1) + [(0, T)])
    flat = padded.reshape(*padded.shape[:-2], T * width)[..., : T * (width - 1)]
    return jnp.moveaxis(flat.reshape(*padded.shape[:-2], T, width - 1), -2, 0)


class Gate(nn.Module):
    """GTrXL's gate, a GRU between a layer's input x and its output y, [T, B, D] (section 3.2): near x at first."""

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        D = x.shape[-1]
        weights = lambda name, n: self.param(name, nn.initializers.lecun_normal(), (D, n * D))  # noqa: E731
        r_y, z_y, h_y = jnp.split(product(y, weights("y", 3)), 3, axis=-1)
        r_x, z_x = jnp.split(product(x, weights("x", 2)), 2, axis=-1)
        bias = self.param("bias", nn.initializers.constant(-2.0), (D,))[None, None]
        z = nn.sigmoid(z_y + z_x + bias)
        h = jnp.tanh(h_y + product(nn.sigmoid(r_y + r_x) * x, weights("reset_x", 1)))
        return (1.0 - z) * x + z * h
