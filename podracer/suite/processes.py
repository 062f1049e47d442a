"""Processes that train: they end with their worker, and what they say goes into a file."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

STOPPED = (-2, -15, 130, 143)
"""Exit codes of a process that a signal stopped: it is no failure, and can go on."""

FOLLOW = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]): sys.exit(143)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Runs a command that gets SIGTERM when its parent dies (Linux' PR_SET_PDEATHSIG): after a SIGKILL of the worker,
nothing goes on in a run directory that another worker may take over."""


def start(command: Sequence[str], log: pathlib.Path) -> subprocess.Popen[bytes]:
    """Starts a command, whose output is added to a file.

    Raises:
      OSError: where the file cannot be written, or the command is not there.
    """
    follow = [sys.executable, "-S", "-E", "-c", FOLLOW, str(os.getpid())] if sys.platform == "linux" else []
    with log.open("ab") as file:
        return subprocess.Popen(
            [*follow, *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C is for the worker, which passes it on once
        )


def last_words(log: pathlib.Path, lines: int = 20) -> list[str]:
    """The end of what a process has said."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 10_000))
        return file.read().decode(errors="replace").splitlines()[-lines:]
