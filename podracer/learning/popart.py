"""PopArt: one network learns values of very different scales, with a value head and statistics for each task.

Multi-task deep reinforcement learning with PopArt (Hessel et al. 2018, https://arxiv.org/abs/1809.04474). A head's
output n is the value of its task in units of the task's targets: V = sigma n + mu. When mu and sigma follow the
targets ("ART"), the head's weights move against them, so that V stays as it was ("POP").

Departure from the paper: it moves mu and nu by beta (G - mu) for every target G in turn. Here all N targets of a task
in a batch move them at once, as far as N targets that are all equal to the batch's moments would in turn.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from podracer.topology import collectives
from podracer.types import ArrayTree

LOWEST, HIGHEST = 1e-4, 1e6
"""Limits of sigma, the paper's."""


class Statistics(NamedTuple):
    """Statistics of the targets of K tasks.

    Attributes:
      mean: mu, float32 [K].
      variance: nu - mu^2, float32 [K], where nu is the second moment. It is kept instead of nu, which float32 rounds
        too much where mu is far larger than sigma.
    """

    mean: jax.Array
    variance: jax.Array

    @property
    def scale(self) -> jax.Array:
        """sigma, float32 [K]."""
        return jnp.sqrt(jnp.clip(self.variance, LOWEST**2, HIGHEST**2))


def initial(num_tasks: int) -> Statistics:
    """mu = 0 and sigma = 1 of every task."""
    return Statistics(jnp.zeros(num_tasks), jnp.ones(num_tasks))


def update(
    statistics: Statistics, targets: jax.Array, mask: jax.Array, task: jax.Array, step_size: float
) -> Statistics:
    """Moves the statistics to the targets of all shards; those of a task without any stay bit by bit.

    Args:
      statistics: before.
      targets: G, unnormalised, [T, B].
      mask: [T, B]; 1 for the targets that count, else 0.
      task: int32 [B]; of each lane.
      step_size: beta, for one target.
    """
    (num_tasks,) = statistics.mean.shape
    weight = mask[..., None] * jax.nn.one_hot(task, num_tasks)[None]
    of_tasks = jnp.broadcast_to(targets[..., None], weight.shape)
    mean, variance, count = collectives.global_moments(of_tasks, weight, axis=(0, 1))
    # mu' = mu + a (m1 - mu) and nu' = nu + a (m2 - nu), with a = 1 - (1 - beta)^N; of the latter nu' - mu'^2.
    a = -jnp.expm1(count * jnp.log1p(-step_size))
    delta = mean - statistics.mean
    spread = (1.0 - a) * statistics.variance + a * variance + a * (1.0 - a) * jnp.square(delta)
    return Statistics(statistics.mean + a * delta, spread)


def preserve(head: ArrayTree, before: Statistics, after: Statistics) -> ArrayTree:
    """The head's `kernel` [F, K] and `bias` [K] by which V is after the statistics moved what it was before."""
    # w' = w sigma / sigma' and b' = (sigma b + mu - mu') / sigma'.
    ratio = before.scale / after.scale
    bias = ratio * head["bias"] + (before.mean - after.mean) / after.scale
    return head | {"kernel": head["kernel"] * ratio[None], "bias": bias}


def select(outputs: jax.Array, task: jax.Array) -> jax.Array:
    """The output of each lane's own head, [T, B, K] to [T, B]."""
    chosen = jax.nn.one_hot(task, outputs.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(chosen[None], outputs, 0.0), axis=-1)


def unnormalize(normalized: jax.Array, statistics: Statistics, task: jax.Array) -> jax.Array:
    """V = sigma n + mu, of n [T, B]."""
    return statistics.scale[task][None] * normalized + statistics.mean[task][None]


def normalize_rewards(reward: jax.Array, discount: jax.Array, statistics: Statistics, task: jax.Array) -> jax.Array:
    """The rewards of which normalised values n are the values: (r + gamma mu - mu) / sigma.

    With them r + gamma V' - V becomes (r + gamma V' - V) / sigma, and so all returns and advantages that are made of
    n are those of V in units of sigma, whatever the algorithm: (G - mu) / sigma, and A / sigma.

    Args:
      reward: [T, B].
      discount: gamma, [T, B], 0 where an episode terminates.
      statistics: of the tasks.
      task: int32 [B]; of each lane.
    """
    mean, scale = statistics.mean[task][None], statistics.scale[task][None]
    return (reward + (discount - 1.0) * mean) / scale
