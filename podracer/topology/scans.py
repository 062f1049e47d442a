"""Linear recurrences over rows, with a gradient of their own: sums of returns, and memories that are linear."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from podracer import topology

Numbers = Any
"""Real numbers, float32 [...], or complex ones as a pair of them, (real, imaginary): a complex associative scan
compiles for seven times as long (jax issue 18221)."""

Way = Literal["sequential", "unrolled", "associative"]
"""Rows one after the other; so, but in one piece; or by a tree of pairs, of depth log2(T) and three times the memory
traffic."""

LONG = 256
"""Rows from which on a GPU takes the tree, by the number of launches: unrolled rows are T / 16 of them from 65 rows on
(`topology.unroll`), and a tree is about 2 log2(T). Not yet timed on a GPU."""
SMALL = 400_000
"""Numbers of a row from which on a GPU waits for its memory, and the tree has no advantage. Not yet timed either."""


def choose(T: int, size: int) -> Way:
    """Chooses the way of a recurrence over T rows of so many numbers.

    On CPU rows go one after the other: at every size that `benchmarks/scans.py` measures (results/scans.json) the tree
    takes two to five times as long, with the gradient, and twice to six times as long to compile.
    """
    if topology.platform() == "gpu" and T >= LONG and size < SMALL:
        return "associative"
    return "sequential" if topology.on_cpu() else "unrolled"


def linear_recurrence(
    gate: Numbers, x: Numbers, start: Numbers, reverse: bool = False, way: Way | None = None
) -> Numbers:
    """Computes h_t = gate_t h_{t-1} + x_t over the leading axis; all of real or all of complex numbers (`Numbers`).

    The gradient is one more recurrence, in the other direction, of the same kind, so that it has a gradient too.
    There is no forward mode (`jax.jvp`).

    Args:
      gate: [T, ...].
      x: [T, ...].
      start: [...]; h before row 0, or after the last row if `reverse`.
      reverse: True computes h_t = gate_t h_{t+1} + x_t.
      way: of computing it; None chooses by platform and size.

    Returns:
      h [T, ...].
    """
    return _recurrence(gate, x, start, reverse, way)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _recurrence(gate: Numbers, x: Numbers, start: Numbers, reverse: bool, way: Way | None) -> Numbers:
    T, *shape = jax.tree.leaves(x)[0].shape
    way = way or choose(T, math.prod(shape))
    if way == "associative":
        return _associative(gate, x, start, reverse)

    def step(h: Numbers, row: tuple[Numbers, Numbers]) -> tuple[Numbers, Numbers]:
        h = _plus(row[1], _times(row[0], h))
        return h, h

    unroll = 1 if way == "sequential" else topology.unroll(T)
    return lax.scan(step, start, (gate, x), reverse=reverse, unroll=unroll)[1]


def _forward(gate: Numbers, x: Numbers, start: Numbers, reverse: bool, way: Way | None) -> tuple[Numbers, Any]:
    h = _recurrence(gate, x, start, reverse, way)
    return h, (gate, h, start)


def _backward(reverse: bool, way: Way | None, residuals: Any, cotangent: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """With g_t = dh_t + conj(gate_{t+1}) g_{t+1}: dx = g, dgate_t = conj(h_{t-1}) g_t and dstart = conj(gate_0) g_0."""
    gate, h, start = residuals
    nothing = jax.tree.map(jnp.zeros_like, start)
    g: Any = _recurrence(_conjugate(_shift(gate, nothing, not reverse)), cotangent, nothing, not reverse, way)
    first = -1 if reverse else 0
    gate_of_start, g_of_start = jax.tree.map(lambda x: x[first], (gate, g))
    return _times(_conjugate(_shift(h, start, reverse)), g), g, _times(_conjugate(gate_of_start), g_of_start)


_recurrence.defvjp(_forward, _backward)


def _associative(gate: Numbers, x: Numbers, start: Numbers, reverse: bool) -> Numbers:
    """The recurrence as a prefix sum of maps h -> gate h + x (Blelloch 1990), the first of which is given the start."""
    first = -1 if reverse else 0
    begun = _plus(jax.tree.map(lambda v: v[first], x), _times(jax.tree.map(lambda v: v[first], gate), start))

    def after(early: tuple[Numbers, Numbers], late: tuple[Numbers, Numbers]) -> tuple[Numbers, Numbers]:
        return _times(late[0], early[0]), _plus(late[1], _times(late[0], early[1]))

    x = jax.tree.map(lambda v, b: jnp.concatenate([v[:-1], b[None]] if reverse else [b[None], v[1:]]), x, begun)
    return lax.associative_scan(after, (gate, x), reverse=reverse)[1]


def _shift(numbers: Numbers, end: Numbers, earlier: bool) -> Numbers:
    """Moves rows to one earlier, or one later, with `end` in the row that is free then."""
    parts = (lambda x, e: [x[1:], e[None]]) if earlier else (lambda x, e: [e[None], x[:-1]])
    return jax.tree.map(lambda x, e: jnp.concatenate(parts(x, e)), numbers, end)


def _plus(a: Numbers, b: Numbers) -> Numbers:
    return jax.tree.map(jnp.add, a, b)


def _times(a: Numbers, b: Numbers) -> Numbers:
    if isinstance(a, tuple):
        return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]
    return a * b


def _conjugate(a: Numbers) -> Numbers:
    return (a[0], -a[1]) if isinstance(a, tuple) else a
