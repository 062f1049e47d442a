"""The server of remote environments against peers that are wrong: one status each, and no effect on others."""

import contextlib
import queue
import socket
import threading
import time

import numpy as np
import pytest
import workers

from podracer.remote.settings import Remote

grpc = pytest.importorskip("grpc")
pb = pytest.importorskip("podracer.remote.session_pb2")
server = pytest.importorskip("podracer.remote.server")
wire = pytest.importorskip("podracer.remote.wire")
worker = pytest.importorskip("podracer.remote.worker")
RemoteEnvironments = pytest.importorskip("podracer.remote.environments").RemoteEnvironments

COUNTING = workers.Counting()
TOKEN = b"a secret of sixteen bytes"


@contextlib.contextmanager
def learner(environments=COUNTING, options=None, **settings):
    made = RemoteEnvironments(
        "counting", environments, options, Remote(**{"listen": "127.0.0.1:0", "join_timeout": 20.0} | settings),
        answer_timeout=settings.pop("answer_timeout", 30.0), strict=False,
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close(pb.Goodbye.FINISHED)


class Peer:
    """A client written by hand."""

    def __init__(self, where, metadata=(), credentials=None):
        self.outgoing = queue.SimpleQueue()
        self.channel = grpc.insecure_channel(where, [("grpc.use_local_subchannel_pool", 1)])
        self.call = self.channel.stream_stream(server.METHOD)(iter(self.outgoing.get, None), metadata=metadata)

    def send(self, **kind):
        self.raw(wire.pack(pb.FromWorker(**kind)))

    def raw(self, data):
        self.outgoing.put(data)

    def hello(self, lanes=4, run=1, protocol=wire.PROTOCOL):
        self.send(hello=pb.Hello(protocol=protocol, run=run, worker="by hand", lanes=lanes))

    def ready(self, spec=COUNTING.spec, options=""):
        assert self.receive("welcome").session
        self.send(ready=pb.Ready(spec=wire.spec_to_proto(spec), options=options))

    def receive(self, kind):
        message, _ = wire.unpack(pb.ToWorker, next(self.call))
        assert message.WhichOneof("kind") == kind
        return getattr(message, kind)

    def rows(self, block, step, rows):
        parts = wire.Layout(COUNTING.spec).pack_rows(rows)
        self.raw(wire.pack(pb.FromWorker(rows=pb.Rows(block=block, step=step)), parts))

    def status(self):
        """How the stream ends."""
        with pytest.raises(grpc.RpcError) as raised:
            for _ in self.call:
                pass
        return raised.value.code(), raised.value.details()

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


def played(environment, steps):
    """Steps that all lanes were played."""
    lanes, rows = environment.recv()
    for _ in range(steps):
        environment.send(lanes, np.ones(len(lanes), np.int32))
        lanes, rows = environment.recv()
    return rows


def first_rows(n=4, **changes):
    rows = COUNTING.make(n, 0).recv()[1]
    for index, value in changes.get("scalars", {}).items():
        rows.scalars[index] = value
    if "observation" in changes:
        rows.observation[changes["observation"]] = np.nan
    return rows


def test_rows_cross_in_both_directions():
    with learner() as made:
        thread = workers.Thread(workers.Counting(), made.where)
        environment = made.make(8, 5)
        rows = played(environment, 7)
        local = workers.Counting().make(8, 5)
        expected = played(local, 7)
        np.testing.assert_array_equal(rows.scalars, expected.scalars)
        np.testing.assert_array_equal(rows.observation, expected.observation)
        environment.close()
    thread.join(5.0)
    assert thread.error is None


WRONG = {
    "rows": (lambda p: p.rows(0, 1, first_rows()), "rows of step 1 came in step -1"),
    "another block": (lambda p: p.rows(7, 0, first_rows()), "block 7, which was never opened"),
    "too few lanes": (lambda p: p.rows(0, 0, first_rows(3)), "rows of 4 lanes have"),
    "a reward that is no number": (lambda p: p.rows(0, 0, first_rows(scalars={(0, 2): np.nan})), "lane 2: reward is nan"),
    "an observation that is none": (lambda p: p.rows(0, 0, first_rows(observation=(1, 0))), "lane 1: observation"),
    "not first": (lambda p: p.rows(0, 0, first_rows(scalars={(2, 3): 0.0})), "lane 3: first is 0"),
    "hello again": (lambda p: p.hello(), "does not belong here: hello"),
    "nothing": (lambda p: p.send(), "does not belong here: None"),
    "garbage": (lambda p: p.raw(b"\xff" * 40), "40 bytes are no FromWorker"),
    "a flood": (lambda p: [p.send(alive=pb.Alive()) for _ in range(500)], "a flood of messages"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_breaks_the_protocol_ends_one_stream(wrong, capfd):
    do, said = WRONG[wrong]
    with learner(block=4) as made:
        thread = workers.Thread(workers.Counting(), made.where, lanes=4, name="sound")
        environment = made.make(4, 5)
        played(environment, 3)
        # Another's lanes, that nobody else has room for.
        other = made.make(4, 9)
        with peer(made.where) as bad:
            bad.hello()
            bad.ready()
            number = bad.receive("open").block
            original = bad.rows
            bad.rows = lambda block, step, rows: original(number if block == 0 else block + number, step, rows)
            do(bad)
            code, details = bad.status()
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert said.replace("block 7", f"block {7 + number}") in details
        rows = played(environment, 4)
        assert not rows.scalars[2].all(), "the other worker goes on"
        assert "worker by hand broke the protocol" in capfd.readouterr().err
        assert made.metrics()["remote/rejected"] == 1
        other.close()
        environment.close()
    thread.join(5.0)
    assert thread.error is None


def test_refusals_name_both_sides_and_are_final():
    with learner(options='{"sticky": 0.25}') as made:
        with peer(made.where) as old:
            old.hello(protocol=2)
            code, details = old.status()
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert "protocol 2 there" in details
            assert f"and {wire.PROTOCOL} here" in details
        with peer(made.where) as other:
            other.hello()
            other.ready(workers.Counting(length=9).spec)
            code, details = other.status()
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert "max_episode_steps is 9 there and 5 here" in details
        with peer(made.where) as other:
            other.hello()
            other.ready(options='{"sticky": 0.0}')
            assert "sticky is 0.0 there and 0.25 here" in other.status()[1]
        with pytest.raises(worker.RefusedError, match="max_episode_steps is 9 there"):
            worker.serve_envs(workers.Counting(length=9), made.where, quiet=True)


def test_of_one_process_the_older_stream_ends():
    with learner() as made, peer(made.where) as one, peer(made.where) as two:
        one.hello()
        one.ready()
        two.hello()
        two.ready()
        assert one.status() == (grpc.StatusCode.ABORTED, "the same process has come again.")
        environment = made.make(4, 0)
        assert two.receive("open").lanes == 4
        environment.close()


def test_a_token_is_asked_for(tmp_path, capfd):
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    (tmp_path / "other").write_bytes(b"another secret of many bytes")
    with learner(token_file=str(tmp_path / "token")) as made:
        with pytest.raises(worker.RefusedError, match="the token is missing or wrong"):
            worker.serve_envs(COUNTING, made.where, token_file=str(tmp_path / "other"), quiet=True)
        with pytest.raises(worker.RefusedError, match="the token is missing or wrong"):
            worker.serve_envs(COUNTING, made.where, quiet=True)
        thread = workers.Thread(workers.Counting(), made.where, token_file=str(tmp_path / "token"))
        environment = made.make(4, 5)
        played(environment, 2)
        environment.close()
    thread.join(5.0)
    assert thread.error is None
    with learner(token_file=str(tmp_path / "token")) as made:
        for _ in range(5):
            with peer(made.where) as wrong:
                wrong.hello()
                assert wrong.status()[0] == grpc.StatusCode.UNAUTHENTICATED
        with peer(made.where, metadata=[("authorization", f"Bearer {TOKEN.decode()}")]) as right:
            right.hello()
            assert right.status()[0] == grpc.StatusCode.UNAUTHENTICATED, "nobody guesses on"
    assert TOKEN.decode() not in capfd.readouterr().err
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(ValueError, match="holds 5 bytes"):
        worker.serve_envs(COUNTING, "127.0.0.1:1", token_file=str(tmp_path / "short"))


def test_certificates(tmp_path, capfd):
    trustme = pytest.importorskip("trustme")
    ca, strange = trustme.CA(), trustme.CA()
    for name, authority in (("server", ca), ("client", ca), ("stranger", strange)):
        made = authority.issue_cert("learner.example", "127.0.0.1")
        made.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        for blob in made.cert_chain_pems:
            blob.write_to_path(tmp_path / f"{name}.crt", append=True)
    for name, authority in (("ca", ca), ("strange", strange)):
        authority.cert_pem.write_to_path(tmp_path / f"{name}.crt")
    file = lambda name: str(tmp_path / name)  # noqa: E731
    secured = {"tls_cert": file("server.crt"), "tls_key": file("server.key"), "client_ca": file("ca.crt")}
    mine = {"tls_cert": file("client.crt"), "tls_key": file("client.key")}
    with learner(**secured) as made:
        thread = workers.Thread(workers.Counting(), made.where, tls_ca=file("ca.crt"), **mine)
        environment = made.make(4, 5)
        played(environment, 2)
        for wrong in (
            {"tls_ca": file("strange.crt"), **mine},
            {"tls_ca": file("ca.crt")},
            {"tls_ca": file("ca.crt"), "tls_cert": file("stranger.crt"), "tls_key": file("stranger.key")},
            {"tls_ca": file("ca.crt"), "tls_name": "elsewhere.example", **mine},
            {},
        ):
            with pytest.raises(worker.LearnerError, match="no learner at"):
                worker.serve_envs(COUNTING, made.where, name="stranger", give_up_after=0.2, **wrong)
        played(environment, 2)
        environment.close()
    thread.join(5.0)
    assert thread.error is None
    assert "stranger: unavailable" in capfd.readouterr().err


def test_a_taken_port_is_said():
    with learner() as made, pytest.raises(OSError, match=rf"cannot listen at {made.where}: the address is in use"):
        RemoteEnvironments("counting", COUNTING, None, Remote(listen=made.where), answer_timeout=1.0, strict=False)


def test_who_says_nothing_keeps_nobody_out(monkeypatch):
    monkeypatch.setattr(server, "HELLO_SECONDS", 1.0)
    with learner() as made:
        host, _, port = made.where.rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(64)]
        with contextlib.ExitStack() as stack:
            mute = [stack.enter_context(peer(made.where)) for _ in range(8)]
            thread = workers.Thread(workers.Counting(), made.where)
            environment = made.make(4, 5)
            begin = time.monotonic()
            played(environment, 5)
            assert time.monotonic() - begin < 5.0
            assert {each.status()[0] for each in mute} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        environment.close()
        for each in silent:
            each.close()
    thread.join(5.0)
    assert thread.error is None


def test_hundreds_of_mutated_messages_leave_others_alone():
    rng = np.random.default_rng(0)
    sound = [
        wire.pack(pb.FromWorker(hello=pb.Hello(protocol=1, run=9, worker="x", lanes=4))),
        wire.pack(pb.FromWorker(ready=pb.Ready(spec=wire.spec_to_proto(COUNTING.spec)))),
        wire.pack(pb.FromWorker(rows=pb.Rows()), wire.Layout(COUNTING.spec).pack_rows(first_rows())),
    ]
    with learner() as made:
        thread = workers.Thread(workers.Counting(), made.where, lanes=4)
        environment = made.make(4, 5)
        for _ in range(60):
            with peer(made.where) as bad:
                for message in sound:
                    changed = bytearray(message)
                    for _ in range(rng.integers(0, 3)):
                        changed[rng.integers(len(changed))] = rng.integers(256)
                    bad.raw(bytes(changed))
                bad.raw(b"\xff" * 20)
                bad.status()
        rows = played(environment, 11)
        assert not rows.scalars[2].all()
        environment.close()
    thread.join(5.0)
    assert thread.error is None


def test_threads_end_with_the_learner():
    before = threading.active_count()
    for _ in range(3):
        with learner() as made:
            thread = workers.Thread(workers.Counting(), made.where)
            environment = made.make(4, 5)
            played(environment, 2)
            environment.close()
        thread.join(5.0)
    assert threading.active_count() <= before + 3  # the loop, and gRPC's own


def test_a_learner_says_where_it_is(tmp_path):
    with learner(announce=str(tmp_path / "where")) as made:
        assert (tmp_path / "where").read_text().strip() == made.where
        thread = workers.Thread(workers.Counting(), f"file:{tmp_path}/where")
        environment = made.make(4, 5)
        played(environment, 2)
        environment.close()
    thread.join(5.0)
    assert thread.error is None
    assert not (tmp_path / "where").exists()


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
