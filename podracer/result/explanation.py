"""What a search thought at one observation: numbers of every legal action, the line that it expects, and pictures.

    explanation = result.explain(observation)
    print(explanation)
    explanation.tree("tree.png")

Of a search over one's own model, `of(search.search(..., keep_tree=True), config)`.
"""

from __future__ import annotations

import dataclasses
import heapq
import io
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.run import plots, report
from podracer.search import LOWEST, Planner, SearchConfig, Searched, search
from podracer.tree import Tree
from podracer.types import ActorParams, ArrayTree

Look = Callable[[Sequence[int]], np.ndarray | None]
"""`(actions) -> uint8 [H, W, 3]`; what is seen behind actions from the root, None where they are illegal."""

MAX_ROWS = 24
"""Actions that a table or a picture names, the most visited ones."""


LINE = 8
"""Actions of the expected line that are written out."""


class Node(NamedTuple):
    """A node of a search's tree, and the edge into it.

    Attributes:
      actions: the way to it from the root, () of the root itself.
      visits: n of the edge; S of the root.
      prior: P of the edge; 1 of the root.
      q: Q of the edge, for who acted; V of the root.
      value: V of the node, for who moves there; NaN behind the depth cap, where there is no node.
      ended: whether nothing comes behind it.
    """

    actions: tuple[int, ...]
    visits: int
    prior: float
    q: float
    value: float
    ended: bool


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A search at one observation. Arrays [m] are of the m legal actions, in ascending order.

    Attributes:
      title: who searched, and where.
      algorithm: "puct" or "gumbel".
      simulations: S.
      actions: int [m]; the legal actions.
      prior: float32 [m]; what the policy says without a search; no noise is added.
      visits: int32 [m]; their sum is S.
      policy: float32 [m]; what the search makes of the prior.
      q: float32 [m]; the return that the search expects, NaN where an action was not tried.
      action: what the agent does.
      value: V of the root, that the search gives it.
      network_value: that of the model alone.
      depth: edges from the root to a simulation's new node, on average.
      variation: actions; the agent's, and then the most visited ones, as far as the tree goes or until the end.
      nodes: `(depth, count) -> list[Node]`; the most visited nodes down to a depth, parents before children.
      look: what is seen behind actions, or None.
      board: (H, W) of what is seen, or None; numbers of actions are written into its cells.
    """

    title: str
    algorithm: str
    simulations: int
    actions: np.ndarray
    prior: np.ndarray
    visits: np.ndarray
    policy: np.ndarray
    q: np.ndarray
    action: int
    value: float
    network_value: float
    depth: float
    variation: tuple[int, ...]
    nodes: Callable[[int, int], list[Node]] = dataclasses.field(repr=False)
    look: Look | None = dataclasses.field(default=None, repr=False)
    board: tuple[int, int] | None = None

    def bars(self, path: str | pathlib.Path | None = None) -> plots.Picture:
        """Draws the numbers of each legal action, beside the board of a game; into a temporary directory by default."""
        return plots.save(plots.search_bars(self), path or plots.default_path(None, "search-bars.png"))

    def tree(self, path: str | pathlib.Path | None = None, *, depth: int = 3, nodes: int = 14) -> plots.Picture:
        """Draws the most visited nodes down to a depth; into a temporary directory by default."""
        return plots.save(plots.search_tree(self, depth, nodes), path or plots.default_path(None, "search-tree.png"))

    def rows(self, limit: int = MAX_ROWS) -> list[int]:
        """Places in the arrays [m] of the most visited actions, the best first."""
        order = np.lexsort((-self.policy, -self.visits, self.actions != self.action))
        return order[:limit].tolist()

    @property
    def facts(self) -> str:
        """The search in a line."""
        line = " ".join(map(str, self.variation[:LINE])) + (" ..." if len(self.variation) > LINE else "")
        return (
            f"{self.simulations} simulations ({self.algorithm}), {self.depth:.1f} deep on average; value "
            f"{self.value:+z.2f}, without search {self.network_value:+z.2f}; expects {line}"
        )

    def _table(self) -> list[tuple[str, ...]]:
        rows = [("action", "prior", "visits", "policy", "Q", "")]
        for i in self.rows():
            q = "" if np.isnan(self.q[i]) else f"{self.q[i]:+z.3f}"
            numbers = (f"{self.prior[i]:.3f}", f"{self.visits[i]}", f"{self.policy[i]:.3f}", q)
            rows.append((str(self.actions[i]), *numbers, "<- plays" if self.actions[i] == self.action else ""))
        return rows

    def __str__(self) -> str:
        lines = ["".join(f"{cell:>9}" for cell in row[:-1]) + f"  {row[-1]}" for row in self._table()]
        if len(self.actions) > MAX_ROWS:
            lines.append(f"and {len(self.actions) - MAX_ROWS} more")
        return "\n".join([self.title, self.facts, *(line.rstrip() for line in lines)])

    def _repr_html_(self) -> str:
        picture = io.BytesIO()
        plots.search_bars(self).savefig(picture, format="png", dpi=80)  # beside the text of a page
        facts = report.table([(self.title,), (self.facts,)])
        return facts + report.table(self._table()) + plots.image_tag(picture.getvalue(), "image/png")


def searching(planner: Planner, config: SearchConfig) -> Callable[[ActorParams, ArrayTree], Searched]:
    """`(ActorParams, observation [N]) -> Searched` of an agent's search without noise, with its tree; jitted."""

    @jax.jit
    def run(params: ActorParams, observation: ArrayTree) -> Searched:
        variables = planner.variables(params)
        root = planner.model.root(variables, observation)
        return search(planner.model, variables, root, jax.random.key(0), config, explore=False, keep_tree=True)

    return run


def of(
    found: Searched,
    config: SearchConfig,
    *,
    title: str = "search",
    look: Look | None = None,
    board: tuple[int, int] | None = None,
    lane: int = 0,
) -> Explanation:
    """What one root of a search came to.

    Args:
      found: of `podracer.search.search(..., keep_tree=True)`.
      config: of that search.
      title: above pictures.
      look: what is seen behind actions from the root.
      board: (H, W) of what is seen.
      lane: which of the N roots.

    Raises:
      ValueError: where the tree was not kept.
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
    """The root's action and then the most visited ones. What a search makes up behind an end is left out."""
    line, node = [], 0
    while tree.n[node].any():
        line.append(action)
        node = int(tree.child[node, action])
        if node < 0 or tree.d[node] == 0:
            break
        action = int(tree.n[node].argmax())
    return tuple(line)


def _nodes(tree: Tree, probability: np.ndarray, depth: int, count: int) -> list[Node]:
    """The most visited nodes; of equal ones those that come first in the tree."""
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


def boards(environment: Any, observation: ArrayTree) -> Look | None:
    """How boards look behind actions, of games for two that can be rendered."""
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
