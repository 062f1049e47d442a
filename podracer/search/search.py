"""Monte-Carlo tree search over a model, for many roots at once: PUCT and Gumbel on one tree.

PUCT is Silver et al. 2018 (AlphaZero) and Schrittwieser et al. 2020 (MuZero), Gumbel Danihelka et al. 2022. A node has
a prior P or logits l, visits n(a), sums of returns W(a), a network value v, N = 1 + sum n, V = (v + sum W) / N and
Q(a) = W(a) / n(a). Discounts are signed: -1 if the other player moves next, so two-player games need nothing else.

All random numbers are drawn before the search, which is a pure function of arrays (`podracer.search.tree`). Symbols: N
roots (lanes), A actions, S simulations, D the depth cap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import distributions, spaces
from podracer.distributions import value_of
from podracer.nets.action_masks import LOWEST
from podracer.search import mctx_engine, tree
from podracer.search.action_selection import (
    SelectionInputs,
    considered_visits,
    mixed_value,
    prior_of,
    sigma,
    tree_config,
)
from podracer.search.model import Model as Model
from podracer.search.model import Root as Root
from podracer.search.model import Step as Step
from podracer.search.search_config import AgentSettings as AgentSettings
from podracer.search.search_config import RootValue as RootValue
from podracer.search.search_config import SearchConfig as SearchConfig
from podracer.search.search_config import settings as settings
from podracer.search.tree import RootInputs, Tree
from podracer.types import ActorParams


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
      policy: float32 [N, A]; the policy target: fractions of visits (PUCT), the improved policy (Gumbel).
      value: float32 [N]; of the root, see `SearchConfig.root_value`.
      action: int32 [N]; the selected action.
      visits: int32 [N, A]; of the root's actions.
      q: float32 [N, A]; Q at the root, 0 for unvisited actions.
      depth: float32 [N]; mean number of edges from the root to a simulation's new node.
      tree: `Tree` with `keep_tree`, else ().
    """

    policy: jax.Array
    value: jax.Array
    action: jax.Array
    visits: jax.Array
    q: jax.Array
    depth: jax.Array
    tree: Tree | tuple[()] = ()


class Planner(NamedTuple):
    """An agent's search, for acting and for `podracer.Result.explain`.

    Attributes:
      space: space of the observations of `model.root`, frames stacked.
      model: the model.
      variables: `(ActorParams) -> variables` of the model.
      config: the settings of the search.
    """

    space: spaces.Space
    model: Model
    variables: Callable[[ActorParams], Any]
    config: SearchConfig


def search(
    model: Model,
    variables: Any,
    root: Root,
    key: jax.Array,
    config: SearchConfig,
    *,
    explore: bool = True,
    temperature: jax.Array | float = 1.0,
    keep_tree: bool = False,
) -> SearchResult:
    """Searches from every root, each independently of the others.

    Args:
      model: its `step` is called S times, with all lanes.
      variables: passed to the model; an argument, for `vmap` to be fast (see `tree.run_simulations`).
      root: N roots, from `model.root`.
      key: consumed.
      config: static.
      explore: bool, static; True adds noise: Dirichlet noise, random ties and actions (PUCT), or Gumbel noise.
      temperature: float [] or [N]; PUCT's action is drawn from n^(1 / temperature), the most visited at 0.
      keep_tree: bool, static; True returns the tree too.
    """
    if config.engine == "mctx":
        prior = functools.partial(prior_of, config)
        settings = {"explore": explore, "temperature": temperature, "lowest": LOWEST}
        grown = mctx_engine.search(model.step, variables, root, key, config, prior, **settings)
        first = jax.tree.map(lambda x: x[:, 0], grown.tree)
        return _result(config, first, grown.policy, grown.action, grown.depth, grown.tree if keep_tree else ())
    N, A = root.logits.shape
    noise_key, dirichlet_key, action_key = jax.random.split(key, 3)
    legal = jnp.ones((N, A), bool) if root.legal is None else root.legal
    num_legal = jnp.sum(legal, -1, dtype=jnp.int32)
    prior = prior_of(config, root.logits, legal)
    noise, target_visits = jnp.zeros((N, A)), ()
    if config.algorithm == "gumbel":
        # Gumbel-Top-k without replacement, by one noise for all simulations (Danihelka et al. 2022, algorithm 2).
        table = np.array([considered_visits(m, config.simulations) for m in range(min(config.considered, A) + 1)])
        target_visits = jnp.asarray(table, jnp.int32)[jnp.minimum(num_legal, table.shape[0] - 1)]
        if explore:
            noise = jax.random.gumbel(noise_key, (N, A))
    elif explore:
        # Breaks ties; then P <- (1 - f) P + f eta, with eta from Dir(alpha) (Silver et al. 2018, Methods).
        noise = 1e-7 * jax.random.uniform(noise_key, (N, A))
        if f := config.dirichlet_fraction:
            alpha = jnp.minimum(1.0, 10.0 / jnp.maximum(num_legal, 1).astype(jnp.float32))[:, None]
            if config.dirichlet_alpha is not None:
                alpha = jnp.full((N, 1), config.dirichlet_alpha)
            eta = distributions.dirichlet(dirichlet_key, jnp.broadcast_to(alpha, (N, A)), legal)
            prior = jnp.where(legal, (1 - f) * prior + f * eta, prior)

    roots = RootInputs(prior, root.value, root.embedding, SelectionInputs(noise, target_visits))
    state = tree.run_simulations(model.step, tree_config(config), variables, roots, keep_tree)
    first = Tree.from_rows(state.rows[:, 0])
    if config.algorithm == "puct":
        # The policy target is the distribution of visits (Silver et al. 2018).
        policy = first.n / config.simulations
        draw = jnp.zeros((N, 1))
        if explore:  # a draw from n^(1 / temperature): Gumbel-max with the noise times the temperature
            draw = jnp.broadcast_to(temperature, (N,))[:, None] * jax.random.gumbel(action_key, (N, A))
        action = jnp.argmax(jnp.log(first.n) + draw, -1)
    else:
        # The improved policy, softmax(logits + sigma(completed Q)) (Danihelka et al. 2022, section 4).
        improved = first.P + sigma(config, first)
        policy = jax.nn.softmax(improved)
        # The action that sequential halving leaves: the largest g + logits + sigma(Q) among the most visited.
        most = legal & (first.n == jnp.max(first.n, -1, keepdims=True))
        action = jnp.argmax(jnp.where(most, noise + improved, -jnp.inf), -1)
    return _result(config, first, policy, action, state.depth, tree.as_tree(state) if keep_tree else ())


def _result(
    config: SearchConfig, root: Tree, policy: Any, action: Any, depth: Any, nodes: Tree | tuple[()]
) -> SearchResult:
    """Makes the result of trees with these roots [N] and paths of `depth` edges [N] in total."""
    return SearchResult(
        policy=policy,
        value=_root_value(config, root, action),
        action=action.astype(jnp.int32),
        visits=root.n.astype(jnp.int32),
        q=root.Q,
        depth=depth.astype(jnp.float32) / config.simulations,
        tree=nodes,
    )


def _root_value(config: SearchConfig, root: Tree, action: jax.Array) -> jax.Array:
    """Computes the values of roots, float32 [N] (see `RootValue`)."""
    kind = config.root_value or ("mean" if config.algorithm == "puct" else "mixed")
    if kind == "action":
        return value_of(root.Q, action)
    return (mixed_value(config, root) if kind == "mixed" else root.V)[:, 0]
