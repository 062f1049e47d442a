"""A suite's jobs and the directory that they share."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import envs_jax
from podracer import configs
from podracer.run.rundir import write_json
from podracer.suite import claims


class Job(NamedTuple):
    """One run of a suite: a game, and one or more seeds.

    Attributes:
      game: the name of the game.
      seed: the seed, or the first of several.
      others: further seeds of the same run, which trains all as members of a population.
    """

    game: str
    seed: int
    others: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "-".join([self.game, *map(str, (self.seed, *self.others))])

    @property
    def members(self) -> list[Job]:
        """A job for each seed: each has a result of its own."""
        return [Job(self.game, seed) for seed in (self.seed, *self.others)]


def environment(game: str) -> str:
    """The name of the environment of a game: ours of MinAtar, or EnvPool's of Atari."""
    return game if game in envs_jax.names() else f"envpool:{game}-v5"


class Suite:
    """Games, seeds and settings, and the state of their jobs in a directory.

    The directory holds `suite.json` (games, seeds and settings), `runs/GAME-SEED/`, their output `runs/GAME-SEED.log`
    and the facts of their start (`runs/GAME-SEED.start.json`), `results/GAME-SEED.json` of runs that are complete,
    `results/GAME-SEED.error.json` of those that failed, and `claims/`, by which workers share the jobs. A run of
    several seeds has all of them in its names, and a result for each. A seed has one run: a seed that was asked for
    together with others stays with them.

    Args:
      directory: the suite's directory.
      settings: the settings that decide results, from `podracer.configs.to_json`; all jobs in a directory have equal
        ones.
      games: names, as EnvPool has them, or ours of MinAtar (`minatar_breakout`).
      seeds: the seeds of each game.
      train: the agent and the flags of `podracer train` that are equal for all jobs.
      side_by_side: True for one run of all seeds of a game that the directory does not know yet.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        settings: Mapping[str, Any],
        games: Sequence[str],
        seeds: Sequence[int],
        train: Sequence[str] = (),
        side_by_side: bool = False,
    ):
        self.directory, self.settings = directory, json.loads(json.dumps(settings))
        self.games, self.seeds, self._train = tuple(games), tuple(seeds), tuple(train)
        self._side_by_side = side_by_side
        self._groups = self._merged_groups(read_json(self.path) or {})

    @property
    def path(self) -> pathlib.Path:
        """The file of games, seeds and settings."""
        return self.directory / "suite.json"

    @property
    def jobs(self) -> list[Job]:
        """All jobs, every game of the first seed first."""
        mine = [group for group in self._groups if set(group) & set(self.seeds)]
        return [Job(game, group[0], tuple(group[1:])) for group in mine for game in self.games]

    def command(self, job: Job) -> list[str]:
        """The arguments of the process that trains a job, or resumes it."""
        agent, *flags = self._train
        own = ["--seed", str(job.seed), "--run-dir", str(self.run_dir(job)), "--resume"]
        if job.others:
            seeds = [one.seed for one in job.members]
            own += ["--population", str(len(seeds)), "--member-seeds", *map(str, seeds)]
        return [sys.executable, "-m", "podracer", "train", agent, environment(job.game), *flags, *own]

    def note_start(self, job: Job) -> None:
        """Stores the commit with which a job begins: the checkout may change in the days that it takes."""
        if not self.run_dir(job).exists():
            write_json(self.start_path(job), {"commit": commit()})

    def line(self, result: Mapping[str, Any]) -> str:
        """A result in a few words."""
        percent = "" if result["hns"] is None else f", {100 * result['hns']:.1f}% of a human's"
        return (
            f"{result['game']}-{result['seed']}: {result['score']:,.1f}{percent}, after {result['frames']:,} frames "
            f"at {result['frames_per_second']:,.0f} a second"
        )

    def run_dir(self, job: Job) -> pathlib.Path:
        return self.directory / "runs" / job.name

    def log_path(self, job: Job) -> pathlib.Path:
        return self.directory / "runs" / f"{job.name}.log"

    def start_path(self, job: Job) -> pathlib.Path:
        return self.directory / "runs" / f"{job.name}.start.json"

    def result_path(self, job: Job) -> pathlib.Path:
        return self.directory / "results" / f"{job.name}.json"

    def error_path(self, job: Job) -> pathlib.Path:
        return self.directory / "results" / f"{job.name}.error.json"

    @property
    def claims(self) -> pathlib.Path:
        return self.directory / "claims"

    def done(self, job: Job) -> bool:
        """Returns True if there is a result for every seed; a file that is not whole JSON does not count.

        Raises:
          ValueError: for a result of other settings; the message says which.
        """
        paths = [self.result_path(one) for one in job.members]
        stored = [read_json(path) for path in paths]
        for path, result in zip(paths, stored):
            if result is not None:
                self._require_equal(path, result.get("settings", {}))
        return None not in stored

    def register(self) -> None:
        """Writes games and seeds into the directory, together with those of earlier calls.

        Raises:
          ValueError: if the directory holds a suite of other settings (the message says which), or cannot be written.
        """
        wanted = self._merge_stored()
        for job in self.jobs:
            self.done(job)
        try:
            for part in ("runs", "results", "claims"):
                (self.directory / part).mkdir(parents=True, exist_ok=True)
            self._groups = wanted["groups"]
            if wanted == read_json(self.path):
                return
            while not (claim := claims.claim(self.claims, "suite")):  # or one of two loses what it asks for
                time.sleep(0.02)
            try:
                wanted = self._merge_stored()
                write_json(self.path, wanted)
                self._groups = wanted["groups"]
            finally:
                claim.release()
        except OSError as error:
            raise ValueError(f"cannot write to {self.directory}: {error.strerror or error}.") from error

    def _merge_stored(self) -> dict[str, Any]:
        """The settings, games and seeds of this suite, after those that its file already has."""
        stored = read_json(self.path) or {"settings": self.settings, "games": [], "seeds": []}
        self._require_equal(self.path, stored["settings"])
        return {
            "settings": self.settings,
            "games": [*stored["games"], *(game for game in self.games if game not in stored["games"])],
            "seeds": sorted({*stored["seeds"], *self.seeds}),
            "groups": self._merged_groups(stored),
        }

    def _merged_groups(self, stored: Mapping[str, Any]) -> list[list[int]]:
        """The seeds of each run of a game: those of the file, and then those that are new."""
        groups = stored.get("groups", [[seed] for seed in stored.get("seeds", ())])
        new = [seed for seed in self.seeds if not any(seed in group for group in groups)]
        return [*groups, *([new] if self._side_by_side and new else [[seed] for seed in new])]

    def _require_equal(self, path: pathlib.Path, stored: Mapping[str, Any]) -> None:
        different = configs.differences(stored, self.settings)
        if different:
            raise ValueError(f"{path} is of other settings: {'; '.join(different)}; give another directory as --out.")


def commit() -> str | None:
    """The commit of the checkout that holds the library, with `-dirty` if it is changed; None if the library is
    installed."""
    package = pathlib.Path(__file__).parent

    def git(*arguments: str) -> str:
        called = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True)
        return called.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # else the checkout is another project's
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def part(jobs: Sequence[Job], text: str) -> list[Job]:
    """The share I of N of the jobs, from the text `I/N`; all shares together have every job once.

    Raises:
      ValueError: for anything else, or where I is not one of 1 to N.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        nearest = f"; the nearest is {min(max(index, 1), count)}/{count}" if count else ""
        raise ValueError(f"part={text!r}: write I/N, a share I from 1 to N{nearest}.")
    return list(jobs[index - 1 :: count])


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file, or only part of it."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        value = json.loads(path.read_text())
        return value if isinstance(value, dict) else None
    return None
