"""What Prometheus reads of a learner's workers: text over HTTP."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Mapping, Sequence

from podracer.remote.settings import address

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
        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 5.0  # of a peer that says nothing

            def do_GET(self) -> None:
                if self.path != "/metrics":
                    self.send_error(404)
                    return
                body = (text(metrics(), labelled()) + "".join(f"{line}\n" for line in histograms())).encode()
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
