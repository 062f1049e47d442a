"""Kernel launches of an update, compiled for an H200 on a machine that has none (`make compilers`).

    python benchmarks/launches.py                    # V-trace on catch and PPO on cartpole, 1,024 lanes
    python benchmarks/launches.py --before CLONE     # in turns with the code of another commit

Nothing here is a time on a GPU. Processor seconds are those of a process that imports, traces and compiles; other
processes on the same cores make them longer. XLA_FLAGS reach the compiler.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
from typing import Any

import hlo
import script

from podracer.bench import measure

ROOT = pathlib.Path(__file__).parents[1]
LOOPS = {"vtrace": ("rollout",), "ppo": ("rollout", "minibatches")}
"""The loops within an update of each program, in their order."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Kernel launches of an update.

    Attributes:
      programs: those of `LOOPS` to compile.
      before: a clone of another commit, which is compiled too; without it, nothing is written.
      rounds: compilations of each, in turns; the least processor time counts.
      out: JSON file.
    """

    programs: tuple[str, ...] = tuple(LOOPS)
    before: pathlib.Path | None = None
    rounds: int = 1
    out: pathlib.Path = ROOT / "benchmarks" / "results" / "launches.json"


def main(arguments: Arguments) -> int:
    """Compiles, prints and writes."""
    sources = {"before": arguments.before, "after": ROOT} if arguments.before else {"after": ROOT}
    results: dict[str, Any] = {}
    for name in arguments.programs:
        for _ in range(arguments.rounds):
            for when, source in sources.items():
                new, old = compiled(source, name), results.setdefault(name, {}).get(when)
                if old:
                    new["cpu_seconds"] = min(old["cpu_seconds"], new["cpu_seconds"])
                results[name][when] = new
                print(f"{name}, {when}: {new}", flush=True)
    settings = {"programs": arguments.programs, "rounds": arguments.rounds}
    if arguments.before:
        measure.write(arguments.out, "python benchmarks/launches.py --before CLONE", settings, results)
    return 0


def compiled(source: pathlib.Path, name: str) -> dict[str, Any]:
    """Compiles a program with the code in `source`; its launches, by loop and kind, and processor seconds.

    Raises:
      RuntimeError: where it does not compile.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        variables = {"PYTHONPATH": str(source), "PODRACER_DUMP_HLO": folder}
        command = [sys.executable, str(source / "tests/support/compilers.py"), "h200", name]
        done = subprocess.run(command, env=os.environ | variables, cwd=source, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}")
        text = (pathlib.Path(folder) / f"gpu-{name}.txt").read_text()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = sum(getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime"))
    loops = ("outside", *LOOPS[name])
    parts = {loop: {"turns": turns, **kinds} for loop, (turns, kinds) in zip(loops, hlo.parts(text), strict=True)}
    commit = subprocess.run(["git", "-C", str(source), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    found = {"kernels": hlo.count(text).kernels, "cpu_seconds": round(seconds, 1), "commit": commit.stdout.strip()}
    return found | {"parts": parts}


if __name__ == "__main__":
    sys.exit(script.run("launches", Arguments, main))
