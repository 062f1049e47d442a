"""Layers without memory: dense layers and normalisation, each as fast on CPU as we know how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import topology

Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]
"""Makes a parameter of a shape from a key."""

Weights = float | Literal["he", "uniform", "lecun"] | None
"""The initialiser of weights: orthogonal times a number (in convolutions LeCun's normal one), He's normal one for "he",
LeCun's uniform one for "lecun", Glorot's uniform one for None, or for "uniform" within 1 / sqrt(inputs) of 0. Biases
are 0, or "uniform" too."""

Activation = Literal["relu", "tanh", "swish", "elu"]
"""The activation of an MLP."""

ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh, "swish": nn.swish, "elu": nn.elu}


def orthogonal(scale: float) -> Initializer:
    """An initialiser for [inputs, outputs] with orthonormal rows or columns, whichever are fewer, times `scale`.

    The orthogonal factor of a Gaussian matrix by Newton-Schulz iterations, X <- 1.5 X - 0.5 X X' X, which drive every
    singular value to 1. Products only: a QR decomposition takes longer to compile than the rest of the network, and
    XLA:CPU can deadlock on several of them at once when there are few cores.
    """

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        x = jax.random.normal(key, (max(shape), min(shape)), dtype)
        x = lax.fori_loop(0, 40, lambda _, x: 1.5 * x - 0.5 * x @ (x.T @ x), x / jnp.linalg.norm(x))
        return scale * (x if shape[0] >= shape[1] else x.T)

    return init


def initializer(scale: Weights, numbered: Initializer) -> Initializer:
    """The initialiser of weights that begin as `scale` says; `numbered` where it is a number."""
    if scale == "he":
        return nn.initializers.he_normal()
    if scale == "lecun":
        return nn.initializers.lecun_uniform()
    if scale == "uniform":
        return nn.initializers.variance_scaling(1.0 / 3.0, "fan_in", "uniform")
    return nn.initializers.glorot_uniform() if scale is None else numbered


def bias_initializer(scale: Weights, inputs: int) -> Initializer:
    """The initialiser of biases beside weights that begin as `scale` says."""
    if scale != "uniform":
        return nn.initializers.zeros
    limit = 1.0 / np.sqrt(inputs)
    return lambda key, shape: jax.random.uniform(key, shape, minval=-limit, maxval=limit)


class Dense(nn.Module):
    """A dense layer on the last axis; its weights begin as `scale` says (`Weights`).

    Parameters are float32; inputs and parameters are converted to `dtype`, and the result is of `dtype`. With `noise`,
    weights and biases have a sigma for `nets.perturb`, at first `noise` / sqrt(inputs), which is not used here. `bias`
    is an initialiser of biases in place of that of `scale`.
    """

    size: int
    scale: Weights = np.sqrt(2)
    dtype: Any = jnp.float32
    noise: float = 0.0
    bias: Callable[..., jax.Array] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = initializer(self.scale, orthogonal(self.scale))  # type: ignore[arg-type]
        weights = self.param("kernel", init, (x.shape[-1], self.size))
        bias = self.param("bias", self.bias or bias_initializer(self.scale, x.shape[-1]), (self.size,))
        if self.noise:
            for name, array in (("kernel", weights), ("bias", bias)):
                begin = nn.initializers.constant(self.noise / np.sqrt(x.shape[-1]))
                self.param(f"{name}_sigma", begin, array.shape)
        x, weights, bias = (array.astype(self.dtype) for array in (x, weights, bias))
        return product(x, weights) + bias.reshape((1,) * (x.ndim - 1) + (self.size,))


def product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Computes [..., F] times [F, size], as one product of two axes."""
    multiply = _product_with_cpu_gradient if topology.on_cpu() else jnp.matmul
    return multiply(x.reshape(-1, x.shape[-1]), weights).reshape(*x.shape[:-1], weights.shape[-1])


# XLA:CPU has a fast kernel for x @ y but not for x.T @ y, which the gradient of the weights is: transposing the
# narrower operand for real, behind barriers that keep it from being folded back, makes that gradient 1.35 times faster
# on two cores.
@jax.custom_vjp
def _product_with_cpu_gradient(x: jax.Array, weights: jax.Array) -> jax.Array:
    return x @ weights


def _product_forward(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
    return x @ weights, (x, weights)


def _product_backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weights = residuals
    if x.shape[1] <= cotangent.shape[1]:
        gradient = lax.optimization_barrier(x.T) @ cotangent
    else:
        gradient = lax.optimization_barrier(lax.optimization_barrier(cotangent.T) @ x).T
    # cotangent @ weights.T: under `vmap`, as of critics, XLA:CPU would transpose the weights for real.
    return lax.dot_general(cotangent, weights, (((1,), (1,)), ((), ()))), gradient


_product_with_cpu_gradient.defvjp(_product_forward, _product_backward)


class LayerNorm(nn.Module):
    """Features [..., C] with zero mean and unit variance over C (Ba et al. 2016), times a scale, plus a bias.

    Computed in float32; the result is of `dtype`.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        over = (1,) * (x.ndim - 1) + (-1,)
        y = standardize(x.astype(jnp.float32)) * scale.reshape(over) + bias.reshape(over)
        return y.astype(self.dtype)


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=-1, keepdims=True)


# Its gradient needs two reductions in this form, and four by differentiating each step, which takes longer on CPU.
@jax.custom_vjp
def standardize(x: jax.Array) -> jax.Array:
    """[..., C] with mean 0 and variance 1 over C."""
    return _standardize_forward(x)[0]


def _standardize_forward(x: jax.Array) -> tuple[jax.Array, Any]:
    centred = x - _mean(x)
    rate = lax.rsqrt(_mean(jnp.square(centred)) + 1e-6)
    return centred * rate, (centred * rate, rate)


def _standardize_backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array]:
    y, rate = residuals
    return (rate * (cotangent - _mean(cotangent) - y * _mean(cotangent * y)),)


standardize.defvjp(_standardize_forward, _standardize_backward)


NormName = Literal["layer", "batch"]


def normalization(name: NormName) -> nn.Module:
    """A layer by its name: `LayerNorm` or `BatchNorm`."""
    return {"layer": LayerNorm, "batch": BatchNorm}[name]()


class BatchNorm(nn.Module):
    """Features [..., C] with zero mean and unit variance over all else (Ioffe and Szegedy 2015), times a scale, plus a
    bias.

    Where the collection "statistics" is mutable, mean and variance are the batch's, and the running ones take a tenth
    of them; elsewhere they are the running ones, and no row depends on another.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        C = x.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (C,))
        bias = self.param("bias", nn.initializers.zeros, (C,))
        running = [
            self.variable("statistics", name, lambda value=value: jnp.full(C, value))
            for name, value in (("mean", 0.0), ("variance", 1.0))
        ]
        mean, variance = (x.value for x in running)
        if self.is_mutable_collection("statistics") and not self.is_initializing():
            axes = tuple(range(x.ndim - 1))
            mean = jnp.mean(x, axes)
            variance = jnp.mean(jnp.square(x - mean.reshape(_last(x))), axes)
            for kept, seen in zip(running, (mean, variance)):
                kept.value = 0.9 * kept.value + 0.1 * lax.stop_gradient(seen)
        rate = scale * lax.rsqrt(variance + 1e-5)
        return (x - mean.reshape(_last(x))) * rate.reshape(_last(x)) + bias.reshape(_last(x))


def _last(x: jax.Array) -> tuple[int, ...]:
    """The shape of a vector along the last axis of `x`."""
    return (1,) * (x.ndim - 1) + (-1,)


class MLP(nn.Module):
    """Dense layers, each with `LayerNorm` before the activation if `norm`; weights and `dtype` as in `Dense`."""

    sizes: tuple[int, ...]
    activation: str
    scale: Weights = np.sqrt(2)
    dtype: Any = jnp.float32
    norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        activation = ACTIVATIONS[self.activation]
        for size in self.sizes:
            x = Dense(size, self.scale, self.dtype)(x)
            x = activation(LayerNorm(self.dtype)(x) if self.norm else x)
        return x
