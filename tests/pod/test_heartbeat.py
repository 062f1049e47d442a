"""Messages between processes beside JAX, and the strangers whom they ignore."""

import contextlib
import json
import signal
import socket
import time

import pytest

from podracer.pod import heartbeat
from tests.support import pods

NAMES = ["process 0 (a, pid 1)", "process 1 (b, pid 2)", "process 2 (c, pid 3)"]


@pytest.fixture
def lines(monkeypatch):
    """The ends of three processes, in one."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.05)
    monkeypatch.setattr(heartbeat.os, "_exit", lambda code: pytest.fail(f"left with {code}"))
    said = []
    monkeypatch.setattr(heartbeat.os, "write", lambda _, text: said.append(text.decode()))
    server, address = heartbeat.offer("127.0.0.1")
    with contextlib.ExitStack() as stack:

        def line(index, **settings):
            settings = {"silence": 5.0, "stall": 5.0} | settings
            one = heartbeat.Heartbeats(index, NAMES, address, server=None if index else server, **settings)
            return stack.enter_context(one)

        line.address, line.said = address, said
        yield line


def test_an_end_reaches_all(lines):
    zero, one, two = lines(0), lines(1), lines(2)
    pods.until(lambda: len(zero._members) == 2)
    one.end("process 1 has failed: its reason")
    for other in (zero, two):
        assert other.wait(20) == "process 1 has failed: its reason"
        assert not other.was_printed, "the main thread says it, where it can"


@pytest.mark.parametrize("index", [0, 2])
def test_a_wish_to_stop_reaches_all(lines, index):
    all_three = [lines(0), lines(1), lines(2)]
    pods.until(lambda: len(all_three[0]._members) == 2)
    all_three[index].stop()
    others = [line for i, line in enumerate(all_three) if i != index]
    pods.until(lambda: all(line.stopping for line in others), 5)
    assert not all_three[index].stopping
    assert all(line.ended is None for line in all_three)


def test_who_leaves_in_order_is_not_lost(lines):
    zero, _, one = lines(0), lines(2), lines(1)
    pods.until(lambda: len(zero._members) == 2)
    one.__exit__()
    time.sleep(0.3)
    assert zero.ended is None


def test_who_is_gone_is_named(lines):
    zero, one = lines(0), lines(1)
    lines(2)
    pods.until(lambda: len(zero._members) == 2)
    one._zero.socket.shutdown(socket.SHUT_RDWR)
    assert zero.wait(20) == f"lost {NAMES[1]}, which is gone"


def test_who_never_comes_is_named(lines):
    zero, one = lines(0, silence=0.5), lines(1)
    assert zero.wait(20) == one.wait(20) == f"lost {NAMES[2]}, which has been silent for 0 s"


def test_who_stays_behind_is_named(lines):
    zero, one, two = lines(0, stall=0.5), lines(1), lines(2)
    for each in (zero, one, two):
        each.set_status(heartbeat.WORKING, 1)
    zero.set_status("evaluating and saving", 2)
    one.set_status(heartbeat.WORKING, 2)
    assert zero.wait(20) == f"lost {NAMES[2]}, which has been stuck in round 1 for 0 s (training)"


def test_who_stays_out_of_what_others_wait_in_is_named(lines):
    """The others get no further than the round that one has not come to; process 0 says whom it waits for first."""
    zero, one, two = lines(0, stall=1.0), lines(1), lines(2)
    zero.set_status(heartbeat.WAITING, 2)
    one.set_status(heartbeat.WAITING, 2)
    two.set_status(heartbeat.WORKING, 1)
    assert zero.wait(20) == f"lost {NAMES[2]}, which has been stuck in round 1 for 1 s (training)"
    assert lines.said[0] == f"podracer: waiting for {NAMES[2]}: training\n"


def test_an_environment_may_take_longer(lines):
    """It has a limit of its own."""
    zero, one = lines(0, stall=0.3), lines(1)
    lines(2)
    one.set_status("waiting for its environments", 1)
    pods.until(lambda: len(zero._members) == 2 and zero._members[1].status.round == 1)
    zero.set_status(heartbeat.WAITING, 2)
    pods.until(lambda: lines.said, 5)
    assert f"podracer: waiting for {NAMES[1]}: waiting for its environments\n" in lines.said
    assert zero.wait(0.5) is None


def test_a_round_may_take_all_of_them_long(lines):
    """The first to finish it is ahead for a moment; nobody has been late for long."""
    zero, one, two = lines(0, stall=0.5), lines(1), lines(2)
    every = (zero, one, two)
    for each in every:
        each.set_status(heartbeat.WAITING, 1)
    pods.until(lambda: [m.status.round for m in zero._members.values()] == [1, 1])
    time.sleep(0.7)
    zero.set_status(heartbeat.WAITING, 2)
    assert zero.wait(0.2) is None
    one.set_status(heartbeat.WORKING, 2)
    two.set_status(heartbeat.WORKING, 2)
    assert zero.wait(0.8) is None


def test_who_is_silent_is_not_called_stuck(lines):
    """It was behind when it fell silent, for longer than would make it stuck."""
    zero, one, two = lines(0, silence=1.0, stall=0.3), lines(1), lines(2)
    for each in (one, two):
        each.set_status(heartbeat.WORKING, 1)
    pods.until(lambda: {1, 2} == set(zero._members) and zero._members[2].status.round == 1)
    two._left.set()  # ends its watch, not its connection
    two._thread.join()
    zero.set_status(heartbeat.WORKING, 2)
    one.set_status(heartbeat.WORKING, 2)
    assert zero.wait(20) == f"lost {NAMES[2]}, which has been silent for 1 s"


def test_strangers_are_not_listened_to(lines):
    zero, one = lines(0), lines(1)
    address = (lines.address["host"], lines.address["port"])
    wrong = {"token": "0" * 32, "index": 2}
    taken = {"token": lines.address["token"], "index": 1}
    none = {"token": lines.address["token"], "index": 3}
    said = [b"\xff\x00garbage\n", b"[]\n", b'"x"\n', b"GET / HTTP/1.1\r\n\r\n", b"x" * 300]
    said += ['{"token": "é"}\n'.encode(), b"[" * 8000 + b"\n"]
    said += [json.dumps(line).encode() + b"\n" for line in (wrong, taken, none, {}, wrong | {"token": None})]
    for line in said:
        with socket.create_connection(address, timeout=5) as stranger:
            stranger.sendall(line)
            assert stranger.recv(100) == b"", "the connection is closed"
    silent = [socket.create_connection(address, timeout=5) for _ in range(3 * len(NAMES))]
    refused = silent[2 * len(NAMES) :]
    assert all(stranger.recv(100) == b"" for stranger in refused), "no more than twice as many as there are processes"
    for stranger in silent:
        stranger.close()
    time.sleep(0.3)
    two = lines(2)
    pods.until(lambda: len(zero._members) == 2)
    assert zero.ended is one.ended is two.ended is None


def test_strangers_that_are_silent_make_room(lines, monkeypatch):
    monkeypatch.setattr(heartbeat.rendezvous, "SLOW", 0.3)
    zero = lines(0)
    with contextlib.ExitStack() as stack:
        address = (lines.address["host"], lines.address["port"])
        for _ in range(2 * len(NAMES)):
            stranger = stack.enter_context(socket.create_connection(address, timeout=5))
        assert stranger.recv(100) == b"", "the connection is closed"
        _ = lines(1), lines(2)
        pods.until(lambda: len(zero._members) == 2, 5)


def test_a_second_interrupt_ends_a_process_that_cannot_hear_it(lines, monkeypatch):
    """Its main thread waits in a collective."""
    monkeypatch.setattr(heartbeat, "AT_ONCE", 0.2)
    codes = []
    monkeypatch.setattr(heartbeat.os, "_exit", codes.append)
    zero, one = lines(0), lines(1)
    lines(2)
    one._wakeup.send(bytes([signal.SIGINT]))
    pods.until(lambda: zero.stopping, 5)
    time.sleep(0.4)
    assert not codes
    one._wakeup.send(bytes([signal.SIGINT]))
    assert zero.wait(20) == f"{NAMES[1]} was interrupted"
    pods.until(lambda: codes, 5)
    assert codes[0] == 130
    assert "podracer: error: interrupted; checkpoints, if there are any, are intact.\n" in lines.said


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("at", ["127.0.0.1", "::1"])
def test_process_0_is_reached_by_either_protocol(at):
    server, address = heartbeat.offer("host")
    with server, socket.create_connection((at, address["port"]), timeout=5):
        pass
