"""Pictures of a run: learning curves as PNG, episodes as GIF."""

from __future__ import annotations

import base64
import pathlib
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

History = Sequence[Mapping[str, Any]]
"""Rows of metrics; a population's rows carry `member`."""


class Picture(type(pathlib.Path())):
    """The path of a picture; as the last line of a notebook's cell, the picture."""

    def _repr_png_(self) -> bytes | None:
        return self.read_bytes() if self.suffix == ".png" and self.is_file() else None

    def _repr_html_(self) -> str | None:
        kind = {".gif": "image/gif", ".svg": "image/svg+xml"}.get(self.suffix)
        return image_tag(self.read_bytes(), kind) if kind and self.is_file() else None


def image_tag(data: bytes, kind: str) -> str:
    """HTML that holds a picture of a media type such as `image/gif`."""
    return f'<img src="data:{kind};base64,{base64.b64encode(data).decode()}">'


def default_path(run_dir: pathlib.Path | None, name: str) -> pathlib.Path:
    """Where a picture goes if nobody says so: into the run directory, or into a new temporary one."""
    return (run_dir or pathlib.Path(tempfile.mkdtemp(prefix="podracer-"))) / name


def learning_curve(
    histories: Mapping[str, History], path: str | pathlib.Path, *, title: str = "", metric: str | None = None
) -> Picture:
    """Draws return against environment steps, one line a run; several members become a mean with a band.

    Args:
      histories: metric rows by label.
      path: of the picture; its suffix chooses the format.
      title: above the picture.
      metric: what to draw; `eval/return_mean` where there is one, else `episode/return`.

    Raises:
      ValueError: where no run has rows of the metric.
    """
    drawn = figure(histories, title=title, metric=metric)
    path = Picture(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path)
    return path


def figure(histories: Mapping[str, History], *, title: str = "", metric: str | None = None) -> Any:
    """The Matplotlib figure of `learning_curve`, which is in no file yet."""
    from matplotlib.figure import Figure  # Figure without pyplot: no global state, no display

    picture = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = picture.subplots()
    drawn = False
    for label, history in histories.items():
        lines = ((metric, "-"),) if metric else (("episode/return", "-"), ("eval/return_mean", "o--"))
        for name, style in lines:
            curves = _curves(history, name)
            if not curves:
                continue
            drawn = True
            suffix = " (evaluation)" if name == "eval/return_mean" else ""
            _draw(axes, curves, label + suffix, style)
    if not drawn:
        raise ValueError(
            f"nothing to plot: no rows of {metric or 'episode/return'} in {', '.join(histories) or 'no run'}."
        )
    axes.set_xlabel("environment steps")
    axes.set_ylabel(metric or "return")
    axes.set_title("\n".join(textwrap.wrap(title, 90)), fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return picture


def _curves(history: History, metric: str) -> list[np.ndarray]:
    """One [n, 2] array of (steps, value) per member."""
    members: dict[int, list[tuple[float, float]]] = {}
    for row in history:
        if metric in row:
            members.setdefault(row.get("member", 0), []).append((row["env_steps"], row[metric]))
    return [np.asarray(points, float) for points in members.values()]


def _draw(axes: Any, curves: list[np.ndarray], label: str, style: str) -> None:
    marker = {"markersize": 3}
    if len(curves) == 1:
        axes.plot(curves[0][:, 0], curves[0][:, 1], style, label=label, **marker)
        return
    start, stop = max(c[0, 0] for c in curves), min(c[-1, 0] for c in curves)
    steps = np.linspace(start, stop, 200)
    values = np.stack([np.interp(steps, c[:, 0], c[:, 1]) for c in curves])
    (line,) = axes.plot(steps, values.mean(0), "-" if style == "-" else "--", label=f"{label}, mean of {len(curves)}")
    axes.fill_between(steps, values.min(0), values.max(0), alpha=0.2, color=line.get_color())


def animation(images: np.ndarray, path: str | pathlib.Path, frames_per_second: float = 15.0) -> Picture:
    """Writes uint8 [n, H, W, 3] as a looping GIF; the last frame is held for a second."""
    from PIL import Image

    pictures = [Image.fromarray(image) for image in images]
    durations = [1000 / frames_per_second] * (len(pictures) - 1) + [1000.0]
    path = Picture(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    return path
