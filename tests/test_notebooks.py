"""The notebooks: their outputs are those of their code, they show what they say, and they run, made small."""

import base64
import importlib
import io
import os
import pathlib
import re
import subprocess
import sys

import pytest
from PIL import Image

import podracer

pytest.importorskip("nbformat")

ROOT = pathlib.Path(podracer.__file__).parents[1]
PATHS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def notebooks():
    """docs/notebooks.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("notebooks")
        del sys.modules["notebooks"]


def outputs(notebook):
    """The outputs of the code cells, each as text and data by media type."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield output, output.get("data") or {"text/plain": output.get("text", "")}


def check(notebook):
    """Checks that a notebook shows no error, nothing in red, and not the place where it ran."""
    for output, data in outputs(notebook):
        assert output.output_type != "error", output.evalue
        assert output.get("name") != "stderr", output.text
        for kind, value in data.items():
            if kind.startswith("text/"):
                text = re.sub(r"base64,[^\"]+", "", value)
                assert not re.search(r"/(tmp|home|root|usr|work|var|Users)/|site-packages", text), text
                assert os.uname().nodename not in text


def pictures(notebook):
    """The bytes of all pictures."""
    for _, data in outputs(notebook):
        for kind, value in data.items():
            if kind.startswith("image/"):
                yield base64.b64decode(value)
            elif kind == "text/html":
                yield from map(base64.b64decode, re.findall(r"base64,([^\"]+)", value))


def source_of(notebook, tag):
    """The code of the only cell with a tag."""
    (cell,) = (cell for cell in notebook.cells if tag in cell.metadata.get("tags", ()))
    assert cell.cell_type == "code"
    return cell.source


def by_name(function):
    return pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)(function)


@by_name
def test_outputs_are_those_of_the_code(path, notebooks):
    notebook = notebooks.read(path)
    notebooks.nbformat.validate(notebook)
    assert notebook.metadata.podracer["code"] == notebooks.code_of(notebook), "the code has changed: make notebooks"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run from the first cell to the last"
    check(notebook)


@by_name
def test_a_notebook_is_small(path, notebooks):
    assert path.stat().st_size <= 300_000
    sizes = [len(picture) for picture in pictures(notebooks.read(path))]
    assert all(size <= 60_000 for size in sizes)


@by_name
def test_a_notebook_begins_like_the_others(path, notebooks):
    notebook, first = notebooks.read(path), notebooks.read(PATHS[0])
    for tag in ("install", "devices"):
        assert source_of(notebook, tag) == source_of(first, tag)
    assert re.match(r"# .+\n\n\S", notebook.cells[0].source)
    names = notebook.metadata.podracer
    notebooks.with_values(source_of(notebook, "parameters"), names["test"])
    assert set(names) == {"test", "seconds", "code"}


def test_every_notebook_is_named_in_the_guide():
    listed = re.findall(r"^\| `(\d_\w+)` \|", (ROOT / "docs" / "start.md").read_text(), re.MULTILINE)
    assert listed == [path.stem for path in PATHS]


def test_a_value_that_is_not_there_is_refused(notebooks):
    assert notebooks.with_values("A = 5_000  # many\nB = 2", {"A": 10}) == "A = 10\nB = 2"
    with pytest.raises(ValueError, match="does not set C"):
        notebooks.with_values("A = 5_000", {"A": 10, "C": 1})


def test_the_hash_is_of_code_alone(notebooks):
    notebook = notebooks.read(PATHS[0])
    before = notebooks.code_of(notebook)
    notebook.cells[0].source += "More."
    notebook.cells[1].source += "\n# from elsewhere"
    assert "install" in notebook.cells[1].metadata.tags
    assert notebooks.code_of(notebook) == before
    notebook.cells[-2].source += "\nprint()"
    assert notebooks.code_of(notebook) != before


def test_the_repository_has_one_address(notebooks, monkeypatch):
    """pyproject.toml's, which is everywhere that has any."""
    files = (*notebooks.PAGES, *PATHS)
    for file in files:
        assert notebooks.addressed(file.read_text()) == file.read_text(), "python docs/notebooks.py --address"
        assert notebooks.public() or "OWNER/NAME" not in file.read_text()
    monkeypatch.setattr(notebooks, "repository", lambda: "https://github.com/a/b.c")
    first = notebooks.colab(PATHS[0])
    assert first == "https://colab.research.google.com/github/a/b.c/blob/main/examples/notebooks/1_anakin_colab.ipynb"
    for page in notebooks.PAGES:
        assert f"]({first})" in notebooks.addressed(page.read_text())
    for file in PATHS:
        assert r"repository = \"https://github.com/a/b.c\"" in notebooks.addressed(file.read_text())
    monkeypatch.setattr(notebooks, "repository", lambda: "https://github.com/OWNER/NAME")
    assert notebooks.colab(PATHS[0]) == ""
    for file in files:
        text = notebooks.addressed(notebooks.addressed(file.read_text()))
        assert "a/b.c" not in text
        assert "OWNER" not in text
    assert all("`make dist`" in notebooks.addressed(page.read_text()) for page in notebooks.PAGES)


def test_pictures_of_results_are_inside_the_notebooks(notebooks):
    """Colab shows neither files beside a notebook nor attachments."""
    named = []
    for path in PATHS:
        notebook = notebooks.read(path)
        named += [cell for cell in notebook.cells if "picture" in cell.metadata]
        assert notebooks.with_pictures(notebooks.read(path)) == notebook, "python docs/notebooks.py --address"
        shown = [cell for cell in notebook.cells if cell.cell_type == "markdown" and "![" in cell.source]
        assert shown == [cell for cell in notebook.cells if "picture" in cell.metadata]
    (cell,) = named
    (data,) = re.findall(r"\]\(data:image/png;base64,(\S+)\)", cell.source)
    assert base64.b64decode(data) == (ROOT / cell.metadata["picture"]).read_bytes()


@pytest.mark.parametrize(
    ("there", "extras"),
    [("libtpu", "sebulba,tpu"), ("nvidia-smi", "sebulba,cuda12"), ("", "sebulba")],
    ids=["tpu", "gpu", "cpu"],
)
def test_on_colab_what_fits_is_installed(there, extras, notebooks, monkeypatch, tmp_path):
    calls, killed = [], []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == there)
    monkeypatch.setattr("shutil.which", lambda name: name == there)
    monkeypatch.setattr(subprocess, "check_call", calls.append)
    monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))
    code = source_of(notebooks.read(PATHS[0]), "install")
    if not notebooks.public():
        with pytest.raises(FileNotFoundError, match="make dist"):
            exec(code, {})
    exec(code.replace('repository = "', 'repository = "https://github.com/a/b'), {})
    wheel = tmp_path / "podracer_rl-0.1.0-py3-none-any.whl"
    wheel.touch()
    exec(code, {})
    address, uploaded = calls
    assert address[:5] == uploaded[:5] == [sys.executable, "-m", "pip", "install", "-q"]
    assert address[5].startswith(f"podracer-rl[{extras}] @ git+https://github.com/a/b")
    assert uploaded[5] == f"podracer-rl[{extras}] @ {wheel.as_uri()}"
    assert set(killed) == {(os.getpid(), 9)}, "this process has imported an older jax"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    exec(code, {})
    monkeypatch.delenv("COLAB_RELEASE_TAG")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: False)
    exec(code, {})
    assert len(calls) == len(killed) == 2


def test_notebooks_are_pages_with_pictures(notebooks):
    pytest.importorskip("nbconvert")
    pages = dict(notebooks.pages())
    for path in PATHS:
        text = pages[f"notebooks/{path.stem}.md"]
        assert f"]({path.stem}.md): " in pages["notebooks/index.md"]
        assert text.startswith("# ")
        assert "COLAB_RELEASE_TAG" not in text
        assert ("[Open in Colab]" in text) == bool(notebooks.public())
        shown = re.findall(r"!\[\w+\]\((.*)\)", text)
        assert shown == [name for name in shown if f"notebooks/{name}" in pages]
        assert text.count("](data:image/png") == path.read_text().count("](data:image/png")
        assert len(shown) == sum(name.startswith(f"notebooks/{path.stem}/") for name in pages)


def test_a_first_run_shows_what_it_did(notebooks):
    """As a browser would show it."""
    notebook = notebooks.read(PATHS[0])

    def shown(source):
        (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source)
        found = {}
        for _, data in outputs(notebooks.nbformat.from_dict({"cells": [cell]})):
            for kind, value in data.items():
                found.setdefault(kind, []).append(value)
        return found

    trained = shown('"vtrace", "catch"')
    bar, summary = trained["text/html"]
    assert '<progress value="1.000" max="1"' in bar
    assert "vtrace catch 100%, " in bar
    assert "vtrace on catch: return " in "".join(trained["text/plain"]).splitlines()[-1]
    assert "<table>" in summary
    assert '<img src="data:image/png;base64,' in summary
    assert shown("evaluate(")["text/plain"][0].startswith("return ")
    (gif,) = shown("catch.animate(")["text/html"]
    (data,) = re.findall(r"data:image/gif;base64,([^\"]+)", gif)
    assert Image.open(io.BytesIO(base64.b64decode(data))).n_frames == 10
    assert "dataframe" in shown("frame()")["text/html"][0]


WARNINGS = "error,ignore::DeprecationWarning,ignore::PendingDeprecationWarning"
"""Warnings that are not errors are for authors of libraries; the kernel has one of its own."""


@pytest.mark.slow
def test_a_warning_ends_a_notebook(notebooks, tmp_path):
    exceptions = pytest.importorskip("nbclient.exceptions")
    cell = notebooks.nbformat.v4.new_code_cell("import numpy as np\nnp.array([1.0]) / 0")
    notebook = notebooks.nbformat.v4.new_notebook(cells=[cell])
    with pytest.raises(exceptions.CellExecutionError, match="RuntimeWarning"):
        notebooks.executed(notebook, tmp_path, os.environ | {"PYTHONWARNINGS": WARNINGS}, seconds=60)


LONG = ("2_your_own", "3_sebulba_atari", "4_self_play", "6_meta_gradients", "7_many_processes")
"""Notebooks that take a minute or more."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.nightly if path.stem in LONG else (), id=path.stem) for path in PATHS],
)
def test_a_notebook_runs(path, notebooks, tmp_path):
    pytest.importorskip("nbclient")
    notebook = notebooks.read(path)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "PYTHONWARNINGS": WARNINGS}
    for strict in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        environment.pop(strict)  # as a user has it
    settings = notebook.metadata.podracer
    (tmp_path / "here").mkdir()
    done = notebooks.executed(notebook, tmp_path / "here", environment, settings["test"], settings["seconds"])
    check(done)
    shows = [sum(1 for _ in pictures(each)) for each in (notebook, done)]
    assert shows[0] == shows[1], "as many pictures as the committed one"
