"""Writes docs/generated/, the pages that are made from code and measurements: `python docs/generate.py`.

One page for every public module, agent, environment and file of results, the command line's help, and a mkdocs.yml that
inherits the one at the root and names every page. Nothing in that folder is edited or committed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import os
import pathlib
import re
import shutil
import statistics
import sys
import typing
from collections.abc import Iterable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["COLUMNS"] = "110"  # of help

import yaml

import envs_jax
from podracer import config as configs
from podracer import environments
from podracer.cli.bench import BENCHES
from podracer.cli.main import COMMANDS, run
from podracer.run import presets
from podracer.run.experiment import AGENTS

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"

PUBLIC = """\
# API

Public are

*   the names in `podracer.__all__`;
*   the modules at the root of `podracer`, and of `envs_jax`;
*   the packages that have an `__all__`, and the modules that it names, such as `podracer.agents.ppo`;

and of a module the names in its `__all__`, or else all that it defines without a leading underscore. Everything else
is how they are made ([ADR 10](../../adr/0010-house.md) says what is where): it can be imported, and may change in any
version.

| module | is about |
|---|---|
"""


def public() -> dict[str, list[str]]:
    """Public names by public module, in the order of the source; nothing is imported that is not at hand anyway."""
    modules = {}
    for package in ("podracer", "envs_jax"):
        for path in sorted((ROOT / package).glob("*.py")):
            if not path.stem.startswith("_"):
                modules[f"{package}.{path.stem}"] = path
        for path in sorted((ROOT / package).rglob("__init__.py")):
            name = ".".join(path.parent.relative_to(ROOT).parts)
            if _all(path) is not None:
                modules[name] = path
                named = [path.parent / f"{item}.py" for item in _all(path) or ()]
                modules |= {f"{name}.{item.stem}": item for item in named if item.exists()}
    return {name: _names(path) for name, path in sorted(modules.items()) if name != "podracer.version"}


def _all(path: pathlib.Path) -> list[str] | None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


def _names(path: pathlib.Path) -> list[str]:
    listed = _all(path)
    if listed is not None:
        modules = [item for item in listed if list(path.parent.glob(f"{item}.py")) + list(path.parent.glob(f"{item}/"))]
        return [item for item in listed if item not in modules and not item.startswith("_")]
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def api_pages() -> Iterator[tuple[str, str]]:
    index = PUBLIC
    for name, names in public().items():
        about = (importlib.import_module(name).__doc__ or "").strip().splitlines()[0]
        index += f"| [{name}]({name}.md) | {_cell(about)} |\n"
        members = "".join(f"\n        - {member}" for member in names) or " false"
        yield f"api/{name}.md", f"::: {name}\n    options:\n      members:{members}\n"
    yield "api/index.md", index


def agent_pages() -> Iterator[tuple[str, str]]:
    index = "# Agents\n\n| agent | is |\n|---|---|\n"
    for name, (cls, make) in AGENTS.items():
        module = sys.modules[make.__module__]
        doc = inspect.cleandoc(module.__doc__ or "")
        index += f"| [{name}]({name}.md) | {_cell(doc.splitlines()[0])} |\n"
        text = f"# {name}\n\n{doc}\n\nAPI: [{module.__name__}](../api/{module.__name__}.md).\n\n"
        text += (
            f"## Settings\n\nFields of `podracer.agents.{cls.__name__}`, `--agent.NAME` in a shell. A `tunable` number "
        )
        text += "may differ among the members of a population (`hyper=`, `--hyper.NAME`).\n\n" + _fields(cls)
        if presets.names(name):
            text += "\n## Presets\n\n" + ", ".join(f"`{preset}`" for preset in presets.names(name))
            text += (
                ": `--preset NAME`, or `preset=` in Python. [Atari](../../atari.md) says what those of papers set.\n"
            )
        yield f"agents/{name}.md", text + _learnt(lambda agent, _, name=name: agent == name)
    yield "agents/index.md", index


def environment_pages() -> Iterator[tuple[str, str]]:
    index = "# Environments\n\nIn pure JAX, for both drivers:\n\n| environment | is |\n|---|---|\n"
    for name in envs_jax.names():
        module = importlib.import_module(f"envs_jax.{name}")
        doc = inspect.cleandoc(module.__doc__ or "")
        index += f"| [{name}]({name}.md) | {_cell(doc.splitlines()[0])} |\n"
        environment = envs_jax.make(name)
        text = f"# {name}\n\n{doc}\n\nAPI: [envs_jax.{name}](../api/envs_jax.{name}.md).\n\n"
        text += f"## Rules\n\n{_rules(type(environment))}\n\n## Spec\n\nWith the default options.\n\n| | |\n|---|---|\n"
        for field, value in environment.spec._asdict().items():
            text += f"| `{field}` | {_code(value)} |\n"
        text += "\n## Options\n\n" + (_fields(envs_jax.options(name)) or "None.\n")
        yield f"environments/{name}.md", text + _learnt(lambda _, of, name=name: of == name)
    index += "\nOf other libraries, by prefix:\n\n| environments | are |\n|---|---|\n"
    for kind, (about, example) in KINDS.items():
        module = importlib.import_module(f"podracer.environments.{kind}")
        doc = inspect.cleandoc(module.__doc__ or "")
        index += f"| [{kind}]({kind}.md) | {_cell(about)} |\n"
        text = f"# {kind}\n\n{doc}\n\n## Options\n\n{_fields(environments.options(f'{kind}:{example}'))}"
        if kind == "envpool":
            games = _fields(environments.options("envpool:Pong-v5"))
            text += f"\nOf Atari's games (see [Atari](../../atari.md)):\n\n{games}"
        yield f"environments/{kind}.md", text + _learnt(lambda _, of, kind=kind: of.startswith(f"{kind}:"))
    yield "environments/index.md", index + "\n[One of your own](../../environments.md).\n"


KINDS = {
    "envpool": ("`envpool:TASK`, on the host: every task of EnvPool, such as `envpool:Pong-v5`", "CartPole-v1"),
    "gymnasium": ("`gymnasium:ID`, on the host: all of Gymnasium, such as `gymnasium:Acrobot-v1`", "Acrobot-v1"),
    "pgx": ("`pgx:GAME`, in pure JAX: all that pgx makes, such as `pgx:go_9x9`", "go_9x9"),
}


def _rules(cls: type) -> str:
    """The docstring of an environment, whose `Observation: ...` paragraphs become items of a list."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    return re.sub(r"\n+(?=[A-Z]\w+: )", "\n\n*   ", re.sub(r"\n  +", " ", doc))


def _fields(cls: type) -> str:
    """A table of the fields of a dataclass: type, default, limits and what its docstring says; '' where it has none."""
    hints, about = typing.get_type_hints(cls), _attributes(cls)
    rows = ""
    for field in dataclasses.fields(cls):
        limits = [
            f"{word} {field.metadata[key]:g}" for key, word in LIMITS.items() if field.metadata.get(key) is not None
        ]
        limits += ["tunable"] * bool(field.metadata.get("tunable"))
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        kind = _cell(configs.describe(hints[field.name])) if not dataclasses.is_dataclass(hints[field.name]) else ""
        rows += f"| `{field.name}` | {kind} | {_code(default)} | {', '.join(limits)} | "
        rows += f"{_cell(about.get(field.name, ''))} |\n"
    return rows and f"| field | is | default | limits | meaning |\n|---|---|---|---|---|\n{rows}"


LIMITS = {"low": "at least", "high": "at most"}


def _attributes(cls: type) -> dict[str, str]:
    """What the Attributes section of a docstring says, by name; of base classes too."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for item in re.finditer(r"^  (\w+): (.*(?:\n    +.*)*)", section, re.MULTILINE):
            found[item[1]] = " ".join(item[2].split())
    return found


def _learnt(chosen: Any) -> str:
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


def result_pages() -> Iterator[tuple[str, str]]:
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
    return text + _tables({name: value for name, value in result.items() if name not in TOLD})


TOLD = {"command", "commit", "machine", "versions", "podracer", "jax", "config"}
"""What a page of results says elsewhere; the settings of a run are those of its command."""


def _tables(tree: Any, title: str = "") -> str:
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
        if _shallow(value):
            flat |= _flat({name: value})
        else:
            text += _tables(value, f"{title}: {name}" if title else name)
    lines = "".join(f"| {name} | {_cell(value)} |\n" for name, value in flat.items() if value)
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
        text += f"| {_cell(label)} | {' | '.join(_cell(row.get(name, '')) for name in columns)} |\n"
    return text


def cli_pages() -> Iterator[tuple[str, str]]:
    text = "# Command line\n\nWhat the commands say of themselves. Then: [exit codes](../reference/exit_codes.md).\n"
    for line in HELP:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = run(line.split())
        assert code == 0, line
        title = line.removesuffix("--help").strip() or "podracer"
        text += f"\n## {title}\n\n```text\n$ podracer {line}\n{said.getvalue().strip()}\n```\n"
    yield "cli.md", text


HELP = (
    "--help",
    "train ppo cartpole --help",
    "train vtrace catch --arch sebulba --help",
    *(f"{command} --help" for command in COMMANDS if command not in ("train", "bench", "suite", "envs", "agents")),
    "envs",
    "agents",
    *(f"bench {name} --help" for name in BENCHES),
    "suite atari57 dqn --help",
    "suite report --help",
)


def _code(value: Any) -> str:
    return "" if value is dataclasses.MISSING else f"`{_cell(repr(value))}`"


def _cell(text: str) -> str:
    """Text within a table, where `|` would end a column."""
    return " ".join(str(text).split()).replace("|", "\\|")


def nav(entries: Any, written: pathlib.Path) -> Any:
    """mkdocs.yml's navigation: a folder becomes the pages in it, index first; what is not there is left out."""
    if isinstance(entries, list):
        return [kept for entry in entries if (kept := nav(entry, written))]
    if isinstance(entries, dict):
        return {title: kept for title, entry in entries.items() if (kept := nav(entry, written))}
    if entries.endswith("/"):
        pages = sorted((written / entries).glob("*.md"), key=lambda page: (page.stem != "index", page.name))
        return [f"{entries}{page.name}" for page in pages]
    return entries if (written / entries).exists() else None


def generate() -> None:
    """Writes everything anew."""
    out = DOCS / "generated"
    shutil.rmtree(out, ignore_errors=True)
    (out / "results").mkdir(parents=True)
    for picture in RESULTS.rglob("*.png"):
        shutil.copy(picture, out / "results")
    for pages in (api_pages, agent_pages, environment_pages, result_pages, cli_pages):
        for name, text in pages():
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text(text)
    navigation = nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"], DOCS)
    site = {"INHERIT": "../../mkdocs.yml", "docs_dir": "..", "site_dir": "../../site", "nav": navigation}
    (out / "mkdocs.yml").write_text(yaml.safe_dump(site, sort_keys=False))


if __name__ == "__main__":
    generate()
