"""The selection of actions in a search: the PUCT rule, and Gumbel's sequential halving and improved policy.

Symbols are those of `podracer.search.search`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer.nets.action_masks import LOWEST, lower
from podracer.search.search_config import SearchConfig
from podracer.search.tree import Tree, TreeConfig


@functools.cache
def considered_visits(considered: int, simulations: int) -> tuple[int, ...]:
    """Computes the visits that the action of each simulation has before it, [S], under sequential halving.

    The schedule of Danihelka et al. 2022, algorithm 2: simulations are shared equally over the considered actions, and
    after each of log2(m) phases half of the actions are dropped.
    """
    if considered <= 1:
        return tuple(range(simulations))
    sequence: list[int] = []
    visits, k, phases = [0] * considered, considered, math.ceil(math.log2(considered))
    while len(sequence) < simulations:
        for _ in range(max(1, simulations // (phases * k))):
            sequence += visits[:k]
            visits[:k] = [n + 1 for n in visits[:k]]
        k = max(2, k // 2)
    return tuple(sequence[:simulations])


class SelectionInputs(NamedTuple):
    """The inputs of selection besides the node.

    Attributes:
      noise: float32 [N, A]; added to the scores of the root, and with PUCT, where it breaks ties, of every node.
      target_visits: int32 [N, S]; `considered_visits` of each root (Gumbel), else ().
    """

    noise: jax.Array
    target_visits: Any


def tree_config(config: SearchConfig) -> TreeConfig:
    """Makes the selection rule and the size of trees."""
    select = puct if config.algorithm == "puct" else gumbel
    cap = min(config.max_depth or config.simulations, config.simulations)
    return TreeConfig(
        functools.partial(prior_of, config),
        functools.partial(select, config),
        config.simulations,
        cap,
        config.embedding_dtype,
    )


def prior_of(config: SearchConfig, logits: jax.Array, legal: jax.Array | None) -> jax.Array:
    """Computes priors [..., A]: probabilities, -1 if illegal (PUCT); their logarithms, `LOWEST` if illegal (Gumbel)."""
    logits = logits.astype(jnp.float32)
    logits = lower(logits, legal)
    prior = jax.nn.softmax(logits) if config.algorithm == "puct" else jax.nn.log_softmax(logits)
    return prior if legal is None else jnp.where(legal, prior, -1.0 if config.algorithm == "puct" else LOWEST)


def _scaled(config: SearchConfig, x: jax.Array, low: Any, high: Any) -> jax.Array:
    """Maps x from [low, high], or from `bounds`, to [0, 1]."""
    low, high = config.bounds or (low, high)
    return (x - low) / jnp.maximum(high - low, config.epsilon)


def puct(config: SearchConfig, node: Tree, inputs: SelectionInputs, i: Any, is_root: jax.Array) -> jax.Array:
    """Selects actions int32 [..., N]: largest q' + sqrt(N) (c_init + ln((N + c_base + 1) / c_base)) P / (n + 1).

    The pUCT rule of Schrittwieser et al. 2020, appendix B, equation 2.
    """
    visited = node.n > 0
    # q', Q scaled to [0, 1] (equation 5), by the values at this node instead of the whole tree's.
    low = jnp.minimum(node.V, jnp.min(jnp.where(visited, node.Q, jnp.inf), -1, keepdims=True))
    high = jnp.maximum(node.V, jnp.max(jnp.where(visited, node.Q, -jnp.inf), -1, keepdims=True))
    q = jnp.where(visited, _scaled(config, node.Q, low, high), 0.0)
    weight = jnp.sqrt(node.N) * (config.c_init + jnp.log((node.N + config.c_base + 1) / config.c_base))
    score = q + weight * node.P / (node.n + 1) + _broadcast(inputs.noise, node)
    return jnp.argmax(jnp.where(node.P < 0, LOWEST, score), -1).astype(jnp.int32)


def gumbel(config: SearchConfig, node: Tree, inputs: SelectionInputs, i: Any, is_root: jax.Array) -> jax.Array:
    """Selects actions int32 [..., N]: by sequential halving at the root, so that visits match the policy elsewhere."""
    improved = node.P + sigma(config, node)
    # Non-root nodes: visits approach the improved policy (Danihelka et al. 2022, section 5).
    interior = jax.nn.softmax(improved) - node.n / node.N
    # The root: among actions with as many visits as the schedule has now, the largest g + logits + sigma(Q). The index
    # is clipped after the last simulation, when nobody reads the selection.
    target = lax.dynamic_slice_in_dim(inputs.target_visits, i, 1, 1).astype(jnp.float32)
    at_root = jnp.where(node.n == _broadcast(target, node), _broadcast(inputs.noise, node) + improved, -jnp.inf)
    return jnp.argmax(jnp.where(is_root[..., None], at_root, interior), -1).astype(jnp.int32)


def _broadcast(x: jax.Array, node: Tree) -> jax.Array:
    """Reshapes x [N, ...] to the rank of a node's arrays [..., N, A]."""
    return x.reshape((1,) * (node.n.ndim - x.ndim) + x.shape)


def mixed_value(config: SearchConfig, node: Tree) -> jax.Array:
    """Mixes the network's value with the Q of visited actions, weighted by the prior, [..., 1].

    v_mix of Danihelka et al. 2022, appendix D.
    """
    visited, tiny = node.n > 0, np.finfo(np.float32).tiny
    prior = jnp.exp(node.P) if config.algorithm == "gumbel" else node.P
    weight = jnp.where(visited, jnp.maximum(prior, tiny), 0.0)
    mean = jnp.sum(weight * node.Q, -1, keepdims=True) / jnp.maximum(jnp.sum(weight, -1, keepdims=True), tiny)
    return (node.v[..., None] + (node.N - 1) * mean) / node.N


def sigma(config: SearchConfig, node: Tree) -> jax.Array:
    """Computes Gumbel's sigma of completed Q, [..., A] (Danihelka et al. 2022, equation 8 and appendix D)."""
    # Completed Q: unvisited actions get v_mix, so that the policy neither prefers nor avoids them (section 4).
    completed = jnp.where(node.n > 0, node.Q, mixed_value(config, node))
    low, high = jnp.min(completed, -1, keepdims=True), jnp.max(completed, -1, keepdims=True)
    scale = config.value_scale * (config.visit_offset + jnp.max(node.n, -1, keepdims=True))
    return scale * _scaled(config, completed, low, high)
