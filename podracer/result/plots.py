"""Pictures of a run: learning curves as PNG, episodes as GIF."""

from __future__ import annotations

import base64
import pathlib
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podracer import configs
from podracer.evaluation.elo import Rating
from podracer.system import files

History = Sequence[Mapping[str, Any]]
"""Rows of metrics; rows of several seeds carry `member`."""

FEW = 2
"""The most lines for a legend inside of the picture."""

MAX_LINES = 12
"""The most lines that a legend names."""


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
    """The default path of a picture: in the run directory if there is one, else in a new temporary directory."""
    return (run_dir or pathlib.Path(tempfile.mkdtemp(prefix="podracer-"))) / name


def learning_curve(
    histories: Mapping[str, History], path: str | pathlib.Path, *, title: str = "", metric: str | None = None
) -> Picture:
    """Draws return against environment steps, one line a label; several members become a mean with a band.

    Args:
      histories: metric rows by label, as from `members.curves`.
      path: the picture's path; its suffix chooses the format.
      title: text above the picture.
      metric: name of a metric; if None, the return in training and, dashed, in evaluation.

    Raises:
      ValueError: if no run has rows of the metric.
    """
    return save(figure(histories, title=title, metric=metric), path)


def save(figure: Any, path: str | pathlib.Path) -> Picture:
    """Writes a Matplotlib figure, as PNG where the path has no suffix."""
    path = Picture(path)
    if not path.suffix:
        path = Picture(f"{path}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as partial:
        figure.savefig(partial)
    return path


def figure(histories: Mapping[str, History], *, title: str = "", metric: str | None = None) -> Any:
    """The Matplotlib figure of `learning_curve`, without writing a file."""
    from matplotlib.figure import Figure  # Figure without pyplot: no global state, no display
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import EngFormatter

    many = len(histories) > FEW
    picture = Figure(figsize=(9 if many else 7, 4.2), dpi=120, layout="constrained")
    axes = picture.subplots()
    legend, notes = [], {}
    for colour, (label, history) in zip(colours(len(histories)), histories.items()):
        num_seeds = 0
        for name, style in ((metric, "-"),) if metric else (("episode/return", "-"), ("eval/return_mean", "o--")):
            curves = _curves(history, name)
            if not curves:
                continue
            draw(axes, curves, colour, style)
            num_seeds = max(num_seeds, len(curves))
            if style != "-":
                notes["evaluation"] = Line2D([], [], color="grey", linestyle="--", marker="o", markersize=3)
        if num_seeds > 1:
            notes["band: min to max"] = Patch(color="grey", alpha=0.2)
            label = f"{label}, mean of {num_seeds} seeds"
        if num_seeds:
            legend.append((Line2D([], [], color=colour), label))
    if not legend:
        raise ValueError(f"nothing to plot: no rows of {_missing(histories, metric)}")
    if len(legend) > MAX_LINES:
        legend[MAX_LINES - 1 :] = [(Line2D([], [], linestyle="none"), f"and {len(legend) - MAX_LINES + 1} more")]
    legend += [(handle, label) for label, handle in notes.items()]
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k
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
      levels: ratings of other players.
      path: the picture's path; its suffix chooses the format.
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
    """Matplotlib's own ten colours, or `count` colours from dark to light."""
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
    """Draws one curve [n, 2] of (steps, value), or the mean of several, with a band of all of them if it is solid."""
    if len(curves) == 1:
        axes.plot(curves[0][:, 0], curves[0][:, 1], style, color=colour, markersize=3)
        return
    start, stop = max(c[0, 0] for c in curves), min(c[-1, 0] for c in curves)
    steps = np.linspace(start, max(start, stop), 200)
    values = np.stack([np.interp(steps, c[:, 0], c[:, 1]) for c in curves])
    axes.plot(steps, values.mean(0), "-" if style == "-" else "--", color=colour)
    if style == "-":  # a second band would hide the first
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
