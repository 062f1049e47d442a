"""Numbers as distributions over bins, which networks learn by cross-entropy (Schrittwieser et al. 2020, appendix F).

    x  ->  h(x)  ->  weights of the two nearest bins         h: `podracer.returns.rescale`

A network that says which bin has gradients of one size whatever the returns of a task are.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer.returns import rescale, unrescale
from podracer.types import Caution

SLACK = 1.001
"""The factor by which a target may exceed the largest number: less is a rounding."""


def largest_return(discount: float) -> float:
    """The largest discounted sum of rewards in [-1, 1], of 1,000 of them where it has no limit."""
    return 1.0 / max(1.0 - discount, 1e-3)


def caution(largest: float, remedy: str) -> Caution:
    """A warning for runs in which more than one target in a hundred is beyond the largest number."""
    advice = f"rewards or values are beyond {largest:g} and cannot be told apart; {remedy}"
    return Caution("value/outside", 0.01, advice)


class Bins(NamedTuple):
    """K bins, evenly spaced in h(x) between -h(`largest`) and h(`largest`), the middle one at 0.

    Attributes:
      size: K, odd.
      largest: the largest number they can stand for; what is beyond is clipped.
    """

    size: int
    largest: float

    def outside(self, x: jax.Array) -> jax.Array:
        """Marks numbers [...] that are clipped by more than a rounding, bool."""
        return jnp.abs(x) > SLACK * self.largest

    @property
    def positions(self) -> np.ndarray:
        """Positions of the bins in h(x): float32 [K]."""
        with jax.ensure_compile_time_eval():
            limit = float(rescale(jnp.float32(self.largest)))
        return np.linspace(-limit, limit, self.size, dtype=np.float32)

    def two_hot(self, x: jax.Array) -> jax.Array:
        """Weights [..., K] of numbers [...]: of the two nearest bins, the nearer the more; they sum to 1."""
        positions = self.positions
        y = jnp.clip(rescale(x), positions[0], positions[-1])[..., None]
        at = positions.reshape((1,) * x.ndim + (-1,))
        return jnp.maximum(0.0, 1.0 - jnp.abs(y - at) / (positions[1] - positions[0]))

    def expectation(self, logits: jax.Array) -> jax.Array:
        """The numbers [...] that logits [..., K] stand for: h^-1 of the mean bin."""
        # Accelerators round a product's operands by default, and 90 to within 0.1, of which searches choose by 0.01.
        mean = jnp.matmul(jax.nn.softmax(logits), self.positions, precision=lax.Precision.HIGHEST)
        return unrescale(mean)

    def cross_entropy(self, logits: jax.Array, x: jax.Array) -> jax.Array:
        """Cross-entropy [...] between the two-hot code of numbers x [...] and softmax(`logits` [..., K])."""
        return -jnp.sum(self.two_hot(x) * jax.nn.log_softmax(logits), axis=-1)
