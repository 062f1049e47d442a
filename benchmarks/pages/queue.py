"""The table and the curves of docs/results/queue.md."""

from __future__ import annotations

from typing import Any

import queue_jobs

from pages import RESULTS, read, short_commit, table

FOLDER = "queue"


def runs() -> list[str]:
    """The results of the queue's runs, in its order."""
    rows = [_row(run, found) for run, found in _measured()]
    head = (
        "run",
        "rows",
        "last policy (95% interval)",
        "of the best actions",
        "best checkpoint",
        "required",
        "others",
        "minutes",
        "commits",
    )
    return table(head, rows) if rows else ["No run has ended yet."]


def curves() -> list[str]:
    """The pictures of their curves."""
    lines = [
        f"![{run.name}: return by rows](../../benchmarks/results/{FOLDER}/{run.name}.png)" for run, _ in _measured()
    ]
    return lines or ["There are none yet."]


def _measured() -> list[tuple[queue_jobs.Run, dict[str, Any]]]:
    there = {path.stem for path in (RESULTS / FOLDER).glob("*.json")}
    every = [queue_jobs.Run(job, seed) for job in queue_jobs.JOBS for seed in job.seeds]
    return [(run, read(f"{FOLDER}/{run.name}")) for run in every if run.name in there]


def _row(run: queue_jobs.Run, found: dict[str, Any]) -> tuple[Any, ...]:
    last, best = found["newest_checkpoint"], found["best_checkpoint"]
    low, high = last["interval"]
    greedy = found.get("newest_greedy")
    verdict = "" if found["holds"] is None else f"{found['claim']}: {'yes' if found['holds'] else '**no**'}"
    rows = f"{last['env_steps']:,}"
    if not found.get("complete", True):
        rows = f"{rows} of {found['total_steps']:,}"
        verdict = f"{found['claim']} at the end"
    return (
        f"`{run.job.name}`, seed {run.seed}",
        rows,
        f"{last['mean']:,.4g} ({low:,.4g} to {high:,.4g})",
        f"{greedy['mean']:,.4g}" if greedy else "",
        f"{best['mean']:,.4g} at {best['env_steps']:,}",
        verdict,
        found["reference"] or "-",
        f"{found['train_seconds'] / 60:.0f}",
        ", ".join(map(short_commit, found["commits"])),
    )


TABLES = {"runs": runs, "curves": curves}
VALUES = {}
