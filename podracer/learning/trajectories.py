"""Trajectories taken apart and put together along their lanes and rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podracer.types import ArrayTree, Trajectory


def bootstrap_row(trajectory: Trajectory) -> ArrayTree:
    """Row T of the time steps, [1, B]."""
    return jax.tree.map(lambda x: x[-1:], trajectory.timesteps)


def by_lane(function: Callable[..., jax.Array], *trajectories: Trajectory) -> Trajectory:
    """`function(axis of the lanes, *leaves)` of all leaves of trajectories."""
    axes: Any = Trajectory(1, 1, 1, 0, 1, 0)  # type: ignore[arg-type]
    parts = (jax.tree.map(lambda *x, a=a: function(a, *x), *part) for a, *part in zip(axes, *trajectories))
    return Trajectory(*parts)


def split_lanes(trajectory: Trajectory, groups: int) -> Trajectory:
    """[T, B] -> [groups, T, B / groups]; group g has the g-th block of lanes."""
    return by_lane(lambda axis, x: split(x, groups, axis), trajectory)


def split(x: jax.Array, groups: int, axis: int) -> jax.Array:
    """[..., n, ...] -> [groups, ..., n / groups, ...], in blocks along `axis`."""
    shape = (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)
