"""What Prometheus reads of a learner's workers: text over HTTP."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Mapping, Sequence

from podracer.remote.settings import address

GAUGES = ("sessions", "lanes", "lanes_working", "lanes_ready", "batch_fill", "loop_busy")
"""Metrics that go up and down; the others are counted since the run began."""


def text(metrics: Mapping[str, float]) -> str:
    """Metrics `remote/NAME` in Prometheus's format: `podracer_remote_NAME`, and `_total` where they are counted."""
    lines = []
    for name, value in metrics.items():
        name = name.removeprefix("remote/")
        gauge = name in GAUGES
        label = f"podracer_remote_{name}" + ("" if gauge else "_total")
        lines += [f"# TYPE {label} {'gauge' if gauge else 'counter'}", f"{label} {value:.17g}"]
    return "\n".join(lines) + "\n"


class Exporter:
    """Answers `GET /metrics` until it is closed.

    Args:
      where: HOST:PORT.
      metrics: asked at every request.
      histograms: lines of others, asked likewise.

    Raises:
      OSError: where the address cannot be listened at.
    """

    def __init__(
        self,
        where: str,
        metrics: Callable[[], Mapping[str, float]],
        histograms: Callable[[], Sequence[str]] = lambda: (),
    ):
        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 5.0  # of a peer that says nothing

            def do_GET(self) -> None:
                if self.path != "/metrics":
                    self.send_error(404)
                    return
                body = (text(metrics()) + "".join(f"{line}\n" for line in histograms())).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        try:
            self._server = http.server.ThreadingHTTPServer(address(where), Handler)
        except OSError as error:
            raise OSError(f"remote: cannot listen at metrics={where}: {error.strerror}.") from error
        self._server.daemon_threads = True
        self.where = f"{where.rpartition(':')[0]}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="remote metrics", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
