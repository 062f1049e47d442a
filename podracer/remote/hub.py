"""Which worker steps which lanes, and whose turn it is: plain Python that knows no sockets and no clock of its own."""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Literal

import numpy as np

from podracer.environments.seeds import first_seed
from podracer.remote import session_pb2 as pb
from podracer.remote import wire
from podracer.remote.histogram import Histogram
from podracer.types import HostStep

OPENING_SECONDS = 300.0
"""How long environments may take to be made."""

FAILURES, FAILURES_SECONDS = 5, 60.0
"""So many failures of a worker's environments in so many seconds send it away."""

FILLER = -1
"""In place of the number of an opening: rows that stand for those of a lost worker."""

SAY_SECONDS = 10.0
"""How often those who wait for workers say so."""

State = Literal["EMPTY", "OPENING", "READY", "STEPPING"]


class RemoteError(RuntimeError):
    """The run cannot go on without workers that are not there."""


class Woken(Exception):  # noqa: N818 - not an error: nobody waits any more
    """Who waited was woken."""


@dataclasses.dataclass(eq=False)
class Session:
    """A worker's stream.

    Attributes:
      worker: its name, for messages.
      lanes: that it can step at once.
      send: takes a message for it; called with the hub's lock, so it only queues.
      end: ends the stream, with a reason for the worker.
      blocks: those it has, by number.
      failures: when environments of it failed.
    """

    worker: str
    lanes: int
    send: Callable[[bytes], None]
    end: Callable[[str], None]
    blocks: dict[int, Block] = dataclasses.field(default_factory=dict)
    failures: collections.deque[float] = dataclasses.field(default_factory=collections.deque)
    busy: str = ""

    @property
    def free(self) -> int:
        """Lanes that it can take more."""
        return self.lanes - sum(block.lanes for block in self.blocks.values() if not block.pool.evaluation)

    @property
    def evaluating(self) -> int:
        """Lanes of evaluations that it steps."""
        return sum(block.lanes for block in self.blocks.values() if block.pool.evaluation)


@dataclasses.dataclass(eq=False)
class Block:
    """Lanes with consecutive indices of one pool, which one worker steps together.

    EMPTY -> OPENING -> READY <-> STEPPING -> EMPTY. It has at most one message of rows or actions under way.

    Attributes:
      pool: whose lanes they are.
      start: the first one.
      lanes: how many.
      state: where it is.
      number: of its opening among all of the hub's; what messages call it.
      session: that steps it, unless EMPTY.
      step: of its newest rows, -1 before the first.
      openings: so far.
      since: when it began to wait for its worker.
      last: bool [n]; of the newest rows.
      rows: the newest, while READY.
      arrived: when they came.
      shown: number of the opening whose rows its actor has and has not answered; FILLER for rows that stood for them,
        and None if it has none.
      count: rows that its lanes have shown.
    """

    pool: Pool
    start: int
    lanes: int
    state: State = "EMPTY"
    number: int = -1
    session: Session | None = None
    step: int = -1
    openings: int = 0
    since: float = 0.0
    last: Any = None
    rows: HostStep | None = None
    arrived: float = 0.0
    shown: int | None = None
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Batching:
    """When rows of some lanes are enough.

    Attributes:
      least: lanes that are waited for, for `deadline` at most.
      most: lanes that are taken at once; at least those of a block.
      deadline: seconds that the oldest rows wait for others.
    """

    least: int
    most: int
    deadline: float


@dataclasses.dataclass(eq=False)
class Pool:
    """The lanes of an actor or an evaluation.

    Attributes:
      lanes: B.
      seed: of lane 0.
      evaluation: what they are for.
      batching: when some of them are enough; None waits for all that are at work.
      blocks: its lanes, in order.
      begun: whether all lanes have been there at once.
      broken: why a block was lost since, or "".
      woken: whether who waits for its rows is to wait no longer.
    """

    lanes: int
    seed: int
    evaluation: bool
    batching: Batching | None = None
    blocks: list[Block] = dataclasses.field(default_factory=list)
    begun: bool = False
    broken: str = ""
    woken: bool = False

    @property
    def live(self) -> int:
        """Lanes that a worker steps."""
        return sum(block.lanes for block in self.blocks if block.state in ("READY", "STEPPING"))

    def fitting(self, lanes: int) -> Block | None:
        """An empty block of so many lanes at most. One that was never opened is cut to that size."""
        empty = [block for block in self.blocks if block.state == "EMPTY"]
        fits = next((block for block in empty if block.lanes <= lanes), None)
        large = next((block for block in empty if not block.openings), None)
        if fits or not large:
            return fits
        rest = Block(self, large.start + lanes, large.lanes - lanes)
        large.lanes = lanes
        self.blocks.insert(self.blocks.index(large) + 1, rest)
        return large

    @property
    def stepping(self) -> bool:
        """Whether a worker owes rows."""
        return any(block.state == "STEPPING" for block in self.blocks)


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long a hub waits, and for what (see `settings.Remote`).

    Attributes:
      answer: seconds that a worker may take for a step.
      join: seconds to wait for workers.
      min_live: share of a pool's lanes that must be there.
      strict: whether a lost block ends the run.
    """

    answer: float = 60.0
    join: float = 600.0
    min_live: float = 0.5
    strict: bool = False


class Hub:
    """Blocks of lanes, and workers that step them. Any thread may call it.

    Args:
      layout: of the rows.
      patience: how long it waits.
      where: how workers find it, for messages.
      clock: seconds, monotonic.
      say: takes a line for the user.
    """

    def __init__(
        self,
        layout: wire.Layout,
        patience: Patience,
        where: str = "",
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ):
        self.layout, self.patience, self.where = layout, patience, where
        self._clock, self._say = clock, say
        self._condition = threading.Condition()
        self._sessions: list[Session] = []
        self._pools: list[Pool] = []
        self._numbers = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self._env_seconds = 0.0
        self._seconds = {name: Histogram() for name in ("round", "env", "wait")}

    # Workers

    def join(self, session: Session) -> None:
        """A worker is there."""
        with self._condition:
            self._sessions.append(session)
            self._assign()

    def leave(self, session: Session, why: str) -> None:
        """A worker is gone, and its blocks are lost."""
        with self._condition:
            if session not in self._sessions:
                return
            self._sessions.remove(session)
            for block in list(session.blocks.values()):
                self._lose(block, why)
            self._assign()

    def rows(self, session: Session, message: Any, payload: memoryview) -> None:
        """Rows of a block came.

        Raises:
          ProtocolError: where they are not what may come now.
        """
        with self._condition:
            block = session.blocks.get(message.block)
            if block is None:
                self._stale(message.block)
                return
            if block.state not in ("OPENING", "STEPPING") or message.step != block.step + 1:
                raise wire.ProtocolError(f"rows of step {message.step} came in step {block.step}, {block.state}.")
            opens = np.ones(block.lanes, bool) if block.state == "OPENING" else block.last
        # Without the lock: only its own stream brings rows of a block.
        step = self.layout.unpack_rows(payload, block.lanes)
        self.layout.check_rows(step, opens)
        with self._condition:
            if session.blocks.get(message.block) is not block:
                return
            now = self._clock()
            if block.state == "STEPPING":
                self._seconds["round"].add(now - block.since)
                self._seconds["env"].add(message.env_us * 1e-6)
            block.state, block.step, block.rows, block.last = "READY", message.step, step, step.scalars[3] > 0
            block.arrived = now
            self.counts["rows"] += block.lanes
            self.counts["bytes_up"] += len(payload)
            self.counts["messages"] += 1
            self._env_seconds += message.env_us * 1e-6
            self._condition.notify_all()

    def _stale(self, number: int) -> None:
        if number >= self._numbers:
            raise wire.ProtocolError(f"rows of block {number}, which was never opened.")
        self.counts["stale"] += 1

    def failed(self, session: Session, number: int, error: str) -> None:
        """A worker's environments raised an error."""
        with self._condition:
            block = session.blocks.get(number)
            if block is None:
                return
            self._say(f"remote: environments of {session.worker} failed: {error}")
            self._lose(block, f"its environments failed: {error}", told=True)
            now = self._clock()
            session.failures.append(now)
            while session.failures[0] < now - FAILURES_SECONDS:
                session.failures.popleft()
            if len(session.failures) >= FAILURES:
                session.end(f"its environments failed {FAILURES} times in a minute, the last time with: {error}")
                self._sessions.remove(session)
                for other in list(session.blocks.values()):
                    self._lose(other, "its worker was sent away")
            self._assign()

    def alive(self, session: Session, message: Any) -> None:
        """A worker says what it is at."""
        busy = zip(message.block, message.busy_ms)
        session.busy = ", ".join(f"block {block} has been at it for {ms / 1000:.0f} s" for block, ms in busy)

    def tick(self) -> None:
        """Gives up what takes too long; called now and then."""
        with self._condition:
            now = self._clock()
            for pool in self._pools:
                for block in pool.blocks:
                    limit = {"OPENING": OPENING_SECONDS, "STEPPING": self.patience.answer}.get(block.state, math.inf)
                    if now - block.since > limit:
                        assert block.session is not None
                        session, seconds = block.session, now - block.since
                        why = f"{session.worker} has not answered for {seconds:.0f} s"
                        why += f" ({session.busy})" if session.busy else ""
                        self._say(f"remote: {why}; lanes {block.start} to {block.start + block.lanes - 1} break.")
                        session.send(wire.pack(pb.ToWorker(close=pb.Close(block=block.number))))
                        self._lose(block, why)
            self._assign()

    # Blocks

    def _lose(self, block: Block, why: str, told: bool = False) -> None:
        assert block.session is not None
        del block.session.blocks[block.number]
        if block.state != "OPENING":
            block.pool.broken = block.pool.broken or f"lanes {block.start} to {block.start + block.lanes - 1}: {why}"
            self.counts["breaks"] += 1
        block.state, block.session, block.rows, block.step = "EMPTY", None, None, -1
        self._condition.notify_all()

    def _assign(self) -> None:
        """Gives empty blocks to workers that have room: of the pool with most of them first."""
        for session in self._sessions:
            while (free := session.free) > 0:
                choices = [
                    (sum(b.state == "EMPTY" for b in pool.blocks), -i, pool)
                    for i, pool in enumerate(self._pools)
                    if not pool.evaluation and pool.fitting(free)
                ]
                if not choices:
                    break
                pool = max(choices, key=lambda choice: choice[:2])[2]
                block = pool.fitting(free)
                assert block
                self._open(block, session)
        # Evaluations come on top of what workers have room for: whoever has least of them.
        for pool in self._pools:
            for block in pool.blocks if pool.evaluation and self._sessions else ():
                if block.state == "EMPTY":
                    self._open(block, min(self._sessions, key=lambda session: session.evaluating))

    def _open(self, block: Block, session: Session) -> None:
        pool, use = block.pool, "evaluation" if block.pool.evaluation else "training"
        seed = first_seed(pool.seed, use, block.openings) if block.openings else pool.seed
        block.state, block.session, block.number, block.since = "OPENING", session, self._numbers, self._clock()
        self._numbers, block.openings, block.step = self._numbers + 1, block.openings + 1, -1
        session.blocks[block.number] = block
        message = pb.Open(block=block.number, lanes=block.lanes, seed=seed + block.start, evaluation=pool.evaluation)
        session.send(wire.pack(pb.ToWorker(open=message)))

    # Actors

    def open_pool(
        self, lanes: int, block: int, seed: int, evaluation: bool = False, batching: Batching | None = None
    ) -> Pool:
        """Asks for environments, in blocks of so many lanes."""
        with self._condition:
            pool = Pool(lanes, seed, evaluation, batching)
            pool.blocks = [Block(pool, start, min(block, lanes - start)) for start in range(0, lanes, block)]
            self._pools.append(pool)
            self._assign()
            return pool

    def close_pool(self, pool: Pool) -> None:
        """Its environments are not needed any more."""
        with self._condition:
            if pool not in self._pools:
                return
            self._pools.remove(pool)
            for block in pool.blocks:
                if block.session:
                    block.session.send(wire.pack(pb.ToWorker(close=pb.Close(block=block.number))))
                    del block.session.blocks[block.number]
                    block.state, block.session = "EMPTY", None
            self._assign()

    def wake(self, pool: Pool) -> None:
        """Whoever waits for rows of a pool, now or later, gets `Woken`."""
        with self._condition:
            pool.woken = True
            self._condition.notify_all()

    def take(self, pool: Pool) -> list[tuple[Block, HostStep | None]]:
        """Waits for rows; those of lanes without a worker, which are not waited for later on, are None.

        They are of all blocks, in order, or of those that `pool.batching` finds enough.

        Raises:
          Woken: if woken.
          RemoteError: where there are too few workers for too long, or a block was lost that must not be.
        """
        entered = begin = said = self._clock()
        with self._condition:
            while True:
                if pool.woken:
                    raise Woken
                if pool.broken and self.patience.strict and pool.begun:
                    raise RemoteError(
                        f"{pool.broken}; in lockstep that ends the run, for other rows would come: continue from the "
                        "newest checkpoint, or use on_loss='break'."
                    )
                now = self._clock()
                needed = pool.lanes if not pool.begun else math.ceil(self.patience.min_live * pool.lanes)
                enough, stepping, wait = pool.live >= max(needed, 1), pool.stepping, 0.2
                if enough and (pool.begun or not stepping):
                    pool.begun = True
                    chosen, wait = self._chosen(pool, now)
                    if chosen:
                        self._seconds["wait"].add(now - entered)
                        self.counts["shown_rows"] += sum(block.lanes for block in chosen)
                        return [self._show(block) for block in chosen]
                missing = f"{needed - pool.live} of {needed} lanes have no worker yet{self._too_small(pool)}; "
                missing += f"workers connect to {self.where}"
                if not enough and not stepping and now - begin > self.patience.join:
                    raise RemoteError(
                        f"{missing}; none came for {now - begin:.0f} s: start `podracer serve-envs`, or raise "
                        f"join_timeout={self.patience.join:g}."
                    )
                if not enough and not stepping and now - said > SAY_SECONDS:
                    said = now
                    self._say(f"remote: {missing}.")
                if stepping:
                    begin = said = now
                self._condition.wait(wait)

    def _too_small(self, pool: Pool) -> str:
        """That workers are there, but none has room for a block that another one had."""
        lanes = min((block.lanes for block in pool.blocks if block.state == "EMPTY"), default=0)
        room = max((session.free for session in self._sessions), default=0)
        if not 0 < room < lanes:
            return ""
        return f" (blocks have {lanes} lanes, and no worker that is there has room for more than {room})"

    def _chosen(self, pool: Pool, now: float) -> tuple[list[Block], float]:
        """The blocks whose rows are shown now, and, if there are none, how long to wait for more at most."""
        if pool.batching is None:
            return ([] if pool.stepping else pool.blocks), 0.2
        least, most, deadline = dataclasses.astuple(pool.batching)
        free = [block for block in pool.blocks if block.shown is None]
        # What is lost follows the slowest that is at work, or nobody could go on.
        slowest = min(block.count for block in pool.blocks if block.state in ("READY", "STEPPING"))
        lost = [block for block in free if block.state in ("EMPTY", "OPENING") and block.count < slowest]
        ready = sorted((block for block in free if block.state == "READY"), key=lambda block: block.arrived)
        chosen, lanes = [], 0
        for block in (*lost, *ready):
            if lanes + block.lanes > most:
                return chosen, 0.0
            chosen.append(block)
            lanes += block.lanes
        waits = deadline - (now - ready[0].arrived) if lanes >= least and ready else math.inf
        if lost or lanes == most or not pool.stepping or waits <= 0.0:
            return chosen, 0.2
        return [], min(waits, 0.2)

    def _show(self, block: Block) -> tuple[Block, HostStep | None]:
        there = block.state == "READY"
        block.shown = block.number if there else FILLER
        block.count += 1
        if not there:
            self.counts["filler_rows"] += block.lanes
        return block, block.rows if there else None

    def act(self, pool: Pool, first: Collection[int], actions: Callable[[int, int], list[Any]]) -> None:
        """Sends actions for rows that were taken.

        Args:
          pool: whose.
          first: lanes with which the blocks begin that are answered.
          actions: `(start, end) -> parts of the payload` of these lanes.
        """
        with self._condition:
            now = self._clock()
            for block in pool.blocks:
                if block.start not in first or block.shown is None:
                    continue
                number, block.shown = block.shown, None
                if block.number != number or block.state != "READY" or block.session is None:
                    continue  # lost meanwhile, or nobody's
                parts = actions(block.start, block.start + block.lanes)
                block.state, block.rows, block.since = "STEPPING", None, now
                data = wire.pack(pb.ToWorker(act=pb.Act(block=number, step=block.step)), parts)
                self.counts["bytes_down"] += len(data)
                block.session.send(data)

    def histograms(self) -> list[str]:
        """Seconds from actions to rows, of environments, and of waiting for rows, as Prometheus reads them."""
        with self._condition:
            found = [each.lines(f"podracer_remote_{name}_seconds") for name, each in self._seconds.items()]
        return [line for lines in found for line in lines]

    def metrics(self) -> dict[str, float]:
        """Numbers of what happened so far."""
        with self._condition:
            ready = sum(b.lanes for p in self._pools for b in p.blocks if b.state == "READY")
            lanes = sum(pool.lanes for pool in self._pools)
            working = sum(pool.live for pool in self._pools)
            counts = ("rows", "filler_rows", "breaks", "stale", "bytes_up", "bytes_down", "messages", "rejected")
            return {
                "remote/sessions": float(len(self._sessions)),
                "remote/lanes": float(lanes),
                "remote/lanes_working": float(working),
                "remote/lanes_ready": float(ready),
                "remote/env_seconds": self._env_seconds,
                "remote/batch_fill": 1.0 - self.counts["filler_rows"] / max(self.counts["shown_rows"], 1),
            } | {f"remote/{name}": float(self.counts[name]) for name in counts}
