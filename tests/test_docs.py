"""The guides: what they link to is there, and what they show runs as it stands."""

import importlib.util
import pathlib
import re
import sys

import pytest

import podracer

ROOT = pathlib.Path(podracer.__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
GUIDES = [page for page in PAGES if "```python" in page.read_text()]


def code_of(page):
    """The Python of a page, at the lines where it is in the page."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        opens = line == "```python"
        inside = opens or (inside and line != "```")
        lines.append(line if inside and not opens else "")
    return compile("\n".join(lines), str(page), "exec")


def test_there_are_guides():
    assert {page.stem for page in GUIDES} == {"index", "environments", "sweeps", "deployment", "atari", "search"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_parses_and_links_to_what_is_there(page):
    code_of(page)
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_runs(page, monkeypatch, tmp_path):
    import jax

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as a user has it
        exec(code_of(page), {"__name__": page.stem})


def test_readme_has_the_learning_results_that_are_committed(monkeypatch):
    """`python benchmarks/learn.py --table` writes them."""
    path = ROOT / "benchmarks" / "learn.py"
    learn = importlib.util.module_from_spec(importlib.util.spec_from_file_location("learn", path))
    monkeypatch.setitem(sys.modules, "learn", learn)
    learn.__spec__.loader.exec_module(learn)
    readme = (ROOT / "README.md").read_text().splitlines()
    table = learn.table()
    begin = readme.index(table[0])
    assert readme[begin : begin + len(table)] == table
    assert not readme[begin + len(table)].startswith("|")
    assert {line.split("`")[1] for line in table[2:]} <= {f"train {row.arguments}" for row in learn.ROWS}
