"""Values of actions as means and distributions: projections and losses against rlax, and by hand."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.learning import value_distributions
from tests.support import harness

B, A, K, V_MAX = 64, 3, 11, 2.0
Z = np.linspace(-V_MAX, V_MAX, K).astype(np.float32)
TAU = ((np.arange(K) + 0.5) / K).astype(np.float32)
KINDS = ("mean", "categorical", "quantile")
MAX_ERRORS = {"mean": 1.5, "squared": float("inf")}


def made(kind: Any) -> value_distributions.ValueDistribution:
    max_error = MAX_ERRORS.get(kind, 0.0)
    return value_distributions.make(
        "mean" if kind in MAX_ERRORS else kind, max_error=max_error, num_bins=K, max_value=V_MAX
    )


@functools.cache
def numbers(size: int) -> dict[str, Any]:
    """A network's outputs for all actions at row 0 and at row m, by theta and by theta-; R and G, ends among them."""
    rng = np.random.default_rng(size)
    normal = lambda: jnp.asarray(2.0 * rng.normal(size=(B, A, size)), jnp.float32)  # noqa: E731
    discount = np.where(rng.random(B) < 0.3, 0.0, 0.9).astype(np.float32)
    return {
        "now": normal(),
        "online": normal(),
        "target": normal(),
        "action": jnp.asarray(rng.integers(0, A, B), jnp.int32),
        "R": jnp.asarray(3.0 * rng.normal(size=B), jnp.float32),
        "G": jnp.asarray(discount),
    }


def ours(kind: str, now: jax.Array, double: bool) -> tuple[jax.Array, jax.Array]:
    """Losses and priorities [B], for a* the best action of theta (double) or of theta-."""
    values, x = made(kind), numbers(1 if kind in MAX_ERRORS else K)
    of = lambda outputs, action: outputs[np.arange(B), action]  # noqa: E731
    best = jnp.argmax(values.mean(x["online"] if double else x["target"]), axis=-1)
    return values.errors(of(now, x["action"]), of(x["target"], best), x["R"], x["G"])


def rlaxs(kind: str, now: jax.Array, double: bool) -> jax.Array:
    """The losses [B] by rlax, whose target stops no gradient that ours would pass."""
    import rlax  # here, because it pulls in distrax and tfp, whose warnings pytest filters only while a test runs

    x = numbers(1 if kind in MAX_ERRORS else K)
    selector = x["online"] if double else x["target"]
    if kind in MAX_ERRORS:
        now, target, selector = now[..., 0], x["target"][..., 0], selector[..., 0]
        error = jax.vmap(rlax.double_q_learning)(now, x["action"], x["R"], x["G"], target, selector)
        return rlax.l2_loss(error) if kind == "squared" else rlax.huber_loss(error, 1.5)
    if kind == "categorical":
        means = jnp.sum(jax.nn.softmax(selector) * Z, axis=-1)
        each = lambda q, a, r, g, t, s: rlax.categorical_double_q_learning(Z, q, a, r, g, Z, t, s)  # noqa: E731
        return jax.vmap(each)(now, x["action"], x["R"], x["G"], x["target"], means)
    each = lambda q, a, r, g, s, t: rlax.quantile_q_learning(q.T, TAU, a, r, g, s.T, t.T, 1.0)  # noqa: E731
    return jax.vmap(each)(now, x["action"], x["R"], x["G"], selector, x["target"])


@pytest.mark.filterwarnings("ignore:Rlax categorical_cross_entropy:PendingDeprecationWarning")
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "squared"])
def test_losses_and_their_gradients_are_rlaxs(kind: str, double: bool) -> None:
    def with_gradient(losses: Any) -> Any:
        def total(now: jax.Array) -> Any:
            each = losses(kind, now, double)
            each = each[0] if isinstance(each, tuple) else each
            return jnp.sum(each), each

        return jax.jit(jax.grad(total, has_aux=True))(numbers(1 if kind in MAX_ERRORS else K)["now"])

    gradient, losses = with_gradient(ours)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        their_gradient, theirs = with_gradient(rlaxs)
    np.testing.assert_allclose(losses, theirs, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, their_gradient, rtol=1e-4, atol=1e-6)
    assert np.count_nonzero(np.any(np.asarray(gradient) != 0, axis=-1)) == B, "the action taken, and no other"


def test_projections_are_distributions_with_the_right_mean() -> None:
    """Mass stays 1, and the mean is that of R + G z; beyond the ends all of it is on the last atom."""
    rng = np.random.default_rng(0)
    probs = jax.nn.softmax(jnp.asarray(rng.normal(size=(5, K)), jnp.float32))
    R = jnp.asarray([0.0, 0.13, 100.0, -2.5, 0.7], jnp.float32)
    G = jnp.asarray([1.0, 0.5, 0.9, 0.1, 0.0], jnp.float32)
    projected = np.asarray(jax.jit(value_distributions.project)(probs, Z, R, G))
    np.testing.assert_allclose(projected.sum(-1), 1.0, rtol=1e-6)
    assert (projected >= 0).all()
    np.testing.assert_allclose(projected[0], probs[0], atol=1e-6)
    np.testing.assert_allclose(projected[1] @ Z, 0.13 + 0.5 * (np.asarray(probs)[1] @ Z), rtol=1e-5)
    np.testing.assert_array_equal(projected[2:4], np.eye(K)[[K - 1, 0]])
    np.testing.assert_allclose(projected[4] @ Z, 0.7, rtol=1e-5)
    assert np.count_nonzero(projected[4]) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_priorities_are_what_the_papers_rank_by(kind: str) -> None:
    values, x = made(kind), numbers(1 if kind in MAX_ERRORS else K)
    predicted, bootstrap = x["now"][:, 0], x["target"][:, 0]
    loss, priority = (np.asarray(y) for y in jax.jit(values.errors)(predicted, bootstrap, x["R"], x["G"]))
    if kind == "mean":
        np.testing.assert_allclose(priority, abs(x["R"] + x["G"] * bootstrap[:, 0] - predicted[:, 0]), rtol=1e-6)
    elif kind == "quantile":
        np.testing.assert_array_equal(priority, loss)
    else:
        target = np.asarray(value_distributions.project(jax.nn.softmax(bootstrap), Z, x["R"], x["G"]), np.float64)
        says = np.asarray(jax.nn.log_softmax(predicted), np.float64)
        divergence = [sum(p * (np.log(p) - q) for p, q in zip(*row) if p > 0) for row in zip(target, says)]
        np.testing.assert_allclose(priority, divergence, rtol=1e-4, atol=1e-5)


def test_what_is_learnt_to_the_last_bit_surprises_no_more() -> None:
    """Priorities are 0 if the prediction is the target (for quantiles too, if they are all the same)."""
    R, G, still = jnp.zeros(1), jnp.ones(1), jnp.asarray([[0.3] * K], jnp.float32)
    for kind, same in (("mean", still[:, :1]), ("categorical", numbers(K)["now"][:1, 0]), ("quantile", still)):
        np.testing.assert_allclose(jax.jit(made(kind).errors)(same, same, R, G)[1], 0.0, atol=1e-5)


def test_values_are_not_rounded_as_products_are() -> None:
    values = value_distributions.make("categorical", max_error=0.0, num_bins=51, max_value=100.0)
    logits = 3.0 * jax.random.normal(jax.random.key(0), (9, 51))
    exact = jax.nn.softmax(np.asarray(logits, np.float64)) @ np.linspace(-100.0, 100.0, 51)
    np.testing.assert_allclose(harness.as_a_tpu_rounds(values.mean)(logits), exact, atol=1e-4)


def test_projections_of_cpus_and_accelerators_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """101 atoms: their sums are in other orders."""
    rng, z = np.random.default_rng(0), np.linspace(-9.0, 9.0, 101).astype(np.float32)
    probs = jax.nn.softmax(jnp.asarray(3.0 * rng.normal(size=(B, 101)), jnp.float32))
    R, G = (jnp.asarray(x, jnp.float32) for x in (4.0 * rng.normal(size=B), rng.random(B) < 0.9))
    found = []
    for on_cpu in (True, False):
        monkeypatch.setattr(value_distributions.topology, "on_cpu", lambda on_cpu=on_cpu: on_cpu)
        found.append(jax.jit(lambda *x: value_distributions.project(x[0], z, *x[1:]))(probs, R, 0.97 * G))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-6)
    np.testing.assert_allclose(jnp.sum(found[0], axis=1), 1.0, rtol=1e-4)


def test_the_function_of_least_mean() -> None:
    values = jnp.arange(12.0).reshape(2, 3, 2)
    means = jnp.asarray([[0.0, 5.0, 1.0], [1.0, 4.0, 1.0]])
    np.testing.assert_array_equal(value_distributions.least(values, means), [[0, 1], [8, 9], [4, 5]])
