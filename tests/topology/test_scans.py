"""Linear recurrences: every way against a loop in float64, values and gradients; long ones, and second derivatives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import topology
from podracer.topology import scans
from tests.support import tiers

WAYS = ("sequential", "unrolled", "associative")


def loop(gate: np.ndarray, x: np.ndarray, start: np.ndarray, reverse: bool) -> np.ndarray:
    """The definition, in the precision of its arguments."""
    h, found = start, np.zeros_like(x)
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        h = found[t] = gate[t] * h + x[t]
    return found


def gradients(gate: np.ndarray, x: np.ndarray, start: np.ndarray, dh: np.ndarray, reverse: bool) -> list[np.ndarray]:
    """The gradient of sum Re(conj(dh) h) by hand: what each h adds to those after it, backwards through the loop."""
    h = loop(gate, x, start, reverse)
    rows = list(range(len(x)))[::-1] if reverse else list(range(len(x)))
    g, dgate, dx = np.zeros_like(start), np.zeros_like(x), np.zeros_like(x)
    for i in reversed(range(len(rows))):
        t = rows[i]
        g = dx[t] = g + dh[t]
        before = h[rows[i - 1]] if i else start
        dgate[t], g = np.conj(before) * g, np.conj(gate[t]) * g
    return [dgate, dx, g]


def example(T: int, pairs: bool, seed: int = 0) -> list[np.ndarray]:
    """Gates, inputs, a start and cotangents; gates of 0 and of 1 are among them."""
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> np.ndarray:
        real = rng.normal(size=shape)
        return real + 1j * rng.normal(size=shape) if pairs else real

    gate = rng.random((T, 3)) * (np.exp(1j * rng.random((T, 3))) if pairs else 1.0)
    gate[rng.random((T, 3)) < 0.2], gate[rng.random((T, 3)) < 0.2] = 0.0, 1.0
    return [gate, numbers(T, 3), numbers(3), numbers(T, 3)]


def ours(x: np.ndarray) -> Any:
    if np.iscomplexobj(x):
        return jnp.asarray(x.real, jnp.float32), jnp.asarray(x.imag, jnp.float32)
    return jnp.asarray(x, jnp.float32)


def theirs(x: Any) -> np.ndarray:
    return np.asarray(x[0], float) + 1j * np.asarray(x[1]) if isinstance(x, tuple) else np.asarray(x)


@functools.partial(jax.jit, static_argnums=(4, 5))
def both(gate: Any, x: Any, start: Any, dh: Any, reverse: bool, way: Any) -> Any:
    h, backwards = jax.vjp(lambda *a: scans.linear_recurrence(*a, reverse, way), gate, x, start)
    return h, backwards(dh)


CASES = [
    (T, pairs, reverse, way)
    for T in (1, 2, 3, 17, 64, 100)
    for pairs in (False, True)
    for reverse in (False, True)
    for way in WAYS
]
QUICK = [
    (17, True, False, "associative"),
    (17, False, True, "sequential"),
    (3, True, True, "unrolled"),
    (1, False, False, "associative"),
]
SLOW = [(T, pairs, True, way) for T, pairs in ((2, True), (17, True), (64, False), (100, True)) for way in WAYS]


@pytest.mark.parametrize(
    ("T", "pairs", "reverse", "way"),
    [*QUICK, *tiers.slow(*SLOW), *tiers.nightly(*(case for case in CASES if case not in QUICK + SLOW))],
)
def test_every_way_is_the_loop(T: int, pairs: bool, reverse: bool, way: scans.Way) -> None:
    numbers = example(T, pairs)
    with topology.compiling_for("gpu") if way == "unrolled" else topology.compiling_for("cpu"):
        h, grads = both(*map(ours, numbers), reverse, way)
    np.testing.assert_allclose(theirs(h), loop(*numbers[:3], reverse), rtol=1e-5, atol=1e-5)
    for found, expected in zip(grads, gradients(*numbers, reverse), strict=True):
        np.testing.assert_allclose(theirs(found), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["sequential", "associative"])
def test_long_memories_are_exact(way: scans.Way) -> None:
    """4,096 rows at a gate of 0.9999, which keeps two thirds of the first row."""
    gate = np.full((4096, 1), 0.9999)
    x = np.random.default_rng(1).random((4096, 1))
    h = jax.jit(lambda *a: scans.linear_recurrence(*a, False, way))(ours(gate), ours(x), jnp.ones(1))
    np.testing.assert_allclose(h, loop(np.float64(np.float32(gate)), x, np.ones(1), False), rtol=1e-4)


def test_a_gradient_has_a_gradient() -> None:
    """In reverse mode, as gradients through an update need: those of plain differentiation of a scan."""
    gate, x, start, dh = map(ours, example(5, False))

    def plain(gate: Any, x: Any, start: Any) -> Any:
        step = lambda h, row: (row[0] * h + row[1],) * 2  # noqa: E731
        return jax.lax.scan(step, start, (gate, x))[1]

    def second(recurrence: Any) -> Any:
        inner = lambda *a: jnp.sum(dh * jnp.sin(recurrence(*a)))  # noqa: E731
        outer = lambda *a: sum(jnp.sum(jnp.cos(g)) for g in jax.grad(inner, (0, 1, 2))(*a))  # noqa: E731
        return jax.jit(lambda *a: jax.grad(outer, (0, 1, 2))(*a))(gate, x, start)

    for found, expected in zip(second(scans.linear_recurrence), second(plain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_way_is_the_platforms() -> None:
    with topology.compiling_for("gpu"):
        assert [scans.choose(T, 1000) for T in (16, 255, 256)] == ["unrolled", "unrolled", "associative"]
        assert scans.choose(256, 10**6) == "unrolled"
    with topology.compiling_for("tpu"):
        assert scans.choose(512, 64) == "unrolled"
    with topology.compiling_for("cpu"):
        assert scans.choose(512, 64) == "sequential"
