"""The guides: what they link to is there, and what they show runs as it stands."""

import pathlib
import re

import pytest

import podracer

DOCS = pathlib.Path(podracer.__file__).parents[1] / "docs"
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
    assert {page.stem for page in GUIDES} == {"index", "environments", "sweeps", "deployment", "atari"}


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
