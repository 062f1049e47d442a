"""Resets of a network and its optimiser, against the loss of plasticity of long training (Nikishin et al. 2022)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs
from podracer.topology import collectives
from podracer.types import ArrayTree, LearnerState, Metrics, ReplaySpec


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


def updates_while_filling(replay: ReplaySpec | None) -> float:
    """Counts the updates that there would have been before the replay was filled, had it been so from the beginning."""
    return 0.0 if replay is None else replay.min_size * replay.ratio / replay.batch_size


def shared(key: jax.Array) -> jax.Array:
    """Makes one key of those of all shards, which differ, under `collectives.DATA_AXES`."""
    words = jax.random.key_data(key)
    return jax.random.wrap_key_data(collectives.global_max(words[None], axis=0))


def when_due(
    learner: LearnerState,
    progress: jax.Array,
    config: ResetConfig,
    before: float,
    fresh: Callable[[], ArrayTree],
    begin: Callable[[ArrayTree], LearnerState],
) -> tuple[LearnerState, Metrics]:
    """Resets a learner's state after an update, every `reset_interval` of them, and else leaves it as it is.

    Args:
      learner: the state after the update.
      progress: float32 []; the share of the run that is done.
      config: the settings.
      before: of `updates_while_filling`.
      fresh: makes parameters as at the beginning.
      begin: makes the first state of parameters.

    Returns:
      The state, and the number of resets so far.
    """

    def reset(learner: LearnerState) -> LearnerState:
        # Shrink and perturb (Ash and Adams 2020), heads and the optimiser's state anew, and the target a copy.
        params = shrink_and_perturb(learner.params, fresh(), config.reset_shrink)
        first = begin(params)
        return learner._replace(params=params, opt_state=first.opt_state, aux=first.aux)

    interval, number = config.reset_interval, learner.num_updates // config.reset_interval
    # The share p of the run had room for n + before updates, and so (n + before) (1 - p) / p more are to come.
    updates = learner.num_updates.astype(jnp.float32)
    to_come = (updates + before) * (1.0 - progress) / progress
    due = (learner.num_updates % interval == 0) & (to_come >= interval)
    # Of the multiples of the interval so far, the one within the last interval had none.
    skipped = (to_come + updates - number.astype(jnp.float32) * interval < interval) & (number > 0)
    # After the last step nothing says how many updates were before it, and multiples are counted on.
    count = (number - skipped.astype(jnp.int32)).astype(jnp.float32)
    return lax.cond(due, reset, lambda learner: learner, learner), {"reset/count": count}


def shrink_and_perturb(params: ArrayTree, fresh: ArrayTree, shrink: float) -> ArrayTree:
    """Mixes parameters with fresh ones: `shrink` of the torso's and the core's, and none of others."""

    def mix(path: tuple[Any, ...], old: jax.Array, new: jax.Array) -> jax.Array:
        return shrink * old + (1.0 - shrink) * new if _is_kept(path) else new

    return jax.tree.map_with_path(mix, params, fresh)


def check(config: ResetConfig, params: ArrayTree) -> None:
    """Checks that resets keep what they are to keep of a network's parameters.

    Raises:
      ValueError: for a network without a torso or a core to keep.
    """
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    if config.reset_shrink and not any(map(_is_kept, paths)):
        raise ValueError(
            f"reset_shrink={config.reset_shrink:g} keeps a part of the torso and the core, and no parameter of the "
            "network has torso or core in its name; name them so, or use reset_shrink=0, which keeps nothing."
        )


def _is_kept(path: tuple[Any, ...]) -> bool:
    # Not of a head called "score".
    return bool(re.search("torso|(?<!s)core", jax.tree_util.keystr(path, simple=True, separator="/").lower()))
