"""The style of docstrings: each opens with a noun or an imperative, never with a relative clause."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]

WORDS = "what|whatever|whether|where|wherever|how|who|whom|whose|whoever|those|of|which|that|when|why"
CLAUSE = re.compile(rf"\s*({WORDS})\b", re.IGNORECASE)
LIKELY = re.compile(rf"^\s*\w?[\"']+\s*({WORDS})\b", re.IGNORECASE | re.MULTILINE)
"""A line that may open such a docstring: parsing all files takes seconds, and few have one."""


def clauses(source: str) -> list[int]:
    """The lines of docstrings that open with a relative clause: of modules, classes, functions and attributes."""
    nodes = ast.walk(ast.parse(source)) if LIKELY.search(source) else ()
    texts = (node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return sorted(text.lineno for text in texts if isinstance(text.value, str) and CLAUSE.match(text.value))


@pytest.mark.parametrize("folder", ["podracer", "envs_jax", "benchmarks", "tests", "docs", "examples"])
def test_docstrings_open_with_a_noun_or_an_imperative(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in clauses(file.read_text())]
    assert not found, "docstrings that open with a relative clause: " + ", ".join(found)


def test_the_check_finds_clauses():
    source = 'def f():\n    """What f does."""\n\nx = 1\n"""\nOf y.\n"""\nz = """Whether it is."""\n'
    assert clauses(source) == [2, 5]
    assert not clauses('"""Whatsoever is one word, and a clause may follow: what, of which, that."""')
