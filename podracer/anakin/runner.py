"""Runs an Anakin program from the host: dispatch, milestones, and what to do when something goes wrong.

The next call is dispatched before the metrics of the last one are read, so the device never waits for Python. Calls
stop by themselves at a milestone (evaluation, checkpoint, end), which makes the call after it a no-op: at a milestone
the newest state is the one whose metrics were read, and nothing has to be copied before it is donated.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from podracer import topology
from podracer.anakin.call import SAVE, Limits, Report
from podracer.anakin.program import Program, StepFn
from podracer.errors import TrainingDivergedError
from podracer.learning.learner import add_updates, means
from podracer.run.driver import Progress, RunHooks, RunState, counter_values, episode_means, program_bytes
from podracer.topology import ahead
from podracer.topology.processes import ALONE, Processes
from podracer.types import EpisodeStats

SECONDS_PER_CALL = 0.5
"""Duration of a call: short enough to react to a signal, long enough to hide Python."""


@dataclasses.dataclass
class Compiled:
    """A program's step, compiled ahead of time.

    Attributes:
      call: `(state, Limits) -> (state, report)`.
      finish: `Program.finish`, likewise, or None.
      seconds: time to trace and compile.
      memory: bytes of arguments and temporary buffers on each device, or None if the backend does not tell.
    """

    call: Callable[[RunState, Limits], tuple[RunState, Report]]
    finish: Callable[[RunState, Limits], tuple[RunState, Report]] | None
    seconds: float
    memory: int | None


class Compiling(NamedTuple):
    """A program's step, and its `finish` or None, that threads compile."""

    step: ahead.Compiling
    finish: ahead.Compiling | None

    def result(self) -> Compiled:
        """Waits for them; `seconds` are those of the one that took longer."""
        step, finish = self.step.result(), self.finish.result() if self.finish else None
        seconds = max(part.seconds for part in self if part)
        return Compiled(step, finish, seconds, program_bytes(step))


def start_step(program: Program, state: RunState | None = None, finish: bool = False) -> Compiling:
    """Traces a program's step and begins to compile it.

    Args:
      program: the program.
      state: for which; the shapes of the program's own if None.
      finish: whether to compile its `finish`, too.
    """

    def started(name: str, function: StepFn) -> ahead.Compiling:
        like = lambda: program.like() if state is None else state  # noqa: E731
        return ahead.Compiling(name, lambda: function.lower(like(), program.like_limits()))

    step = started("step", program.step)
    return Compiling(step, started("finish", program.finish) if finish and program.finish else None)


def compile_step(program: Program, state: RunState) -> Compiled:
    """Traces and compiles a program's step for a state."""
    return start_step(program, state).result()


def run(
    compiled: Compiled,
    limits: Callable[[int, int, int], Limits],
    state: RunState,
    hooks: RunHooks,
    *,
    total_steps: int,
    max_updates_per_call: int,
    culprit: Callable[[EpisodeStats, RunState], str] = lambda episodes, state: "",
    final_draws: int = 0,
    processes: Processes = ALONE,
    tasks: tuple[str, ...] = (),
) -> tuple[RunState, bool]:
    """Trains until every member has `total_steps`, or `hooks.should_stop()`.

    What is done next is a function of reports alone, which are the same in all processes that share the program: what
    a process knows of its clock and of signals it votes.

    Args:
      compiled: the program's functions; they donate the state.
      limits: the program's.
      state: where to begin; consumed.
      hooks: told of every call that did anything, and polled between calls.
      total_steps: real transitions per member.
      max_updates_per_call: an upper bound; calls grow to it or to `SECONDS_PER_CALL`.
      culprit: says what of the environment is not finite, where a metric is not.
      final_draws: draws of updates after the last step; those of a run that is resumed are in its state.
      processes: that share the run; told when this one waits for the others.
      tasks: `EnvSpec.tasks`.

    Returns:
      The final state, and whether it is final (False if it was stopped).

    Raises:
      TrainingDivergedError: where a metric of a member is not finite (of all members, in a population).
    """
    reader = _Reader(state, hooks.on_progress, culprit, processes, tasks)
    per_call, pending = 1, None

    def vote(updates: int) -> int:
        return 0 if hooks.should_stop() else SAVE if hooks.should_save() else updates

    def milestone(state: RunState) -> RunState:
        new = hooks.on_milestone(state, reader.env_steps)
        reader.restart_clock()
        return state if new is None else new

    def finish(state: RunState) -> RunState:
        """Does the pending updates after the last step, until there are none or the run is stopped."""
        assert compiled.finish is not None
        per_call = 1
        while int(state.replay_state.counts.pending_updates) and not reader.stopped:
            state, report = compiled.finish(state, limits(total_steps, total_steps, vote(per_call)))
            per_call = reader.read(report, state, per_call, max(1, final_draws // 100))
            if reader.saves:
                state = milestone(state)
        return state

    # A run that was stopped during its last updates is resumed with them.
    if final_draws and reader.env_steps >= total_steps and int(state.replay_state.counts.pending_updates):
        state = finish(state)
        if reader.stopped:
            return state, False
        state = milestone(state)
    while reader.env_steps < total_steps:
        target = hooks.next_milestone(reader.env_steps)
        while reader.env_steps < target and not (reader.stopped or reader.saves):
            # The device computes this call while the host reads the report of the last one.
            state, report = compiled.call(state, limits(target, total_steps, vote(per_call)))
            if pending is not None:
                per_call = reader.read(pending, state, per_call, max_updates_per_call)
            pending = report
        # The call in flight changed nothing if the one before had reached the milestone: all is read.
        if pending is not None:
            per_call = reader.read(pending, state, per_call, max_updates_per_call)
            pending = None
        if final_draws and reader.env_steps >= total_steps:
            state = finish(state._replace(replay_state=add_updates(state.replay_state, final_draws)))
            if reader.stopped:
                return state, False
        if reader.env_steps >= target or reader.saves:
            state = milestone(state)
            if processes.count == 1 and reader.env_steps < total_steps and hooks.should_stop():
                return state, False  # a vote would wait for an evaluation that was left behind on the device
        elif reader.stopped:
            return state, False
    return state, True


class _Reader:
    """Reads reports, keeps the time and decides the number of updates of the next call."""

    def __init__(
        self,
        state: RunState,
        on_progress: Callable[[Progress], None],
        culprit: Callable[[EpisodeStats, RunState], str],
        processes: Processes,
        tasks: tuple[str, ...],
    ):
        self._on_progress, self._culprit, self._processes, self._tasks = on_progress, culprit, processes, tasks
        with processes.collective():
            env_steps, updates = topology.here((state.env_steps, state.learner.num_updates))
            self._steps, self._updates = counter_values(env_steps), int(np.max(jax.device_get(updates)))
        self._clock = time.perf_counter()
        self.stopped = self.saves = False

    @property
    def env_steps(self) -> int:
        return int(self._steps.min())

    def restart_clock(self) -> None:
        """Forgets the time that a milestone took."""
        self.saves = False
        self._clock = time.perf_counter()

    def read(self, report: Report, newest: RunState, per_call: int, limit: int) -> int:
        """Waits for a report; returns the number of updates for the next call."""
        with self._processes.collective():
            report = jax.device_get(report)
        self.stopped |= report.max_updates[0] == 0
        self.saves |= report.max_updates[0] == SAVE
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        updates = int(np.max(report.updates))
        # A call after a milestone or a stop did nothing, and has nothing to tell.
        if not updates:
            return per_call
        steps = counter_values(report.env_steps)
        transitions = int((steps - self._steps).sum())
        self._steps, self._updates = steps, int(np.max(report.num_updates))
        metrics = means(report.metrics, updates)
        if not np.any(report.finite):
            culprit = self._culprit(report.episodes, newest)
            raise TrainingDivergedError.of(metrics, self.env_steps, self._updates, culprit)
        metrics |= episode_means(report.episodes, self._tasks)
        self._on_progress(Progress(self.env_steps, self._updates, metrics, steps, seconds, transitions))
        # Calls grow by 4 at most, since the first seconds of a process say little about the next.
        per_update = max(seconds / updates, 1e-6)
        return max(1, min(limit, int(SECONDS_PER_CALL / per_update), per_call * 4))
