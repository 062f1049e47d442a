"""Action values as means or as distributions of returns, and the losses of DQN's family.

    z <- R + G z'        z: the distribution of (x_0, a_0); z': that of (x_m, a*), by the target network

Either is K numbers an action. R and G are those of `returns.n_step_transition`. Targets are constants: gradients are
with respect to what is predicted alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import topology

Kind = Literal["mean", "categorical", "quantile"]


class ValueDistribution(NamedTuple):
    """A way to represent the values of actions.

    Attributes:
      size: K, how many numbers an action has.
      mean: `([..., K]) -> float32 [...]`; the action value, by which actions are compared.
      target: `(bootstrap [B, K], R [B], G [B]) -> [B, K]`; R + G times what is bootstrapped from.
      error: `(predicted [B, K], target [B, K]) -> (loss [B], priority [B])`, float32; of what is predicted for an
        action against a constant target, and how surprising that was.
      largest: the largest return that it knows, the least being -largest; None for any.
    """

    size: int
    mean: Callable[[jax.Array], jax.Array]
    target: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    error: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    largest: float | None = None

    def errors(
        self, predicted: jax.Array, bootstrap: jax.Array, R: jax.Array, G: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The error of what is predicted against R + G times what is bootstrapped from."""
        return self.error(predicted, lax.stop_gradient(self.target(bootstrap, R, G)))


def make(kind: Kind, *, max_error: float, num_bins: int, max_value: float) -> ValueDistribution:
    """The representation of a name.

    Args:
      kind: "mean", "categorical" or "quantile".
      max_error: of a mean, the largest error that its gradient follows.
      num_bins: K of a distribution.
      max_value: the largest return that a categorical one knows; the least is -max_value.
    """
    if kind == "mean":
        return mean(max_error)
    return categorical(num_bins, max_value) if kind == "categorical" else quantile(num_bins)


def mean(max_error: float) -> ValueDistribution:
    """The expected return alone, by Huber's loss: the gradient is the error within +-`max_error` (Mnih et al. 2015).

    Where errors are larger, that is the median and not the mean of the targets, and no contraction: if one transition
    in ten ends an episode, the nine others can raise each other's values for ever. `inf` is for squared errors.
    """

    def target(bootstrap: jax.Array, R: jax.Array, G: jax.Array) -> jax.Array:
        return (R + G * bootstrap[..., 0])[..., None]

    def error(predicted: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        error = target[..., 0] - predicted[..., 0]
        return huber(error, max_error), jnp.abs(error)

    return ValueDistribution(1, lambda x: x[..., 0], target, error)


def categorical(num_bins: int, max_value: float) -> ValueDistribution:
    """Logits of K returns z, evenly spaced in [-max_value, max_value] (Bellemare et al. 2017).

    The loss is the cross-entropy to the target as `project` sees it; the priority is its excess over the target's
    entropy, which is their Kullback-Leibler divergence (Hessel et al. 2018).
    """
    z = np.linspace(-max_value, max_value, num_bins, dtype=np.float32)

    def target(bootstrap: jax.Array, R: jax.Array, G: jax.Array) -> jax.Array:
        return project(jax.nn.softmax(bootstrap), z, R, G)

    def error(predicted: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        cross_entropy = -jnp.sum(target * jax.nn.log_softmax(predicted), axis=-1)
        return cross_entropy, cross_entropy - jnp.sum(jax.scipy.special.entr(target), axis=-1)

    def expectation(x: jax.Array) -> jax.Array:
        # Accelerators round a product's operands by default, and values by more than actions differ.
        return jnp.matmul(jax.nn.softmax(x), z, precision=lax.Precision.HIGHEST)

    return ValueDistribution(num_bins, expectation, target, error, max_value)


def project(probs: jax.Array, z: np.ndarray | jax.Array, R: jax.Array, G: jax.Array) -> jax.Array:
    """The distribution of R + G z on the atoms themselves (Bellemare et al. 2017, equation 7), float32 [B, K].

    Each return's probability goes to the two atoms around it, the nearer the more; beyond the ends, to the last atom.

    Args:
      probs: [B, K]; of the atoms before.
      z: [K]; evenly spaced, increasing.
      R: [B].
      G: [B].
    """
    moved = jnp.clip(R[:, None] + G[:, None] * z[None], z[0], z[-1])
    if not topology.on_cpu():
        distance = jnp.abs(moved[:, None, :] - z[None, :, None]) / (z[1] - z[0])
        return jnp.sum(probs[:, None, :] * jnp.maximum(0.0, 1.0 - distance), axis=-1)

    # XLA:CPU does not vectorise a sum over K^2 numbers, and takes a hundred times as long for it as for K sums of K.
    def add(j: jax.Array, total: jax.Array) -> jax.Array:
        at, mass = (lax.dynamic_slice_in_dim(x, j, 1, axis=1) for x in (moved, probs))
        return total + mass * jnp.maximum(0.0, 1.0 - jnp.abs(at - z[None]) / (z[1] - z[0]))

    return lax.fori_loop(0, len(z), add, jnp.zeros_like(moved))


def quantile(num_bins: int) -> ValueDistribution:
    """The quantiles (i + 1/2) / K of the return, by quantile regression with Huber's loss (Dabney et al. 2018).

    The priority is the loss.
    """
    tau = (np.arange(num_bins, dtype=np.float32) + np.float32(0.5)) / np.float32(num_bins)

    def target(bootstrap: jax.Array, R: jax.Array, G: jax.Array) -> jax.Array:
        return R[:, None] + G[:, None] * bootstrap

    def error(predicted: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        error = target[:, None, :] - predicted[:, :, None]
        slope = jnp.abs(tau[None, :, None] - (error < 0).astype(jnp.float32))
        loss = jnp.sum(jnp.mean(slope * huber(error), axis=-1), axis=-1)
        return loss, loss

    return ValueDistribution(num_bins, lambda x: jnp.mean(x, axis=-1), target, error)


def least(values: jax.Array, means: jax.Array) -> jax.Array:
    """The values [B, K] of the function of least mean, of N functions' values [N, B, K] and means [N, B].

    The choice is constant. The gradient of `jnp.min` is 0 / 0 where the compiler rounds what it compares in two ways.
    """
    chosen = jnp.arange(len(means), dtype=jnp.int32)[:, None] == jnp.argmin(means, axis=0)[None]
    return jnp.sum(jnp.where(chosen[..., None], values, 0.0), axis=0)


def huber(x: jax.Array, threshold: float = 1.0) -> jax.Array:
    """x^2 / 2 within +-threshold, and a line of the slope +-threshold beyond."""
    inside = jnp.minimum(jnp.abs(x), threshold)
    return inside * (jnp.abs(x) - 0.5 * inside)
