"""Returns: V-trace, generalised advantages, n-step returns and transitions, and the rescaling of values.

All sequences are time-major, [T, B] for transitions and [T+1, B] for rows. A masked transition (into a `first` row)
has importance ratio 0: its temporal difference and its trace vanish, so nothing leaks across an episode boundary.
Nothing here stops gradients; pass values with `stop_gradient` where targets should be constants.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from podracer.topology import scans
from podracer.types import TimeStep, Trajectory


class Transitions(NamedTuple):
    """The aligned transitions of a trajectory, each float32 [T, B]; `mask` is 0 on a transition into a `first` row."""

    reward: jax.Array
    discount: jax.Array
    mask: jax.Array


def transitions(trajectory: Trajectory) -> Transitions:
    """Aligns rewards and discounts with the actions that led to them."""
    # Row t + 1 has the reward and discount of transition t.
    next_rows = jax.tree.map(lambda x: x[1:], trajectory.timesteps._replace(observation=()))
    return Transitions(next_rows.reward, next_rows.discount, 1.0 - next_rows.first.astype(jnp.float32))


def _check_aligned(values: jax.Array, step: Transitions) -> None:
    """Refuses rows that are not one more than the transitions between them, while tracing."""
    chex.assert_type([values, *step], float)
    chex.assert_equal_shape(step)
    T, *lanes = step.reward.shape
    chex.assert_shape(values, (T + 1, *lanes))


class VTraceReturns(NamedTuple):
    """Value targets and policy-gradient advantages, each float32 [T, B]; on masked transitions V itself, and 0."""

    targets: jax.Array
    advantages: jax.Array


def vtrace(
    values: jax.Array,
    step: Transitions,
    ratios: jax.Array,
    *,
    lambda_: jax.Array | float = 1.0,
    rho_bar: jax.Array | float = 1.0,
    c_bar: jax.Array | float = 1.0,
    rho_bar_pg: jax.Array | float = 1.0,
) -> VTraceReturns:
    """Computes V-trace (Espeholt et al. 2018, section 4.1, equation 1, and the policy gradient of section 4.2).

    `rlax.vtrace`, the oracle of the tests, fixes `c_bar` at 1 and has no mask.

    Args:
      values: [T+1, B]; the learner's V at every row.
      step: rewards, discounts (already times gamma) and masks, [T, B].
      ratios: [T, B]; pi(a|x) / mu(a|x), unclipped.
      lambda_: scales the trace coefficients c.
      rho_bar: clips the importance ratio of the temporal difference.
      c_bar: clips the trace coefficient.
      rho_bar_pg: clips the importance ratio of the policy gradient.
    """
    _check_aligned(values, step)
    chex.assert_equal_shape([ratios, step.reward])
    v_tm1, v_t = values[:-1], values[1:]
    ratios = jnp.where(step.mask > 0, ratios, 0.0)  # not a product: a ratio may have overflowed
    # delta_t V = rho_t (r_t + gamma_t V(x_{t+1}) - V(x_t)), and v_s - V(x_s) is the sum of traces times deltas.
    deltas = jnp.minimum(rho_bar, ratios) * (step.reward + step.discount * v_t - v_tm1)
    traces = step.discount * lambda_ * jnp.minimum(c_bar, ratios)
    errors = discounted_sum(deltas, traces)
    targets = v_tm1 + errors
    # The policy gradient weighs log pi by rho_s (r_s + gamma_s v_{s+1} - V(x_s)).
    targets_t = jnp.concatenate([targets[1:], values[-1:]])
    advantages = jnp.minimum(rho_bar_pg, ratios) * (step.reward + step.discount * targets_t - v_tm1)
    return VTraceReturns(targets, advantages)


def gae(values: jax.Array, step: Transitions, lambda_: jax.Array | float) -> jax.Array:
    """Computes generalised advantage estimates (Schulman et al. 2016, equation 16), [T, B]; 0 on masked transitions.

    Args:
      values: [T+1, B].
      step: rewards, discounts (already times gamma) and masks, [T, B].
      lambda_: the trace parameter.
    """
    _check_aligned(values, step)
    deltas = step.mask * (step.reward + step.discount * values[1:] - values[:-1])
    return discounted_sum(deltas, step.mask * step.discount * lambda_)


def discounted_sum(x: jax.Array, decay: jax.Array) -> jax.Array:
    """Computes y_t = x_t + decay_t * y_{t+1}, with y_T = 0, over the leading axis; x and decay are [T, ...]."""
    chex.assert_equal_shape([x, decay])
    return scans.linear_recurrence(decay, x, jnp.zeros_like(x[0]), reverse=True)


def running_return(timestep: TimeStep, discount: jax.Array, before: jax.Array) -> jax.Array:
    """Computes the discounted sum of an episode's rewards so far, [B], from that of the row before."""
    return timestep.reward + discount * jnp.where(timestep.first, 0.0, before)


def n_step(values: jax.Array, step: Transitions, n: int, horizon: jax.Array | None = None) -> jax.Array:
    """Computes n-step returns that bootstrap from `values`, [T, B]; on masked transitions the value itself.

    The horizon is shorter at the end of the rows, before a truncation and before a break: the return then bootstraps
    from the last row of its episode. A termination ends it without a value.

    Args:
      values: [T+1, B]; the bootstrap value of every row.
      step: rewards, discounts (already times gamma) and masks, [T, B].
      n: number of rewards.
      horizon: int32 [B] or [T+1, B]; number of rewards in each lane or row, n if None; no row's may be larger than the
        next row's.
    """
    _check_aligned(values, step)
    if horizon is not None:
        chex.assert_type(horizon, int)
    # The return of i + 1 steps from row t is r_t + d_t times that of i steps from row t + 1.
    returns = values
    for i in range(n):
        longer = step.reward + step.discount * returns[1:]
        longer = jnp.concatenate([jnp.where(step.mask > 0, longer, values[:-1]), values[-1:]])
        returns = longer if horizon is None else jnp.where(i < horizon, longer, returns)
    return returns[:-1]


def reached(mask: jax.Array) -> jax.Array:
    """Computes 1 for rows that unmasked transitions lead to from row 0, else 0: masks [K, B] to [K+1, B]."""
    return jnp.concatenate([jnp.ones_like(mask[:1]), jnp.cumprod(mask, axis=0)])


def prefixes(reward: jax.Array, horizon: int) -> jax.Array:
    """Computes sums of rewards since row 0, or since the last multiple of `horizon` (Ye et al. 2021): [K, B] to [K, B].

    The k-th, of k from 1, is r_b + ... + r_k with b = horizon floor((k - 1) / horizon) + 1.
    """
    parts = [reward[i : i + horizon] for i in range(0, len(reward), horizon)]
    return jnp.concatenate([jnp.cumsum(part, axis=0) for part in parts])


class NStep(NamedTuple):
    """The transition of up to n steps that opens a sequence, each [B] (see `n_step_transition`).

    Attributes:
      reward: float32; R, the discounted sum of its rewards.
      discount: float32; G, the weight of the value of row m; 0 if the episode terminated before it.
      length: int32; m, the number of transitions, from 1 to n.
    """

    reward: jax.Array
    discount: jax.Array
    length: jax.Array


def n_step_transition(step: Transitions, n: int) -> NStep:
    """Combines n transitions into one; fewer, m of at least 1, before a masked one.

    R = sum_{i<m} (prod_{j<i} d_j) r_i and G = prod_{i<m} d_i: the return of n steps from row 0 is R + G V(row m), and
    no other row is needed for it.

    Args:
      step: rewards, discounts (already times gamma) and masks, [n, B] or longer; transition 0 is not masked.
      n: largest number of rewards.
    """
    chex.assert_equal_shape(step)
    chex.assert_axis_dimension_gteq(step.reward, 0, n)
    reward, discount = step.reward[0], step.discount[0]
    unmasked = jnp.ones(reward.shape, bool)
    length = jnp.ones(reward.shape, jnp.int32)
    for i in range(1, n):
        unmasked &= step.mask[i] > 0
        reward = jnp.where(unmasked, reward + discount * step.reward[i], reward)
        discount = jnp.where(unmasked, discount * step.discount[i], discount)
        length += unmasked.astype(jnp.int32)
    return NStep(reward, discount, length)


def rescale(x: jax.Array, eps: float = 1e-3) -> jax.Array:
    """Computes h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x (Pohlen et al. 2018, proposition A.2), float32."""
    return x / (jnp.sqrt(jnp.abs(x) + 1.0) + 1.0) + eps * x


def unrescale(y: jax.Array, eps: float = 1e-3) -> jax.Array:
    """Inverts `rescale`, exact to a few ulp (`rlax.signed_parabolic` is off by 3e-4 near 0).

    With d = sqrt(|x| + 1) - 1, |y| = (1 + 2 eps) d + eps d^2: the positive root, in the form without cancellation.
    """
    b = 1.0 + 2.0 * eps
    d = 2.0 * jnp.abs(y) / (b + jnp.sqrt(b * b + 4.0 * eps * jnp.abs(y)))
    return jnp.sign(y) * d * (d + 2.0)
