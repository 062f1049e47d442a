"""Search trees of many roots at once, as arrays. Each simulation selects a path, expands a node and backs up.

The action a node selects depends only on its own statistics, which change only when a simulation passes it. It is
therefore cached:

    select    node <- next[lane, node] until there is none
    expand    the model steps from the last node with that node's action; the new row goes to slot i + 1 of every lane
    backup    G <- r + d G up the path, block by block; n, W and child change, and with them the cached action and next

Why this is not mctx: docs/adr/0020-own-tree-search.md. N roots (lanes), A actions, S simulations, R = 4 A + 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
from jax import lax

from podracer import topology
from podracer.search.model import StepFn
from podracer.types import ArrayTree

CLIP: dict[str, Any] = {"mode": "clip", "wrap_negative_indices": False}
DROP: dict[str, Any] = {"mode": "drop", "wrap_negative_indices": False}
"""Modes of reads and writes at S + 1, the number for "no node": one past the last row."""


class Tree(NamedTuple):
    """Nodes, float32: [N, S+1] in a returned tree, in the order of their simulations; node 0 is the root.

    Attributes:
      P: [..., A]; the prior, from `TreeConfig.prior`.
      n: [..., A]; visits.
      W: [..., A]; sums of returns.
      child: [..., A]; numbers of nodes; S + 1 for no child, -1 in a returned tree.
      v: [...]; the model's value.
      r: [...]; the reward of the edge into the node.
      d: [...]; the discount of that edge.
      choice: [...]; the action that the next simulation takes at the node.
      embedding: tree of [N, S+1, ...]; only in a returned tree.
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
    def from_rows(rows: jax.Array) -> Tree:
        """Splits rows [..., R] into P | n | W | child | v, r, d, choice. Integers are exact to 2^24."""
        A = rows.shape[-1] // 4 - 1
        return Tree(*jnp.split(rows[..., : 4 * A], 4, -1), *(rows[..., 4 * A + i] for i in range(4)))

    @property
    def rows(self) -> jax.Array:
        """The nodes as rows, float32 [..., R]; the inverse of `from_rows`."""
        return jnp.concatenate([*self[:4], jnp.stack(self[4:8], -1)], -1)

    @property
    def N(self) -> jax.Array:  # noqa: N802
        """Visits of the node [..., 1], its own evaluation included."""
        return 1 + jnp.sum(self.n, -1, keepdims=True)

    @property
    def V(self) -> jax.Array:  # noqa: N802
        """The mean of all returns and the model's value [..., 1]."""
        return (self.v[..., None] + jnp.sum(self.W, -1, keepdims=True)) / self.N

    @property
    def Q(self) -> jax.Array:  # noqa: N802
        """Mean returns of the actions [..., A]; 0 for unvisited ones."""
        return self.W / jnp.maximum(self.n, 1)


class SelectionFn(Protocol):
    """Selects an action at every node, from the node's own statistics alone."""

    def __call__(self, node: Tree, inputs: Any, i: Any, is_root: jax.Array) -> jax.Array:
        """Returns int32 [..., N].

        Args:
          node: [..., N]; the nodes.
          inputs: tree of [N, ...]; the caller's arrays of every lane.
          i: int32 []; the simulation.
          is_root: bool [..., N].
        """
        ...


class TreeConfig(NamedTuple):
    """The selection rule and the size of trees; static.

    Attributes:
      prior: `(logits [..., A], legal bool [..., A] or None) -> float32 [..., A]`; the form in which a node stores a
        policy.
      select: the selection rule.
      simulations: S.
      max_depth: D; a path ends at this depth and its last edge is evaluated again.
      embedding_dtype: dtype of stored floating-point embeddings of rank 2 or more; None for their own.
    """

    prior: Callable[[jax.Array, jax.Array | None], jax.Array]
    select: SelectionFn
    simulations: int
    max_depth: int
    embedding_dtype: str | None


class RootInputs(NamedTuple):
    """The roots of a search.

    Attributes:
      prior: float32 [N, A]; from `TreeConfig.prior`.
      value: float32 [N].
      embedding: tree of [N, ...].
      selection: tree of [N, ...]; the `inputs` of `TreeConfig.select`.
    """

    prior: jax.Array
    value: jax.Array
    embedding: ArrayTree
    selection: ArrayTree


class SearchState(NamedTuple):
    """The arrays that a simulation updates.

    Attributes:
      rows: float32 [N, S+1, R]; the nodes.
      next: int32 [N, S+1]; the child that each node's cached action leads to, or S + 1 for none. Reads at S + 1 are
        clipped to the last row, whose node is made last and so has no child.
      embedding: tree of [N, S+1, ...].
      depth: int32 [N]; lengths of all paths, summed.
    """

    rows: jax.Array
    next: Any
    embedding: ArrayTree
    depth: jax.Array


def run_simulations(
    step: StepFn, config: TreeConfig, variables: Any, roots: RootInputs, keep_tree: bool
) -> SearchState:
    """Runs all simulations.

    A mapped `while_loop` would select whole tables at every iteration. So an axis that `vmap` maps is merged into the
    lanes, unless the variables have it too: `step` takes one set of them.

    Args:
      step: `(variables, embedding [N], action int32 [N]) -> Step`; the model.
      config: static.
      variables: the model's.
      roots: N roots.
      keep_tree: whether to return all nodes; if not, `rows` has the roots alone and there are no embeddings.
    """
    chex.assert_rank(roots.prior, 2)
    chex.assert_equal_shape_prefix([roots.prior, roots.value], 1)
    chex.assert_tree_shape_prefix(roots.embedding, roots.value.shape)
    levels = levels_per_iteration()

    def core(variables: Any, roots: RootInputs) -> SearchState:
        body = functools.partial(simulate, step, config, levels, variables, roots)
        state = lax.fori_loop(0, config.simulations, body, init(config, roots))
        return state if keep_tree else SearchState(state.rows[:, :1], (), (), state.depth)

    batched = jax.custom_batching.custom_vmap(core)

    @batched.def_vmap
    def _(size: int, mapped: Any, variables: Any, roots: RootInputs) -> Any:
        variables_mapped, roots_mapped = mapped
        if size > 1 and any(jax.tree.leaves(variables_mapped)):
            out = jax.vmap(core, in_axes=jax.tree.map(lambda x: 0 if x else None, mapped))(variables, roots)
        else:
            # [size, N, ...] -> [size N, ...]: the mapped axis becomes further lanes.
            variables = jax.tree.map(lambda x, m: x[0] if m else x, variables, variables_mapped)
            tiled = jax.tree.map(lambda x, m: x if m else jnp.broadcast_to(x, (size, *x.shape)), roots, roots_mapped)
            out = batched(variables, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tiled))
            out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return batched(variables, roots)


def levels_per_iteration() -> int:
    """Levels of the tree in one iteration of selection or backup: iterations cost launches on a GPU, little on CPU."""
    return 2 if topology.on_cpu() else 8


def as_tree(state: SearchState) -> Tree:
    """Returns all nodes, with -1 for "no child" and the embeddings."""
    tree = Tree.from_rows(state.rows)
    child = jnp.where(tree.child < tree.v.shape[1], tree.child, -1.0)
    return tree._replace(child=child, embedding=state.embedding)


def init(config: TreeConfig, roots: RootInputs) -> SearchState:
    """Makes trees of one node each, the root."""
    N, S = roots.prior.shape[0], config.simulations

    def table(x: jax.Array) -> jax.Array:
        smaller = config.embedding_dtype and x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)
        empty = jnp.zeros((N, S + 1, *x.shape[1:]), config.embedding_dtype if smaller else x.dtype)
        return empty.at[:, 0].set(x.astype(empty.dtype))

    zero, v = jnp.zeros(N), roots.value.astype(jnp.float32)
    root = _leaf(config, roots.prior, v, zero, zero, roots.selection, jnp.int32(0), True)
    rows = jnp.zeros((N, S + 1, root.shape[-1])).at[:, 0].set(root)
    no_child = jnp.full((N, S + 1), S + 1, jnp.int32)
    return SearchState(rows, no_child, jax.tree.map(table, roots.embedding), jnp.zeros(N, jnp.int32))


def _leaf(config: TreeConfig, P: Any, v: Any, r: Any, d: Any, inputs: Any, i: Any, is_root: bool) -> jax.Array:
    """Makes rows [N, R] of nodes without children."""
    zero = jnp.zeros_like(P)
    node = Tree(P, zero, zero, zero + config.simulations + 1, v, r, d, v)
    choice = config.select(node, inputs, i, jnp.full(v.shape, is_root))
    return node._replace(choice=choice.astype(jnp.float32)).rows


def simulate(
    step: Any, config: TreeConfig, levels: int, variables: Any, roots: RootInputs, i: jax.Array, state: SearchState
) -> SearchState:
    """Runs simulation i in every lane."""
    none, lane = config.simulations + 1, jnp.arange(state.depth.shape[0])
    # Select: follow the cached actions to a leaf.
    level, path, parent, length = _select_path(config, levels, state.next)

    # Expand: one step of the model from the leaf, with the action that the leaf selects.
    # Two indices [lane, node], for XLA:CPU splits fusions around one flat index over threads.
    action = state.rows[:, :, -1].at[lane, parent].get(**CLIP).astype(jnp.int32)
    embedding = jax.tree.map(
        lambda table, x: table.at[lane, parent].get(**CLIP).astype(x.dtype), state.embedding, roots.embedding
    )
    new = step(variables, embedding, action)
    chex.assert_equal_shape([new.reward, new.discount, new.value, action])
    chex.assert_equal_shape([new.logits, roots.prior])
    chex.assert_trees_all_equal_shapes(new.embedding, roots.embedding)
    v, r, d = (x.astype(jnp.float32) for x in (new.value, new.reward, new.discount))
    row = _leaf(config, config.prior(new.logits, new.legal), v, r, d, roots.selection, i + 1, False)
    put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=i + 1, axis=1)
    stored = jax.tree.map(lambda table, x: x.astype(table.dtype)[:, None], state.embedding, new.embedding)
    embeddings = jax.tree.map(put, state.embedding, stored)
    # An edge at the cap gets no child, so paths end there and evaluate it again.
    linked_parent = jnp.where(length < config.max_depth, parent, -1)

    # Backup: from the leaf to the root, some levels of the path at a time.
    def backup(carry: Any) -> Any:
        level, G, rows, next_node = carry
        level -= levels
        nodes = lax.dynamic_slice_in_dim(path, level, levels, 0)
        node = Tree.from_rows(rows.at[lane[None], nodes].get(**CLIP))
        # G <- r + d G; lanes whose path is shorter pass G through.
        returns = []
        for k in reversed(range(levels)):
            returns.append(G)
            G = jnp.where(nodes[k] < none, node.r[k] + node.d[k] * G, G)
        # n(a) += 1 and W(a) += G at the selected action; the leaf's edge gets the new node as its child.
        actions = lax.broadcasted_iota(jnp.float32, node.n.shape, 2)
        selected = actions == node.choice[..., None]
        W = node.W + jnp.where(selected, jnp.stack(returns[::-1])[..., None], 0.0)
        linked = selected & (nodes == linked_parent[None])[..., None]
        child = jnp.where(linked, (i + 1).astype(jnp.float32), node.child)
        node = node._replace(n=node.n + selected.astype(jnp.float32), W=W, child=child)
        # The statistics changed, so the cached action and its child are computed again.
        choice = config.select(node, roots.selection, i + 1, nodes == 0).astype(jnp.float32)
        child_of_choice = jnp.sum(jnp.where(actions == choice[..., None], child, 0.0), -1).astype(jnp.int32)
        rows = rows.at[lane[None], nodes].set(node._replace(choice=choice).rows, **DROP)
        return level, G, rows, next_node.at[lane[None], nodes].set(child_of_choice, **DROP)

    carry = (level, r + d * v, put(state.rows, row[:, None]), state.next)
    _, _, rows, next_node = lax.while_loop(lambda carry: carry[0] > 0, backup, carry)
    return SearchState(rows, next_node, embeddings, state.depth + length)


def _select_path(
    config: TreeConfig, levels: int, next_node: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Follows the cached actions from the roots to the leaves.

    Returns:
      The number of levels, int32 []; the paths, int32 [D, N]; the leaves, int32 [N]; the lengths, int32 [N].
    """
    none, lane = config.simulations + 1, jnp.arange(next_node.shape[0])

    def body(carry: Any) -> Any:
        level, path, parent, length, node = carry
        nodes = []
        for _ in range(levels):
            nodes.append(node)
            # A lane that has reached its leaf stays at "no node" until the longest path ends.
            parent, length = jnp.where(node < none, node, parent), length + (node < none).astype(jnp.int32)
            node = next_node.at[lane, node].get(**CLIP)
        path = lax.dynamic_update_slice_in_dim(path, jnp.stack(nodes), level, 0)
        return level + levels, path, parent, length, node

    zero = jnp.zeros(next_node.shape[0], jnp.int32)
    path = jnp.zeros((-(-config.max_depth // levels) * levels, zero.size), jnp.int32)
    carry = body((jnp.int32(0), path, zero, zero, zero))
    return lax.while_loop(lambda carry: jnp.any(carry[-1] < none), body, carry)[:-1]
