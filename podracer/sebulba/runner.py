"""The learner's loop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.learning.learner import ReplayState, add_updates
from podracer.run.driver import RunHooks, RunState
from podracer.sebulba.actor import ActorSnapshot, Rollout
from podracer.sebulba.actor_pool import ActorPool, stops
from podracer.sebulba.agreement import Agreement
from podracer.sebulba.learner_program import Learning
from podracer.sebulba.metrics import Report
from podracer.sebulba.programs import Programs
from podracer.topology.processes import Processes
from podracer.types import LearnerState, Metrics, Trajectory

SECONDS_PER_REPORT = 0.5
"""Seconds between reads of metrics from the device."""


class LoopSettings(NamedTuple):
    """Settings of a learner's loop.

    Attributes:
      key: of the learner.
      parts: of each trajectory, which are learnt from in turn.
      total_steps: where the run ends.
      final_draws: draws of updates after the last step.
    """

    key: jax.Array
    parts: int
    total_steps: int
    final_draws: int


class LoopStart(NamedTuple):
    """A run's state where its loop begins.

    Attributes:
      learner: without a leading dim.
      replay_state: what is replayed, and how much was learnt.
      rollouts: that were learnt from, of every replica.
      env_steps: real transitions.
      snapshots: where the next rollout of each actor of this process begins, or [].
    """

    learner: LearnerState
    replay_state: ReplayState
    rollouts: int
    env_steps: int
    snapshots: list[ActorSnapshot]


class Learner:
    """Learns from rollouts as they come, and publishes parameters.

    It goes in rounds: a rollout of every replica of every process, or none, for `votes` say whether all have theirs.

    What is due after a rollout may be thousands of updates: they are done a few at a time, and in between the loop
    looks at signals and at its actors. At a milestone they wait, for a state may have pending updates.

    Args:
      learning: the learner's functions.
      programs: what of them is compiled.
      votes: collect what the processes of a pod know each.
      processes: those that share the run.
      settings: of the loop.
      start: where it begins.
    """

    def __init__(
        self,
        learning: Learning,
        programs: Programs,
        votes: Agreement,
        processes: Processes,
        settings: LoopSettings,
        start: LoopStart,
    ):
        self._learning, self._programs, self.votes, self._processes = learning, programs, votes, processes
        self._key, self._total_steps, self._final_draws = settings.key, settings.total_steps, settings.final_draws
        self._parts = [jnp.int32(i) for i in range(settings.parts)]
        self.learner, self.replay_state, self.rollouts, self.env_steps, self.snapshots = start
        self._pace = _Pace(programs.at_once, programs.seconds)
        self._sums = programs.zero_sums
        self.pending = self._count_pending()

    def _count_pending(self) -> int:
        return 0 if self._programs.add is None else int(self.replay_state.counts.pending_updates)

    @property
    def progress(self) -> float:
        """The share of the run that is done."""
        return min(self.env_steps / self._total_steps, 1.0)

    def run(self, actor_pool: ActorPool, hooks: RunHooks, snapshot: Callable[[], RunState]) -> bool:
        """Learns until `total_steps`, or `hooks.should_stop()`.

        Args:
          actor_pool: the actors.
          hooks: called meanwhile.
          snapshot: the state of the run, for a milestone.

        Returns:
          True where it got there.
        """
        should_stop = hooks.should_stop
        report = Report(int(self.learner.num_updates), self.votes, self._processes)

        def send(timed: bool = True) -> None:
            report.send(hooks.on_progress, self.env_steps, len(actor_pool.actors), timed)

        def milestone() -> None:
            hooks.on_milestone(snapshot(), self.env_steps)

        def finish() -> bool:
            """Does what is pending, and publishes; returns whether it got there."""
            if self.pending:
                if not self.run_pending_updates(should_stop, actor_pool.check):
                    return False
                self._publish_to(actor_pool)
            return True

        def finish_run() -> bool:
            """The same behind the last step, where there may be many, with a report every now and then."""
            while self.pending:
                begin, before = time.perf_counter(), self.pending
                complete = self.run_pending_updates(should_stop, actor_pool.check, SECONDS_PER_REPORT)
                if self.pending < before:
                    times = np.asarray([0.0, 0.0, time.perf_counter() - begin])
                    report.add([], 0, [self._with_sums({})], times, len(actor_pool.context.channel))
                    send()
                if not complete:
                    return False
                with self._processes.collective():
                    saves = bool(self.votes(hooks.should_save())[0, 0])
                if saves and self.pending:
                    with report.clock_stopped():
                        milestone()
            return True

        if self.pending and self.env_steps >= self._total_steps:
            if not finish_run():
                return False
            milestone()
        elif not finish():
            return False
        while self.env_steps < self._total_steps:
            target = hooks.next_milestone(self.env_steps)
            while self.env_steps < target:
                clock = [time.perf_counter()]
                self._processes.set_status("waiting for its environments")
                rollouts = actor_pool.next_rollouts(self.rollouts, should_stop)
                clock.append(time.perf_counter())
                with self._processes.collective():
                    votes = self.votes(*_vote(rollouts, report.seconds), hooks.should_save())
                stops, transitions, seconds, saves = votes.T
                clock.append(time.perf_counter())
                if rollouts is None or stops.any():
                    send()
                    return False
                trajectory = self._learning.join([rollout.trajectory for rollout in rollouts])
                with self._processes.collective():
                    metrics = self._learn(trajectory) if self._programs.add is None else [self._add(trajectory)]
                taken = int(transitions.sum(dtype=np.float64))
                self.env_steps += taken
                ended = self._final_draws > 0 and self.env_steps >= self._total_steps
                if ended:
                    self.replay_state = add_updates(self.replay_state, self._final_draws)
                    self.pending = self._count_pending()
                for place, rollout in enumerate(rollouts):
                    if rollout.resume is not None:
                        threads = actor_pool.context.num_actors
                        self.snapshots[place * threads + (self.rollouts - 1) % threads] = rollout.resume
                if not self.pending:
                    self._publish_to(actor_pool)
                if saves[0]:
                    target = min(target, self.env_steps)
                at_milestone = target <= self.env_steps < self._total_steps
                complete = at_milestone or ended or finish()
                metrics[0] = self._with_sums(metrics[0])
                clock.append(time.perf_counter())
                report.add(rollouts, taken, metrics, np.diff(clock), len(actor_pool.context.channel))
                if not complete or (not at_milestone and seconds[0] > SECONDS_PER_REPORT):
                    send()
                if not complete:
                    return False
            send(timed=not self.pending)
            if self.env_steps >= self._total_steps and not finish_run():
                return False
            with report.clock_stopped():
                milestone()
            actor_pool.back()
            if not finish():
                return False
        return True

    def run_pending_updates(
        self, should_stop: Callable[[], bool], check: Callable[[], None] = lambda: None, seconds: float = math.inf
    ) -> bool:
        """Does pending updates until there are none, so many seconds are over, or `should_stop()`; returns whether it
        was not stopped."""
        progress = jnp.float32(self.progress)
        assert self._programs.run_pending_updates is not None
        self._pace.restart()
        begin, before = time.perf_counter(), self.pending
        while self.pending:
            own = stops(should_stop, check), self._pace.number, time.perf_counter() - begin
            with self._processes.collective():
                stopping, numbers, spent = self.votes(*own).T
            if stopping.any():
                return False
            if spent[0] > seconds and self.pending < before:
                return True
            number = min(self.pending, int(numbers.min()))
            with self._processes.collective():
                self.learner, self.replay_state, self._sums = self._programs.run_pending_updates(
                    self.learner, self.replay_state, self._sums, np.int32(number), progress, self._key
                )
                self._pace.dispatched(number, self._sums)
            self.pending -= number
        return True

    def _learn(self, trajectory: Trajectory) -> list[Metrics]:
        assert self._programs.learn is not None
        progress, metrics = jnp.float32(self.progress), []
        for part in self._parts:
            self.learner, self.replay_state, part_metrics = self._programs.learn(
                self.learner, self.replay_state, trajectory, part, progress, self._key
            )
            metrics.append(part_metrics)
        self.rollouts += 1
        return metrics

    def _add(self, trajectory: Trajectory) -> Metrics:
        assert self._programs.add is not None
        self.replay_state, metrics = self._programs.add(self.replay_state, trajectory, self.learner.num_updates)
        self.rollouts += 1
        self.pending = self._count_pending()
        return metrics

    def _with_sums(self, metrics: Metrics) -> Metrics:
        """The metrics of a rollout, with those of all updates on samples since the last."""
        for sums in self._sums:
            metrics = metrics | sums
        self._sums = self._programs.zero_sums
        return metrics

    def _publish_to(self, actor_pool: ActorPool) -> None:
        with self._processes.collective():  # it waits for the update
            actor_pool.context.store.publish(self.rollouts, self._learning.publish(self.learner, self.progress))


def _vote(rollouts: list[Rollout] | None, seconds: float) -> tuple[bool, int, float]:
    """A process's numbers of a round: True to stop, transitions, and seconds since the last report."""
    return rollouts is None, sum(rollout.transitions for rollout in rollouts or ()), seconds


class _Pace:
    """The number of pending updates in a call: as many as take `seconds`, at most `most`.

    No more than two calls are under way. Programs of one GPU run in the order of their dispatch, so where actors share
    it with the learner, every action waits for all updates that were dispatched before it.
    """

    def __init__(self, most: int, seconds: float):
        self._most, self._seconds, self.number = most, seconds, 1
        self.restart()

    def restart(self) -> None:
        """Nothing is under way."""
        self._under_way: deque[tuple[int, jax.Array]] = deque()
        self._clock = time.perf_counter()

    def dispatched(self, number: int, result: Any) -> None:
        """So many updates were dispatched, of which `result` is what nobody donates."""
        self._under_way.append((number, jax.tree.leaves(result)[0]))
        if len(self._under_way) < 2:
            return
        number, oldest = self._under_way.popleft()
        oldest.block_until_ready()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        fitting = int(self._seconds * number / max(seconds, 1e-6))
        self.number = max(1, min(self._most, fitting, 4 * self.number))
