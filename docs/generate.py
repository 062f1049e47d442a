"""Writes docs/generated/, the pages that are made from code and measurements: `python docs/generate.py`.

One page for every public module, agent, environment, notebook and file of results, the command line's help, and a
mkdocs.yml that inherits the one at the root and names every page. Nothing in that folder is edited or committed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import pathlib
import re
import shutil
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["COLUMNS"] = "110"  # of help

import jax
import jax.numpy as jnp
import measurements
import notebooks
import yaml
from measurements import cell, learnt

import envs_jax
from podracer import agents, configs, environments, spaces
from podracer.agents.registry import AGENTS
from podracer.cli.bench import BENCHES
from podracer.cli.commands import COMMANDS, run
from podracer.training import presets
from podracer.types import EnvSpec

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent

PUBLIC = """\
# API

Public are

*   the names in `podracer.__all__`;
*   the modules at the root of `podracer`, and of `envs_jax`;
*   the packages that have an `__all__`, and the names and modules in it, such as `podracer.agents.ppo`;

and of a module the names in its `__all__`, or else all that it defines without a leading underscore. Everything else
is how they are made ([ADR 28](../../adr/0028-tree.md) says what is where): it can be imported, and may change in any
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
        index += f"| [{name}]({name}.md) | {cell(about)} |\n"
        members = "".join(f"\n        - {member}" for member in names) or " false"
        yield f"api/{name}.md", f"::: {name}\n    options:\n      members:{members}\n"
    yield "api/index.md", index


def agent_pages() -> Iterator[tuple[str, str]]:
    index = "# Agents\n\n| agent | is |\n|---|---|\n"
    for name, (cls, make) in AGENTS.items():
        module = sys.modules[make.__module__]
        doc = inspect.cleandoc(module.__doc__ or "")
        index += f"| [{name}]({name}.md) | {cell(doc.splitlines()[0])} |\n"
        text = f"# {name}\n\n{doc}\n\nAPI: [{module.__name__}](../api/{module.__name__}.md).\n\n"
        text += f"## Can I use it\n\n{_can_i_use(cls, make)}\n"
        text += (
            f"## Settings\n\nFields of `podracer.agents.{cls.__name__}`, `--agent.NAME` in a shell. A `tunable` number "
        )
        text += "may differ among the members of a population (`hyper=`, `--hyper.NAME`).\n\n" + _fields(cls)
        if presets.names(name):
            text += "\n## Presets\n\n" + ", ".join(f"`{preset}`" for preset in presets.names(name))
            text += (
                ": `--preset NAME`, or `preset=` in Python. [Atari](../../atari.md) says what those of papers set.\n"
            )
        yield f"agents/{name}.md", text + learnt(lambda agent, _, name=name: agent == name)
    yield "agents/index.md", index


ACTIONS = {
    "discrete": spaces.Discrete(4),
    "several discrete": spaces.MultiDiscrete((2, 3)),
    "box": spaces.Box(-1.0, 1.0, (2,)),
}


def _can_i_use(cls: type, make: Callable[..., Any]) -> str:
    """A table of the actions that an agent takes and of the memories that it can have, each of which is tried."""
    fields = {field.name for field in dataclasses.fields(cls)}
    if make is agents.alphazero.make:
        rows = {"games for two, by their own rules": True, "other environments": False}
    else:
        rows = {f"{name} actions": _takes(cls, make, space) for name, space in ACTIONS.items()}
        rows["a memory (`core`)"] = "core" in fields and _remembers(cls, make)
        rows["stacked frames (`frame_stack`)"] = "frame_stack" in fields
    lines = "".join(f"| {name} | {'yes' if value else 'no'} |\n" for name, value in rows.items())
    return f"| with | |\n|---|---|\n{lines}"


def _spec(actions: Any) -> EnvSpec:
    return EnvSpec("trial", spaces.Box(0.0, 1.0, (4,)), actions, max_episode_steps=10)


def _takes(cls: type, make: Callable[..., Any], actions: Any) -> bool:
    try:
        make(_spec(actions), cls())
    except ValueError:
        return False
    return True


def _remembers(cls: type, make: Callable[..., Any]) -> bool:
    try:
        agent = make(_spec(ACTIONS["discrete"]), cls(core="lstm"))
    except ValueError:
        return False
    return bool(jax.tree.leaves(jax.eval_shape(lambda: agent.start(jnp.zeros(1, jnp.int32), 1))))


def environment_pages() -> Iterator[tuple[str, str]]:
    index = "# Environments\n\nIn pure JAX, for both drivers:\n\n| environment | is |\n|---|---|\n"
    for name in envs_jax.names():
        environment = envs_jax.make(name)
        module = importlib.import_module(type(environment).__module__)
        doc = inspect.cleandoc(module.__doc__ or "")
        index += f"| [{name}]({name}.md) | {cell(doc.splitlines()[0])} |\n"
        text = f"# {name}\n\n{doc}\n\nAPI: [{module.__name__}](../api/{module.__name__}.md).\n\n"
        text += f"## Rules\n\n{_rules(type(environment))}\n\n"
        text += "## Spec\n\nWith the default options.\n\n| field | value |\n|---|---|\n"
        for field, value in environment.spec._asdict().items():
            text += f"| `{field}` | {_code(value)} |\n"
        text += "\n## Options\n\n" + (_fields(envs_jax.options(name)) or "None.\n")
        yield f"environments/{name}.md", text + learnt(lambda _, of, name=name: of == name)
    index += "\nOf other libraries, by prefix:\n\n| environments | are |\n|---|---|\n"
    for kind, (about, example) in KINDS.items():
        module = importlib.import_module(f"podracer.environments.{kind}")
        doc = inspect.cleandoc(module.__doc__ or "")
        index += f"| [{kind}]({kind}.md) | {cell(about)} |\n"
        text = f"# {kind}\n\n{doc}\n\n## Options\n\n{_fields(environments.options(f'{kind}:{example}'))}"
        if kind == "envpool":
            games = _fields(environments.options("envpool:Pong-v5"))
            text += f"\nOf Atari's games (see [Atari](../../atari.md)):\n\n{games}"
        yield f"environments/{kind}.md", text + learnt(lambda _, of, kind=kind: of.startswith(f"{kind}:"))
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
        kind = cell(configs.describe(hints[field.name])) if not dataclasses.is_dataclass(hints[field.name]) else ""
        rows += f"| `{field.name}` | {kind} | {_code(default)} | {', '.join(limits)} | "
        rows += f"{cell(about.get(field.name, ''))} |\n"
    return rows and f"| field | is | default | limits | meaning |\n|---|---|---|---|---|\n{rows}"


LIMITS = {"low": "at least", "high": "at most"}


def _attributes(cls: type) -> dict[str, str]:
    """The Attributes section of a docstring, by name, with that of base classes."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for item in re.finditer(r"^  (\w+): (.*(?:\n    +.*)*)", section, re.MULTILINE):
            found[item[1]] = " ".join(item[2].split())
    return found


def cli_pages() -> Iterator[tuple[str, str]]:
    text = "# Command line\n\nThe help of every command. See also [commands by example](../reference/commands.md) and "
    text += "[exit codes](../reference/exit_codes.md).\n"
    for line in HELP:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = run(line.split())
        assert code == 0, line
        title = line.removesuffix("--help").strip() or "podracer"
        text += f"\n## {title}\n\n```text\n$ podracer {line}\n{said.getvalue().strip()}\n```\n"
    yield "cli.md", text


OTHERWISE = ("train", "bench", "suite", "sweep", "envs", "agents")
"""Commands whose help needs more words, or is none."""

HELP = (
    "--help",
    "train ppo cartpole --help",
    "train vtrace catch --arch sebulba --help",
    *(f"{command} --help" for command in COMMANDS if command not in OTHERWISE),
    "envs",
    "agents",
    *(f"bench {name} --help" for name in BENCHES),
    "suite atari57 dqn --help",
    "suite report --help",
    "sweep vtrace catch --help",
)


def _code(value: Any) -> str:
    return "" if value is dataclasses.MISSING else f"`{cell(repr(value))}`"


def nav(entries: Any, written: pathlib.Path) -> Any:
    """mkdocs.yml's navigation, in which a folder becomes the pages in it, index first.

    Raises:
      FileNotFoundError: for a page that is not there, or a folder without any.
    """
    if isinstance(entries, list):
        return [nav(entry, written) for entry in entries]
    if isinstance(entries, dict):
        return {title: nav(entry, written) for title, entry in entries.items()}
    if entries.endswith("/"):
        pages = sorted((written / entries).glob("*.md"), key=lambda page: (page.stem != "index", page.name))
        found = [f"{entries}{page.name}" for page in pages]
    else:
        found = entries if (written / entries).exists() else ""
    if not found:
        raise FileNotFoundError(f"mkdocs.yml's navigation names {entries}, which is not in {written}.")
    return found


def generate() -> None:
    """Writes everything anew."""
    out = DOCS / "generated"
    shutil.rmtree(out, ignore_errors=True)
    (out / "results").mkdir(parents=True)
    for picture in measurements.RESULTS.rglob("*.png"):
        shutil.copy(picture, out / "results")
    for pages in (api_pages, agent_pages, environment_pages, measurements.pages, cli_pages, notebooks.pages):
        for name, content in pages():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(content.encode() if isinstance(content, str) else content)
    navigation = nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"], DOCS)
    site = {"INHERIT": "../../mkdocs.yml", "docs_dir": "..", "site_dir": "../../site", "nav": navigation}
    if notebooks.public():
        site["repo_url"] = notebooks.public()
    site["hooks"] = ["../links.py"]
    (out / "mkdocs.yml").write_text(yaml.safe_dump(site, sort_keys=False))


if __name__ == "__main__":
    generate()
