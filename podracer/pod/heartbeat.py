"""Heartbeats in a pod: each process learns within seconds that another one is gone, stuck or has failed.

Each process sends its status to process 0 every second. If one falls silent, raises an error or stays a round behind
the others for too long, process 0 ends the run in all and sends the reason. JAX by itself says nothing for minutes when
a Python exception ends one process: the others wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from podracer.errors import LOST
from podracer.pod import rendezvous
from podracer.system import console, stopping

BEAT = 1.0
"""Seconds between signs of life."""

GRACE = 3.0
"""Seconds for the main thread to end by itself, which it cannot do while it waits in a collective."""

AT_ONCE = 1.0
"""Seconds for the main thread to end after a second Ctrl-C."""

LONGEST = 8192
"""The most bytes of a line; a connection that sends more is no process of the pod."""

WORKING, WAITING = "training", "waiting for the others"
"""The statuses in which a process that stays a round behind the others is stuck; other work takes as long as it
takes."""


class Heartbeats:
    """The heartbeats of this process; a context.

    Args:
      index: number of this process.
      names: names of all processes for messages, by number.
      address: the second result of process 0's `offer`.
      silence: seconds without a heartbeat after which a process is lost.
      stall: seconds that a process may be a round behind the others; after a sixth of them process 0 prints whom it
        waits for.
      server: in process 0, the first result of `offer`.

    Attributes:
      stopping: True once another process has asked all to stop.
      ended: the reason why the run ends, once a process has ended it.
      was_printed: True once the reason has been printed.
    """

    def __init__(
        self,
        index: int,
        names: Sequence[str],
        address: dict[str, Any],
        *,
        silence: float,
        stall: float,
        server: socket.socket | None = None,
    ):
        self.ended: str | None = None
        self.was_printed = self.stopping = self._stop_sent = False
        self._index, self._names, self._token = index, names, address["token"]
        self._silence, self._stall = silence, stall
        self._status = _Status()
        self._late_since: dict[tuple[int, int], float] = {}
        self._named = 0
        self._left, self._news, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._leaving, self._deadline = False, math.inf
        self._interrupts, self._interrupted = 0, math.inf
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, _Member] = {}
        self._missing = set(range(1, len(names)))
        self._server, self._start = server, time.monotonic()
        self._zero: _Member | None = None
        if server is not None:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)
        else:
            self._zero = _Member(socket.create_connection((address["host"], address["port"]), timeout=silence), 0)
            self._zero.send({"token": self._token, "index": index})
            self._selector.register(self._zero.socket, selectors.EVENT_READ, self._zero)
        self._signals, self._wakeup = socket.socketpair()
        self._signals.setblocking(False)
        self._wakeup.setblocking(False)
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._watch, name="podracer-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeats:
        # A main thread that waits in a collective runs no handler of Python's: what comes is heard here.
        self._before = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def set_status(self, what: str, round: int) -> None:
        """Sets this process's status: its work, and the newest round of training that it is in or was in.

        A round begins where a process waits for all others: a process that is stuck before it is a round behind.
        """
        self._status = self._status.changed(what, round)

    def stop(self) -> None:
        """Asks all other processes to stop, so that none waits for its environments before it votes to."""
        if self._stop_sent:
            return
        self._stop_sent = True
        with self._lock:
            for member in self._others():
                member.send({"stop": True})

    def end(self, reason: str) -> None:
        """Ends the run in all other processes."""
        reason = reason[: LONGEST // 4]  # in JSON, too, less than a line may have
        with self._lock:
            self.ended = self.ended or reason
            for member in self._others():
                member.send({"end": reason})

    def wait(self, seconds: float) -> str | None:
        """Waits for another process to end the run; returns its reason, or None after `seconds`."""
        self._news.wait(seconds)
        return self.ended

    def __exit__(self, *exception: Any) -> None:
        """Leaves the pod. Process 0 leaves last if the run ends with an error, because JAX's key-value store ends with
        it."""
        self._leaving = True
        with self._lock:
            if not self.ended:
                for member in self._others():
                    member.send({"left": True})
        until = time.monotonic() + 2 * GRACE
        while self.ended and self._server is not None and time.monotonic() < until and self._others():
            time.sleep(0.05)
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
            self._before = None
        self._left.set()
        self._thread.join()
        for member in self._others():
            member.close()
        if self._server is not None:
            self._server.close()
        self._selector.close()
        self._signals.close()
        self._wakeup.close()

    def _others(self) -> list[_Member]:
        return list(self._members.values()) if self._zero is None else [self._zero]

    def _watch(self) -> None:
        beat = 0.0
        while not self._left.is_set():
            select_time = time.monotonic()
            for key, _ in self._selector.select(timeout=0.1):
                if key.fileobj is self._server:
                    self._accept()
                elif key.fileobj is self._signals:
                    self._handle_signals(self._signals.recv(64))
                else:
                    self._read(key.data)
            self._dismiss(select_time - rendezvous.SLOW)
            if time.monotonic() - beat >= BEAT:
                beat = time.monotonic()
                self._beat(beat)
            if time.monotonic() > self._deadline and not self._leaving:
                self._say()
                os._exit(LOST)  # the main thread waits for what will not come
            if time.monotonic() > self._interrupted and not self._leaving:
                self.end(f"{self._names[self._index]} was interrupted")
                console.say("podracer: error: interrupted; checkpoints, if there are any, are intact.", at_once=True)
                os._exit(130)

    def _handle_signals(self, signals: bytes) -> None:
        """Handles signals to this process: at the second Ctrl-C its main thread ends by itself if it can."""
        if not set(stopping.STOPPING).isdisjoint(signals):
            self.stop()
        self._interrupts += signals.count(signal.SIGINT)
        if self._interrupts > 1 and self._interrupted == math.inf:
            self._interrupted = time.monotonic() + AT_ONCE

    def _beat(self, now: float) -> None:
        own = self._status
        with self._lock:
            for member in self._others():
                member.send({"doing": own.doing, "round": own.round})
        if self.ended:
            return
        if self._zero is not None:
            if not self._zero.left and now - self._zero.heard_at > self._silence:
                self._store_end(
                    f"lost {self._names[0]}, the coordinator, which has been silent for {self._silence:.0f} s"
                )
            return
        last_heard = dict.fromkeys(self._missing, self._start)
        last_heard |= {i: member.heard_at for i, member in self._members.items() if not member.left}
        for index, time_heard in last_heard.items():
            if now - time_heard > self._silence:
                return self._declare_lost(index, f"has been silent for {self._silence:.0f} s")
        members = {i: member for i, member in self._members.items() if not member.left}
        states = {0: own} | {i: member.status for i, member in members.items()}
        ahead = max(status.round for status in states.values())
        late = {i: status for i, status in states.items() if status.round < ahead}
        # Since when others have been ahead: a round may take all of them as long as it takes.
        behind = {(i, status.round): now for i, status in late.items() if status.doing in (WORKING, WAITING)}
        self._late_since = {key: self._late_since.get(key, since) for key, since in behind.items()}
        for (index, round), since in self._late_since.items():
            # Who has missed a beat is on the way to be silent, which says more than stuck.
            silent = index in members and now - members[index].heard_at >= 2 * BEAT
            if now - since > self._stall and not silent:
                return self._declare_lost(
                    index, f"has been stuck in round {round} for {self._stall:.0f} s ({states[index].doing})"
                )
        if own.doing == WAITING and own.round > self._named and now - own.since > max(self._stall / 6, 2 * BEAT):
            self._named = own.round
            for index, status in late.items():
                console.say(f"podracer: waiting for {self._names[index]}: {status.doing}", at_once=True)

    def _declare_lost(self, index: int, cause: str) -> None:
        """Ends the run because process `index` is lost; in process 0."""
        reason = f"lost {self._names[index]}, which {cause}"
        self.end(reason)
        self._store_end(reason)
        self._say()

    def _store_end(self, reason: str) -> None:
        """Stores the reason why another process, or process 0's watch, has ended the run."""
        self.ended = self.ended or reason
        self._deadline = time.monotonic() + (GRACE if self._zero else GRACE + 1)
        self._news.set()

    def _say(self) -> None:
        if not self.was_printed:
            self.was_printed = True
            console.say(f"podracer: error: {self.ended}", at_once=True)

    def _accept(self) -> None:
        assert self._server is not None
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        strangers = len(self._selector.get_map()) - 2 - len(self._members)
        if strangers >= 2 * len(self._names):
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, _Member(connection, None))

    def _dismiss(self, since: float) -> None:
        """Closes connections from before `since` that have not introduced themselves."""
        for key in list(self._selector.get_map().values()):
            member = key.data
            if member is not None and member.index is None and member.connected_at < since:
                self._selector.unregister(member.socket)
                member.close()

    def _read(self, member: _Member) -> None:
        try:
            lines, open_ = member.receive()
            for line in lines:
                if member.index is None:
                    open_ = self._admit(member, line) and open_
                else:
                    self._take(member, line)
        except Exception:  # a stranger may say anything, and this thread must not end
            open_ = False
        if open_:
            return
        self._selector.unregister(member.socket)
        member.close()
        if member.index is None:
            return
        expected = member.left or self.ended
        if self._zero is None:
            del self._members[member.index]
        if not expected and self._zero is None:
            self._declare_lost(member.index, "is gone")
        elif not expected:
            self._store_end(f"lost {self._names[0]}, the coordinator, which is gone")
            self._say()  # JAX aborts before the main thread gets a word in

    def _admit(self, member: _Member, line: dict[str, Any]) -> bool:
        """Returns True if a stranger shows the pod's token and an index that is missing."""
        index = line.get("index")
        known = hmac.compare_digest(str(line.get("token")), self._token)
        if not known or index not in self._missing:
            return False
        member.index = index
        self._missing.remove(index)
        with self._lock:
            self._members[index] = member
            if self.ended:
                member.send({"end": self.ended})
        return True

    def _take(self, member: _Member, line: dict[str, Any]) -> None:
        if "end" in line and not self.ended:
            if self._zero is None:
                for other in self._others():
                    if other is not member:
                        other.send(line)
            self._store_end(str(line["end"]))
        if "stop" in line and not self.stopping:
            self.stopping = True
            if self._zero is None:
                for other in self._others():
                    if other is not member:
                        other.send(line)
        member.left |= "left" in line
        if "doing" in line:
            member.status = member.status.changed(str(line["doing"]), int(line["round"]))


class _Status(NamedTuple):
    """The status of a process: its work, its round of training, and the time since which it has been at that."""

    doing: str = "starting"
    round: int = 0
    since: float = 0.0

    def changed(self, doing: str, round: int) -> _Status:
        return self if (doing, round) == (self.doing, self.round) else _Status(doing, round, time.monotonic())


class _Member:
    """A connection: of process 0 to another process (or a stranger, of index None), or of that one to process 0."""

    def __init__(self, connection: socket.socket, index: int | None):
        self.socket, self.index = connection, index
        connection.settimeout(2.0)
        self.left, self.status = False, _Status()
        self.connected_at = self.heard_at = time.monotonic()
        self._rest = b""

    def send(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # its end is read as such
            self.socket.sendall(json.dumps(line).encode() + b"\n")

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """The complete lines that came, and False once the connection is closed.

        Raises:
          ValueError: for what is not a line of ours.
        """
        data = self.socket.recv(LONGEST)
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= LONGEST or (self.index is None and len(self._rest) > 256):
            raise ValueError("too long")
        self.heard_at = time.monotonic()
        lines = [json.loads(line) for line in whole]
        if not all(isinstance(line, dict) for line in lines):
            raise ValueError("not an object")
        return lines, bool(data)

    def close(self) -> None:
        self.socket.close()


def offer(host: str) -> tuple[socket.socket, dict[str, Any]]:
    """Process 0's listening socket, and its address for the others: host, port and a token."""
    local = host in ("localhost", "127.0.0.1")
    server = socket.create_server(("127.0.0.1", 0)) if local else rendezvous.listen(0)
    return server, {"host": host, "port": server.getsockname()[1], "token": secrets.token_hex(16)}
