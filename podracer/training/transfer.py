"""A run that begins with what another has learnt."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from podracer.result.result import Result
from podracer.types import LearnerState


def transferred(source: Result, learner: LearnerState) -> LearnerState:
    """A fresh learner with the parameters, normalisers and targets of another run's best member, for all members.

    Args:
      source: the other run.
      learner: leading dim [P]; shapes will do to check.

    Raises:
      ValueError: where they do not fit.
    """
    member = source.best_member
    old = (source.learner.params, _without_rate(source.learner.aux))
    new = (learner.params, _without_rate(learner.aux))
    by_name = lambda tree: {  # noqa: E731
        jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(tree)
    }
    old_arrays, new_arrays = by_name(old), by_name(new)
    for name in [*new_arrays, *old_arrays]:
        old_shape, new_shape = (
            f"{list(x[name].shape[1:])}" if name in x else "absent" for x in (old_arrays, new_arrays)
        )
        if old_shape != new_shape:
            raise ValueError(
                f"init_from: that run's network or settings are others: {name.partition('.')[2]} is {old_shape} there "
                f"and {new_shape} here."
            )

    def put(x: jax.Array, like: jax.Array) -> jax.Array:
        return jax.device_put(jnp.broadcast_to(jnp.asarray(jax.device_get(x))[member], like.shape), like.sharding)

    if any(isinstance(x, jax.ShapeDtypeStruct) for x in new_arrays.values()):
        return learner
    params, aux = jax.tree.map(put, old, new)
    if (rate := getattr(learner.aux, "learning_rate", None)) is not None:
        aux = aux._replace(learning_rate=rate)
    return learner._replace(params=params, aux=aux)


def _without_rate(aux: Any) -> Any:
    """A learner's `aux` without a learning rate that PPO adapts, which begins anew like the optimiser."""
    return aux._replace(learning_rate=()) if hasattr(aux, "learning_rate") else aux
