"""The result of a job: the files of its run as one JSON object."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import platform
import shlex
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from podracer import atari
from podracer.atari import games
from podracer.atari.protocols import FRAME_SKIP
from podracer.run import metrics
from podracer.suite.jobs import Job, Suite, read_json
from podracer.version import __version__

LAST = 100
"""The number of training games in the mean at a point of training (Machado et al. 2018)."""

MILLION = 1_000_000

PACKAGES = ("jax", "jaxlib", "numpy", "envpool")
"""The packages whose versions may decide a score."""


def read(suite: Suite, job: Job) -> list[dict[str, Any] | ValueError]:
    """The results of a job whose run is complete: one for each of its seeds, or the reason why it has none.

    Scores are of whole games, unclipped. `score` is the number that the protocol reports (its `figure`); without a
    protocol, the mean of the last evaluation. `hns` is the score normalised by the protocol's table, or None if the
    table lacks the game or there is none. `commit` is the commit at the run's start. `side_by_side` is the number of
    seeds in the run. `train_seconds` are of the whole run, `frames_per_second` of one seed.

    Raises:
      ValueError: if the run is not complete or has no files.
    """
    directory = suite.run_dir(job)
    summary, description = (read_json(directory / name) for name in ("summary.json", "config.json"))
    if summary is None or description is None or not summary["complete"]:
        raise ValueError("it is not complete.")
    skip = description["env_options"].get("frame_skip", FRAME_SKIP) if suite.settings["table"] else 1
    shared = {
        "game": job.game,
        "agent": suite.settings["agent"],
        "preset": suite.settings.get("preset"),
        "protocol": suite.settings.get("protocol"),
        "table": suite.settings["table"],
        "command": shlex.join(["podracer", *suite.command(job)[3:]]),
        "settings": suite.settings,
        "commit": (read_json(suite.start_path(job)) or {}).get("commit"),
        "versions": versions(),
        "machine": machine(summary),
        "env_steps": summary["env_steps"],
        "frames": summary["env_steps"] * skip,
        "updates": summary["updates"],
        "train_seconds": summary["train_seconds"],
        "frames_per_second": summary["steps_per_second"] * skip / len(job.members),
        "side_by_side": len(job.members),
    }
    rows, found = metrics.read(directory / "metrics.jsonl"), list[dict[str, Any] | ValueError]()
    for i, one in enumerate(job.members):
        try:
            if job.others and summary["members"][i]["diverged"]:
                raise ValueError("its parameters became infinite or NaN; a smaller learning rate may help.")
            own = [row for row in rows if row.get("member", i) == i]
            found.append(shared | {"seed": one.seed} | _scores(shared, own, skip))
        except ValueError as error:
            found.append(error)
    return found


def _scores(shared: Mapping[str, Any], rows: Sequence[metrics.Row], skip: int) -> dict[str, Any]:
    """The evaluations and scores of one seed, from its rows of metrics."""
    evaluations, frames, name = _evaluations(rows, skip), shared["frames"], shared["protocol"]
    protocol = atari.protocol(name) if name else None
    points = [at for at in protocol.at if at < frames] if protocol else []
    # At the end a seed beside others may have more frames than the one with the fewest, whose frames are reported.
    last = [*(_last(rows, point, skip) for point in points), _last(rows, math.inf, skip) | {"frames": frames}]
    training = _each_million(rows, frames, skip)
    found = {
        "best": max((one["mean"] for one in evaluations), default=None),
        "final": evaluations[-1]["mean"] if evaluations else None,
        "last_100": last[-1]["mean"],
        "each_million": training[-1]["mean"] if training else None,
    }
    score = found[protocol.figure if protocol else "final"]
    if score is None:
        kind = f"games of the kind that protocol {name!r} reports" if name else "evaluation"
        raise ValueError(f"it has no {kind}; train for longer.")
    return {
        "evaluations": evaluations,
        "training": training,
        "training_last_100": last,
        "best": found["best"],
        "final": found["final"],
        "score": score,
        "hns": normalise(shared["game"], score, shared["table"]),
    }


def normalise(game: str, score: float, table: Any) -> float | None:
    """The human-normalised score; None if the table lacks the game, or there is no table."""
    return atari.human_normalised(game, score, table) if table and game in games.TABLES[table] else None


def _evaluations(rows: Sequence[metrics.Row], skip: int) -> list[dict[str, Any]]:
    names = {"mean": "return_mean", "std": "return_std", "episodes": "episodes", "unfinished": "unfinished"}
    return [
        {"frames": row["env_steps"] * skip} | {name: row.get(f"eval/{key}") for name, key in names.items()}
        for row in rows
        if "eval/return_mean" in row
    ]


def _games(rows: Sequence[metrics.Row], skip: int) -> list[tuple[int, float, float]]:
    """The tuples (frames, mean, number) of the training games that ended between two rows."""
    return [
        (row["env_steps"] * skip, row["episode/return"], row["episode/count"])
        for row in rows
        if "episode/return" in row
    ]


def _last(rows: Sequence[metrics.Row], frames: float, skip: int) -> dict[str, Any]:
    """The mean of the newest `LAST` training games after so many frames; of fewer if there are no more."""
    total, episodes = 0.0, 0.0
    for at, mean, number in reversed(_games(rows, skip)):
        if at <= frames and episodes < LAST:
            count = min(number, LAST - episodes)
            total, episodes = total + mean * count, episodes + count
    return {"frames": frames, "mean": total / episodes if episodes else None, "episodes": int(episodes)}


def _each_million(rows: Sequence[metrics.Row], frames: int, skip: int) -> list[dict[str, Any]]:
    """The mean of the training games in each million frames in which a game ended.

    The remaining frames belong to the last million, unless they are most of a million themselves.
    """
    sums: dict[int, tuple[float, float]] = {}
    blocks = max(1, round(frames / MILLION))
    for at, mean, number in _games(rows, skip):
        block = min(-(-at // MILLION), blocks)
        total, episodes = sums.get(block, (0.0, 0.0))
        sums[block] = total + mean * number, episodes + number
    return [
        {"frames": min(block * MILLION, frames), "mean": total / episodes, "episodes": int(episodes)}
        for block, (total, episodes) in sorted(sums.items())
    ]


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of the packages that may decide a score."""
    found = {"podracer": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The machine and the devices of a run, at its end."""
    where = {"host": socket.gethostname(), "platform": platform.platform(), "cpus": os.cpu_count()}
    return where | {"devices": summary["devices"], "device": summary["device"]}
