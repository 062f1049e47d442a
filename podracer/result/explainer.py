"""Explanations of searches: of an agent's own, or of one over a model of one's own."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.nets.action_masks import LOWEST
from podracer.result.explanation import Explanation, Look, Node
from podracer.search.search import Planner, SearchConfig, SearchResult, search
from podracer.search.tree import Tree
from podracer.types import ActorParams, ArrayTree


def make_search(planner: Planner, config: SearchConfig) -> Callable[[ActorParams, ArrayTree], SearchResult]:
    """`(ActorParams, observation [N]) -> SearchResult` of an agent's search without noise, with its tree; jitted."""

    @jax.jit
    def run(params: ActorParams, observation: ArrayTree) -> SearchResult:
        variables = planner.variables(params)
        root = planner.model.root(variables, observation)
        return search(planner.model, variables, root, jax.random.key(0), config, explore=False, keep_tree=True)

    return run


def from_search(
    found: SearchResult,
    config: SearchConfig,
    *,
    title: str = "search",
    look: Look | None = None,
    board: tuple[int, int] | None = None,
    lane: int = 0,
) -> Explanation:
    """The explanation of one root of a search.

    Args:
      found: the result of `podracer.search.search(..., keep_tree=True)`.
      config: settings of that search.
      title: text above pictures.
      look: draws the board after actions from the root.
      board: (H, W), the size of the board.
      lane: number of the root, 0 to N - 1.

    Raises:
      ValueError: if the tree was not kept.
    """
    if not isinstance(found.tree, Tree):
        raise ValueError("the search's tree was not kept: search(..., keep_tree=True).")
    tree: Any = jax.tree.map(lambda x: np.asarray(x[lane]), found.tree._replace(embedding=()))
    one: Any = jax.tree.map(lambda x: np.asarray(x[lane]), found._replace(tree=()))
    puct = config.algorithm == "puct"
    legal = tree.P[0] >= 0 if puct else tree.P[0] > LOWEST
    probability = tree.P if puct else np.exp(tree.P)
    visits = one.visits[legal]
    return Explanation(
        title=title,
        algorithm=config.algorithm,
        simulations=config.simulations,
        actions=np.flatnonzero(legal),
        prior=probability[0][legal],
        visits=visits,
        policy=one.policy[legal],
        q=np.where(visits > 0, one.q[legal], np.nan).astype(np.float32),
        action=int(one.action),
        value=float(one.value),
        network_value=float(tree.v[0]),
        depth=float(one.depth),
        variation=_variation(tree, int(one.action)),
        nodes=lambda depth, count: _nodes(tree, probability, depth, count),
        look=look,
        board=board,
    )


def _variation(tree: Tree, action: int) -> tuple[int, ...]:
    """The root's action and then the most visited ones, without imagined moves after the end of a game."""
    line, node = [], 0
    while tree.n[node].any():
        line.append(action)
        node = int(tree.child[node, action])
        if node < 0 or tree.d[node] == 0:
            break
        action = int(tree.n[node].argmax())
    return tuple(line)


def _nodes(tree: Tree, probability: np.ndarray, depth: int, count: int) -> list[Node]:
    """The most visited nodes; of equal ones the first in the tree."""
    root = Node((), int(tree.n[0].sum()), 1.0, float(tree.V[0, 0]), float(tree.V[0, 0]), False)
    chosen: list[Node] = []
    open_nodes: list[tuple[int, tuple[int, ...], int, Node]] = [(-root.visits, (), 0, root)]
    while open_nodes and len(chosen) < count:
        _, actions, place, node = heapq.heappop(open_nodes)
        chosen.append(node)
        if place < 0 or node.ended or len(actions) == depth:
            continue
        for action in np.flatnonzero(tree.n[place]).tolist():
            child, n = int(tree.child[place, action]), int(tree.n[place, action])
            value, ended = (float(tree.V[child, 0]), bool(tree.d[child] == 0)) if child >= 0 else (np.nan, False)
            edge = float(probability[place, action]), float(tree.Q[place, action])
            heapq.heappush(
                open_nodes, (-n, (*actions, action), child, Node((*actions, action), n, *edge, value, ended))
            )
    return chosen


def board_renderer(environment: Any, observation: ArrayTree) -> Look | None:
    """Returns the function that draws the board after each action, or None for environments other than games that can
    be rendered."""
    if not all(hasattr(environment, name) for name in ("position", "render", "observe")):
        return None

    @jax.jit
    def after(state: ArrayTree, action: jax.Array) -> Any:
        legal = environment.observe(state)["action_mask"][action] > 0
        return environment.step(state, action, jax.random.key(0))[0], legal

    position, render = jax.jit(environment.position), jax.jit(environment.render)

    def look(actions: Sequence[int]) -> np.ndarray | None:
        state, legal = position(observation), True
        for action in actions:
            if not legal:
                return None
            state, legal = after(state, jnp.int32(action))
        return np.asarray(render(state)) if legal else None

    return look
