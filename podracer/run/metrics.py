"""The sinks of metrics: memory, a JSONL file, TensorBoard, a callback and a progress bar."""

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
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from podracer.run import rundir
from podracer.run.history import History, Row
from podracer.run.status_line import StatusLine
from podracer.system import console as lines
from podracer.system import files

LogCallback = Callable[[int, Mapping[str, Any]], Any]
"""`(env_steps, row)`, called for every row; True ends the run in good order, as Ctrl-C does."""


class Log:
    """Passes metric rows on to all sinks, and keeps a bounded number of them in memory (`History`).

    Args:
      directory: writes `metrics.jsonl` and TensorBoard events there; None keeps rows in memory only.
      callback: called with every row.
      resume_at: rows of an earlier part of the run up to this update, and these steps of the members, are read back,
        later ones dropped.
      write: True if this process writes; in a pod, one does.

    Attributes:
      notes: messages about the rows that were read back.
    """

    def __init__(
        self,
        directory: pathlib.Path | None,
        callback: LogCallback | None = None,
        resume_at: tuple[int, Sequence[int]] | None = None,
        write: bool = True,
    ):
        self._history = History()
        self.notes: list[str] = []
        self._callback = callback
        self._file = self._board = None
        if directory is None:
            return
        path = directory / "metrics.jsonl"
        earlier: Iterator[Row] = iter(())
        if resume_at is not None and path.exists():
            earlier = until(stream(path, self.notes.append), *resume_at)
        if not write:
            for row in earlier:
                self._history.add(row)
            return
        newest = -1
        with rundir.writing(path):
            with files.replacing(path) as partial, partial.open("w") as file:
                for row in earlier:
                    self._history.add(row)
                    file.write(_line(row))
                    newest = max(newest, row["env_steps"])
            self._file = path.open("a")
        self._board = _Board(directory / "tensorboard", None if resume_at is None else newest + 1)
        if (directory / "config.json").exists():
            self._board.describe(json.loads((directory / "config.json").read_text()))

    @property
    def rows(self) -> list[Row]:
        """The rows so far; of a long run, some of them (`History`)."""
        return self._history.rows

    def write(self, row: Row) -> None:
        """Adds a row, without values that are not finite numbers."""
        row = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
        self._history.add(row)
        if self._file and self._board:
            with rundir.writing(pathlib.Path(self._file.name)):
                self._file.write(_line(row))
                self._file.flush()
            if row.get("member", 0) == 0:
                self._board.write(row["env_steps"], {name: value for name, value in row.items() if "/" in name})
        if self._callback:
            self._callback(row["env_steps"], row)

    def to_disk(self) -> None:
        """Waits until the rows are on the disk, because a checkpoint relies on them."""
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

    It writes in this thread. tensorboardX's own writer has a process-wide queue and a thread, which compete with XLA
    for the cores; when the disk is full, the thread dies, and the queue fills up and blocks for ever.

    Args:
      directory: the directory of the event files.
      purge_step: events of an earlier part of the run from this step on are not shown.
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
        """Writes a configuration: a table under Text, and columns for comparing runs under HParams."""
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
    """Numbers, strings and booleans by names such as `run.seed`; sequences become strings."""
    flat = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def until(rows: Iterable[Row], updates: int, member_steps: Sequence[int]) -> Iterator[Row]:
    """The rows up to an update and the members' steps: with replay, several steps may have the same update.

    Args:
      rows: of a run.
      updates: the update.
      member_steps: the step of each member, [P]. Rows of training have the steps of their member; evaluations have
        those of the member with the fewest.
    """
    for row in rows:
        steps = member_steps[row.get("member", 0)] if "time/train_seconds" in row else min(member_steps)
        if row["updates"] <= updates and row["env_steps"] <= steps:
            yield row


def best_member(rows: list[Row]) -> int:
    """The member with the best newest evaluation; 0 if nothing was evaluated, or there is one member.

    Members that have diverged have no return in their newest evaluation, and so are never the best.
    """
    evaluated = [row for row in rows if "eval/return_mean" in row]
    newest = [row for row in evaluated if row["updates"] == evaluated[-1]["updates"]]
    return max(newest, key=lambda row: row["eval/return_mean"], default={}).get("member", 0)


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def stream(path: pathlib.Path, say: Callable[[str], object] = lines.say) -> Iterator[Row]:
    """Yields the rows of a JSONL file one by one, because those of a long run may not fit into memory.

    Args:
      path: the file's path.
      say: called after the last row with a message about lines without a row. A last line that was cut off is dropped
        silently: a run that was killed may leave one.
    """
    damaged = first = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if isinstance(row, dict) and row.keys() >= {"env_steps", "updates"}:
                yield row
            elif line.endswith("\n"):
                damaged, first = damaged + 1, first or number
    if damaged:
        others = f" and {damaged - 1:,} more" if damaged > 1 else ""
        say(f"{path}: line {first:,}{others} is damaged and left out; the other rows are read.")


def read(path: pathlib.Path) -> list[Row]:
    """All rows of a JSONL file; see `history` for files of long runs."""
    return list(stream(path))


def history(rows: Iterable[Row]) -> list[Row]:
    """The rows, thinned out to the number that memory should hold."""
    bounded = History()
    for row in rows:
        bounded.add(row)
    return bounded.rows


class Display:
    """Shows a run: a bar on a terminal (stderr) or in a notebook, plain lines on stderr elsewhere, or nothing.

    Plain lines come at least every half a minute, whatever the run does.

    Args:
      total_steps: the steps at the bar's end.
      title: text before the bar.
      enabled: False shows nothing.
      env_steps: the steps at the bar's beginning; a resumed run does not begin at 0.
    """

    def __init__(self, total_steps: int, title: str, enabled: bool, env_steps: int = 0):
        from rich.console import Console

        console = Console(stderr=True, file=lines.robust_stream(sys.stderr))
        self._bar: _TerminalBar | _NotebookBar | None = None
        if enabled and console.is_jupyter:
            self._bar = _NotebookBar(total_steps, title, env_steps)
        elif enabled and console.is_terminal:
            self._bar = _TerminalBar(console, total_steps, title, env_steps)
        self._total_steps = total_steps
        self._lines = enabled and not self._bar
        self._status_line: StatusLine | None = None

    def set_status(self, what: str) -> None:
        """Sets the status for the lines that come from time to time."""
        if self._status_line:
            self._status_line.set_status(what)
        elif self._lines:
            self._status_line = StatusLine(self._print, what)

    def update(self, env_steps: int, rate: float, episode_return: float, note: str = "") -> None:
        """Moves the bar; `note` follows the return."""
        ret = f"{episode_return:.2f}" if math.isfinite(episode_return) else "…"
        if self._bar:
            self._bar.update(env_steps, f"{rate:,.0f} steps/s", f"return {ret}{note}")
        elif self._status_line:
            steps = f"{env_steps:,} of {self._total_steps:,} steps, {rate:,.0f} steps/s"
            self._status_line.status = f"; {steps}, return {ret}"

    def detail(self, text: str) -> None:
        """Prints a line if there is no bar."""
        if not self._bar:
            self.say(text)

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar:
            self._bar.say(text)
        elif self._lines:
            if self._status_line:
                self._status_line.put_off()
            self._print(text)

    def _print(self, text: str) -> None:
        lines.say(text)

    def warn(self, text: str) -> None:
        """Prints a line; a Python warning if nothing is shown."""
        if self._bar or self._lines:
            self.say(f"warning: {text}")
        else:
            warnings.warn(text, stacklevel=2)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar:
            self._bar.close()
        if self._status_line:
            self._status_line.close()


class _TerminalBar:
    """Rich's bar, below the printed lines."""

    def __init__(self, console: Any, total_steps: int, title: str, env_steps: int):
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        text = lambda name: TextColumn(f"{{task.{name}}}", markup=False)  # noqa: E731
        columns = (
            text("description"),
            BarColumn(),
            TaskProgressColumn(),
            text("fields[rate]"),
            text("fields[status]"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task(title, total=total_steps, completed=env_steps, rate="…", status="")
        self._progress.start()

    def update(self, env_steps: int, rate: str, status: str) -> None:
        self._progress.update(self._task, completed=env_steps, rate=rate, status=status)

    def say(self, text: str) -> None:
        # A path may hold [brackets] and :colons:, and is to be copied in one piece.
        self._progress.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


class _NotebookBar:
    """A bar that is an output of its cell, above the printed lines.

    Rich's own needs ipywidgets, stops short of the end, and is missing from the saved notebook.
    """

    SECONDS = 0.2
    """Seconds between two updates: each is a message to the browser."""

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
