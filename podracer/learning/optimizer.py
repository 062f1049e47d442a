"""Optimisers as agents use them: the learning rate is an array, so that a population can vary it.

Parameters and gradients are one vector here. A network has dozens of small arrays, and an operation on each of them
costs more in launches and compilation than the copies do.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from podracer.types import ArrayTree

Name = Literal["rmsprop", "centred_rmsprop", "adam", "radam", "sgd"]


def make(name: Name, *, eps: float, decay: float = 0.99, momentum: float = 0.0) -> optax.GradientTransformation:
    """A transformation of vectors, without learning rate or sign, for `init` and `step`.

    Args:
      name: "rmsprop" is TensorFlow 1's form, g / sqrt(nu + eps) with nu_0 = 1, that IMPALA's epsilon belongs to
        (papers quote epsilon for this form); "centred_rmsprop" is that of Graves (2013, equations 38 to 41), as DQN
        has it: g / sqrt(E[g^2] - E[g]^2 + eps) from moments of 0; "adam" is Kingma and Ba's; "radam" is Liu et al.'s
        (2020), momentum alone for five steps; "sgd" leaves gradients as they are.
      eps: the numerical epsilon.
      decay: RMSProp's decay.
      momentum: heavy-ball momentum for RMSProp and SGD.
    """
    if name == "adam":
        return optax.scale_by_adam(eps=eps)
    if name == "radam":
        return optax.scale_by_radam(eps=eps)
    parts = []
    if name == "rmsprop":
        parts.append(optax.scale_by_rms(decay=decay, eps=eps, initial_scale=1.0, eps_in_sqrt=True))
    if name == "centred_rmsprop":
        parts.append(_scale_by_deviation(decay, eps))
    if momentum:
        parts.append(optax.trace(decay=momentum))
    return optax.chain(*parts) if parts else optax.identity()


def decaying(transformation: optax.GradientTransformation, l2_cost: float) -> optax.GradientTransformation:
    """With a further loss c |params|^2, c the `l2_cost`, whose gradient is added behind the clip of `step`.

    As PyTorch's weight decay; it is not in the norm that `step` returns.
    """
    return optax.chain(optax.add_decayed_weights(2.0 * l2_cost), transformation)


def _scale_by_deviation(decay: float, eps: float) -> optax.GradientTransformation:
    def init(vector: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros_like(vector), jnp.zeros_like(vector)

    def update(gradient: jax.Array, moments: tuple[jax.Array, jax.Array], _: Any = None) -> Any:
        mean, square = (decay * m + (1.0 - decay) * x for m, x in zip(moments, (gradient, jnp.square(gradient))))
        # `optax.scale_by_stddev`, but that a gradient which hardly changes has no negative variance by rounding.
        variance = jnp.maximum(square - jnp.square(mean), 0.0)
        return gradient * lax.rsqrt(variance + eps), (mean, square)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def init(transformation: optax.GradientTransformation, params: ArrayTree) -> ArrayTree:
    """The optimiser's state for parameters."""
    return transformation.init(ravel_pytree(params)[0])


def step(
    transformation: optax.GradientTransformation,
    grads: ArrayTree,
    opt_state: ArrayTree,
    params: ArrayTree,
    *,
    learning_rate: jax.Array,
    max_grad_norm: jax.Array,
    l2_cost: float = 0.0,
) -> tuple[ArrayTree, ArrayTree, jax.Array]:
    """Clips by global norm, transforms, and moves the parameters by -learning_rate.

    Args:
      transformation: of `make`.
      grads: of the loss.
      opt_state: of `init`, or the last step's.
      params: the parameters.
      learning_rate: float32 [].
      max_grad_norm: float32 [], the gradient's largest global norm.
      l2_cost: c of a further loss c |params|^2, of which the gradient that is clipped is (compare `decaying`).

    Returns:
      New parameters, new optimiser state, and the gradient's norm before clipping.
    """
    vector, unravel = ravel_pytree(params)
    gradient = ravel_pytree(grads)[0]
    vector, opt_state, norm = step_vector(
        transformation,
        gradient + 2.0 * l2_cost * vector if l2_cost else gradient,
        opt_state,
        vector,
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
    )
    return unravel(vector), opt_state, norm


def step_vector(
    transformation: optax.GradientTransformation,
    gradient: jax.Array,
    opt_state: ArrayTree,
    vector: jax.Array,
    *,
    learning_rate: jax.Array,
    max_grad_norm: jax.Array,
) -> tuple[jax.Array, ArrayTree, jax.Array]:
    """`step` for parameters and a gradient that are vectors already (`jax.flatten_util.ravel_pytree`), float32 [n]."""
    norm = jnp.sqrt(jnp.sum(jnp.square(gradient)))
    clipped = gradient * jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
    updates: jax.Array
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
        updates, opt_state = transformation.update(clipped, opt_state, vector)  # type: ignore[assignment]
    return vector - learning_rate * updates, opt_state, norm
