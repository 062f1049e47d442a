"""A worker's stream as the server has it: what is read, and a queue of what is to be written."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import Any

import grpc
import grpc.aio

from podracer.remote import session_pb2 as pb
from podracer.remote import wire

SETTLE_SECONDS = 2.0
"""Seconds that a message may take to be written to a stream that is to end."""


class Refused(Exception):  # noqa: N818 - how a session ends, not an error of ours
    """A session ends with a status."""

    def __init__(self, code: grpc.StatusCode, text: str):
        super().__init__(text)
        self.code = code


class Gone(Exception):  # noqa: N818 - likewise
    """A worker is not there any more."""


class Outbox:
    """Hands messages of other threads to the loop, and wakes it once for all that come together."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._items: collections.deque[tuple[asyncio.Queue[bytes | None], bytes | None]] = collections.deque()
        self._waking = False

    def put(self, queue: asyncio.Queue[bytes | None], data: bytes | None) -> None:
        self._items.append((queue, data))
        if not self._waking:
            self._waking = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._waking = False  # first: what is put from now on wakes again
        while self._items:
            queue, data = self._items.popleft()
            queue.put_nowait(data)


class Stream:
    """A worker's stream: what is read, and a queue of what is to be written."""

    def __init__(self, context: Any, outbox: Outbox):
        self.context, self.name = context, ""
        self._outbox = outbox
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._end = ""
        self._writing = asyncio.Lock()  # a stream takes one message at a time, and fails for a second

    def post(self, data: bytes) -> None:
        """Queues a message, from any thread."""
        self._outbox.put(self.queue, data)

    def end(self, why: str) -> None:
        """Ends the stream, from any thread."""
        self._end = self._end or why
        self._outbox.put(self.queue, None)

    async def send(self, message: Any) -> None:
        await self._put(wire.pack(message))

    async def _put(self, data: bytes) -> None:
        async with self._writing:
            await self.context.write(data)

    async def settle(self) -> None:
        """Waits until what is being written has been: after a write that is cancelled gRPC can send no status."""
        with contextlib.suppress(TimeoutError):  # of a peer that does not read
            async with asyncio.timeout(SETTLE_SECONDS), self._writing:
                pass

    async def read(self) -> bytes | None:
        """The next message, or None at the end."""
        data = await self.context.read()
        return None if data is grpc.aio.EOF else data  # type: ignore[attr-defined]

    async def receive(self, seconds: float) -> tuple[Any, memoryview]:
        try:
            async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 loses a cancellation that comes with data
                data = await self.read()
        except TimeoutError:
            raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, f"it said nothing for {seconds:.0f} s.") from None
        if data is None:
            raise Gone
        return wire.unpack(pb.FromWorker, data)

    async def write(self) -> None:
        """Writes what is queued, until the stream is to end."""
        while (data := await self.queue.get()) is not None:
            await self._put(data)
        if self._end:
            raise Refused(grpc.StatusCode.ABORTED, self._end)
