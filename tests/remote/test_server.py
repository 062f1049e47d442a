"""The server of remote environments against peers that are wrong: one status each, and no effect on others."""

import asyncio
import types

import numpy as np
import pytest

from podracer import spaces
from podracer.remote import session_pb2 as pb
from podracer.types import EnvSpec, HostStep
from tests.support import workers
from tests.support.peers import COUNTING, first_rows, hello, learner, packed, peer, played

grpc = pytest.importorskip("grpc")
server = pytest.importorskip("podracer.remote.server")
stream = pytest.importorskip("podracer.remote.stream")
wire = pytest.importorskip("podracer.remote.wire")
worker = pytest.importorskip("podracer.remote.worker")


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
    "without waiting": (lambda p: [p.rows(0, i, first_rows()) for i in range(2)], "rows of step 1 came in step 0, READY"),
    "another block": (lambda p: p.rows(7, 0, first_rows()), "block 7, which it does not have"),
    "too few lanes": (lambda p: p.rows(0, 0, first_rows(3)), "rows of 4 lanes have"),
    "a byte too many": (lambda p: p.long(0, 0, first_rows()), "rows of 4 lanes have"),
    "a reward that is no number": (lambda p: p.rows(0, 0, first_rows(scalars={(0, 2): np.nan})), "lane 2: reward is nan"),
    "an observation that is none": (lambda p: p.rows(0, 0, first_rows(observation=(1, 0))), "lane 1: observation"),
    "first and last": (lambda p: p.rows(0, 0, first_rows(scalars={(3, 1): 1.0})), "lane 1: last is 1"),
    "not first": (lambda p: p.rows(0, 0, first_rows(scalars={(2, 3): 0.0})), "lane 3: first is 0"),
    "hello again": (lambda p: p.raw(hello()), "does not belong here: hello"),
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
            bad.join()
            number = bad.receive("open").block
            place = lambda block: number if block == 0 else block + number  # noqa: E731
            bad.rows = lambda block, step, rows: bad.raw(packed(place(block), step, rows))
            rest = wire.pack(pb.FromWorker(rows=pb.Rows(block=number)))
            payload = b"".join(wire.Layout(COUNTING.spec).pack_rows(first_rows())) + b"\0"
            bad.long = lambda *_: bad.raw(wire.pack(pb.FromWorker(), [payload]) + rest)
            do(bad)
            code, details = bad.status()
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert said.replace("block 7", f"block {7 + number}") in details
        rows = played(environment, 4)
        assert not rows.scalars[2].all(), "the other worker goes on"
        assert f"worker by hand broke the protocol: {details}" in capfd.readouterr().err
        assert made.metrics()["remote/rejected"] == 1
        assert np.isfinite(list(made.metrics().values())).all()
        other.close()
        environment.close()
    thread.join(5.0)
    assert thread.error is None


def test_rewards_are_as_large_as_the_learner_says():
    with learner(max_magnitude=100.0) as made, peer(made.where) as one:
        environment = made.make(4, 5)
        one.join()
        number, lanes = one.receive("open").block, COUNTING.make(4, 0)
        for step, reward in enumerate((0.0, -100.0, 101.0)):
            rows = lanes.recv()[1]
            rows.scalars[0, 2] = reward
            one.rows(number, step, rows)
            if step < 2:
                environment.send(environment.recv()[0], np.ones(4, np.int32))
                assert one.receive("act").step == step
                lanes.send(None, np.ones(4, np.int32))
        said = "lane 2: reward is 101, beyond the learner's max_magnitude=100."
        assert one.status() == (grpc.StatusCode.INVALID_ARGUMENT, said)
        environment.close()


def test_refusals_name_both_sides_and_are_final(capfd):
    with learner(options='{"sticky": 0.25}') as made:
        with peer(made.where) as old:
            old.raw(hello(protocol=2))
            code, details = old.status()
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert "protocol 2 at the worker" in details
            assert f"and {wire.PROTOCOL} at the learner" in details
            assert f"remote: worker by hand is sent away: {details}\n" in capfd.readouterr().err
        with peer(made.where) as other:
            other.join(spec=workers.Counting(length=9).spec)
            code, details = other.status()
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert "max_episode_steps is 9 at the worker and 5 at the learner" in details
        with peer(made.where) as other:
            other.join(options='{"sticky": 0.0}')
            assert "sticky is 0.0 at the worker and 0.25 at the learner" in other.status()[1]
        with pytest.raises(worker.RefusedError, match="max_episode_steps is 9 at the worker"):
            worker.serve_envs(workers.Counting(length=9), made.where, quiet=True)


def test_of_one_process_the_older_stream_ends_before_it_is_ready():
    with learner() as made, peer(made.where) as one, peer(made.where) as two:
        for each in (one, two):
            each.raw(hello())
            assert each.receive("welcome").session
        assert one.status() == (grpc.StatusCode.ABORTED, "the same process has come again.")
        assert made._server._live == 1


def test_a_stream_is_given_one_message_at_a_time():
    """gRPC fails for a second one, and a goodbye behind a welcome that was under way was lost."""

    class Context:
        writing, written = False, 0

        async def write(self, data):
            assert not self.writing
            self.writing = True
            await asyncio.sleep(0.01)
            self.writing, self.written = False, self.written + 1

    async def both():
        one = stream.Stream(Context(), stream.Outbox(asyncio.get_running_loop()))
        for data in (b"goodbye", None):
            one.queue.put_nowait(data)
        await asyncio.gather(one.send(pb.ToWorker()), one.write())
        return one.context.written

    assert asyncio.run(both()) == 2


def test_a_stream_ends_after_what_is_being_written():
    """gRPC can send no status after a write that was cancelled, and the peer waits for one until its call is over."""

    class Context:
        async def write(self, data):
            self.written = False
            await asyncio.sleep(0.01)
            self.written = True

    async def serve(one, session):
        await one.send(pb.ToWorker())
        await asyncio.sleep(60.0)

    async def ended():
        one = stream.Stream(Context(), stream.Outbox(asyncio.get_running_loop()))
        one.end("enough.")
        with pytest.raises(stream.Refused, match="enough"):
            await server.Server._converse(types.SimpleNamespace(_serve=serve), one, None)
        return one.context.written

    assert asyncio.run(ended())


def test_a_peer_is_refused_though_nobody_hears_of_it():
    def say(line):
        raise ValueError("I/O operation on closed file")

    with learner() as made, peer(made.where) as old:
        made._server._say = say
        old.raw(hello(protocol=2))
        assert old.status()[0] == grpc.StatusCode.FAILED_PRECONDITION


def test_there_is_room_for_so_many_workers(monkeypatch):
    monkeypatch.setattr(server, "MAX_SESSIONS", 1)
    with learner() as made, peer(made.where) as one, peer(made.where) as two:
        one.join(run=1)
        two.raw(hello(run=2))
        assert two.status() == (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many workers at once; try again.")


def test_of_one_process_the_older_stream_ends():
    with learner() as made, peer(made.where) as one, peer(made.where) as two:
        one.join()
        two.join()
        assert one.status() == (grpc.StatusCode.ABORTED, "the same process has come again.")
        environment = made.make(4, 0)
        assert two.receive("open").lanes == 4
        environment.close()


def test_an_address_is_complained_of_once_a_minute():
    said, now = [], 0.0
    with learner() as made:
        made._server._say, made._server._clock = said.append, lambda: now
        for seconds in (0.0, 59.0, 61.0):
            now = seconds
            with peer(made.where) as old:
                old.raw(hello(protocol=2))
                old.status()
    assert len(said) == 2


def test_options_that_are_no_object_are_the_peers_fault():
    deep = "[" * 15_000
    wrong = ("[]", '"x"', "7", "null", "{", "", deep, '{"a": ' + deep, '{"sticky": ' + "[" * 500 + "]" * 500 + "}")
    with learner(options='{"sticky": 0.25}') as made:
        for i, options in enumerate(wrong):
            with peer(made.where) as bad:
                bad.join(run=i, options=options)
                assert bad.status()[0] in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
                assert made.metrics()["remote/rejected"] == i + 1
        kinds = made._hub.labelled()["rejected"][1]
        assert kinds["invalid_argument"] >= len(wrong) - 1


def test_rows_of_anothers_block_are_refused_and_late_ones_come_once():
    with learner(block=4) as made:
        environment = made.make(4, 5)
        with peer(made.where) as one, peer(made.where) as two:
            one.join(run=1)
            number = one.receive("open").block
            two.join(run=2)
            two.rows(number, 0, first_rows())
            assert two.status() == (
                grpc.StatusCode.INVALID_ARGUMENT, f"rows of block {number}, which it does not have, nor owes rows of."
            )  # fmt: skip
            one.rows(number, 0, first_rows())
            environment.recv()
            environment.send(np.arange(4), np.ones(4, np.int32))
            assert one.receive("act").step == 0
            environment.close()
            assert one.receive("close").block == number
            for _ in range(2):
                one.rows(number, 1, first_rows())
            assert one.status()[0] == grpc.StatusCode.INVALID_ARGUMENT, "a block owed them once"
        assert made.metrics()["remote/stale"] == 1


def test_an_environment_that_raises_is_a_line_on_both_sides_and_its_block_alone_opens_again(capfd):
    def misbehave(running):
        if (running.seed[0], running.number) == (5, 7):
            raise RuntimeError("the plug was pulled")

    environments, shown = workers.Counting(length=1000, misbehave=misbehave), []
    with learner(environments, block=4) as made:
        thread = workers.Thread(environments, made.where, name="w", quiet=False)
        environment = made.make(8, 5)
        lanes, rows = environment.recv()
        while len(shown) < 500 and not (shown and shown[-1][0, 0] != 5 and shown[-1][0, 1] == 3):
            shown.append(rows.observation)
            environment.send(lanes, np.ones(8, np.int32))
            lanes, rows = environment.recv()
        seeds, steps = np.array(shown)[..., 0], np.array(shown)[..., 1]
        assert not np.isin(seeds[-1, :4], np.arange(5, 13)).any(), "other episodes begin"
        for block, number in ((steps[:7, :4], 7), (steps[-4:, :4], 4), (steps[:, 4:], len(shown))):
            np.testing.assert_array_equal(block, np.tile(np.arange(number)[:, None], 4))
        assert np.all(seeds[:, 4:] == np.arange(9, 13)), "the other block's episodes go on"
        metrics = made.metrics()
        assert (metrics["remote/sessions"], metrics["remote/breaks"], metrics["remote/rejected"]) == (1, 1, 0)
        why = "failed: RuntimeError: the plug was pulled"
        said = {f"w: connected to {made.where}.", f"w: environments of block 0 {why}"}
        said.add(f"remote: environments of worker w {why}")
        lines = capfd.readouterr().err.splitlines()
        assert sorted(line.partition(", in misbehave, ")[0] for line in lines) == sorted(said)
        assert sum(line.endswith('`raise RuntimeError("the plug was pulled")`') for line in lines) == 2, "and where"
        environment.close()
    thread.join(5.0)
    assert thread.error is None


class Large:
    """Rows of half a megabyte that show the last action, and a leaf of nothing."""

    def __init__(self):
        parts = {"large": spaces.Box(0, 255, (512, 1024), np.uint8), "none": spaces.Box(0.0, 1.0, (0, 3))}
        self.spec = EnvSpec("large", spaces.Dict(parts), spaces.Discrete(9))

    def make(self, num_lanes, seed, *, evaluation=False):
        made, self.lanes, self.shown, self.first = self, np.arange(num_lanes), np.zeros(num_lanes, int), True
        return made

    def recv(self):
        n = len(self.lanes)
        large = np.broadcast_to(self.shown[:, None, None], (n, 512, 1024)).astype(np.uint8)
        observation = {"large": large, "none": np.zeros((n, 0, 3), np.float32)}
        never = np.zeros(n, bool)
        return self.lanes, HostStep.of(observation, np.zeros(n), never, ~never & self.first, never)

    def send(self, lanes, actions):
        self.shown, self.first = np.asarray(actions), False

    def close(self):
        pass


@pytest.mark.parametrize("known", [True, False])
def test_a_large_array_and_an_empty_one(known, tmp_path):
    """Larger than gRPC takes by default, from a worker that is the first to say what its environment is too."""
    where = f"file:{tmp_path}/where"
    thread = workers.Thread(Large(), where, lanes=16)
    with learner(Large() if known else None, announce=f"{tmp_path}/where") as made:
        assert made._server._most() == 16 * 4 * (512 * 1024 + 16) + wire.OVERHEAD
        environment = made.make(16, 5)
        lanes, _ = environment.recv()
        environment.send(lanes, np.arange(16, dtype=np.int32) % 9)
        _, rows = environment.recv()
        assert rows.observation["none"].shape == (16, 0, 3)
        np.testing.assert_array_equal(rows.observation["large"].min(axis=(1, 2)), np.arange(16) % 9)
        np.testing.assert_array_equal(rows.observation["large"].max(axis=(1, 2)), np.arange(16) % 9)
        environment.close()
    thread.join(10.0)
    assert thread.error is None


def test_messages_are_as_large_as_the_largest_block_and_no_larger():
    with learner() as made:
        layout = wire.Layout(COUNTING.spec)
        most = 64 * layout.row_bytes + wire.OVERHEAD
        for size, code, said in (
            (wire.OVERHEAD + 100, grpc.StatusCode.INVALID_ARGUMENT, "failed: too large"),
            (most + 1, grpc.StatusCode.RESOURCE_EXHAUSTED, f"larger than max ({most + 1} vs. {most})"),
        ):
            with peer(made.where) as bad:
                bad.join(run=size)
                empty = pb.FromWorker(failed=pb.Failed(error="x" * 60_000))
                bad.send(failed=pb.Failed(error="x" * (size - empty.ByteSize() + 60_000)))
                found = bad.status()
                assert found[0] == code, found
                assert said in found[1]
