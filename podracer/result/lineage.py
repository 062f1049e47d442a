"""The picture of a population that evolved: its numbers, its lineage, and the returns of the best member's ancestors.

After figure E.1 of IMPALA (Espeholt et al. 2018) and figure 5 of Jaderberg et al. 2017.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from podracer.result import plots
from podracer.run import generation_rows, metrics, rundir

MAX_UPDATES = 2**31 - 1
"""The updates of a run without evaluations."""

NAME = "episode/return"
"""The metric whose curve is traced back."""


class Lineage(NamedTuple):
    """The generations of a run.

    Attributes:
      env_steps: int [G]; at which each generation ends.
      updates: int [G]; likewise.
      parents: int [G, P]; whose weights each member goes on with.
      numbers: [G + 1, P] by name; during each generation.
      best: the best member by the newest evaluation.
      evaluated: the updates at which that was; a run that was stopped may have evolved since.
    """

    env_steps: np.ndarray
    updates: np.ndarray
    parents: np.ndarray
    numbers: dict[str, np.ndarray]
    best: int
    evaluated: int

    def ancestors(self, member: int) -> np.ndarray:
        """The members [G + 1] through whom a member came to the weights that were evaluated, the last one itself."""
        line = [member]
        for parents, updates in zip(self.parents[::-1], self.updates[::-1]):
            # A generation ends after the evaluation at its milestone.
            line.append(int(parents[line[-1]]) if updates < self.evaluated else member)
        return np.array(line[::-1])


def read(run_dir: pathlib.Path, history: Sequence[metrics.Row]) -> Lineage:
    """The generations of a run, from its files.

    Raises:
      ValueError: where no generation has ended.
    """
    path = run_dir / generation_rows.FILE
    rows = list(generation_rows.read(path)) if path.exists() else []
    description = rundir.read(run_dir)
    population = description["run"]["population"]
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["generation"], {})[row["member"]] = row
    if found and len(found[max(found)]) < population:
        del found[max(found)]  # which a run was writing when it was killed
    if not found:
        raise ValueError(f"{run_dir} has no generations: its {generation_rows.FILE} is empty or not there.")
    generations = [found[generation] for generation in sorted(found)]
    any_row = [next(iter(generation.values())) for generation in generations]
    # A member whose line is damaged is taken to have kept what it had.
    parents = [[generation.get(i, {"parent": i})["parent"] for i in range(population)] for generation in generations]
    first = description["agent_config"] | description["hyper"]
    numbers = {}
    for name in description["pbt"]["hyper"]:
        values = [np.broadcast_to(first[name], population)]
        for generation in generations:
            last = values[-1]
            values.append(np.array([generation.get(i, {}).get(f"hyper/{name}", last[i]) for i in range(population)]))
        numbers[name] = np.array(values)
    env_steps, updates = (np.array([row[name] for row in any_row]) for name in ("env_steps", "updates"))
    evaluated = [row["updates"] for row in history if "eval/return_mean" in row]
    best = metrics.best_member(list(history))
    return Lineage(env_steps, updates, np.array(parents), numbers, best, evaluated[-1] if evaluated else MAX_UPDATES)


def traced_back(lineage: Lineage, history: Sequence[metrics.Row]) -> np.ndarray:
    """The curve [n, 2] of (steps, return) of the best member's ancestors, each in its generation."""
    line = lineage.ancestors(lineage.best)
    # Rows of a generation end with its last update.
    rows = [row for row in history if NAME in row]
    generation = np.searchsorted(lineage.updates, [row["updates"] for row in rows])
    own = [row for row, i in zip(rows, generation) if row["member"] == line[i]]
    return np.array([(row["env_steps"], row[NAME]) for row in own], float).reshape(-1, 2)


def picture(run_dir: str | pathlib.Path, path: str | pathlib.Path, title: str = "") -> plots.Picture:
    """Draws the numbers, the lineage and the returns of a run with population based training.

    Args:
      run_dir: the run directory.
      path: the picture's path; its suffix chooses the format.
      title: above the picture.

    Raises:
      ValueError: where no generation has ended.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    run_dir = pathlib.Path(run_dir)
    history = metrics.history(metrics.stream(run_dir / "metrics.jsonl"))
    lineage, description = read(run_dir, history), rundir.read(run_dir)
    count = len(lineage.numbers) + 2
    figure = Figure(figsize=(7, 2.6 * count), dpi=120, layout="constrained")
    axes = figure.subplots(count, 1, sharex=True)
    for each, (name, values) in zip(axes, lineage.numbers.items()):
        _draw_number(each, name, values, lineage, description)
    _draw_tree(axes[-2], lineage, description["run"]["total_steps"])
    _draw_returns(axes[-1], lineage, history)
    axes[-1].set_xlabel("environment steps")
    axes[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[0].set_title(title or f"{description['agent']} on {description['env']}", fontsize="medium")
    return plots.save(figure, path)


def _draw_number(axes: Any, name: str, values: np.ndarray, lineage: Lineage, description: Mapping[str, Any]) -> None:
    """Draws a number of all members against steps, that of the best one's ancestors bold."""
    total = description["run"]["total_steps"]
    edges = np.array([0, *lineage.env_steps, max(total, lineage.env_steps[-1])])
    axes.stairs(values[:, 0], edges, baseline=None, color="grey", alpha=0.4, linewidth=0.8, label="members")
    for member in range(1, values.shape[1]):
        axes.stairs(values[:, member], edges, baseline=None, color="grey", alpha=0.4, linewidth=0.8)
    own = values[np.arange(len(values)), lineage.ancestors(lineage.best)]
    axes.stairs(own, edges, baseline=None, color="C0", linewidth=2, label="ancestors of the best")
    if name == "learning_rate":
        steps, rate = np.linspace(0, total, 200)[:-1], own[0]
        label = f"linear schedule from {rate:.3g}"
        axes.plot(steps, rate * (1 - steps / total), color="C3", linestyle="--", linewidth=1, label=label)
    if (values > 0).all() and values.max() > 10 * values.min():
        axes.set_yscale("log")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")


def _draw_tree(axes: Any, lineage: Lineage, total_steps: int) -> None:
    """Draws a line from each parent to who goes on with its weights."""
    starts, line = np.array([0, *lineage.env_steps, total_steps]), lineage.ancestors(lineage.best)
    stay = np.arange(lineage.parents.shape[1])
    for g, parents in enumerate([*lineage.parents, stay]):
        for member, parent in enumerate(parents):
            colour, alpha = ("C3", 0.5) if parent != member else ("grey", 0.3)
            axes.plot(starts[g : g + 2], (parent, member), color=colour, alpha=alpha, linewidth=0.8)
    axes.plot(starts, [*line, line[-1]], color="C0", linewidth=2)
    axes.plot([], [], color="C3", alpha=0.5, linewidth=0.8, label="copies")
    axes.set_ylabel("member")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small", loc="lower right")


def _draw_returns(axes: Any, lineage: Lineage, history: Sequence[metrics.Row]) -> None:
    """Draws returns in training: of all members, and of the best one's ancestors bold."""
    for member in range(lineage.parents.shape[1]):
        rows = [row for row in history if row.get("member") == member and NAME in row]
        axes.plot(*_columns(rows), color="grey", alpha=0.3, linewidth=0.8, label="" if member else "members")
    axes.plot(*traced_back(lineage, history).T, color="C0", linewidth=2, label="ancestors of the best")
    axes.set_ylabel("return")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")


def _columns(rows: Sequence[metrics.Row]) -> tuple[list[float], list[float]]:
    return [row["env_steps"] for row in rows], [row[NAME] for row in rows]
