"""The learner's loop, and the crew of actors that feeds it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.driver import Progress, TrainingDivergedError, episode_means
from podracer.learning.learner import Experience, means
from podracer.sebulba.actor import STAGES, Actor, ActorError, Resume, Rollout, Wiring
from podracer.sebulba.programs import Programs
from podracer.types import LearnerState, Metrics

SECONDS_PER_REPORT = 0.5
"""How often metrics are read from the device."""

POLL_SECONDS = 0.2
"""How often a learner that waits for a rollout looks at signals and at its actors."""

JOIN_SECONDS = 5.0
"""How long actors may take to end their current step when a run is over."""


class Crew:
    """The actors of a run: started together, watched, and stopped together.

    Args:
      actors: not started yet.
      wiring: what they share.
      environment: its name, for messages.
      timeout: seconds that an environment may take to answer.
      restarts: how often an actor whose environment does not answer is replaced before the run ends.
      replace: `(actor) -> Actor`; one that goes on in its place, with new environments.
    """

    def __init__(
        self,
        actors: list[Actor],
        wiring: Wiring,
        environment: str,
        timeout: float,
        restarts: int,
        replace: Callable[[Actor], Actor],
    ):
        self.actors, self.wiring, self.restarts = actors, wiring, restarts
        self._environment, self._timeout, self._replace = environment, timeout, replace

    def __enter__(self) -> Crew:
        for actor in self.actors:
            actor.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        for actor in self.actors:
            actor.stop()
        self.wiring.channel.close()
        self.wiring.store.close()
        deadline = time.monotonic() + JOIN_SECONDS
        for actor in self.actors:
            actor.join(max(0.0, deadline - time.monotonic()))

    def next_rollout(self, number: int, should_stop: Callable[[], bool]) -> Rollout | None:
        """The next rollout (where they have an order, rollout `number`), or None where the run should stop.

        Raises:
          ActorError: where an actor failed, or its environment does not answer.
        """
        source = number % self.wiring.num_actors if self.wiring.mode != "async" else None
        while not should_stop():
            self.check()
            rollout = self.wiring.channel.get(POLL_SECONDS, source)
            if rollout is not None:
                return rollout
        return None

    def check(self) -> None:
        """Replaces an actor that hangs, if there are restarts left.

        Raises:
          ActorError: where an actor failed, ended, or hangs.
        """
        for actor in self.actors:  # first of all, for one that fails ends the others
            if actor.error is not None:
                problem = f"{type(actor.error).__name__}: {actor.error}"
                raise ActorError(f"{actor.name} failed in {self._environment}: {problem}") from actor.error
        now = time.perf_counter()
        for i, actor in enumerate(self.actors):
            since = actor.waiting_since
            if not actor.is_alive():
                raise ActorError(f"{actor.name} ended without a word.")
            if since is not None and now - since > self._timeout:
                problem = f"{actor.name}: {self._environment} has not answered for {now - since:.0f} s"
                if not self.restarts:
                    raise ActorError(
                        f"{problem}; if that is how long it takes, raise env_timeout={self._timeout:g}; if it happens "
                        "now and then, let env_restarts replace the environments."
                    )
                actor.stop()
                self.restarts -= 1
                print(f"{problem}; starting new ones ({self.restarts} restart(s) left).", file=sys.stderr, flush=True)
                self.actors[i] = self._replace(actor)
                self.actors[i].start()


class Learner:
    """Learns from rollouts as they come and publishes parameters (arguments: see `podracer.sebulba.driver`).

    What is due after a rollout may be thousands of updates: they are done a few at a time, and in between the loop
    looks at signals and at its actors. At a milestone they wait, for a state may have pending updates.
    """

    def __init__(
        self,
        *,
        programs: Programs,
        publish: Callable[[LearnerState, float], Any],
        key: jax.Array,
        parts: int,
        learner: LearnerState,
        experience: Experience,
        rollouts: int,
        env_steps: int,
        total_steps: int,
        resumes: list[Resume],
    ):
        self._programs, self._publish, self._key = programs, publish, key
        self._parts, self._total_steps = [jnp.int32(i) for i in range(parts)], total_steps
        self.learner, self.experience, self.rollouts = learner, experience, rollouts
        self.env_steps, self.resumes = env_steps, resumes
        self._pace = _Pace(programs.at_once, programs.seconds)
        self._sums = programs.nothing
        self.pending = self._count_pending()

    def _count_pending(self) -> int:
        return 0 if self._programs.add is None else int(self.experience.counts.pending)

    @property
    def progress(self) -> float:
        """The share of the run that is done."""
        return min(self.env_steps / self._total_steps, 1.0)

    def run(
        self,
        crew: Crew,
        *,
        next_milestone: Callable[[int], int],
        on_progress: Callable[[Progress], None],
        on_milestone: Callable[[], None],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Learns until `total_steps`, or `should_stop()`; returns whether it got there (see `podracer.driver`)."""
        report = _Report(self)

        def finish() -> bool:
            """Does what is pending, and publishes; returns whether it got there."""
            if self.pending:
                if not self.drain(should_stop, crew.check):
                    return False
                self._publish_to(crew)
            return True

        stopped_late = self.pending and self.env_steps >= self._total_steps
        if not finish():
            return False
        if stopped_late:
            on_milestone()
        while self.env_steps < self._total_steps:
            target = next_milestone(self.env_steps)
            while self.env_steps < target:
                waited = time.perf_counter()
                rollout = crew.next_rollout(self.rollouts, should_stop)
                if rollout is None:
                    report.send(on_progress, crew)
                    return False
                start = time.perf_counter()
                metrics = self._learn(rollout) if self._programs.add is None else [self._add(rollout)]
                if rollout.resume is not None:
                    self.resumes[(self.rollouts - 1) % crew.wiring.num_actors] = rollout.resume
                if not self.pending:
                    self._publish_to(crew)
                at_milestone = target <= self.env_steps < self._total_steps
                complete = at_milestone or finish()
                metrics[0] = self._with_sums(metrics[0])
                report.add(rollout, metrics, start - waited, time.perf_counter() - start, len(crew.wiring.channel))
                if not complete or (not at_milestone and report.seconds > SECONDS_PER_REPORT):
                    report.send(on_progress, crew)
                if not complete:
                    return False
            report.send(on_progress, crew, timed=not self.pending)
            with report.clock_stopped():
                on_milestone()
            if not finish():
                return False
        return True

    def drain(self, should_stop: Callable[[], bool], check: Callable[[], None] = lambda: None) -> bool:
        """Does pending updates until there are none, or `should_stop()`; returns whether there are none."""
        progress = jnp.float32(self.progress)
        assert self._programs.drain is not None
        self._pace.restart()
        while self.pending:
            if should_stop():
                return False
            check()
            number = min(self.pending, self._pace.number)
            self.learner, self.experience, self._sums = self._programs.drain(
                self.learner, self.experience, self._sums, np.int32(number), progress, self._key
            )
            self.pending -= number
            self._pace.dispatched(number, self._sums)
        return True

    def _learn(self, rollout: Rollout) -> list[Metrics]:
        assert self._programs.learn is not None
        progress, metrics = jnp.float32(self.progress), []
        for part in self._parts:
            self.learner, self.experience, part_metrics = self._programs.learn(
                self.learner, self.experience, rollout.trajectory, part, progress, self._key
            )
            metrics.append(part_metrics)
        self.env_steps += rollout.transitions
        self.rollouts += 1
        return metrics

    def _add(self, rollout: Rollout) -> Metrics:
        assert self._programs.add is not None
        self.experience, metrics = self._programs.add(self.experience, rollout.trajectory, self.learner.num_updates)
        self.env_steps += rollout.transitions
        self.rollouts += 1
        self.pending = self._count_pending()
        return metrics

    def _with_sums(self, metrics: Metrics) -> Metrics:
        """The metrics of a rollout, with those of all updates on samples since the last."""
        for sums in self._sums:
            metrics = metrics | sums
        self._sums = self._programs.nothing
        return metrics

    def _publish_to(self, crew: Crew) -> None:
        crew.wiring.store.publish(self.rollouts, self._publish(self.learner, self.progress))


class _Pace:
    """How many pending updates go into a call: as many as take `seconds`, at most `most`.

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


class _Report:
    """Collects what happened since the last report, on the device until it is sent.

    Seconds count until a report that is timed: at a milestone with pending updates they do not yet, for what took them
    is not all done.
    """

    def __init__(self, learner: Learner):
        self._learner = learner
        self._updates = int(learner.learner.num_updates)
        self._clear()
        self._restart_clock()

    def _clear(self) -> None:
        self._metrics: list[Metrics] = []
        self._episodes: list[Any] = []
        self._rewards: list[jax.Array] = []

    def _restart_clock(self) -> None:
        self._clock = time.perf_counter()
        self._timed: list[Rollout] = []
        self._waiting = self._learning = self._depth = 0.0

    @contextlib.contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """What is done within takes no time."""
        start = time.perf_counter()
        yield
        self._clock += time.perf_counter() - start

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._clock

    def add(self, rollout: Rollout, metrics: list[Metrics], waited: float, learnt: float, depth: int) -> None:
        self._timed.append(rollout._replace(trajectory=None, resume=None, episodes=None))  # type: ignore[arg-type]
        self._episodes.append(rollout.episodes)
        self._rewards.append(rollout.trajectory.timesteps.reward)
        self._metrics += metrics
        self._waiting, self._learning = self._waiting + waited, self._learning + learnt
        self._depth += depth

    def send(self, on_progress: Callable[[Progress], None], crew: Crew, timed: bool = True) -> None:
        """Reads the metrics and passes them on.

        Raises:
          TrainingDivergedError: where one is not finite.
        """
        if not self._metrics:
            return
        fetched, episodes = jax.device_get((self._metrics, self._episodes))
        every = {name: np.asarray([metrics[name] for metrics in fetched], np.float64) for name in fetched[0]}
        sums = {name: values.sum(keepdims=True) for name, values in every.items()}
        self._updates += int(sums.get("replay/updates", [len(fetched)])[0])
        if not all(np.all(np.isfinite(value)) for value in sums.values()):
            culprit = self._culprit(every)
            raise TrainingDivergedError.of(sums, self._learner.env_steps, self._updates, culprit)
        metrics = means(sums, len(fetched))
        metrics["sebulba/policy_lag_max"] = every["sebulba/policy_lag_max"].max(keepdims=True)
        metrics |= episode_means(jax.tree.map(lambda *x: np.asarray([sum(map(float, x))]), *episodes))
        self._clear()
        seconds, transitions = 0.0, 0
        if timed:
            seconds, transitions = self.seconds, sum(rollout.transitions for rollout in self._timed)
            metrics |= self._shares(seconds, crew.wiring.num_actors)
            self._restart_clock()
        steps = np.asarray([self._learner.env_steps], np.int64)
        on_progress(Progress(self._learner.env_steps, self._updates, metrics, steps, seconds, transitions))

    def _shares(self, seconds: float, num_actors: int) -> dict[str, np.ndarray]:
        """Where the learner's and the actors' time went, [1] each."""
        scalars = {
            "sebulba/queue_depth": self._depth / len(self._timed),
            "sebulba/learn_share": self._learning / seconds,
            "sebulba/wait_share": self._waiting / seconds,
        }
        for stage in STAGES:
            spent = sum(rollout.seconds[stage] for rollout in self._timed)
            scalars[f"sebulba/{stage}_share"] = spent / seconds / num_actors
        return {name: np.asarray([value], np.float64) for name, value in scalars.items()}

    def _culprit(self, metrics: dict[str, np.ndarray]) -> str:
        """Which reward, of the rollouts until a metric [updates] was not finite, was not either, in words, or ""."""
        first = min(int(np.argmin(np.isfinite(x))) for x in metrics.values() if not np.all(np.isfinite(x)))
        learnt = first * len(self._rewards) // len(self._metrics)
        for rewards in jax.device_get(self._rewards[: learnt + 1]):
            if not np.all(np.isfinite(rewards)):
                row, lane = np.argwhere(~np.isfinite(rewards))[0]
                return f"the environment's reward is not finite in row {row} of a rollout, lane {lane} of its actor"
        return ""
