"""Layers as accelerators have them: pooling without a scatter, the same LSTM in fewer kernels, torsos in bfloat16."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from podracer import topology
from podracer.agents.registry import make_agent
from podracer.nets import convolutions, layers, recurrent
from podracer.types import TimeStep
from tests.support import harness

KEY = jax.random.key(0)


def flax_max_pool(x: jax.Array) -> jax.Array:
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")


@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 1, 2),
        *(
            pytest.param(shape, marks=pytest.mark.slow)
            for shape in ((2, 21, 42, 2), (2, 84, 84, 3), (1, 11, 7, 1), (1, 1, 3, 1))
        ),
    ],
)
@pytest.mark.parametrize("values", ["distinct", "ties", "constant", "below zero"])
def test_pooling_and_its_gradient_are_flaxs(shape: tuple[int, ...], values: str) -> None:
    """The first of equal pixels, row by row, has the gradient: also where windows overlap."""
    x = jax.random.normal(KEY, shape)
    x = {"distinct": x, "ties": jnp.round(x), "constant": jnp.zeros(shape), "below zero": -jnp.abs(x) - 1e3}[values]
    pooled, vjp = jax.vjp(jax.jit(convolutions.max_pool), x)
    expected, expected_vjp = jax.vjp(jax.jit(flax_max_pool), x)
    np.testing.assert_array_equal(pooled, expected)
    np.testing.assert_array_equal(convolutions.max_pool(x), expected)
    # Integers: a pixel's gradients from up to four windows add up to the same in any order.
    cotangent = jnp.round(10 * jax.random.normal(jax.random.key(1), pooled.shape))
    np.testing.assert_array_equal(vjp(cotangent)[0], expected_vjp(cotangent)[0])


@pytest.mark.slow
def test_pooling_takes_other_dtypes_and_a_batch_of_parameters() -> None:
    x = jax.random.normal(KEY, (5, 2, 8, 8, 3))
    gradient = jax.grad(lambda x: jnp.sum(jnp.square(convolutions.max_pool(x))))
    expected = jnp.stack([gradient(each) for each in x])
    np.testing.assert_array_equal(jax.vmap(gradient)(x), expected)
    half = convolutions.max_pool(x[0].astype(jnp.bfloat16))
    assert half.dtype == gradient(x[0].astype(jnp.bfloat16)).dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, flax_max_pool(x[0].astype(jnp.bfloat16)))


def primitives(jaxpr: Any) -> set[str]:
    """The names of all primitives of a jaxpr, those of inner ones too."""
    return {equation.primitive.name for equation in harness.equations(jaxpr)}


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_the_deep_networks_gradient_has_no_scatter(platform: str) -> None:
    """A scatter adds in an order that nobody knows on GPU, and then no run can be repeated bit for bit."""
    module, images = convolutions.ResNet(), jnp.ones((2, 24, 24, 1))
    params = module.init(KEY, images)
    loss = lambda params: jnp.sum(module.apply(params, images))  # noqa: E731
    with topology.compiling_for(platform):
        found = primitives(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    assert not {name for name in found if "scatter" in name}
    assert "conv_general_dilated" in found
    assert any(
        "scatter" in name
        for name in primitives(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(flax_max_pool(x))))(images).jaxpr)
    )


@pytest.mark.parametrize("T", [7, *(pytest.param(T, marks=pytest.mark.slow) for T in (1, 2, 3, 12))])
def test_the_lstm_off_cpu_is_the_lstm(T: int) -> None:
    """There steps are computed again for the gradient, three at a time: outputs, state and gradients stay."""
    module = recurrent.LSTM(5)
    x, first = jax.random.normal(KEY, (T, 4, 3)), jax.random.bernoulli(jax.random.key(1), 0.3, (T, 4))
    state = tuple(jax.random.normal(jax.random.key(2), (2, 4, 5)))
    params = module.init(KEY, x, first, state)

    def loss(params: Any, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        outputs, after = module.apply(params, x, first, state)
        return jnp.sum(jnp.sin(outputs)) + jnp.sum(jnp.cos(after[1])), (outputs, after)

    run = lambda: jax.jit(lambda *x: jax.grad(loss, (0, 1, 2), has_aux=True)(*x))(params, x, state)  # noqa: E731
    expected = run()
    with topology.compiling_for("gpu"):
        found = run()
        text = str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(params, x, state))
    assert "unroll=3" in text
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize(
    "shape", [(2, 3, 3, 16), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((3, 5), (7, 1)))]
)
def test_normalisation_and_its_gradient_are_flaxs(shape: tuple[int, ...]) -> None:
    """Also of features that are all equal, where the variance is 0."""
    x = 3.0 + 2.0 * jax.random.normal(KEY, shape)
    x = jnp.concatenate([x, jnp.ones_like(x[:1])])
    params = {"scale": jnp.linspace(0.5, 2.0, shape[-1]), "bias": jnp.linspace(-1.0, 1.0, shape[-1])}
    cotangent = jax.random.normal(jax.random.key(1), x.shape)

    def both(module: nn.Module) -> Any:
        loss = lambda p, x: jnp.sum(cotangent * module.apply({"params": p}, x))  # noqa: E731
        return jax.jit(lambda p, x: (module.apply({"params": p}, x), jax.grad(loss, (0, 1))(p, x)))(params, x)

    with jax.numpy_rank_promotion("allow"):
        expected = both(nn.LayerNorm(use_fast_variance=False))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), both(layers.LayerNorm()), expected
    )
    assert jax.tree.map(jnp.shape, layers.LayerNorm().init(KEY, x)) == {
        "params": {"scale": shape[-1:], "bias": shape[-1:]}
    }


class FlaxConvNet(nn.Module):
    """A torso as PQN's authors write it: normalisation after each layer, over channels, before the activation."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (4, 6):
            x = nn.relu(nn.LayerNorm()(nn.Conv(features, (3, 3), (2, 2), "VALID")(x)))
        return nn.relu(nn.LayerNorm()(nn.Dense(5)(x.reshape(x.shape[0], -1))))


def test_a_normalised_torso_is_flaxs() -> None:
    module = convolutions.ConvNet(convolutions.ConvNetSpec(((4, 3, 2), (6, 3, 2)), 5), "he", norm=True)
    x = jax.random.normal(KEY, (2, 9, 11, 3))
    params = jax.jit(lambda: jax.tree.map(lambda p: p + 0.1 * jax.random.normal(KEY, p.shape), module.init(KEY, x)))()
    with jax.numpy_rank_promotion("allow"):
        expected = jax.jit(FlaxConvNet().apply)(params, x)
    np.testing.assert_allclose(jax.jit(module.apply)(params, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scale", "variance"), [("he", 2 / 480), (None, 2 / (480 + 96))])
def test_weights_begin_as_said(scale: Any, variance: float) -> None:
    dense = layers.Dense(96, scale).init(KEY, jnp.zeros((1, 480)))["params"]["kernel"]
    assert np.var(dense) == pytest.approx(variance, rel=0.03)
    conv = convolutions.Conv(96, 4, 1, scale=scale).init(KEY, jnp.zeros((1, 4, 4, 30)))["params"]["kernel"]
    assert np.var(conv) == pytest.approx(variance if scale else 2 / (480 + 96 * 16), rel=0.03)


@pytest.mark.parametrize("torso", ["mlp", "shallow", pytest.param("resnet", marks=pytest.mark.slow)])
def test_torsos_compute_in_bfloat16_and_keep_float32_parameters(torso: str) -> None:
    make = {
        "mlp": lambda dtype: layers.MLP((16, 8), "tanh", dtype=dtype),
        "shallow": lambda dtype: convolutions.ConvNet(convolutions.CONVNETS["shallow"], dtype=dtype),
        "resnet": lambda dtype: convolutions.ResNet(dtype=dtype),
    }[torso]
    x = jax.random.uniform(KEY, (3, 12) if torso == "mlp" else (2, 36, 36, 1))
    full, half = make(jnp.float32), make(jnp.bfloat16)
    shapes = jax.eval_shape(half.init, KEY, x)
    assert shapes == jax.eval_shape(full.init, KEY, x)
    grads = jax.eval_shape(jax.grad(lambda p: jnp.sum(half.apply(p, x).astype(jnp.float32))), shapes)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((shapes, grads))} == {"float32"}
    products = re.findall(
        r"(\w+)\[[\d,]*\] = (?:dot_general|conv_general_dilated)", str(jax.make_jaxpr(half.apply)(shapes, x))
    )
    assert set(products) == {"bf16"}
    if torso != "resnet":  # which takes long to compile
        params = jax.jit(full.init)(KEY, x)
        expected, found = jax.jit(full.apply)(params, x), jax.jit(half.apply)(params, x).astype(jnp.float32)
        np.testing.assert_allclose(found, expected, atol=0.05 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize("name", ["ppo", "vtrace", "r2d2"])
def test_every_agent_says_what_its_torso_computes_in(name: str) -> None:
    """Products of the torso are of bfloat16, those of core and heads of float32, and so is all that comes out."""
    environment = envs_jax.make("catch")
    agent = make_agent(
        name, environment, {"hidden_sizes": (17,), "core": "lstm", "core_size": 5, "compute_dtype": "bfloat16"}
    )
    hyper = {name: jnp.float32(value) for name, value in agent.hyper.items()}
    actor = jax.eval_shape(lambda: agent.actor_params(agent.init(KEY, hyper), jnp.float32(0)))
    row = TimeStep(jnp.zeros((2, 10, 5)), jnp.zeros(2), jnp.ones(2), jnp.zeros(2, bool), jnp.zeros(2, bool))
    memory = agent.start(jnp.arange(2, dtype=jnp.int32), 2)
    traced = jax.make_jaxpr(lambda a, m, r: agent.act(a, m, r, KEY, False))(actor, memory, row)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(actor.params)} == {"float32"}
    assert not any(x.dtype == jnp.bfloat16 for x in traced.out_avals)
    assert "bf16[2,17] = dot_general" in str(traced)
    assert "f32[2,20] = dot_general" in str(traced)


def test_gradients_of_stacked_networks_transpose_no_weights() -> None:
    """XLA:CPU folds the transpose of a matrix into a product, but not that of several matrices."""

    def gradients(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda x, weights: jnp.sum(jnp.sin(layers.product(x, weights))), (0, 1))(x, weights)

    x, weights = jax.random.normal(KEY, (2, 4, 3)), jax.random.normal(KEY, (2, 3, 8))
    stacked = jax.jit(jax.vmap(gradients))
    assert "2x8x3xf32" not in stacked.lower(x, weights).as_text()
    slope = np.cos(np.asarray(x) @ np.asarray(weights))
    np.testing.assert_allclose(stacked(x, weights)[0], slope @ np.asarray(weights).transpose(0, 2, 1), atol=1e-5)


@pytest.mark.parametrize(("wide", "narrow"), [(7, 3), (3, 7)])
def test_dense_gradients(wide: int, narrow: int) -> None:
    """Gradients of inputs, weights and bias, with either operand the narrower; also a second derivative, for
    meta-gradients."""
    keys = jax.random.split(KEY, 3)
    x = jax.random.normal(keys[0], (2, 5, wide))
    module = layers.Dense(narrow)
    params = module.init(keys[1], x)
    cotangent = jax.random.normal(keys[2], (2, 5, narrow))

    def reference(params: Any, x: jax.Array) -> jax.Array:
        return jnp.einsum("...i,ij->...j", x, params["params"]["kernel"]) + params["params"]["bias"][None, None]

    def gradients(function: Any) -> Any:
        first = jax.grad(lambda p, x: jnp.sum(cotangent * jnp.tanh(function(p, x))), (0, 1))
        square = lambda p, x: sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(first(p, x)))  # noqa: E731
        return jax.jit(lambda p, x: (function(p, x), first(p, x), jax.grad(square, (0, 1))(p, x)))(params, x)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        gradients(module.apply),
        gradients(reference),
    )
