"""Does one policy learn several tasks side by side (docs/tasks.md)? Three seeds a row.

    python benchmarks/tasks.py                   # all rows
    python benchmarks/tasks.py --only catch      # only rows whose names have all of these words

Every row is written to `benchmarks/results/tasks.json` when it ends, with its commit, and a picture beside. The exit
code says whether all rows reach their bounds.

*   `catch`: catch and the same with its rewards negated. Without the task as an input a policy gains in one what it
    loses in the other; with it, it solves both.
*   `control`: EnvPool's CartPole and Acrobot by Sebulba, observations and actions padded. PopArt gives both values one
    scale, without which the larger ones of CartPole have nearly all of the gradient.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import envs_jax
import podracer
from envs_jax import wrappers
from podracer.bench import measure
from podracer.environments.tasks import Tasks
from podracer.result import plots

RESULTS = pathlib.Path(__file__).parent / "results"
SEEDS = 3

Returns = Mapping[str, float]
"""Mean returns of a seed's final policy, by task."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One agent on several tasks.

    Attributes:
      environment: the tasks, or a function that makes them.
      total_steps: of all tasks together.
      holds: says that a seed's returns reach the bound.
      bound: the bound in words.
      settings: further arguments of `podracer.train`.
      population: True trains the seeds in one program.
    """

    environment: str | Callable[[], Any]
    total_steps: int
    holds: Callable[[Returns], bool]
    bound: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    population: bool = True


def catches(task_input: bool) -> Tasks:
    """Catch, and catch with negated rewards."""
    catch = envs_jax.make("catch")
    both = {"catch": catch, "negated catch": wrappers.scale_reward(-1.0)(catch)}
    return Tasks(both, task_input=task_input)


def solved(returns: Returns) -> bool:
    return min(returns.values()) >= 0.95


CONTROL = "envpool:CartPole-v1,envpool:Acrobot-v1"


def controlling(popart: bool) -> dict[str, Any]:
    """Settings of a run."""
    config = {"popart": popart, "entropy_cost": 0.02}
    return {"config": config, "env_options": {"union": "pad"}, "num_envs": 32, "mode": "serial", "eval_episodes": 64}


def controlled(returns: Returns) -> bool:
    return returns["envpool:CartPole-v1"] >= 475 and returns["envpool:Acrobot-v1"] >= -100


ROWS = {
    "catch, without task input": Row(
        lambda: catches(False), 1_000_000, lambda returns: abs(sum(returns.values())) <= 0.2, "mean within 0.1 of 0"
    ),
    "catch, with task input": Row(lambda: catches(True), 1_000_000, solved, "at least 0.95 in both"),
    "control, without PopArt": Row(
        CONTROL, 3_000_000, lambda returns: True, "none: to compare with", controlling(False), population=False
    ),
    "control, with PopArt": Row(
        CONTROL, 3_000_000, controlled, "at least 475 and -100", controlling(True), population=False
    ),
}


def measured(row: Row) -> tuple[list[Returns], list[dict[str, Any]]]:
    """Trains three seeds; returns what they reach, and their evaluations."""
    make: Any = row.environment
    settings: dict[str, Any] = {"total_steps": row.total_steps, "progress": False, **row.settings}
    runs = [{"population": SEEDS}] if row.population else [{"seed": seed} for seed in range(SEEDS)]
    final, curves = [], []
    for i, run in enumerate(runs):
        result = podracer.train("vtrace", make if isinstance(make, str) else make(), **settings, **run)
        if row.population:
            final += [member["tasks"] for member in result.summary["members"]]
        else:
            final.append({name: task["eval_return_mean"] for name, task in result.summary["tasks"].items()})
        for evaluated in result.history:
            if "eval/return_mean" in evaluated:
                returns = {k.removeprefix("eval/return/"): v for k, v in evaluated.items() if k[:12] == "eval/return/"}
                curves.append({"member": evaluated.get("member", i), "env_steps": evaluated["env_steps"], **returns})
    return final, curves


def draw(program: str, name: str, curves: list[dict[str, Any]]) -> None:
    """Draws a line for each task."""
    tasks = [task for task in curves[0] if task not in ("member", "env_steps")]
    histories = {
        task: [{"member": x["member"], "env_steps": x["env_steps"], "eval/return_mean": x[task]} for x in curves]
        for task in tasks
    }
    path = RESULTS / f"{program}-{name.replace(', ', '-').replace(' ', '_')}.png"
    plots.learning_curve(histories, path, title=f"V-trace, one policy: {name}", metric="eval/return_mean")


def write(program: str, name: str, rows: Mapping[str, Row], picture: bool) -> bool:
    """Measures a row, writes it and perhaps its picture, and says whether its bound holds."""
    row, start, file = rows[name], time.perf_counter(), RESULTS / f"{program}.json"
    final, curves = measured(row)
    found = json.loads(file.read_text())["results"] if file.exists() else {}
    found[name] = {
        "returns": final,
        "bound": row.bound,
        "holds": all(map(row.holds, final)),
        "total_steps": row.total_steps,
        "settings": dict(row.settings),
        "seconds": round(time.perf_counter() - start, 1),
        "commit": measure.commit(),
        "command": f"python benchmarks/{program}.py --only {name.replace(',', '')}",
        "curves": curves,
    }
    measure.write(file, f"python benchmarks/{program}.py", {"seeds": SEEDS}, {k: found[k] for k in rows if k in found})
    if picture:
        draw(program, name, curves)
    print(f"{name}: {final} ({found[name]['seconds']:.0f} s)", flush=True)
    return found[name]["holds"]


def main(program: str, rows: Mapping[str, Row], pictures: bool = True) -> int:
    """Runs the rows that are asked for; the exit code says whether all reach their bounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    only = parser.parse_args().only
    asked = [name for name in rows if set(only) <= set(name.replace(",", "").split())]
    missed = [name for name in asked if not write(program, name, rows, pictures)]
    print("\n".join(f"missed: {name}" for name in missed) or "all rows hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main("tasks", ROWS))
