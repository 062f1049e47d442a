"""The generations of population based training: the host's part, and the file `pbt.jsonl`."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import jax
import numpy as np

from podracer.population.evolution import Lineage
from podracer.run import metrics, rundir
from podracer.run.driver import EvolvingDriver, RunState
from podracer.run.generation_rows import FILE, read
from podracer.run.record import Experiment
from podracer.system import files
from podracer.topology import here
from podracer.topology.processes import Processes


class Generations:
    """Ends generations at their milestones, and writes what each member did.

    Args:
      experiment: a run with `pbt`.
      directory: the run directory, or None.
      state: where the run begins; rows of later generations are dropped.
      processes: those that share the run.

    Attributes:
      hyper: the numbers that vary, float32 [P] by name, as they are now.
    """

    def __init__(self, experiment: Experiment, directory: pathlib.Path | None, state: RunState, processes: Processes):
        assert experiment.pbt is not None
        self._pbt, self._total_steps = experiment.pbt, experiment.run.total_steps
        self._driver, self._processes = cast(EvolvingDriver, experiment.driver), processes
        with processes.collective():
            numbers, generation = here((state.learner.hyper, state.evolution.generation))
        self.hyper = {name: np.asarray(numbers[name]) for name in self._pbt.hyper}
        self._done = int(np.max(generation))
        self._file = None
        if directory and processes.is_first:
            path = directory / FILE
            earlier = [row for row in read(path) if row["generation"] < self._done] if path.exists() else []
            with rundir.writing(path):
                with files.replacing(path) as partial:
                    partial.write_text("".join(map(_line, earlier)))
                self._file = path.open("a")

    def next_milestone(self, env_steps: int) -> int:
        """The steps at which the next generation ends."""
        return self._pbt.milestone(self._pbt.generations(env_steps))

    def is_due(self, env_steps: int) -> bool:
        """True where a generation ends; nobody would train the next one at the last step."""
        return self._done < self._pbt.generations(env_steps) and env_steps < self._total_steps

    def evolve(self, state: RunState, env_steps: int) -> RunState:
        """Ends a generation; `state` is consumed."""
        with self._processes.collective():
            state, lineage = self._driver.evolve(state)
            lineage, updates = jax.device_get(here((lineage, state.learner.num_updates)))
        self.hyper = {name: np.asarray(value) for name, value in lineage.hyper_after.items()}
        if self._file:
            with rundir.writing(pathlib.Path(self._file.name)):
                self._file.writelines(map(_line, _rows(lineage, env_steps, int(np.max(updates)), self._done)))
                self._file.flush()
        self._done += 1
        return state

    def to_disk(self) -> None:
        """Waits until the rows are on the disk, because a checkpoint relies on them."""
        if self._file:
            with rundir.writing(pathlib.Path(self._file.name)):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()


def _rows(lineage: Lineage, env_steps: int, updates: int, generation: int) -> Iterator[metrics.Row]:
    """Rows of a generation, without a fitness that is not finite."""
    for member in range(len(lineage.parent)):
        row: metrics.Row = {"env_steps": env_steps, "updates": updates, "generation": generation, "member": member}
        row |= {"parent": int(lineage.parent[member]), "copied": bool(lineage.copied[member])}
        row |= {"ready": bool(lineage.ready[member]), "episodes": int(lineage.count[member])}
        if math.isfinite(lineage.fitness[member]):
            row["fitness"] = float(lineage.fitness[member])
        yield row | {f"hyper/{name}": float(value[member]) for name, value in lineage.hyper_after.items()}


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"
