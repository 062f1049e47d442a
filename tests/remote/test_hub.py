"""The hub alone, on a clock of the test's, case by case."""

import time

import numpy as np
import pytest

from podracer.types import HostStep

pytest.importorskip("grpc")

from podracer.errors import Closed, RemoteError
from podracer.remote import session_pb2 as pb
from podracer.remote import wire
from podracer.remote.blocks import Batching, State, Timeouts
from podracer.remote.hub import Hub, WaitCancelled
from podracer.remote.pool import RemoteEnvironment
from tests.support.hubs import LAYOUT, SPEC, Clock, Peer, made, received, shown


def test_a_block_goes_only_where_the_table_says():
    hub, _, _ = made()
    (block,) = hub.open_pool(1, 1, 0).blocks
    with pytest.raises(AssertionError, match="a block went from EMPTY to READY"):
        block.become(State.READY)


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


def test_evaluations_are_spread_over_small_workers():
    hub, _, _ = made()
    peers = [Peer(hub, lanes) for lanes in (1, 1, 6)]
    pool = hub.open_pool(16, 16, 7, evaluation=True)
    assert [peer.session.evaluating for peer in peers] == [2, 2, 12]
    assert max(block.lanes for block in pool.blocks if block.session is not peers[2].session) == 1
    for peer in peers:
        for number in list(peer.owed):
            peer.answer(number)
    hub.take(pool)
    peers[2].leave()
    assert [peer.session.evaluating for peer in peers[:2]] == [8, 8], "they take blocks whole, or nobody would"


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
    hub, clock, _ = made(join=-1.0)
    pool = hub.open_pool(2, 2, 5)
    peer = Peer(hub, 2, "bad")
    for _ in range(5):
        assert peer.ended is None
        (number,) = peer.session.blocks
        hub.failed(peer.session, number, "boom")
    assert "failed 5 times in a minute, the last time with: boom" in peer.ended
    assert not peer.session.blocks
    with pytest.raises(RemoteError, match=r"no worker yet \(the newest failure of environments: boom\); workers"):
        hub.take(pool)
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
