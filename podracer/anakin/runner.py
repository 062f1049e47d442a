"""Runs an Anakin program from the host: dispatch, milestones, and what to do when something goes wrong.

The next call is dispatched before the metrics of the last one are read, so the device never waits for Python. Calls
stop by themselves at a milestone (evaluation, checkpoint, end), which makes the call after it a no-op: at a milestone
the newest state is the one whose metrics were read, and nothing has to be copied before it is donated.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import numpy as np

from podracer import topology
from podracer.anakin.program import Limits, Program, Report
from podracer.driver import Progress, RunState, TrainingDivergedError, counter_values, episode_means, program_bytes
from podracer.learning.learner import means
from podracer.types import EpisodeStats

SECONDS_PER_CALL = 0.5
"""How long a call should take: short enough to react to a signal, long enough to hide Python."""


@dataclasses.dataclass
class Compiled:
    """A program's step, compiled ahead of time.

    Attributes:
      call: `(state, Limits) -> (state, report)`.
      seconds: how long tracing and compiling took.
      memory: bytes of arguments and temporary buffers on each device, or None where the backend does not say.
    """

    call: Callable[..., tuple[RunState, Report]]
    seconds: float
    memory: int | None


def compile_step(program: Program, state: RunState) -> Compiled:
    """Traces and compiles a program's step for a state."""
    start = time.perf_counter()
    compiled = program.step.lower(state, program.like_limits()).compile()
    seconds = time.perf_counter() - start
    return Compiled(compiled, seconds, program_bytes(compiled))


def run(
    step: Callable[..., tuple[RunState, Report]],
    limits: Callable[[int, int, int], Limits],
    state: RunState,
    *,
    total_steps: int,
    next_milestone: Callable[[int], int],
    max_updates_per_call: int,
    on_progress: Callable[[Progress], None],
    on_milestone: Callable[[RunState, int], None],
    should_stop: Callable[[], bool],
    culprit: Callable[[EpisodeStats, RunState], str] = lambda episodes, state: "",
) -> tuple[RunState, bool]:
    """Trains until every member has `total_steps`, or `should_stop()`.

    What is done next is a function of reports alone, which are the same in all processes that share the program: what
    a process knows of its clock and of signals it votes.

    Args:
      step: the compiled step; donates its state.
      limits: the program's.
      state: where to begin; consumed.
      total_steps: real transitions per member.
      next_milestone: `(env_steps) -> env_steps` at which `on_milestone` is to be called next, at most `total_steps`.
      max_updates_per_call: an upper bound; calls grow to it or to `SECONDS_PER_CALL`.
      on_progress: called with the numbers of every call that did anything.
      on_milestone: called with a state that is safe to read until it returns, and the steps done.
      should_stop: polled between calls.
      culprit: says what of the environment is not finite, where a metric is not.

    Returns:
      The final state, and whether it is final (False if it was stopped).

    Raises:
      TrainingDivergedError: where a metric of a member is not finite (of all members, in a population).
    """
    reader = _Reader(state, on_progress, culprit)
    per_call, pending = 1, None
    while reader.env_steps < total_steps:
        target = next_milestone(reader.env_steps)
        while reader.env_steps < target and not reader.stopped:
            vote = 0 if should_stop() else per_call
            state, report = step(state, limits(target, total_steps, vote))
            if pending is not None:
                per_call = reader.read(pending, state, per_call, max_updates_per_call)
            pending = report
        if pending is not None:
            per_call = reader.read(pending, state, per_call, max_updates_per_call)
            pending = None
        if reader.env_steps >= target:
            on_milestone(state, reader.env_steps)
            reader.restart_clock()
        elif reader.stopped:
            return state, False
    return state, True


class _Reader:
    """Reads reports, keeps the time and decides how many updates the next call should do."""

    def __init__(self, state: RunState, on_progress: Callable[[Progress], None], culprit: Callable[..., str]):
        self._on_progress, self._culprit = on_progress, culprit
        env_steps, updates = topology.here((state.env_steps, state.learner.num_updates))
        self._steps, self._updates = counter_values(env_steps), int(np.max(jax.device_get(updates)))
        self._clock = time.perf_counter()
        self.stopped = False

    @property
    def env_steps(self) -> int:
        return int(self._steps.min())

    def restart_clock(self) -> None:
        self._clock = time.perf_counter()

    def read(self, report: Report, newest: RunState, per_call: int, limit: int) -> int:
        """Waits for a report; returns how many updates the next call should do."""
        report = jax.device_get(report)
        self.stopped |= not report.max_updates[0]
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        updates = int(np.max(report.updates))
        if not updates:
            return per_call
        steps = counter_values(report.env_steps)
        transitions = int((steps - self._steps).sum())
        self._steps, self._updates = steps, int(np.max(report.num_updates))
        metrics = means(report.metrics, updates)
        if not np.any(report.finite):
            culprit = self._culprit(report.episodes, newest)
            raise TrainingDivergedError.of(metrics, self.env_steps, self._updates, culprit)
        metrics |= episode_means(report.episodes)
        self._on_progress(Progress(self.env_steps, self._updates, metrics, steps, seconds, transitions))
        per_update = max(seconds / updates, 1e-6)
        return max(1, min(limit, int(SECONDS_PER_CALL / per_update), per_call * 4))
