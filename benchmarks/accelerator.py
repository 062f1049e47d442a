"""Runs podracer on an accelerator: does it learn there, and how fast is it?

    python benchmarks/accelerator.py learning anakin           # some parts; all if none is named
    python benchmarks/accelerator.py --output results.json

`learning` trains small agents side by side and compares returns with what they have on a CPU; the other parts measure,
one command after the other. Each command's figures go to `benchmarks/results/accelerator.json` after those that are
there already, and a command that fails leaves the end of what it said. The exit code says whether all went well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from podracer.bench import measure

RESULTS = pathlib.Path(__file__).parent / "results" / "accelerator.json"

LEARNING = {
    # name: (arguments of `podracer train`, return)
    "ppo catch": ("ppo catch --total-steps 500000", 0.95),
    "ppo cartpole": ("ppo cartpole --total-steps 500000", 475),
    "vtrace pixel_catch": ("vtrace pixel_catch --total-steps 100000", 0.9),
    "r2d2 catch": ("r2d2 catch --total-steps 100000", 0.95),
    "ppo memory_chain, LSTM": (
        "ppo memory_chain --env.length 10 --agent.core lstm --agent.core-size 64 --total-steps 200000",
        0.9,
    ),
    "dqn catch": ("dqn catch --total-steps 150000", 0.9),
    "pqn cartpole": ("pqn cartpole --total-steps 500000", 475),
    "muzero catch": ("muzero catch --total-steps 30000", 0.9),
    "efficientzero catch": ("efficientzero catch --total-steps 15000", 0.9),
    "vtrace envpool:CartPole-v1": ("vtrace envpool:CartPole-v1 --total-steps 1000000 --actor-threads 2", 475),
}

SPEED: dict[str, dict[str, str]] = {
    "anakin": {
        "gridworld": 'anakin --agents vtrace --env gridworld --env-options \'{"task": "random_goals"}\' '
        "--num-envs 1024 16384 65536 --only training --repeats 3",
        "beside plain loops": "anakin --num-envs 1024 --only training yardstick --repeats 3",
        "many lanes": "anakin --num-envs 65536 --only training --repeats 3",
    },
    "sebulba": {
        "pong": "sebulba --presets pong --num-envs 128 --pool-threads 7 --actor-threads 2 --repeats 3",
        "pong-resnet": "sebulba --presets pong-resnet --num-envs 128 --pool-threads 7 --actor-threads 2 --repeats 3",
    },
    "dqn": {"pong": "dqn --setting pong --lanes 1 8 --repeats 3"},
    "replay": {"sequences of frames": "replay --frame 7056 --sequences 100000 --repeats 3"},
    "search": {
        "planes": "search --lanes 12288 --actions 18 --network planes --repeats 5",
        "toy": "search --lanes 512 --repeats 5",
    },
    "reanalyse": {
        "Atari": "reanalyse --env envpool:Pong-v5 --preset atari --only reanalysing groups --repeats 3",
    },
}
SECONDS = 300
"""The time limit of a command, in seconds."""


def start(command: list[str], log: Any, **variables: str) -> subprocess.Popen[Any]:
    """Starts a process that shares its log; `command` are the words after `python`."""
    command = [sys.executable, *command]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | variables)


def learning(keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Trains all of `LEARNING` at once, for nothing is timed; the mean return of the last evaluation, and its bound."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as stack:
        running = {}
        for name, (arguments, _) in LEARNING.items():
            directory = pathlib.Path(folder) / name.replace(" ", "_").replace(":", "_")
            log = stack.enter_context(open(f"{directory}.log", "w+"))
            words = ["-m", "podracer", "train", *arguments.split(), "--run-dir", str(directory), "--quiet"]
            process = start(words, log, XLA_PYTHON_CLIENT_PREALLOCATE="false")
            stack.callback(process.kill)
            running[name] = process, log, directory
        deadline = time.monotonic() + SECONDS
        for name, (process, log, directory) in running.items():
            arguments, bound = LEARNING[name]
            one: dict[str, Any] = {"command": f"podracer train {arguments}", "commit": measure.commit(), "bound": bound}
            one["code"] = finish(process, deadline)
            if one["code"]:
                log.seek(0)
                one["said"] = log.read()[-2000:]
            else:
                summary = json.loads((directory / "summary.json").read_text())
                told = ("device", "jax", "env_steps", "train_seconds", "compile_seconds", "eval_return_mean")
                one |= {key: summary[key] for key in told}
                one["good"] = one["eval_return_mean"] >= bound
            print(name, json.dumps(one), flush=True)
            keep(name, one)


def finish(process: subprocess.Popen[Any], deadline: float) -> int:
    """A process' exit code, 124 if it has not ended in time."""
    try:
        return process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 124


def speed(commands: dict[str, str], keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Runs benchmarks one after the other: those of `podracer bench`, and files of this folder."""
    for name, arguments in commands.items():
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+") as log:
            path = pathlib.Path(folder) / "results.json"
            bench, *options = shlex.split(arguments)
            file = pathlib.Path(__file__).parent / f"{bench}.py"
            words = [str(file)] if bench in ("dqn", "reanalyse") else ["-m", "podracer", "bench", bench]
            process = start([*words, *options, "--json", str(path)], log)
            typed = arguments.removeprefix(f"{bench} ")
            shown = f"python benchmarks/{bench}.py {typed}" if len(words) == 1 else f"podracer bench {arguments}"
            one: dict[str, Any] = {"command": shown, "code": finish(process, begin + SECONDS)}
            log.seek(0)
            said = log.read()
            one |= (
                json.loads(path.read_text()) | {"command": one["command"]} if path.exists() else {"said": said[-2000:]}
            )
        one["wall_seconds"] = round(time.monotonic() - begin, 1)
        print(f"== {name}: {one['command']} ({one['wall_seconds']} s)\n{said[-2500:]}", flush=True)
        keep(name, one)


def main() -> int:
    """Runs parts and writes their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of learning, {', '.join(SPEED)}")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    given = parser.parse_args()
    unknown = set(given.parts) - {"learning", *SPEED}
    if unknown:
        parser.error(f"no part {unknown.pop()!r}; there are learning, {', '.join(SPEED)}")
    there = given.output.exists()
    written = json.loads(given.output.read_text()) if there else {"command": "python benchmarks/accelerator.py"}
    results = written.setdefault("results", {})
    failed = []
    for part in given.parts or ["learning", *SPEED]:

        def keep(name: str, one: dict[str, Any], part: str = part) -> None:
            results.setdefault(part, {})[name] = one
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(written, indent=2) + "\n")
            if one["code"] or not one.get("good", True):
                failed.append(f"{part}, {name}")

        learning(keep) if part == "learning" else speed(SPEED[part], keep)
    print(f"failed: {'; '.join(failed)}" if failed else "all went well", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
