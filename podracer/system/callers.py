"""Reads the first message of every caller at a port of this machine, within a limit of time and of number."""

from __future__ import annotations

import selectors
import socket
import time

PAUSE = 0.1
"""Seconds without accepting connections when file descriptors run out."""


class Callers:
    """Accepts connections to a server and reads the first message of each; a context whose end closes unfinished ones.

    A caller that sends nothing, or a byte now and then, does not delay the others: all are read at once.

    Args:
      server: the listening socket; its maker closes it.
      ending: bytes that end a first message.
      longest: most bytes of a first message; a connection that sends more is closed.
      seconds: most seconds from a connection's start to its ending; slower ones are closed.
      most: largest number of unfinished connections; one more closes the oldest.
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
        """Non-blocking connections whose first message is complete, with the message; their receiver closes them.

        Args:
          seconds: most seconds to wait; the list may come earlier, and be empty.
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
            elif connection in self._waiting and (message := self._read(connection)) is not None:
                found.append((self._forget(connection), message))
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
        message, ending, _ = (before + data).partition(self._ending)
        if ending and len(message) <= self._longest:
            return message
        if not data or len(message) > self._longest:
            self._forget(connection).close()
        else:
            self._waiting[connection] = (until, message)
        return None

    def _forget(self, connection: socket.socket) -> socket.socket:
        del self._waiting[connection]
        self._selector.unregister(connection)
        return connection
