"""Assignment of lanes to workers, and their turns: plain Python without sockets and with no clock of its own."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from podracer.environments.seeds import first_seed
from podracer.errors import RemoteError
from podracer.remote import session_pb2 as pb
from podracer.remote import wire
from podracer.remote.blocks import OWING, Batching, Block, Pool, State, Timeouts, WorkerSession
from podracer.remote.statistics import HubStatistics
from podracer.system import console
from podracer.types import HostStep

OPENING_SECONDS = 300.0
"""Seconds in which environments must be made."""

FAILURES, FAILURES_SECONDS = 5, 60.0
"""So many failures of a worker's environments in so many seconds send it away."""

FILLER = -1
"""In place of the number of an opening: rows that stand for those of a lost worker."""

SAY_SECONDS = 10.0
"""Seconds between messages of an actor that waits for workers."""


class WaitCancelled(Exception):  # noqa: N818 - not an error: nobody waits any more
    """An actor that waited was woken."""


class Hub:
    """Blocks of lanes, and workers that step them. Any thread may call it.

    Args:
      layout: of the rows.
      timeouts: how long it waits.
      where: how workers find it, for messages.
      clock: seconds, monotonic.
      say: takes a line for the user.
    """

    def __init__(
        self,
        layout: wire.Layout,
        timeouts: Timeouts,
        where: str = "",
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = console.say,
    ):
        self.layout, self.timeouts, self.where = layout, timeouts, where
        self._clock, self._told = clock, say
        self._lock = threading.RLock()
        self._sessions: list[WorkerSession] = []
        self._pools: list[Pool] = []
        self._numbers = 0
        self.statistics = HubStatistics()

    def _say(self, *lines: str) -> None:
        """Says lines, without the lock: standard error may be read by somebody who does not."""
        for line in lines:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                self._told(line)

    # Workers

    def join(self, session: WorkerSession) -> None:
        """A worker is there."""
        with self._lock:
            self._sessions.append(session)
            self._assign()

    def reject(self, reason: str) -> None:
        """A stream was ended because of what its worker did."""
        with self._lock:
            self.statistics.rejected[reason] += 1

    def leave(self, session: WorkerSession, why: str, reason: str = "left") -> None:
        """A worker is gone, and its blocks are lost, for one of `statistics.BREAKS`."""
        with self._lock:
            if session not in self._sessions:
                return
            self._sessions.remove(session)
            for block in list(session.blocks.values()):
                self._lose(block, why, reason)
            self._assign()

    def rows(self, session: WorkerSession, message: Any, payload: memoryview) -> None:
        """Rows of a block came.

        Raises:
          ProtocolError: where they are not what may come now.
        """
        with self._lock:
            block = session.blocks.get(message.block)
            if block is None:
                self._stale(session, message.block)
                return
            if block.state not in OWING or message.step != block.step + 1:
                raise wire.ProtocolError(f"rows of step {message.step} came in step {block.step}, {block.state}.")
            opens = np.ones(block.lanes, bool) if block.state == State.OPENING else block.last
        # Without the lock: only its own stream brings rows of a block.
        step = self.layout.unpack_rows(payload, block.lanes)
        self.layout.check_rows(step, opens)
        with self._lock:
            if session.blocks.get(message.block) is not block:
                self._stale(session, message.block)
                return
            now = self._clock()
            answered = now - block.since if block.state == State.STEPPING else None
            self.statistics.add_rows(block.lanes, len(payload), message.env_us * 1e-6, answered)
            block.step, block.rows, block.last = message.step, step, step.scalars[3] > 0
            block.arrived = now
            block.become(State.READY)
            if block.pool.take_in(block.lanes):
                block.pool.changed.notify_all()

    def _stale(self, session: WorkerSession, number: int) -> None:
        if number not in session.late:
            raise wire.ProtocolError(f"rows of block {number}, which it does not have, nor owes rows of.")
        session.late.remove(number)
        self.statistics.counts["stale"] += 1
        self._heard(session, number)

    def _heard(self, session: WorkerSession, number: int) -> None:
        """A worker has ended what it was late with."""
        if number in session.hung:
            session.hung.remove(number)
            self._assign()

    def failed(self, session: WorkerSession, number: int, error: str) -> None:
        """A worker's environments raised an error."""
        with self._lock:
            block = session.blocks.get(number)
            if block is None:
                self._heard(session, number)
                return
            self._lose(block, f"its environments failed: {error}", "failed", worker_knows=True)
            block.pool.failure = error
            now = self._clock()
            session.failures.append(now)
            while session.failures[0] < now - FAILURES_SECONDS:
                session.failures.popleft()
            if len(session.failures) >= FAILURES:
                session.end(f"its environments failed {FAILURES} times in a minute, the last time with: {error}")
                self._sessions.remove(session)
                for other in list(session.blocks.values()):
                    self._lose(other, "its worker was sent away", "failed")
            self._assign()
        self._say(f"remote: environments of {session.worker} failed: {error}")

    def alive(self, session: WorkerSession, message: Any) -> None:
        """A worker says what it is at."""
        with self._lock:
            busy = {block: ms / 1000 for block, ms in zip(message.block, message.busy_ms) if block in session.blocks}
            session.busy = ", ".join(f"block {block} has been at it for {s:.0f} s" for block, s in busy.items())

    def tick(self) -> None:
        """Gives up what takes too long; called now and then."""
        limits: dict[State, float] = {State.OPENING: OPENING_SECONDS, State.STEPPING: self.timeouts.answer}
        lines = []
        with self._lock:
            now = self._clock()
            for block in [
                block
                for pool in self._pools
                for state, limit in limits.items()
                for block in pool.of[state]
                if now - block.since > limit
            ]:
                assert block.session is not None
                session, seconds = block.session, now - block.since
                why = f"{session.worker} has not answered for {seconds:.0f} s"
                why += f" ({session.busy})" if session.busy else ""
                lines.append(f"remote: {why}; lanes {block.start} to {block.start + block.lanes - 1} break.")
                session.send(wire.pack(pb.ToWorker(close=pb.Close(block=block.number))))
                session.hung.add(block.number)
                self._lose(block, why, "late")
            self._assign()
        self._say(*lines)

    # Blocks

    def _take_away(self, block: Block, worker_knows: bool = False) -> None:
        """A worker has a block no more; unless it was told so, rows that it owes may still come."""
        assert block.session is not None
        del block.session.blocks[block.number]
        if block.state in OWING and not worker_knows:
            block.session.late.add(block.number)

    def _lose(self, block: Block, why: str, reason: str, worker_knows: bool = False) -> None:
        self._take_away(block, worker_knows)
        if not block.pool.is_complete:
            block.openings -= 1  # nothing was seen of it: what comes next has the same seeds
        elif block.state != State.OPENING:
            block.pool.broken = block.pool.broken or f"lanes {block.start} to {block.start + block.lanes - 1}: {why}"
            self.statistics.breaks[reason] += 1
        block.session, block.rows, block.step = None, None, -1
        block.become(State.EMPTY)
        block.pool.changed.notify_all()

    def _assign(self) -> None:
        """Gives empty blocks to workers that have room and answer: of the pool with most of them first."""
        if not any(pool.of[State.EMPTY] for pool in self._pools):
            return
        sessions = [session for session in self._sessions if not session.hung]
        for session in sessions:
            while (free := session.free) > 0:
                choices = [
                    (len(pool.of[State.EMPTY]), -i, pool)
                    for i, pool in enumerate(self._pools)
                    if not pool.evaluation and pool.fitting(free)
                ]
                if not choices:
                    break
                pool = max(choices, key=lambda choice: choice[:2])[2]
                block = pool.fitting(free)
                assert block
                self._open(block, session)
        # Evaluations come on top of a worker's lanes. The one with the smallest share gets the next block, of at most
        # so many lanes.
        for pool in self._pools if sessions else ():
            while pool.evaluation and pool.of[State.EMPTY]:
                session = min(sessions, key=lambda session: session.evaluating / session.lanes)
                self._open(pool.fitting(session.lanes) or next(iter(pool.of[State.EMPTY])), session)

    def _open(self, block: Block, session: WorkerSession) -> None:
        pool, use = block.pool, "evaluation" if block.pool.evaluation else "training"
        seed = first_seed(pool.seed, use, block.openings) if block.openings else pool.seed
        block.session, block.number, block.since = session, self._numbers, self._clock()
        block.become(State.OPENING)
        self._numbers, block.openings, block.step = self._numbers + 1, block.openings + 1, -1
        session.blocks[block.number] = block
        message = pb.Open(block=block.number, lanes=block.lanes, seed=seed + block.start, evaluation=pool.evaluation)
        session.send(wire.pack(pb.ToWorker(open=message)))

    # Actors

    def open_pool(
        self, lanes: int, block: int, seed: int, evaluation: bool = False, batching: Batching | None = None
    ) -> Pool:
        """Asks for environments, in blocks of so many lanes."""
        with self._lock:
            pool = Pool(lanes, seed, evaluation, threading.Condition(self._lock), batching)
            for place, start in enumerate(range(0, lanes, block)):
                pool.add(start, min(block, lanes - start), place)
            self._pools.append(pool)
            self._assign()
            return pool

    def close_pool(self, pool: Pool) -> None:
        """Its environments are not needed any more."""
        with self._lock:
            if pool not in self._pools:
                return
            self._pools.remove(pool)
            for block in pool.blocks:
                if block.session:
                    block.session.send(wire.pack(pb.ToWorker(close=pb.Close(block=block.number))))
                    self._take_away(block)
                    block.session = None
                    block.become(State.EMPTY)
            self._assign()

    def wake(self, pool: Pool | None = None) -> None:
        """Raises `WaitCancelled` in all that wait for rows of a pool (None: of any), now or later."""
        with self._lock:
            for each in self._pools if pool is None else (pool,):
                each.woken = True
                each.changed.notify_all()

    def take(self, pool: Pool) -> list[tuple[Block, HostStep | None]]:
        """Waits for rows; those of lanes without a worker, which are not waited for later on, are None.

        They are of all blocks, in order, or of those that `pool.batching` finds enough.

        Raises:
          WaitCancelled: if woken.
          RemoteError: where there are too few workers for too long, or a block was lost that must not be.
        """
        entered = begin = reported_at = self._clock()
        while True:
            with self._lock:
                if pool.woken:
                    raise WaitCancelled
                if pool.broken and self.timeouts.strict and pool.is_complete:
                    raise RemoteError(
                        f"{pool.broken}; in lockstep that ends the run, for other rows would come: continue from the "
                        "newest checkpoint, or use on_loss='break'."
                    )
                now = self._clock()
                needed = pool.lanes if not pool.is_complete else math.ceil(self.timeouts.min_live * pool.lanes)
                missing, stepping, wait = max(needed, 1) - pool.live, pool.stepping, 0.2
                pool.awaited = missing if missing > 0 else math.inf
                if missing <= 0 and (pool.is_complete or not stepping):
                    pool.is_complete = True
                    chosen, wait, pool.awaited = pool.chosen(now)
                    if chosen:
                        self.statistics.seconds["wait"].add(now - entered)
                        self.statistics.counts["shown_rows"] += sum(block.lanes for block in chosen)
                        return [self._show(block) for block in chosen]
                if stepping:
                    begin = reported_at = now
                if missing <= 0 or (now - reported_at <= SAY_SECONDS and now - begin <= self.timeouts.join):
                    pool.changed.wait(wait)
                    continue
                reason_text = f"{needed - pool.live} of {needed} lanes have no worker yet{self._too_small(pool)}"
                reason_text += f" (the newest failure of environments: {pool.failure}); " if pool.failure else "; "
                reason_text += f"workers connect to {self.where}"
            if now - begin > self.timeouts.join:
                raise RemoteError(
                    f"{reason_text}; none came for {now - begin:.0f} s: start `podracer serve-envs`, or raise "
                    f"join_timeout={self.timeouts.join:g}."
                )
            reported_at = now
            self._say(f"remote: {reason_text}.")

    def _too_small(self, pool: Pool) -> str:
        """A hint for the message: workers are connected, but none has room for the smallest free block."""
        lanes = min((block.lanes for block in pool.of[State.EMPTY]), default=0)
        room = max((session.free for session in self._sessions if not session.hung), default=0)
        if not 0 < room < lanes:
            return ""
        return f" (blocks have {lanes} lanes, and no worker that is there has room for more than {room})"

    def _show(self, block: Block) -> tuple[Block, HostStep | None]:
        is_ready = block.state == State.READY
        block.unanswered = block.number if is_ready else FILLER
        block.count += 1
        if not is_ready:
            self.statistics.counts["filler_rows"] += block.lanes
        return block, block.rows if is_ready else None

    def act(self, pool: Pool, first: Iterable[int], actions: Callable[[int, int], list[Any]]) -> None:
        """Sends actions for rows that were taken.

        Args:
          pool: whose.
          first: lanes with which the blocks begin that are answered.
          actions: `(start, end) -> parts of the payload` of these lanes.
        """
        with self._lock:
            now = self._clock()
            for lane in first:
                block = pool.at.get(lane)
                if block is None or block.unanswered is None:
                    continue
                number, block.unanswered = block.unanswered, None
                if block.number != number or block.state != State.READY or block.session is None:
                    continue  # lost meanwhile, or nobody's
                parts = actions(block.start, block.start + block.lanes)
                block.rows, block.since = None, now
                block.become(State.STEPPING)
                data = wire.pack(pb.ToWorker(act=pb.Act(block=number, step=block.step)), parts)
                self.statistics.counts["bytes_down"] += len(data)
                block.session.send(data)

    def histograms(self) -> list[str]:
        """Seconds from actions to rows, of environments, and of waiting for rows, as Prometheus reads them."""
        with self._lock:
            return self.statistics.histograms()

    def labelled(self) -> dict[str, tuple[str, Mapping[str, float]]]:
        """Numbers of several kinds, as Prometheus has them: the label's name, and a number for each of its values."""
        with self._lock:
            return self.statistics.labelled(self._pools)

    def metrics(self) -> dict[str, float]:
        """Numbers of what happened so far."""
        with self._lock:
            return self.statistics.metrics(self._pools, len(self._sessions))
