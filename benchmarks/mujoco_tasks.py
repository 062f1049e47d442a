"""PPO on MuJoCo: the preset `mujoco` beside the defaults, five seeds of each on three tasks.

    python benchmarks/mujoco_tasks.py             # trains what is missing, one run at a time
    python benchmarks/mujoco_tasks.py --report    # the table and the picture of what is there

Each run is the command that a user would type. The policy at its end is evaluated on 100 fresh episodes; the best
checkpoint does not count. Runs go to `benchmarks/results/mujoco.json` and curves to `mujoco.png`. The exit code says
whether the preset's mean over seeds reaches the bound on every task.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

import podracer
from podracer.bench import measure
from podracer.result import plots
from podracer.run import metrics

RESULTS = pathlib.Path(__file__).parent / "results"
FILE = RESULTS / "mujoco.json"

TASKS = {"Hopper": 2000, "HalfCheetah": 1300, "Walker2d": 1600}
"""The least mean return over seeds after a million steps, by task."""

ARMS = {"preset": "--preset mujoco", "defaults": "--total-steps 1000000"}
"""Flags by settings."""

SEEDS, EPISODES = range(5), 100


def train(task: str, arm: str, seed: int) -> dict[str, Any]:
    """Trains and evaluates one seed; returns what is stored of it."""
    command = f"podracer train ppo envpool:{task}-v4 {ARMS[arm]} --seed {seed}"
    with tempfile.TemporaryDirectory(prefix="podracer-mujoco-") as directory:
        words = [*command.split()[1:], "--run-dir", directory + "/run", "--quiet"]
        subprocess.run([sys.executable, "-m", "podracer", *words], check=True)
        result = podracer.load(directory + "/run")
        evaluation = result.evaluate(EPISODES, seed=1000 + seed)
        rows = metrics.read(pathlib.Path(directory) / "run" / "metrics.jsonl")
    curve = [(row["env_steps"], row["eval/return_mean"]) for row in rows if "eval/return_mean" in row]
    summary = {name: result.summary[name] for name in ("env_steps", "train_seconds", "steps_per_second")}
    return {
        "task": task,
        "settings": arm,
        "seed": seed,
        "return": evaluation.mean,
        "std": evaluation.std,
        **summary,
        "commit": measure.commit(),
        "command": command,
        "curve": curve,
    }


def stored() -> list[dict[str, Any]]:
    """The runs that are there, with their curves."""
    if not FILE.exists():
        return []
    results = json.loads(FILE.read_text())["results"]
    return [run | {"curve": results["curves"][run["command"]]} for run in results["runs"]]


def write(runs: list[dict[str, Any]]) -> None:
    """Writes runs, summary and picture."""
    without = [{name: value for name, value in run.items() if name != "curve"} for run in runs]
    results = {"summary": summary(runs), "runs": without, "curves": {run["command"]: run["curve"] for run in runs}}
    measure.write(FILE, "python benchmarks/mujoco_tasks.py", {"episodes": EPISODES}, results)
    picture(runs)


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The mean return over seeds with its 95% interval (bootstrap), by task and settings."""
    found = {}
    for task, bound in TASKS.items():
        for arm in ARMS:
            ends = [run["return"] for run in of(runs, task, arm)]
            if ends:
                draws = np.random.default_rng(0).choice(ends, (10_000, len(ends))).mean(1)
                interval = np.quantile(draws, (0.025, 0.975)).tolist()
                numbers = {"mean": float(np.mean(ends)), "interval": interval, "seeds": ends}
                found[f"{task}, {arm}"] = numbers | ({"required": bound} if arm == "preset" else {})
    return found


def of(runs: list[dict[str, Any]], task: str, arm: str) -> list[dict[str, Any]]:
    """The runs of a task with some settings, by seed."""
    return sorted((r for r in runs if (r["task"], r["settings"]) == (task, arm)), key=lambda r: r["seed"])


def report(runs: list[dict[str, Any]]) -> bool:
    """Prints the table; returns whether the preset reaches the bound on every task."""
    lines, holds = [["", "mean", "95% interval", "seeds", "required"]], True
    found = summary(runs)
    for name, numbers in found.items():
        low, high = numbers["interval"]
        seeds = ", ".join(f"{x:,.0f}" for x in numbers["seeds"])
        required = numbers.get("required")
        holds &= required is None or numbers["mean"] >= required
        lines.append([name, f"{numbers['mean']:,.0f}", f"{low:,.0f} to {high:,.0f}", seeds, str(required or "")])
    print(measure.table(lines))
    return holds and len(found) == len(TASKS) * len(ARMS)


def picture(runs: list[dict[str, Any]]) -> None:
    """Evaluations during training: every seed as a thin line, the mean as a thick one."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 3.6), dpi=120, layout="constrained")
    for axes, task in zip(drawn.subplots(1, len(TASKS)), TASKS):
        for arm, colour in zip(ARMS, ("tab:blue", "tab:gray")):
            curves = [np.asarray(run["curve"], float) for run in of(runs, task, arm)]
            for curve in curves:
                axes.plot(curve[:, 0] / 1e6, curve[:, 1], color=colour, alpha=0.3, linewidth=0.8)
            if curves:
                steps = curves[0][:, 0]
                mean = np.mean([np.interp(steps, c[:, 0], c[:, 1]) for c in curves], axis=0)
                axes.plot(steps / 1e6, mean, color=colour, linewidth=2, label=f"{arm}, mean of {len(curves)} seeds")
        axes.set_title(f"{task}-v4", fontsize="medium")
        axes.set_xlabel("environment steps (millions)")
        axes.grid(alpha=0.3)
    drawn.axes[0].set_ylabel("evaluation return")
    drawn.axes[0].legend(frameon=False, fontsize="small")
    plots.save(drawn, RESULTS / "mujoco.png")


def main() -> int:
    """Trains what is missing and reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", action="store_true", help="train nothing")
    runs = stored()
    if not parser.parse_args().report:
        there = {(run["task"], run["settings"], run["seed"]) for run in runs}
        wanted = [(task, arm, seed) for arm in ARMS for task in TASKS for seed in SEEDS]
        for task, arm, seed in wanted:
            if (task, arm, seed) not in there:
                runs.append(train(task, arm, seed))
                print(f"{task}, {arm}, seed {seed}: {runs[-1]['return']:,.0f}", flush=True)
                write(runs)
    return 0 if report(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
