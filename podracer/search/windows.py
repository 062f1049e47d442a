"""Targets for a model unrolled K steps from the first row of a window."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer import returns
from podracer.learning.bins import Bins
from podracer.types import TimeStep, Trajectory


class Targets(NamedTuple):
    """At rows 0 to K of each sample, [K+1, B].

    Attributes:
      reward: float32; of the transition into the row, or the sum of rewards since a horizon began; 0 at row 0.
      value: float32; z.
      policy: float32 [K+1, B, A]; the search's.
      valid: float32; 0 after the end of an episode, where nothing is learnt, unless a termination absorbs.
      acted: float32; 0 also at the last row of an episode, where no action follows.
      ended: float32; 1 where an episode has terminated, at its last row and in the absorbing state.
    """

    reward: jax.Array
    value: jax.Array
    policy: jax.Array
    valid: jax.Array
    acted: jax.Array
    ended: jax.Array


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
      value: [K+n+1, B]; nu of the rows, by the search or the network.
      unroll_length: K, steps that the model is unrolled.
      n_step: n, rewards in a value's target at most.
      rewards_in_values: int32 [B], or [R, B] of each row; the number of rewards in each value's, n if None.
      horizon: steps after which sums of rewards begin anew; 1 for each reward by itself.
      absorbing: whether rewards and values after a termination are learnt to be 0 for any action (Schrittwieser et al.
        2020, appendix G); else nothing is learnt there.
    """
    K = unroll_length
    # z_k: n rewards, then nu; 0 after a termination, and nu of the last row where an episode was cut.
    z = returns.n_step(jnp.where(row_discount == 0, 0.0, value), step, n_step, rewards_in_values)[: K + 1]
    # The reward of step k, or the value prefix since the horizon began (Ye et al. 2021, section 4.2).
    sums = returns.prefixes(step.reward[:K], horizon)
    # The rows that real transitions lead to.
    valid = returns.reached(step.mask[:K])
    reward = jnp.concatenate([jnp.zeros_like(sums[:1]), sums])
    acted = valid * step.mask[: K + 1]
    terminal = (valid > 0) & (row_discount[: K + 1] == 0)
    ended = terminal.astype(jnp.float32)
    if absorbing:
        # Rows after a termination are an absorbing state.
        after = (jnp.cumsum(terminal, axis=0) > 0) & (valid == 0)
        reward, z = (jnp.where(after, 0.0, x) for x in (reward, z))
        valid, ended = (jnp.where(after, 1.0, x) for x in (valid, ended))
    return Targets(reward, z, policy[: K + 1], valid, acted, ended)


def of_trajectory(trajectory: Trajectory, discount: jax.Array, config: Any, **others: Any) -> Targets:
    """Targets of windows [K+n+2, B] by recorded policies and values, without the last row, which has none.

    Args:
      trajectory: of a replay.
      discount: gamma.
      config: of an agent, with `clip_rewards`, `unroll_length` and `n_step`.
      others: further arguments of `targets`.
    """
    timesteps = jax.tree.map(lambda x: x[:-1], trajectory.timesteps._replace(observation=()))
    step, extras = transitions(timesteps, discount, config.clip_rewards), trajectory.extras
    numbers = {"unroll_length": config.unroll_length, "n_step": config.n_step}
    return targets(step, timesteps.discount, extras["policy"], extras["value"], **numbers, **others)


def termination_loss(logit: jax.Array, ended: jax.Array) -> jax.Array:
    """Computes the binary cross-entropy [...] of logits [...] that an episode has terminated, and `Targets.ended`."""
    return jax.nn.softplus(logit) - ended * logit


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


def transitions(timesteps: TimeStep, discount: jax.Array, clip_rewards: bool) -> returns.Transitions:
    """Transitions of consecutive rows [T+1, B], with clipped rewards if asked for, and discounts times gamma."""
    reward = jnp.clip(timesteps.reward, -1.0, 1.0) if clip_rewards else timesteps.reward
    mask = 1.0 - timesteps.first[1:].astype(jnp.float32)
    return returns.Transitions(reward[1:], discount * timesteps.discount[1:], mask)


def rewards_in_values(age: jax.Array, config: Any) -> jax.Array:
    """The number of rewards in a value's target: `n_step`, and one less for every `correction_interval` of age.

    EfficientZero's off-policy correction (Ye et al. 2021, section 4.3).
    """
    lost = age // config.correction_interval if config.correction_interval else jnp.zeros_like(age)
    return jnp.clip(config.n_step - lost, 1, config.n_step)
