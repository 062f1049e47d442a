"""The lock of a run directory: one run at a time writes there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import time
from typing import IO, Any

NAME = "lock"
"""The name of the lock file in a run directory; it exists while a process holds the lock."""


class RunLock:
    """Keeps a second run out of a run directory.

    The operating system holds the lock, so that it is free when its process is gone, however it ended. On file systems
    without locks, only the processes of one machine see each other.

    Args:
      directory: the run directory.
    """

    def __init__(self, directory: pathlib.Path):
        self._path = directory / NAME
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Takes the lock, also of a process that is gone.

        Raises:
          ValueError: if another process has it (the message says which and since when), or the directory cannot be
            written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while self._file is None:
                self._file = self._try()
            self._file.truncate(0)
            json.dump(_signature(), self._file)
            self._file.flush()
        except OSError as error:
            raise ValueError(f"cannot write to run directory {self._path.parent}: {error}.") from error

    def _try(self) -> IO[str] | None:
        """The locked file, or None if another process has just removed the opened one.

        Raises:
          ValueError: if it is another's.
        """
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._path.open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked: bool | None = False
            except BlockingIOError:
                is_locked = True
            except OSError:  # there are no locks here
                is_locked = None
            holder = _read(file)
            is_here = holder.get("machine") == machine()
            if (is_locked and not is_here) or (is_locked is not False and is_here and lives(holder["process"])):
                raise ValueError(
                    f"{self._path.parent} is in use: {_describe(holder)} trains there; wait for its end, stop it, or "
                    "use another run directory."
                )
            if is_locked and self._is_at(file):  # by what a process that is gone has started
                self._path.unlink(missing_ok=True)
            if is_locked or not self._is_at(file):
                return None
            stack.pop_all()
            return file

    def _is_at(self, file: IO[str]) -> bool:
        """True while an open file is the one of that name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        return False

    def close(self) -> None:
        """Releases the lock."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _signature() -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return {"host": socket.gethostname(), "process": identity(os.getpid()), "since": since, "machine": machine()}


def _read(file: IO[str]) -> dict[str, Any]:
    """The signature; {} where it is not written yet."""
    file.seek(0)
    with contextlib.suppress(ValueError):
        found = json.loads(file.read())
        if isinstance(found, dict) and isinstance(found.get("process"), list):
            return found
    return {}


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder['process'][0]} on {holder.get('host')}, since {holder.get('since')},"


def machine() -> str:
    """The name of the place in which process numbers are unique: a host since its start, and a container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def identity(pid: int) -> list[int]:
    """The number of a process and, on Linux, its start time, because numbers are used again."""
    with contextlib.suppress(OSError):
        status = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return [pid, int(status[19])] if status[0] != "Z" else [0]
    return [pid]


def lives(process: list[int]) -> bool:
    """True while the process of an identity lives."""
    pid = process[0]
    if len(process) > 1:
        return identity(pid) == process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0
