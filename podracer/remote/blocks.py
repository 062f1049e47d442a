"""Workers, blocks of lanes, and the pools that they are of, as the hub has them."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

from podracer.types import HostStep


class State(enum.StrEnum):
    """The states of a block; `TRANSITIONS` says which follows which."""

    EMPTY = "EMPTY"
    OPENING = "OPENING"
    READY = "READY"
    STEPPING = "STEPPING"


TRANSITIONS: dict[State, tuple[State, ...]] = {
    State.EMPTY: (State.OPENING,),  # a worker that has room is asked to open it
    State.OPENING: (State.READY, State.EMPTY),  # its first rows came; or it was lost, as below
    State.READY: (State.STEPPING, State.EMPTY),  # its actor has acted
    State.STEPPING: (State.READY, State.EMPTY),  # the rows that follow came; or its worker has left, failed or hung
}
"""The states that may follow each state, and why. From all but EMPTY it is lost with its worker, or its pool closes."""

AT_WORK: tuple[State, ...] = (State.READY, State.STEPPING)
"""The states in which a worker steps a block."""

OWING: tuple[State, ...] = (State.OPENING, State.STEPPING)
"""The states in which a worker owes rows."""


@dataclasses.dataclass(eq=False)
class WorkerSession:
    """A worker's stream.

    Attributes:
      worker: its name, for messages.
      lanes: that it can step at once.
      send: takes a message for it; called with the hub's lock, so it only queues.
      end: ends the stream, with a reason for the worker.
      blocks: those it has, by number.
      failures: when environments of it failed.
      late: numbers of blocks that it lost while it owed rows, which may be under way still.
      hung: those of them that it lost for that; until it has sent their rows, or failed, it gets no others.
      busy: what it says that its blocks are at.
    """

    worker: str
    lanes: int
    send: Callable[[bytes], None]
    end: Callable[[str], None]
    blocks: dict[int, Block] = dataclasses.field(default_factory=dict)
    failures: collections.deque[float] = dataclasses.field(default_factory=collections.deque)
    late: set[int] = dataclasses.field(default_factory=set)
    hung: set[int] = dataclasses.field(default_factory=set)
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

    It has at most one message of rows or actions under way. `TRANSITIONS` has the states that it goes through.

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
      unanswered: number of the opening whose rows its actor has and has not answered; FILLER for rows that stood for
        them, and None if it has none.
      count: rows that its lanes have shown.
    """

    pool: Pool
    start: int
    lanes: int
    state: State = State.EMPTY
    number: int = -1
    session: WorkerSession | None = None
    step: int = -1
    openings: int = 0
    since: float = 0.0
    last: Any = None
    rows: HostStep | None = None
    arrived: float = 0.0
    unanswered: int | None = None
    count: int = 0

    def become(self, state: State) -> None:
        """Goes to another state; its pool counts."""
        assert state in TRANSITIONS[self.state], f"a block went from {self.state} to {state}"
        del self.pool.of[self.state][self]
        self.pool.of[state][self] = None
        self.pool.live += self.lanes * ((state in AT_WORK) - (self.state in AT_WORK))
        self.state = state


@dataclasses.dataclass(frozen=True)
class Batching:
    """Sizes and deadline of a batch of ready rows.

    Attributes:
      least: lanes that must be ready, without a deadline, as long as a worker owes rows of others.
      most: lanes that are taken at once; at least those of a block. So many are taken without waiting.
      deadline: seconds that `least` or more ready lanes wait for others, from the oldest of their rows.
    """

    least: int
    most: int
    deadline: float


@dataclasses.dataclass(eq=False)
class Pool:
    """The lanes of an actor or an evaluation.

    What a message changes is counted as it comes: to look at all blocks would cost more than the message.

    Attributes:
      lanes: B.
      seed: of lane 0.
      evaluation: what they are for.
      changed: what its actor waits for, with the hub's lock.
      batching: when some of them are enough; None waits for all that are at work.
      blocks: its lanes, in order.
      at: its blocks, by their first lane.
      of: its blocks by state, in the order in which they came to it.
      live: lanes that a worker steps.
      awaited: lanes whose rows its actor waits for, unless nobody owes any.
      is_complete: whether all lanes have been there at once.
      broken: why a block was lost since, or "".
      failure: the newest error of its environments, or "".
      woken: whether who waits for its rows is to wait no longer.
    """

    lanes: int
    seed: int
    evaluation: bool
    changed: threading.Condition
    batching: Batching | None = None
    blocks: list[Block] = dataclasses.field(default_factory=list)
    at: dict[int, Block] = dataclasses.field(default_factory=dict)
    of: dict[State, dict[Block, None]] = dataclasses.field(default_factory=lambda: {state: {} for state in State})
    live: int = 0
    awaited: float = math.inf
    is_complete: bool = False
    broken: str = ""
    failure: str = ""
    woken: bool = False

    def add(self, start: int, lanes: int, place: int) -> None:
        """Adds an empty block in a place among the others."""
        block = self.at[start] = Block(self, start, lanes)
        self.of[State.EMPTY][block] = None
        self.blocks.insert(place, block)

    def fitting(self, lanes: int) -> Block | None:
        """An empty block of so many lanes at most. One that was never opened is cut to that size."""
        empty = sorted(self.of[State.EMPTY], key=lambda block: block.start)
        fits = next((block for block in empty if block.lanes <= lanes), None)
        large = next((block for block in empty if not block.openings), None)
        if fits or not large:
            return fits
        self.add(large.start + lanes, large.lanes - lanes, self.blocks.index(large) + 1)
        large.lanes = lanes
        return large

    @property
    def stepping(self) -> bool:
        """True if a worker owes rows."""
        return bool(self.of[State.STEPPING])

    def take_in(self, lanes: int) -> bool:
        """Counts rows that came; returns whether its actor has something to look at."""
        self.awaited -= lanes
        return self.awaited <= 0 or not self.stepping

    def chosen(self, now: float) -> tuple[list[Block], float, float]:
        """The blocks whose rows are shown now, and, if there are none, how long to wait, and for how many lanes."""
        if self.batching is None:
            return ([] if self.stepping else self.blocks), 0.2, math.inf
        least, most, deadline = self.batching.least, self.batching.most, self.batching.deadline
        # What is lost follows the slowest that is at work, or nobody could go on.
        unassigned = [
            block for state in (State.EMPTY, State.OPENING) for block in self.of[state] if block.unanswered is None
        ]
        if unassigned:
            slowest = min(block.count for state in AT_WORK for block in self.of[state])
            unassigned = sorted((block for block in unassigned if block.count < slowest), key=lambda block: block.start)
        ready = (block for block in self.of[State.READY] if block.unanswered is None)
        chosen, lanes = [], 0
        for block in itertools.chain(unassigned, ready):
            if lanes + block.lanes > most:
                return chosen, 0.0, 0.0
            chosen.append(block)
            lanes += block.lanes
        if unassigned or lanes == most or not self.stepping:
            return chosen, 0.2, math.inf
        if lanes < least:
            return [], 0.2, least - lanes
        waits = deadline - (now - chosen[0].arrived)
        return (chosen, 0.2, math.inf) if waits <= 0.0 else ([], min(waits, 0.2), most - lanes)


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Time limits of a hub (see `settings.Remote`).

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
