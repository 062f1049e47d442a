"""Signals that end a run in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from podracer import console


class StopSignal:
    """Turns SIGTERM and Ctrl-C into a request to stop; a second Ctrl-C interrupts at once."""

    requested = False
    number = 0
    _tell: Callable[[], None] | None = None

    def __enter__(self) -> StopSignal:
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def tell(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, and nothing that was told before, once a stop is requested; at once if it was."""
        self._tell = wake
        if self.requested:
            wake()

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.requested, self.number = not self.requested, True, number
        if self._tell:
            self._tell()
        if first and number == signal.SIGINT:
            console.say("\nstopping in good order; Ctrl-C again to interrupt at once", at_once=True)

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
