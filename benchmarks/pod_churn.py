"""Does a run of two processes go on, whatever is killed and when?

    python benchmarks/pod_churn.py [--minutes 30]

V-trace with EnvPool's CartPole under Sebulba, in two processes with two devices each. Some seconds after each new
checkpoint a random one of the two is killed, without a warning to it or the other, or gets SIGTERM. The same command
starts both again. Memory of both is read every second. `benchmarks/results/pod_churn.json` is written; the exit code
says whether every start went on from the newest checkpoint, every end came within fifteen seconds and with the exit
code that it should have, no row of metrics is there twice, and the most memory of a start in the second half is at most
5 % above that in the first.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from podracer.bench import measure

RESULTS = pathlib.Path(__file__).parent / "results"
COMMAND = "train vtrace envpool:CartPole-v1 --topology pod --num-envs 32 --total-steps 1000000000 --eval-episodes 4"
COMMAND += " --checkpoint-every 20000 --eval-every 100000 --resume --run-dir"
START_SECONDS, END_SECONDS, MOST_SECONDS = 120.0, 15.0, 8.0


def newest(run_dir: pathlib.Path) -> int:
    """The last step with a whole checkpoint."""
    return max((int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdigit()), default=0)


def megabytes(pid: int) -> int:
    """Resident, of a process; 0 where it is gone."""
    try:
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20
    except (FileNotFoundError, ProcessLookupError):
        return 0


def once(run_dir: pathlib.Path, chance: random.Random) -> dict[str, Any]:
    """A start of both processes, until one of them is hit, and what came of it."""
    before, begin = newest(run_dir), time.monotonic()
    command = ["-m", "podracer", "launch", "--processes", "2", "--devices-per-process", "2", "--", *COMMAND.split()]
    launcher = subprocess.Popen(
        [sys.executable, *command, str(run_dir)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    most, victim, number = 0, chance.randrange(2), chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    hit_at = wait = None
    processes: list[int] = []
    while launcher.poll() is None and (hit_at is None or time.monotonic() < hit_at):
        time.sleep(1.0 if hit_at is None else min(1.0, max(0.0, hit_at - time.monotonic())))
        processes = [
            int(pid) for pid in pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        ]
        most = max([most, *map(megabytes, processes)])
        if hit_at is None and newest(run_dir) > before:
            wait = chance.uniform(0.0, MOST_SECONDS)
            hit_at = time.monotonic() + wait
        if hit_at is None and time.monotonic() - begin > START_SECONDS:
            break
    started = newest(run_dir)
    if launcher.poll() is None and hit_at is not None:
        os.kill(processes[victim], number)
    ending = time.monotonic()
    try:
        said, _ = launcher.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()
        said, _ = launcher.communicate()
    expected = 128 + number if number == signal.SIGKILL else -number  # as the launcher ends
    return {
        "signal": number.name,
        "process": victim,
        "seconds_before": ending - begin,
        "seconds_after_a_checkpoint": wait,
        "seconds_to_the_end": time.monotonic() - ending,
        "exit_code": launcher.returncode,
        "from_step": before,
        "to_step": newest(run_dir),
        "megabytes": most,
        "good": hit_at is not None and launcher.returncode == expected and newest(run_dir) >= started > before,
        "last_words": "" if launcher.returncode == expected else said[-2000:],
    }


def twice(run_dir: pathlib.Path) -> int:
    """Rows of metrics that are there more than once."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    keys = [(row["updates"], "eval/return_mean" in row) for row in rows]
    return len(keys) - len(set(keys))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, begin, starts = random.Random(arguments.seed), time.monotonic(), []
    with tempfile.TemporaryDirectory() as directory:
        run_dir = pathlib.Path(directory) / "run"
        while time.monotonic() - begin < 60 * arguments.minutes:
            starts.append(once(run_dir, chance))
            print({name: value for name, value in starts[-1].items() if value != ""}, flush=True)
        repeated = twice(run_dir)
    half = len(starts) // 2
    first, second = (max(start["megabytes"] for start in part) for part in (starts[:half], starts[half:]))
    found = {"starts": starts, "rows_twice": repeated, "growth": second / first}
    measure.write(RESULTS / "pod_churn.json", "python benchmarks/pod_churn.py", vars(arguments), found)
    good = sum(start["good"] for start in starts)
    print(f"{good} of {len(starts)} starts went on and ended well; {repeated} rows twice; memory {found['growth']:.3f}")
    return 0 if good == len(starts) and not repeated and found["growth"] <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
