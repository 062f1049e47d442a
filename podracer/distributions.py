"""Action distributions: actions, log-probabilities and entropies from the outputs of a policy head.

`for_space(action_space)` returns a bundle of pure functions over arrays of any leading shape. Log-probabilities are of
the `sample`; `to_action` converts it to the environment's action (they differ for clipped Gaussians).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import spaces, topology

FEW_VALUES = 8
"""The largest number of values whose distribution is computed column by column off CPU."""


class Distribution(NamedTuple):
    """A family of distributions over one action space.

    Attributes:
      num_outputs: size of the policy head's last axis.
      state_independent_scale: True if the second half of the outputs is a log standard deviation that does not depend
        on the observation (a free parameter of the network).
      sample: `(outputs [..., num_outputs], key) -> sample`.
      mode: `(outputs) -> sample`; the most likely sample.
      log_prob: `(outputs, sample) -> float32 [...]`.
      entropy: `(outputs) -> float32 [...]`.
      to_action: `(sample) -> action` within the action space.
    """

    num_outputs: int
    state_independent_scale: bool
    sample: Callable[[jax.Array, jax.Array], jax.Array]
    mode: Callable[[jax.Array], jax.Array]
    log_prob: Callable[[jax.Array, jax.Array], jax.Array]
    entropy: Callable[[jax.Array], jax.Array]
    to_action: Callable[[jax.Array], jax.Array]

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


def for_space(space: spaces.Space) -> Distribution:
    """Makes the distribution for an action space.

    Raises:
      ValueError: for a Box without finite bounds, or a space that cannot be an action space.
    """
    if isinstance(space, spaces.Discrete):
        return categorical(space.num_values)
    if isinstance(space, spaces.MultiDiscrete):
        return multi_categorical(space.num_values)
    if isinstance(space, spaces.Box):
        return clipped_gaussian(space)
    raise ValueError(f"action space {space} is not supported; use Discrete, MultiDiscrete or Box.")


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


def clipped_gaussian(space: spaces.Box) -> Distribution:
    """Makes a diagonal Gaussian clipped to a Box; outputs are means and log standard deviations [..., 2 * size].

    Samples are unclipped, in units where the Box is [-1, 1]; log-probabilities and entropies are of the unclipped
    Gaussian (clipping is part of the environment, so the gradient stays unbiased).

    Raises:
      ValueError: if the Box is not bounded.
    """
    if not space.bounded:
        raise ValueError(f"action space {space} has no finite bounds; a clipped Gaussian needs them.")
    units = unit_box(space)

    def split(outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        return mean, log_std

    def sample(outputs: jax.Array, key: jax.Array) -> jax.Array:
        mean, log_std = split(outputs)
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)

    def log_prob(outputs: jax.Array, value: jax.Array) -> jax.Array:
        mean, log_std = split(outputs)
        z = (value - mean) * jnp.exp(-log_std)
        return jnp.sum(-0.5 * jnp.square(z) - log_std - 0.5 * np.log(2 * np.pi), axis=-1)

    return Distribution(
        num_outputs=2 * units.size,
        state_independent_scale=True,
        sample=sample,
        mode=lambda outputs: split(outputs)[0],
        log_prob=log_prob,
        entropy=lambda outputs: jnp.sum(split(outputs)[1] + 0.5 * np.log(2 * np.pi * np.e), axis=-1),
        to_action=units.to_action,
    )


class UnitBox(NamedTuple):
    """A bounded Box in units where each of its elements is in [-1, 1].

    Attributes:
      size: A, its elements.
      to_action: `(units [..., A]) -> action` within the Box; what is beyond [-1, 1] is clipped.
      to_units: `(action [..., *shape]) -> float32 [..., A]`.
    """

    size: int
    to_action: Callable[[jax.Array], jax.Array]
    to_units: Callable[[jax.Array], jax.Array]


def unit_box(space: spaces.Box) -> UnitBox:
    """Makes the affine map between a Box with finite bounds and [-1, 1] for each element."""
    size = int(np.prod(space.shape))
    centre, half = _centre_and_half(space)
    least, most = (x if x.shape else x.item() for x in space.limits())

    def to_action(value: jax.Array) -> jax.Array:
        middle, scale = (_last_of(value.ndim, x) for x in (centre, half))
        action = middle + scale * jnp.clip(value, -1.0, 1.0)
        action = action.reshape(*value.shape[:-1], *space.shape).astype(space.dtype)
        # The product may round to a number beyond the bounds.
        lowest, highest = (_last_of(action.ndim, x) for x in (least, most))
        return jnp.clip(action, lowest, highest)

    def to_units(action: jax.Array) -> jax.Array:
        flat = action.reshape(*action.shape[: action.ndim - len(space.shape)], size).astype(jnp.float32)
        # An element whose bounds are equal is 0.
        width = np.maximum(half, np.finfo(np.float32).tiny)
        middle, scale = (_last_of(flat.ndim, x) for x in (centre, width if np.ndim(width) else float(width)))
        return jnp.clip((flat - middle) / scale, -1.0, 1.0)

    return UnitBox(size, to_action, to_units)


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
        return self.mean + jnp.exp(self.log_std) * noise

    def log_prob(self, u: jax.Array) -> jax.Array:
        """The log-density of tanh(u) on [-1, 1]^A, float32 [...]; finite for every u."""
        z = (u - self.mean) * jnp.exp(-self.log_std)
        gaussian = -0.5 * jnp.square(z) - self.log_std - 0.5 * np.log(2 * np.pi)
        # log(1 - tanh(u)^2) without the difference (equation 21).
        slope = 2.0 * (np.log(2) - u - jax.nn.softplus(-2.0 * u))
        return jnp.sum(gaussian - slope, axis=-1)


def bounded_log_std(raw: jax.Array, min_std: float, max_std: float) -> jax.Array:
    """Squashes numbers into [log min_std, log max_std]."""
    low, high = np.log(min_std), np.log(max_std)
    return low + 0.5 * (high - low) * (jnp.tanh(raw) + 1.0)


def raw_of_std(std: float, min_std: float, max_std: float) -> float:
    """The number that `bounded_log_std` maps to log std, which is within the bounds; finite at the bounds too."""
    low, high = np.log(min_std), np.log(max_std)
    share = 0.5 if high == low else (np.log(std) - low) / (high - low)
    return float(np.arctanh(np.clip(2.0 * share - 1.0, -0.999, 0.999)))


def _last_of(ndim: int, x: Any) -> Any:
    """Reshapes an array [...] to [1, ..., ...] of `ndim` dims; a number stays a number."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape) if isinstance(x, np.ndarray) else x


def _centre_and_half(space: spaces.Box) -> tuple[Any, Any]:
    """Returns the middle of a Box and half its width: numbers, or float32 [size] if its elements differ in bounds."""
    low, high = np.asarray(space.low), np.asarray(space.high)
    centre, half = (high + low) / 2, (high - low) / 2
    if not centre.shape:
        return centre.item(), half.item()
    return centre.ravel().astype(np.float32), half.ravel().astype(np.float32)


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
