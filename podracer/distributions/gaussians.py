"""Gaussians in a Box: clipped to its bounds, or squashed into them by tanh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import spaces, topology
from podracer.distributions.boxes import UnitBox, unit_box
from podracer.distributions.distribution import Distribution

Squashing = Literal["clipped", "tanh"]
"""The way from a Gaussian's samples to the bounds of a Box."""


def standard_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws what `jax.random.normal` does; on CPU in a loop over the first axis, whose result XLA keeps.

    Without the loop, all that reads the numbers makes them once more from their bits.
    """
    if not topology.on_cpu():
        return jax.random.normal(key, shape)
    uniform = jax.random.uniform(key, shape, minval=jnp.nextafter(jnp.float32(-1.0), 0.0))
    return lax.map(lambda x: jnp.sqrt(jnp.float32(2.0)) * lax.erf_inv(x), uniform)


class Std(NamedTuple):
    """The standard deviations of a Gaussian policy as functions of a network's outputs, which are 0 for `init`.

    Attributes:
      of_state: True for softplus(output + c) + `least`, False for `init` exp(output).
      init: that of outputs of 0.
      least: the least one.
      most: the largest one, or None.
    """

    of_state: bool = False
    init: float = 1.0
    least: float = 0.0
    most: float | None = None

    def log(self, outputs: jax.Array) -> jax.Array:
        """The logarithms of standard deviations."""
        if not self.of_state:
            log_std = outputs if self.init == 1.0 else outputs + np.log(self.init)
        else:
            # The inverse of softplus, finite where `init` is the least.
            c = float(np.log(np.expm1(max(self.init - self.least, 1e-6))))
            log_std = jnp.log(jnp.maximum(jax.nn.softplus(outputs + c) + self.least, 1e-8))
        if not self.least and self.most is None:
            return log_std
        low = np.log(self.least) if self.least else -np.inf
        return _held(log_std, float(low), float(np.inf if self.most is None else np.log(self.most)))


FREE_STD = Std()
"""Parameters of the network, without limits."""


def check_std(init: float | None, least: float, most: float | None) -> None:
    """Checks the settings `init_std`, `min_std` and `max_std` of an agent.

    Raises:
      ValueError: where the first is not between the others.
    """
    top = float("inf") if most is None else most
    if init is not None and not least <= init <= top:
        limit = "max_std" if most is None else f"max_std={most}"
        nearest = min(max(init, least), top)
        raise ValueError(f"init_std={init} must be between min_std={least} and {limit}; use {nearest}.")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _held(x: jax.Array, low: float, high: float) -> jax.Array:
    """Clips numbers; a gradient that leads back from beyond a limit passes, so that none is stuck there."""
    return jnp.clip(x, low, high)


def _held_forward(x: jax.Array, low: float, high: float) -> tuple[jax.Array, jax.Array]:
    return jnp.clip(x, low, high), x


def _held_backward(low: float, high: float, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    outwards = ((x < low) & (cotangent > 0)) | ((x > high) & (cotangent < 0))  # descent moves against the gradient
    return (jnp.where(outwards, 0.0, cotangent),)


_held.defvjp(_held_forward, _held_backward)


def clipped_gaussian(space: spaces.Box, std: Std = FREE_STD) -> Distribution:
    """Makes a diagonal Gaussian clipped to a Box; outputs are means and numbers for `std`, [..., 2 * size].

    Samples are unclipped, in units where the Box is [-1, 1]; log-probabilities and entropies are of the unclipped
    Gaussian (clipping is part of the environment, so the gradient stays unbiased).

    Raises:
      ValueError: if the Box is not bounded.
    """
    units = _bounded(space, "a clipped Gaussian")
    return _gaussian(units.size, std, Gaussian, units.to_action)


def tanh_gaussian(space: spaces.Box, std: Std = FREE_STD) -> Distribution:
    """Makes a diagonal Gaussian squashed into a Box by tanh; outputs are means and numbers for `std`, [..., 2 * size].

    A sample u is of the Gaussian, for the inverse of tanh is infinite at a bound. Log-probabilities are those of u, in
    whose ratios the slope of tanh cancels. The entropy is that of tanh(u), in units where the Box is [-1, 1].

    Raises:
      ValueError: if the Box is not bounded.
    """
    units = _bounded(space, "a squashed Gaussian")
    law = _gaussian(units.size, std, TanhGaussian, lambda u: units.to_action(jnp.tanh(u)))
    return law._replace(std=lambda outputs: jnp.mean(jnp.exp(std.log(jnp.split(outputs, 2, axis=-1)[1])), axis=-1))


def _bounded(space: spaces.Box, what: str) -> UnitBox:
    if not space.bounded:
        raise ValueError(
            f"action space {space} has no finite bounds; {what} needs them: bound actions, such as to +-1."
        )
    return unit_box(space)


def _gaussian(size: int, std: Std, kind: Any, to_action: Callable[[jax.Array], jax.Array]) -> Distribution:
    """A diagonal Gaussian of A = `size` elements, whose entropy is that of `kind`, a class of laws."""

    def law(outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, raw = jnp.split(outputs, 2, axis=-1)
        return mean, std.log(raw)

    def sample(outputs: jax.Array, key: jax.Array) -> jax.Array:
        found = Gaussian(*law(outputs))
        return found.sample(jax.random.normal(key, found.mean.shape))

    return Distribution(
        num_outputs=2 * size,
        state_independent_scale=not std.of_state,
        sample=sample,
        mode=lambda outputs: law(outputs)[0],
        log_prob=lambda outputs, u: Gaussian(*law(outputs)).log_prob(u),
        entropy=lambda outputs: kind(*law(outputs)).entropy(),
        to_action=to_action,
    )


class Gaussian(NamedTuple):
    """A diagonal Gaussian.

    Attributes:
      mean: float32 [..., A].
      log_std: float32 [..., A].
    """

    mean: jax.Array
    log_std: jax.Array

    def sample(self, noise: jax.Array) -> jax.Array:
        """u [..., A], of standard normal noise [..., A]."""
        return self.mean + jnp.exp(self.log_std) * noise

    def log_prob(self, u: jax.Array) -> jax.Array:
        """The log-density, float32 [...]."""
        return jnp.sum(self.log_probs(u), axis=-1)

    def log_probs(self, u: jax.Array) -> jax.Array:
        """The log-density of each element, float32 [..., A]."""
        z = (u - self.mean) * jnp.exp(-self.log_std)
        return -0.5 * jnp.square(z) - self.log_std - 0.5 * np.log(2 * np.pi)

    def entropy(self) -> jax.Array:
        """The entropy, float32 [...]."""
        return jnp.sum(self.log_std + 0.5 * np.log(2 * np.pi * np.e), axis=-1)


class TanhGaussian(NamedTuple):
    """A diagonal Gaussian whose sample u is squashed to tanh(u) in [-1, 1] (Haarnoja et al. 2018, appendix C).

    Attributes:
      mean: float32 [..., A]; of u.
      log_std: float32 [..., A]; of u.
    """

    mean: jax.Array
    log_std: jax.Array

    def sample(self, noise: jax.Array) -> jax.Array:
        """u [..., A], of standard normal noise [..., A]."""
        return Gaussian(*self).sample(noise)

    def log_prob(self, u: jax.Array) -> jax.Array:
        """The log-density of tanh(u) on [-1, 1]^A, float32 [...]; finite for every u."""
        return jnp.sum(Gaussian(*self).log_probs(u) - _log_slope(u), axis=-1)

    def entropy(self) -> jax.Array:
        """The entropy of tanh(u), float32 [...].

        It is that of u plus the mean of the logarithm of tanh's slope, by Gauss-Hermite quadrature: for means up to 4
        the error of an element is 2e-7 at a standard deviation of 0.7, 1.4e-5 at 1, and 3e-3 at 2.
        """
        nodes, weights = (x.reshape((1,) * self.mean.ndim + (-1,)) for x in (NODES, NODE_WEIGHTS))
        u = self.mean[..., None] + jnp.exp(self.log_std)[..., None] * nodes
        return Gaussian(*self).entropy() + jnp.sum(_log_slope(u) * weights, axis=(-2, -1))


NODES, NODE_WEIGHTS = (x.astype(np.float32) for x in np.polynomial.hermite_e.hermegauss(16))
NODE_WEIGHTS /= NODE_WEIGHTS.sum()
"""Nodes and weights of a mean over a standard normal number."""


def _log_slope(u: jax.Array) -> jax.Array:
    """log(1 - tanh(u)^2) without the difference (Haarnoja et al. 2018, equation 21)."""
    return 2.0 * (np.log(2) - u - jax.nn.softplus(-2.0 * u))


def bounded_log_std(raw: jax.Array, min_std: float, max_std: float) -> jax.Array:
    """Squashes numbers into [log min_std, log max_std]."""
    low, high = np.log(min_std), np.log(max_std)
    return low + 0.5 * (high - low) * (jnp.tanh(raw) + 1.0)


def raw_of_std(std: float, min_std: float, max_std: float) -> float:
    """The number that `bounded_log_std` maps to log std, which is within the bounds; finite at the bounds too."""
    low, high = np.log(min_std), np.log(max_std)
    share = 0.5 if high == low else (np.log(std) - low) / (high - low)
    return float(np.arctanh(np.clip(2.0 * share - 1.0, -0.999, 0.999)))
