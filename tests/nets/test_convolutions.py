"""Convolutions and torsos of them: layers as in the papers, values and gradients, images that do not fit, and dicts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podracer import nets, spaces
from podracer.nets import convolutions
from podracer.types import EnvSpec

KEY = jax.random.key(0)
VECTOR = spaces.Box(-5.0, 5.0, (3,))


def spec_of(observation: spaces.Space = VECTOR) -> EnvSpec:
    return EnvSpec("test", observation, spaces.Discrete(4))


# Torsos.


@pytest.mark.parametrize(
    ("torso", "shape", "kernels", "dense"),
    [
        ("nature_conv", (84, 84, 4), [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64)], None),
        ("shallow", (84, 84, 4), [(8, 8, 4, 16), (4, 4, 16, 32)], (9 * 9 * 32, 256)),
        ("shallow", (72, 96, 3), [(8, 8, 3, 16), (4, 4, 16, 32)], (7 * 10 * 32, 256)),
        ("nature", (84, 84, 4), [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64)], (7 * 7 * 64, 512)),
        ("auto", (84, 84), [(8, 8, 1, 16), (4, 4, 16, 32)], (9 * 9 * 32, 256)),
        ("resnet", (84, 84, 4), [(3, 3, 4, 16), *[(3, 3, 16, 16)] * 4, (3, 3, 16, 32), *[(3, 3, 32, 32)] * 9], (11 * 11 * 32, 256)),
        ("resnet", (10, 7, 2), [(3, 3, 2, 16), *[(3, 3, 16, 16)] * 4, (3, 3, 16, 32), *[(3, 3, 32, 32)] * 9], (2 * 1 * 32, 256)),
        ("small", (10, 7, 4), [(3, 3, 4, 16), (3, 3, 16, 32)], (8 * 5 * 32, 128)),
        ("minatar", (10, 10, 6), [(3, 3, 6, 16)], (8 * 8 * 16, 128)),
    ],
)  # fmt: skip
def test_torso_layers(torso: Any, shape: tuple[int, ...], kernels: list[tuple[int, ...]], dense: tuple | None) -> None:
    """Convolutions and the dense layer behind them as in the papers' figures (order aside), and the heads' shapes."""
    network = nets.make(spec_of(spaces.Box(0, 255, shape, np.uint8)), torso=torso)
    params = jax.eval_shape(network.init, KEY)
    shapes = [leaf.shape for leaf in jax.tree.leaves(params["params"]["torso"]) if len(leaf.shape) > 1]
    assert sorted(s for s in shapes if len(s) == 4) == sorted(kernels)
    assert [s for s in shapes if len(s) == 2] == [dense] * (dense is not None)
    rows = nets.Inputs(jnp.zeros((2, 3, *shape), jnp.uint8), jnp.zeros((2, 3)), jnp.zeros((2, 3), bool), ())
    outputs, values, _ = jax.eval_shape(network.apply, params, rows, ())
    assert (outputs.shape, values.shape) == ((2, 3, 4), (2, 3))


def test_images_are_scaled_and_rows_kept_apart() -> None:
    """A convolutional torso sees bytes as [0, 1] and flattens [T, B] in order."""
    image = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    network = nets.make(spec_of(image), core=nets.CoreSettings("lstm", 4))
    params = jax.jit(network.init)(KEY)
    frames = np.random.default_rng(5).integers(0, 256, (3, 2, 36, 36, 1), np.uint8)
    zeros, actions = jnp.zeros((3, 2)), jnp.zeros((3, 2), jnp.int32)
    apply = jax.jit(
        lambda frames: network.apply(params, nets.Inputs(frames, zeros, zeros < 1, actions), network.start(2))
    )
    values = np.asarray(apply(jnp.asarray(frames))[1])
    for t, b in ((0, 1), (2, 0)):
        # Every row is a first row: its value depends on its own frame only.
        single = frames.copy()
        single[np.arange(3) != t] = 0
        single[:, np.arange(2) != b] = 0
        np.testing.assert_allclose(np.asarray(apply(jnp.asarray(single))[1])[t, b], values[t, b], rtol=1e-5)
    assert len(np.unique(values)) == 6
    assert np.abs(values).max() < 10.0


def test_convolutions_need_images() -> None:
    with pytest.raises(ValueError, match=r"torso='shallow' needs uint8 images .*but test shows Box.*torso='mlp'"):
        nets.make(spec_of(), torso="shallow")
    with pytest.raises(ValueError, match="torso='resnet' needs uint8 images"):
        nets.make(spec_of(spaces.Box(0.0, 1.0, (84, 84, 4))), torso="resnet")
    with pytest.raises(ValueError, match="torso='nature' needs uint8 images"):
        nets.make(spec_of(spaces.Dict({"a": VECTOR})), torso="nature")


@pytest.mark.parametrize(
    ("torso", "least", "other"),
    [("nature", 36, "'small'"), ("shallow", 20, "'small'"), ("small", 3, "'resnet', which takes any size, or 'mlp'")],
)
def test_convolutions_that_an_image_is_too_small_for(torso: Any, least: int, other: str) -> None:
    image = lambda *shape: spec_of(spaces.Box(0, 255, shape, np.uint8))  # noqa: E731
    message = f"torso='{torso}' needs images of {least}x{least} or more, and test shows {least - 1}x{least}x3: use"
    with pytest.raises(ValueError, match=f"^{message} torso={other}.$"):
        nets.make_q(image(least - 1, least, 3), torso=torso)
    jax.eval_shape(nets.make(image(least, least), torso=torso).init, KEY)
    jax.eval_shape(nets.make(image(1, 2), torso="resnet").init, KEY)


@pytest.mark.parametrize(("width", "millions"), [(1, 1.09), (2, 2.37), (4, 5.52)])
def test_wide_resnets_have_the_papers_parameters(width: int, millions: float) -> None:
    """SEED RL, table 4: "Default", "Medium" and "Large"."""
    network = nets.make(spec_of(spaces.Box(0, 255, (84, 84, 4), np.uint8)), torso="resnet", width=width)
    params = jax.tree.leaves(jax.eval_shape(network.init, KEY))
    assert round(sum(x.size for x in params) / 1e6, 2) == millions


@pytest.mark.parametrize("depth", [1, 3])
def test_sections_of_resnets_have_so_many_blocks(depth: int) -> None:
    """Two convolutions each, after the section's own."""
    network = nets.make(spec_of(spaces.Box(0, 255, (9, 9, 4), np.uint8)), torso="resnet", depth=depth)
    shapes = [x.shape for x in jax.tree.leaves(jax.eval_shape(network.init, KEY)["params"]["torso"])]
    assert shapes.count((3, 3, 16, 16)) == 2 * depth
    assert shapes.count((3, 3, 32, 32)) == 4 * depth + 1


@pytest.mark.parametrize("high", [1, pytest.param(31, marks=pytest.mark.slow), 32])
def test_small_images_by_hand(high: int) -> None:
    """Planes are divided by their largest value; codes choose the rows of an embedding, for each channel its own."""
    H, W, C = 4, 3, 2
    network = nets.make(spec_of(spaces.Box(0, high, (H, W, C), np.uint8)), torso="small")
    params = jax.tree.map(lambda x: x + 0.02, jax.jit(network.init)(KEY))
    image = np.random.default_rng(6).integers(0, high + 1, (1, 5, H, W, C), np.uint8)
    rows = nets.Inputs(jnp.asarray(image), jnp.zeros((1, 5)), jnp.ones((1, 5), bool), ())
    values = jax.jit(network.apply)(params, rows, ())[1][0]
    p = jax.tree.map(np.asarray, params["params"])
    assert ("embedding" in p["torso"]) == (high == 31)
    dense = lambda p, x: x @ p["kernel"] + p["bias"]  # noqa: E731
    for pixels, value in zip(image[0], values):
        x = pixels / high
        if high == 31:
            codes, embedding = pixels.astype(int), p["torso"]["embedding"]
            x = embedding["kernel"][codes[..., 0]] + embedding["kernel"][32 + codes[..., 1]] + embedding["bias"]
        x = np.pad(x, ((1, 1), (1, 1), (0, 0)))
        for layer in ("Conv_0", "Conv_1"):
            kernel = p["torso"][layer]["kernel"]
            windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (0, 1))
            x = np.maximum(np.einsum("hwcij,ijco->hwo", windows, kernel) + p["torso"][layer]["bias"], 0)
        x = np.maximum(dense(p["torso"]["Dense_0"], x.reshape(-1)), 0)
        np.testing.assert_allclose(value, dense(p["value"], x)[0], rtol=1e-4)
    assert len(np.unique(values)) == 5


@pytest.mark.parametrize(
    "space", [VECTOR, spaces.Box(0, 255, (10, 10, 3), np.uint8), spaces.Box(0, 255, (84, 20), np.uint8)]
)
def test_auto_is_an_mlp_for_all_but_large_images(space: spaces.Box) -> None:
    params = jax.eval_shape(nets.make(spec_of(space), hidden_sizes=(8,)).init, KEY)["params"]
    size = int(np.prod(space.shape))
    assert [x.shape for x in jax.tree.leaves(params["torso"])] == [(8,), (size, 8)]


@pytest.mark.slow
def test_images_in_a_dict_have_convolutions_and_all_else_an_mlp() -> None:
    """An image beside a mask is the image alone, to the bit; of several members, each moves the outputs."""
    space = spaces.Box(0, 255, (20, 20, 1), np.uint8)
    image = jax.random.randint(KEY, (2, 3, 20, 20, 1), 0, 256).astype(jnp.uint8)
    spec = lambda space: EnvSpec("images", space, spaces.Discrete(3), None)  # noqa: E731
    mask = spaces.Box(0, 1, (3,), np.int8)
    alone, beside = (
        nets.make(spec(x), torso="shallow") for x in (space, spaces.Dict({"image": space, "action_mask": mask}))
    )
    rows = lambda observation: nets.Inputs(observation, jnp.zeros((2, 3)), jnp.zeros((2, 3), bool), ())  # noqa: E731
    params = alone.init(KEY)
    assert jax.tree.map(jnp.shape, beside.init(KEY)) == jax.tree.map(jnp.shape, params)
    ones = jnp.ones((2, 3, 3), jnp.int8)
    expected = alone.apply(params, rows(image), ())[0]
    np.testing.assert_array_equal(beside.apply(params, rows({"image": image, "action_mask": ones}), ())[0], expected)

    members = {"left": space, "right": space, "position": spaces.Box(-1.0, 1.0, (2,)), "_key": mask}
    several = nets.make(spec(spaces.Dict(members)), torso="shallow")
    params = several.init(KEY)
    assert {"torso_left", "torso_right", "torso_others"} < set(params["params"])
    seen = {"left": image, "right": image, "position": jnp.zeros((2, 3, 2)), "_key": ones}
    outputs = lambda **change: np.asarray(several.apply(params, rows(seen | change), ())[0])  # noqa: E731
    for change in ({"left": image[::-1]}, {"right": image[::-1]}, {"position": jnp.ones((2, 3, 2))}):
        assert not np.allclose(outputs(**change), outputs(), atol=1e-4)
    np.testing.assert_array_equal(outputs(_key=0 * ones), outputs())
    with pytest.raises(ValueError, match=r"torso='nature' needs images of 36x36 or more, and images\['left'\] shows"):
        nets.make(spec(spaces.Dict(members)), torso="nature")
    named = nets.make(spec(spaces.Dict({"others": space, "position": members["position"]})), torso="shallow")
    assert {"torso_others", "torso__others"} < set(jax.eval_shape(named.init, KEY)["params"])


# Convolutions.


@pytest.mark.parametrize(
    ("shape", "features", "kernel", "stride", "padding"),
    [
        ((2, 13, 19, 2), 5, 8, 4, "VALID"),  # the last rows and columns are outside every patch
        pytest.param((2, 7, 6, 3), 4, 3, 2, "SAME", marks=pytest.mark.slow),
        pytest.param((2, 8, 10, 3), 3, 4, 2, "VALID", marks=pytest.mark.slow),
        pytest.param((2, 7, 5, 3), 4, 3, 1, "SAME", marks=pytest.mark.slow),
        ((2, 6, 5, 3), 4, 3, 1, "VALID"),  # few channels
        ((2, 5, 6, 13), 4, 3, 1, "SAME"),  # many
        pytest.param((2, 4, 5, 13), 4, 1, 1, "VALID", marks=pytest.mark.slow),
        pytest.param((2, 7, 6, 13), 4, 4, 1, "SAME", marks=pytest.mark.slow),  # borders are not equal
    ],
)
def test_convolution_and_its_gradients(
    shape: tuple[int, ...], features: int, kernel: int, stride: int, padding: str
) -> None:
    """Value, and gradients by inputs, weights and bias, are those of XLA's convolution, inside a scan too."""
    keys = jax.random.split(KEY, 4)
    x = jax.random.normal(keys[0], shape)
    module = convolutions.Conv(features, kernel, stride, padding)
    params = module.init(keys[1], x)
    params["params"]["bias"] = jax.random.normal(keys[2], (features,))

    def reference(params: Any, x: jax.Array) -> jax.Array:
        weights, bias = params["params"]["kernel"], params["params"]["bias"]
        dimensions = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, weights, (stride, stride), padding, dimension_numbers=dimensions)
        return y + bias[None, None, None]

    def in_a_scan(params: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda carry, x: (carry, module.apply(params, x[None])[0]), 0, x)[1]

    expected = reference(params, x)
    cotangent = jax.random.normal(keys[3], expected.shape)

    def both(function: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(cotangent * function(p, x)), (0, 1)))(params, x)

    np.testing.assert_allclose(module.apply(params, x), expected, rtol=1e-4, atol=1e-5)
    for function in (module.apply, in_a_scan) if padding == "SAME" else (module.apply,):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), both(function), both(reference)
        )
