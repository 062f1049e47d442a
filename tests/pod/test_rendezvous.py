"""The rendezvous knows processes by number and ignores strangers; no JAX is started."""

import concurrent.futures
import contextlib
import socket
import time

import pytest

from podracer.pod import rendezvous
from podracer.pod.settings import NoClusterError
from tests.support import pods


@pytest.fixture
def address():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return f"127.0.0.1:{port}"


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield pool


def called(address):
    """A connection to an address, once somebody listens there."""
    host, _, port = address.rpartition(":")
    found = []

    def connects():
        with contextlib.suppress(OSError):
            found.append(socket.create_connection((host, int(port)), timeout=5))
        return found

    pods.until(connects, 5)
    return found[0]


def test_all_come(address, threads):
    early = threads.submit(rendezvous.attend, address, 2, 10)  # before anybody listens
    time.sleep(0.3)
    zero = threads.submit(rendezvous.hold, address, 3, 10)
    assert not early.done()
    rendezvous.attend(address, 1, 10)
    assert zero.result(5) is early.result(5) is None
    with socket.create_server(("", int(address.rpartition(":")[2]))):
        pass  # the port is JAX's now


def test_who_does_not_come_is_named_everywhere(address, threads):
    begin = time.monotonic()
    zero = threads.submit(rendezvous.hold, address, 4, 1)
    two = threads.submit(rendezvous.attend, address, 2, 1)
    for one in (zero, two):
        with pytest.raises(NoClusterError, match=rf"at {address} in 1 s \(processes 1, 3 did not come\)"):
            one.result(10)
    assert time.monotonic() - begin < 5


def test_a_coordinator_that_does_not_come_is_named(address):
    with pytest.raises(NoClusterError, match=rf"at {address} in 1 s \(process 0 does not answer there: "):
        rendezvous.attend(address, 1, 1)


def test_strangers_do_not_count(address, threads):
    zero = threads.submit(rendezvous.hold, address, 2, 20)
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"podracer x\n",
        b"other 1\n",
        b"podracer 2\n",
        b"podracer 0\n",
        b"\xff\n",
        b"",
    ):
        with called(address) as one:
            one.sendall(said)
            one.shutdown(socket.SHUT_WR)
            assert one.recv(10) == b"", said
    assert not zero.done()
    rendezvous.attend(address, 1, 10)
    assert zero.result(5) is None


def drip(connection, seconds=0.1):
    """Says a byte now and then, and never a line, while somebody listens."""
    with contextlib.suppress(OSError), connection:
        while True:
            connection.sendall(b"x")
            time.sleep(seconds)


def test_who_never_says_a_line_holds_nobody_up(address, threads):
    zero = threads.submit(rendezvous.hold, address, 2, 20)
    dripping = threads.submit(drip, called(address))
    begin = time.monotonic()
    rendezvous.attend(address, 1, 10)
    assert zero.result(5) is None
    assert time.monotonic() - begin < 1
    dripping.result(5)


def test_limits_hold_whoever_drips(address, threads, monkeypatch):
    monkeypatch.setattr(rendezvous, "SLOW", 0.2)
    begin = time.monotonic()
    zero = threads.submit(rendezvous.hold, address, 2, 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        one = threads.submit(rendezvous.attend, f"127.0.0.1:{other.getsockname()[1]}", 1, 0.5)
        threads.submit(drip, other.accept()[0])
        threads.submit(drip, called(address))
        for each in (zero, one):
            with pytest.raises(NoClusterError, match="process 1 did not come|does not answer there: timed out"):
                each.result(5)
    assert time.monotonic() - begin < 2


def test_a_port_that_is_taken(address):
    said = f"cannot come together at {address}: Address already in use"
    taken = socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))
    with taken, pytest.raises(NoClusterError, match=said):
        rendezvous.hold(address, 2, 1)
