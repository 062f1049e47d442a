"""Peers of the server that mean no good: garbage, silence, floods and sizes, and no effect on others."""

import collections
import concurrent.futures
import contextlib
import gzip
import os
import pathlib
import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from podracer.remote import descriptors
from podracer.remote.settings import Remote
from tests.support import workers
from tests.support.peers import (
    COUNTING,
    PREFACE,
    STREAM,
    connection,
    first_rows,
    frame,
    hello,
    learner,
    messages,
    opened,
    opening,
    packed,
    pb,
    peer,
    played,
    ready,
    server,
    status_of,
    wire,
)

grpc = pytest.importorskip("grpc")
NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def changed(rng, message):
    data = bytearray(message)
    for _ in range(rng.integers(1, 4)):
        data[rng.integers(len(data))] = rng.integers(256)
    return bytes(data[: rng.integers(len(data))] if rng.random() < 0.1 else data)


def mutated(where, number):
    """Sends Hello, Ready and Rows, of which one is mutated, and then garbage; returns the status's name."""
    rng, sound, which = np.random.default_rng(number), [hello(run=number), ready()], number % 3
    if which < 2:
        sound[which] = changed(rng, sound[which])
    with connection(where, STREAM + messages(*sound)) as made:
        if which == 2:
            made.sendall(messages(changed(rng, packed(opened(made), 0, first_rows()))))
        made.sendall(messages(b"\xff" * 20))
        found = status_of(made)
    return "none" if found is None else NAMES[found[0]]


def many_mutated(where, count):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return collections.Counter(pool.map(lambda number: mutated(where, number), range(2**40, 2**40 + count)))


def test_mutated_messages_have_a_status_each_and_leave_others_alone():
    mutate(150)


@pytest.mark.slow
@pytest.mark.nightly
def test_ten_thousand_mutated_messages_have_a_status_each_and_leave_others_alone():
    mutate(10_000)


def mutate(count):
    with learner(block=4) as made, contextlib.ExitStack() as stack:
        thread = workers.Thread(workers.Counting(), made.where, lanes=4)
        environment = made.make(4, 5)
        played(environment, 3)
        others = made.make(16, 9)
        rng = np.random.default_rng(1)
        starts = (b"", PREFACE, STREAM) * 5
        garbage = [stack.enter_context(connection(made.where, start + rng.bytes(500))) for start in starts]
        codes = many_mutated(made.where, count)
        # A message may be changed into Leave, which is a way to go. ABORTED ends the older of two streams of one run, such
        # as one whose number was changed into another's.
        assert codes.keys() <= {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "OK", "ABORTED"}, codes
        assert codes["ABORTED"] < 1 + count / 1000
        assert codes["OK"] < count / 50
        assert 0 <= made.metrics()["remote/rejected"] - (count - codes["OK"]) <= len(garbage)
        rows = played(environment, 11)
        assert not rows.scalars[2].all()
        assert made._hub.labelled()["breaks"][1].get("late") == 0
        assert environment._pool.live == 4
        others.close()
        environment.close()
    thread.join(5.0)
    assert thread.error is None


def test_connections_leave_files_for_the_run(monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 6)
    with learner() as made, contextlib.ExitStack() as stack:
        thread = workers.Thread(workers.Counting(), made.where)
        environment = made.make(4, 5)
        played(environment, 1)
        strangers = [stack.enter_context(connection(made.where)) for _ in range(20)]
        for each in strangers[6:]:
            each.settimeout(5.0)
            assert each.recv(1) == b"", "one too many is closed at once"
        played(environment, 5)
        environment.close()
    thread.join(5.0)
    assert thread.error is None


@pytest.mark.parametrize(
    ("soft", "hard", "left", "raised"),
    [
        (1024, 4096, 2048, 2560),
        (1024, resource.RLIM_INFINITY, 2048, 2560),
        (256, 1024, 512, 1024),
        (512, 512, 256, None),
        (9999, 9999, 2048, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2048, None),
    ],
)
def test_the_limit_of_open_files_is_raised_or_said(monkeypatch, capfd, soft, hard, left, raised):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    assert descriptors.room(2048) == left
    assert asked == ([(raised, hard)] if raised else [])
    if left < server.MAX_SESSIONS:
        with learner():
            said = f"room for {left} connections of workers; for more of them raise it before the learner starts"
            assert f"{said} (ulimit -n 2560)." in capfd.readouterr().err


def test_who_says_nothing_keeps_nobody_out():
    with learner() as made, contextlib.ExitStack() as stack:
        for start in (b"", PREFACE[:9], PREFACE) * server.MAX_SILENT:  # who has not even begun takes no place
            stack.enter_context(connection(made.where, start))
        silent = []
        # One after another, or the first to connect need not be the first to wait.
        for _ in range(server.MAX_SILENT + 5):
            before = list(made._server._silent)[-1:]
            silent.append(stack.enter_context(connection(made.where, STREAM)))
            until = time.monotonic() + 5.0
            while list(made._server._silent)[-1:] == before and time.monotonic() < until:
                time.sleep(0.002)
        thread = workers.Thread(workers.Counting(), made.where)
        environment = made.make(4, 5)
        begin = time.monotonic()
        played(environment, 5)
        assert time.monotonic() - begin < 5.0
        number, text = status_of(silent[0])
        assert (number, b"others wait" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], True)
        assert made._hub.labelled()["rejected"][1]["resource_exhausted"] >= 6
        environment.close()
    thread.join(5.0)
    assert thread.error is None


@pytest.mark.slow
def test_who_says_nothing_is_hung_up_on():
    with learner() as made, contextlib.ExitStack() as stack:
        begin = time.monotonic()
        idle = [stack.enter_context(connection(made.where, PREFACE)) for _ in range(60)]  # gRPC draws how long they may
        starts = {"socket": b"", "half a preface": PREFACE[:9], "HTTP/2": PREFACE, "stream": STREAM}
        starts["byte by byte"] = STREAM
        silent = {name: stack.enter_context(connection(made.where, data)) for name, data in starts.items()}
        spelt = hello()
        ends, codes = {}, {}

        def spell():
            for byte in b"\0" + len(spelt).to_bytes(4, "big") + spelt:
                if "byte by byte" in ends:
                    return
                silent["byte by byte"].sendall(frame(0, 0, 1, bytes((byte,))))
                time.sleep(0.5)

        def watch(name):
            codes[name] = status_of(silent[name])
            ends[name] = time.monotonic() - begin

        def watch_idle():
            for each in idle:
                status_of(each)
            ends["idle"] = time.monotonic() - begin

        threads = [threading.Thread(target=watch, args=(name,)) for name in silent]
        threads += [threading.Thread(target=each) for each in (watch_idle, spell)]
        for each in threads:
            each.start()
        worker = workers.Thread(workers.Counting(), made.where)
        environment = made.make(4, 5)
        played(environment, 5)
        assert time.monotonic() - begin < 8.0, "a worker joins meanwhile"
        for each in threads:
            each.join(30.0)
        assert ends.keys() == {*silent, "idle"}
        assert max(ends.values()) < 10.75, ends  # all limits are 10 s; the rest is for busy cores
        # One that answers no pings either is closed for that in the same second.
        found = {codes[name][0] for name in ("stream", "byte by byte") if codes[name]}
        late, gone = (code.value[0] for code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE))
        assert late in found <= {late, gone}
        played(environment, 5)
        environment.close()
    worker.join(5.0)
    assert worker.error is None


def resident():
    """MiB of this process."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def refused_by_its_header(where, most):
    for size in (most + 1, 2**31, 2**32 - 1):
        before = resident()
        with connection(where, STREAM) as bad:
            bad.sendall(frame(0, 0, 1, b"\0" + size.to_bytes(4, "big") + b"x" * 10_000))
            number, text = status_of(bad)
        assert (number, b"larger than max" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], True)
        assert resident() - before < 16.0


def test_what_says_that_it_is_large_is_not_waited_for():
    with learner() as made:
        refused_by_its_header(made.where, 64 * wire.Layout(COUNTING.spec).row_bytes + wire.OVERHEAD)


def test_what_is_packed_is_not_unpacked():
    bomb = gzip.compress(bytes(50 * 2**20))
    with learner() as made:
        before = resident()
        with connection(made.where, opening((b"grpc-encoding", b"gzip"))) as bad:
            data = b"\1" + len(bomb).to_bytes(4, "big") + bomb
            for at in range(0, len(data), 16384):
                bad.sendall(frame(0, 0, 1, data[at : at + 16384]))
            number, text = status_of(bad)
        assert (number, b"gzip" in text) == (grpc.StatusCode.UNIMPLEMENTED.value[0], True)
        assert resident() - before < 16.0


def test_what_is_large_is_refused_before_it_is_known_what_comes():
    made = server.Server(Remote(listen="127.0.0.1:0"), None, None)
    refused_by_its_header(made.where, 2**20)
    made.close(pb.Goodbye.FINISHED)


FLOOD = """
import contextlib, os, sys, time
from tests.support.peers import STREAM, connection, first_rows, hello, messages, opened, packed, pb, ready, status_of, wire

os.nice(19)  # it shares the cores with those that it is to disturb
where, kind, run, rows = sys.argv[1], sys.argv[2], 0, first_rows()
print("there", flush=True)
for line in sys.stdin:
    until, streams, sent = time.monotonic() + float(line), 0, 0
    while time.monotonic() < until:
        run, streams = run + 1, streams + 1
        with connection(where, STREAM) as bad:
            bad.sendall(messages(hello(run=run), ready()))
            number = opened(bad)
            if kind == "alives":
                spam, said = [wire.pack(pb.FromWorker(alive=pb.Alive()))] * 8000, b"a flood of messages."
            else:
                spam, said = [packed(number, i, rows) for i in range(400)], b"rows of step 1 came in step 0, READY."
            with contextlib.suppress(OSError):  # it is hung up on while it sends
                bad.sendall(messages(*spam))
            code, text = status_of(bad)
            assert (code, said in text) == (3, True), (code, text)
        sent += len(spam)
        time.sleep(0.05)
    print(streams, sent, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least"), [("alives", 10_000), ("rows", 1_000)])
def test_a_flood_ends_and_others_do_not_wait(kind, least):
    """It comes again and again, with all that gRPC has room for at once: more than `least` messages a second."""
    seconds = 0.5

    def slowest(environment):
        spent, until = [], time.monotonic() + seconds
        while (begin := time.monotonic()) < until:
            played(environment, 1)
            spent.append(time.monotonic() - begin)
        return np.quantile(spent, 0.99)

    with learner(block=4) as made:
        thread = workers.Thread(workers.Counting(), made.where, lanes=4)
        environment = made.make(4, 5)
        played(environment, 1)
        others = made.make(4, 9)  # the lanes that floods get
        command = [sys.executable, "-c", FLOOD, made.where, kind]
        variables = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        before, rounds, streams, held = [], [], 0, False
        with subprocess.Popen(command, env=variables, **pipes) as flood:
            assert flood.stdout.readline() == "there\n"
            # Until a round shows both, for other processes have the cores too. A round of under a millisecond still waits
            # now and then for as long as the interpreter, and the system likewise, lets a thread compute before another.
            while not held and len(rounds) < 20:
                before.append(slowest(environment))
                print(seconds, file=flood.stdin, flush=True)
                during = slowest(environment)
                ended, sent = map(int, flood.stdout.readline().split())
                streams += ended
                rounds.append((during, sent / seconds))
                held = sent > seconds * least and during < max(2 * min(before), sys.getswitchinterval())
            flood.stdin.close()
        assert held, (before, rounds)
        metrics = made.metrics()
        assert (metrics["remote/rejected"], metrics["remote/breaks"]) == (streams, 0)
        others.close()
        environment.close()
    thread.join(5.0)
    assert thread.error is None


def test_a_large_alive_is_not_kept():
    with learner() as made:
        environment = made.make(4, 5)
        with peer(made.where) as one:
            one.join()
            number = one.receive("open").block
            many = [number + 1 + i for i in range(5000)]
            one.send(alive=pb.Alive(block=[number, number, *many], busy_ms=[9000] * 5002))
            one.rows(number, 0, first_rows())
            environment.recv()
            (session,) = made._hub._sessions
            assert session.busy == f"block {number} has been at it for 9 s"
        environment.close()
