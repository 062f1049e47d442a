"""The run directory that processes share, and calls that process 0 makes for all."""

from __future__ import annotations

import pathlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from podracer.topology.processes import Processes

SHARED_SECONDS = 30.0
"""Seconds in which all processes must see a file that process 0 wrote."""


def directory(run_dir: str | pathlib.Path | None, processes: Processes) -> pathlib.Path | None:
    """The run directory of process 0, which may have chosen a new one; all must see it, for all write checkpoints.

    Raises:
      ValueError: where they do not, or process 0 cannot write there.
    """
    first_run_dir = processes.broadcast(None if run_dir is None else str(run_dir))
    if first_run_dir is None or processes.count == 1:
        return None if first_run_dir is None else pathlib.Path(first_run_dir)
    path, proof = pathlib.Path(first_run_dir), secrets.token_hex(8)
    mark = path / f".shared-{processes.broadcast(proof)}"

    def make() -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise ValueError(f"cannot write to run directory {path}: {error}.") from error

    by_first(processes, make)
    until = time.monotonic() + SHARED_SECONDS
    while not mark.exists() and time.monotonic() < until:
        time.sleep(0.1)  # a network's file system may be late
    blind = [str(i) for i, seen in enumerate(processes.all_gather(mark.exists())) if not seen]
    if processes.is_first:
        mark.unlink(missing_ok=True)
    if blind:
        raise ValueError(f"run_dir {path} is not shared: process {', '.join(blind)} cannot see what 0 writes there.")
    return path


def by_first(processes: Processes, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in process 0, and returns what it returned there, which JSON can hold, in all processes.

    Raises:
      ValueError: in all processes, where the function raised it.
    """
    found: dict[str, Any] = {}
    if processes.is_first:
        try:
            found = {"value": function(*arguments)}
        except ValueError as error:
            found = {"error": str(error)}
    found = processes.broadcast(found)
    if "error" in found:
        raise ValueError(found["error"])
    return found["value"]
