"""One update of a learner: gradient, sum over shards, optimiser step, count, and copy of the target network.

An agent gives a loss of some lanes or samples of one shard, weighted so that the sum over all of them is the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from podracer import trajectories
from podracer.learning import gradients
from podracer.topology import collectives
from podracer.types import ArrayTree, LearnerState, Metrics, Trajectory

Loss = Callable[[ArrayTree, Any], tuple[jax.Array, tuple[Metrics, Any]]]
"""`(params, batch) -> (loss, (metrics, outputs))`, without collectives; see `gradients.accumulate`."""


class Optimizer(Protocol):
    """An optimiser, such as `optimizer.Optimizer` and `lars.ClippedLARS`."""

    def init(self, params: ArrayTree) -> ArrayTree:
        """The state before the first step."""
        ...

    def step(
        self,
        grads: ArrayTree,
        opt_state: Any,
        params: ArrayTree,
        *,
        learning_rate: jax.Array,
        max_grad_norm: jax.Array,
    ) -> tuple[ArrayTree, Any, jax.Array]:
        """New parameters, the new state and the gradient's norm before clipping."""
        ...


def init(params: ArrayTree, optimizer: Optimizer, hyper: Mapping[str, jax.Array], aux: ArrayTree = ()) -> LearnerState:
    """The learner's state before its first update."""
    return LearnerState(params, optimizer.init(params), dict(hyper), jnp.int32(0), aux)


def learning_rate(learner: LearnerState, progress: jax.Array, decay: bool) -> jax.Array:
    """The tunable `learning_rate`, which falls linearly to 0 over the run if `decay`."""
    rate = learner.hyper["learning_rate"]
    return rate * (1.0 - progress) if decay else rate


def apply(
    loss: Loss,
    learner: LearnerState,
    batch: Any,
    *,
    optimizer: Optimizer,
    learning_rate: jax.Array,
    num_rows: int = 1,
    unrolled: bool = False,
    together: bool = False,
    copy_every: int = 0,
) -> tuple[LearnerState, Metrics, Any]:
    """Makes an update on a batch, under `collectives.DATA_AXES`; clips the gradient at the tunable `max_grad_norm`.

    Args:
      loss: of some lanes or samples.
      learner: the state before.
      batch: a tree of trajectories [T, B] and arrays [B, ...].
      optimizer: of the parameters.
      learning_rate: float32 [].
      num_rows: rows of a lane that go through the network.
      unrolled: whether most of them are states that a model is unrolled to.
      together: whether the loss has to see all lanes of a shard at once, as batch normalisation does.
      copy_every: updates between copies of the parameters to `aux`; 0 for none.

    Returns:
      The state after, the metrics with `grad/norm`, and the loss's outputs of all lanes.
    """
    # The gradient, a few lanes at a time, then its sum over all shards.
    num_lanes, observations = _sizes(batch)
    at_a_time = num_lanes if together else gradients.at_a_time(observations, num_rows, num_lanes, unrolled=unrolled)
    num_chunks = num_lanes // at_a_time
    chunks = trajectories.split_batch(batch, num_chunks)
    grads, metrics, outputs = gradients.accumulate(loss, learner.params, chunks)
    grads, metrics = collectives.global_sum((grads, metrics))

    # The step.
    params, opt_state, norm = optimizer.step(
        grads,
        learner.opt_state,
        learner.params,
        learning_rate=learning_rate,
        max_grad_norm=learner.hyper["max_grad_norm"],
    )
    learner = learner._replace(params=params, opt_state=opt_state, num_updates=learner.num_updates + 1)
    # The target network.
    if copy_every:
        learner = learner._replace(aux=copy_target(learner, copy_every, params, learner.aux))
    whole = lambda x: x.reshape(x.shape[1:] if num_chunks == 1 else (-1, *x.shape[2:]))  # noqa: E731
    return learner, metrics | {"grad/norm": norm}, jax.tree.map(whole, outputs)


def copy_target(learner: LearnerState, interval: int, params: ArrayTree, target: ArrayTree) -> ArrayTree:
    """The target network after an update: `params` every `interval` updates, else `target` (Mnih et al. 2015)."""
    copy = learner.num_updates % interval == 0
    return jax.tree.map(lambda new, old: jnp.where(copy, new, old), params, target)


def _is_trajectory(x: Any) -> bool:
    return isinstance(x, Trajectory)


def _sizes(batch: Any) -> tuple[int, ArrayTree]:
    """The number of lanes, and what goes through the network: observations of trajectories, else every array."""
    parts = jax.tree.leaves(batch, is_leaf=_is_trajectory)
    first = parts[0].lane if _is_trajectory(parts[0]) else parts[0]
    return first.shape[0], [x.timesteps.observation if _is_trajectory(x) else x for x in parts]
