"""A worker's thread that steps the environments of one block."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from podracer.remote import session_pb2 as pb
from podracer.remote import wire
from podracer.system import own_code
from podracer.types import HostEnvironments

STEP_SECONDS = 5.0
"""Seconds in which environments must end a step that nobody waits for any more."""

SETUP_SECONDS = 60.0
"""Seconds in which environments must be made, or close, where nobody waits for them any more."""


class BlockThread(threading.Thread):
    """Environments of one block, stepped in a thread.

    Args:
      asked: the learner's message Open.
      environments: make what it asks for.
      layout: of rows and actions in payloads.
      put: takes a message for the learner.
      failed: called with the block's number and what its environments raised.

    Attributes:
      closed_at: when it was asked to end, in seconds of `time.monotonic`; infinity before.
    """

    def __init__(
        self,
        asked: Any,
        environments: HostEnvironments,
        layout: wire.Layout,
        put: Callable[[bytes], None],
        failed: Callable[[int, str], None],
    ):
        super().__init__(name=f"block {asked.block}", daemon=True)
        self._asked, self._environments, self._layout, self._put = asked, environments, layout, put
        self._failed = failed
        self._actions: queue.SimpleQueue[tuple[int, memoryview] | None] = queue.SimpleQueue()
        self._since = time.monotonic()
        self.closed_at, self._limit = float("inf"), SETUP_SECONDS

    @property
    def hangs(self) -> bool:
        """True where it goes on for too long after it was asked to end."""
        return self.is_alive() and time.monotonic() - self.closed_at > self._limit

    @property
    def busy(self) -> float:
        """Seconds that its environments have been at work."""
        return time.monotonic() - self._since if self._since else 0.0

    def act(self, step: int, payload: memoryview) -> None:
        """Passes on the actions that answer the rows of a step."""
        self._actions.put((step, payload))

    def close(self) -> None:
        """Asks it to end after its step."""
        if self.closed_at == float("inf"):
            self.closed_at = time.monotonic()
            self._actions.put(None)

    def run(self) -> None:
        """Makes the environments and steps them until the block is closed or they fail."""
        environment: Any = None
        try:
            asked = self._asked
            environment = self._environments.make(asked.lanes, asked.seed, evaluation=asked.evaluation)
            self._limit = STEP_SECONDS
            for message in self._steps(environment):
                self._put(message)
        except BaseException as error:  # SystemExit, too, would end this thread alone, and nobody would know
            own_code.show(error)
            self._failed(self._asked.block, wire.printable(own_code.describe(error)))
        finally:
            self._limit = SETUP_SECONDS
            if environment is not None:
                with contextlib.suppress(BaseException):
                    environment.close()

    def _steps(self, environment: Any) -> Iterator[bytes]:
        """The messages of rows, each computed once the actions for the one before have come."""
        layout, n, number, step = self._layout, self._asked.lanes, self._asked.block, 0
        clock, begin = time.perf_counter, time.perf_counter()
        while True:
            lanes, rows = environment.recv()
            spent = int(1e6 * (clock() - begin))
            self._since = 0.0  # from here on the learner is waited for
            if len(lanes) != n:
                raise ValueError(f"the environment returned lanes {lanes} of {n}, which must come together.")
            layout.require(rows, n)
            yield wire.pack(
                pb.FromWorker(rows=pb.Rows(block=number, step=step, env_us=min(spent, 2**32 - 1))),
                layout.pack_rows(rows),
            )
            if (answer := self._actions.get()) is None:
                return
            at, payload = answer
            if at != step:
                raise wire.ProtocolError(f"actions of step {at} came in step {step}.")
            actions = layout.unpack_actions(payload, n)
            begin, self._since = clock(), time.monotonic()
            environment.send(lanes, actions)
            step += 1
