"""Monte-Carlo tree search over a model, for many roots at once: PUCT and Gumbel on one tree.

PUCT is Silver et al. 2018 (AlphaZero) and Schrittwieser et al. 2020 (MuZero), Gumbel Danihelka et al. 2022. A node has
a prior P or logits l, visits n(a), sums of returns W(a), a network value v, N = 1 + sum n, V = (v + sum W) / N and
Q(a) = W(a) / n(a). Discounts are signed: -1 if the other player moves next, so two-player games need nothing else.

All random numbers are drawn before the search, which is a pure function of arrays (`podracer.search.tree`). Symbols: N
roots (lanes), A actions, S simulations, D the depth cap.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import configs, distributions, spaces
from podracer.distributions import value_of
from podracer.search import mctx_engine, tree
from podracer.search.model import Model as Model
from podracer.search.model import Root as Root
from podracer.search.model import Step as Step
from podracer.search.tree import RootInputs, Tree, TreeConfig
from podracer.types import ActorParams

LOWEST = float(np.finfo(np.float32).min)
"""The logit of an illegal action: finite, so that a softmax over illegal actions alone is not NaN."""


EmbeddingDtype = Literal["float32", "bfloat16", "float16"]

Engine = Literal["podracer", "mctx"]
"""The code that grows trees: our own, or DeepMind's, as a check of ours or to compare with."""

RootValue = Literal["mean", "action", "mixed"]
"""The value of a root: V, the mean over all simulations; Q of the selected action; or the network's value mixed with
the Q of visited actions, weighted by the prior (Danihelka et al. 2022, appendix D)."""


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


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """The settings of a search.

    Attributes:
      algorithm: "puct" or "gumbel".
      simulations: S; calls of the model's step.
      max_depth: D; a path ends at this depth and its last edge is evaluated again. None: S.
      c_init: weight of the prior in PUCT (1.25).
      c_base: number of visits over which that weight grows (19652).
      bounds: (low, high) of returns, which scale Q to [0, 1]; (-1, 1) on boards. None: the range of values at the node.
      epsilon: smallest range to scale by (mctx: `min_value_range`); .01 for learned values.
      dirichlet_alpha: of PUCT's noise at the root. None: 10 / legal actions, at most 1.
      dirichlet_fraction: share of that noise in the prior (.25).
      considered: largest number of actions that Gumbel considers at the root (mctx: `max_num_considered_actions`; 16).
      value_scale: weight of Q relative to the logits, Gumbel's c_scale (.1).
      visit_offset: Gumbel's c_visit (50).
      embedding_dtype: dtype of stored floating-point embeddings, such as "bfloat16"; `Model.step` gets its own dtype
        back. Embeddings of one number a root, [N], are stored unchanged.
      root_value: `SearchResult.value` (see `RootValue`); None for "mean" with PUCT and "mixed" with Gumbel.
      engine: the code that grows the trees (see `podracer.search.mctx_engine`).
    """

    algorithm: Literal["puct", "gumbel"] = "puct"
    simulations: int = configs.field(50, low=1, high=2**24 - 2)
    max_depth: int | None = configs.field(None, low=1)
    c_init: float = configs.field(1.25, low=0.0)
    c_base: float = configs.field(19652.0, low=1.0)
    bounds: tuple[float, ...] | None = None
    epsilon: float = configs.field(1e-8, low=1e-30)
    dirichlet_alpha: float | None = configs.field(None, low=1e-3)
    dirichlet_fraction: float = configs.field(0.25, low=0.0, high=1.0)
    considered: int = configs.field(16, low=1)
    value_scale: float = configs.field(0.1, low=0.0)
    visit_offset: float = configs.field(50.0, low=0.0)
    embedding_dtype: EmbeddingDtype | None = None
    root_value: RootValue | None = None
    engine: Engine = "podracer"

    def __post_init__(self):
        configs.check(self)
        if self.bounds is not None and not (len(self.bounds) == 2 and self.bounds[0] < self.bounds[1]):
            raise ValueError(f"SearchConfig.bounds={self.bounds}: expected (low, high) with low below high.")
        if self.engine == "mctx":
            mctx_engine.check(self)


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


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that agents with a search share.

    Attributes:
      search: "puct" (Silver et al. 2018), or "gumbel" (Danihelka et al. 2022), which improves a policy with few
        simulations.
      simulations: S, states that a search adds to its tree.
      max_depth: greatest depth of a search's tree, None for the number of simulations.
      dirichlet_fraction: share of noise in the prior at the root, with puct (Silver et al.: 0.25).
      dirichlet_alpha: of that noise (Silver et al.: 0.3 in chess, 0.03 in Go); None for min(1, 10 / legal actions).
      considered: actions that gumbel considers at the root (Danihelka et al.: 16).
      value_scale: weight of completed values in gumbel's policy (mctx: 0.1).
      embedding_dtype: dtype in which trees store a model's states, "float32", "bfloat16" or "float16"; None for the
        model's own.
      root_value: the search's value, as a bootstrap of value targets: "mean" over all simulations; "action", Q of the
        selected action; or "mixed", the network's value and the Q of visited actions, weighted by the prior (with puct:
        noise included). None for "mean" with puct (paper), and "mixed" with gumbel, which at first visits bad actions
        as often as good ones.
      engine: the code that searches: "podracer", or "mctx", which is slower and finds the same, to check or compare.
    """

    search: Literal["puct", "gumbel"] = "puct"
    simulations: int = configs.field(16, low=1)
    max_depth: int | None = configs.field(None, low=1)
    dirichlet_fraction: float = configs.field(0.25, low=0.0, high=1.0)
    dirichlet_alpha: float | None = configs.field(0.3, low=1e-3)
    considered: int = configs.field(16, low=1)
    value_scale: float = configs.field(0.1, low=0.0)
    embedding_dtype: EmbeddingDtype | None = None
    root_value: RootValue | None = None
    engine: Engine = "podracer"


def settings(config: Any, **others: Any) -> SearchConfig:
    """Takes a search's settings from an agent's config: the fields of the same names, and `search` as the algorithm."""
    shared = {field.name for field in dataclasses.fields(SearchConfig)} & {
        field.name for field in dataclasses.fields(config)
    }
    return SearchConfig(algorithm=config.search, **{name: getattr(config, name) for name in shared}, **others)


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
        prior = functools.partial(_prior, config)
        settings = {"explore": explore, "temperature": temperature, "lowest": LOWEST}
        grown = mctx_engine.search(model.step, variables, root, key, config, prior, **settings)
        first = jax.tree.map(lambda x: x[:, 0], grown.tree)
        return _result(config, first, grown.policy, grown.action, grown.depth, grown.tree if keep_tree else ())
    N, A = root.logits.shape
    noise_key, dirichlet_key, action_key = jax.random.split(key, 3)
    legal = jnp.ones((N, A), bool) if root.legal is None else root.legal
    num_legal = jnp.sum(legal, -1, dtype=jnp.int32)
    prior = _prior(config, root.logits, legal)
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
        improved = first.P + _sigma(config, first)
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
    return (_mixed_value(config, root) if kind == "mixed" else root.V)[:, 0]


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
      noise: float32 [N, A]; added to the scores at the root.
      target_visits: int32 [N, S]; `considered_visits` of each root (Gumbel), else ().
    """

    noise: jax.Array
    target_visits: Any


def tree_config(config: SearchConfig) -> TreeConfig:
    """Makes the selection rule and the size of trees."""
    select = _puct if config.algorithm == "puct" else _gumbel
    cap = min(config.max_depth or config.simulations, config.simulations)
    return TreeConfig(
        functools.partial(_prior, config),
        functools.partial(select, config),
        config.simulations,
        cap,
        config.embedding_dtype,
    )


def _prior(config: SearchConfig, logits: jax.Array, legal: jax.Array | None) -> jax.Array:
    """Computes priors [..., A]: probabilities, -1 if illegal (PUCT); their logarithms, `LOWEST` if illegal (Gumbel)."""
    logits = logits.astype(jnp.float32)
    if legal is not None:
        logits = jnp.where(legal, logits, LOWEST)
    prior = jax.nn.softmax(logits) if config.algorithm == "puct" else jax.nn.log_softmax(logits)
    return prior if legal is None else jnp.where(legal, prior, -1.0 if config.algorithm == "puct" else LOWEST)


def _scaled(config: SearchConfig, x: jax.Array, low: Any, high: Any) -> jax.Array:
    """Maps x from [low, high], or from `bounds`, to [0, 1]."""
    low, high = config.bounds or (low, high)
    return (x - low) / jnp.maximum(high - low, config.epsilon)


def _puct(config: SearchConfig, node: Tree, inputs: SelectionInputs, i: Any, is_root: jax.Array) -> jax.Array:
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


def _gumbel(config: SearchConfig, node: Tree, inputs: SelectionInputs, i: Any, is_root: jax.Array) -> jax.Array:
    """Selects actions int32 [..., N]: by sequential halving at the root, so that visits match the policy elsewhere."""
    improved = node.P + _sigma(config, node)
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


def _mixed_value(config: SearchConfig, node: Tree) -> jax.Array:
    """Mixes the network's value with the Q of visited actions, weighted by the prior, [..., 1].

    v_mix of Danihelka et al. 2022, appendix D.
    """
    visited, tiny = node.n > 0, np.finfo(np.float32).tiny
    prior = jnp.exp(node.P) if config.algorithm == "gumbel" else node.P
    weight = jnp.where(visited, jnp.maximum(prior, tiny), 0.0)
    mean = jnp.sum(weight * node.Q, -1, keepdims=True) / jnp.maximum(jnp.sum(weight, -1, keepdims=True), tiny)
    return (node.v[..., None] + (node.N - 1) * mean) / node.N


def _sigma(config: SearchConfig, node: Tree) -> jax.Array:
    """Computes Gumbel's sigma of completed Q, [..., A] (Danihelka et al. 2022, equation 8 and appendix D)."""
    # Completed Q: unvisited actions get v_mix, so that the policy neither prefers nor avoids them (section 4).
    completed = jnp.where(node.n > 0, node.Q, _mixed_value(config, node))
    low, high = jnp.min(completed, -1, keepdims=True), jnp.max(completed, -1, keepdims=True)
    scale = config.value_scale * (config.visit_offset + jnp.max(node.n, -1, keepdims=True))
    return scale * _scaled(config, completed, low, high)
