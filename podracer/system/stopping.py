"""Signals: a run ends in good order, and its process as shells expect."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from podracer.system import console

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that stop a run in good order."""

SOON_SECONDS = 0.3
"""Seconds between the first and the last process of a group that a signal reaches."""


def heard() -> list[signal.Signals]:
    """The signals of `STOPPING` that this process hears: SIGHUP stays ignored where it was, as under `nohup`."""
    return [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class StopSignal:
    """Turns SIGTERM, Ctrl-C and SIGHUP into a request to stop; a second Ctrl-C interrupts at once.

    SIGHUP comes when the terminal of a run closes.
    """

    requested = False
    number = 0

    def __enter__(self) -> StopSignal:
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            for number in heard():
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
    """True if a request to stop has come, or comes within `SOON_SECONDS`.

    Such a request may be the cause of an error: a signal to a whole group may end processes that step environments
    first.
    """
    until = time.monotonic() + SOON_SECONDS
    while not should_stop() and time.monotonic() < until:
        time.sleep(0.01)
    return should_stop()


class Ending:
    """Ends a process by the signal that stopped its run, as shells expect.

    A shell's loop ends with Ctrl-C only where its command was ended by it: one that exits with 130 has dealt with it.

    Attributes:
      code: the exit code; 128 plus the number of a signal that stopped the run.
    """

    def __init__(self):
        self.code = 0
        if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # No signal ends the first process of a container, unless it asks for that.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def __call__(self) -> None:
        """Ends the process by the signal; returns if no signal stopped it. The last call of a program."""
        number = self.code - 128
        if number in STOPPING:
            console.write(sys.stdout, "")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
