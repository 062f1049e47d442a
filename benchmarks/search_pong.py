"""MuZero, EfficientZero or SpeedyZero with its settings for Atari on Pong, to the last step and through a stop.

    python benchmarks/search_pong.py muzero [--batch-size 16] [--updates 80]
    python benchmarks/search_pong.py efficientzero [--batch-size 16] [--updates 80] [--skip-floor]
    python benchmarks/search_pong.py speedyzero [--batch-size 16] [--updates 80]

2,000 steps with the preset `atari`, or `speedyzero`, whose Clipped LARS begins after 20 updates here. Only numbers are
cut, for a machine of a few cores: lanes, how large batches are and how many of them, how many rows come before the
first and are kept (in checkpoints as well), how often the target is copied, and how long a game of evaluation takes.
The run gets a SIGTERM once it learns, and is resumed. Frames a second are of four frames a step. An update of
EfficientZero is measured in parts: learning, reanalysis, and eight updates at once, beside its network's operations at
the speed of a product of matrices. Writes `benchmarks/results/atari/pong-NAME.json`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from podracer.bench import measure
from podracer.run import metrics

RESULTS = pathlib.Path(__file__).parent / "results" / "atari"
STEPS, FIRST = 2_000, 1_000
GROUP = {"efficientzero": 8, "speedyzero": 5}
"""Updates that a preset reanalyses together."""
FRAMES = 4
"""A step."""


def arguments_of(name: str, batch_size: int, updates: int) -> str:
    """The arguments of `podracer train`."""
    agent, preset = "muzero", "atari"
    if G := GROUP.get(name):
        agent, preset = "efficientzero", "speedyzero" if name == "speedyzero" else "atari"
        final = max(G, updates // 5 // G * G)
        own = f"--final-updates {final} --agent.target-interval {2 * G} --agent.warmup-updates 20"
        own += " --agent.lars-start 20" * (name == "speedyzero")
    else:
        final, own = 0, "--num-envs 8 --checkpoint-replay"
    per_row = batch_size * (updates - final) / (STEPS - FIRST)
    return (
        f"{agent} envpool:Pong-v5 --preset {preset} --total-steps {STEPS} {own} "
        f"--agent.batch-size {batch_size} --agent.replay-ratio {per_row:g} --agent.replay-min-size {FIRST} "
        "--agent.replay-capacity 4000 --env.evaluation-max-episode-steps 100 --eval-episodes 8"
    )


def podracer(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "podracer", *arguments]


def learns(directory: pathlib.Path) -> bool:
    """Returns True if the run has reported an update."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return any(json.loads(line).get("updates", 0) > 0 for line in lines if line.endswith("\n"))


def stop(command: list[str], directory: pathlib.Path) -> int:
    """Runs a command until it learns and then stops it; returns the exit code."""
    process = subprocess.Popen(command)
    try:
        while process.poll() is None and not learns(directory):
            time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        return process.wait()
    finally:
        process.kill()


def parts(batch_size: int) -> dict[str, Any]:
    """Seconds of an update and of what it is made of, and its floor."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "reanalyse.json"
        settings = f"--preset atari --batch-size {batch_size} --rows 1000 --repeats 3 --seconds 1 --json {path}"
        script = str(pathlib.Path(__file__).parent / "reanalyse.py")
        command = [sys.executable, script, "--env", "envpool:Pong-v5", *settings.split()]
        subprocess.run([*command, "--only", "reanalysing", "groups"], check=True)
        found = json.loads(path.read_text())["results"]
    median = {name: sorted(rates)[len(rates) // 2] for name, rates in found["rates"].items()}
    seconds = {name: batch_size / rate for name, rate in median.items()}
    floors = {name: of * batch_size / found["product"] for name, of in found["operations_a_sample"].items()}
    return {
        "update": seconds["reanalysing"],
        "learning": seconds["learning"],
        "reanalysis": seconds["reanalysing"] - seconds["learning"],
        "update of a group of 8": seconds["groups"],
        "floor of an update": floors["reanalysing"],
        "floor of learning": floors["learning"],
        "gflops of a product": found["product"] / 1e9,
    }


def main() -> int:
    """Trains, stops, resumes and measures; the exit code says whether all of it went well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=("muzero", *GROUP))
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--skip-floor", action="store_true", help="train, and measure nothing else")
    given = parser.parse_args()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="podracer-pong-"))
    train = arguments_of(given.name, given.batch_size, given.updates)
    begin = time.monotonic()
    code = stop(podracer("train", *train.split(), "--run-dir", str(directory), "--quiet"), directory)
    stopped = json.loads((directory / "summary.json").read_text())
    print(f"stopped with exit code {code} at {stopped['env_steps']:,} steps, {stopped['updates']} updates", flush=True)
    resumed = subprocess.run(podracer("resume", str(directory), "--quiet"), check=False).returncode
    summary = json.loads((directory / "summary.json").read_text())
    wall = time.monotonic() - begin
    print(
        f"resumed with exit code {resumed}: {summary['env_steps']:,} steps, {summary['updates']} updates, {wall:.0f} s"
    )
    rows = metrics.read(directory / "metrics.jsonl")
    good = code == -signal.SIGTERM and not stopped["complete"] and resumed == 0 and summary["complete"]
    good = good and summary["updates"] > stopped["updates"] > 0
    results = {
        "went well": good,
        "stopped": {name: stopped[name] for name in ("env_steps", "updates")},
        "complete": {name: summary[name] for name in ("env_steps", "updates", "train_seconds", "eval_return_mean")},
        "wall_seconds": wall,
        "frames_per_second": FRAMES * summary["env_steps"] / summary["train_seconds"],
        "loss/total": [row["loss/total"] for row in rows if "loss/total" in row],
        "seconds": parts(given.batch_size) if given.name == "efficientzero" and not given.skip_floor else {},
    }
    shutil.rmtree(directory)
    print(json.dumps(results, indent=2))
    command = f"python benchmarks/search_pong.py {given.name} --batch-size {given.batch_size} --updates {given.updates}"
    measure.write(RESULTS / f"pong-{given.name}.json", command, {"train": f"podracer train {train}"}, results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
