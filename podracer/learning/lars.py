"""Clipped LARS (Mei et al. 2023, SpeedyZero, section 4.3): momentum whose steps are no larger than weights allow.

    lambda = min(eta |w| / (|g| + beta |w|), 1)         of each array w with gradient g, after clipping by global norm
    m <- mu m + lambda (g + beta w);   w <- w - lr m

You et al. 2017's LARS also lengthens steps where gradients are small, which the clip at 1 keeps from happening. It
begins late: heads that begin at 0 could never leave it, for no step is larger than a part of their size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracer.learning.optimizer import clipping
from podracer.types import ArrayTree


class LARSState(NamedTuple):
    """The optimiser's state: m of every array, whether lambda counts yet (bool []), and steps so far (int32 [])."""

    momentum: ArrayTree
    active: jax.Array
    steps: jax.Array


class ClippedLARS(NamedTuple):
    """The optimiser.

    Attributes:
      late: `(params) -> arrays` that must have grown to a norm of `LARGE` before lambda counts.
      start: steps before which it does not count either.
      eta: the largest step of an array by its norm.
      eta_vectors: of those with one dim: biases, and scales and offsets of norms.
      momentum: mu.
      decay: beta; 2 c for a loss c |w|^2.
    """

    late: Callable[[ArrayTree], Sequence[jax.Array]]
    start: int
    eta: float = 0.03
    eta_vectors: float = 0.05
    momentum: float = 0.9
    decay: float = 1e-4

    @property
    def uses(self) -> tuple[str, ...]:
        return ("learning_rate",)

    def pack(self, tree: ArrayTree) -> tuple[ArrayTree, Callable[[ArrayTree], ArrayTree]]:
        return tree, lambda packed: packed

    def init(self, params: ArrayTree, hyper: Mapping[str, jax.Array]) -> LARSState:
        self.late(params)  # which may say that the model has none
        return LARSState(jax.tree.map(jnp.zeros_like, params), jnp.bool_(False), jnp.int32(0))

    def step(
        self,
        grads: ArrayTree,
        opt_state: LARSState,
        params: ArrayTree,
        *,
        learning_rate: jax.Array | None,
        hyper: Mapping[str, jax.Array],
    ) -> tuple[ArrayTree, LARSState, jax.Array]:
        """As `optimizer.step`: new parameters, the new state and the gradient's norm before clipping."""
        norm, clip = clipping(grads, hyper["max_grad_norm"])
        # lambda counts once the heads have grown, and from then on.
        grown = jnp.all(jnp.stack([jnp.linalg.norm(w) >= LARGE for w in self.late(params)]))
        active = opt_state.active | ((opt_state.steps >= self.start) & grown)

        def new_momentum(m: jax.Array, g: jax.Array, w: jax.Array) -> jax.Array:
            g = clip * g
            eta, size = self.eta_vectors if w.ndim <= 1 else self.eta, jnp.sqrt(jnp.sum(jnp.square(w)))
            whole = jnp.sqrt(jnp.sum(jnp.square(g))) + self.decay * size
            ratio = jnp.minimum(eta * size / jnp.where(whole > 0, whole, 1.0), 1.0)
            ratio = jnp.where(active & (size > 0) & (whole > 0), ratio, 1.0)
            return self.momentum * m + ratio * (g + self.decay * w)

        momentum = jax.tree.map(new_momentum, opt_state.momentum, grads, params)
        params = jax.tree.map(lambda w, m: w - learning_rate * m, params, momentum)
        return params, LARSState(momentum, active, opt_state.steps + 1), norm


LARGE = 0.1
"""The norm at which an array that began at 0 counts as grown."""
