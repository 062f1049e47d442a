"""Signals that end a run in good order."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from podracer import console

SOON_SECONDS = 0.3
"""Between the first and the last process of a group that a signal reaches."""


class StopSignal:
    """Turns SIGTERM and Ctrl-C into a request to stop; a second Ctrl-C interrupts at once."""

    requested = False
    number = 0

    def __enter__(self) -> StopSignal:
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.requested, self.number = not self.requested, True, number
        if first and number == signal.SIGINT:
            console.say("\nstopping in good order; Ctrl-C again to interrupt at once", at_once=True)

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def soon(should_stop: Callable[[], bool]) -> bool:
    """Whether a request to stop is there, or on its way.

    For errors that may come of it: a signal to a whole group may end processes that step environments first.
    """
    until = time.monotonic() + SOON_SECONDS
    while not should_stop() and time.monotonic() < until:
        time.sleep(0.01)
    return should_stop()
