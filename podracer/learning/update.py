"""One update of a learner: gradient, sum over shards, optimiser step, count, and copy of the target network.

An agent gives a loss of some lanes or samples of one shard, weighted so that the sum over all of them is the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from podracer import trajectories
from podracer.learning import gradients
from podracer.topology import collectives
from podracer.types import ArrayTree, LearnerState, Metrics, Trajectory

Loss = Callable[[ArrayTree, Any], tuple[jax.Array, tuple[Metrics, Any]]]
"""`(params, batch) -> (loss, (metrics, outputs))`, without collectives; see `gradients.accumulate`."""


class OptimizerLike(Protocol):
    """An optimiser, such as `optimizer.Optimizer` and `lars.ClippedLARS`."""

    @property
    def uses(self) -> tuple[str, ...]:
        """The numbers of `optimizer.TUNABLE` that it uses."""
        ...

    def pack(self, tree: ArrayTree) -> tuple[Any, Callable[[Any], ArrayTree]]:
        """Parameters, or a gradient, as `step` takes them, and a function that makes the tree again."""
        ...

    def init(self, params: ArrayTree, hyper: Mapping[str, jax.Array]) -> ArrayTree:
        """The state before the first step."""
        ...

    def step(
        self,
        grads: Any,
        opt_state: Any,
        params: Any,
        *,
        learning_rate: jax.Array | None,
        hyper: Mapping[str, jax.Array],
    ) -> tuple[Any, Any, jax.Array]:
        """New parameters, packed, the new state and the gradient's norm before clipping."""
        ...


Schedule = Literal["constant", "linear", "cosine"]
"""The course of a learning rate over the run: "linear" and "cosine" fall to 0, or "linear" to a share of it."""


def init(
    params: ArrayTree, optimizer: OptimizerLike, hyper: Mapping[str, jax.Array], aux: ArrayTree = ()
) -> LearnerState:
    """The learner's state before its first update."""
    return LearnerState(params, optimizer.init(params, hyper), dict(hyper), jnp.int32(0), aux)


def learning_rate(
    learner: LearnerState, progress: jax.Array, schedule: Schedule, warmup: float = 0.0, final: float = 0.0
) -> jax.Array | None:
    """The tunable `learning_rate` at a point of the run; None where the optimiser has a rate of its own.

    Args:
      learner: with the tunable numbers.
      progress: float32 [], from 0 to 1 over the run.
      schedule: its course after the warm-up.
      warmup: the share of the run over which it rises linearly from 0.
      final: the share of it that "linear" falls to.
    """
    rate = learner.hyper.get("learning_rate")
    if rate is None:
        return None
    if warmup:
        rate = rate * jnp.minimum(1.0, progress / warmup)
        progress = jnp.clip((progress - warmup) / max(1.0 - warmup, 1e-6), 0.0, 1.0)
    if schedule == "linear":
        return rate * (1.0 - (1.0 - final) * progress)
    if schedule == "cosine":
        # Half a cosine (Loshchilov and Hutter 2017, equation 5, without restarts).
        return rate * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    return rate


def rate_metric(rate: jax.Array | None) -> Metrics:
    """`grad/learning_rate`, or nothing."""
    return {} if rate is None else {"grad/learning_rate": rate}


def apply(
    loss: Loss,
    learner: LearnerState,
    batch: Any,
    *,
    optimizer: OptimizerLike,
    learning_rate: jax.Array | None,
    num_rows: int = 1,
    unrolled: bool = False,
    independent: bool = False,
    together: bool = False,
    copy_every: int = 0,
) -> tuple[LearnerState, Metrics, Any]:
    """Makes an update on a batch, under `collectives.DATA_AXES`; clips the gradient at the tunable `max_grad_norm`.

    Args:
      loss: of some lanes or samples.
      learner: the state before.
      batch: a tree of trajectories [T, B] and arrays [B, ...].
      optimizer: of the parameters.
      learning_rate: float32 [], or None (see `learning_rate`).
      num_rows: rows of a lane that go through the network.
      unrolled: whether most of them are states that a model is unrolled to.
      independent: whether they go through it side by side, as where the network has no core; fewer may go at a time.
      together: whether the loss has to see all lanes of a shard at once, as batch normalisation does.
      copy_every: updates between copies of the parameters to `aux`; 0 for none.

    Returns:
      The state after, the metrics with `grad/norm`, and the loss's outputs of all lanes.
    """
    grads, metrics, outputs = gradient(
        loss,
        learner.params,
        batch,
        num_rows=num_rows,
        unrolled=unrolled,
        independent=independent,
        together=together,
    )
    params, opt_state, norm = step(
        optimizer, grads, learner.opt_state, learner.params, learning_rate=learning_rate, hyper=learner.hyper
    )
    learner = learner._replace(params=params, opt_state=opt_state, num_updates=learner.num_updates + 1)
    # The target network.
    if copy_every:
        learner = learner._replace(aux=copy_target(learner, copy_every, params, learner.aux))
    return learner, metrics | {"grad/norm": norm}, outputs


def gradient(
    loss: Loss,
    params: ArrayTree,
    batch: Any,
    *,
    num_rows: int = 1,
    unrolled: bool = False,
    independent: bool = False,
    together: bool = False,
) -> tuple[ArrayTree, Metrics, Any]:
    """The gradient of a loss and its metrics, summed over all shards, and its outputs of all lanes.

    Args:
      loss: of some lanes or samples.
      params: what the gradient is with respect to.
      batch: as in `apply`.
      num_rows: as in `apply`.
      unrolled: as in `apply`.
      independent: as in `apply`.
      together: as in `apply`.
    """
    # The gradient, a few lanes at a time, then its sum over all shards.
    num_lanes, observations = _sizes(batch)
    at_a_time = num_lanes
    if not together:
        narrow = independent and gradients.is_narrow(params)
        at_a_time = gradients.at_a_time(observations, num_rows, num_lanes, unrolled, narrow)
    num_chunks = num_lanes // at_a_time

    def loss_of_chunk(params: ArrayTree, number: jax.Array) -> tuple[jax.Array, tuple[Metrics, Any]]:
        return loss(params, trajectories.group_of_batch(batch, number, num_chunks))

    sums, outputs = gradients.accumulate(loss_of_chunk, params, jnp.arange(num_chunks, dtype=jnp.int32))
    grads, metrics = collectives.global_sum(sums)
    whole = lambda x: x.reshape(x.shape[1:] if num_chunks == 1 else (-1, *x.shape[2:]))  # noqa: E731
    return grads, metrics, jax.tree.map(whole, outputs)


def step(
    optimizer: OptimizerLike,
    grads: ArrayTree,
    opt_state: ArrayTree,
    params: ArrayTree,
    *,
    learning_rate: jax.Array | None,
    hyper: Mapping[str, jax.Array],
    project: Callable[[ArrayTree], ArrayTree] | None = None,
) -> tuple[ArrayTree, ArrayTree, jax.Array]:
    """The parameters and the optimiser's state after a step, and the gradient's norm before clipping.

    `project` takes the parameters back into the set that they are to be in, such as weights of norm 1.
    """
    packed, restore = optimizer.pack(params)
    packed, opt_state, norm = optimizer.step(
        optimizer.pack(grads)[0], opt_state, packed, learning_rate=learning_rate, hyper=hyper
    )
    params = restore(packed)
    return params if project is None else project(params), opt_state, norm


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
