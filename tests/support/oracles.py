"""NumPy float64 oracles, written from the definitions: explicit sums and products, one lane at a time.

Shapes follow `podracer.types`: `values` and `first` are [T+1, B]; `rewards`, `discounts`, `rho` are [T, B], where
`rewards[t]` and `discounts[t]` are those that arrived with row t+1, and `discounts` is gamma * (0 where terminated).
`rho[t]` is pi(a_t | x_t) / mu(a_t | x_t).

Transition t is masked iff `first[t+1]`. No mask appears in any formula below: a lane is SPLIT at its masked
transitions, and each piece is handled by the textbook formula as if nothing else existed, bootstrapping from the
value of the piece's last row (a terminated episode has discount 0 there, so its bootstrap vanishes by itself).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def _float64(*arrays: npt.ArrayLike) -> list[Array]:
    return [np.asarray(array, np.float64) for array in arrays]


def segments(first: npt.ArrayLike) -> list[tuple[int, int]]:
    """Splits one lane, `first` [T+1], into (start, end) rows, both inclusive, such that no masked transition is inside.

    Segment (start, end) has the transitions start, ..., end - 1; none if start == end. Transition `end` is masked,
    unless end == T.
    """
    first = np.asarray(first, bool)
    starts = [0] + [row for row in range(1, len(first)) if first[row]]
    ends = [start - 1 for start in starts[1:]] + [len(first) - 1]
    return list(zip(starts, ends, strict=True))


def _by_segment(
    first: npt.ArrayLike, fill: Array, estimate: Callable[..., Array], values: Array, *inputs: Array
) -> Array:
    """Fills [T, B] with `estimate(values [n+1], *inputs [n]) -> [n]` of each segment; `fill` [T, B] where masked."""
    output = np.array(fill)
    for lane in range(values.shape[1]):
        for start, end in segments(np.asarray(first)[:, lane]):
            pieces = [array[start:end, lane] for array in inputs]
            output[start:end, lane] = estimate(values[start : end + 1, lane], *pieces)
    return output


def _corrected_sum(s: int, deltas: Array, factors: Array) -> float:
    """sum_{t=s}^{n-1} (prod_{i=s}^{t-1} factors_i) deltas_t, for `deltas` and `factors` [n]."""
    return sum(float(np.prod(factors[s:t])) * float(deltas[t]) for t in range(s, len(deltas)))


def vtrace(
    values: npt.ArrayLike,
    rewards: npt.ArrayLike,
    discounts: npt.ArrayLike,
    rho: npt.ArrayLike,
    first: npt.ArrayLike,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    rho_bar_pg: float = 1.0,
    *,
    mix_lambda_in_pg: bool = False,
) -> tuple[Array, Array]:
    """V-trace targets and policy-gradient advantages (IMPALA, equations 1 and 4, remark 2).

        v_s = V(x_s) + sum_{t=s}^{n-1} (prod_{i=s}^{t-1} gamma_i c_i) delta_t
        delta_t = rho_t (r_t + gamma_t V(x_{t+1}) - V(x_t))
        rho_t = min(rho_bar, pi/mu);  c_i = lambda min(c_bar, pi/mu)
        advantage_s = min(rho_bar_pg, pi/mu) (r_s + gamma_s v_{s+1} - V(x_s)),  where v_n = V(x_n)

    Args:
      values: V(x), [T+1, B].
      rewards: [T, B].
      discounts: gamma_t, [T, B].
      rho: pi/mu, unclipped, [T, B].
      first: [T+1, B].
      lambda_: trace decay.
      rho_bar: clips the ratio in delta.
      c_bar: clips the ratio in the trace.
      rho_bar_pg: clips the ratio in the policy gradient.
      mix_lambda_in_pg: False is the paper's equation. True replaces v_{s+1} in the advantage by
        lambda v_{s+1} + (1 - lambda) V(x_{s+1}), which is what rlax does; they are equal at lambda = 1.

    Returns:
      targets v_s [T, B], V(x_s) where masked; advantages [T, B], 0 where masked.
    """
    values, rewards, discounts, rho = _float64(values, rewards, discounts, rho)

    def targets(v: Array, r: Array, g: Array, ratio: Array) -> Array:
        deltas = np.minimum(rho_bar, ratio) * (r + g * v[1:] - v[:-1])
        factors = g * lambda_ * np.minimum(c_bar, ratio)
        return np.array([v[s] + _corrected_sum(s, deltas, factors) for s in range(len(r))])

    def advantages(v: Array, r: Array, g: Array, ratio: Array) -> Array:
        next_targets = np.append(targets(v, r, g, ratio), v[-1])[1:]
        if mix_lambda_in_pg:
            next_targets = lambda_ * next_targets + (1.0 - lambda_) * v[1:]
        return np.minimum(rho_bar_pg, ratio) * (r + g * next_targets - v[:-1])

    inputs = (values, rewards, discounts, rho)
    return (
        _by_segment(first, values[:-1], targets, *inputs),
        _by_segment(first, np.zeros_like(rewards), advantages, *inputs),
    )


def gae(
    values: npt.ArrayLike, rewards: npt.ArrayLike, discounts: npt.ArrayLike, first: npt.ArrayLike, lambda_: float
) -> Array:
    """Generalised advantage estimates [T, B], 0 where masked.

    A_s = sum_{t=s}^{n-1} (prod_{i=s}^{t-1} gamma_i lambda) (r_t + gamma_t V(x_{t+1}) - V(x_t))
    """
    values, rewards, discounts = _float64(values, rewards, discounts)

    def advantages(v: Array, r: Array, g: Array) -> Array:
        deltas = r + g * v[1:] - v[:-1]
        return np.array([_corrected_sum(s, deltas, g * lambda_) for s in range(len(r))])

    return _by_segment(first, np.zeros_like(rewards), advantages, values, rewards, discounts)


def n_step_return(
    values: npt.ArrayLike,
    rewards: npt.ArrayLike,
    discounts: npt.ArrayLike,
    first: npt.ArrayLike,
    n: int | None = None,
) -> Array:
    """n-step returns [T, B], bootstrapped n rows later or at the end of the segment; V(x_s) where masked.

    G_s = sum_{t=s}^{m-1} (prod_{i=s}^{t-1} gamma_i) r_t + (prod_{i=s}^{m-1} gamma_i) V(x_m),  m = min(s + n, end)

    `n=None` always bootstraps at the end of the segment.
    """
    values, rewards, discounts = _float64(values, rewards, discounts)

    def returns(v: Array, r: Array, g: Array) -> Array:
        output = []
        for s in range(len(r)):
            m = len(r) if n is None else min(s + n, len(r))
            output.append(_corrected_sum(s, r[:m], g) + np.prod(g[s:m]) * v[m])
        return np.array(output)

    return _by_segment(first, values[:-1], returns, values, rewards, discounts)


def ppo_clip_loss(
    log_prob: npt.ArrayLike,
    old_log_prob: npt.ArrayLike,
    advantages: npt.ArrayLike,
    epsilon: float,
    mask: npt.ArrayLike | None = None,
) -> float:
    """PPO's clipped surrogate, to be minimised: the mean over the entries where `mask` (all arrays of one shape).

    -mean(min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon) A)),  ratio = exp(log_prob - old_log_prob)
    """
    log_prob, old_log_prob, advantages = _float64(log_prob, old_log_prob, advantages)
    chosen = np.ones(advantages.shape, bool) if mask is None else np.asarray(mask, bool)
    terms = []
    for index in np.argwhere(chosen):
        at = tuple(index)
        ratio, advantage = math.exp(log_prob[at] - old_log_prob[at]), float(advantages[at])
        clipped = min(max(ratio, 1.0 - epsilon), 1.0 + epsilon)
        terms.append(min(ratio * advantage, clipped * advantage))
    return -sum(terms) / len(terms)


def categorical_probs(logits: npt.ArrayLike) -> Array:
    """softmax over the last axis, [..., A] -> [..., A]; the maximum is subtracted so that exp cannot overflow."""
    (logits,) = _float64(logits)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def categorical_log_prob(logits: npt.ArrayLike, actions: npt.ArrayLike) -> Array:
    """log softmax(logits)[action]: logits [..., A], integer actions [...] -> [...]."""
    (logits,) = _float64(logits)
    actions = np.asarray(actions)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(shifted, actions[..., None], axis=-1)[..., 0]
    return chosen - np.log(np.exp(shifted).sum(axis=-1))


def categorical_entropy(logits: npt.ArrayLike) -> Array:
    """-sum_a p_a log p_a with 0 log 0 = 0: logits [..., A] -> [...]."""
    probs = categorical_probs(logits)
    positive = probs > 0
    return -np.where(positive, probs * np.log(np.where(positive, probs, 1.0)), 0.0).sum(axis=-1)


def gaussian_log_prob(mean: npt.ArrayLike, scale: npt.ArrayLike, actions: npt.ArrayLike) -> Array:
    """log density of a diagonal Gaussian with standard deviation `scale`: three times [..., D] -> [...].

    sum_d -(a_d - mean_d)^2 / (2 scale_d^2) - log(scale_d) - log(2 pi) / 2
    """
    mean, scale, actions = np.broadcast_arrays(*_float64(mean, scale, actions))
    density = -((actions - mean) ** 2) / (2.0 * scale**2) - np.log(scale) - 0.5 * math.log(2.0 * math.pi)
    return density.sum(axis=-1)


def gaussian_entropy(scale: npt.ArrayLike) -> Array:
    """Entropy of a diagonal Gaussian, sum_d log(scale_d) + (1 + log(2 pi)) / 2: [..., D] -> [...]."""
    (scale,) = _float64(scale)
    return (np.log(scale) + 0.5 * (1.0 + math.log(2.0 * math.pi))).sum(axis=-1)


def clip_by_global_norm(gradients: Sequence[npt.ArrayLike], max_norm: float) -> list[Array]:
    """Scales all gradients by max_norm / max(max_norm, norm), where norm = sqrt(sum over all elements of g^2)."""
    arrays = _float64(*gradients)
    norm = math.sqrt(sum(float((array**2).sum()) for array in arrays))
    return [array * max_norm / max(max_norm, norm) for array in arrays]


def _rates(learning_rate: float | Sequence[float], steps: int) -> list[float]:
    """The learning rate of each step; a sequence is a schedule."""
    return [learning_rate] * steps if isinstance(learning_rate, (int, float)) else [float(x) for x in learning_rate]


def rmsprop_tf1(
    gradients: Sequence[npt.ArrayLike],
    learning_rate: float | Sequence[float],
    decay: float = 0.99,
    epsilon: float = 0.01,
    momentum: float = 0.0,
    nu_0: float = 1.0,
) -> list[Array]:
    """The updates of TF1's RMSProp to a parameter at steps 1, 2, ..., given the gradients of all steps (one shape).

        nu_k = decay^k nu_0 + (1 - decay) sum_{i=1}^k decay^(k-i) g_i^2
        update_k = -sum_{i=1}^k momentum^(k-i) learning_rate_i g_i / sqrt(nu_i + epsilon)

    epsilon is inside the root and nu_0 = 1: both differ from the usual RMSProp.
    """
    grads = _float64(*gradients)
    rates = _rates(learning_rate, len(grads))
    scaled = []
    for k in range(1, len(grads) + 1):
        nu = decay**k * nu_0 + (1.0 - decay) * sum(decay ** (k - i) * grads[i - 1] ** 2 for i in range(1, k + 1))
        scaled.append(rates[k - 1] * grads[k - 1] / np.sqrt(nu + epsilon))
    return [
        -np.asarray(sum(momentum ** (k - i) * scaled[i - 1] for i in range(1, k + 1))) for k in range(1, len(grads) + 1)
    ]


def rmsprop_centred(
    gradients: Sequence[npt.ArrayLike], learning_rate: float | Sequence[float], decay: float, epsilon: float
) -> list[Array]:
    """The updates of the RMSProp in DQN's Lua code to a parameter at steps 1, 2, ..., given the gradients of all steps.

    m_k, n_k = (1 - decay) sum_{i=1}^k decay^(k-i) g_i, and the same of g_i^2
    update_k = -learning_rate_k g_k / sqrt(n_k - m_k^2 + epsilon)
    """
    grads = _float64(*gradients)
    updates = []
    for k, rate in enumerate(_rates(learning_rate, len(grads)), 1):
        weights = [(1.0 - decay) * decay ** (k - i) for i in range(1, k + 1)]
        mean = np.asarray(sum(w * g for w, g in zip(weights, grads)))
        square = np.asarray(sum(w * g**2 for w, g in zip(weights, grads)))
        updates.append(-rate * grads[k - 1] / np.sqrt(square - mean**2 + epsilon))
    return updates


def adam(
    gradients: Sequence[npt.ArrayLike],
    learning_rate: float | Sequence[float],
    b1: float = 0.9,
    b2: float = 0.999,
    epsilon: float = 1e-8,
) -> list[Array]:
    """The updates of Adam to a parameter at steps 1, 2, ..., given the gradients of all steps (one shape).

        m_k, n_k = averages of g_i and g_i^2 over i <= k, with weights b^(k-i) / sum_j b^(k-j)
        update_k = -learning_rate_k m_k / (sqrt(n_k) + epsilon)

    The normalised weights are what Adam's bias correction amounts to.
    """
    grads = _float64(*gradients)
    rates = _rates(learning_rate, len(grads))
    updates = []
    for k in range(1, len(grads) + 1):
        w1, w2 = (np.array([b ** (k - i) for i in range(1, k + 1)]) for b in (b1, b2))
        mean = np.asarray(sum(w * g for w, g in zip(w1, grads[:k], strict=True))) / w1.sum()
        square = np.asarray(sum(w * g**2 for w, g in zip(w2, grads[:k], strict=True))) / w2.sum()
        updates.append(-rates[k - 1] * mean / (np.sqrt(square) + epsilon))
    return updates
