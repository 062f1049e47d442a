"""Do a learner and its workers stay as large as they are while workers come and die?

    python benchmarks/remote_churn.py [--minutes 10]

A learner steps 64 lanes of EnvPool's CartPole at three supervisors of two worker processes each. Every four seconds a
random worker process is killed, and every thirty a supervisor with its processes, which another one replaces. Memory,
threads and open files of the learner, and of a supervisor and one of its workers that are never killed, are read every
five seconds and written to `benchmarks/results/remote_churn.json`. The exit code says whether they are flat: in the
second half at most 5 % above the first, without the first minute.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from podracer import environments
from podracer.bench import measure
from podracer.errors import Closed
from podracer.remote.environments import RemoteEnvironments
from podracer.remote.session_pb2 import Goodbye
from podracer.remote.settings import Remote

RESULTS = pathlib.Path(__file__).parent / "results"
ENV, LANES = "envpool:CartPole-v1", 64
KILL_SECONDS, REPLACE_SECONDS, READ_SECONDS, WARM_SECONDS, BACK_SECONDS = 4.0, 30.0, 5.0, 60.0, 60.0


def supervisor(where: str) -> subprocess.Popen[bytes]:
    flags = ["--connect", where, "--processes", "2", "--lanes", "32", "--quiet"]
    return subprocess.Popen([sys.executable, "-m", "podracer", "serve-envs", ENV, *flags], stderr=subprocess.DEVNULL)


def children(pid: int) -> list[int]:
    """Worker processes of a supervisor."""
    try:
        found = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(p) for p in found if "multiprocessing.spawn" in pathlib.Path(f"/proc/{p}/cmdline").read_text()]
    except FileNotFoundError:
        return []


def size(pid: int) -> dict[str, int]:
    """Resident megabytes, threads and open files of a process."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return {
        "megabytes": int(fields["VmRSS"].split()[0]) // 1024,
        "threads": int(fields["Threads"]),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }


def churn(minutes: float) -> dict[str, Any]:
    """Kills and replaces workers for some minutes; returns the readings and the counts of events."""
    local: Any = environments.make(ENV)
    settings = Remote(listen="127.0.0.1:0", block=16, min_live=0.05)
    made = RemoteEnvironments(ENV, local, None, settings, answer_timeout=30.0, strict=False)
    environment, ending, chance = made.make(LANES, 0), threading.Event(), random.Random(0)

    def play() -> None:
        while not ending.is_set():
            try:
                lanes, _ = environment.recv()
            except Closed:  # by what wakes it at the end
                return
            environment.send(lanes, np.zeros(len(lanes), np.int32))
            time.sleep(0.001)  # a policy's, and the two cores are the workers' too

    player = threading.Thread(target=play)
    player.start()
    workers = [supervisor(made.where) for _ in range(3)]
    while not (spared := children(workers[0].pid)[:1]):
        time.sleep(0.1)
    readings: list[dict[str, Any]] = []
    begin = read = replaced = time.monotonic()
    kills = replacements = 0
    try:
        while (now := time.monotonic()) - begin < 60 * minutes:
            time.sleep(KILL_SECONDS)
            victims = [pid for worker in workers for pid in children(worker.pid) if pid not in spared]
            if victims:
                os.kill(chance.choice(victims), signal.SIGKILL)
                kills += 1
            if now - replaced > REPLACE_SECONDS:
                replaced, place = now, chance.choice([1, 2])  # the first one stays
                for pid in [workers[place].pid, *children(workers[place].pid)]:
                    os.kill(pid, signal.SIGKILL)
                workers[place].wait()
                workers[place] = supervisor(made.where)
                replacements += 1
            if now - read > READ_SECONDS:
                read = now
                who = {"learner": os.getpid(), "supervisor": workers[0].pid, "worker": spared[0]}
                sizes = {name: size(pid) for name, pid in who.items()}
                readings.append({"seconds": now - begin, **sizes, **made.metrics()})
        # Who is on its way back hears no goodbye, and would wait for a learner that does not come again.
        while made.metrics()["remote/sessions"] < 2 * len(workers) and time.monotonic() - now < BACK_SECONDS:
            time.sleep(0.1)
    finally:
        ending.set()
        environment.wake()
        player.join()
        made.close(Goodbye.FINISHED)
        codes = [worker.wait(30) for worker in workers]
    return {"kills": kills, "replacements": replacements, "exit_codes": codes, "readings": readings}


def growth(readings: list[dict[str, Any]]) -> dict[str, float]:
    """The ratio of each number's maximum in the second half to that in the first, without the first minute."""
    settled = [row for row in readings if row["seconds"] > min(WARM_SECONDS, readings[-1]["seconds"] / 4)]
    first, second = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    most = lambda rows, who, what: max(row[who][what] for row in rows)  # noqa: E731
    return {
        f"{who}, {what}": most(second, who, what) / most(first, who, what)
        for who in ("learner", "supervisor", "worker")
        for what in ("megabytes", "threads", "files")
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    found = churn(arguments.minutes)
    found["growth"] = growth(found["readings"])
    last = found["readings"][-1]
    counts = ", ".join(f"{last[f'remote/{name}']:.0f} {name}" for name in ("breaks", "rows", "filler_rows"))
    print(f"{found['kills']} workers killed, {found['replacements']} supervisors replaced; {counts}; {last['learner']}")
    for name, ratio in found["growth"].items():
        print(f"{name}: {ratio:.3f} of the first half")
    measure.write(RESULTS / "remote_churn.json", "python benchmarks/remote_churn.py", vars(arguments), found)
    return 0 if max(found["growth"].values()) <= 1.05 and not any(found["exit_codes"]) else 1


if __name__ == "__main__":
    sys.exit(main())
