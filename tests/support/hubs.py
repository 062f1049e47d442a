"""Hubs on a clock of the test's, and workers that answer when they are told to."""

import numpy as np
import pytest

from podracer import spaces
from podracer.types import EnvSpec, HostStep

pytest.importorskip("grpc")

from podracer.remote import session_pb2 as pb
from podracer.remote import wire
from podracer.remote.blocks import Timeouts, WorkerSession
from podracer.remote.hub import Hub

SPEC = EnvSpec("mine", spaces.Box(0.0, 1e9, (1,)), spaces.Discrete(9))
LAYOUT = wire.Layout(SPEC)


class Clock:
    now = 0.0

    def __call__(self):
        self.now += 1e-4
        return self.now


class Peer:
    """A worker that answers when it is told to."""

    def __init__(self, hub, lanes, name="w"):
        self.hub, self.open, self.owed, self.ended = hub, {}, {}, None
        self.session = WorkerSession(name, lanes, self.take, self.end)
        self.gone = False
        hub.join(self.session)

    def end(self, why):
        self.ended, self.gone = why, True

    def take(self, data):
        message, payload = wire.unpack(pb.ToWorker, data)
        kind = message.WhichOneof("kind")
        if kind == "open":
            self.open[message.open.block] = message.open
            self.owed[message.open.block] = (0, None)
        elif kind == "act":
            n = self.open[message.act.block].lanes
            assert message.act.block not in self.owed, "two answers to the same rows"
            self.owed[message.act.block] = (message.act.step + 1, LAYOUT.unpack_actions(payload, n))
        elif kind == "close":
            self.open.pop(message.close.block)
            self.owed.pop(message.close.block, None)

    def answer(self, number, value=None, last=False):
        """Rows that show seed, step and action as one number."""
        step, actions = self.owed.pop(number)
        n = self.open[number].lanes
        first = np.full(n, step == 0)
        shown = np.full((n, 1), value if value is not None else step, np.float32)
        lasts = np.full(n, last)
        rows = HostStep.of(shown, np.where(first, 0.0, 1.0), ~(lasts | True), first, lasts)
        self.send(number, step, rows)
        return actions

    def send(self, number, step, rows):
        payload = memoryview(b"".join(LAYOUT.pack_rows(rows)))
        self.hub.rows(self.session, pb.Rows(block=number, step=step), payload)

    def leave(self):
        self.gone = True
        self.hub.leave(self.session, "gone")


def made(**timeouts):
    clock, said = Clock(), []
    hub = Hub(LAYOUT, Timeouts(**timeouts), "here:1", clock, said.append)
    return hub, clock, said


def shown(environment):
    lanes, rows = environment.recv()
    np.testing.assert_array_equal(lanes, np.arange(len(lanes)))
    return rows


def received(environment):
    lanes, _ = environment.recv()
    environment.send(lanes, np.zeros(len(lanes), np.int32))
    return lanes.tolist()
