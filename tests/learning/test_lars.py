"""Clipped LARS against a loop, SGD and optax's LARS, and what begins at 0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer.learning import lars, optimizer

SHAPES = {"head": (3, 2), "kernel": (4, 3), "bias": (3,)}


def tree(seed: int, scale: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def made(**settings: Any) -> lars.ClippedLARS:
    return lars.ClippedLARS(**{"late": lambda params: [params["head"]], "start": 0} | settings)


def run(optimiser: lars.ClippedLARS, params: Any, steps: int, rate: float = 0.1, clip: float = 2.0) -> list[Any]:
    """Parameters and states behind each step of random gradients of many sizes."""
    step = jax.jit(optimiser.step)
    hyper = {"max_grad_norm": jnp.float32(clip)}
    state, found = optimiser.init(params, hyper), []
    for i in range(steps):
        grads = tree(100 + i, 10.0 ** (i % 5 - 3))
        params, state, _ = step(grads, state, params, learning_rate=jnp.float32(rate), hyper=hyper)
        found.append((params, state))
    return found


def test_it_is_the_loops() -> None:
    """Over 20 steps: the head grows from nearly nothing until ratios count, from step 4 on at the earliest."""
    begin = tree(0) | {"head": 1e-3 * tree(0)["head"]}
    found = run(made(start=4, eta=0.03, eta_vectors=0.05), begin, 20)
    w = {name: np.asarray(x, np.float64) for name, x in begin.items()}
    m, active, ratios = {name: np.zeros(shape) for name, shape in SHAPES.items()}, False, []
    for i in range(20):
        g = {name: np.asarray(x, np.float64) for name, x in tree(100 + i, 10.0 ** (i % 5 - 3)).items()}
        norm = np.sqrt(sum(np.sum(x**2) for x in g.values()))
        active = active or (i >= 4 and np.linalg.norm(w["head"]) >= 0.1)
        assert bool(found[i][1].active) == active
        for name in SHAPES:
            gradient, size = g[name] * min(1.0, 2.0 / norm), np.linalg.norm(w[name])
            eta = 0.05 if name == "bias" else 0.03
            ratio = min(eta * size / (np.linalg.norm(gradient) + 1e-4 * size), 1.0) if active else 1.0
            ratios.append(ratio)
            m[name] = 0.9 * m[name] + ratio * (gradient + 1e-4 * w[name])
            w[name] = w[name] - 0.1 * m[name]
            np.testing.assert_allclose(found[i][0][name], w[name], rtol=1e-4, atol=1e-6)
    assert active
    assert min(ratios) < 0.1
    assert ratios.count(1.0) > 20


@pytest.mark.slow
def test_with_a_large_eta_it_is_sgd_with_momentum() -> None:
    """Bit by bit, one operation at a time: compiled, some are fused."""
    begin = tree(0)
    with jax.disable_jit():
        found = run(made(eta=1e9, eta_vectors=1e9), begin, 6)[-1][0]
    sgd = optimizer.make("sgd", momentum=0.9)._replace(joins=False)
    hyper = {"learning_rate": jnp.float32(0.1), "max_grad_norm": jnp.float32(1e9)}
    params, state = begin, sgd.init(begin, hyper)
    for i in range(6):
        grads = tree(100 + i, 10.0 ** (i % 5 - 3))
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        clipped = jax.tree.map(lambda g, w: jnp.minimum(1.0, 2.0 / norm) * g + 1e-4 * w, grads, params)  # noqa: B023
        with jax.disable_jit():
            params, state, _ = sgd.step(clipped, state, params, learning_rate=jnp.float32(0.1), hyper=hyper)
    for name in SHAPES:
        np.testing.assert_array_equal(found[name], params[name])


def test_where_no_ratio_is_clipped_it_is_optaxs() -> None:
    begin = tree(0)
    eta = 1e-4
    found = run(made(eta=eta, eta_vectors=eta, decay=0.0), begin, 6, clip=1e9)
    theirs = optax.lars(0.1, weight_decay=0.0, trust_coefficient=eta, momentum=0.9)

    @jax.jit
    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = theirs.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = begin, theirs.init(begin)
    for i in range(6):
        grads = tree(100 + i, 10.0 ** (i % 5 - 3))
        with jax.numpy_dtype_promotion("standard"):
            params, state = step(grads, state, params)
        for name in SHAPES:
            np.testing.assert_allclose(found[i][0][name], params[name], rtol=1e-6, atol=1e-7)


def test_no_step_is_larger_than_weights_allow() -> None:
    before = tree(0)
    for params, _ in run(made(momentum=0.0), before, 8, rate=0.5, clip=1e9):
        for name in SHAPES:
            eta = 0.05 if name == "bias" else 0.03
            step = np.linalg.norm(params[name] - before[name])
            assert 0 < step <= 0.5 * eta * np.linalg.norm(before[name]) * (1 + 1e-5)
        before = params


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_zeros_are_no_trouble(scale: float) -> None:
    """Zeros are fine in weights and in gradients."""
    optimiser = made(late=lambda params: [params["kernel"]])
    params = tree(0) | {"bias": jnp.zeros(3)}
    grads = {name: scale * x for name, x in tree(1).items()} | {"kernel": jnp.zeros((4, 3))}
    hyper = {"max_grad_norm": jnp.float32(1.0)}
    for _ in range(3):
        state = optimiser.init(params, hyper)
        params, state, norm = optimiser.step(grads, state, params, learning_rate=jnp.float32(0.1), hyper=hyper)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((params, norm)))
        assert bool(state.active)
    assert np.any(params["bias"]) == bool(scale), "what begins at 0 is moved as by SGD"


def test_once_it_counts_it_counts() -> None:
    optimiser = made(start=2)
    found = run(optimiser, tree(0), 4)
    assert [bool(state.active) for _, state in found] == [False, False, True, True]
    params, state = found[-1]
    small = params | {"head": jnp.zeros((3, 2))}
    hyper = {"max_grad_norm": jnp.float32(1.0)}
    _, state, _ = optimiser.step(tree(9), state, small, learning_rate=jnp.float32(0.1), hyper=hyper)
    assert bool(state.active)
