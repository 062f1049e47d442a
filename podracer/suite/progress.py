"""The progress of a suite's jobs: a bar on a terminal (stderr), and lines everywhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from podracer.suite.jobs import Job, Suite
from podracer.system import console as lines

REFRESH_SECONDS = 2.0
"""Seconds between two reads of the running jobs' progress."""


class Display:
    """Shows a suite.

    Args:
      suite: the suite of the jobs.
      jobs: the number of jobs to do.
      title: text before the bar.
    """

    def __init__(self, suite: Suite, jobs: int, title: str):
        from rich.console import Console

        self._suite, self._shown = suite, 0.0
        self._jobs: tuple[int, Sequence[Job]] | None = None
        console = Console(stderr=True, file=lines.robust_stream(sys.stderr))
        self._bar: Any = None
        if console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            running = TextColumn("{task.fields[running]}")
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, running, console=console)
            self._task = self._bar.add_task(title, total=jobs, running="")
            self._bar.start()

    def show(self, done: int, running: Sequence[Job]) -> None:
        """Moves the bar; beside it are the running jobs with their steps."""
        if self._bar and ((done, running) != self._jobs or time.monotonic() - self._shown > REFRESH_SECONDS):
            self._jobs, self._shown = (done, running), time.monotonic()
            names = [f"{job.name} {steps:,}" if (steps := self._steps(job)) else job.name for job in running]
            self._bar.update(self._task, completed=done, running=", ".join(names), refresh=True)

    def _steps(self, job: Job) -> int:
        """The steps of the newest row of metrics; 0 where there is none yet."""
        try:
            with (self._suite.run_dir(job) / "metrics.jsonl").open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - 8_000))
                return json.loads(file.read().split(b"\n")[-2])["env_steps"]
        except (OSError, ValueError, IndexError, KeyError):
            return 0

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            lines.say(text)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar:
            self._bar.stop()
