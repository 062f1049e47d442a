"""Pictures of suites: performance profiles, and a learning curve of every game."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podracer import atari
from podracer.result.plots import Picture, colours, draw
from podracer.suite import aggregates
from podracer.suite.collection import Collection
from podracer.system import files

MOST = 8.0
"""The largest human-normalised score of a profile's picture (as in Agarwal et al. 2021)."""


def profile(scores: Mapping[str, np.ndarray], path: pathlib.Path) -> Picture:
    """Draws the share of runs above each human-normalised score, with a 95% band where there are several seeds.

    Args:
      scores: [seeds, games] by label.
      path: the picture's path; its suffix chooses the format.
    """
    most = min(MOST, max(1.0, *(float(np.nanmax(values)) for values in scores.values())))
    tau = np.linspace(0, most, 161)
    picture, axes = _figure(7, 4.2, layout="constrained")
    for colour, (label, values) in zip(colours(len(scores)), scores.items()):
        axes.plot(tau, aggregates.profile(values, tau), color=colour, label=label)
        band = aggregates.profile_band(values, tau)
        if band is not None:
            axes.fill_between(tau, *band, color=colour, alpha=0.2, linewidth=0)
    axes.set_xlabel("human-normalised score")
    axes.set_ylabel("share of runs above")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return _save(picture, path)


def curves(collections: Sequence[Collection], path: pathlib.Path) -> Picture:
    """Draws a small learning curve of every game: the mean over seeds, with a band from the least to the greatest.

    The points are evaluations; if a run has fewer than two, or the protocol's figure is of training, they are the games
    of training.
    """
    games = list(dict.fromkeys(game for one in collections for game in one.games))
    wide = min(8, math.ceil(math.sqrt(len(games))))
    high = math.ceil(len(games) / wide)
    width, height = 1.9 * wide + 0.4, 1.5 * high + 0.8
    picture, grid = _figure(width, height, rows=high, columns=wide)
    # Margins in inches: Matplotlib's own layouts take many seconds for so many axes.
    picture.subplots_adjust(0.6 / width, 0.6 / height, 1 - 0.2 / width, 1 - 0.5 / height, wspace=0.45, hspace=0.45)
    cells = list(np.ravel(grid))
    for axes in cells[len(games) :]:
        axes.axis("off")
    handles: dict[str, Any] = {}
    for axes, game in zip(cells, games):
        axes.set_title(game, fontsize="x-small", pad=2)
        axes.tick_params(labelsize="xx-small")
        axes.grid(alpha=0.3)
        for colour, one in zip(colours(len(collections)), collections):
            of_seeds = [
                _points(result, one.settings.get("protocol")) for job, result in one.results.items() if job.game == game
            ]
            of_seeds = [points for points in of_seeds if len(points)]
            if of_seeds:
                draw(axes, of_seeds, colour, "-")
                handles.setdefault(one.label, axes.get_lines()[-1])
    picture.supxlabel("million frames", fontsize="small", y=0.1 / height)
    if len(collections) > 1:
        picture.legend(handles.values(), handles.keys(), loc="upper right", ncols=4, frameon=False, fontsize="small")
    return _save(picture, path)


def _points(result: Mapping[str, Any], protocol: str | None) -> np.ndarray:
    """(million frames, mean) of a run, [n, 2]."""
    of_training = protocol is not None and atari.PROTOCOLS[protocol].episodes is None
    evaluated = len(result["evaluations"]) > 1 and not of_training
    rows = result["evaluations"] if evaluated else result["training"] or result["evaluations"]
    return np.array([(row["frames"] / 1e6, row["mean"]) for row in rows], float).reshape(-1, 2)


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, layout: Any = None) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # Figure without pyplot: no global state, no display

    picture = Figure(figsize=(width, height), dpi=120, layout=layout)
    return picture, picture.subplots(rows, columns)


def _save(picture: Any, path: pathlib.Path) -> Picture:
    with files.replacing(path) as partial:
        picture.savefig(partial)
    return Picture(path)
