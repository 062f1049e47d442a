"""Optimisers as agents use them: the learning rate is an array, so that a population can vary it.

Small arrays of parameters and gradients are one vector here (`joined`). A network has dozens of them, and an operation
on each costs more in launches and compilation than the copies do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from podracer.types import ArrayTree

Name = Literal["rmsprop", "centred_rmsprop", "adam", "radam", "sgd"]

Parts = tuple[jax.Array, ...]
"""Parameters, or gradients or moments of them, as few arrays."""


def make(
    name: Name,
    *,
    eps: float,
    decay: float = 0.99,
    momentum: float = 0.0,
    l2_cost: float = 0.0,
    weight_decay: float = 0.0,
) -> Optimizer:
    """The optimiser of a name.

    Args:
      name: "rmsprop" is TensorFlow 1's form, g / sqrt(nu + eps) with nu_0 = 1, that IMPALA's epsilon belongs to
        (papers quote epsilon for this form); "centred_rmsprop" is that of Graves (2013, equations 38 to 41), as DQN
        has it: g / sqrt(E[g^2] - E[g]^2 + eps) from moments of 0; "adam" is Kingma and Ba's; "radam" is Liu et al.'s
        (2020), momentum alone for five steps; "sgd" leaves gradients as they are.
      eps: the numerical epsilon.
      decay: RMSProp's decay.
      momentum: heavy-ball momentum for RMSProp and SGD.
      l2_cost: see `Optimizer`.
      weight_decay: c of a further loss c |params|^2, whose gradient is added after the clip. As PyTorch's weight decay,
        it is not in the norm that `Optimizer.step` returns.
    """
    transformation = _transformation(name, eps, decay, momentum)
    if weight_decay:
        transformation = optax.chain(optax.add_decayed_weights(2.0 * weight_decay), transformation)
    return Optimizer(transformation, l2_cost)


def _transformation(name: Name, eps: float, decay: float, momentum: float) -> optax.GradientTransformation:
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


def _scale_by_deviation(decay: float, eps: float) -> optax.GradientTransformation:
    def init(parts: Parts) -> tuple[Parts, Parts]:
        return jax.tree.map(jnp.zeros_like, parts), jax.tree.map(jnp.zeros_like, parts)

    def towards(moments: Parts, parts: Parts) -> Parts:
        return jax.tree.map(lambda m, x: decay * m + (1.0 - decay) * x, moments, parts)

    def scaled(gradient: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        # `optax.scale_by_stddev`, but for the floor: rounding leaves a negative variance of a steady gradient.
        return gradient * lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0.0) + eps)

    def update(gradient: Parts, moments: tuple[Parts, Parts], _: Any = None) -> Any:
        # Running E[g] and E[g^2] (Graves 2013, equations 38 and 39), then g / sqrt(E[g^2] - E[g]^2 + eps).
        mean = towards(moments[0], gradient)
        square = towards(moments[1], jax.tree.map(jnp.square, gradient))
        return jax.tree.map(scaled, gradient, mean, square), (mean, square)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


_LARGE = 2**15
"""The size of the smallest array that stays by itself. XLA:CPU searches for each number of a vector's array where it
fuses their concatenation: with an Atari network's 678 thousand numbers, that took nearly half of an update of DQN."""


def joined(tree: ArrayTree) -> tuple[Parts, Callable[[Parts], ArrayTree]]:
    """Joins the small arrays of a tree to one vector, which comes first; the second result makes the tree again."""
    # The vector first, if there is one, then the large arrays in their order.
    leaves, structure = jax.tree.flatten(tree)
    alone = [leaf.size >= _LARGE for leaf in leaves]
    vector, separate = ravel_pytree([leaf for leaf, large in zip(leaves, alone) if not large])
    parts = tuple(leaf for leaf, large in zip(leaves, alone) if large)

    def restore(parts: Parts) -> ArrayTree:
        small, large = (separate(parts[0]), parts[1:]) if vector.size else ([], parts)
        each = {True: iter(large), False: iter(small)}
        return structure.unflatten([next(each[is_large]) for is_large in alone])

    return (vector, *parts) if vector.size else parts, restore


class Optimizer(NamedTuple):
    """An optimiser of trees of float32 arrays.

    Attributes:
      transformation: of the `joined` gradient, without learning rate or sign.
      l2_cost: c of a further loss c |params|^2, whose gradient is part of the one that is clipped; 0 for none.
    """

    transformation: optax.GradientTransformation
    l2_cost: float = 0.0

    def init(self, params: ArrayTree) -> ArrayTree:
        """The optimiser's state for parameters."""
        return self.transformation.init(joined(params)[0])

    def step(
        self,
        grads: ArrayTree,
        opt_state: ArrayTree,
        params: ArrayTree,
        *,
        learning_rate: jax.Array,
        max_grad_norm: jax.Array,
    ) -> tuple[ArrayTree, ArrayTree, jax.Array]:
        """Clips by global norm, transforms, and moves the parameters by -learning_rate.

        Args:
          grads: of the loss.
          opt_state: of `init`, or the last step's.
          params: the parameters.
          learning_rate: float32 [].
          max_grad_norm: float32 [], the gradient's largest global norm.

        Returns:
          New parameters, new optimiser state, and the gradient's norm before clipping.
        """
        parts, restore = joined(params)
        gradient = joined(grads)[0]
        parts, opt_state, norm = self.step_joined(
            gradient, opt_state, parts, learning_rate=learning_rate, max_grad_norm=max_grad_norm
        )
        return restore(parts), opt_state, norm

    def step_joined(
        self,
        gradient: Parts,
        opt_state: ArrayTree,
        params: Parts,
        *,
        learning_rate: jax.Array,
        max_grad_norm: jax.Array,
    ) -> tuple[Parts, ArrayTree, jax.Array]:
        """`step` for parameters and a gradient that are `joined` already."""
        if self.l2_cost:
            gradient = jax.tree.map(lambda g, x: g + 2.0 * self.l2_cost * x, gradient, params)
        # Clipping by global norm (Pascanu et al. 2013, algorithm 1).
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in gradient))
        scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
        clipped = tuple(scale * x for x in gradient)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
            updates, opt_state = self.transformation.update(clipped, opt_state, params)  # type: ignore[assignment]
        return jax.tree.map(lambda x, update: x - learning_rate * update, params, updates), opt_state, norm
