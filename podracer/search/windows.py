"""What a model that is unrolled from the first row of a window should say at the rows behind it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracer import returns
from podracer.learning.bins import Bins
from podracer.types import TimeStep


class Targets(NamedTuple):
    """At rows 0 to K of each sample, [K+1, B].

    Attributes:
      reward: float32; of the transition into the row, or the sum of rewards since a horizon began; of row 0 none.
      value: float32; z.
      policy: float32 [K+1, B, A]; the search's.
      valid: float32; 0 behind the end of an episode, where nothing is learnt, but of a termination that absorbs.
      acted: float32; 0 also at the last row of an episode, from which nothing was done.
    """

    reward: jax.Array
    value: jax.Array
    policy: jax.Array
    valid: jax.Array
    acted: jax.Array


def targets(
    step: returns.Transitions,
    row_discount: jax.Array,
    policy: jax.Array,
    value: jax.Array,
    *,
    unroll_length: int,
    n_step: int,
    rewards_in_values: jax.Array | None = None,
    horizon: int = 1,
    absorbing: bool = False,
) -> Targets:
    """Targets of windows (Schrittwieser et al. 2020, section 3; Ye et al. 2021, sections 4.2 and 4.3).

    Args:
      step: rewards, discounts (already times gamma) and masks, [K+n, B]; transition 0 is not masked.
      row_discount: [K+n+1, B]; 0 at rows where an episode terminated.
      policy: [K+1, B, A] or longer; pi.
      value: [K+n+1, B]; nu, what the search or the network says of rows.
      unroll_length: K, steps that the model is unrolled.
      n_step: n, rewards in a value's target at most.
      rewards_in_values: int32 [B], or [R, B] of each row; how many there are in each value's, n if None.
      horizon: steps after which sums of rewards begin anew; 1 for each reward by itself.
      absorbing: whether rewards and values behind a termination are 0, whatever is done there, and are learnt
        (Schrittwieser et al. 2020, appendix G), or nothing is.
    """
    K = unroll_length
    # Nothing comes behind a row where the episode terminated; where it was cut, what was thought of it.
    z = returns.n_step(jnp.where(row_discount == 0, 0.0, value), step, n_step, rewards_in_values)[: K + 1]
    sums = returns.prefixes(step.reward[:K], horizon)
    valid = returns.reached(step.mask[:K])
    reward = jnp.concatenate([jnp.zeros_like(sums[:1]), sums])
    acted = valid * step.mask[: K + 1]
    if absorbing:
        terminal = (valid > 0) & (row_discount[: K + 1] == 0)
        behind = (jnp.cumsum(terminal, axis=0) > 0) & (valid == 0)
        reward, z = (jnp.where(behind, 0.0, x) for x in (reward, z))
        valid = jnp.where(behind, 1.0, valid)
    return Targets(reward, z, policy[: K + 1], valid, acted)


def outside(target: Targets, bins: Bins) -> jax.Array:
    """The share [B] of each sample's rewards and values that bins cannot tell apart from smaller ones."""
    beyond = bins.outside(target.reward) | bins.outside(target.value)
    return jnp.sum(jnp.where(beyond, target.valid, 0.0), axis=0) / jnp.maximum(jnp.sum(target.valid, axis=0), 1.0)


def errors(
    step: returns.Transitions,
    row_discount: jax.Array,
    value: jax.Array,
    n_step: int,
    rewards_in_values: jax.Array | None = None,
) -> jax.Array:
    """|nu - z| of all rows but the last, [R-1, B], for rows [R, B]; arguments as in `targets`, of R-1 transitions."""
    z = returns.n_step(jnp.where(row_discount == 0, 0.0, value), step, n_step, rewards_in_values)
    return jnp.abs(value[:-1] - z)


def transitions(rows: TimeStep, discount: jax.Array, clip_rewards: bool) -> returns.Transitions:
    """Of consecutive rows [T+1, B], with rewards in [-1, 1] where they are clipped, and discounts times gamma."""
    reward = jnp.clip(rows.reward, -1.0, 1.0) if clip_rewards else rows.reward
    return returns.Transitions(reward[1:], discount * rows.discount[1:], 1.0 - rows.first[1:].astype(jnp.float32))
