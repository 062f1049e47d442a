"""Processes that another one starts: they end with it, and hear of Ctrl-C from it alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

FOLLOW = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]): sys.exit(143)
try:
    if nice := os.nice(0): open("/proc/self/autogroup", "w").write(str(nice))
except OSError:
    pass
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Runs a command that gets SIGTERM when its parent dies (Linux' PR_SET_PDEATHSIG). After a SIGKILL of the parent it
does not keep writing to a run directory that another process may take over. Its session keeps the parent's priority:
Linux weighs sessions (autogroups), and a process' own niceness counts only within one."""


def start(
    command: Sequence[str], output: int | IO[bytes], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a command.

    Args:
      command: program and arguments.
      output: its stdout and stderr: a file, or `subprocess.PIPE`.
      environment: its variables; those of this process if None.

    Raises:
      OSError: if the command is not there.
    """
    follow = [sys.executable, "-S", "-E", "-c", FOLLOW, str(os.getpid())] if sys.platform == "linux" else []
    return subprocess.Popen(
        [*follow, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the parent, which passes it on once
    )


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """A context in which this thread starts processes that do not get Ctrl-C.

    A terminal sends it to a whole group: processes that step environments would end while others wait for them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
