"""Measures the messages that the hub of a learner takes in a second of processor time, by the number of workers.

    python benchmarks/remote_hub.py [--workers 10 100 1000] [--actors 4] [--messages 3000]

Workers of one lane each answer without a wire: one thread brings their rows, one by one, with a pause in which whoever
is woken looks at them. Every actor waits for all of its lanes and answers them. What is counted is processor time of
the whole process for a message of rows and the actions that answer it.
"""

from __future__ import annotations

import argparse
import functools
import queue
import sys
import threading
import time
from typing import Any

import numpy as np
import remote_workers

from podracer.bench.measure import describe_machine, table
from podracer.remote import session_pb2 as pb
from podracer.remote import wire
from podracer.remote.blocks import Timeouts, WorkerSession
from podracer.remote.hub import Hub, WaitCancelled
from podracer.types import HostStep

BOUND = 1_500
"""Messages a second of processor time that 1,000 workers must leave."""

PAUSE = 3e-4
"""Seconds between two messages."""


def measured(workers: int, actors: int, messages: int) -> float:
    """Messages a second of processor time."""
    spec = remote_workers.Still.spec
    layout, rows = wire.Layout(spec), HostStep.zeros(spec, 1)
    rows.scalars[1] = 1.0
    later = memoryview(b"".join(layout.pack_rows(rows)))
    rows.scalars[2] = 1.0
    first = memoryview(b"".join(layout.pack_rows(rows)))
    actions, owed = layout.pack_actions(np.zeros(1, np.int32)), queue.SimpleQueue[tuple[WorkerSession, Any]]()
    hub = Hub(layout, Timeouts(), say=lambda line: None)
    pools = [hub.open_pool(workers // actors, 1, actor) for actor in range(actors)]

    def act(pool: Any) -> None:
        lanes = [block.start for block in pool.blocks]
        while True:
            try:
                hub.take(pool)
            except WaitCancelled:
                return
            hub.act(pool, lanes, lambda start, end: actions)

    def asked(sessions: list[WorkerSession], data: bytes) -> None:
        owed.put((sessions[0], wire.unpack(pb.ToWorker, data)[0]))

    def answer(count: int) -> None:
        for _ in range(count):
            session, message = owed.get(timeout=60.0)
            opened = message.WhichOneof("kind") == "open"
            block, step = (message.open.block, 0) if opened else (message.act.block, message.act.step + 1)
            hub.rows(session, pb.Rows(block=block, step=step, env_us=1), first if opened else later)
            time.sleep(PAUSE)

    for i in range(workers // actors * actors):
        mine: list[WorkerSession] = []
        mine.append(WorkerSession(f"w{i}", 1, functools.partial(asked, mine), lambda why: None))
        hub.join(mine[0])
    threads = [threading.Thread(target=act, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    answer(2 * workers)  # openings, and a first round
    begin = time.process_time()
    answer(messages)
    spent = time.process_time() - begin
    hub.wake()
    for thread in threads:
        thread.join()
    return messages / spent


def main() -> int:
    """Measures and prints; the exit code says whether the bound holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--messages", type=int, default=3_000)
    arguments = parser.parse_args()
    found = {workers: measured(workers, arguments.actors, arguments.messages) for workers in arguments.workers}
    print(describe_machine())
    heading = [f"workers, {arguments.actors} actors", "messages/s of processor time"]
    print(table([heading, *([f"{workers:,}", f"{rate:,.0f}"] for workers, rate in found.items())]))
    print(f"(required: {BOUND:,})")
    return 0 if min(found.values()) >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
