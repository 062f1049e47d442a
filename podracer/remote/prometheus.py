"""Metrics of a learner's workers for Prometheus: text over HTTP."""

from __future__ import annotations

import contextlib
import http
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podracer.remote.settings import address
from podracer.system.callers import Callers

SLOW = 5.0
"""Seconds that a peer has for its request."""

PEERS = 32
"""Connections at a time whose request has not come."""

Labelled = Mapping[str, tuple[str, Mapping[str, float]]]
"""By name, a label and a number for each of its values."""

GAUGES = ("sessions", "lanes", "batch_fill", "loop_busy_ratio")
"""Metrics that go up and down; the others are counted since the run began."""

NAMES = {"loop_busy": "loop_busy_ratio"}
IN_LABELS = ("lanes", "lanes_working", "lanes_ready", "breaks", "rejected", "bytes_up", "bytes_down")
"""Metrics that `Hub.labelled` has in more detail."""


def text(metrics: Mapping[str, float], labelled: Labelled) -> str:
    """Metrics `remote/NAME` in Prometheus's format: `podracer_remote_NAME`, and `_total` where they are counted."""
    plain = {name.removeprefix("remote/"): value for name, value in metrics.items()}
    series = {NAMES.get(name, name): {"": value} for name, value in plain.items() if name not in IN_LABELS}
    for name, (label, values) in labelled.items():
        series[name] = {f'{{{label}="{kind}"}}': x for kind, x in values.items()}
    lines = []
    for name, values in series.items():
        full = f"podracer_remote_{name}" + ("" if name in GAUGES else "_total")
        lines.append(f"# TYPE {full} {'gauge' if name in GAUGES else 'counter'}")
        lines += [f"{full}{label} {value:.17g}" for label, value in values.items()]
    return "\n".join(lines) + "\n"


class Exporter:
    """Answers `GET /metrics` until it is closed.

    Args:
      where: HOST:PORT.
      metrics: asked at every request.
      labelled: those with a label, asked likewise.
      histograms: lines of others, asked likewise.

    Raises:
      OSError: where the address cannot be listened at.
    """

    def __init__(
        self,
        where: str,
        metrics: Callable[[], Mapping[str, float]],
        labelled: Callable[[], Labelled] = dict,
        histograms: Callable[[], Sequence[str]] = lambda: (),
    ):
        try:
            self._server = _listen(*address(where))
        except OSError as error:
            raise OSError(f"remote: cannot listen at metrics={where}: {error.strerror}.") from error
        self._metrics, self._labelled, self._histograms = metrics, labelled, histograms
        self.where = f"{where.rpartition(':')[0]}:{self._server.getsockname()[1]}"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="remote metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        limits: dict[str, Any] = {"longest": 8192, "seconds": SLOW, "most": PEERS}
        with self._server, Callers(self._server, ending=b"\r\n\r\n", **limits) as callers:
            while not self._closed.is_set():
                for connection, request in callers.heard(0.2):
                    with connection, contextlib.suppress(OSError):
                        # Some kilobytes, which fit into the system's buffer: who reads slowly is not waited for.
                        connection.sendall(self._answer(request))

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b"\r\n")[0].partition(b" ")
        if method != b"GET":
            return _response(http.HTTPStatus.METHOD_NOT_ALLOWED)
        if rest.partition(b" ")[0].partition(b"?")[0] != b"/metrics":
            return _response(http.HTTPStatus.NOT_FOUND)
        try:
            lines = "".join(f"{line}\n" for line in self._histograms())
            return _response(http.HTTPStatus.OK, text(self._metrics(), self._labelled()) + lines)
        except Exception as error:  # this thread must not end
            return _response(http.HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n")


def _response(status: http.HTTPStatus, body: str = "") -> bytes:
    head = f"HTTP/1.0 {status.value} {status.phrase}\r\nContent-Type: text/plain; version=0.0.4\r\n"
    return f"{head}Content-Length: {len(body.encode())}\r\n\r\n{body}".encode()


def _listen(host: str, port: int) -> socket.socket:
    """A server at an address of this machine; IPv4 where a name stands for both, and both at [::]."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, where = min(found, key=lambda each: each[0] != socket.AF_INET)
    both = where[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, dualstack_ipv6=both)
