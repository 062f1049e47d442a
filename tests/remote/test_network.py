"""A network that fails between a learner and its worker: frozen both ways, and cut in the middle of messages."""

import contextlib
import itertools
import socket
import threading
import time

import numpy as np
import pytest

from podracer.remote.settings import Remote
from tests.support import workers

pytest.importorskip("grpc")
pb = pytest.importorskip("podracer.remote.session_pb2")
RemoteEnvironments = pytest.importorskip("podracer.remote.environments").RemoteEnvironments
pytestmark = pytest.mark.slow


class Proxy:
    """Passes TCP on. `frozen` passes nothing on and closes nothing; `limits` are bytes after which one is cut.

    Bytes are those of the worker, or where they are negative, those of the learner.
    """

    def __init__(self, target, limits=()):
        self._target, self._limits = target, iter(limits)
        self.frozen, self.cuts = threading.Event(), 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = [self._listener]
        self.where = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.append(near)  # also where nobody answers at the other end
                host, port = self._target.rsplit(":", 1)
                far = socket.create_connection((host, int(port)))
                self._open.append(far)
                limit = next(self._limits, None)
                up, down = (None, -limit) if limit is not None and limit < 0 else (limit, None)
                threading.Thread(target=self._pass, args=(near, far, up), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, down), daemon=True).start()

    def _pass(self, source, to, limit):
        with contextlib.suppress(OSError):
            while data := source.recv(65536 if limit is None else max(1, min(limit, 65536))):
                while self.frozen.is_set():
                    time.sleep(0.05)
                if limit is not None:
                    limit -= len(data)
                    if limit < 0:
                        self.cuts += 1
                        break
                to.sendall(data)
                if limit == 0:
                    self.cuts += 1
                    break
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        for each in self._open:
            each.close()


@contextlib.contextmanager
def learner_behind_a_proxy(limits=()):
    settings = Remote(listen="127.0.0.1:0", join_timeout=60.0, block=2)
    made = RemoteEnvironments("counting", workers.Counting(), None, settings, answer_timeout=60.0, strict=False)
    proxy = Proxy(made.where, limits)
    try:
        yield made, proxy
    finally:
        made.close(pb.Goodbye.FINISHED)
        proxy.close()


class Checked:
    """Steps lanes for as long as it is told to, and checks every row against the one before."""

    def __init__(self, environment, lanes=4):
        self._environment, self._all = environment, np.arange(lanes)
        self._before, self._rng = None, np.random.default_rng(0)
        self.played, self.seeds = 0, set()

    def step(self):
        if self._before is not None:
            _, actions = self._before
            self._environment.send(self._all, actions)
        _, rows = self._environment.recv()
        first, last = rows.scalars[2] > 0, rows.scalars[3] > 0
        seed, number, shown = rows.observation.T
        if self._before is not None:
            (was_seed, was_number, was_last), actions = self._before
            np.testing.assert_array_equal(seed[~first], was_seed[~first])
            np.testing.assert_array_equal(number[~first], was_number[~first] + 1)
            np.testing.assert_array_equal(shown[~first], actions[~first])
            assert not np.any(was_last & ~first)
        np.testing.assert_array_equal(rows.scalars[0][first], 0)
        self._before = (seed, number, last), self._rng.integers(0, 2, len(first)).astype(np.int32)
        self.played += int((~first).sum())
        self.seeds.update(seed.tolist())


def test_a_connection_that_is_cut_inside_a_message_leaves_no_part_of_it():
    # Before and after it was welcomed in turn, for who is not waits longer and longer before it tries again.
    limits = (0, 800, 1, -1000, 9, 1300, -60, -1500, 300, 2500, -500, 4096)
    with learner_behind_a_proxy(limits) as (made, proxy):
        thread = workers.Thread(workers.Counting(), proxy.where, lanes=4, give_up_after=60.0)
        checked = Checked(made.make(4, 5))
        until = time.monotonic() + 120
        while proxy.cuts < len(limits) or checked.played < 2000:
            checked.step()
            assert time.monotonic() < until, f"{proxy.cuts} cuts, {checked.played} steps"
        metrics = made.metrics()
        assert metrics["remote/breaks"] >= 4, "some were cut while they played"
        assert metrics["remote/rejected"] == 0, "a cut is nobody's fault"
    thread.join(20.0)
    assert not thread.is_alive()
    assert thread.error is None


def test_a_network_that_falls_silent_is_noticed_on_both_sides(capfd):
    with learner_behind_a_proxy() as (made, proxy):
        thread = workers.Thread(workers.Counting(), proxy.where, lanes=4, give_up_after=90.0, quiet=False)
        checked = Checked(made.make(4, 5))
        for _ in range(50):
            checked.step()
        seeds = set(checked.seeds)
        proxy.frozen.set()
        begin = time.monotonic()
        said, noticed = "", {}
        while len(noticed) < 2:
            said += capfd.readouterr().err
            if not made.metrics()["remote/sessions"]:
                noticed.setdefault("learner", time.monotonic() - begin)
            if "trying again" in said:
                noticed.setdefault("worker", time.monotonic() - begin)
            assert time.monotonic() - begin < 25.0, f"noticed by {noticed} alone; {said}"
            time.sleep(0.1)
        assert max(noticed.values()) < 21.0, noticed
        thaw = time.monotonic()
        proxy.frozen.clear()
        played = checked.played
        while checked.played < played + 200:
            checked.step()
            assert time.monotonic() - thaw < 40.0, "the worker does not come back"
        assert len(checked.seeds) > len(seeds), "they are other episodes"
        assert made.metrics()["remote/breaks"] == 2
    thread.join(20.0)
    assert thread.error is None


def test_it_notices_what_it_should():
    """The checks themselves: a lane that repeats a row, or shows another's."""
    for wrong in ("repeat", "action", "seed"):
        environment = workers.Counting().make(4, 5)
        checked = Checked(environment)
        for number in itertools.count():
            if number == 3:
                if wrong == "repeat":
                    environment.send = lambda lanes, actions: None
                elif wrong == "seed":
                    environment.seed = environment.seed[::-1]
                else:
                    send = environment.send
                    environment.send = lambda lanes, actions, send=send: send(lanes, 1 - actions)
                with pytest.raises(AssertionError):
                    checked.step()
                break
            checked.step()
