"""Do agents remember? Each core on tasks that only memory solves, beside no core, which must fail; three seeds a row.

    python benchmarks/memory_tasks.py                     # all rows
    python benchmarks/memory_tasks.py --missing           # only those without a result of these settings, to go on
    python benchmarks/memory_tasks.py --only t_maze gru   # only rows whose names have all of these words
    python benchmarks/readme.py                           # writes the results into docs/results/learning.md

A row is a task of `TASKS` with one of its networks, such as `ppo-t_maze-gru`. Its seeds train side by side in one
program and are evaluated on fresh episodes. Every row is written to `benchmarks/results/memory_tasks.json` when it
ends, with its commit and its command, and a picture of its task beside. The exit code says whether all rows reach their
bounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import envs_jax
import podracer
from envs_jax import wrappers
from podracer.bench import measure
from podracer.result import plots

RESULTS = pathlib.Path(__file__).parent / "results"
FILE = RESULTS / "memory_tasks.json"
SEEDS = 3

Change = Mapping[str, Any]
"""Settings of an agent that differ from the task's."""

NONE: dict[str, Change] = {"none": {"core": "none"}}
RECURRENT: dict[str, Change] = {name: {"core": name} for name in ("gru", "mingru", "lru", "lstm")}


def gtrxl(memory: int, **others: Any) -> dict[str, Change]:
    return {"gtrxl": {"core": "gtrxl", "core_memory": memory, **others}}


@dataclasses.dataclass(frozen=True)
class Task:
    """A task, an agent and a core.

    Attributes:
      agent: by name.
      environment: by name, of `envs_jax`.
      total_steps: of a seed.
      networks: changes of the config by label; that of "none" has no memory.
      bound: every seed's mean return must reach it, of networks with memory.
      without: the same must stay below it, of "none".
      config: of the agent.
      env_options: of the environment.
      hidden: indices of the observation's numbers that are not shown.
      episodes: of an evaluation.
      reported: labels of networks that need not reach the bound.
    """

    agent: str
    environment: str
    total_steps: int
    networks: Mapping[str, Change]
    bound: float
    without: float
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hidden: tuple[int, ...] = ()
    episodes: int = 1000
    reported: tuple[str, ...] = ()

    def holds(self, label: str, returns: list[float]) -> bool:
        """Says that the mean returns of a network's seeds satisfy its bound."""
        if label in self.reported:
            return True
        return max(returns) <= self.without if label == "none" else min(returns) >= self.bound


CHAIN: dict[str, Any] = {"environment": "memory_chain", "bound": 0.9, "without": 0.1}
T_MAZE: dict[str, Any] = {
    "environment": "t_maze", "env_options": {"min_length": 3, "max_length": 7}, "bound": 0.95, "without": 0.05,
}  # fmt: skip
# Linear recurrences let little of a row in at first: their gradients are small beside the 1e-3 that R2D2 adds to Adam's
# denominator. Until the cue is remembered, turning is worth nothing, and the first network's values are worth more:
# they go with copies of the target network, and some lanes must walk nearly at random to get to the end at all.
LINEAR: Change = {"optimizer_eps": 1e-5, "target_interval": 20, "epsilon_base": 0.95, "epsilon_alpha": 30.0}
FRAMES: dict[str, Change] = {"4 frames": {"core": "none", "frame_stack": 4}}

TASKS = {
    "ppo-memory_chain-20": Task(
        "ppo",
        total_steps=500_000,
        env_options={"length": 20},
        config={"rollout_length": 32},
        networks=NONE | RECURRENT | gtrxl(32),
        **CHAIN,
    ),
    "pqn-memory_chain-20": Task(
        "pqn",
        total_steps=500_000,
        env_options={"length": 20},
        config={"num_minibatches": 4},
        networks={name: RECURRENT[name] for name in ("mingru", "lstm")},
        **CHAIN,
    ),
    "r2d2-memory_chain-20": Task(
        "r2d2",
        total_steps=150_000,
        env_options={"length": 20},
        # Episodes have 22 rows with the reset: a sequence is two of them.
        config={"core_size": 32, "hidden_sizes": (32,), "head_size": 32, "rollout_length": 21, "burn_in": 0}
        | {"trace_length": 42, "replay_ratio": 8.0},
        networks=NONE | RECURRENT | gtrxl(21, burn_in=21),
        **CHAIN,
    ),
    "ppo-t_maze": Task(
        "ppo",
        total_steps=500_000,
        config={"entropy_cost": 0.05},
        networks=NONE | RECURRENT | gtrxl(32),
        # Where the wrong arm costs as much as the right one pays, turning is worth nothing until the cue is remembered,
        # and PPO stops turning before.
        **T_MAZE | {"env_options": {"min_length": 3, "max_length": 7, "wrong_reward": 0.0}, "without": 0.6},
    ),
    "r2d2-t_maze": Task(
        "r2d2",
        total_steps=250_000,
        # At the junction, turning is worth nothing until the cue is remembered: exploring must go on until then.
        config={"discount": 0.9, "epsilon_base": 0.6, "epsilon_alpha": 2.0, "burn_in": 0, "trace_length": 20}
        | {"replay_ratio": 16.0, "target_interval": 100},
        networks=NONE
        | RECURRENT
        | {name: RECURRENT[name] | LINEAR for name in ("mingru", "lru")}
        | gtrxl(16, burn_in=16),
        **T_MAZE,
    ),
    "ppo-cartpole-hidden": Task(
        "ppo",
        "cartpole",
        total_steps=500_000,
        hidden=(1, 3),
        networks=NONE | FRAMES | RECURRENT | gtrxl(32),
        bound=450,
        without=200,
        episodes=100,
    ),
    "ppo-pendulum-hidden": Task(
        "ppo",
        "pendulum",
        total_steps=500_000,
        config={"discount": 0.95},
        hidden=(2,),
        # The gates of minGRU do not see its state: one layer ends at -346 to -282.
        networks=NONE | FRAMES | RECURRENT | {"mingru 2 layers": {"core": "mingru", "core_layers": 2}} | gtrxl(32),
        reported=("mingru",),
        bound=-300,
        without=-600,
        episodes=100,
    ),
    "ppo-memory_chain-100": Task(
        "ppo",
        total_steps=2_000_000,
        env_options={"length": 100},
        # One action of a hundred earns something. Where advantages reach far back, the ninety-nine others learn of what
        # they have no part in, and linear recurrences remember nothing, or forget it again.
        config={"rollout_length": 128, "gae_lambda": 0.5},
        networks=NONE | RECURRENT | gtrxl(128),
        episodes=200,
        reported=("lstm", "gru"),
        **CHAIN,
    ),
}


def row_of(name: str, label: str) -> str:
    """The name of a task's row."""
    return f"{name}-{label.replace(' ', '_')}"


def settings_of(name: str, label: str) -> dict[str, Any]:
    """The settings of a row, as JSON keeps them."""
    task = TASKS[name]
    settings = {
        "config": dict(task.config) | dict(task.networks[label]),
        "total_steps": task.total_steps,
        "env_options": dict(task.env_options),
        "hidden": task.hidden,
    }
    return json.loads(json.dumps(settings))


def is_missing(row: dict[str, Any] | None, settings: dict[str, Any]) -> bool:
    """Returns True if there is no row, or one of other settings; rows before settings were kept count as of these."""
    return row is None or row.get("settings", settings) != settings


def measured(name: str, label: str) -> tuple[dict[str, Any], list[Any]]:
    """Trains and evaluates the seeds of a row: its result, and its curves as (seed, steps, mean return)."""
    task = TASKS[name]
    environment = envs_jax.make(task.environment, **task.env_options)
    start = time.perf_counter()
    result = podracer.train(
        task.agent,
        wrappers.hide(task.hidden)(environment) if task.hidden else environment,
        config=dict(task.config) | dict(task.networks[label]),
        total_steps=task.total_steps,
        population=SEEDS,
        eval_every=task.total_steps // 5,
        eval_episodes=task.episodes,
        progress=False,
    )
    seconds = time.perf_counter() - start
    returns = [member["eval_return_mean"] for member in result.summary["members"]]
    found = {
        "returns": returns,
        "bound": None if label in task.reported else task.without if label == "none" else task.bound,
        "holds": task.holds(label, returns),
        "seconds": round(seconds, 1),
        "train_seconds": round(result.summary["train_seconds"], 1),
        "updates": result.summary["updates"],
        "commit": measure.commit(),
        "command": f"python benchmarks/memory_tasks.py --only {row_of(name, label)}",
        "settings": settings_of(name, label),
    }
    rows = [row for row in result.history if "eval/return_mean" in row]
    return found, [[row["member"], row["env_steps"], round(row["eval/return_mean"], 3)] for row in rows]


def stored() -> dict[str, Any]:
    """The rows that are there, and their curves, in the order of `TASKS`."""
    found = json.loads(FILE.read_text())["results"] if FILE.exists() else {"rows": {}, "curves": {}}
    names = [row_of(name, label) for name, task in TASKS.items() for label in task.networks]
    return {part: {name: rows[name] for name in names if name in rows} for part, rows in found.items()}


def write(name: str, label: str) -> bool:
    """Measures a row, writes it and its task's picture, and says whether its bound holds."""
    row = row_of(name, label)
    result, curves = measured(name, label)
    found = stored()
    found["rows"][row], found["curves"][row] = result, curves
    measure.write(FILE, "python benchmarks/memory_tasks.py", {"seeds": SEEDS}, found)
    draw(name)
    print(f"{row}: {', '.join(f'{x:.3f}' for x in result['returns'])}  ({result['seconds']:.0f} s)", flush=True)
    return result["holds"]


def draw(name: str) -> None:
    """Draws the curves of a task's rows that are there."""
    task, curves = TASKS[name], stored()["curves"]
    histories = {
        label: [dict(zip(("member", "env_steps", "eval/return_mean"), point)) for point in curves[row_of(name, label)]]
        for label in task.networks
        if row_of(name, label) in curves
    }
    options = "".join(f", {key} {value}" for key, value in task.env_options.items())
    hidden = " without velocities" if task.hidden else ""
    title = f"{task.agent} on {task.environment}{hidden}{options}: {SEEDS} seeds"
    plots.learning_curve(histories, RESULTS / f"memory_tasks-{name}.png", title=title, metric="eval/return_mean")


def main() -> int:
    """Runs the rows that are asked for; the exit code says whether all reach their bounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--missing", action="store_true")
    arguments = parser.parse_args()
    rows = {row_of(name, label): (name, label) for name, task in TASKS.items() for label in task.networks}
    done = stored()["rows"] if arguments.missing else {}
    missing = [row for row, names in rows.items() if is_missing(done.get(row), settings_of(*names))]
    chosen = [row for row in missing if all(word in row for word in arguments.only)]
    missed = [row for row in chosen if not write(*rows[row])]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} rows hold" + "".join(f"\nmissed: {row}" for row in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
