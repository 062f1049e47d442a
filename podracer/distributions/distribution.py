"""The contract of action distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax


class Distribution(NamedTuple):
    """A family of distributions over one action space.

    Attributes:
      num_outputs: size of the policy head's last axis.
      state_independent_scale: True if the second half of the outputs, which is for standard deviations, does not depend
        on the observation (free parameters of the network).
      sample: `(outputs [..., num_outputs], key) -> sample`.
      mode: `(outputs) -> sample`; the most likely sample. Squashed by tanh it is the median action.
      log_prob: `(outputs, sample) -> float32 [...]`.
      entropy: `(outputs) -> float32 [...]`.
      to_action: `(sample) -> action` within the action space.
      std: `(outputs) -> float32 [...]`, the mean standard deviation of a sample's elements; None to report none.
    """

    num_outputs: int
    state_independent_scale: bool
    sample: Callable[[jax.Array, jax.Array], jax.Array]
    mode: Callable[[jax.Array], jax.Array]
    log_prob: Callable[[jax.Array, jax.Array], jax.Array]
    entropy: Callable[[jax.Array], jax.Array]
    to_action: Callable[[jax.Array], jax.Array]
    std: Callable[[jax.Array], jax.Array] | None = None

    def act(self, outputs: jax.Array, key: jax.Array, evaluation: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
        """An action of a policy, and what learning needs to know of it as `extras`.

        Args:
          outputs: [B, num_outputs]; of the policy.
          key: consumed.
          evaluation: whether to take the mode. Static.

        Returns:
          The action, its `log_prob`, and the `sample` that it was made of, unless that is the action.
        """
        sample = self.mode(outputs) if evaluation else self.sample(outputs, key)
        action = self.to_action(sample)
        extras = {"log_prob": self.log_prob(outputs, sample)}
        if sample is not action:
            extras["sample"] = sample
        return action, extras
