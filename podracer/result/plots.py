"""Pictures of a run: learning curves and searches as PNG, episodes as GIF."""

from __future__ import annotations

import base64
import pathlib
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from podracer import config as configs
from podracer import files

if TYPE_CHECKING:
    from podracer.matches import Rating
    from podracer.run.explanation import Explanation, Node

History = Sequence[Mapping[str, Any]]
"""Rows of metrics; rows of several seeds carry `member`."""

FEW = 2
"""Lines of which a legend fits into the picture."""

MAX_LINES = 12
"""Lines that a legend names."""


class Picture(type(pathlib.Path())):
    """The path of a picture; as the last line of a notebook's cell, the picture."""

    def _repr_png_(self) -> bytes | None:
        return self.read_bytes() if self.suffix == ".png" and self.is_file() else None

    def _repr_html_(self) -> str | None:
        kind = {".gif": "image/gif", ".svg": "image/svg+xml"}.get(self.suffix)
        return image_tag(self.read_bytes(), kind) if kind and self.is_file() else None


def image_tag(data: bytes, kind: str) -> str:
    """HTML that holds a picture of a media type such as `image/gif`; small ones are enlarged."""
    style = "min-height:240px; image-rendering:pixelated"
    return f'<img src="data:{kind};base64,{base64.b64encode(data).decode()}" style="{style}">'


def default_path(run_dir: pathlib.Path | None, name: str) -> pathlib.Path:
    """Where a picture goes if nobody says so: into the run directory, or into a new temporary one."""
    return (run_dir or pathlib.Path(tempfile.mkdtemp(prefix="podracer-"))) / name


def learning_curve(
    histories: Mapping[str, History], path: str | pathlib.Path, *, title: str = "", metric: str | None = None
) -> Picture:
    """Draws return against environment steps, one line a label; several members become a mean with a band.

    Args:
      histories: metric rows by label, such as `members.curves` returns.
      path: of the picture; its suffix chooses the format.
      title: above the picture.
      metric: what to draw; if None, the return in training and, dashed, in evaluation.

    Raises:
      ValueError: where no run has rows of the metric.
    """
    return save(figure(histories, title=title, metric=metric), path)


def save(drawn: Any, path: str | pathlib.Path) -> Picture:
    """Writes a Matplotlib figure, as PNG where the path has no suffix."""
    path = Picture(path)
    if not path.suffix:
        path = Picture(f"{path}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as partial:
        drawn.savefig(partial)
    return path


def figure(histories: Mapping[str, History], *, title: str = "", metric: str | None = None) -> Any:
    """The Matplotlib figure of `learning_curve`, which is in no file yet."""
    from matplotlib.figure import Figure  # Figure without pyplot: no global state, no display
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    many = len(histories) > FEW
    picture = Figure(figsize=(9 if many else 7, 4.2), dpi=120, layout="constrained")
    axes = picture.subplots()
    legend, notes = [], {}
    for colour, (label, history) in zip(colours(len(histories)), histories.items()):
        drawn = 0
        for name, style in ((metric, "-"),) if metric else (("episode/return", "-"), ("eval/return_mean", "o--")):
            curves = _curves(history, name)
            if not curves:
                continue
            draw(axes, curves, colour, style)
            drawn = max(drawn, len(curves))
            if style != "-":
                notes["evaluation"] = Line2D([], [], color="grey", linestyle="--", marker="o", markersize=3)
        if drawn > 1:
            notes["band: min to max"] = Patch(color="grey", alpha=0.2)
            label = f"{label}, mean of {drawn} seeds"
        if drawn:
            legend.append((Line2D([], [], color=colour), label))
    if not legend:
        raise ValueError(f"nothing to plot: no rows of {_missing(histories, metric)}")
    if len(legend) > MAX_LINES:
        legend[MAX_LINES - 1 :] = [(Line2D([], [], linestyle="none"), f"and {len(legend) - MAX_LINES + 1} more")]
    legend += [(handle, label) for label, handle in notes.items()]
    axes.set_xlabel("environment steps")
    axes.set_ylabel(metric or "return")
    axes.set_title("\n".join(textwrap.wrap(title, 90)), fontsize="medium")
    axes.grid(alpha=0.3)
    where = {"loc": "outside right upper", "fontsize": "small"} if many else {"loc": "best"}
    (picture if many else axes).legend(*zip(*legend), frameon=False, **where)
    return picture


def elo_curve(
    curves: Mapping[str, Sequence[tuple[int, Rating]]],
    levels: Sequence[Rating],
    path: str | pathlib.Path,
    *,
    title: str = "",
) -> Picture:
    """Draws Elo against environment steps, one line with 95% intervals a run, and levels of players that learn nothing.

    Args:
      curves: (step, rating) of a run's players, by label.
      levels: of others.
      path: of the picture; its suffix chooses the format.
      title: above the picture.
    """
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = picture.subplots()
    for colour, (label, points) in zip(colours(len(curves)), curves.items()):
        elo = np.array([rating.elo for _, rating in points])
        low, high = np.array([rating.interval for _, rating in points]).T
        spread = np.maximum([elo - low, high - elo], 0.0)
        axes.errorbar([step for step, _ in points], elo, spread, fmt="o-", color=colour, markersize=3, label=label)
    for level in levels:
        axes.axhline(level.elo, color="grey", linestyle="--", linewidth=1)
        axes.annotate(level.name, (0.01, level.elo), xycoords=axes.get_yaxis_transform(), color="grey", va="bottom")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("Elo (95% interval)")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return save(picture, path)


def _missing(histories: Mapping[str, History], metric: str | None) -> str:
    text = f"{metric or 'episode/return'} in {', '.join(histories) or 'no run'}"
    known = {name for history in histories.values() for row in history for name in row if "/" in name}
    return f"{text}; {configs.suggest(metric, known)}" if metric and known else f"{text}."


def colours(count: int) -> list[Any]:
    """Matplotlib's own ten, or as many as there are from dark to light."""
    import matplotlib

    if count <= 10:
        return [f"C{i}" for i in range(count)]
    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.95, count)))


def _curves(history: History, metric: str) -> list[np.ndarray]:
    """One [n, 2] array of (steps, value) per member."""
    members: dict[int, list[tuple[float, float]]] = {}
    for row in history:
        if metric in row:
            members.setdefault(row.get("member", 0), []).append((row["env_steps"], row[metric]))
    return [np.asarray(points, float) for points in members.values()]


def draw(axes: Any, curves: list[np.ndarray], colour: Any, style: str) -> None:
    """Draws one curve [n, 2] of (steps, value), or the mean of several with a band from the least to the greatest."""
    if len(curves) == 1:
        axes.plot(curves[0][:, 0], curves[0][:, 1], style, color=colour, markersize=3)
        return
    start, stop = max(c[0, 0] for c in curves), min(c[-1, 0] for c in curves)
    steps = np.linspace(start, max(start, stop), 200)
    values = np.stack([np.interp(steps, c[:, 0], c[:, 1]) for c in curves])
    axes.plot(steps, values.mean(0), "-" if style == "-" else "--", color=colour)
    axes.fill_between(steps, values.min(0), values.max(0), alpha=0.2, color=colour)


def animation(images: np.ndarray, path: str | pathlib.Path, frames_per_second: float = 15.0) -> Picture:
    """Writes uint8 [n, H, W, 3] as a looping GIF; the last frame is held for a second."""
    from PIL import Image

    pictures = [Image.fromarray(image) for image in images]
    durations = [1000 / frames_per_second] * (len(pictures) - 1) + [1000.0]
    path = Picture(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as partial:
        pictures[0].save(partial, save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    return path


INK, QUIET, CHOSEN = "#1f2937", "#9ca3af", "#c2410c"
"""Of words and edges, of what matters less, and of what the agent does."""

COLUMNS = {"prior": "#cbd5e1", "visits": "#60a5fa", "policy": "#1d4ed8"}
GAIN, LOSS = "#15803d", "#b91c1c"


def search_bars(explanation: Explanation) -> Any:
    """The Matplotlib figure of a search's numbers: prior, visits, policy and Q of every legal action.

    Of more actions than fit, the most visited ones. Beside them the board of a game, its cells with their actions.
    """
    from matplotlib.figure import Figure

    shown = sorted(explanation.rows())
    look, m = explanation.look, len(shown)
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
        top.bar(place + 0.27 * (i - 1), values[shown], 0.27, color=COLUMNS[name], label=name)
    top.set_ylabel("fraction")
    top.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, fontsize="small")
    top.tick_params(labelbottom=False, bottom=False)
    q = explanation.q[shown]
    bottom.bar(place, np.nan_to_num(q), 0.5, color=[GAIN if x > 0 else LOSS for x in q], label="Q")
    bottom.axhline(0, color=QUIET, linewidth=0.8)
    bottom.axhline(explanation.value, color=INK, linewidth=0.8, linestyle=":")
    bottom.annotate("V", (1.005, explanation.value), xycoords=("axes fraction", "data"), va="center", fontsize="small")
    bottom.set_ylabel("Q")
    bottom.set_xlabel(
        "action" if m == len(explanation.actions) else f"action (and {len(explanation.actions) - m} more)"
    )
    bottom.set_xticks(place, [str(explanation.actions[i]) for i in shown])
    for label, i in zip(bottom.get_xticklabels(), shown):
        if explanation.actions[i] == explanation.action:
            label.set(color=CHOSEN, fontweight="bold")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    picture.suptitle(_heading(explanation, picture.get_figwidth()), fontsize="medium")
    return picture


def _heading(explanation: Explanation, width: float) -> str:
    """Title and facts, in lines that are no wider than a picture of so many inches."""
    return "\n".join([explanation.title, *textwrap.wrap(explanation.facts, int(11.5 * width))])


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
        style = {"color": INK if columns else "#a7c4b5"}
        if action == explanation.action:
            style = {"color": CHOSEN if columns else "#fb923c", "fontweight": "bold"}
        place = (column + 0.5) * cell - 0.5, (row + (0.35 if columns else 0.5)) * cell - 0.5
        axes.text(*place, str(action), ha="center", va="center", fontsize="small" if width > 5 else "large", **style)


def search_tree(explanation: Explanation, depth: int = 3, nodes: int = 14) -> Any:
    """The Matplotlib figure of a search's most visited nodes, from the root at the left down to a depth.

    Edges carry their action, n, Q for who acted, and P. Nodes are boards, or the values V of those who move there.
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
        box.spines[:].set(color=CHOSEN if main else QUIET, linewidth=1.6 if main else 0.8)
        if board is not None:
            box.imshow(board)
        else:
            said = "end" if node.ended else "illegal" if explanation.look else f"{node.value:+z.2f}"
            box.text(0.5, 0.5, "" if np.isnan(node.value) else said, ha="center", va="center", transform=box.transAxes)
        note = "end" if node.ended else "" if node.actions else f"V {node.value:+z.2f}"
        if note and board is not None:
            axes.text(x, y + half[1] + 0.04, note, ha="center", va="top", fontsize=7.5, color=INK)
    picture.suptitle(heading, fontsize="medium", y=1 - 0.08 / height, va="top")
    return picture


def _edge(
    axes: Any, node: Node, start: tuple[float, float], end: tuple[float, float], half: float, main: bool, S: int
) -> None:
    """A line from the right of a node to the left of another one, as wide as it was visited."""
    (x, y), (to_x, to_y) = start, end
    x, to_x = x + half, to_x - half
    bend = x + 0.16
    turn = np.linspace(0.0, 1.0, 20)
    xs, ys = x + (bend - x) * turn, y + (to_y - y) * turn**2 * (3 - 2 * turn)
    colour = CHOSEN if main else QUIET
    width = 0.8 + 4.0 * node.visits / S
    axes.plot([*xs, to_x], [*ys, to_y], color=colour, linewidth=width, solid_joinstyle="round", zorder=1)
    middle = (bend + to_x) / 2
    text = {"ha": "center", "fontsize": 7.5, "color": INK}
    axes.text(
        middle, to_y - 0.06, f"{node.actions[-1]}", va="bottom", **(text | {"fontsize": 10, "fontweight": "bold"})
    )
    axes.text(middle, to_y + 0.06, f"n {node.visits}   Q {node.q:+z.2f}\nP {node.prior:.2f}", va="top", **text)


def _layout(nodes: Sequence[Node]) -> dict[tuple[int, ...], tuple[float, float]]:
    """Where nodes are, (depth, row): leaves one below the other, others in the middle of their children."""
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
