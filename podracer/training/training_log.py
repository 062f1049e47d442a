"""The log of training: its rows of metrics with the seconds they took, its cautions, and the progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from podracer.run import metrics
from podracer.run.driver import Progress
from podracer.run.record import Experiment
from podracer.types import Caution


class TrainingLog:
    """Writes a driver's progress as rows of metrics, and shows it.

    Args:
      experiment: the run.
      log: takes the rows; those of an earlier part of the run are in it.
      display: shows where the run stands.
      began: when this part of the run began, in seconds of `time.monotonic`.
      cautions: whether this process says which settings do not fit.

    Attributes:
      train_seconds: seconds of training so far, in all parts of the run.
      cpu_seconds: seconds of this process's CPUs in training so far, likewise.
      hyper: tunable numbers that change in training, [P] by name, as they are now.
    """

    def __init__(
        self,
        experiment: Experiment,
        log: metrics.Log,
        display: metrics.Display,
        began: float,
        *,
        cautions: bool,
    ):
        self._experiment, self._log, self._display = experiment, log, display
        self._cautions = Cautions(experiment.agent.cautions if cautions else (), display)
        # Clocks go on where the newest row of the earlier part left them.
        before = [row for row in log.rows if "time/train_seconds" in row][-1:]
        self.train_seconds = sum(row["time/train_seconds"] for row in before)
        self.cpu_seconds = sum(row.get("time/cpu_seconds", 0.0) for row in before)
        self._began = began - sum(row.get("time/wall_seconds", 0.0) for row in before)
        self._rate = 0.0
        self.hyper: Mapping[str, np.ndarray] = {}
        self.start_cpu_clock()

    @property
    def wall_seconds(self) -> float:
        """Seconds since the run began, the time between its parts left out."""
        return time.monotonic() - self._began

    def start_cpu_clock(self) -> None:
        """Begins to count this process's seconds, after work that is not training."""
        self._cpu_clock = time.process_time()

    def write(self, now: Progress) -> None:
        """Writes a row for each member."""
        timing = self._timing(now)
        for member, steps in enumerate(now.member_steps):
            row: metrics.Row = {"env_steps": int(steps), "updates": now.updates}
            if self._experiment.run.population > 1:
                row["member"] = member
            row |= {name: float(value[member]) for name, value in now.metrics.items()}
            row |= {f"hyper/{name}": float(value[member]) for name, value in self.hyper.items()}
            self._log.write(row | timing)
        self._cautions.check(now.metrics)
        returns = now.metrics["episode/return"]
        returns = returns[np.isfinite(returns)]
        mean = float(returns.mean()) if returns.size else math.nan
        self._display.update(now.env_steps, self._rate, mean, _stage_shares(now.metrics))

    def _timing(self, now: Progress) -> metrics.Row:
        """The columns `time/...`, and those that the environments measure."""
        self.train_seconds += now.seconds
        self.cpu_seconds += time.process_time() - self._cpu_clock
        self.start_cpu_clock()
        timing = {"time/train_seconds": self.train_seconds}
        if now.seconds:
            self._rate = now.transitions / now.seconds
            timing["time/steps_per_second"] = self._rate
        # Next to the seconds they tell a slow machine from a slow program (docs/adr/0012-spread.md).
        timing["time/cpu_seconds"] = self.cpu_seconds
        timing["time/wall_seconds"] = self.wall_seconds
        # Only an environment of a host may have them (docs/adr/0025-remote.md).
        measured = getattr(self._experiment.environment, "metrics", None)
        return timing if measured is None else timing | measured()


class Cautions:
    """Settings that do not fit the task, each said once, when a metric shows it."""

    def __init__(self, cautions: Sequence[Caution], display: metrics.Display):
        self._left, self._display = list(cautions), display

    def check(self, found: Mapping[str, np.ndarray]) -> None:
        """Looks at the newest metrics, [P] each; members that have none are NaN."""
        for caution in self._left[:]:
            values = found.get(caution.metric, np.zeros(1))
            if np.nanmax(values, initial=0.0) > caution.above:
                self._left.remove(caution)
                self._display.warn(f"{caution.metric} is {np.nanmax(values):.2f}: {caution.advice}")


def _stage_shares(found: Mapping[str, np.ndarray]) -> str:
    """Sebulba's stages for the progress bar; nothing for Anakin, which has none, and where nobody acts."""
    stages = ("environment", "inference", "learn")
    if "sebulba/policy_lag" not in found or f"sebulba/{stages[0]}_share" not in found:
        return ""
    shares = " ".join(f"{stage} {float(found[f'sebulba/{stage}_share'][0]):.0%}" for stage in stages)
    return f"  {shares} lag {float(found['sebulba/policy_lag'][0]):.1f}"
