"""Pages made from benchmarks/results: what was measured, by which command, where and of which commit."""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def learnt(chosen: Callable[[str, str], bool]) -> str:
    """The rows of benchmarks/results/learning of some agents and environments, with their curves."""
    text = ""
    for path in sorted((RESULTS / "learning").glob("*.json")):
        result = json.loads(path.read_text())
        agent, environment = result["command"].split()[2:4]
        if chosen(agent, environment):
            text += f"\n### {path.stem}\n\n{_measured(path, result)}"
    return text and f"\n## What was learnt\n{text}"


def _measured(path: pathlib.Path, result: dict[str, Any]) -> str:
    """A learning result: command, claim, seeds, where and when, and its curve."""
    seeds = "".join(
        f"| {seed['seed']} | {seed['mean']:.4g} | {seed['std']:.3g} | {seed['env_steps']:,} "
        f"| {seed['train_seconds']:.1f} |\n"
        for seed in result["seeds"]
    )
    return (
        f"```sh\n{result['command']}\n```\n\n{_origin(result)}\n\nRequired: {result['claim']}, over "
        f"{result['episodes']:,} episodes of the greedy policy.\n\n| seed | mean return | standard deviation | steps | "
        f"training seconds |\n|---|---|---|---|---|\n{seeds}\n{_picture(path)}"
    )


def _picture(path: pathlib.Path) -> str:
    picture = path.with_suffix(".png")
    return f"![{path.stem}](../results/{picture.name})\n" if picture.exists() else ""


def _origin(result: dict[str, Any]) -> str:
    """Machine, versions and commit."""
    versions = ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items())
    parts = [result.get("machine", ""), versions, f"commit {result['commit']}" if "commit" in result else ""]
    return "; ".join(part for part in parts if part) + "."


def pages() -> Iterator[tuple[str, str]]:
    index = "# Results\n\nEvery figure is measured. These pages are made from the files in benchmarks/results.\n\n"
    index += "| | machine | commit | command |\n|---|---|---|---|\n"
    index += "| [learning](learning.md): every agent on every environment | | | |\n"
    learning = "# Learning\n\n| command | required | mean return of each seed | commit |\n|---|---|---|---|\n"
    curves = ""
    for path in sorted(RESULTS.rglob("*.json")):
        result = json.loads(path.read_text())
        if path.parent.name == "learning":
            means = " / ".join(f"{round(seed['mean'], 3) + 0.0:.3g}" for seed in result["seeds"])
            learning += (
                f"| [`{result['command']}`](#{path.stem}) | {result['claim']} | {means} | {result['commit'][:12]} |\n"
            )
            curves += f"\n## {path.stem}\n\n{_measured(path, result)}"
            continue
        runs = [result, *(run for run in result.get("runs", []) if isinstance(run, dict))]
        origin = {
            name: next((run[name] for run in runs if name in run), "") for name in ("machine", "commit", "command")
        }
        command = origin["command"] and f"`{origin['command']}`"
        index += f"| [{path.stem}]({path.stem}.md) | {origin['machine']} | {origin['commit'][:12]} | {command} |\n"
        yield f"results/{path.stem}.md", _result(path, result)
    yield "results/learning.md", learning + curves
    yield "results/index.md", index


def _result(path: pathlib.Path, result: dict[str, Any]) -> str:
    """A page for any file of results: its origin, its pictures, and its numbers as tables."""
    text = f"# {path.stem}\n\n"
    text += f"```sh\n{result['command']}\n```\n\n" if "command" in result else ""
    text += f"{_origin(result)}\n\nRepeated measurements are given as their median (least to most).\n\n"
    for picture in sorted({*path.parent.glob(f"{path.stem}.png"), *path.parent.glob(f"{path.stem}-*.png")}):
        text += f"![{picture.stem}]({picture.name})\n\n"
    return text + tables({name: value for name, value in result.items() if name not in TOLD})


TOLD = {"command", "commit", "machine", "versions", "podracer", "jax", "config"}
"""What a page of results says elsewhere; the settings of a run are those of its command."""


def tables(tree: Any, title: str = "") -> str:
    """Numbers as tables: rows of one kind, numbers side by side, and what is nested by itself."""
    rows = list(tree.values()) if isinstance(tree, dict) else tree
    alike = all(isinstance(row, dict) and _shallow(row) and row.keys() & rows[0].keys() for row in rows)
    head = f"## {title}\n\n" if title else ""
    if alike and (len(rows) > 1 or isinstance(tree, list)):
        labels = list(tree) if isinstance(tree, dict) else [""] * len(rows)
        return f"{head}{_table(labels, [_flat(row) for row in rows])}\n"
    items = tree.items() if isinstance(tree, dict) else ((str(number), row) for number, row in enumerate(tree, 1))
    flat, text = {}, ""
    for name, value in items:
        if name == "curves":
            continue  # of pictures
        if _shallow(value):
            flat |= _flat({name: value})
        else:
            text += tables(value, f"{title}: {name}" if title else name)
    lines = "".join(f"| {name} | {cell(value)} |\n" for name, value in flat.items() if value)
    return (f"{head}| | |\n|---|---|\n{lines}\n" if flat else "") + text


def _shallow(value: Any) -> bool:
    """Whether a value has its place in one row: no list of dicts in it, and no dict of dicts."""
    if isinstance(value, list):
        return not any(isinstance(item, dict) for item in value)
    return not isinstance(value, dict) or not any(
        isinstance(item, dict) or not _shallow(item) for item in value.values()
    )


def _flat(tree: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(tree, dict):
        return {name: text for key, value in tree.items() for name, text in _flat(value, f"{prefix}{key} ").items()}
    return {prefix.strip(): _number(tree)}


def _number(value: Any) -> str:
    if isinstance(value, list) and len(value) == 2:
        return f"{_number(value[0])} to {_number(value[1])}"
    if isinstance(value, list) and len(value) > 2 and all(isinstance(item, float) for item in value):
        return f"{_number(statistics.median(value))} ({_number(min(value))} to {_number(max(value))})"
    if isinstance(value, list):
        return ", ".join(map(_number, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)


def _table(labels: Iterable[str], rows: list[dict[str, str]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n"
    for label, row in zip(labels, rows, strict=True):
        text += f"| {cell(label)} | {' | '.join(cell(row.get(name, '')) for name in columns)} |\n"
    return text


def cell(text: str) -> str:
    """Text within a table, where `|` would end a column."""
    return " ".join(str(text).split()).replace("|", "\\|")
