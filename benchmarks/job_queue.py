"""A queue of long runs for a spare machine: the next job that is not finished, one at a time, at the lowest priority.

    python benchmarks/job_queue.py                      # goes on with the queue, until nothing is left
    python benchmarks/job_queue.py --only vtrace-pong   # a job, or a run of it (vtrace-pong-0), or several
    python benchmarks/job_queue.py --stop-after 480     # stops in good order after eight hours
    python benchmarks/job_queue.py --list               # the state of each run
    python benchmarks/job_queue.py --report NAME        # the result of a run again, or so far, which does not end it
    python benchmarks/readme.py                         # writes the results into docs/results/queue.md

`benchmarks/queue_jobs.py` has the jobs. Run directories are in `runs/queue`, with what each run said in `NAME.log` and
the commits of its starts in `NAME.starts.json`; `--runs` has another place. Stop it in any way and start it again: a
begun run goes on from its newest checkpoint, with the code that is there then. A second queue in the same place is
refused. At the end of a run its last policy and its best checkpoint play fresh games, and `NAME.json` and `NAME.png`
are written into `benchmarks/results/queue`.

The exit code is 1 if a run failed; the next start tries it again. It is 143 or 130 after a signal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import queue_jobs
from queue_jobs import Job, Run

from podracer.bench import measure
from podracer.run.rundir import write_json
from podracer.suite import processes
from podracer.suite.jobs import read_json
from podracer.system.lock import RunLock, identity, lives, machine
from podracer.system.stopping import StopSignal

ROOT = pathlib.Path(__file__).parent.parent
JOBS = pathlib.Path(queue_jobs.__file__)
PROCESS = "process.json"
"""The file with the newest process of a queue, which may outlive it by some seconds."""

POLL_SECONDS = 0.2
"""Seconds between two looks at the process and at signals."""


class Queue:
    """The jobs, and the state of their runs in two directories.

    Args:
      jobs: a Python file whose `JOBS` are the jobs, in order.
      runs: where run directories are.
      results: where results are written.
    """

    def __init__(self, jobs: pathlib.Path, runs: pathlib.Path, results: pathlib.Path):
        self._file, self._runs, self._results = jobs.resolve(), runs.resolve(), results.resolve()
        self._jobs: tuple[Job, ...] = runpy.run_path(str(jobs))["JOBS"]

    def runs(self) -> list[Run]:
        """The runs, in order; those of further seeds are there once they have their turn."""
        names = [Run(job, seed).name for job in self._jobs for seed in job.seeds]
        held = {name for name in names if (read_json(self._results / f"{name}.json") or {}).get("holds")}
        return queue_jobs.runs(self._jobs, held)

    def chosen(self, names: Sequence[str]) -> list[Run]:
        """The runs of some jobs, or single runs, in the order of their names; the whole queue without names.

        Raises:
          ValueError: for an unknown name.
        """
        every = [Run(job, seed) for job in self._jobs for seed in job.seeds]
        found = []
        for name in names:
            named = [run for run in every if name in (run.name, run.job.name)]
            if not named:
                raise ValueError(f"{name}: no such job; known: {', '.join(job.name for job in self._jobs)}.")
            found += named
        return found if names else self.runs()

    def run_dir(self, run: Run) -> pathlib.Path:
        return self._runs / run.name

    def log(self, run: Run) -> pathlib.Path:
        return self._runs / f"{run.name}.log"

    def error(self, run: Run) -> pathlib.Path:
        return self._runs / f"{run.name}.error.json"

    def result(self, run: Run) -> dict[str, Any] | None:
        """The result; None where there is none, or one of another command or of a part of the run."""
        found = read_json(self._results / f"{run.name}.json")
        return found if found and found["command"] == run.command and found.get("complete", True) else None

    def starts(self, run: Run) -> list[dict[str, Any]]:
        """The commit and the time of each start, oldest first."""
        return (read_json(self._runs / f"{run.name}.starts.json") or {"starts": []})["starts"]

    def note_start(self, run: Run) -> None:
        """Adds a start: the checkout and the job may change between two of them."""
        now = {"commit": measure.commit(), "at": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "command": run.command}
        write_json(self._runs / f"{run.name}.starts.json", {"starts": [*self.starts(run), now]})

    def state(self, run: Run) -> str:
        """The state of a run in words."""
        if result := self.result(run):
            score = f"{result['newest_checkpoint']['mean']:,.4g}"
            verdict = "" if run.job.bound is None else f", {'holds' if result['holds'] else 'misses'} {run.job.claim}"
            return f"done, {score} at the end{verdict}"
        if error := read_json(self.error(run)):
            return f"failed: {error['error']}"
        if not self.run_dir(run).exists():
            return "waiting"
        row = _last_row(self.run_dir(run) / "metrics.jsonl")
        steps = row.get("env_steps", 0)
        return f"going on, {steps:,} of {run.job.steps:,} rows ({steps / run.job.steps:.0%})"

    def report(self, run: Run) -> None:
        """Plays games with the policies of a run, and writes its result, which may be of a part, and its curve."""
        import run_result  # with JAX and Matplotlib, which the queue itself can do without

        starts, directory = self.starts(run), self.run_dir(run)
        complete = self._is_complete(run)
        # Before the end, games of the best actions can take longer than all others together.
        games = {"samples": run.job.samples, "best_actions": complete}
        found = run_result.read(directory, run.job.games, seed=1000 + run.seed, **games)
        result = {
            "command": run.command,
            "commit": starts[-1]["commit"],
            "commits": list(dict.fromkeys(start["commit"] for start in starts)),
            "commit_of_report": measure.commit(),
            "starts": starts,
            "seed": run.seed,
            "total_steps": run.job.steps,
            **found,
            "complete": complete,
            "claim": run.job.claim,
            "holds": run.job.holds(found["newest_checkpoint"]["mean"]) if complete and run.job.claim else None,
            "reference": run.job.reference,
        }
        title = f"podracer train {run.job.train}, seed {run.seed}"
        run_result.draw(self.run_dir(run), self._results / f"{run.name}.png", title)
        write_json(self._results / f"{run.name}.json", result)

    def commands(self, run: Run) -> list[list[str]]:
        """The processes that are left of a run: training, or going on with it, and the report."""
        directory = str(self.run_dir(run))
        train = [sys.executable, "-m", *shlex.split(run.command), "--run-dir", directory, "--resume"]
        same = all(start.get("command", run.command) == run.command for start in self.starts(run))
        # Its settings stay, whatever a preset has become. Those of another command are refused by `train --resume`.
        if same and (self.run_dir(run) / "config.json").exists():
            train = [sys.executable, "-m", "podracer", "resume", directory]
        places = ["--runs", str(self._runs), "--results", str(self._results), "--jobs", str(self._file)]
        report = [sys.executable, __file__, "--report", run.name, *places]
        return [report] if self._is_complete(run) else [train, report]

    def _is_complete(self, run: Run) -> bool:
        return bool((read_json(self.run_dir(run) / "summary.json") or {}).get("complete"))

    def wait_for_last(self, stop: Callable[[], bool]) -> None:
        """Waits for the process of a queue that was killed: it writes a checkpoint and ends."""
        last = read_json(self._runs / PROCESS) or {"machine": None}
        while last["machine"] == machine() and lives(last["process"]) and not stop():
            time.sleep(POLL_SECONDS)

    def follow(self, runs: Callable[[], list[Run]], stop: Callable[[], bool]) -> list[Run]:
        """Does the runs that are not finished, one after the other; returns those that failed.

        Args:
          runs: the runs, which may become more.
          stop: tells if it is time to stop.
        """
        failed: list[Run] = []
        self.wait_for_last(stop)
        while not stop() and (run := next((r for r in runs() if not self.result(r) and r not in failed), None)):
            print(f"{run.name}: {self.state(run)}", flush=True)
            self.error(run).unlink(missing_ok=True)
            before = _newest_checkpoint(self.run_dir(run))
            code = self.do(run, stop)
            if not self.result(run) and code not in processes.STOPPED and not stop():
                words = [line for line in processes.last_words(self.log(run)) if line.strip()] or ["no words"]
                write_json(self.error(run), {"error": words[-1].removeprefix("podracer: error: "), "exit_code": code})
                if _newest_checkpoint(self.run_dir(run)) == before:  # else it goes on from there at once
                    failed.append(run)
            print(f"{run.name}: {self.state(run)}", flush=True)
        return failed

    def do(self, run: Run, stop: Callable[[], bool]) -> int:
        """Does what is left of a run; returns the exit code of the last process."""
        commands = self.commands(run)
        if len(commands) > 1:
            self.note_start(run)
        for command in commands:
            process = processes.start(command, self.log(run))
            write_json(self._runs / PROCESS, {"machine": machine(), "process": identity(process.pid)})
            if code := wait(process, stop):
                return code
        return 0


def wait(process: subprocess.Popen[bytes], stop: Callable[[], bool]) -> int:
    """Waits for a process, which is asked to end when it is time to stop; returns its exit code."""
    asked = False
    while process.poll() is None:
        if stop() and not asked:
            asked = True
            process.terminate()
        time.sleep(POLL_SECONDS)
    return process.returncode


def _newest_checkpoint(run_dir: pathlib.Path) -> int:
    """The step of the newest checkpoint of a run; -1 where there is none."""
    names = [path.name for path in (run_dir / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=-1)


def _last_row(path: pathlib.Path) -> dict[str, Any]:
    """The newest whole row of metrics; {} where there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8_000))
        return json.loads(file.read().split(b"\n")[-2])
    return {}


def main(argv: Sequence[str] | None = None) -> int:
    """Does the queue, or lists it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the state of each run, without doing any")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="jobs, or runs such as vtrace-pong-0")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="stop in good order then")
    parser.add_argument("--report", metavar="NAME", help="write the result of a run, of games that are new")
    parser.add_argument("--runs", type=pathlib.Path, default=ROOT / "runs" / "queue", help="run directories")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "queue")
    parser.add_argument("--jobs", type=pathlib.Path, default=JOBS, help="a Python file with a tuple JOBS")
    arguments = parser.parse_args(argv)
    queue = Queue(arguments.jobs, arguments.runs, arguments.results)
    try:
        if arguments.report:
            for run in queue.chosen([arguments.report]):
                queue.report(run)
            return 0
        if arguments.list:
            print("\n".join(f"{run.name:40s} {queue.state(run)}" for run in queue.chosen(arguments.only)))
            return 0
        return work(queue, arguments)
    except ValueError as error:
        print(f"job_queue: error: {error}", file=sys.stderr)
        return 2


def work(queue: Queue, arguments: argparse.Namespace) -> int:
    """Does the queue under its lock, at the lowest priority.

    Raises:
      ValueError: for an unknown name, or where another queue is at work.
    """
    queue.chosen(arguments.only)
    minutes = arguments.stop_after
    deadline = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    lock = RunLock(arguments.runs)
    lock.take()
    os.nice(19)
    try:
        with StopSignal() as signals:
            stop = lambda: signals.requested or time.monotonic() > deadline  # noqa: E731
            failed = queue.follow(lambda: queue.chosen(arguments.only), stop)
    finally:
        lock.close()
    return 128 + signals.number if signals.requested else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
