"""The metrics that Prometheus reads."""

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from podracer.remote import prometheus
from podracer.remote.histogram import BOUNDS, Histogram
from podracer.remote.prometheus import Exporter, text
from tests.support import workers


def test_gauges_and_counters():
    metrics = {"remote/sessions": 2.0, "remote/rows": 1e7 + 1, "remote/breaks": 3.0, "remote/loop_busy": 0.5}
    labelled = {"breaks": ("reason", {"left": 1.0, "late": 2.0}), "lanes": ("state", {"ready": 4.0})}
    assert text(metrics, labelled).splitlines() == [
        "# TYPE podracer_remote_sessions gauge",
        "podracer_remote_sessions 2",
        "# TYPE podracer_remote_rows_total counter",
        "podracer_remote_rows_total 10000001",
        "# TYPE podracer_remote_loop_busy_ratio gauge",
        "podracer_remote_loop_busy_ratio 0.5",
        "# TYPE podracer_remote_breaks_total counter",
        'podracer_remote_breaks_total{reason="left"} 1',
        'podracer_remote_breaks_total{reason="late"} 2',
        "# TYPE podracer_remote_lanes gauge",
        'podracer_remote_lanes{state="ready"} 4',
    ]


def test_histograms():
    histogram = Histogram()
    for seconds in (1e-5, 1e-4, 3e-4, 99.0):
        histogram.add(seconds)
    lines = histogram.lines("podracer_remote_round_seconds")
    assert lines[0] == "# TYPE podracer_remote_round_seconds histogram"
    buckets = [line.split() for line in lines[1:-2]]
    assert [name.partition("{")[2] for name, _ in buckets[:2]] == ['le="0.0001"}', 'le="0.00025"}']
    assert [int(count) for _, count in buckets] == [2, 2, *[3] * (len(BOUNDS) - 2), 4]
    assert buckets[-1][0].endswith('{le="+Inf"}')
    assert lines[-1] == "podracer_remote_round_seconds_count 4"
    assert float(lines[-2].split()[1]) == pytest.approx(99.00041)


def read(exporter):
    with urllib.request.urlopen(f"http://{getattr(exporter, 'where', exporter)}/metrics", timeout=5) as answer:
        return answer.read().decode()


def test_it_is_asked_anew_at_every_request_and_an_address_is_used_once():
    counts = iter(range(3))
    exporter = Exporter("127.0.0.1:0", lambda: {"remote/rows": float(next(counts))})
    for number in range(2):
        assert read(exporter).endswith(f"_total {number}\n")
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"http://{exporter.where}/")
    error.value.close()
    with pytest.raises(OSError, match="cannot listen at metrics=.*in use"):
        Exporter(exporter.where, dict)
    exporter.close()


def test_slow_peers_are_few_and_hold_nobody_up(monkeypatch):
    monkeypatch.setattr(prometheus, "PEERS", 4)
    exporter = Exporter("127.0.0.1:0", lambda: {"remote/rows": 1.0})
    host, _, port = exporter.where.partition(":")
    threads, peers = threading.active_count(), []
    for _ in range(8):
        peers.append(socket.create_connection((host, int(port)), timeout=5))
        peers[-1].sendall(b"G")
    assert [peer.recv(1) for peer in peers[:4]] == [b""] * 4, "those who came first are sent away"
    assert read(exporter).endswith("_total 1\n")
    assert threading.active_count() == threads
    peers[-1].sendall(b"ET /metrics HTTP/1.1\r\n\r\n")
    assert peers[-1].recv(12) == b"HTTP/1.0 200"
    exporter.close()
    for peer in peers:
        peer.close()


def test_a_request_has_a_time(monkeypatch):
    monkeypatch.setattr(prometheus, "SLOW", 0.3)
    exporter = Exporter("127.0.0.1:0", dict)
    host, _, port = exporter.where.partition(":")
    begin = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=0.05) as peer, contextlib.suppress(ConnectionError):
        while time.monotonic() - begin < 5:
            peer.sendall(b"G")
            with contextlib.suppress(TimeoutError):
                assert peer.recv(1) == b""
                break
    assert 0.2 < time.monotonic() - begin < 1
    exporter.close()


def test_who_reads_slowly_holds_nobody_up():
    histograms = ["x" * 99] * 200
    exporter = Exporter("127.0.0.1:0", dict, histograms=lambda: histograms)
    host, _, port = exporter.where.partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as peer:
        peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert len(read(exporter)) > 2e4
        with peer.makefile("rb") as answer:
            assert len(answer.read()) > 2e4
    exporter.close()


def test_an_error_is_told_and_ends_nothing():
    answers = iter([{}, {"remote/rows": 1.0}])
    exporter = Exporter("127.0.0.1:0", lambda: next(answers) or {}["rows"])
    with pytest.raises(urllib.error.HTTPError) as error:
        read(exporter)
    assert error.value.read() == b"KeyError: 'rows'\n"
    error.value.close()
    assert read(exporter).endswith("_total 1\n")
    exporter.close()


@pytest.mark.parametrize("host", ["[::1]", "localhost", "[::]"])
def test_addresses(host):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    exporter = Exporter(f"{host}:0", lambda: {"remote/rows": 1.0})
    port = exporter.where.rpartition(":")[2]
    for there in {"[::1]": ["[::1]"], "localhost": ["127.0.0.1"], "[::]": ["[::1]", "127.0.0.1"]}[host]:
        assert read(f"{there}:{port}").endswith("_total 1\n")
    exporter.close()


def test_a_learner_answers():
    pytest.importorskip("grpc")
    from podracer.remote.environments import RemoteEnvironments
    from podracer.remote.session_pb2 import Goodbye
    from podracer.remote.settings import Remote

    settings = Remote(listen="127.0.0.1:0", metrics="127.0.0.1:0")
    made = RemoteEnvironments("counting", workers.Counting(), None, settings, answer_timeout=9.0, strict=False)
    with urllib.request.urlopen(f"http://{made._exporter.where}/metrics") as answer:
        said = answer.read().decode()
        assert 'podracer_remote_lanes{state="stepping"} 0\n' in said
        assert 'podracer_remote_bytes_total{direction="up"} 0\n' in said
        assert 'podracer_remote_breaks_total{reason="late"} 0\n' in said
        assert 'podracer_remote_round_seconds_bucket{le="+Inf"} 0\n' in said
        assert "podracer_remote_loop_busy" in said
    made.close(Goodbye.FINISHED)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{made._exporter.where}/metrics")
