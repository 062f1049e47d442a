"""Pictures of a run: learning curves as PNG, episodes as GIF."""

from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podracer import config as configs

History = Sequence[Mapping[str, Any]]
"""Rows of metrics; a population's rows carry `member`."""


def learning_curve(
    histories: Mapping[str, History], path: str | pathlib.Path, *, title: str = "", metric: str | None = None
) -> pathlib.Path:
    """Draws return against environment steps, one line a run; several members become a mean with a band.

    Args:
      histories: metric rows by label.
      path: of the picture; its suffix chooses the format.
      title: above the picture.
      metric: what to draw; `eval/return_mean` where there is one, else `episode/return`.

    Raises:
      ValueError: where no run has rows of the metric.
    """
    from matplotlib.figure import Figure  # Figure without pyplot: no global state, no display

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
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
        wanted = metric or "episode/return"
        there = {name for history in histories.values() for row in history for name in row if "/" in name}
        hint = f"; {configs.suggest(wanted, there)}" if there else "."
        raise ValueError(f"nothing to plot: no rows of {wanted} in {', '.join(histories) or 'no run'}{hint}")
    axes.set_xlabel("environment steps")
    axes.set_ylabel(metric or "return")
    axes.set_title("\n".join(textwrap.wrap(title, 90)), fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


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


def animation(images: np.ndarray, path: str | pathlib.Path, frames_per_second: float = 15.0) -> pathlib.Path:
    """Writes uint8 [n, H, W, 3] as a looping GIF; the last frame is held for a second."""
    from PIL import Image

    pictures = [Image.fromarray(image) for image in images]
    durations = [1000 / frames_per_second] * (len(pictures) - 1) + [1000.0]
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    return path
