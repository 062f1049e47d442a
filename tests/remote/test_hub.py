"""The hub alone, on a clock of the test's: against a plain model in random schedules, and case by case."""

import collections
import contextlib
import queue
import sys
import threading
import time

import numpy as np
import pytest

from podracer import spaces
from podracer.types import EnvSpec, HostStep

pytest.importorskip("grpc")

from podracer.errors import Closed, RemoteError
from podracer.remote import session_pb2 as pb
from podracer.remote import wire
from podracer.remote.blocks import TRANSITIONS, Batching, Block, State, Timeouts, WorkerSession
from podracer.remote.hub import FILLER, Hub, WaitCancelled
from podracer.remote.pool import RemoteEnvironment
from tests.support import tiers

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


@pytest.mark.parametrize("chunk", [*range(4), *tiers.slow(*range(4, 10))])
def test_random_schedules(chunk, monkeypatch):
    """The row contract in every lane, one action per row, no lane in two places, and all transitions of the table."""
    become, seen = Block.become, set()

    def recorded(block, state):
        seen.add((block.state, state))
        become(block, state)

    monkeypatch.setattr(Block, "become", recorded)
    for seed in range(100 * chunk, 100 * chunk + 100):
        rng = np.random.default_rng(seed)
        lanes, block = int(rng.choice([2, 4, 6])), 2
        hub, clock, _ = made(min_live=0.01, answer=50.0)
        pool = hub.open_pool(lanes, block, 7)
        environment = RemoteEnvironment(hub, pool, SPEC)
        peers = [Peer(hub, lanes, f"w{i}") for i in range(2)]
        for peer in peers:
            for number in list(peer.owed):
                peer.answer(number)
        stale: list = []
        steps = np.full(lanes, -1)  # of the model: rows that a lane has shown since it broke
        for _ in range(30):
            if pool.live == 0 or any(b.state == "STEPPING" for b in pool.blocks):
                working = [p for p in peers if p.owed and not p.gone]
                for peer in working:
                    for number in list(peer.owed):
                        peer.answer(number)
                if not working or pool.live == 0:
                    peers.append(Peer(hub, lanes, "new"))
                    continue
            rows = shown(environment)
            first = rows.scalars[2] > 0
            placed = collections.Counter(
                lane for p in peers for b in p.session.blocks.values() for lane in range(b.start, b.start + b.lanes)
            )
            assert max(placed.values(), default=1) == 1
            for lane in range(lanes):
                there = any(b.unanswered != FILLER and b.start <= lane < b.start + b.lanes for b in pool.blocks)
                if not there:  # a filler
                    assert first[lane]
                    assert rows.scalars[0, lane] == 0
                    steps[lane] = -1
                elif first[lane]:
                    assert rows.observation[lane, 0] == 0
                    steps[lane] = 0
                else:
                    steps[lane] += 1
                    assert rows.observation[lane, 0] == steps[lane]
            environment.send(np.arange(lanes), np.full(lanes, steps.max() % 9))
            for peer in peers:
                for number in list(peer.owed):
                    luck = rng.random()
                    if peer.gone or luck < 0.05:
                        stale.append((peer, number, peer.owed.pop(number)[0]))
                        peer.leave()
                        break
                    if luck < 0.08:
                        peer.owed.pop(number)
                        hub.failed(peer.session, number, "boom")
                    elif luck < 0.9:
                        peer.answer(number)
            if rng.random() < 0.1:  # whoever has not answered yet is late
                late = [(p, number, p.owed[number][0]) for p in peers if not p.gone for number in p.owed]
                clock.now += 400.0
                hub.tick()
                assert not pool.stepping
                stale += late
            for peer, number, step in stale:  # what comes late is dropped
                if number not in peer.session.blocks:
                    count = hub.statistics.counts["stale"]
                    peer.send(number, step, HostStep.zeros(SPEC, block))
                    assert hub.statistics.counts["stale"] == count + 1
                    with pytest.raises(wire.ProtocolError, match="which it does not have"):
                        peer.send(number, step, HostStep.zeros(SPEC, block))
            stale.clear()
            if rng.random() < 0.3:
                peers.append(Peer(hub, lanes, "late"))
    assert seen == {(before, after) for before, others in TRANSITIONS.items() for after in others}


def test_a_block_goes_only_where_the_table_says():
    hub, _, _ = made()
    (block,) = hub.open_pool(1, 1, 0).blocks
    with pytest.raises(AssertionError, match="a block went from EMPTY to READY"):
        block.become(State.READY)


def test_many_threads_at_once_lose_nothing():
    """64 workers, 16 actors, 100 steps each: every row comes once, with its answer."""
    hub, steps, errors = Hub(LAYOUT, Timeouts(join=60.0)), 100, []

    def work():
        inbox = queue.SimpleQueue()
        session = WorkerSession("w", 1, inbox.put, errors.append)
        hub.join(session)
        for step in range(steps + 1):
            message, payload = wire.unpack(pb.ToWorker, inbox.get(timeout=60.0))
            if step == 0:
                number = message.open.block
            else:
                assert message.act.step == step - 1
                assert LAYOUT.unpack_actions(payload, 1).tolist() == [(step - 1) % 9]
            shown, first, never = np.full((1, 1), step, np.float32), np.array([step == 0]), np.zeros(1, bool)
            rows = HostStep.of(shown, np.zeros(1), never, first, never)
            hub.rows(session, pb.Rows(block=number, step=step), memoryview(b"".join(LAYOUT.pack_rows(rows))))

    def act(pool):
        environment = RemoteEnvironment(hub, pool, SPEC)
        for step in range(steps + 1):
            rows = shown(environment)
            np.testing.assert_array_equal(rows.observation, np.full((4, 1), step))
            if step < steps:
                environment.send(np.arange(4), np.full(4, step % 9))

    def run(function, *arguments):
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    calls = [(act, hub.open_pool(4, 1, 100 * i)) for i in range(16)] + [(work,)] * 64
    threads = [threading.Thread(target=run, args=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert hub.statistics.counts["rows"] == 64 * (steps + 1)


def test_one_answer_per_row_and_what_is_late_is_dropped():
    hub, _, _ = made()
    pool = hub.open_pool(2, 2, 5)
    peer = Peer(hub, 2)
    peer.answer(0)
    with pytest.raises(wire.ProtocolError, match="rows of step 1 came in step 0, READY"):
        peer.send(0, 1, HostStep.zeros(SPEC, 2))
    with pytest.raises(wire.ProtocolError, match="rows of block 99, which it does not have"):
        peer.send(99, 0, HostStep.zeros(SPEC, 2))
    hub.take(pool)
    hub.act(pool, {0}, lambda start, end: LAYOUT.pack_actions(np.zeros(end - start, np.int32)))
    hub.act(pool, {0}, lambda start, end: pytest.fail("answered twice"))
    other = Peer(hub, 2)
    with pytest.raises(wire.ProtocolError, match="step 5"):
        peer.send(0, 5, HostStep.zeros(SPEC, 2))
    with pytest.raises(wire.ProtocolError, match="rows of block 0, which it does not have"):
        other.send(0, 1, HostStep.zeros(SPEC, 2))  # of a block that is another's
    hub.close_pool(pool)
    peer.send(0, 1, HostStep.zeros(SPEC, 2))
    assert hub.statistics.counts["stale"] == 1
    with pytest.raises(wire.ProtocolError, match="nor owes rows of"):
        peer.send(0, 1, HostStep.zeros(SPEC, 2))


def test_why_blocks_were_lost_is_counted():
    hub, clock, _ = made(answer=5.0, min_live=0.0)
    pool = hub.open_pool(3, 1, 5)
    peers = [Peer(hub, 1, f"w{i}") for i in range(3)]
    for peer in peers:
        peer.answer(*peer.owed)
    hub.take(pool)
    hub.leave(peers[0].session, "it broke a rule", "violation")
    hub.failed(peers[1].session, *peers[1].session.blocks, "boom")
    hub.act(pool, {0, 1, 2}, lambda start, end: LAYOUT.pack_actions(np.zeros(end - start, np.int32)))
    clock.now += 6.0
    hub.tick()
    hub.reject("aborted")
    labelled = hub.labelled()
    assert labelled["breaks"] == ("reason", {"left": 0, "violation": 1, "failed": 1, "late": 1})
    assert labelled["lanes"] == ("state", {"empty": 2, "opening": 1, "ready": 0, "stepping": 0})
    assert labelled["rejected"] == ("reason", {"aborted": 1})
    metrics = hub.metrics()
    assert (metrics["remote/breaks"], metrics["remote/rejected"]) == (3.0, 1.0)


def test_seeds_go_with_lanes_and_openings_and_not_with_workers():
    def seeds(order):
        hub, _, _ = made()
        pool = hub.open_pool(4, 2, 5)
        peers = [Peer(hub, 2) for _ in range(2)]
        found = [sorted((m.seed, m.lanes) for p in peers for m in p.open.values())]
        for peer in peers:
            peer.answer(*peer.owed)
        hub.take(pool)
        for i in order:
            peers[i].leave()
        peers = [Peer(hub, 4)]
        return [*found, sorted((m.seed, m.lanes) for p in peers for m in p.open.values())]

    assert seeds([0, 1]) == seeds([1, 0])
    first, second = seeds([0, 1])
    assert first == [(5, 2), (7, 2)]
    assert not {seed for seed, _ in first} & {seed for seed, _ in second}


@pytest.mark.parametrize("answered", [False, True])
def test_a_loss_before_the_run_begins_is_none(answered):
    """The worker that comes instead has the seeds of the lost one, and lockstep goes on."""
    hub, _, _ = made(strict=True)
    pool = hub.open_pool(4, 2, 5)
    for _ in range(3):
        lost = Peer(hub, 2)
        if answered:
            lost.answer(*lost.owed)
        lost.leave()
    peers = [Peer(hub, 2) for _ in range(2)]
    assert sorted(m.seed for p in peers for m in p.open.values()) == [5, 7]
    for peer in peers:
        peer.answer(*peer.owed)
    assert all(rows is not None for _, rows in hub.take(pool))
    assert hub.metrics()["remote/breaks"] == 0


def test_a_worker_serves_several_actors():
    hub, _, _ = made()
    pools = [hub.open_pool(4, 2, 5), hub.open_pool(4, 2, 9)]
    Peer(hub, 4)
    assert [sum(b.state != "EMPTY" for b in pool.blocks) for pool in pools] == [1, 1]
    Peer(hub, 100)
    assert all(b.state == "OPENING" for pool in pools for b in pool.blocks)


def test_blocks_are_as_small_as_the_workers():
    hub, _, said = made(min_live=0.1, join=1e9)
    pool = hub.open_pool(10, 64, 5)
    for lanes in (4, 3, 20):
        peer = Peer(hub, lanes, f"w{lanes}")
        peer.answer(*peer.owed)
    assert [(block.start, block.lanes) for block in pool.blocks] == [(0, 4), (4, 3), (7, 3)]
    environment = RemoteEnvironment(hub, pool, SPEC)
    rows = shown(environment)
    assert rows.scalars[2].all()
    environment.send(np.arange(10), np.zeros(10, np.int32))
    peer.answer(*peer.owed)
    for session in hub._sessions[:2]:
        hub.leave(session, "gone")
    assert [block.lanes for block in pool.blocks] == [4, 3, 3], "w20 has them, whole"
    peer.leave()
    Peer(hub, 2, "small")
    assert all(block.state == "EMPTY" for block in pool.blocks), "what has played is not cut"
    assert "blocks have 3 lanes, and no worker that is there has room for more than 2" in hub._too_small(pool)
    assert not said


def test_evaluations_come_on_top_of_what_workers_have_room_for():
    hub, _, _ = made()
    hub.open_pool(4, 4, 5)
    peers = [Peer(hub, 4), Peer(hub, 4)]
    hub.open_pool(9, 3, 7, evaluation=True)
    assert sorted(peer.session.evaluating for peer in peers) == [3, 6]


def test_late_is_lost():
    hub, clock, said = made(answer=5.0)
    pool = hub.open_pool(2, 2, 5)
    peer = Peer(hub, 2, "slow")
    peer.answer(0)
    hub.take(pool)
    hub.act(pool, {0}, lambda start, end: LAYOUT.pack_actions(np.zeros(end - start, np.int32)))
    clock.now += 4.9
    hub.tick()
    assert not said
    clock.now += 0.2
    hub.alive(peer.session, pb.Alive(block=[0], busy_ms=[5100]))
    hub.tick()
    assert "slow has not answered for 5 s (block 0 has been at it for 5 s); lanes 0 to 1 break" in said[0]
    assert not peer.open, "the same worker is asked for none before it has answered"
    for end in (lambda: peer.send(0, 1, HostStep.zeros(SPEC, 2)), lambda: hub.failed(peer.session, 1, "boom")):
        end()
        (number,) = peer.open
        if number == 1:
            clock.now += 301.0
            hub.tick()
            assert not peer.open
    assert number == 2


def test_what_is_lost_goes_to_who_answers():
    hub, clock, _ = made(answer=5.0)
    pool = hub.open_pool(2, 2, 5)
    peer, spare = Peer(hub, 2, "slow"), Peer(hub, 2, "spare")
    peer.answer(0)
    hub.take(pool)
    hub.act(pool, {0}, lambda start, end: LAYOUT.pack_actions(np.zeros(end - start, np.int32)))
    clock.now += 6.0
    hub.tick()
    hub.open_pool(2, 2, 5, evaluation=True)
    assert not peer.open
    assert sorted(message.evaluation for message in spare.open.values()) == [False, True]


def test_nobody_who_reads_what_is_said_is_no_error():
    def say(line):
        raise ValueError("I/O operation on closed file")

    clock = Clock()
    hub = Hub(LAYOUT, Timeouts(answer=5.0), "here:1", clock, say)
    pool = hub.open_pool(2, 2, 5)
    Peer(hub, 2)
    clock.now += 301.0
    hub.tick()
    assert pool.blocks[0].state == "EMPTY"


def test_a_worker_whose_environments_fail_is_sent_away():
    hub, clock, _ = made()
    hub.open_pool(2, 2, 5)
    peer = Peer(hub, 2, "bad")
    for _ in range(5):
        assert peer.ended is None
        (number,) = peer.session.blocks
        hub.failed(peer.session, number, "boom")
    assert "failed 5 times in a minute, the last time with: boom" in peer.ended
    assert not peer.session.blocks
    other = Peer(hub, 2, "patient")
    for _ in range(20):
        clock.now += 20.0
        (number,) = other.session.blocks
        hub.failed(other.session, number, "boom")
    assert other.ended is None


def test_waiting_ends():
    hub, _, _ = made(join=0.3)
    hub._clock = time.monotonic
    pool = hub.open_pool(2, 2, 5)
    with pytest.raises(RemoteError, match=r"2 of 2 lanes have no worker yet; workers connect to here:1; none came"):
        hub.take(pool)
    environment = RemoteEnvironment(hub, pool, SPEC)
    environment.wake()
    with pytest.raises(WaitCancelled):
        hub.take(pool)
    with pytest.raises(Closed):
        environment.recv()


def test_lockstep_takes_no_loss():
    hub, _, _ = made(strict=True)
    pool = hub.open_pool(2, 1, 5)
    peer = Peer(hub, 2)
    for number in list(peer.owed):
        peer.answer(number)
    hub.take(pool)
    peer.leave()
    Peer(hub, 2)
    with pytest.raises(RemoteError, match=r"lanes 0 to 0: gone; in lockstep that ends the run"):
        hub.take(pool)


def ready_pool(least=1, most=2, deadline=1.0, lanes=4, **timeouts):
    hub, clock, _ = made(**timeouts)
    pool = hub.open_pool(lanes, 1, 5, batching=Batching(least, most, deadline))
    peers = [Peer(hub, 1, f"w{i}") for i in range(lanes)]
    for peer in peers:
        peer.answer(*peer.owed)
    return hub, clock, pool, peers, RemoteEnvironment(hub, pool, SPEC)


def received(environment):
    lanes, _ = environment.recv()
    environment.send(lanes, np.zeros(len(lanes), np.int32))
    return lanes.tolist()


def test_what_is_ready_leaves_oldest_first_and_at_most_so_much_at_once():
    _, _, _, peers, environment = ready_pool()
    assert received(environment) == [0, 1], "without a wait, for the third would be too much"
    assert received(environment) == [2, 3]
    for i in (3, 1, 0):
        peers[i].answer(*peers[i].owed)
    assert received(environment) == [3, 1]


def test_a_part_leaves_at_its_deadline_by_the_clock():
    hub, _, _, peers, environment = ready_pool(most=3, lanes=3, deadline=0.3)
    received(environment)
    hub._clock = time.monotonic
    peers[2].answer(*peers[2].owed)
    begin = time.monotonic()
    assert received(environment) == [2]
    assert 0.29 < time.monotonic() - begin < 0.33 + 0.5  # of a machine with other things to do


def test_a_part_leaves_at_its_deadline():
    _, clock, pool, peers, environment = ready_pool(most=3, lanes=3)
    assert received(environment) == [0, 1, 2], "nobody is waited for where nobody owes anything"
    peers[2].answer(*peers[2].owed)
    asked = clock.now
    assert pool.chosen(clock.now)[0] == []
    assert pool.chosen(clock.now)[1] == pytest.approx(0.2)
    assert pool.chosen(clock.now + 0.9)[1] == pytest.approx(0.1, abs=0.01)
    clock.now = asked + 1.0
    assert received(environment) == [2]
    peers[1].answer(*peers[1].owed)
    peers[0].answer(*peers[0].owed)
    assert pool.chosen(clock.now)[0] == [], "of three lanes, the third owes rows"
    peers[2].answer(*peers[2].owed)
    assert received(environment) == [1, 0, 2]


def test_what_is_lost_follows_the_slowest_that_is_at_work():
    hub, clock, _, peers, environment = ready_pool(most=3, lanes=3, min_live=0.3)
    assert received(environment) == [0, 1, 2]
    peers[0].leave()
    peers[1].answer(*peers[1].owed)
    clock.now += 2.0
    assert received(environment) == [1], "lane 2 has not shown its second row, so lane 0 need not either"
    peers[2].answer(*peers[2].owed)
    peers[1].answer(*peers[1].owed)
    lanes, rows = environment.recv()
    assert lanes.tolist() == [2, 1]
    lanes, rows = environment.recv()
    assert (lanes.tolist(), rows.scalars[:, 0].tolist()) == ([0], [0.0, 1.0, 1.0, 0.0])
    environment.send(np.arange(1, 3), np.zeros(2, np.int32))
    Peer(hub, 1, "new").answer(3)
    for peer in peers[1:]:
        peer.answer(*peer.owed)
    assert sorted(received(environment)) == [1, 2], "lane 0 waits until its filler is answered"
    environment.send(np.arange(1), np.zeros(1, np.int32))
    clock.now += 2.0
    lanes, rows = environment.recv()
    assert (lanes.tolist(), rows.scalars[2].tolist()) == ([0], [1.0])
    assert hub.statistics.counts["filler_rows"] == 1


def instructions(function):
    """Counts the instructions of Python that a call executes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(WaitCancelled):
            function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("batching", [None, Batching(1, 2, 1.0)])
def test_a_message_costs_the_same_however_many_workers_there_are(batching):
    def cost(workers):
        hub, _, _ = made()
        pools = [hub.open_pool(workers, 1, 100 * i, batching=batching) for i in range(2)]
        environments = [RemoteEnvironment(hub, pool, SPEC) for pool in pools]
        peers = [Peer(hub, 1) for _ in range(2 * workers)]
        for peer in peers:
            peer.answer(*peer.owed)
        for environment in environments:
            for _ in range(workers // 2 if batching else 1):
                received(environment)
        woken = []
        for pool in pools:
            pool.changed.notify_all = lambda pool=pool: woken.append(pool)
            pool.changed.wait = lambda seconds, pool=pool: hub.wake(pool)
        spent = instructions(lambda: hub.take(pools[0]))  # it looks, and would wait
        pools[0].woken = woken.clear()
        rows = [next(peer for peer in peers if peer.session is block.session) for block in pools[0].blocks]
        spent += instructions(lambda: rows[0].answer(*rows[0].owed))
        for peer in rows[1:-1]:
            peer.answer(*peer.owed)
        assert not woken or batching, "rows of the others are awaited still"
        rows[-1].answer(*rows[-1].owed)
        assert set(woken) == {pools[0]}, "the other actor has nothing to look at"
        if batching:
            spent += instructions(lambda: received(environments[0]))
        return spent

    assert cost(4) == cost(200)


@pytest.mark.parametrize("chunk", range(2))
def test_random_schedules_of_whatever_is_ready(chunk):
    """Each lane's own rows in order, one action for each, fillers between streams; and nobody waits for the lost.

    Blocks are of random sizes, for they are cut to what workers have room for.
    """
    for seed in range(100 * chunk, 100 * chunk + 100):
        rng = np.random.default_rng(seed)
        hub, clock, _ = made(min_live=0.01, answer=50.0)
        total, most_of_block = int(rng.integers(4, 9)), int(rng.integers(1, 4))
        batching = Batching(1, int(rng.integers(most_of_block, total + 1)), 1.0)
        pool = hub.open_pool(total, most_of_block, 5, batching=batching)
        environment = RemoteEnvironment(hub, pool, SPEC)
        peers: list = []
        while any(block.state == "EMPTY" for block in pool.blocks):
            peers.append(Peer(hub, int(rng.integers(1, 4)), f"w{len(peers)}"))
        for peer in peers:
            for number in list(peer.owed):
                peer.answer(number)
        steps, counts = np.full(total, -1), np.zeros(total, int)
        held: list = []
        for _ in range(60):
            for peer in peers:
                for number in list(peer.owed):
                    luck = rng.random()
                    if luck < 0.05 and len(peers) > 1:
                        peer.leave()
                        break
                    if luck < 0.6:
                        peer.answer(number)
            peers = [peer for peer in peers if not peer.gone]
            if rng.random() < 0.2:
                peers.append(Peer(hub, int(rng.integers(1, 4)), "new"))
            clock.now += rng.exponential(0.5) if rng.random() < 0.95 else 400.0
            hub.tick()
            with hub._lock:
                there = pool.live and pool.chosen(clock.now)[0]
            if there:
                lanes, rows = environment.recv()
                assert len(lanes) <= batching.most
                assert len(set(lanes.tolist())) == len(lanes)
                held.append((lanes, rows))
                blocks = {lane: b for b in pool.blocks for lane in range(b.start, b.start + b.lanes)}
                for block in {id(blocks[lane]): blocks[lane] for lane in lanes.tolist()}.values():
                    assert set(range(block.start, block.start + block.lanes)) <= set(lanes.tolist()), "whole blocks"
                others = [b.count for b in pool.blocks if b.state in ("READY", "STEPPING")]
                for i, lane in enumerate(lanes.tolist()):
                    counts[lane] += 1
                    filler = blocks[lane].unanswered == FILLER
                    if filler or rows.scalars[2, i]:
                        assert rows.scalars[2, i] == 1
                        assert rows.scalars[0, i] == 0
                        steps[lane] = -1 if filler else 0
                    else:
                        steps[lane] += 1
                        assert rows.observation[i, 0] == steps[lane], "rows are lost, or come before their answer"
                    assert not filler or counts[lane] <= min(others)
            if held and (rng.random() < 0.7 or not there):
                lanes, _ = held.pop(int(rng.integers(len(held))))
                environment.send(lanes, np.zeros(len(lanes), np.int32))
        assert counts.sum() > 20
