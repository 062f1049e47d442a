"""The server's life: silence, clocks that jump, peers that are gone, errors of its own, and the end of its threads."""

import asyncio
import gc
import threading
import time

import numpy as np
import pytest

from podracer.errors import Closed
from podracer.remote.settings import Remote
from tests.support import workers
from tests.support.peers import FINISHED, hello, learner, peer, played

pytest.importorskip("grpc")
server = pytest.importorskip("podracer.remote.server")
worker = pytest.importorskip("podracer.remote.worker")


def test_who_is_not_ready_hears_goodbye():
    with learner() as made, peer(made.where) as one:
        one.raw(hello())
        assert one.receive("welcome").session
        made.close(FINISHED)
        assert one.receive("goodbye").why == FINISHED


def test_a_learner_that_does_not_answer_is_tried_again(monkeypatch, capfd):
    serve, streams = server.Server._serve, []

    async def once_silent(self, stream, session):
        streams.append(stream)
        await (asyncio.sleep(60.0) if len(streams) == 1 else serve(self, stream, session))

    def slow(made, theirs):
        time.sleep(0.7)  # longer than an answer may take
        return workers.Counting()

    monkeypatch.setattr(server.Server, "_serve", once_silent)
    monkeypatch.setattr(worker, "WELCOME_SECONDS", 0.5)
    monkeypatch.setattr(worker._Made, "__call__", slow)
    with learner() as made:
        thread = workers.Thread(workers.Counting(), made.where, name="w", quiet=False)
        environment = made.make(4, 5)
        played(environment, 3)
        *tries, joined = capfd.readouterr().err.splitlines()
        assert set(tries) == {f"w: {made.where} has not answered for 0.5 s; trying again."}
        assert joined == f"w: connected to {made.where}."
        environment.close()
    thread.join(5.0)
    assert thread.error is None


def test_what_the_environment_is_is_waited_for_as_long_as_is_said():
    made, begin = server.Server(Remote(listen="127.0.0.1:0"), None, None), time.monotonic()
    assert made.wait_for_spec(0.2) is None
    assert 0.2 <= time.monotonic() - begin < 5.0
    made.close(FINISHED)


def test_a_clock_that_jumps_changes_nothing(monkeypatch):
    real, step = time.time, 2 * server.TICK_SECONDS  # longer than it takes to look who is late
    with learner() as made:
        thread = workers.Thread(workers.Counting(misbehave=lambda _: time.sleep(step)), made.where)
        environment = made.make(4, 5)
        environment.recv()
        for hours in (1, -1):
            environment.send(np.arange(4), np.ones(4, np.int32))
            monkeypatch.setattr(time, "time", lambda hours=hours: real() + 3600 * hours)
            _, rows = environment.recv()
            assert not rows.scalars[2].any()
        metrics = made.metrics()
        assert (metrics["remote/breaks"], metrics["remote/rejected"], metrics["remote/sessions"]) == (0, 0, 1)
        environment.close()
    thread.join(5.0)
    assert thread.error is None


def test_ten_workers_and_a_shutdown_in_the_middle():
    with learner(block=1) as made:
        threads = [workers.Thread(workers.Counting(), made.where, lanes=1) for _ in range(10)]
        environment = made.make(10, 5)
        ended = []

        def act():
            try:
                for _ in range(10):
                    played(environment, 10)
                    environment.send(np.arange(10), np.ones(10, np.int32))
                made.close(FINISHED)
                played(environment, 10_000)
            except Closed:
                ended.append(True)

        actor = threading.Thread(target=act)
        actor.start()
        for each in threads:
            each.join(30.0)
            assert (each.is_alive(), each.error) == (False, None)
        assert made.metrics()["remote/rows"] >= 1000
        actor.join(10.0)  # it is woken
        assert ended
        made.close(FINISHED)  # a second time is none
        with pytest.raises(RuntimeError, match="have been sent home"):
            made.make(10, 5)
        with learner(listen=made.where):  # the address is free again
            pass


def test_threads_end_with_the_learner():
    """But for the loop, and gRPC's own, which the first learner starts, and which end a little after a call."""
    counts: list[int] = []
    for _ in range(4):
        with learner() as made:
            thread = workers.Thread(workers.Counting(), made.where)
            environment = made.make(4, 5)
            played(environment, 2)
            environment.close()
        thread.join(5.0)
        counts.append(threading.active_count())
    until = time.monotonic() + 5.0
    while threading.active_count() > counts[0] and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= counts[0]


def test_who_goes_before_it_is_ready_is_no_error(caplog):
    with learner() as made:
        for run in range(30):
            with peer(made.where) as one:
                one.raw(hello(run=run))
                assert one.receive("welcome")
                one.call.cancel()
        until = time.monotonic() + 5.0
        while made._server._live and time.monotonic() < until:
            time.sleep(0.01)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_an_error_while_it_looks_who_is_late_ends_no_timeouts(monkeypatch, caplog):
    monkeypatch.setattr(server, "TICK_SECONDS", 0.01)
    with learner() as made:
        tick, ticks = made._hub.tick, []

        def fail():
            ticks.append(tick())
            raise KeyError("of ours")

        made._hub.tick = fail
        until = time.monotonic() + 5.0
        while len(ticks) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert len(ticks) >= 3
    assert caplog.text.count("KeyError: 'of ours'") == 1, "it is said once, not with every look"


def test_a_peer_that_is_gone_is_no_error(caplog):
    """gRPC raises where it has to tell the status of a stream to nobody."""
    gone = type("ExecuteBatchError", (Exception,), {})("Failed")
    with learner() as made:
        loop = made._server._loop.loop
        for error in (gone, ValueError("of ours")):
            loop.call_soon_threadsafe(loop.call_exception_handler, {"message": "an error", "exception": error})
        until = time.monotonic() + 5.0
        while "of ours" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
    assert "of ours" in caplog.text
    assert "Failed" not in caplog.text
