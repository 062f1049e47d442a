"""Acting by search in a model that is learnt (Schrittwieser et al. 2020, MuZero)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from podracer import nets
from podracer.search import search
from podracer.types import ActorParams, ArrayTree, TimeStep

TEMPERATURES = (1.0, 0.5, 0.25)
"""Temperatures of the visit counts by which actions are drawn: in the first half of a run, in its third quarter and in
its last (appendix D)."""


def temperature(progress: jax.Array) -> jax.Array:
    """The temperature of this part of a run, float32 []."""
    part = (progress >= 0.5).astype(jnp.int32) + (progress >= 0.75).astype(jnp.int32)
    return jnp.float32(TEMPERATURES)[part]


def act(
    plan: search.Planner,
    actor: ActorParams,
    memory: nets.ActorState,
    timestep: TimeStep,
    key: jax.Array,
    evaluation: bool,
    at_random: jax.Array | None = None,
) -> tuple[jax.Array, ArrayTree, nets.ActorState]:
    """Searches from the rows of lanes, [B]: the action, and the search's policy and value as extras (see `Agent.act`).

    Args:
      plan: the search.
      actor: parameters, with a `temperature` in `aux`.
      memory: of the lanes.
      timestep: their rows.
      key: consumed.
      evaluation: whether to act without noise, by the most visits.
      at_random: bool []; whether actions are drawn from all legal ones instead, unless this is evaluation.
    """
    # s_0 = h(o) of the stacked frames.
    stacked, _, memory = nets.step(nets.FRAME_STACKER, actor.params, memory, timestep)
    variables = plan.variables(actor)
    root = plan.model.root(variables, stacked)
    at_random = None if evaluation else at_random
    random_key, key = (key, key) if at_random is None else jax.random.split(key)
    # The search from s_0, with noise at its root unless this is evaluation.
    result = search.search(
        plan.model,
        variables,
        root,
        key,
        plan.config,
        explore=not evaluation,
        temperature=0.0 if evaluation else actor.aux["temperature"],
    )
    action = result.action
    if at_random is not None:
        legal = jnp.ones(root.logits.shape, bool) if root.legal is None else root.legal
        logits = jnp.where(legal, 0.0, nets.action_masks.LOWEST)
        drawn = jax.random.categorical(random_key, logits).astype(action.dtype)
        action = jnp.where(at_random, drawn, action)
    return action, {"policy": result.policy, "value": result.value}, memory
