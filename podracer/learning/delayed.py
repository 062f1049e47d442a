"""Updates of which only every so many are of the policy too (Fujimoto et al. 2018, section 5.2)."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from podracer import trajectories
from podracer.types import Batch, LearnerState, Metrics


class DelayedUpdateFn(Protocol):
    """One update."""

    def __call__(
        self, learner: LearnerState, batch: Batch, progress: jax.Array, key: jax.Array, *, with_policy: bool
    ) -> tuple[LearnerState, Metrics, jax.Array]:
        """Makes it; `with_policy` is static, and adds metrics of the policy's."""
        ...


def block(
    update: DelayedUpdateFn, interval: int, learner: LearnerState, batch: Batch, progress: jax.Array, key: jax.Array
) -> tuple[LearnerState, Metrics, jax.Array]:
    """Makes `interval` updates, the last one of the policy too: blocks need no branch, which stalls accelerators.

    Args:
      update: one of them.
      interval: D.
      learner: the state before.
      batch: samples of all D updates, in their order.
      progress: float32 []; the share of the run that is done.
      key: consumed.

    Returns:
      The state after, and priorities of all samples. Metrics are sums over D updates; those of the policy count D
      times, so that their mean over updates is right.
    """
    if interval == 1:
        return update(learner, batch, progress, key, with_policy=True)
    numbered = trajectories.split_batch(batch, interval), jax.random.split(key, interval)
    before, (last, last_key) = (jax.tree.map(lambda x, i=i: x[i], numbered) for i in (slice(-1), -1))

    def of_critics(learner: LearnerState, numbered: Any) -> tuple[LearnerState, Any]:
        batch, key = numbered
        learner, *results = update(learner, batch, progress, key, with_policy=False)
        return learner, results

    learner, (sums, priorities) = lax.scan(of_critics, learner, before)
    learner, metrics, priority = update(learner, last, progress, last_key, with_policy=True)
    metrics = {name: x + jnp.sum(sums[name], axis=0) if name in sums else interval * x for name, x in metrics.items()}
    return learner, metrics, jnp.append(priorities, priority)
