"""Imports go downwards, and in no circle (docs/adr/0028-tree.md)."""

import ast
import functools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]

LAYERS = (
    ("configs", "spaces", "system", "version"),
    ("atari", "errors", "types"),
    ("topology", "trajectories", "envs_jax"),
    ("distributions", "environments", "pod", "replay", "returns"),
    ("learning", "nets", "population", "remote", "envs_jax.gym", "envs_jax.testing"),
    ("run", "search"),
    ("agents", "anakin", "evaluation", "sebulba"),
    ("result",),
    ("suite", "training"),
    ("sweeps",),
    ("podracer", "bench"),
    ("cli",),
    ("__main__",),
)
"""Rooms from bottom to top: a module imports from layers below its own, and from its own room.

A room is a folder or a module of podracer/; `podracer` is its `__init__`, which names what is public. The environments
of envs_jax need types alone; its `testing` checks those of others, too, and its `gym` resets lanes as drivers do.
"""

MOST_AT_THE_ROOT = 9
"""Modules beside the rooms: those that everybody meets."""


class Import(NamedTuple):
    """An import: where it stands, and of which module."""

    importer: str
    line: int
    imported: str


def room(module: str) -> str:
    """The room of a module of podracer, or of envs_jax."""
    package, _, rest = module.partition(".")
    if package == "envs_jax":
        return module if module in {name for names in LAYERS for name in names} else package
    return rest.partition(".")[0] or package


@functools.cache
def files() -> dict[str, pathlib.Path]:
    """All modules by name."""
    found = {}
    for package in ("podracer", "envs_jax"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements within one; expressions, of which there are many more, hold none."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


@functools.cache
def imports() -> list[Import]:
    """All imports of our own modules, at the top of a file, in functions and for type checkers alike."""
    found = []
    for importer, path in files().items():
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: imports say the whole name"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in files() else node.module for name in names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            found += [Import(importer, node.lineno, name) for name in names if name in files()]
    return found


def upwards(found: list[Import]) -> list[str]:
    """A line for each import of a module that is not below."""
    layer = {name: i for i, names in enumerate(LAYERS) for name in names}
    wrong = []
    for each in found:
        here, there = room(each.importer), room(each.imported)
        if here != there and layer[there] >= layer[here]:
            below = [name for names in LAYERS[: layer[here]] for name in names]
            wrong.append(
                f"{files()[each.importer].relative_to(ROOT)}:{each.line} imports {each.imported}: {here} is in layer "
                f"{layer[here]} and {there} in layer {layer[there]}; below {here} are {', '.join(below) or 'none'}"
            )
    return wrong


def circle(found: list[Import]) -> list[str]:
    """The modules of a circle, the first one again at the end; [] where there is none."""
    after: dict[str, list[str]] = {}
    for each in found:
        after.setdefault(each.importer, []).append(each.imported)
    done = set()

    def follow(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return []
        rounds = (follow(name, [*way, module]) for name in after.get(module, []))
        closed = next((each for each in rounds if each), [])
        done.add(module)
        return closed

    return next((each for module in after if (each := follow(module, []))), [])


def test_every_room_has_its_layer():
    rooms = {room(module) for module in files()}
    assert rooms == {name for names in LAYERS for name in names}
    modules = {path.stem for path in (ROOT / "podracer").glob("*.py")} - {"__init__"}
    assert len(modules) <= MOST_AT_THE_ROOT, f"put a new module into a room: {sorted(modules)}"


def test_imports_go_downwards():
    wrong = upwards(imports())
    assert not wrong, "\n".join(wrong)


def test_no_imports_go_in_a_circle():
    assert not circle(imports())


def test_an_import_upwards_is_found():
    one = Import("podracer.run.driver", 3, "podracer.sebulba.driver")
    (line,) = upwards([*imports(), one])
    assert line.startswith("podracer/run/driver.py:3 imports podracer.sebulba.driver: run is in layer 5 and sebulba in")
    assert circle([*imports(), one])[0] == circle([*imports(), one])[-1]
    assert circle([*imports(), Import("podracer.system.files", 1, "podracer.system.files")])
