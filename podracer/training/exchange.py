"""Population based training among runs: members are runs of their own, and meet in a directory.

A run that ends a generation writes its score and what it has learnt, looks at a random other one, and goes on with the
other's weights and numbers where these are better by IMPALA's rule (Espeholt et al. 2018, appendix E). Nobody waits for
anybody, so what a run finds there depends on when it looks: such runs do not repeat.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import pathlib
import shutil
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import configs
from podracer.errors import CheckpointError
from podracer.population import evolution
from podracer.result.members import PLACEMENT
from podracer.run import checkpoint, metrics, rundir
from podracer.run.driver import Progress, RunState, num_updates, only_learner
from podracer.run.record import Experiment
from podracer.system import files
from podracer.system.lock import RunLock
from podracer.topology import here
from podracer.types import LearnerState

SCORE = "score.json"
"""The file of a member that says what is beside it; written last."""

ROWS = "exchanges.jsonl"
"""The file of a run directory with a row for each decision."""

LEARNERS = 2
"""Learners of a member that stay: somebody may still read the one before the newest."""


class Other(NamedTuple):
    """Another member, as its files have it.

    Attributes:
      name: its name.
      score: the content of `score.json`.
      learner: its state, leading dim [1].
    """

    name: str
    score: Mapping[str, Any]
    learner: LearnerState


class Exchange:
    """Ends the generations of a run that is a member of a population in a directory.

    Args:
      experiment: a run of Sebulba with `pbt` and `pbt_dir`.
      directory: the run directory, or None.
      state: where the run begins.
      say: takes lines for people.

    Attributes:
      hyper: the numbers that vary, float32 [1] by name, as they are now.

    Raises:
      ValueError: where another run has this one's place.
    """

    def __init__(
        self, experiment: Experiment, directory: pathlib.Path | None, state: RunState, say: Callable[[str], object]
    ):
        assert experiment.pbt is not None
        assert experiment.pbt_dir is not None
        self._experiment, self._pbt, self._say = experiment, experiment.pbt, say
        self._name = directory.name if directory else f"seed-{experiment.run.seed}"
        self._population, self._rows = experiment.pbt_dir, directory / ROWS if directory else None
        self._limits = evolution.limits_of(experiment.agent.config, self._pbt.hyper)
        self._essence = essence(experiment.description)
        self._lock = RunLock(self._own)
        self._lock.take()
        self._remove_partials()
        self._cut_back(num_updates(here(only_learner(state))))
        stored = _read(self._own)
        self._generation = stored["generation"] if isinstance(stored, dict) else 0
        self._done: int | None = None
        self._return_sum = self._count = 0.0
        self._said: set[str] = set()
        self.hyper = self._numbers(state.learner)

    @property
    def _own(self) -> pathlib.Path:
        return self._population / self._name

    def _remove_partials(self) -> None:
        """Removes what a run of this name was writing when it was killed."""
        for partial in self._population.glob(f".{glob.escape(self._name)}.{'[0-9a-f]' * 32}.partial"):
            shutil.rmtree(partial, ignore_errors=True)

    def _cut_back(self, updates: int) -> None:
        """Drops the rows of later updates, which a run that goes on makes again."""
        if self._rows and self._rows.exists():
            earlier = [row for row in metrics.stream(self._rows) if row["updates"] <= updates]
            with rundir.writing(self._rows), files.replacing(self._rows) as partial:
                partial.write_text("".join(json.dumps(row) + "\n" for row in earlier))

    def _numbers(self, learner: LearnerState) -> dict[str, np.ndarray]:
        numbers = here(learner.hyper)
        return {name: np.asarray(numbers[name]) for name in self._pbt.hyper}

    def add(self, now: Progress) -> None:
        """Adds the episodes that ended since the last call."""
        count = float(now.metrics["episode/count"][0])
        if count:
            self._count += count
            self._return_sum += count * float(now.metrics["episode/return"][0])

    def next_milestone(self, env_steps: int) -> int:
        """The steps at which the next generation ends."""
        return self._pbt.milestone(self._pbt.generations(env_steps))

    def is_due(self, env_steps: int) -> bool:
        """True where a generation has ended since this part of the run began; nobody would train the last step's."""
        now = self._pbt.generations(env_steps)
        if self._done is None:
            self._done = now  # a run that goes on keeps its place
        return self._done < now and env_steps < self._experiment.run.total_steps

    def evolve(self, state: RunState, env_steps: int) -> RunState:
        """Ends a generation: writes, looks at another member, and may go on with what that one has learnt."""
        self._done = self._pbt.generations(env_steps)
        row: metrics.Row = {"env_steps": env_steps, "updates": num_updates(here(only_learner(state)))}
        row |= {"member": self._name, "episodes": int(self._count)}
        if self._count < max(1, self._pbt.min_episodes):
            self._write_row(row | {"ready": False, "copied": False})  # they are counted on
            return state
        fitness = self._fitness()
        self._return_sum = self._count = 0.0
        self._generation += 1
        row |= {"ready": True, "generation": self._generation}
        if math.isfinite(fitness):  # else there is nothing to offer
            with rundir.writing(self._own):
                self._write(state, row, fitness)
            row["fitness"] = fitness
        generator = np.random.default_rng()
        other = self._other(state, generator)
        learner, copied = state.learner, False
        if other:
            row |= {"other": other.name, "other_fitness": other.score["fitness"]}
            row["other_env_steps"] = other.score["env_steps"]
            copied = other.score["fitness"] > fitness + self._pbt.threshold
        if other and copied:
            # Exploit: weights, normalisers, the optimiser's state and numbers. Counters stay a member's own.
            learner = other.learner._replace(num_updates=learner.num_updates)
        learner = learner._replace(hyper=learner.hyper | self._explored(learner, generator))
        self.hyper = self._numbers(learner)
        self._write_row(row | {"copied": copied} | {f"hyper/{n}": float(x[0]) for n, x in self.hyper.items()})
        if other and copied:
            self._say(
                f"{env_steps:,} steps: goes on with {other.name}, whose score is {other.score['fitness']:.3f} at "
                f"{other.score['env_steps']:,} steps, and was {fitness:.3f} here"
            )
        return state._replace(learner=learner)

    def _fitness(self) -> float:
        """The mean return of the window, as a score; -inf for returns that are not finite."""
        assert self._pbt.score is not None
        low, high = self._pbt.score
        score = (self._return_sum / self._count - low) / (high - low)
        return min(1.0, score) if math.isfinite(score) else -math.inf

    def _explored(self, learner: LearnerState, generator: np.random.Generator) -> dict[str, jax.Array]:
        """The numbers that vary, after they have."""
        found = {}
        for name in self._pbt.hyper:
            draw, value = jnp.float32(generator.random()), learner.hyper[name]
            new = evolution.explore(self._pbt, here(value), self._limits[name], draw, jnp.bool_(True))
            found[name] = jax.device_put(np.asarray(new), value.sharding)
        return found

    def _write(self, state: RunState, row: Mapping[str, Any], fitness: float) -> None:
        """Writes the learner and then the score, each of which takes its place at once."""
        name = f"learner-{self._generation}"
        partial = self._population / f".{self._name}.{uuid.uuid4().hex}.partial"
        try:
            checkpoints = checkpoint.Checkpoints(partial, name="learner")
            with contextlib.closing(checkpoints):
                checkpoints.save(0, only_learner(state))
            if (self._own / name).exists():  # of a run that was killed before it wrote the score
                shutil.rmtree(self._own / name)
            partial.rename(self._own / name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        hyper = {n: float(x[0]) for n, x in self._numbers(state.learner).items()}
        score = {"member": self._name, "generation": self._generation, "fitness": fitness, "learner": name}
        score |= {n: row[n] for n in ("env_steps", "updates", "episodes")} | {"hyper": hyper, "essence": self._essence}
        rundir.write_json(self._own / SCORE, score)
        for old in self._own.glob("learner-*"):
            if int(old.name.partition("-")[2]) <= self._generation - LEARNERS:
                shutil.rmtree(old, ignore_errors=True)

    def _other(self, state: RunState, generator: np.random.Generator) -> Other | None:
        """A random other member that can be read; None where there is none."""
        others: list[pathlib.Path] = []
        try:
            found = [path for path in self._population.iterdir() if path.is_dir() and not path.name.startswith(".")]
            others = sorted(path for path in found if path.name != self._name)
        except OSError as error:
            self._say_once(f"{self._population} is passed over: it cannot be read ({error})")
        for place in generator.permutation(len(others)):
            other = self._load(others[place], state)
            if isinstance(other, Other):
                return other
            self._say_once(f"{others[place]} is passed over: {other}")
        return None

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _load(self, path: pathlib.Path, state: RunState) -> Other | str:
        """A member, or why it is passed over."""
        score = _read(path)
        if isinstance(score, str):
            return score
        if different := configs.differences(self._essence, score["essence"]):
            return f"it is a run of another configuration: {'; '.join(different[:3])}"
        folder = path / score["learner"]
        if not folder.is_dir():
            return f"{score['learner']} is missing"
        try:
            with contextlib.closing(checkpoint.Checkpoints(folder, name="learner", read_only=True)) as checkpoints:
                like = jax.tree.map(_like, only_learner(state))
                _, read, _ = checkpoints.restore(like, 0)
        except (CheckpointError, OSError, ValueError) as error:
            return f"{score['learner']} cannot be read ({str(error).partition(chr(10))[0]})"
        return Other(path.name, score, read.learner)

    def _write_row(self, row: metrics.Row) -> None:
        if self._rows:
            with rundir.writing(self._rows), self._rows.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def to_disk(self) -> None:
        """Waits until the rows are on the disk, because a checkpoint relies on them."""
        if self._rows and self._rows.exists():
            with rundir.writing(self._rows):
                files.to_disk(self._rows)

    def close(self) -> None:
        """Gives the place back; what was written stays for others."""
        self._lock.close()


def essence(description: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's description that members have in common, in JSON's types."""
    found = {name: value for name, value in rundir.essence(description).items() if name != "hyper"}
    found["run"] = {name: value for name, value in found["run"].items() if name not in (*PLACEMENT, "total_steps")}
    return json.loads(json.dumps(configs.to_json(found)))


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _read(path: pathlib.Path) -> dict[str, Any] | str:
    """The score of a member, or why there is none."""
    try:
        found = json.loads((path / SCORE).read_text())
    except FileNotFoundError:
        return f"it has no {SCORE} yet"
    except (OSError, ValueError) as error:
        return f"its {SCORE} cannot be read ({error})"
    wanted = {"generation": int, "fitness": float | int, "env_steps": int, "learner": str, "essence": dict}
    if not isinstance(found, dict) or any(not isinstance(found.get(name), kind) for name, kind in wanted.items()):
        return f"its {SCORE} is none of a member's"
    if found["generation"] < 1 or not math.isfinite(found["fitness"]):
        return f"its {SCORE} has no generation yet"
    if pathlib.PurePath(found["learner"]).name != found["learner"]:
        return f"its {SCORE} names a learner elsewhere"
    return found
