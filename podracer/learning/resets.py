"""Resets of a network and its optimiser, against the loss of plasticity of long training (Nikishin et al. 2022)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs
from podracer.topology import collectives
from podracer.types import ArrayTree, LearnerState


@dataclasses.dataclass(frozen=True)
class ResetConfig:
    """The settings of resets.

    Attributes:
      reset_interval: updates from one reset to the next, 0 for none. There is none in the last interval (BBF, Schwarzer
        et al. 2023: 20,000 steps of the environment).
      reset_shrink: the share of the torso and the core that a reset keeps; the rest of them, and all else, is fresh
        (BBF: 0.5).
    """

    reset_interval: int = configs.field(0, low=0)
    reset_shrink: float = configs.field(0.5, low=0.0, high=1.0)


def shared(key: jax.Array) -> jax.Array:
    """Makes one key of those of all shards, which differ, under `collectives.DATA_AXES`."""
    words = jax.random.key_data(key)
    return jax.random.wrap_key_data(collectives.global_max(words[None], axis=0))


def when_due(
    learner: LearnerState,
    progress: jax.Array,
    config: ResetConfig,
    fresh: Callable[[], ArrayTree],
    begin: Callable[[ArrayTree], LearnerState],
) -> LearnerState:
    """Resets a learner's state after an update, every `reset_interval` of them, and else leaves it as it is.

    Args:
      learner: the state after the update.
      progress: float32 []; the share of the run that is done.
      config: the settings.
      fresh: makes parameters as at the beginning.
      begin: makes the first state of parameters.
    """

    def reset(learner: LearnerState) -> LearnerState:
        # Shrink and perturb (Ash and Adams 2020), heads and the optimiser's state anew, and the target a copy.
        params = shrink_and_perturb(learner.params, fresh(), config.reset_shrink)
        first = begin(params)
        return learner._replace(params=params, opt_state=first.opt_state, aux=first.aux)

    interval, updates = config.reset_interval, learner.num_updates.astype(jnp.float32)
    # At the pace so far, updates (1 - p) / p more are to come.
    last = updates * (1.0 - progress) < interval * progress
    due = (learner.num_updates % interval == 0) & ~last
    return lax.cond(due, reset, lambda learner: learner, learner)


def shrink_and_perturb(params: ArrayTree, fresh: ArrayTree, shrink: float) -> ArrayTree:
    """Mixes parameters with fresh ones: `shrink` of the torso's and the core's, and none of others."""

    def mix(path: tuple[Any, ...], old: jax.Array, new: jax.Array) -> jax.Array:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        kept = any("torso" in name or name == "core" for name in names)
        return shrink * old + (1.0 - shrink) * new if kept else new

    return jax.tree.map_with_path(mix, params, fresh)
