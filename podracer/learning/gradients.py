"""Gradients of losses that are sums over lanes, and passes forward, a few lanes at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer import topology
from podracer.types import ArrayTree, Metrics

ROWS_IN_CACHE = {"images": 48, "small_images": 256, "unrolled": 192, "vectors": 2700, "narrow": 600}
"""Rows that go through a network and back at a time on CPU: more of them fall out of its caches. Images are of 84x84;
of smaller ones there are more, up to `small_images`. Measured on two cores (docs/adr/0007): IMPALA's shallow network
is 1.5 times faster with 42 rows than with 336, MinAtar's 1.2 times with 256 than with 1,024, an MLP does 10 to 15% less
work with 2,700 rows than with 20,000 (docs/adr/0006). Of a model that is unrolled from an image, half of the rows or
more are small states, and a group repeats hundreds of small operations (docs/adr/0026). Vectors that go side by side
through layers of few weights stay below what XLA divides between two threads, which wait for each other longer than
they work (docs/adr/0044). Rows of a core go one after the other, so that fewer lanes at a time are more operations."""

NARROW = 8192
"""Weights of the largest array of a network whose products are too short for two threads: 64x64 is faster
with one, 128x128 as fast, and 256x256 is faster with two (docs/adr/0044)."""

FRAMES_IN_MEMORY = {"tpu": 4096, "gpu": 8192}
"""Images of 84x84, or as many pixels of other sizes, at a time elsewhere, where only the memory is a limit: a full
gradient of IMPALA's deep network takes 2.5 MiB of activations a frame, so 10 GiB and 20 GiB (docs/adr/0011). A GPU is
kept busy by launches as well, which every group repeats: R2D2's 64 sequences of 120 rows are one group there."""


def at_a_time(
    observation: ArrayTree, rows_per_unit: int, units: int, unrolled: bool = False, narrow: bool = False
) -> int:
    """The number of units (lanes of T rows, or single rows) that should go through the network together.

    Args:
      observation: the network's input, [T, B, ...]; images are uint8 with at least two more dims.
      rows_per_unit: T.
      units: of the batch.
      unrolled: whether rows are states that a model is unrolled to, beside images.
      narrow: whether vectors go side by side through a network that `is_narrow`.

    Returns:
      A divisor of `units`; all of them but on CPU, and where images would not fit an accelerator's memory.
    """
    # Images need far more memory for activations than vectors do.
    images = _images(observation)
    if topology.on_cpu():
        rows = most = ROWS_IN_CACHE["unrolled" if images else "vectors"]
        if images and not unrolled:
            fit = ROWS_IN_CACHE["images"] * 84 * 84 // sum(math.prod(x.shape[2:4]) for x in images)
            rows, most = (min(ROWS_IN_CACHE[kind], fit) for kind in ("small_images", "vectors"))
        elif narrow and not images:
            rows = ROWS_IN_CACHE["narrow"]
        few = _divisor(units, rows // rows_per_unit)
        # Groups of a few rows cost more than caches and second threads: of a prime number of rows, all go together.
        if few * rows_per_unit >= rows // 8:
            return few
        limit = most // rows_per_unit
    elif images:
        pixels = sum(math.prod(x.shape[2:4]) for x in images)
        frames = FRAMES_IN_MEMORY.get(topology.platform(), min(FRAMES_IN_MEMORY.values()))
        limit = frames * 84 * 84 // (pixels * rows_per_unit)
    else:
        limit = units
    return _divisor(units, limit)


def _images(observation: ArrayTree) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(observation) if x.ndim >= 4 and x.dtype == jnp.uint8]


def _divisor(units: int, limit: int) -> int:
    """The largest divisor of a number that is at most a limit; 1 where the limit is below."""
    return next(n for n in range(max(1, min(limit, units)), 0, -1) if units % n == 0)


def is_narrow(params: ArrayTree) -> bool:
    """Returns True if no array of a network has more than `NARROW` weights."""
    return all(x.size <= NARROW for x in jax.tree.leaves(params))


def forward(apply: Callable[[Any], ArrayTree], inputs: Any) -> ArrayTree:
    """Passes rows through a network without a core; those with images a few lanes at a time, on CPU.

    Args:
      apply: `(inputs [T, n, ...]) -> outputs [T, n, ...]`.
      inputs: a named tuple of [T, B, ...], with an `observation`.

    Returns:
      Its outputs [T, B, ...].
    """
    T, B = jax.tree.leaves(inputs)[0].shape[:2]
    lanes = at_a_time(inputs.observation, T, B) if topology.on_cpu() and _images(inputs.observation) else B
    if lanes == B:
        return apply(inputs)
    groups = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(T, B // lanes, lanes, *x.shape[2:]), 1, 0), inputs)
    outputs = lax.map(apply, groups)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(T, B, *x.shape[3:]), outputs)


def accumulate(
    loss: Callable[[ArrayTree, Any], tuple[jax.Array, tuple[Metrics, Any]]],
    params: ArrayTree,
    groups: ArrayTree,
    pack: Callable[[ArrayTree, Metrics], Any] = lambda grads, metrics: (grads, metrics),
) -> tuple[Any, Any]:
    """Sums the gradient and the metrics of a loss over groups.

    Args:
      loss: `(params, group) -> (loss, (metrics, outputs))`, without collectives.
      params: what the gradient is with respect to.
      groups: leading dim [number of groups].
      pack: `(gradient, metrics) -> what is summed`, such as one vector of small arrays, which is one operation.

    Returns:
      The sums as `pack` makes them, and the outputs of every group, with a leading dim [number of groups].
    """
    gradient = jax.grad(loss, has_aux=True)
    first = jax.tree.map(lambda x: x[0], groups)
    if jax.tree.leaves(groups)[0].shape[0] == 1:
        grads, (metrics, outputs) = gradient(params, first)
        return pack(grads, metrics), jax.tree.map(lambda x: x[None], outputs)

    # One group after the other, so that activations of one alone are alive.
    @jax.jit  # traced once, for its shapes and in the loop
    def of_group(params: ArrayTree, group: Any) -> tuple[Any, Any]:
        grads, (metrics, outputs) = gradient(params, group)
        return pack(grads, metrics), outputs

    def add(sums: Any, group: Any) -> tuple[Any, Any]:
        packed, outputs = of_group(params, group)
        return jax.tree.map(jnp.add, sums, packed), outputs

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_group, params, first)[0])
    return lax.scan(add, zeros, groups)
