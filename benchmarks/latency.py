"""Time from command to result, by its parts, in fresh processes with a cold and with a warm cache.

python benchmarks/latency.py                   # `podracer train ppo cartpole`, cold and warm
python benchmarks/latency.py --before CLONE    # in turns with the code of another commit
python benchmarks/latency.py --compile         # seconds to compile the default program of each agent, cold

Other processes on the same cores count too: run it on a quiet machine. The processor time of all threads is next to the
seconds of the clock. A part is the time that the main thread spends in it, without the parts inside. What other
threads do meanwhile is listed below.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Annotated, Any

import latency_programs
import script
import tyro

from podracer.system import files
from podracer.version import __version__

HERE = pathlib.Path(__file__).parents[1]
RESULTS = pathlib.Path(__file__).parent / "results" / "latency.json"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Seconds from command to result.

    Attributes:
      command: words after `podracer train`.
      before: a clone of another commit, which runs in turns with this one.
      rounds: runs of each, cold and warm.
      compile: measure programs instead.
      only: with compile, those agents.
      out: JSON file.
    """

    command: Annotated[tuple[str, ...], tyro.conf.Positional] = ("ppo", "cartpole")
    before: pathlib.Path | None = None
    rounds: int = 1
    compile: bool = False
    only: tuple[str, ...] = ()
    out: pathlib.Path = RESULTS


def main(arguments: Arguments) -> int:
    """Measures, prints and writes."""
    stored = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if arguments.compile:
        # Of an agent that is measured again the quicker time counts: neighbours only add to it.
        table = latency_programs.measure(arguments.only)
        earlier = stored.get("compile", {}).get("agents", {}) if arguments.only else {}
        agents = earlier | {
            name: min(row, earlier.get(name, row), key=lambda one: one["compile_seconds"])
            for name, row in table["agents"].items()
        }
        stored["compile"] = table | {"agents": agents}
    else:
        stored["command"] = _commands(arguments)
    files.write(arguments.out, json.dumps(stored, indent=1) + "\n")
    return 0


def _commands(arguments: Arguments) -> dict[str, Any]:
    """Runs the command with both caches, of each clone in turns; the quickest run of each counts."""
    clones = {"before": arguments.before, "after": HERE} if arguments.before else {"after": HERE}
    runs: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for name, clone in clones.items():
                place = pathlib.Path(folder) / f"{name}-{number}"
                for cache in ("cold", "warm"):
                    runs[f"{name}, {cache}"].append(run(clone.absolute(), arguments.command, place, cache))
    best = {name: min(found, key=lambda one: one["result_seconds"]) for name, found in runs.items()}
    for name, found in runs.items():
        best[name]["all_result_seconds"] = [one["result_seconds"] for one in found]
        show(name, best[name])
    return {
        "command": " ".join(("podracer train", *arguments.command)),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "podracer": __version__,
        "commits": {name: _commit(clone) for name, clone in clones.items()},
        "runs": best,
    }


def run(clone: pathlib.Path, command: tuple[str, ...], place: pathlib.Path, name: str) -> dict[str, Any]:
    """Runs a command in a fresh process.

    Args:
      clone: the code.
      command: words after `podracer train`.
      place: a folder; its cache is used.
      name: of the run directory.

    Returns:
      Seconds until its first line on standard output (the result) and until it has ended, with its parts.
    """
    place.mkdir(exist_ok=True)
    spans = place / f"{name}.json"
    variables = {"PYTHONPATH": str(clone), "XDG_CACHE_HOME": str(place / "cache"), "PODRACER_SPANS": str(spans)}
    words = [sys.executable, "-m", "podracer", "train", *command, "--run-dir", str(place / name)]
    began = time.time()
    with (place / f"{name}.err").open("w") as errors:
        process = subprocess.Popen(
            words, cwd=place, env=os.environ | variables, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout
        line = process.stdout.readline()
        result = time.time()
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        ended = time.time()
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError((place / f"{name}.err").read_text())
    found = {
        "result_seconds": result - began,
        "exit_seconds": ended - began,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "line": line.strip(),
        "train_seconds": json.loads((place / name / "summary.json").read_text())["train_seconds"],
    }
    if spans.exists():
        found |= parts(json.loads(spans.read_text()), began, ended)
    return found


def parts(told: dict[str, Any], began: float, ended: float) -> dict[str, Any]:
    """The seconds of each part of the main thread, in the order of their beginnings, and those of other threads."""
    spans = sorted(told["spans"], key=lambda span: (span["at"], -span["wall"]))
    main = [span for span in spans if span["thread"] == "MainThread"]
    seconds: dict[str, float] = {"start of Python": main[0]["at"] - began}
    open_: list[dict[str, Any]] = []
    own = collections.defaultdict(float)
    for span in main:
        while open_ and span["at"] >= open_[-1]["at"] + open_[-1]["wall"] - 1e-4:
            open_.pop()
        if open_:
            own[_part(open_[-1])] -= span["wall"]
        own[_part(span)] += span["wall"]
        open_.append(span)
    seconds |= own
    seconds["exit"] = ended - told["ended"]
    seconds["between them"] = ended - began - sum(seconds.values())
    others = collections.defaultdict(float)
    for span in spans:
        if span["thread"] != "MainThread":
            others[f"{span['name']} ({span['thread'].partition('_')[0]})"] += span["wall"]
    return {
        "parts": {name: round(value, 3) for name, value in seconds.items()},
        "other_threads": {name: round(value, 3) for name, value in others.items() if value >= 0.005},
    }


def _part(span: dict[str, Any]) -> str:
    """The part that a span belongs to: JAX's stages of large programs by name, and of small ones together."""
    name = span["name"]
    if name.partition(" ")[0] not in ("trace", "lower", "compile", "read"):
        return name
    return name if span["wall"] >= 0.1 else f"{name.partition(' ')[0]} others"


def show(name: str, found: dict[str, Any]) -> None:
    """Prints a run's parts."""
    print(
        f"\n{name}: {found['result_seconds']:.2f} s to the result, {found['exit_seconds']:.2f} s to the end, "
        f"{found['cpu_seconds']:.2f} s of processor time, {found['train_seconds']:.2f} s of training"
    )
    for part, seconds in found.get("parts", {}).items():
        print(f"  {seconds:7.2f}  {part}")
    for part, seconds in found.get("other_threads", {}).items():
        print(f"      meanwhile {seconds:6.2f}  {part}")


def _commit(clone: pathlib.Path) -> str:
    return subprocess.run(
        ["git", "-C", str(clone), "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(script.run("latency", Arguments, main))
