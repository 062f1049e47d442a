"""The hub in random schedules against a plain model, with many threads at once, and at any number of workers."""

import collections
import contextlib
import queue
import sys
import threading

import numpy as np
import pytest

from podracer.types import HostStep

pytest.importorskip("grpc")

from podracer.remote import session_pb2 as pb
from podracer.remote import wire
from podracer.remote.blocks import TRANSITIONS, Batching, Block, Timeouts, WorkerSession
from podracer.remote.hub import FILLER, Hub, WaitCancelled
from podracer.remote.pool import RemoteEnvironment
from tests.support import tiers
from tests.support.hubs import LAYOUT, SPEC, Peer, made, received, shown


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
