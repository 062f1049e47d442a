"""Reads the first message of every caller at a port of this machine, within a limit of time and of number."""

from __future__ import annotations

import selectors
import socket
import time

PAUSE = 0.1
"""Seconds without a look at the port where nobody more can be let in, for want of file descriptors."""


class Callers:
    """Lets in who calls at a server, and hears what each says first; a context, whose end sends the unheard away.

    A caller that says nothing, or a byte now and then, takes no time of the others: all are waited for at once.

    Args:
      server: where it listens; whoever made it closes it.
      ending: bytes that end what a caller says first.
      longest: bytes of it; who says more is sent away.
      seconds: from a caller's coming to the ending; who needs more is sent away.
      most: callers that are waited for; where one more comes, who came first is sent away.
    """

    def __init__(self, server: socket.socket, *, ending: bytes, longest: int, seconds: float, most: int):
        self._server, self._ending, self._longest = server, ending, longest
        self._seconds, self._most = seconds, most
        self._waiting: dict[socket.socket, tuple[float, bytes]] = {}  # oldest first: until when, and what was said
        server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> Callers:
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in list(self._waiting):
            self._forget(connection).close()
        self._selector.close()

    def heard(self, seconds: float) -> list[tuple[socket.socket, bytes]]:
        """Connections that do not block, of those who have said all, and what: the caller's to close.

        Args:
          seconds: how long to wait for somebody; it may return with none before.
        """
        now = time.monotonic()
        for connection in [each for each, (until, _) in self._waiting.items() if until <= now]:
            self._forget(connection).close()
        until = min([now + seconds, *(until for until, _ in self._waiting.values())])
        found = []
        for key, _ in self._selector.select(max(until - now, 0.0)):
            connection: socket.socket | None = key.data
            if connection is None:
                self._accept()
            elif connection in self._waiting and (said := self._read(connection)) is not None:
                found.append((self._forget(connection), said))
        return found

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except BlockingIOError:  # whoever it was has gone
            return
        except OSError:
            time.sleep(PAUSE)
            return
        if len(self._waiting) >= self._most:
            self._forget(next(iter(self._waiting))).close()
        connection.setblocking(False)
        self._waiting[connection] = (time.monotonic() + self._seconds, b"")
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _read(self, connection: socket.socket) -> bytes | None:
        """The text before the ending; None while the ending has not come, or never will."""
        until, before = self._waiting[connection]
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        said, ending, _ = (before + data).partition(self._ending)
        if ending and len(said) <= self._longest:
            return said
        if not data or len(said) > self._longest:
            self._forget(connection).close()
        else:
            self._waiting[connection] = (until, said)
        return None

    def _forget(self, connection: socket.socket) -> socket.socket:
        del self._waiting[connection]
        self._selector.unregister(connection)
        return connection
