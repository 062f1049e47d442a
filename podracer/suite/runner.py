"""A worker: runs the jobs of a suite as processes, some at a time, until other workers have all that are left."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from podracer.run.rundir import write_json
from podracer.suite import claims, processes
from podracer.suite.jobs import Job, Suite
from podracer.suite.progress import Display
from podracer.system.stopping import StopSignal

POLL_SECONDS = 0.1
"""Seconds between two polls of the processes."""

STOP_SECONDS = 60.0
"""Seconds for processes to write a checkpoint when an error ends their worker."""

SCAN_SECONDS = 5.0
"""Seconds between two scans for jobs that other workers gave back."""


class Outcome(NamedTuple):
    """The jobs by their state when a worker ends.

    Attributes:
      done: jobs with a result.
      failed: jobs that failed since the worker began, in any worker.
      stopped: jobs whose process a signal stopped, though not the worker.
      elsewhere: jobs of other workers.
      left: all other jobs, if the worker was stopped.
    """

    done: list[Job]
    failed: list[Job]
    stopped: list[Job]
    elsewhere: list[Job]
    left: list[Job]


@dataclasses.dataclass
class _Running:
    job: Job
    claim: claims.Claim
    process: subprocess.Popen[bytes]
    touched: float
    lost: bool = False


class Runner:
    """Runs a suite's jobs in processes.

    Args:
      suite: the suite of the jobs; its directory exists.
      jobs: this worker's share, in order.
      workers: number of processes at a time.
      stop: tells if a signal asked the worker to stop.
      display: shows progress and lines.
      read: `(suite, job) -> results` of a job whose process has ended well, for each seed a result or an error
        (`podracer.suite.result.read`).
    """

    def __init__(
        self,
        suite: Suite,
        jobs: Sequence[Job],
        workers: int,
        stop: StopSignal,
        display: Display,
        read: Callable[[Any, Job], Sequence[dict[str, Any] | ValueError]],
    ):
        self._suite, self._workers, self._stop, self._display = suite, workers, stop, display
        self._read = read
        self._todo, self._others_jobs = list(jobs), list[Job]()
        self._running: list[_Running] = []
        self._done, self._failed, self._stopped = list[Job](), list[Job](), list[Job]()
        self._waits, self._asked_to_stop, self._scan_at = False, False, 0.0

    def run(self) -> Outcome:
        """Runs until no job is left, or only other workers' jobs, or until a request to stop.

        Raises:
          ValueError: if a result of other settings appears in the directory; processes are stopped.
          OSError: if the directory cannot be written; processes are stopped.
          KeyboardInterrupt: for a second Ctrl-C; processes are killed.
        """
        self._began, patience = claims.now(self._suite.claims), STOP_SECONDS
        try:
            while True:
                self._look()
                if self._stop.requested:
                    self._pass_on()
                elif len(self._running) < self._workers and time.monotonic() >= self._scan_at:
                    self._scan_at = time.monotonic() + SCAN_SECONDS
                    self._fill()
                self._display.show(len(self._done), [running.job for running in self._running])
                if not self._running and (self._stop.requested or not self._waits):
                    break
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            patience = 0.0
            raise
        finally:
            self._close(patience)
        left = [job for job in self._todo if job not in self._others_jobs]
        return Outcome(self._done, self._failed, self._stopped, self._others_jobs, left)

    def _look(self) -> None:
        """Settles the processes that have ended, and touches the claims on the others."""
        for running in list(self._running):
            if running.process.poll() is not None:
                self._running.remove(running)
                self._end(running)
                self._scan_at = 0.0
            elif time.monotonic() - running.touched > claims.TOUCH_SECONDS and not running.lost:
                running.touched = time.monotonic()
                running.lost = not running.claim.touch()
                if running.lost:
                    running.process.terminate()

    def _pass_on(self) -> None:
        """Asks the processes to stop, once."""
        if not self._asked_to_stop:
            self._asked_to_stop = True
            for running in self._running:
                running.process.terminate()

    def _close(self, patience: float) -> None:
        """Waits `patience` seconds for the processes to end, then kills those that are left."""
        self._pass_on()
        deadline = time.monotonic() + patience
        for running in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(max(0.0, deadline - time.monotonic()))
            running.process.kill()
            running.process.wait()
            running.claim.release()

    def _fill(self) -> None:
        """Starts jobs while there is room."""
        self._others_jobs, self._waits = [], False
        for job in list(self._todo):
            if len(self._running) == self._workers or self._stop.requested:
                return
            if self._settle(job):
                continue
            claim = claims.claim(self._suite.claims, job.name)
            if claim is None:
                self._others_jobs.append(job)
                # The process of a worker that was killed ends soon: this one waits for it.
                self._waits |= claims.state(self._suite.claims, job.name) == "ending"
            elif self._settle(job):  # while it was claimed
                claim.release()
            else:
                self._start(job, claim)

    def _settle(self, job: Job) -> bool:
        """Returns True if a job has a result, or has failed since this worker began: then it is not tried again
        here."""
        if self._suite.done(job):
            self._done.append(job)
        elif all(self._suite.done(one) or self._has_failed(one) for one in job.members):
            self._failed.append(job)
        else:
            return False
        self._todo.remove(job)
        return True

    def _has_failed(self, job: Job) -> bool:
        """Returns True for an error since this worker began."""
        return _modified(self._suite.error_path(job)) > self._began

    def _start(self, job: Job, claim: claims.Claim) -> None:
        try:
            self._suite.note_start(job)
            process = processes.start(self._suite.command(job), self._suite.log_path(job))
        except OSError:
            claim.release()
            raise
        self._todo.remove(job)
        self._running.append(_Running(job, claim, process, time.monotonic()))
        claim.sign(process.pid)

    def _end(self, running: _Running) -> None:
        job, code = running.job, running.process.returncode
        try:
            if running.lost:
                self._display.say(f"{job.name}: another worker has taken it over, for this one was away")
                self._todo.append(job)
            elif code == 0:
                self._conclude(job)
            elif code not in processes.STOPPED:
                self._fail(job, f"exit code {code}", code)
            elif self._stop.requested:
                self._todo.append(job)
            else:
                self._stopped.append(job)
                self._display.say(f"{job.name}: its process was stopped by a signal; it can go on")
        finally:
            running.claim.release()

    def _conclude(self, job: Job) -> None:
        """Writes the results of a process that ended well; a seed may have an error even so."""
        try:
            found = self._read(self._suite, job)
            for one, result in zip(job.members, found):
                if isinstance(result, dict):
                    write_json(self._suite.result_path(one), result)
                    self._suite.error_path(one).unlink(missing_ok=True)
                    self._display.say(self._suite.line(result))
                else:
                    self._write_error(job, one, str(result), 0)
        except (ValueError, KeyError, TypeError, OSError) as error:  # one job's; the others go on
            self._fail(job, f"{self._suite.run_dir(job)} has no result: {error}", 0)
            return
        (self._done if self._suite.done(job) else self._failed).append(job)

    def _fail(self, job: Job, why: str, code: int) -> None:
        lines = processes.last_words(self._suite.log_path(job))
        reasons = [line for line in lines if line.startswith("podracer: error: ")]
        why = reasons[-1].removeprefix("podracer: error: ") if reasons else why
        for one in job.members:
            if not self._suite.done(one):
                self._write_error(job, one, why, code)
        self._failed.append(job)

    def _write_error(self, job: Job, member: Job, why: str, code: int) -> None:
        """Writes why a seed of a job has no result, and says so."""
        log = self._suite.log_path(job)
        error = {"game": member.game, "seed": member.seed, "error": why, "exit_code": code, "log": str(log)}
        error |= {"tail": processes.last_words(log), "command": self._suite.command(job)}
        try:
            write_json(self._suite.error_path(member), error)
        except OSError as refused:
            why = f"{why}; and its error cannot be written: {refused}"
        self._display.say(f"{member.name} failed: {why} (see {log})")


def _modified(path: pathlib.Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0
