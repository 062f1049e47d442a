"""Distributions of choices, and of actions by their values."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import topology
from podracer.distributions.distribution import Distribution

FEW_VALUES = 8
"""The largest number of values whose distribution is computed column by column off CPU."""


def categorical(num_values: int) -> Distribution:
    """Makes a distribution of one choice; outputs are logits [..., num_values], samples int32 [...]."""

    def few() -> bool:
        return num_values <= FEW_VALUES and not topology.on_cpu()

    def sample(logits: jax.Array, key: jax.Array) -> jax.Array:
        # The inverse CDF takes one random number a row instead of one an action and no logarithms. Rounding leaves the
        # total off 1, and XLA's sum of many terms rises by an ulp where a term is 0: neither may draw such an action.
        uniform = jax.random.uniform(key, logits.shape[:-1])
        if few():
            return _sample_of_few(logits, uniform)
        probs = jax.nn.softmax(logits)
        cdf = jnp.where(probs > 0, jnp.cumsum(probs, axis=-1), 0.0)
        threshold = uniform[..., None] * jnp.max(cdf, axis=-1, keepdims=True)
        return jnp.argmax(cdf > threshold, axis=-1).astype(jnp.int32)

    def log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
        chex.assert_shape(logits, (*action.shape, num_values))
        if few():
            chosen = (jnp.where(action == i, x, 0.0) for i, x in enumerate(_log_softmax_of_few(logits)))
            return functools.reduce(jnp.add, chosen)
        # A comparison, not a gather: gathers of single elements are slow on CPU and TPU.
        chosen = action[..., None] == jnp.arange(num_values).reshape((1,) * action.ndim + (num_values,))
        return jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1) - jax.nn.logsumexp(logits, axis=-1)

    def entropy(logits: jax.Array) -> jax.Array:
        # An impossible action (logit -inf) contributes 0, not 0 * -inf; nor has it a gradient at any weight.
        term = lambda x: jnp.exp(x) * jnp.maximum(x, -1e9)  # noqa: E731
        if few():
            return -functools.reduce(jnp.add, map(term, _log_softmax_of_few(logits)))
        return -jnp.sum(term(jax.nn.log_softmax(logits)), axis=-1)

    return Distribution(
        num_outputs=num_values,
        state_independent_scale=False,
        sample=sample,
        mode=lambda logits: jnp.argmax(logits, axis=-1).astype(jnp.int32),
        log_prob=log_prob,
        entropy=entropy,
        to_action=lambda x: x,
    )


# Off CPU, a sum over the last axis of a few numbers is a kernel of its own, and a softmax three. Column by column
# everything is elementwise and fuses with its neighbours: five launches fewer a step of acting (docs/adr/0011).


def _columns(logits: jax.Array) -> list[jax.Array]:
    return [logits[..., i] for i in range(logits.shape[-1])]


def _log_softmax_of_few(logits: jax.Array) -> list[jax.Array]:
    """Computes the log-probability of every value, each [...]."""
    columns = _columns(logits)
    largest = functools.reduce(jnp.maximum, map(lax.stop_gradient, columns))
    shifted = [x - largest for x in columns]
    log_total = jnp.log(functools.reduce(jnp.add, map(jnp.exp, shifted)))
    return [x - log_total for x in shifted]


def _sample_of_few(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """Inverts the CDF at `uniform` [...]: as in `categorical`, impossible values are never drawn."""
    probs = [jnp.exp(x) for x in _log_softmax_of_few(logits)]
    total = functools.reduce(jnp.add, probs)
    action = jnp.zeros(uniform.shape, jnp.int32)
    for i in reversed(range(len(probs))):
        # From the last value to the first: what stays is the first whose CDF is above the threshold.
        cdf = functools.reduce(jnp.add, probs[: i + 1])
        action = jnp.where((probs[i] > 0) & (cdf > uniform * total), jnp.int32(i), action)
    return action


def multi_categorical(num_values: tuple[int, ...]) -> Distribution:
    """Makes a distribution of independent choices.

    Outputs are concatenated logits [..., sum(num_values)], samples int32 [..., heads].
    """
    heads = [categorical(n) for n in num_values]
    splits = [int(n) for n in np.cumsum(num_values)[:-1]]

    def logits_of(outputs: jax.Array) -> list[jax.Array]:
        return jnp.split(outputs, splits, axis=-1)

    def sample(outputs: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(heads))
        return jnp.stack([h.sample(x, k) for h, x, k in zip(heads, logits_of(outputs), keys)], axis=-1)

    def log_prob(outputs: jax.Array, action: jax.Array) -> jax.Array:
        return sum(h.log_prob(x, action[..., i]) for i, (h, x) in enumerate(zip(heads, logits_of(outputs))))  # type: ignore[return-value]

    return Distribution(
        num_outputs=sum(num_values),
        state_independent_scale=False,
        sample=sample,
        mode=lambda outputs: jnp.stack([h.mode(x) for h, x in zip(heads, logits_of(outputs))], axis=-1),
        log_prob=log_prob,
        entropy=lambda outputs: sum(h.entropy(x) for h, x in zip(heads, logits_of(outputs))),  # type: ignore[arg-type,return-value]
        to_action=lambda x: x,
    )


def dirichlet(key: jax.Array, alpha: jax.Array, legal: jax.Array) -> jax.Array:
    """Draws from a Dirichlet distribution over legal actions; 0 elsewhere.

    Gamma(alpha + 1) by Marsaglia and Tsang (2000), times U^(1 / alpha) for Gamma(alpha). Always four tries instead of
    the loop that makes `jax.random.gamma` slow; in fewer than 6 of a million cases none is accepted, and the sample is
    d, near the mean.

    Args:
      key: random key.
      alpha: float32 [N, A].
      legal: bool [N, A].

    Returns:
      float32 [N, A].
    """
    normal_key, uniform_key, power_key = jax.random.split(key, 3)
    d = alpha + 2 / 3
    x = jax.random.normal(normal_key, (4, *alpha.shape))
    u = jax.random.uniform(uniform_key, (4, *alpha.shape), minval=1e-12)
    root = 1 + x * lax.rsqrt(9 * d)[None]
    v = root**3
    log_v = 3 * jnp.log(jnp.maximum(root, 1e-12))
    accepted = (root > 0) & (jnp.log(u) < 0.5 * x**2 + d[None] * (1 - v + log_v))
    log_gamma = jnp.zeros(alpha.shape)
    for i in reversed(range(4)):
        log_gamma = jnp.where(accepted[i], log_v[i], log_gamma)
    log_gamma += jnp.log(d) + jnp.log(jax.random.uniform(power_key, alpha.shape, minval=1e-12)) / alpha
    return jnp.where(legal, jax.nn.softmax(jnp.where(legal, log_gamma, jnp.finfo(jnp.float32).min)), 0.0)


def greedy(q: jax.Array) -> jax.Array:
    """Returns the actions int32 [B] of largest value among q [B, A]."""
    return jnp.argmax(q, axis=-1).astype(jnp.int32)


def epsilon_greedy(
    q: jax.Array, epsilon: jax.Array | float, key: jax.Array, legal: jax.Array | None = None
) -> jax.Array:
    """Draws the actions of largest value, or with probability epsilon any legal action, uniformly.

    Args:
      q: [B, A]; action values, lowered where an action is illegal.
      epsilon: [B], or one for all lanes.
      key: consumed.
      legal: bool [B, A], at least one of each row; None if all actions are legal.

    Returns:
      int32 [B].
    """
    B, A = q.shape
    chance, choice = jax.random.uniform(key, (2, B))
    if legal is None:
        any_action = jnp.minimum(jnp.floor(choice * A).astype(jnp.int32), A - 1)
    else:  # the action before which floor(u n) of the n legal ones are
        up_to = jnp.cumsum(legal, axis=-1, dtype=jnp.int32)
        n = up_to[:, -1]
        number = jnp.minimum(jnp.floor(choice * n.astype(jnp.float32)).astype(jnp.int32), n - 1)
        any_action = jnp.sum(up_to <= number[:, None], axis=-1, dtype=jnp.int32)
    return jnp.where(chance < epsilon, any_action, greedy(q))


def value_of(q: jax.Array, action: jax.Array) -> jax.Array:
    """Takes the values [...] of actions int32 [...] among q [..., A]."""
    # A comparison, not a gather: gathers of single elements are slow on CPU and TPU.
    actions = jnp.arange(q.shape[-1]).reshape((1,) * action.ndim + (-1,))
    return jnp.sum(jnp.where(action[..., None] == actions, q, 0.0), axis=-1)
