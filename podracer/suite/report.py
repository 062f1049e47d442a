"""A report on one suite, or on several side by side: a table, JSON and pictures."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podracer.run.rundir import write_json
from podracer.suite import aggregates, pictures
from podracer.suite.collection import Collection
from podracer.system import files

NAMES = {
    "median": "median",
    "mean": "mean",
    "capped_mean": "mean, at most 100% each",
    "iqm": "interquartile mean",
    "optimality_gap": "optimality gap",
    "human_level": "games of at least 75%",
}
"""The names of aggregates in tables."""


def write(collections: Sequence[Collection], output: pathlib.Path, partial: bool = False) -> list[pathlib.Path]:
    """Writes `table.md`, `report.json`, `profile.png` and `curves.png` into a directory; returns their paths.

    Args:
      collections: results, of one suite or of several to compare.
      output: the directory; or a file named `*.md` or `*.json`, which is then the only one.
      partial: True also aggregates over part of the games, and labels such aggregates.

    Raises:
      OSError: if the output cannot be written.
    """
    figures = report(collections, partial)
    if output.suffix in (".md", ".json"):
        output.parent.mkdir(parents=True, exist_ok=True)
        _write(output, figures)
        return [output]
    output.mkdir(parents=True, exist_ok=True)
    paths = [output / "table.md", output / "report.json"]
    for path in paths:
        _write(path, figures)
    if any(suite["aggregates"] for suite in figures["suites"]):
        with_aggregates = [one for one, suite in zip(collections, figures["suites"]) if suite["aggregates"]]
        paths.append(pictures.profile({one.label: one.scores for one in with_aggregates}, output / "profile.png"))  # type: ignore[misc]
    return [*paths, pictures.curves(collections, output / "curves.png")]


def _write(path: pathlib.Path, figures: dict[str, Any]) -> None:
    if path.suffix == ".json":
        write_json(path, figures)
    else:
        files.write(path, table(figures))


def report(collections: Sequence[Collection], partial: bool = False) -> dict[str, Any]:
    """All numbers, in JSON's types: `suites`, and `comparisons` of each pair of them on the games that both have."""
    pairs = itertools.combinations(collections, 2)
    return {"suites": [_suite(one, partial) for one in collections], "comparisons": [_compare(a, b) for a, b in pairs]}


def table_warning(settings: Sequence[Mapping[str, Any]]) -> str:
    """Returns a warning about suites that are normalised by different tables, or ''."""
    tables = sorted({str(one["table"]) for one in settings})
    if len(tables) == 1:
        return ""
    return f"Normalised by different tables ({', '.join(tables)}): these columns are not comparable."


def _suite(one: Collection, partial: bool) -> dict[str, Any]:
    scores, normalised = one.values("score"), one.values("hns")
    games = {
        game: {
            "scores": values,
            "mean": float(np.mean(values)),
            "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            "hns": float(np.mean(normalised[game])) if game in normalised else None,
            "seeds": len(values),
        }
        for game, values in scores.items()
    }
    has_aggregates = one.scores is not None and (partial or not one.part)
    found = aggregates.aggregate(one.scores) if has_aggregates else {}  # type: ignore[arg-type]
    return {
        "label": one.label,
        "directory": str(one.directory) if one.directory else None,
        "settings": one.settings,
        "games": games,
        "missing": [{"game": job.game, "seed": job.seed, "why": why} for job, why in one.missing.items()],
        "part": one.part,
        "aggregates": {name: estimate._asdict() for name, estimate in found.items()},
        "aggregated_games": len(normalised),
    }


def _compare(a: Collection, b: Collection) -> dict[str, Any]:
    ours, theirs = a.values("score"), b.values("score")
    common = [game for game in ours if game in theirs]
    counts = aggregates.Comparison(0, 0, 0)
    if common:
        first, second = (aggregates.matrix({game: values[game] for game in common}) for values in (ours, theirs))
        counts = aggregates.beats(first, second)
    return {"a": a.label, "b": b.label, "games": len(common)} | counts._asdict()


def table(figures: dict[str, Any]) -> str:
    """The report in Markdown."""
    suites = figures["suites"]
    parts = ["# Scores\n"]
    parts += [f"*   {suite['label']}: {_what(suite)}" for suite in suites]
    parts += ["\nIntervals are 95%, over seeds; one seed has none. Scores are means over seeds ± their deviation.\n"]
    differ = table_warning([suite["settings"] for suite in suites])
    parts += [f"{differ}\n"] if differ else []
    parts += [_aggregates(suites)] if any(suite["aggregates"] for suite in suites) else []
    for one in figures["comparisons"]:
        parts.append(
            f"{one['a']} is better than {one['b']} on {one['better']} of {one['games']} games, worse on {one['worse']} "
            f"and equal on {one['equal']}.\n"
        )
    parts.append(_games(suites))
    for suite in suites:
        if suite["missing"]:
            parts.append(f"\nMissing in {suite['label']}:\n")
            parts += [f"*   {one['game']}, seed {one['seed']}: {one['why']}" for one in suite["missing"]]
    return "\n".join(parts) + "\n"


def _what(suite: dict[str, Any]) -> str:
    settings = suite["settings"]
    named = [f"{key} {settings[key]}" for key in ("preset", "protocol") if settings.get(key)]
    part = ""
    if settings["table"] is None:
        part = f"; {suite['part']}" if suite["part"] else ""
        return f"{', '.join([settings['agent'], *named])}; not normalised, so without aggregates{part}"
    if suite["part"]:
        aggregated = "aggregates are of part of the games" if suite["aggregates"] else "no aggregates without --partial"
        part = f"; {suite['part']}: {aggregated}"
    return f"{', '.join([settings['agent'], *named])}; normalised by the table {settings['table']}{part}"


def _aggregates(suites: Sequence[dict[str, Any]]) -> str:
    rows = [["", *(suite["label"] for suite in suites)]]
    rows.append(["games", *(str(suite["aggregated_games"]) if suite["aggregates"] else "-" for suite in suites)])
    for name, called in NAMES.items():
        rows.append([called, *(_estimate(name, suite["aggregates"].get(name)) for suite in suites)])
    return _markdown(rows)


def _estimate(name: str, estimate: dict[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    show = (lambda x: f"{x:.0f}") if name == "human_level" else (lambda x: f"{100 * x:.1f}%")
    text = show(estimate["value"])
    return text + (" ({} to {})".format(*map(show, estimate["interval"])) if estimate["interval"] else "")


def _games(suites: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(game for suite in suites for game in suite["games"]))
    several = len(suites) > 1
    columns = [
        f"{suite['label']}: {name}" if several else name
        for suite in suites
        for name in ("score", "normalised", "seeds")
    ]
    rows = [["game", *columns]]
    for game in names:
        rows.append([game, *(cell for suite in suites for cell in _cells(suite["games"].get(game)))])
    return _markdown(rows)


def _cells(game: dict[str, Any] | None) -> tuple[str, str, str]:
    if game is None:
        return "-", "-", "0"
    spread = "" if game["std"] is None else f" ± {game['std']:,.1f}"
    hns = "-" if game["hns"] is None else f"{100 * game['hns']:.1f}%"
    return f"{game['mean']:,.1f}{spread}", hns, str(game["seeds"])


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *body]) + "\n"
