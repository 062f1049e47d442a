"""Numbers as distributions over bins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.learning.bins import Bins
from podracer.returns import unrescale
from tests.support import harness

NUMBERS = np.float32([-99.9, -7.3, -1.0, -0.01, 0.0, 0.003, 0.5, 2.0, 31.0, 100.0])


@pytest.mark.parametrize("size", [3, 41, 601])
def test_a_number_is_its_two_nearest_bins(size):
    """The definition, bin by bin, in float64: h by its formula, then what lies between two neighbours."""
    bins = Bins(size, 100.0)
    weights = np.asarray(bins.two_hot(jnp.asarray(NUMBERS)))
    h = lambda x: np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x  # noqa: E731
    positions = np.linspace(-h(100.0), h(100.0), size)
    np.testing.assert_allclose(bins.positions, positions, rtol=1e-6, atol=1e-6)
    for number, row in zip(NUMBERS.astype(np.float64), weights):
        expected = np.zeros(size)
        below = min(int(np.searchsorted(positions, h(number), side="right")) - 1, size - 2)
        part = (h(number) - positions[below]) / (positions[below + 1] - positions[below])
        expected[below], expected[below + 1] = 1 - part, part
        np.testing.assert_allclose(row, expected, atol=2e-4 if size == 601 else 2e-5)
        assert np.count_nonzero(row) <= 2
        assert row.sum() == pytest.approx(1.0, abs=1e-4)


def test_what_is_said_of_a_number_is_read_back():
    bins = Bins(41, 100.0)
    logits = jnp.log(jnp.maximum(bins.two_hot(jnp.asarray(NUMBERS)), 1e-30))
    np.testing.assert_allclose(bins.expectation(logits), NUMBERS, rtol=2e-5, atol=2e-5)
    assert float(bins.expectation(jnp.zeros(41))) == 0.0, "a head of zeros says 0"


def test_numbers_are_not_rounded_as_products_are():
    """Searches choose by hundredths where values are 90."""
    bins, close = Bins(601, 100.0), jnp.float32([90.0, 90.01, -90.01, 0.3])
    logits = jnp.log(jnp.maximum(bins.two_hot(close), 1e-30))
    plain = harness.as_a_tpu_rounds(lambda logits: unrescale(jax.nn.softmax(logits) @ bins.positions))(logits)
    assert np.abs(plain - close).max() > 0.05, "the emulation rounds"
    np.testing.assert_allclose(harness.as_a_tpu_rounds(bins.expectation)(logits), close, atol=1e-3)


def test_beyond_the_largest_is_the_last_bin():
    bins = Bins(5, 10.0)
    np.testing.assert_array_equal(bins.two_hot(jnp.float32([1e6, -11.0])), np.eye(5)[[4, 0]])


def test_the_loss_is_least_at_the_number():
    """Its gradient is softmax minus weights, 0 where the two agree."""
    bins = Bins(41, 100.0)
    x = jnp.asarray(NUMBERS)
    logits = jax.random.normal(jax.random.key(0), (len(NUMBERS), 41))
    gradient = jax.grad(lambda logits: jnp.sum(bins.cross_entropy(logits, x)))(logits)
    np.testing.assert_allclose(gradient, jax.nn.softmax(logits) - bins.two_hot(x), atol=1e-5)
