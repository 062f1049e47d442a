"""Learners for tests, and peers of theirs that are written by hand: of gRPC, and of its bytes."""

import contextlib
import queue
import socket
import struct

import numpy as np
import pytest

from podracer.remote.settings import Remote
from tests.support import workers

grpc = pytest.importorskip("grpc")
pb = pytest.importorskip("podracer.remote.session_pb2")
server = pytest.importorskip("podracer.remote.server")
specs = pytest.importorskip("podracer.remote.specs")
wire = pytest.importorskip("podracer.remote.wire")
RemoteEnvironments = pytest.importorskip("podracer.remote.environments").RemoteEnvironments

COUNTING = workers.Counting()
FINISHED = pb.Goodbye.FINISHED


@contextlib.contextmanager
def learner(environments=COUNTING, options=None, **settings):
    made = RemoteEnvironments(
        "counting", environments, options, Remote(**{"listen": "127.0.0.1:0", "join_timeout": 20.0} | settings),
        answer_timeout=30.0, strict=False,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close(FINISHED)


def hello(lanes=4, run=1, protocol=wire.PROTOCOL):
    return wire.pack(pb.FromWorker(hello=pb.Hello(protocol=protocol, run=run, worker="by hand", lanes=lanes)))


def ready(spec=COUNTING.spec, options=""):
    return wire.pack(pb.FromWorker(ready=pb.Ready(spec=specs.to_proto(spec), options=options)))


def packed(block, step, rows):
    parts = wire.Layout(COUNTING.spec).pack_rows(rows)
    return wire.pack(pb.FromWorker(rows=pb.Rows(block=block, step=step)), parts)


def first_rows(n=4, **changes):
    rows = COUNTING.make(n, 0).recv()[1]
    for index, value in changes.get("scalars", {}).items():
        rows.scalars[index] = value
    if "observation" in changes:
        rows.observation[changes["observation"]] = np.nan
    return rows


def played(environment, steps):
    """The rows behind so many steps of all lanes."""
    lanes, rows = environment.recv()
    for _ in range(steps):
        environment.send(lanes, np.ones(len(lanes), np.int32))
        lanes, rows = environment.recv()
    return rows


class Peer:
    """A client written by hand."""

    def __init__(self, where, metadata=()):
        self.outgoing = queue.SimpleQueue()
        self.channel = grpc.insecure_channel(where, [("grpc.use_local_subchannel_pool", 1)])
        self.call = self.channel.stream_stream(server.METHOD)(
            iter(self.outgoing.get, None), timeout=20.0, metadata=metadata
        )

    def raw(self, data):
        self.outgoing.put(data)

    def send(self, **kind):
        self.raw(wire.pack(pb.FromWorker(**kind)))

    def rows(self, block, step, rows):
        self.raw(packed(block, step, rows))

    def join(self, run=1, **kwargs):
        self.raw(hello(run=run))
        assert self.receive("welcome").session
        self.raw(ready(**kwargs))

    def receive(self, kind):
        message, _ = wire.unpack(pb.ToWorker, next(self.call))
        assert message.WhichOneof("kind") == kind
        return getattr(message, kind)

    def status(self):
        """The status code that ends the stream."""
        with pytest.raises(grpc.RpcError) as raised:
            for _ in self.call:
                pass
        return raised.value.code(), raised.value.details()

    def play(self, environments, spoil, run=1):
        """Plays as a worker does, whose rows `spoil(step, rows)` changes; returns how that ends."""
        layout, blocks = wire.Layout(environments.spec), {}
        self.join(run=run, spec=environments.spec)
        try:
            for data in self.call:
                message, payload = wire.unpack(pb.ToWorker, data)
                if message.HasField("open"):
                    number, step = message.open.block, 0
                    blocks[number] = environments.make(message.open.lanes, message.open.seed)
                elif message.HasField("act"):
                    number, step = message.act.block, message.act.step + 1
                    lanes = blocks[number].lanes
                    blocks[number].send(lanes, layout.unpack_actions(payload, len(lanes)))
                else:
                    continue
                _, rows = blocks[number].recv()
                spoil(step, rows)
                self.raw(wire.pack(pb.FromWorker(rows=pb.Rows(block=number, step=step)), layout.pack_rows(rows)))
        except grpc.RpcError as error:
            return error.code(), error.details()

    def close(self):
        self.outgoing.put(None)
        self.channel.close()


@contextlib.contextmanager
def peer(where, **kwargs):
    made = Peer(where, **kwargs)
    try:
        yield made
    finally:
        made.close()


# HTTP/2 by hand


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _header(name, value):
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
HEADERS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", server.METHOD.encode()),
    (b":authority", b"x"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)


def opening(*more):
    """The bytes that open a connection, and a session in it."""
    return PREFACE + frame(1, 4, 1, b"".join(_header(*each) for each in (*HEADERS, *more)))


STREAM = opening()


def connection(where, data=b""):
    host, _, port = where.rpartition(":")
    made = socket.create_connection((host, int(port)), 30.0)
    made.sendall(data)
    return made


def messages(*parts):
    """Frames with messages of gRPC."""
    data = b"".join(b"\0" + len(part).to_bytes(4, "big") + part for part in parts)
    return b"".join(frame(0, 0, 1, data[at : at + 16384]) for at in range(0, len(data), 16384))


def opened(made):
    """The number of the first block that it gets."""
    with made.makefile("rb") as file:
        while head := file.read(9):
            data = file.read(int.from_bytes(head[:3], "big"))
            if head[3] == 0 and data:
                message, _ = wire.unpack(pb.ToWorker, memoryview(data)[5:])
                if message.HasField("open"):
                    return message.open.block
    return None


def status_of(made):
    """The status of gRPC at the end of a stream, as a number, and its text; None where it just hangs up."""
    got = b""
    with contextlib.suppress(OSError):
        while b"grpc-message" not in got and (data := made.recv(65536)):
            got += data
    if b"grpc-status" not in got:
        return None
    length = got.index(b"grpc-status") + len(b"grpc-status")
    return int(got[length + 1 : length + 1 + got[length]]), got.partition(b"grpc-message")[2]
