"""The user's `log` callback, and all else that may end a run early: a signal, here or in another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podracer.run import metrics
from podracer.system.stopping import StopSignal
from podracer.topology.processes import Processes


class UserCallback:
    """The user's `log`, which may end the run: in good order where it returns True, and where it raises.

    Attributes:
      stop: True once it wants the run to end.
      error: its exception, raised to the user when the run has ended.
    """

    def __init__(self, log: metrics.LogCallback | None):
        self._log = log
        self.stop = False
        self.error: Exception | None = None

    def __call__(self, env_steps: int, row: Mapping[str, Any]) -> None:
        # After an error it is not asked again: the rows to come are those of the last updates.
        if self._log is None or self.error:
            return
        try:
            self.stop = self._log(env_steps, row) is True or self.stop
        except Exception as error:
            self.stop, self.error = True, error


class StopRequests:
    """Requests to end a run before its last step, which every process of a pod hears.

    Args:
      signal: the signals to this process.
      callback: the user's `log`.
      processes: those that share the run.
    """

    def __init__(self, signal: StopSignal, callback: UserCallback, processes: Processes):
        self._signal, self._callback, self._processes = signal, callback, processes

    def requested(self) -> bool:
        """True once a signal has come or the user's `log` wants to end."""
        if self._callback.stop:
            self._processes.stop()
            return True
        return self.signalled()

    def signalled(self) -> bool:
        """True once a signal has come, here or to another process."""
        if self._signal.requested:
            self._processes.stop()
            return True
        return self._processes.stopping

    def gather(self) -> tuple[int, str | None]:
        """The signal that stopped any of the processes, or 0, and the error of process 0's `log`, if there is one."""
        error = self._callback.error
        ends = self._processes.all_gather([self._signal.number, f"{type(error).__name__}: {error}" if error else None])
        return next((number for number, _ in ends if number), 0), ends[0][1]

    def cause(self) -> str:
        """The cause of an early end, for a message."""
        if not self._callback.stop:
            return "a signal"
        return f"an error in log ({type(self._callback.error).__name__})" if self._callback.error else "log"
