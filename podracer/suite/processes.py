"""Processes that train: they end with their worker, and their output goes into a file."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Sequence

from podracer.system import children
from podracer.system.stopping import STOPPING

STOPPED = tuple(code for number in STOPPING for code in (-number, 128 + number))
"""Exit codes of a process that a signal stopped: it has not failed, and can be resumed."""


def start(command: Sequence[str], log: pathlib.Path) -> subprocess.Popen[bytes]:
    """Starts a command and appends its output to a file.

    Raises:
      OSError: if the file cannot be written, or the command is not there.
    """
    with log.open("ab") as file:
        return children.start(command, file)


def last_words(log: pathlib.Path, lines: int = 20) -> list[str]:
    """The last lines of a process's output."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 10_000))
        return file.read().decode(errors="replace").splitlines()[-lines:]
