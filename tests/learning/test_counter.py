"""Counters against Python's integers, beyond 2 to the 31."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.learning.counter import COUNTER_BASE, Counter


def integer(counter: Counter) -> int:
    return int(counter.high) * COUNTER_BASE + int(counter.low)


@jax.jit
def added(counter: Counter, n: jax.Array) -> Counter:
    return counter.add(n)


@pytest.mark.parametrize("start", [0, 2**20 - 1, 2**20, 2**31 - 5, 2**32 + 2**20 - 1, 2**50 + 7])
def test_counter_adds_like_an_integer(start: int) -> None:
    counter, count = Counter.of(start), start
    assert integer(counter) == count
    for n in (0, 1, 1, 2**20 - 2, 2**20, 12345, 2**31 - 2**20 - 1, 3):
        counter, count = added(counter, jnp.int32(n)), count + n
        assert integer(counter) == count
        assert 0 <= int(counter.low) < COUNTER_BASE
        assert (counter.high.dtype, counter.low.dtype) == (jnp.int32, jnp.int32)
        assert float(counter.to_float()) == pytest.approx(count, rel=1e-6)


def test_counter_passes_two_to_the_31() -> None:
    counter, count = Counter.of(2**31 - 10**6), 2**31 - 10**6
    for _ in range(20):
        counter, count = added(counter, jnp.int32(999_983)), count + 999_983
    assert integer(counter) == count > 2**31
    assert bool(Counter.of(2**31 - 1).less_than(counter))


def test_counter_less_than() -> None:
    numbers = [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 2**21, 2**31 - 1, 2**31, 2**31 + 2**20 - 1, 2**50]
    pairs = [(a, b) for a in numbers for b in numbers]
    stack = lambda side: jax.tree.map(lambda *x: jnp.stack(x), *(Counter.of(p[side]) for p in pairs))  # noqa: E731
    np.testing.assert_array_equal(stack(0).less_than(stack(1)), [a < b for a, b in pairs])
