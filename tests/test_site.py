"""The documentation site: it builds without a warning, and every public name, agent and environment is on it."""

import ast
import importlib
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import envs_jax
import podracer
from podracer.agents.registry import AGENTS

ROOT = pathlib.Path(podracer.__file__).parents[1]


@pytest.fixture(scope="module")
def generate():
    pytest.importorskip("yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")  # as `python docs/generate.py` has it
        patch.setenv("COLUMNS", "110")
        yield importlib.import_module("generate")
        for name in ("generate", "measurements", "notebooks"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """As `make docs` builds it."""
    pytest.importorskip("mkdocstrings")
    env = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([sys.executable, ROOT / "docs" / "generate.py"], check=True, env=env)
    out = tmp_path_factory.mktemp("site")
    # Not --quiet: warnings that are not shown are not counted by --strict.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "docs" / "generated" / "mkdocs.yml"]
    built = subprocess.run([*command, "-d", out], capture_output=True, text=True, env=env)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    assert "Building documentation" in built.stderr
    yield out
    shutil.rmtree(out)


@pytest.mark.slow
def test_every_public_name_is_on_the_site(site, generate):
    pages = "".join(page.read_text() for page in (site / "generated" / "api").rglob("*.html"))
    there = set(re.findall(r'id="([\w.]+)"', pages))
    wanted = {f"{module}.{name}" for module, names in generate.public().items() for name in names}
    assert len(wanted) > 200
    assert wanted - there == set()


@pytest.mark.slow
def test_the_site_leads_to_the_repository(site, generate):
    """Once there is an address; before, no link is dead."""
    page, address = (site / "index.html").read_text(), generate.notebooks.public()
    assert f'href="{address}"' in page if address else "OWNER/NAME" not in page


@pytest.mark.slow
def test_every_agent_environment_notebook_and_result_has_a_page(site):
    generated = site / "generated"
    assert set(AGENTS) <= {page.name for page in (generated / "agents").iterdir()}
    assert {*envs_jax.names(), "envpool", "gymnasium", "pgx"} <= {
        page.name for page in (generated / "environments").iterdir()
    }
    notebooks = {path.stem for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")}
    assert notebooks <= {page.name for page in (generated / "notebooks").iterdir()}
    learning = (generated / "results" / "learning" / "index.html").read_text()
    for result in (ROOT / "benchmarks" / "results").rglob("*.json"):
        there = (
            f'id="{result.stem}"' in learning
            if result.parent.name == "learning"
            else (generated / "results" / result.stem).is_dir()
        )
        assert there, result
    for picture in (ROOT / "benchmarks" / "results").rglob("*.png"):
        assert (generated / "results" / picture.name).exists()


def test_public_names_are_what_the_packages_say(generate):
    public = generate.public()
    modules = {name for name in podracer.__all__ if f"podracer.{name}" in public}
    assert modules == {"agents", "anakin", "distributions", "nets", "returns", "spaces", "types"}
    assert set(public["podracer"]) == set(podracer.__all__) - modules - {"__version__"}
    assert "make" in public["podracer.agents.ppo"]
    assert "Catch" in public["envs_jax.catch"]
    assert "update" in public["podracer.anakin"]
    assert not any("sebulba" in name or "anakin." in name for name in public)


def test_a_folder_in_the_navigation_stands_for_its_pages(generate, tmp_path):
    for name in ("a.md", "folder/b.md", "folder/index.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    asked = ["a.md", {"Folder": "folder/"}, {"Nested": [{"Again": "a.md"}]}]
    folder = ["folder/index.md", "folder/b.md"]
    assert generate.nav(asked, tmp_path) == ["a.md", {"Folder": folder}, {"Nested": [{"Again": "a.md"}]}]


@pytest.mark.parametrize("missing", ["missing.md", "empty/", "nowhere/"])
def test_a_page_that_is_not_there_is_an_error(missing, generate, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.md").touch()
    for asked in ([missing], ["a.md", {"Nested": [{"Again": missing}]}]):
        with pytest.raises(FileNotFoundError, match=missing):
            generate.nav(asked, tmp_path)


def test_every_page_is_in_the_navigation_and_the_other_way_round(generate):
    """Pages written by hand are in it; generated pages are in folders."""
    yaml = pytest.importorskip("yaml")

    def named(entry):
        if isinstance(entry, str):
            return [entry]
        return [name for each in (entry.values() if isinstance(entry, dict) else entry) for name in named(each)]

    entries = named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    names = [entry for entry in entries if not entry.startswith("generated/")]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not page.startswith("generated/")}
    expanded = generate.nav(names, ROOT / "docs")
    assert pages == {page for entry in expanded for page in named(entry)}


def test_the_table_of_agents_lists_all_of_them(generate):
    """README's, with files that are there, and with the actions and memories that the agents' pages have tried."""
    rows = re.findall(r"^\| \[`(\w+)`\]\(([\w/.]+)\) \|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(AGENTS)
    for name, path, cells in rows:
        tried = generate._can_i_use(*AGENTS[name])
        _, actions, memory, drivers = (cell.strip() for cell in cells.split("|"))
        assert (ROOT / path).exists()
        for word, said in (("box", actions), ("several", actions), ("LSTM", memory), ("frames", memory)):
            assert (word in said) == bool(re.search(rf"\| [^|]*\b{word}\b[^|]* \| yes \|", tried)), (name, word)
        assert drivers == ("Anakin" if "games for two" in tried else "both")


def test_numbers_of_any_shape_become_tables(generate):
    rows = generate.measurements.tables({"results": [{"a": 1, "b": [1.0, 3.0, 2.0]}, {"a": 20_000.4, "c": None}]})
    assert "| | a | b | c |" in rows
    assert "|  | 1 | 2 (1 to 3) |  |" in rows
    assert "|  | 20,000 |  |  |" in rows
    nested = generate.measurements.tables({"seconds": 1.5, "runs": [{"name": "x|y", "rows": [{"n": 1}, {"n": 2}]}]})
    assert "| seconds | 1.5 |" in nested
    assert "x\\|y" in nested
    assert "## runs: 1: rows" in nested


def metrics_in_code():
    """The names of metrics that the library writes down, `KIND/NAME`, and what those that it puts together begin with."""
    names, computed = set(), set()
    for path in ROOT.glob("podracer/**/*.py"):
        if path.parent.name not in ("bench", "suite", "cli"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                    computed |= {node.values[0].value} if re.fullmatch("[a-z]+/", node.values[0].value) else set()
                elif isinstance(node, ast.Constant) and re.fullmatch("[a-z]+/[a-z_]+", str(node.value)):
                    names.add(node.value)
    return {name for name in names if not name.startswith(("image/", "text/"))}, computed - {"podracer/"}


def test_every_metric_is_in_the_reference():
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    listed = {name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)}
    written, computed = metrics_in_code()
    stages = ("environment", "inference", "transfer", "queue", "parameters")
    counts = ("rows", "filler_rows", "breaks", "stale", "bytes_up", "bytes_down", "messages", "rejected")
    kinds = {
        "episode/": {"episode/length", "episode/not_finite", "episode/NAME", "episode/return/TASK"},
        "hyper/": {"hyper/NAME"},
        "loss/": {"loss/value"},
        "score/": {"score/capped_mean", "score/mean", "score/median", "eval/return/TASK", "eval/score/..."},
        "sebulba/": {f"sebulba/{stage}_share" for stage in stages},
        "remote/": {f"remote/{name}" for name in counts},
    }
    assert computed == set(kinds)
    assert written | set().union(*kinds.values()) == listed


def test_every_table_of_metrics_has_a_heading():
    """A row without one is no table on the site."""
    lines = (ROOT / "docs" / "reference" / "metrics.md").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if line.startswith("|") and not before.startswith("|"):
            assert line.startswith("| metric |"), line
