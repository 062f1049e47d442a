"""Noisy networks: without sigma they are plain, gradients meet the noise, draws differ as keys do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import nets, spaces
from podracer.types import EnvSpec

SPEC = EnvSpec("test", spaces.Box(-5.0, 5.0, (3,)), spaces.Discrete(4))
NOISE = 0.5
LAYERS = {"advantage": 6, "advantage_hidden": 7, "value": 6, "value_hidden": 7}
"""The noisy layers of the network below, and how many inputs they have."""
KEY = jax.random.key(7)


@pytest.fixture(scope="module")
def made() -> tuple[nets.Network, Any, nets.Inputs]:
    """A network with noisy heads, its parameters and rows for it."""
    network = nets.make_q(SPEC, hidden_sizes=(7,), head_size=6, noise=NOISE)
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3)), jnp.float32)
    inputs = nets.Inputs(rows, jnp.zeros((2, 5)), jnp.zeros((2, 5), bool), ())
    return network, jax.jit(network.init)(jax.random.key(0)), inputs


perturb = jax.jit(nets.perturb)


def noise_of(params: Any, key: jax.Array) -> dict[str, dict[str, np.ndarray]]:
    """The noise that a draw adds to each noisy array, in units of its sigma."""
    drawn = perturb(params, key)["params"]
    return {
        name: {
            kind: np.asarray((drawn[name][kind] - layer[kind]) / layer[f"{kind}_sigma"]) for kind in ("kernel", "bias")
        }
        for name, layer in params["params"].items()
        if name in LAYERS
    }


def test_sigma_begins_as_the_paper_says(made: Any) -> None:
    """The heads' layers have one, the torso's none."""
    _, params, _ = made
    assert {name for name, layer in params["params"].items() if "kernel_sigma" in layer} == set(LAYERS)
    assert not any("sigma" in name for name in str(jax.tree.structure(params["params"]["torso"])).split("'"))
    for name, inputs in LAYERS.items():
        layer = params["params"][name]
        for kind in ("kernel", "bias"):
            assert layer[f"{kind}_sigma"].shape == layer[kind].shape
            np.testing.assert_allclose(layer[f"{kind}_sigma"], NOISE / np.sqrt(inputs), rtol=1e-6)


def test_without_noise_a_network_is_the_plain_one(made: Any) -> None:
    """This holds without a draw, and with a sigma of 0."""
    network, params, inputs = made
    plain = nets.make_q(SPEC, hidden_sizes=(7,), head_size=6)
    layers = {n: {k: x for k, x in layer.items() if "sigma" not in k} for n, layer in params["params"].items()}
    assert jax.tree.structure(jax.eval_shape(plain.init, KEY)) == jax.tree.structure({"params": layers})
    expected = plain.apply({"params": layers}, inputs, ())[0]
    still = jax.tree_util.tree_map_with_path(lambda path, x: 0.0 * x if "sigma" in str(path[-1]) else x, params)
    np.testing.assert_array_equal(network.apply(params, inputs, ())[0], expected)
    np.testing.assert_array_equal(network.apply(perturb(still, KEY), inputs, ())[0], expected)
    assert not np.allclose(network.apply(perturb(params, KEY), inputs, ())[0], expected, atol=0.05)


def test_noise_is_factorised(made: Any) -> None:
    """The noise of weights is a product of that of inputs and outputs; that of biases is the outputs'; |f(e)| =
    sqrt|e|."""
    _, params, _ = made
    squares = []
    for seed in range(20):
        for layer in noise_of(params, jax.random.key(seed)).values():
            of_inputs = layer["kernel"][:, :1] / layer["bias"][:1]
            np.testing.assert_allclose(layer["kernel"], of_inputs * layer["bias"], rtol=2e-3, atol=1e-4)
            squares += [*np.square(of_inputs[:, 0]), *np.square(layer["bias"])]
    # |e| of standard normal numbers.
    assert np.mean(squares) == pytest.approx(np.sqrt(2 / np.pi), rel=0.1)
    assert np.mean(np.square(squares)) == pytest.approx(1.0, rel=0.15)


def test_draws_are_the_keys_and_differ_between_layers(made: Any) -> None:
    _, params, _ = made
    one, again, other = (noise_of(params, jax.random.key(seed)) for seed in (0, 0, 1))
    kernel = lambda noise, name: noise[name]["kernel"]  # noqa: E731
    np.testing.assert_array_equal(kernel(one, "value_hidden"), kernel(again, "value_hidden"))
    assert not np.isclose(kernel(one, "value_hidden"), kernel(other, "value_hidden")).any()
    assert not np.isclose(kernel(one, "value_hidden"), kernel(one, "advantage_hidden")).any()


def test_the_gradient_of_sigma_is_that_of_the_weight_times_the_noise(made: Any) -> None:
    network, params, inputs = made

    @jax.jit
    def gradient(params: Any) -> Any:
        loss = lambda params: jnp.sum(jnp.square(network.apply(nets.perturb(params, KEY), inputs, ())[0]))  # noqa: E731
        return jax.grad(loss)(params)

    gradients, noise = gradient(params)["params"], noise_of(params, KEY)
    for name in LAYERS:
        for kind in ("kernel", "bias"):
            expected = np.asarray(gradients[name][kind]) * noise[name][kind]
            np.testing.assert_allclose(gradients[name][f"{kind}_sigma"], expected, rtol=1e-3, atol=1e-3)
            assert np.abs(expected).max() > 0.1
