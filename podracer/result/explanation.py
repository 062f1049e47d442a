"""The explanation of a search at one observation: numbers of every legal action, the line of play that it expects, and
pictures.

    explanation = result.explain(observation)
    print(explanation)
    explanation.tree("tree.png")

For a search over one's own model: `explainer.from_search(search.search(..., keep_tree=True), config)`.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from podracer.result import plots, report

Look = Callable[[Sequence[int]], np.ndarray | None]
"""`(actions) -> uint8 [H, W, 3]`; a picture of the position after actions from the root, None if they are illegal."""

MAX_ROWS = 24
"""The number of actions that a table or a picture names, the most visited ones."""


LINE = 8
"""The number of actions of the expected line that are printed."""


class Node(NamedTuple):
    """A node of a search's tree, and the edge into it.

    Attributes:
      actions: the actions from the root to it; () for the root itself.
      visits: n of the edge; S of the root.
      prior: P of the edge; 1 of the root.
      q: Q of the edge, for the player who acted; V of the root.
      value: V of the node, for the player to move there; NaN after the depth cap, where there is no node.
      ended: True if the episode ends there.
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
      title: the agent and the environment.
      algorithm: "puct" or "gumbel".
      simulations: S.
      actions: int [m]; the legal actions.
      prior: float32 [m]; the policy without a search, and without noise.
      visits: int32 [m]; their sum is S.
      policy: float32 [m]; the search's policy.
      q: float32 [m]; the return that the search expects; NaN for an action without a visit.
      action: the agent's action.
      value: V of the root after the search.
      network_value: V of the root by the model alone.
      depth: edges from the root to a simulation's new node, on average.
      variation: actions; the agent's, and then the most visited ones, as far as the tree goes or until the end.
      nodes: `(depth, count) -> list[Node]`; the most visited nodes down to a depth, parents before children.
      look: draws the position after actions, or None.
      board: (H, W), the size of the board, or None; numbers of actions are written into its cells.
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
        return plots.save(search_bars(self), path or plots.default_path(None, "search-bars.png"))

    def tree(self, path: str | pathlib.Path | None = None, *, depth: int = 3, nodes: int = 14) -> plots.Picture:
        """Draws the most visited nodes down to a depth; into a temporary directory by default."""
        return plots.save(search_tree(self, depth, nodes), path or plots.default_path(None, "search-tree.png"))

    def rows(self, limit: int = MAX_ROWS) -> list[int]:
        """The indices into the arrays [m] of the most visited actions, the best first."""
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
        search_bars(self).savefig(picture, format="png", dpi=80)  # beside the text of a page
        facts = report.table([(self.title,), (self.facts,)])
        return facts + report.table(self._table()) + plots.image_tag(picture.getvalue(), "image/png")


_INK, _QUIET, _CHOSEN = "#1f2937", "#9ca3af", "#c2410c"
"""The colours of text and edges, of what matters less, and of the agent\'s choice."""

_COLUMNS = {"prior": "#cbd5e1", "visits": "#60a5fa", "policy": "#1d4ed8"}

_GAIN, _LOSS = "#15803d", "#b91c1c"


def search_bars(explanation: Explanation) -> Any:
    """The Matplotlib figure of a search's numbers: prior, visits, policy and Q of every legal action.

    If there are more actions than fit, it shows the most visited ones. Beside them is the board of a game, with the
    actions in its cells.
    """
    from matplotlib.figure import Figure

    indices = sorted(explanation.rows())
    look, m = explanation.look, len(indices)
    width = min(max(4.2, 0.62 * m + 1.4), 11.0)
    board = look(()) if look else None
    picture = Figure(figsize=(width + (3.4 if board is not None else 0), 4.4), dpi=120, layout="constrained")
    if board is None:
        top, bottom = picture.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    else:
        grid = picture.add_gridspec(2, 2, width_ratios=(3.2, width), height_ratios=(3, 2))
        top = picture.add_subplot(grid[0, 1])
        bottom = picture.add_subplot(grid[1, 1], sharex=top)
        _board(picture.add_subplot(grid[:, 0]), board, explanation)
    place = np.arange(m)
    fractions = explanation.visits / explanation.visits.sum()
    for i, (name, values) in enumerate(
        (("prior", explanation.prior), ("visits", fractions), ("policy", explanation.policy))
    ):
        top.bar(place + 0.27 * (i - 1), values[indices], 0.27, color=_COLUMNS[name], label=name)
    top.set_ylabel("fraction")
    top.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, fontsize="small")
    top.tick_params(labelbottom=False, bottom=False)
    q = explanation.q[indices]
    bottom.bar(place, np.nan_to_num(q), 0.5, color=[_GAIN if x > 0 else _LOSS for x in q], label="Q")
    bottom.axhline(0, color=_QUIET, linewidth=0.8)
    bottom.axhline(explanation.value, color=_INK, linewidth=0.8, linestyle=":")
    bottom.annotate("V", (1.005, explanation.value), xycoords=("axes fraction", "data"), va="center", fontsize="small")
    bottom.set_ylabel("Q")
    bottom.set_xlabel(
        "action" if m == len(explanation.actions) else f"action (and {len(explanation.actions) - m} more)"
    )
    bottom.set_xticks(place, [str(explanation.actions[i]) for i in indices])
    for label, i in zip(bottom.get_xticklabels(), indices):
        if explanation.actions[i] == explanation.action:
            label.set(color=_CHOSEN, fontweight="bold")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    picture.suptitle(_heading(explanation, picture.get_figwidth()), fontsize="medium")
    return picture


def _heading(explanation: Explanation, width: float) -> str:
    """Title and facts, in lines that are no wider than a picture of so many inches."""
    return "\n".join([explanation.title, *textwrap.wrap(explanation.facts, int(13 * width))])


def _board(axes: Any, board: np.ndarray, explanation: Explanation) -> None:
    """The board, with the numbers of legal actions in their cells, or below their columns."""
    axes.imshow(board)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    if explanation.board is None:
        return
    height, width = explanation.board
    cell = board.shape[0] / height
    columns = width != height and explanation.actions.max() < width
    for action in explanation.actions.tolist():
        row, column = (height, action) if columns else divmod(action, width)
        if row > height or (row == height and not columns):
            continue  # a pass is nowhere on the board
        style = {"color": _INK if columns else "#a7c4b5"}
        if action == explanation.action:
            style = {"color": _CHOSEN if columns else "#fb923c", "fontweight": "bold"}
        place = (column + 0.5) * cell - 0.5, (row + (0.35 if columns else 0.5)) * cell - 0.5
        axes.text(*place, str(action), ha="center", va="center", fontsize="small" if width > 5 else "large", **style)


def search_tree(explanation: Explanation, depth: int = 3, nodes: int = 14) -> Any:
    """The Matplotlib figure of a search's most visited nodes, from the root at the left down to a depth.

    Edges carry their action, n, Q for the player who acted, and P. Nodes are boards, or the values V for the player to
    move there.
    """
    from matplotlib.figure import Figure

    chosen = explanation.nodes(depth, nodes)
    at = _layout(chosen)
    across = max(len(node.actions) for node in chosen) + 1
    down = 1 + max(y for _, y in at.values())
    width = 2.35 * across + 0.2
    heading = _heading(explanation, width)
    top = 0.24 + 0.18 * len(heading.splitlines())  # inches
    height = 0.98 * down + top + 0.15
    picture = Figure(figsize=(width, height), dpi=120)
    axes = picture.add_axes((0.0, 0.0, 1.0, 1.0 - top / height))
    axes.set(xlim=(-0.28, across - 0.72), ylim=(down - 0.5, -0.5))
    axes.set_axis_off()
    half = 0.38 / 2.35, 0.38 / 0.98  # of a node, in units of columns and rows
    for node in chosen:
        x, y = at[node.actions]
        main = node.actions == explanation.variation[: len(node.actions)]
        if node.actions:
            _edge(axes, node, at[node.actions[:-1]], (x, y), half[0], main, explanation.simulations)
        board = explanation.look(node.actions) if explanation.look else None
        box = axes.inset_axes((x - half[0], y - half[1], 2 * half[0], 2 * half[1]), transform=axes.transData)
        box.set_xticks([])
        box.set_yticks([])
        box.spines[:].set(color=_CHOSEN if main else _QUIET, linewidth=1.6 if main else 0.8)
        if board is not None:
            box.imshow(board)
        else:
            text = "end" if node.ended else "illegal" if explanation.look else f"{node.value:+z.2f}"
            box.text(0.5, 0.5, "" if np.isnan(node.value) else text, ha="center", va="center", transform=box.transAxes)
        note = "end" if node.ended else "" if node.actions else f"V {node.value:+z.2f}"
        if note and board is not None:
            axes.text(x, y + half[1] + 0.04, note, ha="center", va="top", fontsize=7.5, color=_INK)
    picture.suptitle(heading, fontsize="medium", y=1 - 0.08 / height, va="top")
    return picture


def _edge(
    axes: Any, node: Node, start: tuple[float, float], end: tuple[float, float], half: float, main: bool, S: int
) -> None:
    """A line from the right of a node to the left of another one; its width is the fraction of visits."""
    (x, y), (to_x, to_y) = start, end
    x, to_x = x + half, to_x - half
    bend = x + 0.16
    turn = np.linspace(0.0, 1.0, 20)
    xs, ys = x + (bend - x) * turn, y + (to_y - y) * turn**2 * (3 - 2 * turn)
    colour = _CHOSEN if main else _QUIET
    width = 0.8 + 4.0 * node.visits / S
    axes.plot([*xs, to_x], [*ys, to_y], color=colour, linewidth=width, solid_joinstyle="round", zorder=1)
    middle = (bend + to_x) / 2
    text = {"ha": "center", "fontsize": 7.5, "color": _INK}
    axes.text(
        middle, to_y - 0.06, f"{node.actions[-1]}", va="bottom", **(text | {"fontsize": 10, "fontweight": "bold"})
    )
    axes.text(middle, to_y + 0.06, f"n {node.visits}   Q {node.q:+z.2f}\nP {node.prior:.2f}", va="top", **text)


def _layout(nodes: Sequence[Node]) -> dict[tuple[int, ...], tuple[float, float]]:
    """The position of each node, (depth, row): leaves one below the other, others in the middle of their children."""
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {node.actions: [] for node in nodes}
    for node in nodes:
        if node.actions:
            children[node.actions[:-1]].append(node.actions)
    at: dict[tuple[int, ...], tuple[float, float]] = {}
    rows = 0

    def put(actions: tuple[int, ...]) -> float:
        nonlocal rows
        below = [put(child) for child in children[actions]]
        y = (below[0] + below[-1]) / 2 if below else rows
        rows += not below
        at[actions] = len(actions), y
        return y

    put(())
    return at
