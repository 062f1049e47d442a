"""Measures speed: in turns, on a machine that is named, next to loops written by hand."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from podracer import configs
from podracer.system import files
from podracer.version import __version__

SOURCE = pathlib.Path(__file__).parent.parent.parent
"""The checkout's root, if this is a checkout."""

Measured = Callable[[int], int]
"""Does n repetitions of something and waits for them; returns rows done."""


def in_turns(
    measured: dict[str, Measured], repeats: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Interleaves measurements, so that a machine that slows down slows all of them.

    Args:
      measured: by name.
      repeats: measurements of each.
      seconds: of a measurement.
      clock: in seconds; `time.process_time` counts those of the processor, where neighbours are busy.

    Returns:
      Rows a second of each measurement, by name.
    """
    sizes = {}

    def prepare(call: Measured) -> None:
        getattr(call, "prepare", lambda: None)()

    for key, call in measured.items():
        call(1)
        prepare(call)
        n, elapsed = 1, 0.0
        while elapsed < seconds / 4:
            n *= 2
            start = clock()
            call(n)
            elapsed = clock() - start
        sizes[key] = max(1, int(n * seconds / elapsed))
    rates: dict[str, list[float]] = {key: [] for key in measured}
    for _ in range(repeats):
        for key, call in measured.items():
            prepare(call)
            start = clock()
            rows = call(sizes[key])
            rates[key].append(rows / (clock() - start))
    return rates


def yardstick(file: str) -> Any:
    """A module of `benchmarks/`; prints a line and returns None if it, or one of its imports, is missing."""
    path = SOURCE / "benchmarks" / file
    if not path.exists():
        print(f"no yardstick: {path} is only in a source checkout.", file=sys.stderr)
        return None
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        print(f"no yardstick: {path.name} cannot be used here ({error}).", file=sys.stderr)
        return None
    return module


def over_training(history: list[dict[str, Any]], member: int) -> float:
    """The mean evaluation return over training (the area under the learning curve), by the trapezoidal rule."""
    rows = [row for row in history if "eval/return_mean" in row and row.get("member", 0) == member]
    x = np.array([row["env_steps"] for row in rows], float)
    y = np.array([row["eval/return_mean"] for row in rows])
    return float(np.trapezoid(y, x) / (x[-1] - x[0]))


def table(lines: list[list[str]]) -> str:
    """Cells in columns, to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def write(path: pathlib.Path, command: str, arguments: Any, results: Any) -> None:
    """Writes results as JSON, with command, commit, machine, versions and arguments."""
    report = {
        "podracer": __version__,
        "jax": jax.__version__,
        "machine": describe_machine(),
        "commit": commit(),
        "versions": versions(),
        "command": command,
        "settings": configs.to_json(arguments) | {"json": None},
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(report, indent=2, default=str) + "\n")
    print(f"wrote {path}")


def describe_machine() -> str:
    """Device and processor, for tables and files."""
    device = jax.local_devices()[0]
    name = device.device_kind
    if device.platform == "cpu":
        name = _cpu_model() or platform.machine()
    count, cores = len(jax.local_devices()), os.cpu_count()
    return f"{count} x {device.platform} ({name}, {cores} cores), Python {platform.python_version()}"


def _cpu_model() -> str | None:
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return None
    lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return lines[0].split(":", 1)[1].strip() if lines else None


def versions() -> dict[str, str]:
    """The versions of the packages on which figures depend."""
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {name: importlib.metadata.version(name) for name in names} | {"python": platform.python_version()}


def commit() -> str | None:
    """The checkout's commit, with `-dirty` if any file but results has changed; None outside of a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
    return (f"{name}-dirty" if changed else name) or None
