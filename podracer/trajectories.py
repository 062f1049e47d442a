"""Trajectories split and combined along lanes and rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer.types import ArrayTree, Trajectory


def row_of_lanes(rows: ArrayTree, number: jax.Array, n: int) -> ArrayTree:
    """Returns row `number` of each lane, int32 [B] from 1 to n, of rows [n + 1, B, ...]: [1, B, ...]."""

    def pick(x: jax.Array) -> jax.Array:
        # Comparisons, not a gather: they join what makes the rows, such as stacking frames.
        row = x[1:2]
        for i in range(2, n + 1):
            row = jnp.where((number >= i).reshape(1, -1, *(1,) * (x.ndim - 2)), x[i : i + 1], row)
        return row

    return jax.tree.map(pick, rows)


def by_lane(function: Callable[..., jax.Array], *trajectories: Trajectory) -> Trajectory:
    """`function(axis of the lanes, *leaves)` of all leaves of trajectories."""
    # Time steps, actions, extras and versions are [T, B], the actor's state and lane ids [B].
    axes: Any = Trajectory(1, 1, 1, 0, 1, 0)  # type: ignore[arg-type]
    parts = (jax.tree.map(lambda *x, a=a: function(a, *x), *part) for a, *part in zip(axes, *trajectories))
    return Trajectory(*parts)


def split_lanes(trajectory: Trajectory, groups: int) -> Trajectory:
    """[T, B] -> [groups, T, B / groups]; group g has the g-th block of lanes."""
    return by_lane(lambda axis, x: split(x, groups, axis), trajectory)


def join_lanes(trajectory: Trajectory) -> Trajectory:
    """[groups, T, B / groups] -> [T, B]; the inverse of `split_lanes`."""

    def join(axis: int, x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    return by_lane(join, trajectory)


def split_batch(batch: Any, groups: int) -> Any:
    """[B] -> [groups, B / groups] of a tree of trajectories and arrays [B, ...], such as a `Batch`."""

    def part(x: Any) -> Any:
        return split_lanes(x, groups) if isinstance(x, Trajectory) else split(x, groups, 0)

    return jax.tree.map(part, batch, is_leaf=lambda x: isinstance(x, Trajectory))


def group_of_batch(batch: Any, number: jax.Array, groups: int) -> Any:
    """Returns group `number`, int32 [], of `split_batch(batch, groups)`, without a copy of the whole batch."""

    def slice_lanes(axis: int, x: jax.Array) -> jax.Array:
        size = x.shape[axis] // groups
        return lax.dynamic_slice_in_dim(x, number * size, size, axis)

    def part(x: Any) -> Any:
        return by_lane(slice_lanes, x) if isinstance(x, Trajectory) else slice_lanes(0, x)

    return jax.tree.map(part, batch, is_leaf=lambda x: isinstance(x, Trajectory))


def split(x: jax.Array, groups: int, axis: int) -> jax.Array:
    """[..., n, ...] -> [groups, ..., n / groups, ...], in blocks along `axis`."""
    # [..., groups, n / groups, ...], then the groups in front.
    shape = (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def flat(observation: ArrayTree, leading: int) -> ArrayTree:
    """Observations with one dim after the `leading` ones, as buffers keep them.

    A TPU lays the last two dims out in tiles of at least 8 x 128: kept in its shape, a board of 10 x 5 takes 41 times
    its bytes (docs/adr/0011-accelerators.md).
    """
    return jax.tree.map(lambda x: x.reshape(*x.shape[:leading], -1) if x.ndim > leading + 1 else x, observation)


def shaped(observation: ArrayTree, leading: int, like: ArrayTree) -> ArrayTree:
    """Inverts `flat`, also for padded rows; `like` has the shape after the leading dims (shapes will do)."""

    def restore(x: jax.Array, like: Any) -> jax.Array:
        if like.ndim <= leading + 1:
            return x
        shape = like.shape[leading:]
        return x[..., : math.prod(shape)].reshape(*x.shape[:-1], *shape)

    return jax.tree.map(restore, observation, like)
