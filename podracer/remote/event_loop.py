"""The event loop of gRPC in a thread of its own, one for all servers of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any


def lost_peer(error: BaseException | None) -> bool:
    """True for gRPC's way to say that nobody is there to read what is sent."""
    return type(error).__name__ == "ExecuteBatchError"


class _Loop:
    """The only event loop of this process that touches grpc.aio, whose poller is the process's."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._said)
        self.thread = threading.Thread(target=self.loop.run_forever, name="remote environments", daemon=True)
        self.thread.start()

    def _said(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # gRPC's own task ends so where a worker dies while it is told its status.
        if not lost_peer(context.get("exception")):
            loop.default_exception_handler(context)

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Runs a coroutine in the loop's thread, and waits for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)


_loop: _Loop | None = None
_loop_lock = threading.Lock()


def shared_loop() -> _Loop:
    """The loop of this process, begun when it is first asked for."""
    global _loop
    with _loop_lock:
        _loop = _loop or _Loop()
        return _loop
