"""Kills runs at random moments, and compares what goes on from there with a run that nothing happened to.

    python benchmarks/random_stops.py --stops 50

Each run is of a tiny task that evaluates and saves often, in a process group of its own, as a shell has it, with and
without `2>&1 | tee`. At a random moment it gets SIGKILL, SIGTERM, or Ctrl-C (SIGINT to the whole group). Then: the
exit code is the documented one, a run that was stopped in good order has lost nothing, one that was killed has a
checkpoint no older than `--minutes` and 15 seconds, and `podracer resume` ends in the very arrays of the undisturbed
run. One row a run goes to the table; exit code 1 where one of them is not as it should be.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

TASKS = {
    "anakin": "ppo catch --num-envs 8 --total-steps 100000",
    "sebulba": "vtrace catch --num-envs 8 --arch sebulba --mode lockstep --total-steps 20000",
}
"""The tasks; their results are bit for bit the same each time (docs/concepts/reproducibility.md)."""

COMMON = "--agent.rollout-length 10 --agent.hidden-sizes 8 --eval-episodes 8 --quiet"
EVALUATIONS, CHECKPOINTS = 20, 12
"""Evaluations and checkpoints of a run; random moments fall into them."""

STOPS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
GRACE_SECONDS = 15.0


@dataclasses.dataclass
class Row:
    """The outcome of a run.

    Attributes:
      task: of `TASKS`.
      stop: the signal's name.
      tee: whether its output went through `tee`.
      at: seconds until the signal, or until the run was complete before.
      code: as a shell says it.
      lost: seconds of training that were lost; negative where there was nothing yet.
      problems: what is not as it should be.
    """

    task: str
    stop: str
    tee: bool
    at: float
    code: int
    lost: float
    problems: list[str]


def command(task: str, run_dir: pathlib.Path, minutes: float) -> list[str]:
    """`podracer train`, as it is typed."""
    steps = _steps(task)
    every = f"--eval-every {steps // EVALUATIONS} --checkpoint-every {steps // CHECKPOINTS}"
    every += f" --checkpoint-minutes {minutes} --run-dir {run_dir}"
    return [sys.executable, "-m", "podracer", "train", *TASKS[task].split(), *COMMON.split(), *every.split()]


def steps_of(run_dir: pathlib.Path) -> list[int]:
    """The whole checkpoints, oldest first."""
    folder = run_dir / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def arrays(run_dir: pathlib.Path) -> dict[str, Any]:
    """Every array of the newest checkpoint by name, read with Orbax alone."""
    import orbax.checkpoint as ocp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ocp.StandardCheckpointer().restore(run_dir / "checkpoints" / str(steps_of(run_dir)[-1]) / "state")


@functools.cache
def undisturbed(task: str, directory: pathlib.Path, minutes: float) -> dict[str, Any]:
    """The last arrays of a run that nothing happens to."""
    subprocess.run(command(task, directory / task, minutes), check=True)
    return arrays(directory / task)


def moment(task: str, run_dir: pathlib.Path, chance: random.Random) -> Callable[[float], bool]:
    """Says whether it is time, so many seconds after the start; for one run in ten before its first step.

    Steps, and not seconds, so that a machine that is busy changes little.
    """
    share, later = chance.uniform(-0.1, 1.0), chance.uniform(0.0, 0.5)
    if share < 0:
        return lambda seconds: seconds > 20 * later
    reached: list[float] = []

    def due(seconds: float) -> bool:
        if not reached and _newest(run_dir) >= share * _steps(task):
            reached.append(seconds)
        return bool(reached) and seconds >= reached[0] + later

    return due


def _newest(run_dir: pathlib.Path) -> int:
    """The step of the newest row of metrics."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4000))
            return json.loads(file.read().split(b"\n")[-2])["env_steps"]
    except (OSError, ValueError, IndexError):
        return -1


def _steps(task: str) -> int:
    words = TASKS[task].split()
    return int(words[words.index("--total-steps") + 1])


def stop(
    run: list[str], run_dir: pathlib.Path, number: signal.Signals, due: Callable[[float], bool], tee: bool
) -> tuple[int, float]:
    """Starts a run and sends the signal when it is due; returns the code that a shell says, and when it came."""
    pipe = f" 2>&1 | tee {shlex.quote(str(run_dir))}.log" if tee else f" 2> {shlex.quote(str(run_dir))}.log"
    script = f"trap : INT TERM; echo begun; {shlex.join(run)}{pipe}; echo code ${{PIPESTATUS[0]}} >&3"
    reader, writer = os.pipe()
    shell = subprocess.Popen(
        ["bash", "-c", f"exec 3>&{writer}; {script}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # the shell's own words on who was killed
        pass_fds=[writer],
        start_new_session=True,
    )
    os.close(writer)
    begin = time.monotonic()
    while not due(time.monotonic() - begin) and shell.poll() is None:
        time.sleep(0.01)
    at = time.monotonic() - begin
    if shell.poll() is None:
        if number == signal.SIGINT:
            os.killpg(shell.pid, number)  # a terminal's, to all of them
        else:
            for pid in _children(shell.pid):
                if b"podracer" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, number)
    with os.fdopen(reader) as said:
        words = said.read().split()  # until all who could write there have ended
    shell.wait()
    return int(words[words.index("code") + 1]) if "code" in words else 128 - shell.returncode, at


def _children(pid: int) -> list[int]:
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def try_once(
    task: str, number: signal.Signals, tee: bool, chance: random.Random, directory: pathlib.Path, minutes: float
) -> Row:
    """One run, its end and how it goes on."""
    reference = undisturbed(task, directory, minutes)
    run_dir = directory / f"{task}-{number.name}-{chance.randrange(10**9)}"
    due = moment(task, run_dir, chance)
    code, at = stop(command(task, run_dir, minutes), run_dir, number, due, tee)
    died, problems = time.time(), []
    saved, summary = steps_of(run_dir), run_dir / "summary.json"
    complete = summary.exists() and json.loads(summary.read_text())["complete"]
    begun = (run_dir / "metrics.jsonl").exists()
    expected = {0} if complete else {128 + number} if begun else {128 + number, 130}
    if code not in expected:
        problems.append(f"exit code {code} instead of {' or '.join(map(str, sorted(expected)))}")
    lost = -1.0
    if saved:
        lost = 0.0 if number != signal.SIGKILL else died - (run_dir / "checkpoints" / str(saved[-1])).stat().st_mtime
        if lost > 60 * minutes + GRACE_SECONDS:
            problems.append(f"the newest checkpoint is {lost:.0f} s old")
    if not complete and number != signal.SIGKILL and summary.exists():
        stopped = json.loads(summary.read_text())
        if saved[-1:] != [stopped["env_steps"]]:
            problems.append(f"checkpoints {saved} of a run that was stopped at {stopped['env_steps']}")
    if not complete and number != signal.SIGKILL and begun and not summary.exists():
        problems.append("it did not end in good order")
    resume = [*command(task, run_dir, minutes), "--resume"]
    if subprocess.run(resume, check=False).returncode:
        problems.append("it does not go on")
    else:
        found = arrays(run_dir)
        differ = [name for name in reference if not np.array_equal(reference[name], found.get(name))]
        problems += [f"{len(differ)} arrays differ, such as {differ[0]}"] if differ else []
        shutil.rmtree(run_dir)
    return Row(task, number.name, tee, at, code, lost, problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.05, help="--checkpoint-minutes of the runs")
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=sorted(TASKS))
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    chance, directory = random.Random(given.seed), pathlib.Path(tempfile.mkdtemp(prefix="podracer-stops-"))
    cases = [(task, number, tee) for tee in (False, True) for number in STOPS for task in given.tasks]
    bad = 0
    print(f"{'task':8} {'signal':8} {'tee':4} {'at':>6} {'code':>5} {'lost':>6}", flush=True)
    for i in range(given.stops):
        task, number, tee = cases[i % len(cases)]
        row = try_once(task, number, tee, chance, directory, given.minutes)
        bad += bool(row.problems)
        lost = "-" if row.lost < 0 else f"{row.lost:.1f}"
        said = "; ".join(row.problems) or "as it should be"
        print(
            f"{task:8} {row.stop:8} {'tee' if tee else '':4} {row.at:6.1f} {row.code:5} {lost:>6}  {said}", flush=True
        )
    print(f"{given.stops - bad} of {given.stops} as they should be ({directory})")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
