"""The results in a suite's directory, and the jobs without one."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from podracer import atari, configs
from podracer.atari import games
from podracer.atari import published as scores
from podracer.suite import aggregates
from podracer.suite.jobs import Job, read_json


@dataclasses.dataclass(frozen=True)
class Collection:
    """The results in a directory.

    Attributes:
      label: the directory's name, or the end of its path that distinguishes it from others.
      directory: the suite's directory; None for published scores.
      settings: the settings that all jobs share.
      results: result by job, in the order of the suite's games and seeds.
      missing: the reason why there is no result, by job.
    """

    label: str
    directory: pathlib.Path | None
    settings: dict[str, Any]
    results: dict[Job, dict[str, Any]]
    missing: dict[Job, str]

    @property
    def games(self) -> list[str]:
        """The games that were asked for."""
        return list(dict.fromkeys(job.game for job in (*self.results, *self.missing)))

    def values(self, field: str) -> dict[str, list[float]]:
        """A number of the results, such as `score` or `hns`, by game and seed, without those that are None."""
        found: dict[str, list[float]] = {}
        for job, result in self.results.items():
            if result[field] is not None:
                found.setdefault(job.game, []).append(result[field])
        return found

    @property
    def scores(self) -> np.ndarray | None:
        """Human-normalised scores [seeds, games] with NaN for missing ones; None if there are none."""
        values = self.values("hns")
        return aggregates.matrix(values) if values else None

    @property
    def part(self) -> str:
        """The part of a set of games that aggregates cover, in words; '' if they cover all of a set that has a name."""
        if self.settings["table"] is None:  # nothing is normalised, and so nothing aggregated
            runs = len(self.results) + len(self.missing)
            return f"{len(self.missing)} of {runs} runs are missing" if self.missing else ""
        counted = set(self.values("hns"))
        wanted = counted | {job.game for job in self.missing if job.game in games.TABLES[self.settings["table"]]}
        if not self.missing and any(wanted == set(known) for known in games.SETS.values()):
            return ""
        protocol = self.settings.get("protocol")
        sets = [atari.PROTOCOLS[protocol].games] if protocol else []
        sets += sorted(games.SETS.values(), key=len)
        whole = next((known for known in sets if wanted <= set(known)), games.GAMES57)
        text = f"{len(counted)} of {len(whole)} games"
        runs = len(self.results) + len(self.missing)
        return text + (f", and {len(self.missing)} of {runs} runs are missing" if self.missing else "")


def read(directory: pathlib.Path, label: str = "") -> Collection:
    """The results in a suite's directory.

    Raises:
      ValueError: if there are none (the message says what there is), or one has other settings (it says which).
    """
    request = read_json(directory / "suite.json")
    found = {path: read_json(path) for path in sorted((directory / "results").glob("*.json"))}
    whole = {
        Job(result["game"], result["seed"]): result
        for path, result in found.items()
        if result is not None and not path.name.endswith(".error.json") and "hns" in result
    }
    if not whole:
        raise ValueError(f"{directory} holds no result of a suite: {_describe_content(directory, request)}.")
    settings = request["settings"] if request else next(iter(whole.values()))["settings"]
    for job, result in whole.items():
        if different := configs.differences(settings, result["settings"]):
            raise ValueError(f"{directory}: the result of {job.name} is of other settings: {'; '.join(different)}.")
    names = [*(request["games"] if request else ()), *(job.game for job in whole)]
    seeds = [*(request["seeds"] if request else ()), *(job.seed for job in whole)]
    jobs = [Job(game, seed) for game in dict.fromkeys(names) for seed in sorted(set(seeds))]
    missing = {job: _reason(directory, job, found) for job in jobs if job not in whole}
    ordered = {job: whole[job] for job in jobs if job in whole}
    return Collection(label or directory.resolve().name, directory, settings, ordered, missing)


def from_papers(name: str) -> Collection:
    """Scores from papers (see `podracer.atari.published`), as if of one seed, without curves.

    Raises:
      ValueError: for an unknown name.
    """
    results = {
        Job(game, 0): {"score": score, "hns": atari.human_normalised(game, score), "evaluations": [], "training": []}
        for game, score in scores.by_name(name).items()
    }
    return Collection(name, None, {"agent": "published", "table": "atari57"}, results, {})


def _reason(directory: pathlib.Path, job: Job, found: Mapping[pathlib.Path, dict[str, Any] | None]) -> str:
    """The reason why a job has no result."""
    error = found.get(directory / "results" / f"{job.name}.error.json")
    if error:
        return f"failed: {error['error']}"
    if directory / "results" / f"{job.name}.json" in found:
        return "its result is torn"
    begun = [path for path in (directory / "runs").glob(f"{job.game}-*") if path.is_dir()]
    return "begun" if any(str(job.seed) in path.name.split("-")[1:] for path in begun) else "not begun"


def _describe_content(directory: pathlib.Path, request: Mapping[str, Any] | None) -> str:
    if not directory.is_dir():
        return "it is no directory"
    runs = [seed for path in (directory / "runs").glob("*") if path.is_dir() for seed in path.name.split("-")[1:]]
    failed = list((directory / "results").glob("*.error.json"))
    if request is not None:
        jobs = len(request["games"]) * len(request["seeds"])
        return f"of {jobs} jobs {len(runs)} are begun, {len(failed)} have failed and none is done"
    names = sorted(path.name for path in directory.iterdir())
    text = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"it holds {text}" if names else "it is empty"
