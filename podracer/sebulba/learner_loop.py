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
from podracer.sebulba.states import without_member_axis
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
      tasks: `EnvSpec.tasks`.
    """

    key: jax.Array
    parts: int
    total_steps: int
    final_draws: int
    tasks: tuple[str, ...] = ()


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


class LearnerLoop:
    """Learns from rollouts as they come, and publishes parameters.

    It goes in rounds: a rollout of every replica of every process, or none: `agreement` says whether all have theirs.

    What is due after a rollout may be thousands of updates: they are done a few at a time, and in between the loop
    looks at signals and at its actors. At a milestone they wait, for a state may have pending updates.

    Args:
      learning: the learner's functions.
      programs: what of them is compiled.
      agreement: collects what the processes of a pod know each.
      processes: those that share the run.
      settings: of the loop.
      start: where it begins.
    """

    def __init__(
        self,
        learning: Learning,
        programs: Programs,
        agreement: Agreement,
        processes: Processes,
        settings: LoopSettings,
        start: LoopStart,
    ):
        self._learning, self._programs, self.agreement, self.processes = learning, programs, agreement, processes
        self._key, self.total_steps, self.final_draws = settings.key, settings.total_steps, settings.final_draws
        self.tasks = settings.tasks
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
        return min(self.env_steps / self.total_steps, 1.0)

    def run(self, actor_pool: ActorPool, hooks: RunHooks, snapshot: Callable[[], RunState]) -> bool:
        """Learns until `total_steps`, or `hooks.should_stop()`.

        Args:
          actor_pool: the actors.
          hooks: called meanwhile.
          snapshot: the state of the run, for a milestone.

        Returns:
          True where it got there.
        """
        return _Run(self, actor_pool, hooks, snapshot).run()

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
            with self.processes.collective():
                stopping, numbers, spent = self.agreement(*own).T
            if stopping.any():
                return False
            if spent[0] > seconds and self.pending < before:
                return True
            number = min(self.pending, int(numbers.min()))
            with self.processes.collective():
                self.learner, self.replay_state, self._sums = self._programs.run_pending_updates(
                    self.learner, self.replay_state, self._sums, np.int32(number), progress, self._key
                )
                self._pace.dispatched(number, self._sums)
            self.pending -= number
        return True

    def learn(self, trajectory: Trajectory) -> list[Metrics]:
        """Learns from a trajectory, or adds it to the replay; returns metrics by part."""
        with self.processes.collective():
            if self._programs.add is not None:
                return [self._add(trajectory)]
            return self._learn_in_parts(trajectory)

    def _learn_in_parts(self, trajectory: Trajectory) -> list[Metrics]:
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

    def count_steps(self, transitions: int) -> bool:
        """Adds real transitions; after the last step, makes the final updates due and returns True if there are any."""
        self.env_steps += transitions
        if not self.final_draws or self.env_steps < self.total_steps:
            return False
        self.replay_state = add_updates(self.replay_state, self.final_draws)
        self.pending = self._count_pending()
        return True

    def take_sums(self, metrics: Metrics) -> Metrics:
        """Adds to the metrics of a rollout those of all updates on samples since the last call."""
        for sums in self._sums:
            metrics = metrics | sums
        self._sums = self._programs.zero_sums
        return metrics

    def join(self, rollouts: list[Rollout]) -> Trajectory:
        """Joins the trajectories of a round."""
        return self._learning.join([rollout.trajectory for rollout in rollouts])

    def publish_to(self, actor_pool: ActorPool) -> None:
        """Publishes the newest parameters."""
        with self.processes.collective():  # it waits for the update
            actor_pool.context.store.publish(self.rollouts, self._learning.publish(self.learner, self.progress))


class _Run:
    """A run of the loop with its actors (arguments as in `LearnerLoop.run`)."""

    def __init__(self, loop: LearnerLoop, actor_pool: ActorPool, hooks: RunHooks, snapshot: Callable[[], RunState]):
        self._loop, self._actor_pool, self._hooks, self._snapshot = loop, actor_pool, hooks, snapshot
        self._processes = loop.processes
        self._report = Report(int(loop.learner.num_updates), loop.agreement, loop.processes, loop.tasks)

    def run(self) -> bool:
        """Learns until `total_steps`; returns False where it was stopped before."""
        loop = self._loop
        if loop.pending and loop.env_steps >= loop.total_steps:
            if not self._finish_run():
                return False
            self._milestone()
        elif not self._finish_pending():
            return False
        while loop.env_steps < loop.total_steps:
            target = self._hooks.next_milestone(loop.env_steps)
            while loop.env_steps < target:
                target = self._round(target)
                if target is None:
                    return False
            self._send(timed=not loop.pending)
            if loop.env_steps >= loop.total_steps and not self._finish_run():
                return False
            with self._report.clock_stopped():
                self._milestone()
            self._actor_pool.back()
            if not self._finish_pending():
                return False
        return True

    def _round(self, target: int) -> int | None:
        """Learns from a rollout of every replica.

        Args:
          target: the steps of the next milestone.

        Returns:
          The target, which may be here now, or None where the run was stopped.
        """
        loop, report = self._loop, self._report
        clock = [time.perf_counter()]
        self._processes.set_status("waiting for its environments")
        rollouts = self._actor_pool.next_rollouts(loop.rollouts, self._hooks.should_stop)
        clock.append(time.perf_counter())
        with self._processes.collective():
            votes = loop.agreement(*_vote(rollouts, report.seconds), self._hooks.should_save())
        stop_votes, transitions, seconds, saves = votes.T
        clock.append(time.perf_counter())
        if rollouts is None or stop_votes.any():
            self._send()
            return None
        metrics = loop.learn(loop.join(rollouts))
        num_transitions = int(transitions.sum(dtype=np.float64))
        ended = loop.count_steps(num_transitions)
        self._keep_snapshots(rollouts)
        if not loop.pending:
            loop.publish_to(self._actor_pool)
        if saves[0]:
            target = min(target, loop.env_steps)
        at_milestone = target <= loop.env_steps < loop.total_steps
        complete = at_milestone or ended or self._finish_pending()
        metrics[0] = loop.take_sums(metrics[0])
        clock.append(time.perf_counter())
        report.add(rollouts, num_transitions, metrics, np.diff(clock), len(self._actor_pool.context.channel))
        if not complete or (not at_milestone and seconds[0] > SECONDS_PER_REPORT):
            self._send()
        return target if complete else None

    def _keep_snapshots(self, rollouts: list[Rollout]) -> None:
        """Keeps where the next rollout of each actor begins, for checkpoints."""
        threads = self._actor_pool.context.num_actors
        for place, rollout in enumerate(rollouts):
            if rollout.resume is not None:
                self._loop.snapshots[place * threads + (self._loop.rollouts - 1) % threads] = rollout.resume

    def _finish_pending(self) -> bool:
        """Does all pending updates, and publishes; returns False where the run was stopped."""
        if self._loop.pending:
            if not self._loop.run_pending_updates(self._hooks.should_stop, self._actor_pool.check):
                return False
            self._loop.publish_to(self._actor_pool)
        return True

    def _finish_run(self) -> bool:
        """Does all pending updates after the last step, where there may be many, with a report every now and then."""
        loop = self._loop
        while loop.pending:
            begin, before = time.perf_counter(), loop.pending
            complete = loop.run_pending_updates(self._hooks.should_stop, self._actor_pool.check, SECONDS_PER_REPORT)
            if loop.pending < before:
                times = np.asarray([0.0, 0.0, time.perf_counter() - begin])
                self._report.add([], 0, [loop.take_sums({})], times, len(self._actor_pool.context.channel))
                self._send()
            if not complete:
                return False
            with self._processes.collective():
                saves = bool(loop.agreement(self._hooks.should_save())[0, 0])
            if saves and loop.pending:
                with self._report.clock_stopped():
                    self._milestone()
        return True

    def _send(self, timed: bool = True) -> None:
        self._report.send(self._hooks.on_progress, self._loop.env_steps, len(self._actor_pool.actors), timed)

    def _milestone(self) -> None:
        snapshot = self._snapshot()
        state = self._hooks.on_milestone(snapshot, self._loop.env_steps)
        if state is not None and state.learner is not snapshot.learner:
            # Actors go on with the parameters that they have until the next update publishes others.
            self._loop.learner = without_member_axis(state.learner)


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
