"""A search by mctx in place of our own: the same models, settings and results.

    root, step  ->  muzero_policy (PUCT) or gumbel_muzero_policy (Gumbel)  ->  policy, action, Tree

Signed discounts work in mctx as here. Three things differ, and docs/search.md says so: ties are broken by chance in
PUCT, Dirichlet noise is drawn for all actions and masked afterwards, and states behind the root have no masks, so that
illegal actions get the lowest logit there.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer.search.model import StepFn
from podracer.search.tree import Tree

Prior = Callable[[jax.Array, jax.Array | None], jax.Array]


class Grown(NamedTuple):
    """Trees that mctx has grown, and its results.

    Attributes:
      policy: float32 [N, A]; mctx's `action_weights`.
      action: int32 [N].
      depth: int32 [N]; edges walked, of all simulations.
      tree: with embeddings, [N, S+1]; `choice` is -1, for mctx keeps no choices.
    """

    policy: jax.Array
    action: jax.Array
    depth: jax.Array
    tree: Tree


def check(config: Any) -> None:
    """Refuses settings that mctx does not have, and a machine without it.

    Args:
      config: a `SearchConfig`.

    Raises:
      ValueError: for either.
    """
    if config.embedding_dtype is not None:
        raise ValueError(
            f"embedding_dtype={config.embedding_dtype!r}: mctx stores states as the model makes them; leave it None "
            "with engine='mctx'."
        )
    if importlib.util.find_spec("mctx") is None:
        raise ValueError("engine='mctx' needs mctx (the extra 'search'), not installed here: pip install mctx.")


def search(
    step: StepFn,
    variables: Any,
    root: Any,
    key: jax.Array,
    config: Any,
    prior: Prior,
    lowest: float,
    *,
    explore: bool,
    temperature: jax.Array | float,
) -> Grown:
    """Searches from every root, as `podracer.search.search.search` does.

    Args:
      step: of the model.
      variables: passed to it.
      root: where to begin, a `Root`.
      key: of all that is random.
      config: static, a `SearchConfig`.
      prior: of nodes, as `TreeConfig.prior`.
      lowest: the logit of an illegal action.
      explore: False for no noise. Ties remain random. Static.
      temperature: float, [] or [N].

    Raises:
      ValueError: for a setting that mctx does not have at roots with masks.
    """
    mctx: Any = importlib.import_module("mctx")

    def recurrent(variables: Any, key: jax.Array, action: jax.Array, embedding: Any) -> Any:
        new = step(variables, embedding, action)
        logits, value, reward, discount = (
            x.astype(jnp.float32) for x in (new.logits, new.value, new.reward, new.discount)
        )
        # mctx masks the root alone: below it an illegal action has the lowest prior.
        if new.legal is not None:
            logits = jnp.where(new.legal, logits, lowest)
        out = mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value)
        return out, new.embedding

    if config.algorithm == "puct":
        policy = functools.partial(mctx.muzero_policy, **_puct_settings(mctx, config, root, explore))
        temperatures = jnp.broadcast_to(temperature if explore else 0.0, root.value.shape)[:, None]
        policy = functools.partial(policy, temperature=temperatures)
    else:
        policy = functools.partial(mctx.gumbel_muzero_policy, **_gumbel_settings(mctx, config, explore))
    # mctx mixes dtypes and ranks, which callers may have forbidden.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out = policy(
            variables,
            key,
            mctx.RootFnOutput(
                prior_logits=root.logits.astype(jnp.float32),
                value=root.value.astype(jnp.float32),
                embedding=root.embedding,
            ),
            recurrent,
            config.simulations,
            invalid_actions=None if root.legal is None else ~root.legal,
            max_depth=config.max_depth,
        )
    depth = jnp.sum(out.search_tree.children_visits, (1, 2), dtype=jnp.int32)
    return Grown(out.action_weights, out.action.astype(jnp.int32), depth, _tree(out.search_tree, prior, lowest))


def _puct_settings(mctx: Any, config: Any, root: Any, explore: bool) -> dict[str, Any]:
    """The arguments of `muzero_policy`."""
    # Dirichlet noise at the root (Silver et al. 2018): alpha falls with the number of actions.
    alpha = config.dirichlet_alpha
    if alpha is None:
        if root.legal is not None and explore and config.dirichlet_fraction:
            raise ValueError(
                "dirichlet_alpha=None: mctx draws noise alike at all roots, and cannot follow how many actions are "
                "legal; give a number with engine='mctx'."
            )
        alpha = min(1.0, 10.0 / root.logits.shape[1])
    if config.bounds is None:
        transform = functools.partial(mctx.qtransform_by_parent_and_siblings, epsilon=config.epsilon)
    else:
        low, high = config.bounds
        transform = functools.partial(mctx.qtransform_by_min_max, min_value=low, max_value=high)
    return {
        "qtransform": transform,
        "dirichlet_fraction": float(config.dirichlet_fraction) if explore else 0.0,
        "dirichlet_alpha": float(alpha),
        "pb_c_init": config.c_init,
        "pb_c_base": config.c_base,
    }


def _gumbel_settings(mctx: Any, config: Any, explore: bool) -> dict[str, Any]:
    """The arguments of `gumbel_muzero_policy`.

    With bounds, Q is divided by their distance. That they begin at 0 in our formula moves all logits alike.
    """
    distance = 1.0 if config.bounds is None else config.bounds[1] - config.bounds[0]
    transform = functools.partial(
        mctx.qtransform_completed_by_mix_value,
        value_scale=config.value_scale / max(distance, config.epsilon),
        maxvisit_init=config.visit_offset,
        rescale_values=config.bounds is None,
        epsilon=config.epsilon,
    )
    return {
        "qtransform": transform,
        "max_num_considered_actions": config.considered,
        "gumbel_scale": 1.0 if explore else 0.0,
    }


def _tree(grown: Any, prior: Prior, lowest: float) -> Tree:
    """mctx's tree as ours. Its edges have rewards and discounts; ours stand at the nodes that edges lead to."""
    logits = grown.children_prior_logits
    n = grown.children_visits.astype(jnp.float32)
    # Q of an edge: r + gamma v of the node that it leads to, as in the backup (Schrittwieser et al. 2020, eq. 4).
    Q = grown.children_rewards + grown.children_discounts * grown.children_values
    parent, action = jnp.maximum(grown.parents, 0), jnp.maximum(grown.action_from_parent, 0)
    lane = jnp.arange(n.shape[0])[:, None]
    into = lambda edges: jnp.where(grown.parents >= 0, edges[lane, parent, action], 0.0)  # noqa: E731
    return Tree(
        P=prior(logits, logits > lowest),
        n=n,
        W=n * Q,
        child=grown.children_index.astype(jnp.float32),
        v=grown.raw_values,
        r=into(grown.children_rewards),
        d=into(grown.children_discounts),
        choice=jnp.full(grown.raw_values.shape, -1.0),
        embedding=grown.embeddings,
    )
