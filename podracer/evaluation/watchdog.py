"""Runs work in a thread of its own, so that the main thread can handle signals and detect an environment that hangs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from podracer.errors import ActorError, Closed
from podracer.system.children import interrupts_blocked
from podracer.system.stopping import soon

POLL_SECONDS = 0.1
"""Seconds between two polls of the thread."""

GRACE_SECONDS = 0.3
"""Seconds for the thread to close its environments when it is to stop."""

Result = TypeVar("Result")


class UnansweredError(ActorError):
    """An environment does not answer in an evaluation."""


class Watch:
    """Messages between the thread and its watcher.

    Attributes:
      waiting_since: the time at which the thread began to wait for an environment, in seconds of `time.monotonic`; None
        if it does not wait.
      wake: ends such a wait, for environments that watch themselves; else None.
    """

    def __init__(self):
        self.waiting_since: float | None = None
        self.wake: Callable[[], None] | None = None
        self._ending = threading.Event()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which the thread waits for an environment."""
        self.waiting_since = None if self.wake else time.monotonic()
        yield
        self.waiting_since = None

    def check(self) -> None:
        """Checks that the result is still wanted.

        Raises:
          Closed: if it is not.
        """
        if self._ending.is_set():
            raise Closed

    def end(self) -> None:
        """Asks the thread to end after its current step."""
        self._ending.set()
        if self.wake:
            self.wake()


def watched(
    work: Callable[[Watch], Result], name: str, should_stop: Callable[[], bool] = lambda: False, timeout: float = 60.0
) -> Result:
    """Runs work that may wait for environments, and returns its result.

    A thread that hangs, or computes in one long program, is abandoned if the work is to stop: it cannot be ended.

    Args:
      work: `(Watch) -> result`; it tells the `Watch` when it waits.
      name: the environment's name, for messages.
      should_stop: polled.
      timeout: seconds that the environment may take to answer.

    Raises:
      Closed: if it should stop.
      UnansweredError: if the environment does not answer.
    """
    watch, results, errors = Watch(), list[Result](), list[BaseException]()

    def run() -> None:
        try:
            with interrupts_blocked():
                results.append(work(watch))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="evaluation", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            if thread.is_alive() and should_stop():
                raise Closed
            since = watch.waiting_since
            if since is not None and time.monotonic() - since > timeout:
                raise UnansweredError(
                    f"evaluation: {name} has not answered for {time.monotonic() - since:.0f} s; if that is how long it "
                    f"takes, raise env_timeout={timeout:g}; if it happens now and then, let env_restarts begin again."
                )
    except BaseException as error:
        watch.end()
        thread.join(GRACE_SECONDS if isinstance(error, Closed) else 0.0)
        raise
    if errors:
        if soon(should_stop):  # a signal to a group of processes, such as those that step lanes, ends them first
            raise Closed from errors[0]
        raise errors[0]
    return results[0]
