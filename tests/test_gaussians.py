"""Gaussians squashed by tanh: densities and entropies against integrals, standard deviations, actions in the box."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import distributions, spaces
from tests.test_distributions import KEY, draws

# A Gaussian squashed by tanh.


@pytest.mark.parametrize("std", [0.05, 0.3, 1.0, 3.0])
def test_the_density_of_a_tanh_gaussian_integrates_to_1(std: float) -> None:
    u = np.linspace(0.4 - 12 * std, 0.4 + 12 * std, 40_001)
    law = distributions.TanhGaussian(jnp.full((1, 1), 0.4), jnp.full((1, 1), np.log(std)))
    density = np.exp(np.asarray(law.log_prob(jnp.asarray(u, jnp.float32)[:, None]), np.float64))
    # Over actions a = tanh(u), and da = (1 - a^2) du.
    assert np.trapezoid(density / np.cosh(u) ** 2, u) == pytest.approx(1.0, abs=1e-3)


def test_the_density_of_a_tanh_gaussian_is_finite_far_out() -> None:
    def log_prob(mean: jax.Array, log_std: jax.Array, u: jax.Array) -> jax.Array:
        return jnp.sum(distributions.TanhGaussian(mean, log_std).log_prob(u))

    u = jnp.array([[20.0], [-20.0], [0.0]])
    value, grads = jax.jit(jax.value_and_grad(log_prob, argnums=(0, 1, 2)))(jnp.zeros((3, 1)), jnp.zeros((3, 1)), u)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(x)) for x in grads)
    # d log pi / du = -u + 2 tanh(u) for a standard normal u.
    np.testing.assert_allclose(grads[2], [[-18.0], [18.0], [0.0]], atol=1e-5)


def test_a_box_and_its_units() -> None:
    space = spaces.Box([[-1.0, 2.0], [0.0, 5.0]], [[1.0, 2.0], [4.0, 7.0]])
    units = distributions.unit_box(space)
    assert units.size == 4
    action = units.to_action(jnp.array([[1.0, 0.3, -0.5, 9.0]]))
    np.testing.assert_allclose(action, [[[1.0, 2.0], [1.0, 7.0]]])
    np.testing.assert_allclose(units.to_units(action), [[1.0, 0.0, -0.5, 1.0]])


def test_standard_deviations_are_squashed_between_bounds() -> None:
    log_std = distributions.bounded_log_std(jnp.array([-50.0, 0.0, 50.0]), 0.01, 1.0)
    np.testing.assert_allclose(np.exp(log_std), [0.01, 0.1, 1.0], rtol=1e-5)
    raw = distributions.raw_of_std(0.3, 0.01, 1.0)
    assert np.exp(distributions.bounded_log_std(jnp.float32(raw), 0.01, 1.0)) == pytest.approx(0.3, rel=1e-5)
    assert np.isfinite(distributions.raw_of_std(1.0, 0.01, 1.0))


# A policy that is squashed.


def outputs_of(mean: np.ndarray, std: np.ndarray) -> jax.Array:
    return jnp.asarray(np.concatenate([mean, np.log(std)], -1), jnp.float32)


def test_the_entropy_of_a_tanh_gaussian_is_the_integral() -> None:
    """By 200 nodes of Gauss and Legendre over 10 standard deviations, against 16 of Gauss and Hermite."""
    z, weights = np.polynomial.legendre.leggauss(200)
    z, weights = 10 * z, 10 * weights * np.exp(-0.5 * (10 * z) ** 2) / np.sqrt(2 * np.pi)
    mean, std = (x.ravel()[:, None] for x in np.meshgrid([-4.0, -1.0, 0.0, 0.3, 4.0], [0.05, 0.7, 0.87, 1.0, 2.0]))
    u = mean + std * z
    slope = 2 * (np.log(2) - u - np.logaddexp(0.0, -2 * u))
    expected = np.log(std[:, 0]) + 0.5 * np.log(2 * np.pi * np.e) + slope @ weights
    entropy = np.asarray(distributions.tanh_gaussian(spaces.Box(-3.0, 5.0, (1,))).entropy(outputs_of(mean, std)))
    narrow = std[:, 0] <= 1.0
    np.testing.assert_allclose(entropy[narrow], expected[narrow], atol=5e-5)
    np.testing.assert_allclose(entropy, expected, atol=4e-3)
    # No law on [-1, 1] has more than the uniform one.
    assert entropy.max() == pytest.approx(0.684, abs=1e-3)
    assert entropy.max() < np.log(2)


def test_ratios_need_no_slope() -> None:
    """The slope of tanh cancels in them; the entropy is a sum over elements."""
    rng = np.random.default_rng(4)
    squashed = distributions.tanh_gaussian(spaces.Box(-2.0, 2.0, (3,)))
    new, old = (rng.normal(size=(5, 3)) for _ in range(2))
    std, u = np.exp(rng.normal(size=(5, 3))), jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)
    laws = [distributions.TanhGaussian(jnp.asarray(x, jnp.float32), jnp.log(jnp.asarray(std))) for x in (new, old)]
    with_slope = laws[0].log_prob(u) - laws[1].log_prob(u)
    without = squashed.log_prob(outputs_of(new, std), u) - squashed.log_prob(outputs_of(old, std), u)
    np.testing.assert_allclose(without, with_slope, rtol=1e-4, atol=1e-5)
    parts = [squashed.entropy(outputs_of(new[:, i : i + 1], std[:, i : i + 1])) for i in range(3)]
    np.testing.assert_allclose(squashed.entropy(outputs_of(new, std)), sum(parts), rtol=1e-5, atol=1e-5)


def test_a_squashed_policy_is_finite_far_out() -> None:
    squashed = distributions.tanh_gaussian(spaces.Box(-1.0, 1.0, (1,)))

    def total(outputs: jax.Array, u: jax.Array) -> jax.Array:
        return jnp.sum(squashed.log_prob(outputs, u) + squashed.entropy(outputs))

    u, outputs = jnp.array([[20.0], [-20.0]]), jnp.array([[20.0, 1.0], [-20.0, -3.0]])
    value, grads = jax.value_and_grad(total, argnums=(0, 1))(outputs, u)
    assert np.isfinite(value)
    assert all(np.isfinite(x).all() for x in grads)


def test_squashed_actions_lie_in_the_box() -> None:
    """Half of them on each side of the greedy one, which is the median."""
    space = spaces.Box(2.0, 6.0, (2,))
    squashed = distributions.for_space(space, "tanh")
    outputs = outputs_of(np.array([0.5, -2.0]), np.array([2.0, 0.1]))
    actions = np.asarray(squashed.to_action(jnp.asarray(draws(squashed, np.asarray(outputs), 20_000))))
    assert actions.min() >= 2.0
    assert actions.max() <= 6.0
    greedy, extras = squashed.act(outputs[None], KEY, True)
    np.testing.assert_allclose(greedy[0], 4 + 2 * np.tanh([0.5, -2.0]), rtol=1e-5)
    np.testing.assert_allclose((actions < np.asarray(greedy)).mean(0), 0.5, atol=0.02)
    assert set(extras) == {"log_prob", "sample"}


@pytest.mark.parametrize("of_state", [False, True])
def test_outputs_of_0_are_the_first_standard_deviation(of_state: bool) -> None:
    std = distributions.Std(of_state, 0.694, 1e-3, 2.0)
    squashed = distributions.tanh_gaussian(spaces.Box(-1.0, 1.0, (1,)), std)
    assert squashed.state_independent_scale == (not of_state)
    outputs = jnp.array([[0.0, 0.0], [0.0, -50.0], [0.0, 50.0]])
    assert squashed.std is not None
    np.testing.assert_allclose(squashed.std(outputs), [0.694, 1e-3, 2.0], rtol=1e-4)


def test_a_standard_deviation_comes_back_from_its_limit() -> None:
    """Descent that would lead further out is stopped, and what leads back is not."""
    std = distributions.Std(False, 1.0, 0.1, 2.0)
    slope = jax.grad(lambda raw, sign: jnp.sum(sign * std.log(raw)))
    raw = jnp.log(jnp.array([0.05, 0.05, 1.0, 3.0, 3.0]))
    sign = jnp.array([1.0, -1.0, 1.0, 1.0, -1.0])
    np.testing.assert_allclose(slope(raw, sign), [0.0, -1.0, 1.0, 1.0, 0.0])
