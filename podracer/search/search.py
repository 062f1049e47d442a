"""Monte-Carlo tree search over a model, for many roots at once: PUCT and Gumbel on one tree.

PUCT is Silver et al. 2018 (AlphaZero) and Schrittwieser et al. 2020 (MuZero), Gumbel Danihelka et al. 2022. A node has
a prior P or logits l, visits n(a), sums of returns W(a), a value v of its own, N = 1 + sum n, V = (v + sum W) / N and
Q(a) = W(a) / n(a). Discounts are signed: -1 where the other player goes on, so games of two need nothing else.

All that is random is drawn before the search, which is a function of arrays (`podracer.search.tree`). N roots (lanes),
A actions, S simulations, D the depth cap.
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
from podracer.search import tree
from podracer.search.search import mctx_engine
from podracer.search.tree import Rule, Seed, Tree
from podracer.types import ActorParams, ArrayTree

LOWEST = float(np.finfo(np.float32).min)
"""The logit of an illegal action: a softmax of nothing else is no NaN."""


EmbeddingDtype = Literal["float32", "bfloat16", "float16"]

Engine = Literal["podracer", "mctx"]
"""The code that grows trees: our own, or DeepMind's, as a check of ours or to compare with."""

RootValue = Literal["mean", "action", "mixed"]
"""The value that a search gives its root: V, the mean over all simulations; Q of the action that it chose; or the
network's value mixed with the Q of all that was tried, weighted by the prior (Danihelka et al. 2022, appendix D)."""


class Root(NamedTuple):
    """Where searches begin.

    Attributes:
      logits: float [N, A]; the policy's.
      value: float [N].
      embedding: tree of [N, ...]; what `Model.step` goes on from.
      legal: bool [N, A]; None where all actions are.
    """

    logits: jax.Array
    value: jax.Array
    embedding: ArrayTree
    legal: jax.Array | None = None


class Step(NamedTuple):
    """What a model says of an action.

    Attributes:
      reward: float [N]; that of the player who acted.
      discount: float [N]; of what follows: 0 behind an end, negative where the other player goes on.
      logits: float [N, A]; of the state behind the action.
      value: float [N]; of that state, for whoever moves there.
      embedding: tree of [N, ...]; of that state.
      legal: bool [N, A]; in that state, of models that know.
    """

    reward: jax.Array
    discount: jax.Array
    logits: jax.Array
    value: jax.Array
    embedding: ArrayTree
    legal: jax.Array | None = None


class Model(NamedTuple):
    """What is searched: pure functions of arrays, in which lanes do not see each other.

    Attributes:
      root: `(variables, observation [N]) -> Root`.
      step: `(variables, embedding [N], action int32 [N]) -> Step`. It is also asked for what comes behind an end,
        which may be anything finite.
    """

    root: Callable[[Any, ArrayTree], Root]
    step: Callable[[Any, ArrayTree, jax.Array], Step]


class Searched(NamedTuple):
    """What a search found.

    Attributes:
      policy: float32 [N, A]; a target for the policy: fractions of visits (PUCT), the improved policy (Gumbel).
      value: float32 [N]; of the root, as `SearchConfig.root_value` says.
      action: int32 [N]; what to do.
      visits: int32 [N, A].
      q: float32 [N, A]; Q at the root, 0 where not visited.
      depth: float32 [N]; edges from the root to a simulation's new node, on average.
      tree: `Tree`, or () where it was not asked for.
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
    """How to search.

    Attributes:
      algorithm: "puct" or "gumbel".
      simulations: S; evaluations of the model's step.
      max_depth: D; where the walk stops and evaluates an edge again. None: S.
      c_init: weight of the prior in PUCT (1.25).
      c_base: how slowly that weight grows (19652).
      bounds: (low, high) of returns, which scale Q to [0, 1]; (-1, 1) on boards. None: what a node has seen.
      epsilon: the least range to scale by; .01 for learned values.
      dirichlet_alpha: of PUCT's noise at the root. None: 10 / legal actions, at most 1.
      dirichlet_fraction: of that noise in the prior (.25).
      considered: how many actions Gumbel considers at the root, at most (16).
      value_scale: of Q beside logits, Gumbel's c_scale (.1).
      visit_offset: Gumbel's c_visit (50).
      embedding_dtype: what floating-point embeddings are stored as, such as "bfloat16"; models are given back their own
        dtype. Scalars of a root, [N], stay as they are.
      root_value: what `Searched.value` is (see `RootValue`); None for "mean" of PUCT and "mixed" of Gumbel.
      engine: the code that grows the trees (see `podracer.search.search.mctx_engine`).
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
    """How an agent searches, for acting and for `podracer.Result.explain`.

    Attributes:
      space: of an observation that `model.root` is given, frames stacked.
      model: what is searched.
      variables: `(ActorParams) -> variables` of the model.
      config: how.
    """

    space: spaces.Space
    model: Model
    variables: Callable[[ActorParams], Any]
    config: SearchConfig


@dataclasses.dataclass(frozen=True)
class Settings:
    """What agents that search have in common in their configs.

    Attributes:
      search: "puct" (Silver et al. 2018), or "gumbel" (Danihelka et al. 2022), which improves a policy with few
        simulations.
      simulations: S, states that a search adds to its tree.
      max_depth: steps that a search looks ahead at most, None for as many as simulations.
      dirichlet_fraction: of the prior that is noise at the root, of puct (Silver et al.: 0.25).
      dirichlet_alpha: of that noise (Silver et al.: 0.3 in chess, 0.03 in Go); None for min(1, 10 / legal actions).
      considered: actions that gumbel tries at the root (Danihelka et al.: 16).
      value_scale: what completed values count in gumbel's policy (mctx: 0.1).
      embedding_dtype: what trees keep a model's states as, "float32", "bfloat16" or "float16"; None for its own.
      root_value: the value that targets bootstrap from, where it is a search's: "mean", of all simulations; "action", Q
        of the action that the search chose; or "mixed", of the network and all that was tried, weighed by the prior
        (with puct: with its noise). None for "mean" with puct (paper), and "mixed" with gumbel, which at first tries
        bad actions as often as good ones.
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
    """How an agent's config says to search, by the fields that it shares, its `search` being the algorithm."""
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
) -> Searched:
    """Searches from every root; lanes do not see each other.

    Args:
      model: its `step` is called S times, with all lanes.
      variables: passed to the model; they must be an argument for `vmap` to be fast (see `tree.grow`).
      root: of `model.root`.
      key: of all that is random.
      config: static.
      explore: whether anything is random: Dirichlet noise, ties and the action (PUCT), Gumbel noise. Static.
      temperature: float, [] or [N]; PUCT's action is drawn from n^(1 / temperature), the most visited at 0.
      keep_tree: whether to return the tree. Static.
    """
    if config.engine == "mctx":
        prior = functools.partial(_prior, config)
        settings = {"explore": explore, "temperature": temperature, "lowest": LOWEST}
        grown = mctx_engine.search(model.step, variables, root, key, config, prior, **settings)
        first = jax.tree.map(lambda x: x[:, 0], grown.tree)
        return _found(config, first, grown.policy, grown.action, grown.depth, grown.tree if keep_tree else ())
    N, A = root.logits.shape
    noise_key, dirichlet_key, action_key = jax.random.split(key, 3)
    legal = jnp.ones((N, A), bool) if root.legal is None else root.legal
    number = jnp.sum(legal, -1, dtype=jnp.int32)
    prior = _prior(config, root.logits, legal)
    noise, wanted = jnp.zeros((N, A)), ()
    if config.algorithm == "gumbel":
        table = np.array([considered_visits(m, config.simulations) for m in range(min(config.considered, A) + 1)])
        wanted = jnp.asarray(table, jnp.int32)[jnp.minimum(number, table.shape[0] - 1)]
        if explore:
            noise = jax.random.gumbel(noise_key, (N, A))
    elif explore:
        noise = 1e-7 * jax.random.uniform(noise_key, (N, A))
        if f := config.dirichlet_fraction:
            alpha = jnp.minimum(1.0, 10.0 / jnp.maximum(number, 1).astype(jnp.float32))[:, None]
            if config.dirichlet_alpha is not None:
                alpha = jnp.full((N, 1), config.dirichlet_alpha)
            eta = distributions.dirichlet(dirichlet_key, jnp.broadcast_to(alpha, (N, A)), legal)
            prior = jnp.where(legal, (1 - f) * prior + f * eta, prior)

    seed = Seed(prior, root.value, root.embedding, Aid(noise, wanted))
    state = tree.grow(model.step, rule(config), variables, seed, keep_tree)
    first = Tree.of(state.rows[:, 0])
    if config.algorithm == "puct":
        policy = first.n / config.simulations
        draw = jnp.zeros((N, 1))
        if explore:  # from n^(1 / temperature): logits times the temperature, the most visited at 0
            draw = jnp.broadcast_to(temperature, (N,))[:, None] * jax.random.gumbel(action_key, (N, A))
        action = jnp.argmax(jnp.log(first.n) + draw, -1)
    else:
        improved = first.P + _sigma(config, first)
        policy = jax.nn.softmax(improved)
        most = legal & (first.n == jnp.max(first.n, -1, keepdims=True))
        action = jnp.argmax(jnp.where(most, noise + improved, -jnp.inf), -1)
    return _found(config, first, policy, action, state.depth, tree.kept(state) if keep_tree else ())


def _found(config: SearchConfig, root: Tree, policy: Any, action: Any, depth: Any, kept: Tree | tuple[()]) -> Searched:
    """The results of trees with these roots [N], whose simulations walked `depth` edges [N] together."""
    return Searched(
        policy=policy,
        value=_root_value(config, root, action),
        action=action.astype(jnp.int32),
        visits=root.n.astype(jnp.int32),
        q=root.Q,
        depth=depth.astype(jnp.float32) / config.simulations,
        tree=kept,
    )


def _root_value(config: SearchConfig, root: Tree, action: jax.Array) -> jax.Array:
    """The values of roots [N]."""
    wanted = config.root_value or ("mean" if config.algorithm == "puct" else "mixed")
    if wanted == "action":
        return value_of(root.Q, action)
    return (_mixed_value(config, root) if wanted == "mixed" else root.V)[:, 0]


@functools.cache
def considered_visits(considered: int, simulations: int) -> tuple[int, ...]:
    """Sequential halving (Danihelka et al. 2022): how often the action of each simulation was visited before, [S]."""
    if considered <= 1:
        return tuple(range(simulations))
    sequence: list[int] = []
    visits, k, rounds = [0] * considered, considered, math.ceil(math.log2(considered))
    while len(sequence) < simulations:
        for _ in range(max(1, simulations // (rounds * k))):
            sequence += visits[:k]
            visits[:k] = [n + 1 for n in visits[:k]]
        k = max(2, k // 2)
    return tuple(sequence[:simulations])


class Aid(NamedTuple):
    """What choices need beside the node: noise float32 [N, A]; Gumbel's visits wanted, int32 [N, S], else ()."""

    noise: jax.Array
    wanted: Any


def rule(config: SearchConfig) -> Rule:
    """How trees grow."""
    choose = _puct if config.algorithm == "puct" else _gumbel
    cap = min(config.max_depth or config.simulations, config.simulations)
    return Rule(
        functools.partial(_prior, config),
        functools.partial(choose, config),
        config.simulations,
        cap,
        config.embedding_dtype,
    )


def _prior(config: SearchConfig, logits: jax.Array, legal: jax.Array | None) -> jax.Array:
    """Probabilities, -1 where illegal (PUCT), or their logarithms, the lowest float there (Gumbel)."""
    logits = logits.astype(jnp.float32)
    if legal is not None:
        logits = jnp.where(legal, logits, LOWEST)
    prior = jax.nn.softmax(logits) if config.algorithm == "puct" else jax.nn.log_softmax(logits)
    return prior if legal is None else jnp.where(legal, prior, -1.0 if config.algorithm == "puct" else LOWEST)


def _scaled(config: SearchConfig, x: jax.Array, low: Any, high: Any) -> jax.Array:
    """x from [low, high], or from `bounds`, to [0, 1]."""
    low, high = config.bounds or (low, high)
    return (x - low) / jnp.maximum(high - low, config.epsilon)


def _puct(config: SearchConfig, node: Tree, aid: Aid, i: Any, is_root: jax.Array) -> jax.Array:
    """What nodes [..., N] choose, int32: q' + sqrt(N) (c_init + ln((N + c_base + 1) / c_base)) P / (n + 1)."""
    visited = node.n > 0
    low = jnp.minimum(node.V, jnp.min(jnp.where(visited, node.Q, jnp.inf), -1, keepdims=True))
    high = jnp.maximum(node.V, jnp.max(jnp.where(visited, node.Q, -jnp.inf), -1, keepdims=True))
    q = jnp.where(visited, _scaled(config, node.Q, low, high), 0.0)
    weight = jnp.sqrt(node.N) * (config.c_init + jnp.log((node.N + config.c_base + 1) / config.c_base))
    score = q + weight * node.P / (node.n + 1) + _beside(aid.noise, node)
    return jnp.argmax(jnp.where(node.P < 0, LOWEST, score), -1).astype(jnp.int32)


def _gumbel(config: SearchConfig, node: Tree, aid: Aid, i: Any, is_root: jax.Array) -> jax.Array:
    """What nodes [..., N] choose, int32: at the root by sequential halving, inside so that visits follow the policy."""
    improved = node.P + _sigma(config, node)
    inside = jax.nn.softmax(improved) - node.n / node.N
    wanted = lax.dynamic_slice_in_dim(aid.wanted, i, 1, 1).astype(jnp.float32)  # behind the last one nobody asks
    at_root = jnp.where(node.n == _beside(wanted, node), _beside(aid.noise, node) + improved, -jnp.inf)
    return jnp.argmax(jnp.where(is_root[..., None], at_root, inside), -1).astype(jnp.int32)


def _beside(x: jax.Array, node: Tree) -> jax.Array:
    """x [N, ...] with the rank of a node's tables [..., N, A]."""
    return x.reshape((1,) * (node.n.ndim - x.ndim) + x.shape)


def _mixed_value(config: SearchConfig, node: Tree) -> jax.Array:
    """A node's own value, mixed with the Q of what was visited by its prior, [..., 1]."""
    visited, tiny = node.n > 0, np.finfo(np.float32).tiny
    prior = jnp.exp(node.P) if config.algorithm == "gumbel" else node.P
    weight = jnp.where(visited, jnp.maximum(prior, tiny), 0.0)
    mean = jnp.sum(weight * node.Q, -1, keepdims=True) / jnp.maximum(jnp.sum(weight, -1, keepdims=True), tiny)
    return (node.v[..., None] + (node.N - 1) * mean) / node.N


def _sigma(config: SearchConfig, node: Tree) -> jax.Array:
    """Gumbel's sigma of completed Q, [..., A] (Danihelka et al. 2022, equation 8 and appendix D)."""
    completed = jnp.where(node.n > 0, node.Q, _mixed_value(config, node))
    low, high = jnp.min(completed, -1, keepdims=True), jnp.max(completed, -1, keepdims=True)
    scale = config.value_scale * (config.visit_offset + jnp.max(node.n, -1, keepdims=True))
    return scale * _scaled(config, completed, low, high)
