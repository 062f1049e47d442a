"""The picture of a sweep: the return against each of its numbers."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podracer.result import plots
from podracer.sweeps import ranges
from podracer.sweeps.table import Row

WIDE = 10.0
"""Positive numbers of a grid have a logarithmic axis where the largest is so many times the least."""


def draw(
    rows: Sequence[Row],
    fresh: Row | None,
    hyper: Mapping[str, ranges.Values],
    path: str | pathlib.Path,
    *,
    title: str = "",
) -> plots.Picture:
    """Draws a panel for each number that varies, with a light dot for each seed and a dark one for each mean.

    Args:
      rows: the sweep's rows, the best first.
      fresh: the best configuration on fresh seeds.
      hyper: the values of each number.
      path: the picture's path; its suffix chooses the format.
      title: text above the picture.
    """
    from matplotlib.figure import Figure  # Figure without pyplot: no global state, no display

    names = [name for name in hyper if len({row.hyper[name] for row in rows}) > 1] or list(hyper)[:1]
    picture = Figure(figsize=(1.5 + 4.0 * len(names), 4.2), dpi=120, layout="constrained")
    panels = np.ravel(picture.subplots(1, len(names), sharey=True, squeeze=False))
    for axes, name in zip(panels, names):
        _panel(axes, rows, fresh, name)
        if _is_wide(hyper[name]):
            axes.set_xscale("log")
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    scores = [x for row in (*rows, *([fresh] if fresh else ())) for x in row.scores if x is not None]
    if scores:  # an interval of two seeds may be far wider
        margin = 0.08 * (max(scores) - min(scores)) or 0.5
        panels[0].set_ylim(min(scores) - margin, max(scores) + margin)
    panels[0].set_ylabel("return of the last evaluation")
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    picture.suptitle(title, fontsize="medium")
    return plots.save(picture, path)


def _panel(axes: Any, rows: Sequence[Row], fresh: Row | None, name: str) -> None:
    points = [(row.hyper[name], score) for row in rows for score in row.scores if score is not None]
    means = [(row.hyper[name], row.mean) for row in rows if row.mean is not None]
    diverged = [row.hyper[name] for row in rows if row.diverged]
    if points:
        axes.plot(*zip(*points), ".", color="C0", alpha=0.35, markersize=6, markeredgewidth=0, label="a seed")
        axes.plot(*zip(*means), "o", color="C0", markersize=5, label="mean over seeds")
    if diverged:
        # At the lower edge: they have no return.
        edge = axes.get_xaxis_transform()
        axes.plot(diverged, [0.02] * len(diverged), "x", color="C3", transform=edge, clip_on=False, label="diverged")
    if fresh and fresh.mean is not None:
        low, high = fresh.interval or (fresh.mean, fresh.mean)
        spread = [[fresh.mean - low], [high - fresh.mean]]
        label = "best, on fresh seeds (95% interval)"
        axes.errorbar(
            [fresh.hyper[name]], [fresh.mean], spread, fmt="D", color="C1", markersize=6, capsize=3, label=label
        )


def _is_wide(values: ranges.Values) -> bool:
    if isinstance(values, ranges.Range):
        return values.log
    return min(values) > 0 and max(values) >= WIDE * min(values)
