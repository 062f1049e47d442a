"""Reductions over devices and shards: sums, means, extremes and moments, the same on all."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.topology import DATA_AXIS, collectives
from tests.support import harness


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray]:
    """Values and weights [data, shard, 4, 3]: far from 0, unequally weighted, some shards empty."""
    rng = np.random.default_rng(10)
    weight = rng.random((2, 3, 4, 3)) * (rng.random((2, 3, 4, 3)) > 0.4)
    weight[1, 2] = 0.0
    return 1000.0 + rng.normal(size=(2, 3, 4, 3)), weight


def everywhere(function: Any, *arrays: np.ndarray) -> Any:
    """`function` on every shard; asserts that all of them got the same."""
    results = harness.over_axes(function)(*(jnp.asarray(x, jnp.float32) for x in arrays))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, jnp.broadcast_to(x[:1, :1], x.shape)), results)
    return jax.tree.map(lambda x: np.asarray(x[0, 0]), results)


def test_global_sum_mean_and_max(samples: tuple[np.ndarray, np.ndarray]) -> None:
    x, weight = samples
    total = everywhere(lambda x: collectives.global_sum({"a": x, "b": (jnp.sum(x),)}), x)
    np.testing.assert_allclose(total["a"], x.sum(axis=(0, 1)), rtol=1e-6)
    np.testing.assert_allclose(total["b"][0], x.sum(), rtol=1e-6)
    np.testing.assert_allclose(
        everywhere(collectives.global_mean, x, weight), (x * weight).sum() / weight.sum(), rtol=1e-6
    )
    assert everywhere(collectives.global_mean, x, 0 * weight) == 0.0
    assert everywhere(collectives.global_max, -x) == np.float32((-x).max())
    assert everywhere(lambda x: collectives.global_size(len(x)), x) == x[..., 0].size, "4 on each of 2 x 3 shards"


def test_global_moments(samples: tuple[np.ndarray, np.ndarray]) -> None:
    x, weight = samples
    mean, variance, count = everywhere(collectives.global_moments, x, weight)
    expected = np.average(x, weights=weight)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(variance, np.average((x - expected) ** 2, weights=weight), rtol=1e-3)
    np.testing.assert_allclose(count, weight.sum(), rtol=1e-6)

    # Per column, with a weight of a row each.
    rows = weight[..., :1]
    mean, variance, count = everywhere(lambda x, w: collectives.global_moments(x, w, axis=0), x, rows)
    full = np.broadcast_to(rows, x.shape)
    expected = np.average(x, axis=(0, 1, 2), weights=full)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(variance, np.average((x - expected) ** 2, axis=(0, 1, 2), weights=full), rtol=1e-3)
    np.testing.assert_allclose(count, full.sum(axis=(0, 1, 2)), rtol=1e-6)


def on_devices(function: Any, x: jax.Array) -> Any:
    """`over_shards` of `x` [devices, shards, 3]."""
    return jax.vmap(lambda x: collectives.over_shards(function, x), axis_name=DATA_AXIS)(x)


@pytest.mark.parametrize(("devices", "shards"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_shards_keep_their_own_and_share_what_is_reduced(platform: str, devices: int, shards: int) -> None:
    x = jnp.arange(3.0 * devices * shards).reshape(devices, shards, 3)
    with mock.patch.object(collectives, "platform", return_value=platform):
        own, shared = on_devices(lambda x: (2 * x, collectives.global_sum(x)), x)
    np.testing.assert_array_equal(own, 2 * x)
    np.testing.assert_array_equal(shared, jnp.broadcast_to(x.sum((0, 1)), (devices, 3)))


@pytest.mark.parametrize(("devices", "shards"), [(2, 1), (1, 2), (2, 2)])
def test_what_shards_share_has_to_be_reduced(devices: int, shards: int) -> None:
    """Or the copies of a learner would drift apart."""
    with pytest.raises(ValueError, match="that differ between shards: sum the gradient and metrics"):
        on_devices(lambda x: (x, jnp.sum(x)), jnp.ones((devices, shards, 3)))
