"""Epochs of minibatches: gradient steps that take every unit of a batch once an epoch, in random order.

Large batches are shuffled without sorting, by a Feistel network over pairs of digits: unit `left * B + right` of A * B
goes where six rounds of `left += hash(right) mod A`, `right += hash(left) mod B` take it. Every round can be undone, so
the whole is a permutation, whatever the hash (Luby and Rackoff 1988; mixed radices as in Black and Rogaway 2002,
"Ciphers with arbitrary finite domains"). A unit's place is a few integer operations, on any device; a sort of 32,768
random numbers takes four times as long on CPU, and on accelerators one kernel for every few swaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer import trajectories
from podracer.learning import gradients
from podracer.learning.update import Loss, OptimizerLike, rate_metric
from podracer.topology import collectives
from podracer.types import ArrayTree, LearnerState, Metrics

ROUNDS = 6
FEW = 1024
"""Below this many units a sort is as fast, and every order is equally likely, not just every place."""
SHORTEST_DIGIT = 16
"""A digit of fewer values hashes the other one to too few different numbers."""


def minibatches(key: jax.Array, n: int, num_epochs: int, num_minibatches: int) -> jax.Array:
    """The units of each gradient step: int32 [num_epochs * num_minibatches, n / num_minibatches].

    Every epoch is a random order of all n units.

    Raises:
      ValueError: where n is not divisible by `num_minibatches`.
    """
    if n % num_minibatches:
        raise ValueError(
            f"num_minibatches={num_minibatches} does not divide the {n} units of a shard; change num_envs, "
            "rollout_length or num_minibatches (recurrent networks shuffle whole lanes, or chunks by chunk_length)."
        )
    order = permutations(key, num_epochs, n)
    return order.reshape(num_epochs * num_minibatches, n // num_minibatches)


def run(
    loss: Loss,
    learner: LearnerState,
    take: Callable[[jax.Array, Any], Any],
    order: jax.Array,
    weights: Any,
    *,
    optimizer: OptimizerLike,
    learning_rate: jax.Array | None,
    observation: ArrayTree,
    num_rows: int = 1,
    target_kl: float | None = None,
) -> tuple[LearnerState, Metrics]:
    """Takes a gradient step on each minibatch in turn, under `collectives.DATA_AXES`; all of them are one update.

    The gradient is clipped at the tunable `max_grad_norm`.

    Args:
      loss: of some units, without outputs; the sum over all units of a minibatch, of all shards, is its loss.
      learner: the state before.
      take: `(units int32 [n], weights) -> minibatch`, a named tuple as `split` takes it.
      order: int32 [M, n]; from `minibatches`.
      weights: a tree of [M, ...], given to `take`. They are computed for all minibatches at once, so that within the
        loop the gradient is all that devices have to agree on.
      optimizer: of the parameters.
      learning_rate: float32 [], or None (see `update.learning_rate`).
      observation: [T, B, ...]; an example of the network's input, for its shape.
      num_rows: T, rows of a unit.
      target_kl: of the loss's metric `policy/kl`, by which `adapted_rate` changes the learning rate, or None.

    Returns:
      The state after, and metrics: means over minibatches, with `grad/norm` and the last `grad/learning_rate`.

    Raises:
      ValueError: for a target, and a loss without that metric.
    """
    num_units, narrow = order.shape[1], num_rows == 1 and gradients.is_narrow(learner.params)
    num_chunks = num_units // gradients.at_a_time(observation, num_rows, num_units, narrow=narrow)

    def step(carry: tuple[Any, ArrayTree, Any], minibatch: tuple[jax.Array, Any]) -> tuple[Any, Any]:
        # The gradient of one minibatch, a few units at a time, then its sum over all shards.
        params, opt_state, rate = carry
        chunks = split(take(*minibatch), num_chunks)
        (grads, sums), _ = gradients.accumulate(loss, restore(params), chunks, pack)
        kl = _divergence(jax.tree.unflatten(names, list(sums))) if target_kl else ()
        grads, kl = collectives.global_sum((grads, kl))
        params, opt_state, norm = optimizer.step(grads, opt_state, params, learning_rate=rate, hyper=learner.hyper)
        rate = adapted_rate(rate, kl, target_kl) if target_kl else rate
        return (params, opt_state, rate), (sums, norm)

    def pack(grads: ArrayTree, metrics: Metrics) -> tuple[Any, jax.Array]:
        return optimizer.pack(grads)[0], jnp.stack(jax.tree.leaves(metrics))  # one vector through the scan

    names = _names(loss, learner.params, take, (order, weights))
    # Packed through the scan: taking parameters apart and together again is a copy for every array.
    params, restore = optimizer.pack(learner.params)
    begin = (params, learner.opt_state, learning_rate)
    (params, opt_state, rate), (sums, norms) = lax.scan(step, begin, (order, weights))
    # Metrics are reduced once, after the loop.
    sums = collectives.global_sum(jnp.mean(sums, axis=0))
    metrics = jax.tree.unflatten(names, list(sums)) | {"grad/norm": jnp.mean(norms), **rate_metric(rate)}
    state = learner._replace(params=restore(params), opt_state=opt_state, num_updates=learner.num_updates + 1)
    return state, metrics


def _names(
    loss: Loss, params: ArrayTree, take: Callable[[jax.Array, Any], Any], minibatches: tuple[jax.Array, Any]
) -> Any:
    """The structure of a loss's metrics."""

    def metrics_of_first(params: ArrayTree, minibatches: Any) -> Metrics:
        return loss(params, take(*jax.tree.map(lambda x: x[0], minibatches)))[1][0]

    return jax.tree.structure(jax.eval_shape(metrics_of_first, params, minibatches))


LEAST_RATE, LARGEST_RATE = 1e-5, 1e-2
"""The limits of a learning rate that is adapted."""


def check_target_kl(config: Any) -> None:
    """Checks that an agent's settings go with its `target_kl`, by which the learning rate is adapted.

    Raises:
      ValueError: where they do not.
    """
    target = f"target_kl={config.target_kl}"
    if config.learning_rate_schedule != "constant" or config.learning_rate_warmup:
        raise ValueError(
            f"{target} sets the learning rate itself; use learning_rate_schedule='constant' and learning_rate_warmup=0."
        )
    if config.num_epochs * config.num_minibatches == 1:
        raise ValueError(
            f"{target} compares the policy with the one that acted before each gradient step, and num_epochs=1 with "
            "num_minibatches=1 takes one step a rollout; raise one of them."
        )
    if not LEAST_RATE <= config.learning_rate <= LARGEST_RATE:
        nearest = min(max(config.learning_rate, LEAST_RATE), LARGEST_RATE)
        raise ValueError(
            f"learning_rate={config.learning_rate} must be between {LEAST_RATE} and {LARGEST_RATE}, where {target} "
            f"keeps it; use {nearest}."
        )


def adapted_rate(rate: jax.Array, kl: jax.Array, target: float) -> jax.Array:
    """A learning rate after a minibatch whose policy is `kl` away from the one that acted, as brax and rsl_rl have it.

    It falls by a factor of 1.5 where that is more than twice the target, and rises where it is less than half.
    """
    changed = jnp.where(kl > 2.0 * target, rate / 1.5, jnp.where((kl > 0.0) & (kl < 0.5 * target), rate * 1.5, rate))
    return jnp.clip(changed, LEAST_RATE, LARGEST_RATE)


def _divergence(metrics: Metrics) -> jax.Array:
    if "policy/kl" not in metrics:
        raise ValueError("target_kl: your loss gives no metric 'policy/kl', the divergence from the acting policy.")
    return metrics["policy/kl"]


def take(samples: Any, units: jax.Array) -> Any:
    """Takes some units of a named tuple of [T, n, ...]: [T, len(units), ...]. Its `core`, a network's state before row
    0, has no T."""
    core = jax.tree.map(lambda x: x[units], samples.core)
    fields = jax.tree.map(lambda x: x[:, units], samples._replace(core=()))
    return fields._replace(core=core)


def split(batch: Any, groups: int) -> Any:
    """Splits units of a named tuple as in `take`: [T, n] -> [groups, T, n / groups]."""
    core = jax.tree.map(lambda x: trajectories.split(x, groups, 0), batch.core)
    fields = jax.tree.map(lambda x: trajectories.split(x, groups, 1), batch._replace(core=()))
    return fields._replace(core=core)


def unroll(apply: Callable[..., Any], rows: Any, core: ArrayTree, length: int) -> tuple[jax.Array, ArrayTree]:
    """Unrolls a network over T + 1 rows, in chunks of `length` rows; the last row is one of its own.

    Args:
      apply: `(rows [t, B], core [B]) -> (outputs, values [t, B], core [B])`.
      rows: a tree of [T + 1, B, ...].
      core: the state before row 0, [B, ...].
      length: divides T; with T itself, all T + 1 rows are one chunk.

    Returns:
      The values [T + 1, B], and the state before each chunk, [T / length, B, ...], but [B, ...] of a single one.
    """
    if jax.tree.leaves(rows)[0].shape[0] == length + 1:
        return apply(rows, core)[1], core

    def step(core: ArrayTree, chunk: Any) -> tuple[ArrayTree, Any]:
        _, values, after = apply(chunk, core)
        return after, (values, core)

    chunks = jax.tree.map(lambda x: x[:-1].reshape(-1, length, *x.shape[1:]), rows)
    core, (values, states) = lax.scan(step, core, chunks)
    last = apply(jax.tree.map(lambda x: x[-1:], rows), core)[1]
    return jnp.concatenate([values.reshape(-1, *last.shape[1:]), last]), states


def cut(samples: Any, length: int) -> Any:
    """Cuts units of a named tuple of [T, n, ...] into chunks [length, T / length n, ...], the first rows' first.

    Its `core` is that of `unroll`.
    """

    def in_chunks(x: jax.Array) -> jax.Array:
        chunks = jnp.moveaxis(x.reshape(-1, length, *x.shape[1:]), 0, 1)
        return chunks.reshape(length, -1, *x.shape[2:])

    if jax.tree.leaves(samples)[0].shape[0] == length:
        return samples
    core = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples.core)
    return jax.tree.map(in_chunks, samples._replace(core=()))._replace(core=core)


def permutations(key: jax.Array, num: int, n: int) -> jax.Array:
    """Independent random orders of range(n), int32 [num, n]."""
    digits = radices(n)
    if n >= FEW and digits[0] >= SHORTEST_DIGIT:
        return _feistel(key, num, *digits)
    if n <= 2**16:
        return _sorted(key, num, n)
    return jax.vmap(lambda k: jax.random.permutation(k, n))(jax.random.split(key, num))


def radices(n: int) -> tuple[int, int]:
    """The two factors of n that are nearest to each other, the smaller first: (1, n) for a prime."""
    small = next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
    return small, n // small


def _feistel(key: jax.Array, num: int, left_size: int, right_size: int) -> jax.Array:
    words = jax.random.bits(key, (ROUNDS, 2, num, 1))
    place = jnp.arange(left_size * right_size, dtype=jnp.uint32)[None]
    radix = {False: jnp.uint32(left_size), True: jnp.uint32(right_size)}
    # A unit's place as two digits, left and right, which rounds change in turn.
    digits = {False: lax.div(place, radix[True]), True: lax.rem(place, radix[True])}
    for number in range(ROUNDS):
        moves = number % 2 == 1  # left, right, left, ...
        digits[moves] = lax.rem(
            digits[moves] + lax.rem(_hash(digits[not moves], *words[number]), radix[moves]), radix[moves]
        )
    return (digits[False] * radix[True] + digits[True]).astype(jnp.int32)


def _hash(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """uint32 [num, n] that look random, by two words of key for each of `num` rows (Murmur3's finaliser between)."""
    x = (x ^ first) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13) ^ second) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _sorted(key: jax.Array, num: int, n: int) -> jax.Array:
    """A sort of random bits with the index in the low bits; equal random parts, at least 16 bits, keep their order."""
    index_mask = jnp.uint32(2 ** max(1, (n - 1).bit_length()) - 1)
    tagged = (jax.random.bits(key, (num, n)) & ~index_mask) | jnp.arange(n, dtype=jnp.uint32)[None]
    return (jnp.sort(tagged, axis=-1) & index_mask).astype(jnp.int32)
