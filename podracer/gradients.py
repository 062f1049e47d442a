"""Gradients of losses that are sums over lanes, a few lanes at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer.types import ArrayTree, Metrics, Trajectory

ROWS_IN_CACHE = {"images": 48, "vectors": 2700}
"""Rows that go through a network and back at a time on CPU: more of them fall out of its caches. Measured on two cores
(docs/adr/0007): IMPALA's shallow network is 1.5 times faster with 42 rows than with 336, an MLP 1.15 times with 2,700
rows than with 20,000."""


def lanes_at_a_time(trajectory: Trajectory) -> int:
    """How many lanes of a trajectory [T, B] should go through the network together: a divisor of B, B but on CPU."""
    T, B = trajectory.timesteps.reward.shape
    if jax.default_backend() != "cpu":
        return B
    images = any(x.ndim >= 4 and x.dtype == jnp.uint8 for x in jax.tree.leaves(trajectory.timesteps.observation))
    limit = ROWS_IN_CACHE["images" if images else "vectors"] // T
    return next(n for n in range(max(1, min(limit, B)), 0, -1) if B % n == 0)


def by_lanes(
    loss: Callable[[ArrayTree, Trajectory], tuple[jax.Array, Metrics]], params: ArrayTree, trajectory: Trajectory
) -> tuple[ArrayTree, Metrics]:
    """The gradient and the metrics of a loss, which both are sums over lanes.

    Args:
      loss: `(params, trajectory [T, any B]) -> (loss, metrics)`, without collectives.
      params: what the gradient is with respect to.
      trajectory: [T, B].
    """
    gradient = jax.grad(loss, has_aux=True)
    lanes = lanes_at_a_time(trajectory)
    if lanes == trajectory.lane.shape[0]:
        return gradient(params, trajectory)
    groups = split_lanes(trajectory, trajectory.lane.shape[0] // lanes)

    def add(sums: Any, group: Trajectory) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradient(params, group)), None

    first = jax.tree.map(lambda x: x[0], groups)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, params, first))
    return lax.scan(add, zeros, groups)[0]


def split_lanes(trajectory: Trajectory, groups: int) -> Trajectory:
    """[T, B] -> [groups, T, B / groups]; group g has the g-th block of lanes."""
    axes = {"actor_state": 0, "lane": 0}

    def split(axis: int, x: jax.Array) -> jax.Array:
        shape = (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    parts = zip((axes.get(name, 1) for name in Trajectory._fields), trajectory)
    return Trajectory(*(jax.tree.map(lambda x, a=a: split(a, x), part) for a, part in parts))
