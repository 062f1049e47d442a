"""Processes that train: they end with their worker, and what they say goes into a file."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Sequence

from podracer.system import children

STOPPED = (-2, -15, 130, 143)
"""Exit codes of a process that a signal stopped: it is no failure, and can go on."""


def start(command: Sequence[str], log: pathlib.Path) -> subprocess.Popen[bytes]:
    """Starts a command, whose output is added to a file.

    Raises:
      OSError: where the file cannot be written, or the command is not there.
    """
    with log.open("ab") as file:
        return children.start(command, file)


def last_words(log: pathlib.Path, lines: int = 20) -> list[str]:
    """The end of what a process has said."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 10_000))
        return file.read().decode(errors="replace").splitlines()[-lines:]
