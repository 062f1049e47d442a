"""Does a run learn what it should while workers are killed?

    python benchmarks/remote_losses.py [--seeds 3] [--every 10]

V-trace on EnvPool's CartPole, at two worker processes of which one is killed every ten seconds, and again with nobody
killed. Writes curves and final returns to `benchmarks/results/remote_losses.png` and `.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from podracer.bench import measure
from podracer.result import plots

RESULTS = pathlib.Path(__file__).parent / "results"
ENV, BOUND = "envpool:CartPole-v1", 475
TRAIN = ["train", "vtrace", ENV, "--total-steps", "1000000", "--remote.listen", "127.0.0.1:0", "--quiet"]


def podracer(*arguments: str, **kwargs: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "podracer", *arguments], text=True, **kwargs)


def children(pid: int) -> list[int]:
    """Worker processes of a supervisor: those that multiprocessing has spawned."""
    found = []
    with contextlib.suppress(OSError):  # of a process that ends while it is looked at
        for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if "multiprocessing.spawn" in pathlib.Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
    return found


def run(seed: int, every: float | None, folder: pathlib.Path) -> dict[str, Any]:
    """A run, its final return, and how many workers were killed meanwhile."""
    where, killed = f"file:{folder}/where", 0
    learner = podracer(
        *TRAIN, "--seed", str(seed), "--run-dir", str(folder / "run"), "--remote.announce", str(folder / "where")
    )
    workers = podracer(
        "serve-envs", ENV, "--connect", where, "--processes", "2", "--lanes", "16", "--quiet", stderr=subprocess.DEVNULL
    )
    try:
        last = None
        while learner.poll() is None:
            time.sleep(0.2)
            begun = (folder / "run" / "metrics.jsonl").exists()
            last = last or (time.monotonic() if begun else None)
            if every and last and time.monotonic() - last >= every:
                last = time.monotonic()
                there = children(workers.pid)
                if there:
                    os.kill(random.Random(killed).choice(there), signal.SIGKILL)
                    killed += 1
        if learner.returncode:
            raise RuntimeError(f"the learner failed: exit code {learner.returncode}.")
        code = workers.wait(30)
    finally:
        for process in (learner, workers):
            process.terminate()
            process.wait()
    summary = json.loads((folder / "run" / "summary.json").read_text())
    history = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    counts = [row for row in history if "remote/breaks" in row][-1]
    return {
        "seed": seed,
        "eval_return_mean": summary["eval_return_mean"],
        "env_steps": summary["env_steps"],
        "killed": killed,
        "breaks": counts["remote/breaks"],
        "filler_rows": counts["remote/filler_rows"],
        "rows": counts["remote/rows"],
        "workers_exit_code": code,
        "history": [row for row in history if "eval/return_mean" in row],
    }


def main() -> int:
    """Trains with and without losses; the exit code says whether the bound holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for label, every in ((f"a worker killed every {arguments.every:g} s", arguments.every), ("nobody killed", None)):
        results[label] = []
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                results[label].append(run(seed, every, pathlib.Path(folder)))
            said = results[label][-1]
            print(
                f"{label}, seed {seed}: {said['eval_return_mean']:.1f}; {said['killed']} killed, "
                f"{said['breaks']:.0f} blocks broke, {said['filler_rows']:.0f} filler rows of {said['rows']:.0f}",
                flush=True,
            )
    histories = {
        label: [row | {"member": i} for i, found in enumerate(runs) for row in found["history"]]
        for label, runs in results.items()
    }
    title = f"V-trace on remote CartPole, {arguments.seeds} seeds: mean, least and most"
    plots.learning_curve(histories, RESULTS / "remote_losses.png", title=title, metric="eval/return_mean")
    measure.write(RESULTS / "remote_losses.json", "python benchmarks/remote_losses.py", vars(arguments), results)
    with_losses = next(iter(results.values()))
    worst = min(found["eval_return_mean"] for found in with_losses)
    print(f"the least of {len(with_losses)} with losses: {worst:.1f} (required: {BOUND})")
    return 0 if worst >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
