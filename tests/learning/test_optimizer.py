"""Optimisers over several steps against the oracles, clipping included."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer.learning import optimizer
from tests.support import oracles

STEPS = 6
RATES = [0.1, 0.08, 0.05, 0.05, 0.02, 0.01]


@pytest.fixture(params=["all joined", "one alone", "both alone"], autouse=True)
def joining(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing depends on which arrays are joined, though it takes arrays of 2 and 3 for large ones."""
    smallest = {"all joined": 4, "one alone": 3, "both alone": 1}[request.param]
    monkeypatch.setattr(optimizer, "_LARGE", smallest)
    parts, restore = optimizer.joined(tree(np.arange(5)))
    assert [part.size for part in parts] == {4: [5], 3: [2, 3], 1: [2, 3]}[smallest]
    jax.tree.map(np.testing.assert_array_equal, restore(parts), tree(np.arange(5)))


def gradients() -> list[np.ndarray]:
    """The gradients of one step each; the first is large enough for every clip below, the last is 0."""
    rng = np.random.default_rng(0)
    return [scale * rng.normal(size=5) for scale in (30.0, 1.0, 0.1, 3.0, 0.01, 0.0)]


def tree(x: np.ndarray) -> dict[str, Any]:
    """A vector of 5 as parameters of two shapes: clipping goes by the norm of all of them."""
    return {"a": jnp.asarray(x[:2], jnp.float32), "b": (jnp.asarray(x[2:], jnp.float32)[None],)}


def vector(params: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def numbers(rate: Any, clip: Any, eps: float) -> dict[str, jax.Array]:
    """Tunable numbers, as a learner has them."""
    named = {"learning_rate": rate, "max_grad_norm": clip, "optimizer_eps": eps, "weight_decay": 0.0}
    return {name: jnp.float32(x) for name, x in named.items()}


def stepped(
    made: optimizer.Optimizer, grads: Any, state: Any, params: Any, rate: Any, clip: Any, eps: float = 0.0
) -> tuple[Any, Any, jax.Array]:
    """A step of trees: new parameters, state, and norm."""
    packed, restore = made.pack(params)
    hyper = numbers(9.0, clip, eps)  # the rate of before the schedule
    moved, state, norm = made.step(made.pack(grads)[0], state, packed, learning_rate=jnp.float32(rate), hyper=hyper)
    return restore(moved), state, norm


def updates(
    made: optimizer.Optimizer, rates: list[float], max_norm: float, eps: float = 0.0
) -> tuple[list[np.ndarray], list[float]]:
    """The change of the parameters at each step, and the norms that the step reports."""

    @jax.jit
    def step(grads: Any, state: Any, params: Any, rate: jax.Array, clip: jax.Array) -> Any:
        return stepped(made, grads, state, params, rate, clip, eps)

    params, moves, norms = tree(np.zeros(5)), [], []
    state = made.init(params, numbers(0.0, 0.0, eps))
    for gradient, rate in zip(gradients(), rates, strict=True):
        zeros = jax.tree.map(jnp.zeros_like, params)
        moved, state, norm = step(tree(gradient), state, zeros, jnp.float32(rate), jnp.float32(max_norm))
        moves.append(vector(moved))
        norms.append(float(norm))
    return moves, norms


def optax_moves(transformation: optax.GradientTransformation, gradients: list[np.ndarray]) -> list[np.ndarray]:
    """The change of the parameters at each step. RAdam's sixth step is the first that divides by the second moment."""
    moves, state, update = [], transformation.init(jnp.zeros(5)), jax.jit(transformation.update)
    for gradient in gradients:
        with jax.numpy_dtype_promotion("standard"):
            move, state = update(jnp.asarray(gradient, jnp.float32), state)
        moves.append(np.asarray(move))
    return moves


@pytest.mark.parametrize("max_norm", [2.0, np.inf])
@pytest.mark.parametrize("name", ["rmsprop", "centred_rmsprop", "adam", "radam", "sgd"])
def test_optimizers_are_the_oracles(name: str, max_norm: float) -> None:
    made = optimizer.make(name, decay=0.9)  # type: ignore[arg-type]
    moves, norms = updates(made, RATES, max_norm, eps=0.01)
    clipped = (
        gradients() if max_norm == np.inf else [oracles.clip_by_global_norm([g], max_norm)[0] for g in gradients()]
    )
    expected = {
        "rmsprop": lambda: oracles.rmsprop_tf1(clipped, RATES, decay=0.9, epsilon=0.01),
        "centred_rmsprop": lambda: oracles.rmsprop_centred(clipped, RATES, decay=0.9, epsilon=0.01),
        "adam": lambda: oracles.adam(clipped, RATES, epsilon=0.01),
        "radam": lambda: optax_moves(optax.radam(lambda k: jnp.asarray(RATES)[k], eps=0.01), clipped),
        "sgd": lambda: [-rate * g for rate, g in zip(RATES, clipped, strict=True)],
    }[name]()
    np.testing.assert_allclose(moves, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(norms, [np.linalg.norm(g) for g in gradients()], rtol=1e-5)
    assert norms[0] > 2.0  # or nothing was clipped


@pytest.mark.parametrize("name", ["rmsprop", "sgd"])
def test_momentum(name: str) -> None:
    """At a constant learning rate, where it does not matter whether the rate is inside the momentum."""
    made = optimizer.make(name, decay=0.9, momentum=0.7)  # type: ignore[arg-type]
    moves, _ = updates(made, [0.1] * STEPS, np.inf, eps=0.1)
    if name == "rmsprop":
        expected = oracles.rmsprop_tf1(gradients(), 0.1, decay=0.9, epsilon=0.1, momentum=0.7)
    else:
        expected = [-0.1 * sum(0.7 ** (k - i) * gradients()[i] for i in range(k + 1)) for k in range(STEPS)]
    np.testing.assert_allclose(moves, expected, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_never_changes_is_divided_by_epsilon() -> None:
    """Its variance is 0, and not what rounding leaves of the difference of two large squares."""
    made = optimizer.make("centred_rmsprop", decay=0.95).build(numbers(-1.0, 1.0, 1e-6))

    @jax.jit
    def after(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = made.init(gradient)
        updates, _ = jax.lax.scan(lambda state, _: made.update(gradient, state)[::-1], state, length=1000)
        return made.update(gradient, updates)[0], gradient

    gradient = jnp.linspace(10.0, 300.0, 64)
    found, expected = after(gradient)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(np.abs(found / expected).max(), 1e3, rtol=1e-5)


def test_clipping_to_nothing() -> None:
    """A limit of 0 and a gradient of 0 give 0, not NaN."""
    moves, _ = updates(optimizer.make("rmsprop"), RATES, 0.0, eps=0.1)
    np.testing.assert_array_equal(moves, np.zeros((STEPS, 5)))


def test_l2_is_a_loss_like_others() -> None:
    """A step along the gradient of c |params|^2, clipped with the rest."""
    start, gradient = np.arange(1.0, 6.0), gradients()[0]
    params, made = tree(start), optimizer.make("sgd")._replace(l2_cost=0.1)
    for clip in (np.inf, 2.0):
        moved, _, norm = stepped(made, tree(gradient), made.init(params, numbers(0.5, clip, 0.0)), params, 0.5, clip)
        whole = gradient + 0.2 * start
        expected = start - 0.5 * whole * min(1.0, clip / np.linalg.norm(whole))
        np.testing.assert_allclose(vector(moved), expected, rtol=1e-5)
        np.testing.assert_allclose(norm, np.linalg.norm(whole), rtol=1e-6)


def test_the_learning_rate_is_differentiable() -> None:
    """A meta-gradient reaches it."""
    made = optimizer.make("adam")
    params = tree(np.zeros(5))
    state = made.init(params, numbers(0.0, 0.0, 0.0))

    def total(rate: jax.Array) -> jax.Array:
        return stepped(made, tree(gradients()[0]), state, params, rate, 1.0, 1e-3)[0]["a"][0]

    expected = oracles.adam(oracles.clip_by_global_norm([gradients()[0]], 1.0), 1.0, epsilon=1e-3)[0][0]
    np.testing.assert_allclose(jax.grad(total)(jnp.float32(0.3)), expected, rtol=1e-4)


@pytest.mark.parametrize(("name", "eps_root"), [("sgd", 0.0), ("adam", 1e-4)])
def test_a_gradient_of_zeros_has_a_derivative(name: Any, eps_root: float) -> None:
    """Through the clip by its norm, and with `eps_root` through the root of Adam's second moment."""
    made, params = optimizer.make(name, eps_root=eps_root), tree(np.zeros(5))
    state, direction = made.init(params, numbers(0.0, 0.0, 0.0)), tree(np.arange(1.0, 6.0))

    @jax.jit
    @jax.grad
    def derivative(scale: jax.Array) -> jax.Array:
        grads = jax.tree.map(lambda x: scale * x, direction)
        return jnp.sum(stepped(made, grads, state, params, 0.5, 2.0)[0]["a"])

    # Adam's first step is g / (sqrt(g^2 + eps_root) + eps), here without an eps.
    expected = -0.5 * (1.0 + 2.0) / (np.sqrt(eps_root) if eps_root else 1.0)
    np.testing.assert_allclose(derivative(jnp.float32(0)), expected, rtol=1e-4)


def test_eps_root_is_adams() -> None:
    with pytest.raises(ValueError, match=r"optimizer_eps_root=1e-12 is a number of optimizer='adam'; leave it out"):
        optimizer.make("rmsprop", eps_root=1e-12)


def test_b2_is_the_decay_of_squares() -> None:
    moves, _ = updates(optimizer.make("adam", b2=0.9), RATES, np.inf, eps=0.01)
    np.testing.assert_allclose(moves, oracles.adam(gradients(), RATES, b2=0.9, epsilon=0.01), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_stacked_networks_are_networks_one_by_one(name: str) -> None:
    """Also of biases, which stacked are matrices: they do not decay, and Muon leaves them to AdamW."""
    rng = np.random.default_rng(0)
    trees = [{x: jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32) for x, shape in SHAPES} for _ in range(2)]
    hyper = {name: jnp.float32(x) for name, x in {"optimizer_eps": 1e-3, "weight_decay": 0.5}.items()}
    hyper |= {"max_grad_norm": jnp.float32(np.inf), "learning_rate": jnp.float32(0.1)}

    def after(made: optimizer.Optimizer, params: Any, grads: Any) -> Any:
        return made.step(grads, made.init(params, hyper), params, learning_rate=None, hyper=hyper)[0]

    one, stacked = (optimizer.make(name, stacked=stacked) for stacked in (False, True))  # type: ignore[arg-type]
    expected = jax.jit(jax.vmap(lambda *x: after(one, *x)))(*trees)
    found = jax.jit(lambda *x: after(stacked, *x))(*trees)
    jax.tree.map(lambda *x: np.testing.assert_allclose(*x, rtol=1e-4, atol=1e-5), found, expected)


SHAPES = (("kernel", (3, 4)), ("bias", (4,)))
