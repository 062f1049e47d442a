"""Output for people, which raises no error if nobody reads it: a terminal, `tee`, `head` or ssh may be gone."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)
"""Errors of a pipe that nobody reads any more, and of a terminal that was closed."""


def say(text: str, *, at_once: bool = False) -> None:
    """Writes a line to standard error.

    Args:
      text: the line.
      at_once: to the descriptor itself, past what notebooks and progress bars put before it: for signal handlers,
        which may interrupt these, and for threads that must not wait for them.
    """
    write(sys.__stderr__ if at_once else sys.stderr, f"{text}\n")


def note(text: str) -> None:
    """Writes a line to standard error, also if no progress is shown; without a reader it is lost."""
    say(f"podracer: note: {' '.join(text.split())}")


def write(stream: Any, text: str) -> None:
    """Writes text to standard error or output; the text is lost where the stream is closed or full.

    A stream without a reader is redirected to the null device, so that later writes, also Python's own at its end, do
    not fail either.
    """
    if stream is None:  # it was closed before Python began, and its descriptor may be another file's by now
        return
    try:
        if stream is sys.__stderr__:
            # Not by way of a buffer, which would keep what could not be written, and is not reentrant.
            os.write(stream.fileno(), text.encode(stream.encoding or "utf-8", "backslashreplace"))
        else:
            try:
                stream.write(text)
            except UnicodeEncodeError as error:
                stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            stream.flush()
    except (ValueError, RuntimeError):  # closed, or interrupted in the middle of a line
        return
    except OSError as error:
        if error.errno in GONE and any(stream is each for each in (sys.__stdout__, sys.__stderr__)):
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


def robust_stream(stream: Any) -> Any:
    """A text stream, for Rich, that writes to another one as `write` does."""
    return _RobustStream(stream)


class _RobustStream:
    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        """Does nothing: every write is flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
