"""Where metrics go: memory, a JSONL file, TensorBoard, a callback and a progress bar."""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
import pathlib
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from podracer import console as lines
from podracer.run import rundir

Row = dict[str, Any]
"""One flat row: `env_steps`, `updates`, and metrics by name; `member` in a population."""

LogCallback = Callable[[int, Mapping[str, Any]], Any]
"""`(env_steps, row)`, called for every row; True ends the run in good order, as Ctrl-C does."""


class Log:
    """Keeps metric rows and passes them on.

    Args:
      directory: writes `metrics.jsonl` and TensorBoard events there; None keeps rows in memory only.
      callback: called with every row.
      resume_at: rows of an earlier part of the run up to this update and step are read back, later ones dropped.
      write: whether this process writes; of a pod, one does.
    """

    def __init__(
        self,
        directory: pathlib.Path | None,
        callback: LogCallback | None = None,
        resume_at: tuple[int, int] | None = None,
        write: bool = True,
    ):
        self.rows: list[Row] = []
        self._callback = callback
        self._file = self._board = None
        if directory is None:
            return
        path = directory / "metrics.jsonl"
        if resume_at is not None and path.exists():
            self.rows = until(read(path), *resume_at)
        if not write:
            return
        partial = path.with_suffix(".partial")
        with rundir.writing(path):
            partial.write_text("".join(_line(row) for row in self.rows))
            partial.replace(path)
            self._file = path.open("a")
        newest = max((row["env_steps"] for row in self.rows), default=-1)
        self._board = _Board(directory / "tensorboard", None if resume_at is None else newest + 1)
        if (directory / "config.json").exists():
            self._board.describe(json.loads((directory / "config.json").read_text()))

    def write(self, row: Row) -> None:
        """Takes a row; values that are not finite numbers are left out of it."""
        row = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
        self.rows.append(row)
        if self._file and self._board:
            with rundir.writing(pathlib.Path(self._file.name)):
                self._file.write(_line(row))
                self._file.flush()
            if row.get("member", 0) == 0:
                self._board.write(row["env_steps"], {name: value for name, value in row.items() if "/" in name})
        if self._callback:
            self._callback(row["env_steps"], row)

    def to_disk(self) -> None:
        """Waits until the rows are on the disk, as what a checkpoint goes with."""
        if self._file:
            with rundir.writing(pathlib.Path(self._file.name)):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes files."""
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):  # everything was flushed: what could not be written has been said
                if file:
                    file.close()


class _Board:
    """Writes TensorBoard events, one for a row of metrics.

    In this thread: tensorboardX's own writer has a process-wide queue and a thread, which compete with XLA for the
    cores, and where the disk is full, the thread dies and the queue fills up and blocks for ever.

    Args:
      directory: where to.
      purge_step: what an earlier part of the run wrote from this step on is not shown.
    """

    def __init__(self, directory: pathlib.Path, purge_step: int | None):
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._summary, self._checksum = Event, Summary, masked_crc32c
        self._path = directory / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        with rundir.writing(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def describe(self, description: Mapping[str, Any]) -> None:
        """Writes a configuration: a table under Text, and what TensorBoard compares runs by under HParams."""
        from tensorboardX import summary

        settings = _flat(description)
        table = [f"|{name}|{value}|" for name, value in settings.items()]
        self._write(summary=summary.text("configuration", "\n".join(("|setting|value|", "|---|---|", *table))))
        experiment, start, _ = summary.hparams(settings, {"eval/return_mean": 0.0})
        self._write(summary=experiment)
        self._write(summary=start)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes scalars by name."""
        scalars = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))

    def _write(self, **fields: Any) -> None:
        data = self._event(wall_time=time.time(), **fields).SerializeToString()
        size = struct.pack("<Q", len(data))
        crc = lambda part: struct.pack("<I", self._checksum(part))  # noqa: E731
        with rundir.writing(self._path):
            self._file.write(size + crc(size) + data + crc(data))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers, strings and booleans by names such as `run.seed`; what holds several values as a string."""
    flat = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def until(rows: list[Row], updates: int, env_steps: int) -> list[Row]:
    """The rows up to an update and a step: with replay, several steps may have the same update.

    Members of a population have steps of their own: of theirs, only the updates count.
    """
    return [row for row in rows if row["updates"] <= updates and ("member" in row or row["env_steps"] <= env_steps)]


def best_member(rows: list[Row]) -> int:
    """The member whose newest evaluation is the best one; 0 where nothing was evaluated, or there is one member.

    Members that have diverged have no return in their newest evaluation, and so are never the best.
    """
    evaluated = [row for row in rows if "eval/return_mean" in row]
    newest = [row for row in evaluated if row["updates"] == evaluated[-1]["updates"]]
    return max(newest, key=lambda row: row["eval/return_mean"], default={}).get("member", 0)


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a JSONL file; a last line that was cut off is dropped."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


class Display:
    """Shows a run: a bar on a terminal (stderr) or in a notebook, plain lines on stderr elsewhere, or nothing.

    Args:
      total_steps: where the bar ends.
      title: before the bar.
      enabled: False shows nothing.
      env_steps: where the bar begins; a run that goes on does not begin at 0.
    """

    def __init__(self, total_steps: int, title: str, enabled: bool, env_steps: int = 0):
        from rich.console import Console

        console = Console(stderr=True, file=lines.lasting(sys.stderr))
        self._enabled = enabled
        self._bar: _TerminalBar | _NotebookBar | None = None
        if enabled and console.is_jupyter:
            self._bar = _NotebookBar(total_steps, title, env_steps)
        elif enabled and console.is_terminal:
            self._bar = _TerminalBar(console, total_steps, title, env_steps)

    def update(self, env_steps: int, rate: float, episode_return: float, note: str = "") -> None:
        """Moves the bar; `note` follows the return."""
        if self._bar:
            ret = f"{episode_return:.2f}" if math.isfinite(episode_return) else "…"
            self._bar.update(env_steps, f"{rate:,.0f} steps/s", f"return {ret}{note}")

    def detail(self, text: str) -> None:
        """A line for those who have no bar."""
        if not self._bar:
            self.say(text)

    def say(self, text: str) -> None:
        """A line for everybody."""
        if self._bar:
            self._bar.say(text)
        elif self._enabled:
            lines.say(text)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar:
            self._bar.close()


class _TerminalBar:
    """Rich's bar, below the lines that are said."""

    def __init__(self, console: Any, total_steps: int, title: str, env_steps: int):
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task(title, total=total_steps, completed=env_steps, rate="…", status="")
        self._progress.start()

    def update(self, env_steps: int, rate: str, status: str) -> None:
        self._progress.update(self._task, completed=env_steps, rate=rate, status=status)

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class _NotebookBar:
    """A bar that is an output of its cell, above the lines that are said.

    Not Rich's: that one needs ipywidgets, stops short of the end, and is not in the notebook once it is saved.
    """

    SECONDS = 0.2
    """Between two updates: each is a message to the browser."""

    def __init__(self, total_steps: int, title: str, env_steps: int):
        from IPython.display import display

        self._total, self._title, self._steps, self._status = total_steps, title, env_steps, "…"
        self._shown = time.monotonic()
        self._handle: Any = display(self._content(), raw=True, display_id=True)

    def update(self, env_steps: int, rate: str, status: str) -> None:
        self._steps, self._status = env_steps, f"{rate}, {status}"
        if time.monotonic() - self._shown > self.SECONDS:
            self._show()

    def _show(self) -> None:
        self._shown = time.monotonic()
        self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        done = min(self._steps / self._total, 1.0)
        text = f"{self._title} {int(100 * done)}%, {self._status}"
        bar = f'<progress value="{done:.3f}" max="1" style="vertical-align:middle; width:20em"></progress>'
        return {"text/plain": text, "text/html": f"{bar} <span>{html.escape(text)}</span>"}

    def say(self, text: str) -> None:
        print(text, flush=True)  # what goes to stderr looks like an error in a notebook

    def close(self) -> None:
        self._show()
