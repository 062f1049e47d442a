"""Running moments: NumPy's, over shards, and for ever."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.learning import moments
from tests.support import harness

T, B = 6, 8


@pytest.mark.parametrize("num_shards", [1, 2])
def test_merged_moments_are_numpys(num_shards: int) -> None:
    """Over several merges of weighted samples far from 0, whatever the shards."""
    rng = np.random.default_rng(9)
    batches = [(100.0 + 3.0 * rng.normal(size=(T, B, 2)) + i, rng.random((T, B)) > 0.4) for i in range(4)]
    split = lambda x: jnp.stack(jnp.split(jnp.asarray(x, jnp.float32), num_shards, axis=1))  # noqa: E731
    merge = jax.jit(lambda m, x, w: harness.over_shards(moments.merge, m, x, w))
    seen = moments.initial((2,))
    for x, weight in batches:
        merged = merge(seen, split(x), split(weight))
        jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, leaf[:1].repeat(num_shards, 0)), merged)
        seen = jax.tree.map(lambda leaf: leaf[0], merged)
    kept = np.concatenate([x[weight] for x, weight in batches])
    np.testing.assert_allclose(seen.mean, kept.mean(0), rtol=1e-5)
    # Zero mean and unit variance, with a weight of 1e-4, were there before.
    prior = 1e-4 / len(kept) * (1 + 100.0**2)
    np.testing.assert_allclose(seen.variance, kept.var(0), rtol=1e-3, atol=1.5 * prior)
    np.testing.assert_allclose(seen.count, len(kept), rtol=1e-6)


def test_moments_without_samples_stay() -> None:
    seen = moments.Moments(jnp.asarray([3.0]), jnp.asarray([2.0]), jnp.float32(10.0))
    x, nothing = jnp.full((T, B, 1), 99.0), jnp.zeros((T, B))
    merged = harness.alone(moments.merge)(seen, x, nothing)
    harness.assert_same(merged, seen)


def test_moments_follow_after_ten_million_samples() -> None:
    """The count is capped, or float32 would stop adding at 2**24."""
    seen = moments.Moments(jnp.zeros(1), jnp.ones(1), jnp.float32(1e7))
    merged = harness.alone(moments.merge)(seen, jnp.ones((1000, 100, 1)), jnp.ones((1000, 100)))
    assert float(merged.count) == 1e7
    np.testing.assert_allclose(merged.mean, 1e5 / (1e7 + 1e5), rtol=1e-3)


def test_normalize() -> None:
    seen = moments.Moments(jnp.asarray([1.0, -2.0]), jnp.asarray([4.0, 0.25]), jnp.float32(5.0))
    x = jnp.asarray([[[3.0, -2.5]], [[-999.0, 999.0]]])
    np.testing.assert_allclose(moments.normalize(x, seen), [[[1.0, -1.0]], [[-10.0, 10.0]]], rtol=1e-5)
