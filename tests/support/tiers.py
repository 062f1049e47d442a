"""Cases of a test that run in a later tier than its others: what each of them alone shows is seldom broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def nightly(*cases: Any) -> list[Any]:
    """Cases that run nightly alone, for a `parametrize`; a tuple is a case of several arguments."""
    return _marked(cases, [pytest.mark.slow, pytest.mark.nightly])


def slow(*cases: Any) -> list[Any]:
    """Cases that run in the slow tier."""
    return _marked(cases, [pytest.mark.slow])


def all_but(kept: Sequence[Any], cases: Sequence[Any]) -> list[Any]:
    """All cases, of which those that are not kept run nightly alone."""
    return [case if case in kept else nightly(case)[0] for case in cases]


def _marked(cases: Sequence[Any], marks: list[Any]) -> list[Any]:
    return [pytest.param(*(case if type(case) is tuple else (case,)), marks=marks) for case in cases]
