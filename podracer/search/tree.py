"""Search trees of many roots at once, as arrays: a walk down, a new node, a backup. What is chosen is a rule.

A node's choice depends on its own row alone, and a simulation changes the rows on its path alone. So choices are kept:

    walk      node <- next[lane, node] until there is none
    expand    the model steps from the last node with that node's choice; the new row goes to slot i + 1 of every lane
    backup    G <- r + d G up the path, block by block; n, W and child change, and with them choice and next

Why this is not mctx: docs/adr/0020-own-tree-search.md. N roots (lanes), A actions, S simulations, R = 4 A + 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from podracer import topology
from podracer.types import ArrayTree

CLIP: dict[str, Any] = {"mode": "clip", "wrap_negative_indices": False}
DROP: dict[str, Any] = {"mode": "drop", "wrap_negative_indices": False}
"""What indexing does by itself with the number that stands for no node, which is one too large."""


class Tree(NamedTuple):
    """Nodes, float32: [N, S+1] of a kept tree, in the order of their simulations; node 0 is the root.

    Attributes:
      P: [..., A]; the prior, as `Rule.prior` made it.
      n: [..., A]; visits.
      W: [..., A]; sums of returns.
      child: [..., A]; numbers of nodes; S + 1 where there is none, -1 in a kept tree.
      v: [...]; the model's value.
      r: [...]; the reward of the edge into the node.
      d: [...]; its discount.
      choice: [...]; the action that the next simulation takes here.
      embedding: tree of [N, S+1, ...]; of a kept tree.
    """

    P: jax.Array
    n: jax.Array
    W: jax.Array
    child: jax.Array
    v: jax.Array
    r: jax.Array
    d: jax.Array
    choice: jax.Array
    embedding: ArrayTree = ()

    @staticmethod
    def of(rows: jax.Array) -> Tree:
        """The parts of rows [..., R]: P | n | W | child | v, r, d, choice. Numbers are exact to 2^24."""
        A = rows.shape[-1] // 4 - 1
        return Tree(*jnp.split(rows[..., : 4 * A], 4, -1), *(rows[..., 4 * A + i] for i in range(4)))

    @property
    def rows(self) -> jax.Array:
        """[..., R]."""
        return jnp.concatenate([*self[:4], jnp.stack(self[4:8], -1)], -1)

    @property
    def N(self) -> jax.Array:  # noqa: N802
        """[..., 1]; visits of the node, its own evaluation included."""
        return 1 + jnp.sum(self.n, -1, keepdims=True)

    @property
    def V(self) -> jax.Array:  # noqa: N802
        """[..., 1]; the value that the search gives it."""
        return (self.v[..., None] + jnp.sum(self.W, -1, keepdims=True)) / self.N

    @property
    def Q(self) -> jax.Array:  # noqa: N802
        """[..., A]; 0 where not visited."""
        return self.W / jnp.maximum(self.n, 1)


class Rule(NamedTuple):
    """What is chosen, and how large trees are; static.

    Attributes:
      prior: `(logits [..., A], legal or None) -> float32 [..., A]`; what a node keeps of a policy.
      choose: `(node Tree [..., N], aid [N, ...], i int32 [], is_root bool [..., N]) -> int32 [..., N]`; what each node
        chooses in simulation i, from itself alone; `aid` is the caller's, of the lane.
      simulations: S.
      max_depth: D; a walk stops there and evaluates an edge again.
      embedding_dtype: of stored floating-point embeddings that are more than a number a root; None: their own.
    """

    prior: Callable[[jax.Array, jax.Array | None], jax.Array]
    choose: Callable[[Tree, ArrayTree, Any, jax.Array], jax.Array]
    simulations: int
    max_depth: int
    embedding_dtype: str | None


class Seed(NamedTuple):
    """What the trees grow from: prior [N, A], value [N], embedding [N, ...] and `Rule.choose`'s aid [N, ...]."""

    prior: jax.Array
    value: jax.Array
    embedding: ArrayTree
    aid: ArrayTree


class State(NamedTuple):
    """What a simulation changes.

    Attributes:
      rows: float32 [N, S+1, R].
      next: int32 [N, S+1]; the child that each node's choice leads to. S + 1 stands for none and leads to none: clipped
        it is the last node to be made, which never has children to walk to.
      embedding: tree of [N, S+1, ...].
      depth: int32 [N]; edges walked, of all simulations.
    """

    rows: jax.Array
    next: Any
    embedding: ArrayTree
    depth: jax.Array


def grow(step: Callable[..., Any], rule: Rule, variables: Any, seed: Seed, keep: bool) -> State:
    """The trees behind all simulations; unless they are kept, of roots alone and without embeddings.

    A while loop that `vmap` maps would select whole tables at every turn. So a mapped axis is joined with the lanes,
    unless it is one of several sets of variables, which `step`, `(variables, embedding, action) -> Step`, cannot tell
    apart.
    """
    chex.assert_rank(seed.prior, 2)
    chex.assert_equal_shape_prefix([seed.prior, seed.value], 1)
    chex.assert_tree_shape_prefix(seed.embedding, seed.value.shape)
    levels = block()

    def core(variables: Any, seed: Seed) -> State:
        turn = functools.partial(simulate, step, rule, levels, variables, seed)
        state = lax.fori_loop(0, rule.simulations, turn, begin(rule, seed))
        return state if keep else State(state.rows[:, :1], (), (), state.depth)

    joined = jax.custom_batching.custom_vmap(core)

    @joined.def_vmap
    def _(size: int, mapped: Any, variables: Any, seed: Seed) -> Any:
        variables_mapped, seed_mapped = mapped
        if size > 1 and any(jax.tree.leaves(variables_mapped)):
            out = jax.vmap(core, in_axes=jax.tree.map(lambda x: 0 if x else None, mapped))(variables, seed)
        else:
            variables = jax.tree.map(lambda x, m: x[0] if m else x, variables, variables_mapped)
            every = jax.tree.map(lambda x, m: x if m else jnp.broadcast_to(x, (size, *x.shape)), seed, seed_mapped)
            out = joined(variables, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), every))
            out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return joined(variables, seed)


def block() -> int:
    """Levels that are walked or backed up in a turn: turns cost launches on a GPU, and nearly nothing on CPU."""
    return 2 if topology.on_cpu() else 8


def kept(state: State) -> Tree:
    """The trees, to be looked at."""
    tree = Tree.of(state.rows)
    child = jnp.where(tree.child < tree.v.shape[1], tree.child, -1.0)
    return tree._replace(child=child, embedding=state.embedding)


def begin(rule: Rule, seed: Seed) -> State:
    """Trees of nothing but roots."""
    N, S = seed.prior.shape[0], rule.simulations

    def table(x: jax.Array) -> jax.Array:
        smaller = rule.embedding_dtype and x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)
        empty = jnp.zeros((N, S + 1, *x.shape[1:]), rule.embedding_dtype if smaller else x.dtype)
        return empty.at[:, 0].set(x.astype(empty.dtype))

    zero, v = jnp.zeros(N), seed.value.astype(jnp.float32)
    root = _leaf(rule, seed.prior, v, zero, zero, seed.aid, jnp.int32(0), True)
    rows = jnp.zeros((N, S + 1, root.shape[-1])).at[:, 0].set(root)
    nowhere = jnp.full((N, S + 1), S + 1, jnp.int32)
    return State(rows, nowhere, jax.tree.map(table, seed.embedding), jnp.zeros(N, jnp.int32))


def _leaf(rule: Rule, P: Any, v: Any, r: Any, d: Any, aid: Any, i: Any, is_root: bool) -> jax.Array:
    """Rows [N, R] of nodes without children."""
    zero = jnp.zeros_like(P)
    node = Tree(P, zero, zero, zero + rule.simulations + 1, v, r, d, v)
    choice = rule.choose(node, aid, i, jnp.full(v.shape, is_root))
    return node._replace(choice=choice.astype(jnp.float32)).rows


def simulate(step: Any, rule: Rule, levels: int, variables: Any, seed: Seed, i: jax.Array, state: State) -> State:
    """Simulation i of every lane."""
    none, lane = rule.simulations + 1, jnp.arange(state.depth.shape[0])
    level, path, parent, length = _walk(rule, levels, state.next)

    # Two indices [lane, node], for XLA:CPU splits fusions around one flat index over threads.
    action = state.rows[:, :, -1].at[lane, parent].get(**CLIP).astype(jnp.int32)
    embedding = jax.tree.map(
        lambda table, x: table.at[lane, parent].get(**CLIP).astype(x.dtype), state.embedding, seed.embedding
    )
    new = step(variables, embedding, action)
    chex.assert_equal_shape([new.reward, new.discount, new.value, action])
    chex.assert_equal_shape([new.logits, seed.prior])
    chex.assert_trees_all_equal_shapes(new.embedding, seed.embedding)
    v, r, d = (x.astype(jnp.float32) for x in (new.value, new.reward, new.discount))
    row = _leaf(rule, rule.prior(new.logits, new.legal), v, r, d, seed.aid, i + 1, False)
    put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=i + 1, axis=1)
    stored = jax.tree.map(lambda table, x: x.astype(table.dtype)[:, None], state.embedding, new.embedding)
    embeddings = jax.tree.map(put, state.embedding, stored)
    # An edge at the cap is not linked, so walks end there and evaluate it again.
    link = jnp.where(length < rule.max_depth, parent, -1)

    def backup(carry: Any) -> Any:
        level, G, rows, onward = carry
        level -= levels
        nodes = lax.dynamic_slice_in_dim(path, level, levels, 0)
        node = Tree.of(rows.at[lane[None], nodes].get(**CLIP))
        returns = []
        for k in reversed(range(levels)):
            returns.append(G)
            G = jnp.where(nodes[k] < none, node.r[k] + node.d[k] * G, G)
        actions = lax.broadcasted_iota(jnp.float32, node.n.shape, 2)
        chosen = actions == node.choice[..., None]
        W = node.W + jnp.where(chosen, jnp.stack(returns[::-1])[..., None], 0.0)
        linked = chosen & (nodes == link[None])[..., None]
        child = jnp.where(linked, (i + 1).astype(jnp.float32), node.child)
        node = node._replace(n=node.n + chosen.astype(jnp.float32), W=W, child=child)
        choice = rule.choose(node, seed.aid, i + 1, nodes == 0).astype(jnp.float32)
        following = jnp.sum(jnp.where(actions == choice[..., None], child, 0.0), -1).astype(jnp.int32)
        rows = rows.at[lane[None], nodes].set(node._replace(choice=choice).rows, **DROP)
        return level, G, rows, onward.at[lane[None], nodes].set(following, **DROP)

    carry = (level, r + d * v, put(state.rows, row[:, None]), state.next)
    _, _, rows, onward = lax.while_loop(lambda carry: carry[0] > 0, backup, carry)
    return State(rows, onward, embeddings, state.depth + length)


def _walk(rule: Rule, levels: int, onward: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """From the roots as far as there are nodes: levels walked, path [D, N], its last nodes [N] and its length [N]."""
    none, lane = rule.simulations + 1, jnp.arange(onward.shape[0])

    def turn(carry: Any) -> Any:
        level, path, parent, length, node = carry
        nodes = []
        for _ in range(levels):
            nodes.append(node)
            parent, length = jnp.where(node < none, node, parent), length + (node < none).astype(jnp.int32)
            node = onward.at[lane, node].get(**CLIP)
        path = lax.dynamic_update_slice_in_dim(path, jnp.stack(nodes), level, 0)
        return level + levels, path, parent, length, node

    zero = jnp.zeros(onward.shape[0], jnp.int32)
    path = jnp.zeros((-(-rule.max_depth // levels) * levels, zero.size), jnp.int32)
    carry = turn((jnp.int32(0), path, zero, zero, zero))
    return lax.while_loop(lambda carry: jnp.any(carry[-1] < none), turn, carry)[:-1]
