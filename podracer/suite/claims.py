"""Claims on jobs, as files that workers share: on one machine, or on many with one disk.

The claim number g on a job is the file NAME.g, which one worker alone can create. Its holder touches it while it works.
A claim that is stale, or was given back, is not removed: the next worker creates claim g + 1. Again one worker alone
can do so, no matter how long ago the others looked. The newest claim on a job is the one that counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from typing import Any, Literal, NamedTuple

from podracer.system.lock import identity, lives, machine

TOUCH_SECONDS = 60.0
"""Seconds between two touches of a claim."""

STALE_SECONDS = 600.0
"""Seconds after the last touch until the claim of another machine is stale."""

ClaimState = Literal["free", "held", "ending"]
"""The state of a job: no worker runs it, one does, or a process does whose worker on this machine has died."""


class Claim(NamedTuple):
    """A claim that this process holds."""

    directory: pathlib.Path
    name: str
    number: int

    @property
    def path(self) -> pathlib.Path:
        return self.directory / f"{self.name}.{self.number}"

    def sign(self, *processes: int) -> None:
        """Writes the signature of the job's workers: this machine, this process and others."""
        signature = {"machine": machine(), "processes": [identity(pid) for pid in (os.getpid(), *processes)]}
        self.path.write_text(json.dumps(signature))

    def touch(self) -> bool:
        """Renews the claim; returns False if another worker has taken the job over."""
        with contextlib.suppress(OSError):  # a disk that is away for a minute ends no training
            if (self.directory / f"{self.name}.{self.number + 1}").exists():
                return False
            os.utime(self.path)
        return True

    def release(self) -> None:
        """Gives the job back."""
        with contextlib.suppress(OSError):
            os.utime(self.path, (0, 0))


def claim(directory: pathlib.Path, name: str) -> Claim | None:
    """Claims a job; None where another worker has it, or was faster.

    Raises:
      OSError: if the directory cannot be written.
    """
    number = newest(directory, name)
    if _state(directory, name, number) != "free":
        return None
    wanted = Claim(directory, name, number + 1)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.close(os.open(wanted.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return None
    wanted.sign()
    return wanted


def state(directory: pathlib.Path, name: str) -> ClaimState:
    """The state of the newest claim on a job."""
    return _state(directory, name, newest(directory, name))


def newest(directory: pathlib.Path, name: str) -> int:
    """The number of the newest claim on a job, from 1; 0 where there is none."""
    numbers = [path.suffix[1:] for path in directory.glob(f"{name}.*")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def _state(directory: pathlib.Path, name: str, number: int) -> ClaimState:
    if not number:
        return "free"
    path = directory / f"{name}.{number}"
    touched = path.stat().st_mtime
    if not touched:
        return "free"
    signature = _read(path)
    if signature.get("machine") == machine():
        worker, *others = (lives(process) for process in signature["processes"])
        return "held" if worker else "ending" if any(others) else "free"
    return "free" if now(directory) - touched > STALE_SECONDS else "held"


def now(directory: pathlib.Path) -> float:
    """The time by which files of a directory are dated: the clock of its disk, because machines' clocks may differ.

    Raises:
      OSError: if the directory cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".now-") as file:
        return os.fstat(file.fileno()).st_mtime


def _read(path: pathlib.Path) -> dict[str, Any]:
    """The signature; {} if it is not written yet."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return {}
