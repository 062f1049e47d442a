"""Minibatches: permutations of every size, another for every key, and every unit as often in every place."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from podracer.learning.minibatches import FEW, minibatches, permutations, radices

KEY = jax.random.key(0)


@pytest.mark.parametrize("n", [8, 24])
def test_every_epoch_takes_every_unit_once(n: int) -> None:
    steps = np.asarray(minibatches(KEY, n, 3, 4))
    assert steps.shape == (12, n // 4)
    epochs = steps.reshape(3, n)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(n), (3, 1)))
    assert len(np.unique(epochs, axis=0)) == 3, "every epoch has an order of its own"


def test_minibatches_must_divide() -> None:
    with pytest.raises(ValueError, match="num_minibatches=5 does not divide the 24 units of a shard; change num_envs"):
        minibatches(KEY, 24, 1, 5)


SIZES = {
    "sorted": (1, 2, 3, 1000, 1021, 2**13 - 1, 10_006),  # few, primes, and a factor that is too small
    "shuffled": (1024, 1040, 1089, 1155, 2048, 4095, 21_000, 32 * 1021, 2**15, 2**16, 2**16 + 2**9, 81 * 4096),
    "sorted by JAX": (2**16 + 1, 2 * 32_771),
}


@pytest.mark.parametrize("n", [n for sizes in SIZES.values() for n in sizes])
def test_orders_of_all_sizes(n: int) -> None:
    orders = np.asarray(jax.jit(permutations, static_argnums=(1, 2))(KEY, 2, n))
    assert orders.dtype == np.int32
    np.testing.assert_array_equal(np.sort(orders), np.tile(np.arange(n, dtype=np.int32), (2, 1)))
    assert n <= 3 or np.mean(orders[0] == orders[1]) < 0.05
    assert n <= 3 or np.mean(orders[0] == np.arange(n)) < 0.05


@pytest.mark.parametrize(("kind", "has_sort"), [("sorted", True), ("shuffled", False), ("sorted by JAX", True)])
def test_nothing_large_is_sorted_that_need_not_be(kind: str, has_sort: bool) -> None:
    for n in SIZES[kind]:
        text = str(jax.make_jaxpr(lambda key, n=n: permutations(key, 2, n))(KEY))
        assert ("sort" in text) == has_sort, n


@pytest.mark.parametrize(
    ("n", "expected"), [(1, (1, 1)), (12, (3, 4)), (13, (1, 13)), (2**15, (128, 256)), (81, (9, 9))]
)
def test_radices(n: int, expected: tuple[int, int]) -> None:
    assert radices(n) == expected


def test_every_order_is_equally_likely() -> None:
    keys = jax.random.split(KEY, 12_000)
    orders = np.asarray(jax.jit(jax.vmap(lambda key: permutations(key, 1, 4)[0]))(keys))
    _, counts = np.unique(orders @ np.array([64, 16, 4, 1]), return_counts=True)
    assert len(counts) == 24
    assert ((counts - 500.0) ** 2 / 500.0).sum() < 57.1  # 23 degrees of freedom, exceeded with probability 1e-4


def excess(counts: np.ndarray) -> float:
    """Pearson's chi-square of counts that should all be equal, in deviations of its distribution from its mean."""
    freedom = counts.size - 1
    statistic = np.sum((counts - counts.mean()) ** 2 / counts.mean())
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("n", [FEW, *(pytest.param(n, marks=pytest.mark.slow) for n in (1155, 24 * 1021)), 16 * 67])
def test_shuffled_units_are_as_often_in_every_place(n: int) -> None:
    """Over many keys: the first unit, one within, and the last; pairs of neighbours, and what differs by a digit."""
    keys = 512 * 1024 // n
    orders = np.asarray(jax.jit(jax.vmap(lambda key: permutations(key, 4, n)))(jax.random.split(KEY, keys)))
    places = np.argsort(orders.reshape(-1, n), axis=1)
    for unit in (0, n // 3, n - 1):
        assert abs(excess(np.bincount(places[:, unit] * 16 // n, minlength=16))) < 5, unit
    thirds = places * 4 // n
    for step in (1, 2, radices(n)[1], n // 2):
        pairs = 4 * thirds[:, :-step] + thirds[:, step:]
        sample = pairs[:, :: max(1, n // 64)]
        assert abs(excess(np.bincount(sample.ravel(), minlength=16))) < 6, step


def test_every_unit_is_as_often_in_every_place() -> None:
    """All units and all places of one size, coarsely, and the differences of neighbours."""
    n, keys = 1024, 2000
    orders = np.asarray(jax.jit(lambda key: permutations(key, keys, n))(KEY))
    cells = np.zeros((32, 32))
    np.add.at(cells, (np.broadcast_to(np.arange(n) // 32, orders.shape), orders // 32), 1)
    assert abs(excess(cells)) < 5
    steps = np.diff(orders, axis=1) % n
    assert abs(excess(np.bincount(steps.ravel(), minlength=n)[1:])) < 5
