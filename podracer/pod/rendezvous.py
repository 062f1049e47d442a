"""The rendezvous of a pod's processes, at the coordinator's port before JAX listens there: JAX itself waits without
naming the processes that are missing."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence

from podracer.pod.settings import NoClusterError
from podracer.system.callers import Callers

POLL = 0.2
"""Seconds between attempts to reach process 0."""

SLOW = 2.0
"""Seconds for a connection to introduce itself."""

STRANGERS = 256
"""The most connections at a time that have not introduced themselves."""

LONGEST = 2**16
"""The most bytes of process 0's line."""

ALL, MISSING = "all", "missing "


def hold(coordinator: str, count: int, seconds: float) -> None:
    """Waits, in process 0, until all others have come, and tells them.

    Args:
      coordinator: host:port of process 0.
      count: P, the number of processes.
      seconds: how long to wait.

    Raises:
      NoClusterError: if the port is taken, or some do not come; those that came raise the same.
    """
    until, connections = time.monotonic() + seconds, dict[int, socket.socket]()
    try:
        with (
            _listening(coordinator) as server,
            Callers(server, ending=b"\n", longest=64, seconds=SLOW, most=STRANGERS) as callers,
        ):
            while len(connections) < count - 1 and (left := until - time.monotonic()) > 0:
                for connection, message in callers.heard(left):
                    spare: socket.socket | None = connection  # a stranger's, or of a process that has begun again
                    if (index := _process_index(message)) is not None and 0 < index < count:
                        spare, connections[index] = connections.get(index), connection
                    if spare is not None:
                        spare.close()
        # The port is free again before anybody is told to look for JAX there.
        missing = [i for i in range(1, count) if i not in connections]
        say = MISSING + ", ".join(map(str, missing)) if missing else ALL
        for connection in connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(say.encode() + b"\n")
    finally:
        for connection in connections.values():
            connection.close()
    if missing:
        raise meeting_error(coordinator, seconds, describe_missing(missing))


def attend(coordinator: str, index: int, seconds: float) -> None:
    """Introduces this process to process 0, and waits until all have come.

    Raises:
      NoClusterError: if process 0 does not answer, or others do not come.
    """
    host, _, port = coordinator.rpartition(":")
    until = time.monotonic() + seconds
    while True:
        reason = "what listens there is something else"
        try:
            left = max(until - time.monotonic(), POLL)
            with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as connection:
                connection.sendall(f"podracer {index}\n".encode())
                # Process 0, which may have started later, speaks when its own time is over.
                answer = _read_line(connection, until + 2 * SLOW)
        except (OSError, ValueError) as error:
            answer, reason = "", getattr(error, "strerror", None) or str(error) or type(error).__name__
        if answer == ALL:
            return
        if answer.startswith(MISSING):
            raise meeting_error(coordinator, seconds, describe_missing(answer.removeprefix(MISSING).split(", ")))
        if time.monotonic() > until:
            raise meeting_error(coordinator, seconds, f"process 0 does not answer there: {reason}")
        time.sleep(POLL)


def meeting_error(where: str, seconds: float, reason: str) -> NoClusterError:
    """The error for processes that do not find each other."""
    proxies = [key for key in os.environ if key.lower() in ("http_proxy", "https_proxy", "all_proxy")]
    hint = f"; {', '.join(proxies)} set, which can keep processes apart" if proxies else ""
    return NoClusterError(f"the pod did not come together at {where} in {seconds:.0f} s ({reason}){hint}.")


def describe_missing(missing: Sequence[object]) -> str:
    """The processes that did not come, in words."""
    return f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))} did not come"


def listen(port: int) -> socket.socket:
    """A server at a port of this machine, a free one for 0, for IPv4 and, if available, IPv6."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)


@contextlib.contextmanager
def _listening(coordinator: str) -> Iterator[socket.socket]:
    try:
        server = listen(int(coordinator.rpartition(":")[2]))
    except OSError as error:
        # JAX might end this process by a signal.
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise NoClusterError(f"the pod cannot come together at {coordinator}: {reason}.") from None
    with server:
        yield server


def _process_index(message: bytes) -> int | None:
    """The number of the process that a connection is from, or None for a stranger."""
    name, _, index = message.strip().partition(b" ")
    try:
        return int(index) if name == b"podracer" else None
    except ValueError:
        return None


def _read_line(connection: socket.socket, until: float) -> str:
    """The line that process 0 sends, or as much of it as came before it closed.

    Raises:
      TimeoutError: if it is not complete in time.
    """
    buffer = b""
    while b"\n" not in buffer and len(buffer) < LONGEST:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        buffer += (data := connection.recv(4096))
        if not data:
            break
    return buffer.partition(b"\n")[0].decode(errors="replace").strip()
