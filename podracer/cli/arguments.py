"""Flags into dataclasses, and what is wrong with them in one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import TypeVar

import tyro

Arguments = TypeVar("Arguments")


class InputError(ValueError):
    """What the user typed cannot be used."""


def parse(cls: Callable[..., Arguments], argv: list[str], prog: str) -> Arguments:
    """Parses flags into a dataclass; tyro's box of an error becomes one line."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(cls, args=argv, prog=prog)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise InputError(f"{_unbox(captured.getvalue())} (see {prog} --help)") from None


def _unbox(box: str) -> str:
    """What tyro's box says, without its title, borders and help: one line."""
    # Sections are separated by lines of box characters, or of hyphens where the terminal has no others.
    sections = [" ".join(section.split()) for section in re.split(r".*[─-]{5,}.*", re.sub("[│╭╮╰╯]", " ", box))]
    message, hints = sections[1], sections[2:]
    message = re.sub(r"^Error parsing (?:(--\S+): |\S+: )", lambda found: f"{found[1]}: " if found[1] else "", message)
    message = re.sub(r"invalid literal for int\(\) with base 10: ('.*')", r"\1 is not an integer", message)
    message = re.sub(r"could not convert string to float: ('.*')", r"\1 is not a number", message)
    flag = next((re.search(r"--\S+", hint) for hint in hints if hint.startswith("Perhaps you meant")), None)
    return f"{message}; did you mean {flag[0]}?" if flag else message


def asks_for_help(argv: list[str]) -> bool:
    """Whether help is wanted instead."""
    return not {"-h", "--help"}.isdisjoint(argv)


def refuse_arguments(command: str, argv: list[str]) -> None:
    """For commands that take none."""
    if argv and not asks_for_help(argv):
        raise InputError(f"{command} takes no arguments, but got {' '.join(argv)}.")
