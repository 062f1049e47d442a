"""How many steps does EfficientZero need, beside MuZero, and what does each of its parts do for that?

    python benchmarks/sample_efficiency.py                          # all that is missing; hours
    python benchmarks/sample_efficiency.py --tasks catch --arms muzero efficientzero
    python benchmarks/sample_efficiency.py --report                 # of what there is

A run ends when three evaluations in a row reach a task's level, or with its steps; it needed those until then. Agents
of a task have the same networks, simulations, updates for each step, and steps at most. Runs are processes, one for
each core, and files below `runs/sample_efficiency`: those that are there are not run again.
Writes `benchmarks/results/sample_efficiency.json` and `.png`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np

import podracer
from podracer.bench import measure

RESULTS = pathlib.Path(__file__).parent / "results"
RUNS = pathlib.Path("runs/sample_efficiency")
IN_A_ROW = 3
PLAIN = {"reanalyse": 0.0, "consistency_cost": 0.0, "horizon": 1, "correction_interval": 0}
LARGE = {"warmup_updates": 100, "learning_rate": 0.2}


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learnt.

    Attributes:
      env: by its name.
      level: mean return of an evaluation that passes.
      total_steps: at most.
      eval_every: steps between evaluations.
      config: of all agents.
    """

    env: str
    level: float
    total_steps: int
    eval_every: int
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Arm:
    """What learns.

    Attributes:
      agent: by its name.
      config: of the agent, beside the task's.
      size: how many times as large batches are; there are as many.
    """

    agent: str = "efficientzero"
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    size: int = 1


TASKS = {
    "catch": Task("catch", 0.9, 30_000, 500),
    "cartpole": Task("cartpole", 400.0, 150_000, 2_000),
    "pixel_catch": Task("pixel_catch", 0.9, 40_000, 1_000, {"channels": 8, "samples_per_row": 8.0}),
}
ARMS = {
    "muzero": Arm("muzero"),
    "efficientzero": Arm(),
    # Each with all that those above have.
    "plain": Arm(config=PLAIN),
    "+ reanalysis": Arm(config=PLAIN | {"reanalyse": 1.0}),
    "+ consistency": Arm(config={"horizon": 1, "correction_interval": 0}),
    "+ prefix": Arm(config={"correction_interval": 0}),
    "+ correction": Arm(),
    "+ refresh": Arm(config={"refresh_interval": 10}),
    "large batch, sgd": Arm(config=LARGE | {"optimizer": "sgd"}, size=8),
    "large batch, clipped lars": Arm(config=LARGE | {"optimizer": "clipped_lars", "lars_start": 100}, size=8),
}


def path_of(task: str, arm: str, seed: int) -> pathlib.Path:
    """Of a run's result; arms with the same settings share one."""
    same = next(name for name in ARMS if ARMS[name] == ARMS[arm])
    return RUNS / f"{task}-{same}-{seed}.json".replace(" ", "_")


def run(name: str, arm: str, seed: int) -> None:
    """One run, in this process."""
    task, learner = TASKS[name], ARMS[arm]
    config = task.config | learner.config
    if learner.size > 1:
        default = podracer.agents.EfficientZeroConfig()
        sizes = {name: config.get(name, getattr(default, name)) for name in ("batch_size", "samples_per_row")}
        config |= {name: learner.size * value for name, value in sizes.items()}
    evaluations: list[tuple[int, float]] = []

    def passed(env_steps: int, row: Any) -> bool:
        if "eval/return_mean" in row:
            evaluations.append((env_steps, row["eval/return_mean"]))
        newest = [value for _, value in evaluations[-IN_A_ROW:]]
        return len(newest) == IN_A_ROW and min(newest) >= task.level

    result = podracer.train(
        learner.agent,
        task.env,
        config=config,
        total_steps=task.total_steps,
        eval_every=task.eval_every,
        seed=seed,
        progress=False,
        log=passed,
    )
    needed = evaluations[-1][0] if passed(0, {}) else None
    report = {"steps": needed, "evaluations": evaluations, "seconds": result.summary["train_seconds"]}
    report |= {"commit": measure.commit()}
    path = path_of(name, arm, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.replace(path)


def run_missing(tasks: list[str], arms: list[str], seeds: int, jobs: int) -> None:
    """All runs without a result, so many at once, each in a process on a core of its own."""
    wanted = {path_of(task, arm, seed): (task, arm, seed) for seed in range(seeds) for task in tasks for arm in arms}
    missing = [job for path, job in wanted.items() if not path.exists()]
    environment = os.environ | {"NPROC": "1"} if jobs > 1 else None

    def process(job: tuple[str, str, int]) -> None:
        task, arm, seed = job
        subprocess.run([sys.executable, __file__, "--run", task, arm, str(seed)], check=True, env=environment)
        print(f"{task}, {arm}, seed {seed}: {json.loads(path_of(*job).read_text())['steps']}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(process, missing))


def report(seeds: int) -> None:
    """Prints what there is and writes it."""
    results: dict[str, Any] = {}
    lines = [["", *TASKS]]
    for arm in ARMS:
        cells = []
        for task in TASKS:
            paths = [path_of(task, arm, seed) for seed in range(seeds)]
            runs = [json.loads(path.read_text()) for path in paths if path.exists()]
            cells.append("")
            if runs:
                steps = [np.inf if run["steps"] is None else run["steps"] for run in runs]
                median = float(np.median(steps))
                results[f"{task}, {arm}"] = {
                    "steps": [run["steps"] for run in runs],
                    "median": median if np.isfinite(median) else None,
                    "seconds": [run["seconds"] for run in runs],
                    "commits": sorted({run["commit"] for run in runs}),
                }
                numbers = [f"{x:,.0f}" if np.isfinite(x) else "never" for x in (min(steps), median, max(steps))]
                cells[-1] = f"{numbers[1]} ({numbers[0]} to {numbers[2]}; {len(runs)} seeds)"
        lines.append([arm, *cells])
    print(measure.table([line for line in lines if any(line[1:])]))
    print(f"steps until {IN_A_ROW} evaluations in a row pass: median, least and most")
    for task in TASKS:
        ours, other = (results.get(f"{task}, {arm}", {}).get("median") for arm in ("efficientzero", "muzero"))
        if ours and other:
            print(f"{task}: {ours / other:.2f} of MuZero's")
    picture(results)
    tasks = {name: dataclasses.asdict(task) for name, task in TASKS.items()}
    arms = {name: dataclasses.asdict(arm) for name, arm in ARMS.items()}
    settings = {"seeds": seeds, "tasks": tasks, "arms": arms}
    measure.write(RESULTS / "sample_efficiency.json", "python benchmarks/sample_efficiency.py", settings, results)


def picture(results: dict[str, Any]) -> None:
    """Every seed's steps, by task and arm; those that never passed at the right edge."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 4.2), dpi=120, layout="constrained")
    for axes, (name, task) in zip(drawn.subplots(1, len(TASKS), sharey=True), TASKS.items()):
        for i, arm in enumerate(ARMS):
            found = results.get(f"{name}, {arm}")
            if found is None:
                continue
            steps = found["steps"]
            there = [x for x in steps if x is not None]
            axes.plot(there, [i] * len(there), "o", color="tab:blue", alpha=0.6)
            never = len(steps) - len(there)
            axes.plot([task.total_steps] * never, [i] * never, "x", color="tab:red")
            if found["median"]:
                axes.plot(found["median"], i, "|", color="black", markersize=16)
        axes.set_title(name, fontsize="medium")
        axes.set_xlim(0, task.total_steps * 1.03)
        axes.set_xlabel("environment steps")
        axes.grid(alpha=0.3)
    drawn.axes[0].set_yticks(range(len(ARMS)), list(ARMS))
    drawn.axes[0].invert_yaxis()
    drawn.suptitle(f"Steps until {IN_A_ROW} evaluations in a row pass: seeds, medians; x: never", fontsize="medium")
    drawn.savefig(RESULTS / "sample_efficiency.png")


def main() -> None:
    """Runs what is missing, and reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at once")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--run", nargs=3, metavar=("TASK", "ARM", "SEED"), help="this run alone, in this process")
    arguments = parser.parse_args()
    if arguments.run:
        task, arm, seed = arguments.run
        run(task, arm, int(seed))
        return
    if not arguments.report:
        run_missing(arguments.tasks, arguments.arms, arguments.seeds, arguments.jobs)
    report(arguments.seeds)


if __name__ == "__main__":
    main()
