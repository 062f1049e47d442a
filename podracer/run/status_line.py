"""A line now and then from a run that shows nothing else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

SECONDS = 30.0
"""Seconds without output after which a run without a progress bar prints its status."""


class StatusLine:
    """Prints a run's status after `SECONDS` without other output, from a thread of its own.

    Args:
      say: prints a line.
      doing: the run's first status.
    """

    def __init__(self, say: Callable[[str], None], doing: str):
        self._say, self._ended = say, threading.Event()
        self.set_status(doing)
        self.status = ""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def set_status(self, what: str) -> None:
        """Sets the status."""
        self._doing, self._since = what, time.monotonic()
        self.put_off()

    def put_off(self) -> None:
        """Postpones the next line, because another one was printed."""
        self._said = time.monotonic()

    def _run(self) -> None:
        while not self._ended.wait(max(0.0, self._said + SECONDS - time.monotonic())):
            if time.monotonic() >= self._said + SECONDS:
                self.put_off()
                with contextlib.suppress(OSError, ValueError):  # nobody reads any more
                    self._say(f"{self._doing} for {time.monotonic() - self._since:,.0f} s{self.status}")

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()
