"""Measures the sample efficiency of EfficientZero: steps beside MuZero's, and the effect of each part.

    python benchmarks/sample_efficiency.py                          # all that is missing; hours
    python benchmarks/sample_efficiency.py --arms muzero efficientzero --minutes 45   # begins no run after 45 minutes
    python benchmarks/sample_efficiency.py --side-by-side           # seeds in one program, on an accelerator
    python benchmarks/sample_efficiency.py --report                 # of what there is

A run ends when three evaluations in a row reach a task's level, or with its steps (side by side, when all have); it
needed those until then. Agents of a task have layers of the same widths, as many simulations, and as many updates for
each step. All else is each agent's own: MuZero's values have 10 rewards (on catch all of an episode) and
EfficientZero's 5, samples are drawn uniformly and by priority, and heads, losses and gradients are scaled as in either
paper. MuZero has all of a task's steps and the others half of them: what needs more than half is not twice as good,
whatever MuZero needs.

Controls, on catch alone, have one part broken: nothing is learnt, dynamics stay as they began or do not see actions, or
samples have each other's policies. What passes all the same does not depend on that part.

Runs are processes, one for each core, or with `--side-by-side` one for all seeds of an arm, a population, for
accelerators that one of them would leave waiting for launches. Behind each process,
`benchmarks/results/sample_efficiency.json` and `.png` are written with all there are, and what is there with the same
settings is not run again: it may be stopped and begun anew.
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
import time
from typing import Any, Literal

import efficientzero_controls
import numpy as np
from sample_efficiency_picture import picture

import envs_jax
import podracer
from podracer import configs
from podracer.agents import EfficientZeroConfig, MuZeroConfig
from podracer.bench import measure

RESULTS = pathlib.Path(__file__).parent / "results"
RUNS = pathlib.Path("runs/sample_efficiency")
IN_A_ROW = 3
PLAIN = {"reanalyse": 0.0, "consistency_cost": 0.0, "horizon": 1, "correction_interval": 0}
LARGE = {"warmup_updates": 100, "learning_rate": 0.2, "l2_cost": 5e-5}


@dataclasses.dataclass(frozen=True)
class Task:
    """A task to learn.

    Attributes:
      env: by its name.
      level: mean return of an evaluation that passes.
      total_steps: steps of schedules, and the most steps of a run.
      eval_every: steps between evaluations.
      config: settings of all agents.

    Values of EfficientZero lose a reward by 0.3 of `total_steps` of age, as in its paper.
    """

    env: str
    level: float
    total_steps: int
    eval_every: int
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Arm:
    """An agent with its settings.

    Attributes:
      agent: by its name.
      config: settings of the agent, added to the task's.
      size: factor of the batch size; the number of updates stays.
      part: the largest fraction of a task's steps.
      broken: the broken part of a control, or "".
    """

    agent: str = "efficientzero"
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    size: int = 1
    part: float = 0.5
    broken: efficientzero_controls.Part | Literal[""] = ""


TASKS = {
    "catch": Task("catch", 0.9, 30_000, 500),
    "cartpole": Task("cartpole", 400.0, 120_000, 2_000),
    "pixel_catch": Task("pixel_catch", 0.9, 40_000, 1_000, {"channels": 16, "batch_size": 32, "replay_ratio": 8.0}),
}
ARMS = {
    # With EfficientZero's schedule and beginning, for what is compared is what is learnt.
    "muzero": Arm("muzero", {"learning_rate_schedule": "constant", "replay_min_size": 500}, part=1.0),
    "efficientzero": Arm(),
    # Each with all that those above have.
    "plain": Arm(config=PLAIN),
    "+ reanalysis": Arm(config=PLAIN | {"reanalyse": 1.0}),
    "+ consistency": Arm(config={"horizon": 1, "correction_interval": 0}),
    "+ prefix": Arm(config={"correction_interval": 0}),
    "+ correction": Arm(),
    "+ refresh": Arm(config={"refresh_interval": 10}),
    "without augmentation": Arm(config={"augment": False}),
    "large batch, sgd": Arm(config=LARGE | {"optimizer": "sgd"}, size=8),
    "large batch, clipped lars": Arm(config=LARGE | {"optimizer": "clipped_lars", "lars_start": 100}, size=8),
}
CONTROLS = {
    # As they are until the first update, which never comes; evaluations search in the model as it began.
    "nothing learnt": Arm(config={"replay_min_size": TASKS["catch"].total_steps}, part=1.0),
    "frozen dynamics": Arm(broken="dynamics", part=1.0),
    "blind dynamics": Arm(broken="actions", part=1.0),
    "shuffled policies": Arm(broken="policies", part=1.0),
}
ARMS |= CONTROLS
ONLY = dict.fromkeys(CONTROLS, "catch") | {"without augmentation": "pixel_catch"}
"""The task of arms that have one alone."""


def original(arm: str) -> str:
    """The first arm with the same settings, whose runs an arm shares."""
    return next(name for name in ARMS if ARMS[name] == ARMS[arm])


def name_of(task: str, arm: str, seed: int) -> str:
    """The name of a run."""
    return f"{task}, {original(arm)}, seed {seed}"


def path_of(task: str, arm: str, seed: int) -> pathlib.Path:
    """The file that a run's process writes at its end."""
    return RUNS / (name_of(task, arm, seed).replace(", ", "-").replace(" ", "_") + ".json")


def settings_of(task: str, arm: str) -> dict[str, Any]:
    """All that a run depends on beside its seed."""
    parts = {"task": dataclasses.asdict(TASKS[task]), "arm": dataclasses.asdict(ARMS[arm])}
    config = {"muzero": MuZeroConfig, "efficientzero": EfficientZeroConfig}[ARMS[arm].agent](**config_of(task, arm))
    return json.loads(json.dumps(parts | {"config": configs.to_json(config)}))


def most(task: str, arm: str) -> int:
    """Steps of a run that does not pass."""
    return int(TASKS[task].total_steps * ARMS[arm].part)


def config_of(name: str, arm: str) -> dict[str, Any]:
    """An agent's settings."""
    task, learner = TASKS[name], ARMS[arm]
    ages = {"correction_interval": round(0.3 * task.total_steps)} if learner.agent == "efficientzero" else {}
    config = ages | task.config | learner.config
    if learner.size > 1:
        default = EfficientZeroConfig()
        sizes = {name: config.get(name, getattr(default, name)) for name in ("batch_size", "replay_ratio")}
        config |= {name: learner.size * value for name, value in sizes.items()}
    return config


def agent_of(name: str, arm: str) -> str | podracer.types.Agent:
    """By its name, or as it is where a control has something broken."""
    if not (what := ARMS[arm].broken):
        return ARMS[arm].agent
    config = EfficientZeroConfig(**config_of(name, arm))
    return efficientzero_controls.make(what, envs_jax.make(TASKS[name].env).spec, config)


def run(name: str, arm: str, seeds: range) -> None:
    """Runs of these seeds side by side, in this process; it ends when all have passed."""
    task, learner = TASKS[name], ARMS[arm]
    evaluations: list[list[tuple[int, float]]] = [[] for _ in seeds]

    def passed(of: list[tuple[int, float]]) -> int | None:
        """The steps after which the last of enough evaluations in a row passed."""
        values = [value for _, value in of]
        ends = range(IN_A_ROW, len(of) + 1)
        return next((of[end - 1][0] for end in ends if min(values[end - IN_A_ROW : end]) >= task.level), None)

    def enough(env_steps: int, row: Any) -> bool:
        if "eval/return_mean" not in row:
            return False
        member = row.get("member", 0)
        evaluations[member].append((env_steps, row["eval/return_mean"]))
        print(f"{name_of(name, arm, seeds[member])}: {evaluations[member][-1]}", flush=True)
        return ended()

    def ended() -> bool:
        return all(of and (passed(of) is not None or of[-1][0] >= most(name, arm)) for of in evaluations)

    result = podracer.train(
        agent_of(name, arm),
        task.env,
        config=None if learner.broken else config_of(name, arm),
        total_steps=task.total_steps,
        eval_every=task.eval_every,
        seed=seeds[0],
        population=len(seeds),
        progress=False,
        log=enough,
    )
    if not ended():
        sys.exit(f"{arm} on {name} was stopped on the way: nothing is kept of it, for it might have passed.")
    for seed, of in zip(seeds, evaluations):
        report = {
            "steps": passed(of),
            "seconds": result.summary["train_seconds"],
            "side by side": len(seeds),
            "device": result.summary["device"],
            "jax": result.summary["jax"],
            "commit": measure.commit(),
            "settings": settings_of(name, arm),
            "evaluations": of,
        }
        path = path_of(name, arm, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report))
        partial.replace(path)


def found() -> dict[str, dict[str, Any]]:
    """Runs by name: those of the results, and newer ones that are not in there yet; with today's settings alone."""
    path = RESULTS / "sample_efficiency.json"
    runs = json.loads(path.read_text())["results"]["runs"] if path.exists() else {}
    there = {}
    for task in TASKS:
        for arm in dict.fromkeys(map(original, ARMS)):
            for seed in range(100):
                name, newer = name_of(task, arm, seed), path_of(task, arm, seed)
                one = json.loads(newer.read_text()) if newer.exists() else runs.get(name)
                if one and one["settings"] == settings_of(task, arm):
                    there[name] = one
    return there


def missing(tasks: list[str], arms: list[str], seeds: int, side_by_side: bool) -> list[tuple[str, str, range]]:
    """The runs without a result: by seed, or by ranges of seeds that can be members of a population."""
    there, jobs = found(), {}
    for seed in range(seeds):
        for task in tasks:
            for arm in arms:
                name = name_of(task, arm, seed)
                if name not in there and ONLY.get(arm, task) == task:
                    jobs[name] = task, arm, range(seed, seed + 1)  # some arms share their runs
    if not side_by_side:
        return list(jobs.values())
    joined: list[tuple[str, str, range]] = []
    for task, arm, of in sorted(jobs.values(), key=lambda job: (job[0], job[1], job[2].start)):
        if joined and joined[-1][:2] == (task, arm) and joined[-1][2].stop == of.start:
            of = range(joined.pop()[2].start, of.stop)
        joined.append((task, arm, of))
    return joined


def run_all(wanted: list[tuple[str, str, range]], jobs: int, minutes: float, **variables: str) -> None:
    """In so many processes at once, which have these environment variables."""
    begin = time.monotonic()

    def process(job: tuple[str, str, range]) -> Any:
        if time.monotonic() - begin > 60 * minutes:
            return None
        task, arm, of = job
        command = [sys.executable, __file__, "--run", task, arm, str(of.start), str(len(of))]
        subprocess.run(command, check=True, env=os.environ | variables)
        return job

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(process, job) for job in wanted]):
            if done.result() is not None:
                task, arm, of = done.result()
                for seed in of:
                    one = json.loads(path_of(task, arm, seed).read_text())
                    print(f"{name_of(task, arm, seed)}: {one['steps']} steps, {one['seconds']:.0f} s", flush=True)
                write()


def median_of(steps: list[int | None]) -> float:
    """The median of runs; infinity where at least half of them never passed."""
    return float(np.median([np.inf if x is None else x for x in steps]))


def compared(ours: float, our_most: int, other: float, other_most: int) -> str:
    """The ratio of two medians as one line, or what is known of it where runs never passed."""
    if np.isfinite(ours) and np.isfinite(other):
        return f"MuZero needs {other / ours:.2f} times as many"
    if np.isfinite(ours):
        return f"MuZero needs more than {other_most / ours:.2f} times as many: it did not pass in {other_most:,}"
    if np.isfinite(other):
        return (
            f"MuZero needs less than {other / our_most:.2f} times as many: EfficientZero did not pass in {our_most:,}"
        )
    return f"neither passed, MuZero in {other_most:,} and EfficientZero in {our_most:,}"


def summary(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Steps, their median and seconds of every task and arm, by seed."""
    results: dict[str, Any] = {}
    for task in TASKS:
        for arm in ARMS:
            seeds = [seed for seed in range(100) if name_of(task, arm, seed) in runs]
            if not seeds:
                continue
            of = [runs[name_of(task, arm, seed)] for seed in seeds]
            median = median_of([one["steps"] for one in of])
            results[f"{task}, {arm}"] = {
                "seeds": seeds,
                "steps": [one["steps"] for one in of],
                "median": median if np.isfinite(median) else None,
                "most": most(task, arm),
                "seconds": [round(one["seconds"], 1) for one in of],
                "side by side": [one.get("side by side", 1) for one in of],
                "devices": sorted({f"{one.get('device')}, jax {one.get('jax')}" for one in of}),
                "commits": sorted({str(one["commit"]) for one in of}),
            }
    return results


def comparisons(results: dict[str, Any]) -> dict[str, str]:
    """Beside MuZero, by task."""
    lines = {}
    for task in TASKS:
        both = [results.get(f"{task}, {arm}") for arm in ("efficientzero", "muzero")]
        if all(both):
            lines[task] = compared(*(x for one in both if one for x in (median_of(one["steps"]), one["most"])))
    return lines


def write() -> None:
    """Writes what there is."""
    runs = found()
    results = summary(runs)
    without = {name: {k: v for k, v in one.items() if k != "evaluations"} for name, one in runs.items()}
    written = {"summary": results, "beside MuZero": comparisons(results), "runs": without}
    measure.write(RESULTS / "sample_efficiency.json", "python benchmarks/sample_efficiency.py", {}, written)
    title = f"Steps until {IN_A_ROW} evaluations in a row pass: seeds, medians; x: never"
    total_steps = {name: task.total_steps for name, task in TASKS.items()}
    picture(results, total_steps, list(ARMS), title).savefig(RESULTS / "sample_efficiency.png")


def report() -> None:
    """Prints what there is."""
    results = summary(found())
    lines = [["", *TASKS]]
    for arm in ARMS:
        cells = []
        for task in TASKS:
            of = results.get(f"{task}, {arm}")
            steps = [np.inf if x is None else x for x in of["steps"]] if of else []
            three = (np.median(steps), min(steps), max(steps)) if steps else ()
            numbers = [f"{x:,.0f}" if np.isfinite(x) else "never" for x in three]
            cells.append(f"{numbers[0]} ({numbers[1]} to {numbers[2]}; {len(steps)} seeds)" if steps else "")
        lines.append([arm, *cells])
    print(measure.table([line for line in lines if any(line[1:])]))
    print(f"steps until {IN_A_ROW} evaluations in a row pass: median, least and most")
    for task, line in comparisons(results).items():
        print(f"{task}: {line}")


def main() -> None:
    """Runs what is missing, and reports."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--jobs", type=int, help="processes at once: one for each core, or one alone with --side-by-side"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no run begins")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--side-by-side", action="store_true", help="all seeds of an arm in one program")
    parser.add_argument("--run", nargs=4, metavar=("TASK", "ARM", "SEED", "SEEDS"), help="this alone, in this process")
    arguments = parser.parse_args()
    if arguments.run:
        task, arm, first, number = arguments.run
        run(task, arm, range(int(first), int(first) + int(number)))
        return
    if not arguments.report:
        jobs = arguments.jobs or (1 if arguments.side_by_side else os.cpu_count() or 1)
        shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if arguments.side_by_side else {"NPROC": "1"}
        wanted = missing(arguments.tasks, arguments.arms, arguments.seeds, arguments.side_by_side)
        run_all(wanted, jobs, arguments.minutes, **(shared if jobs > 1 else {}))
    write()
    report()


if __name__ == "__main__":
    main()
