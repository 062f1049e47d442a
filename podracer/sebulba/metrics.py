"""Reports of the learner: metrics, episodes, and shares of time."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from podracer.errors import TrainingDivergedError
from podracer.learning.learner import means
from podracer.learning.replay_steps import LARGEST
from podracer.run.driver import Progress, episode_means
from podracer.sebulba.actor import STAGES, Rollout
from podracer.sebulba.agreement import Agreement
from podracer.topology.processes import Processes
from podracer.types import EpisodeStats, Metrics


class Report:
    """Collects what happened since the last report, on the device until it is sent.

    Args:
      updates: of the learner, where the run stands.
      agreement: of the run.
      processes: that share it.
      tasks: `EnvSpec.tasks`.

    Seconds count until a report that is timed: at a milestone with pending updates they do not yet, for what took them
    is not all done.
    """

    def __init__(self, updates: int, agreement: Agreement, processes: Processes, tasks: tuple[str, ...] = ()):
        self._updates, self._agreement, self._processes = updates, agreement, processes
        self._tasks, sums = tasks, np.zeros(len(tasks) if len(tasks) > 1 else (), np.float32)
        self._no_episodes = EpisodeStats(sums, sums, sums)  # type: ignore[arg-type]
        self._clear()
        self._restart_clock()

    def _clear(self) -> None:
        self._metrics: list[Metrics] = []
        self._episodes: list[EpisodeStats] = []
        self._rewards: list[list[jax.Array]] = []
        self._faults: list[list[str]] = []

    def _restart_clock(self) -> None:
        self._clock = time.perf_counter()
        self._rounds = self._transitions = self._depth = 0
        self._times = np.zeros(3)
        self._stages = dict.fromkeys(STAGES, 0.0)

    @contextlib.contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Stops the clock of the report within a block."""
        start = time.perf_counter()
        yield
        self._clock += time.perf_counter() - start

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._clock

    def add(
        self, rollouts: list[Rollout], transitions: int, metrics: list[Metrics], times: np.ndarray, depth: int
    ) -> None:
        """Adds a round: this process's rollouts, transitions of all, and seconds it waited for actors, for the other
        processes, and learnt."""
        self._rounds, self._transitions = self._rounds + 1, self._transitions + transitions
        self._times, self._depth = self._times + times, self._depth + depth
        self._metrics += metrics
        self._rewards.append([rollout.trajectory.timesteps.reward for rollout in rollouts])
        self._faults.append([rollout.fault for rollout in rollouts])
        for rollout in rollouts:
            self._episodes.append(rollout.episodes)
            for stage in STAGES:
                self._stages[stage] += rollout.seconds[stage]

    def send(
        self, on_progress: Callable[[Progress], None], env_steps: int, num_actors: int, timed: bool = True
    ) -> None:
        """Reads the metrics and passes them on, those of all processes alike in each.

        Args:
          on_progress: gets them.
          env_steps: where the run stands.
          num_actors: of this process.
          timed: whether what took the seconds is all done.

        Raises:
          TrainingDivergedError: where one is not finite.
        """
        if not self._metrics:
            return
        with self._processes.collective():
            fetched, episodes = jax.device_get((self._metrics, self._episodes))
        every = {name: np.asarray([metrics[name] for metrics in fetched], np.float64) for name in fetched[0]}
        sums = {
            name: values.max(keepdims=True) if name in LARGEST else values.sum(keepdims=True)
            for name, values in every.items()
        }
        self._updates += int(sums.get("replay/updates", [len(fetched)])[0])
        if not all(np.all(np.isfinite(value)) for value in sums.values()):
            found = enumerate(self._processes.all_gather(self._culprit(every)))
            of = " of process {}" if self._processes.count > 1 else ""
            culprit = next((text + of.format(i) for i, text in found if text), "")
            raise TrainingDivergedError.of(sums, env_steps, self._updates, culprit)
        metrics = means(sums, len(fetched))
        if "sebulba/policy_lag_max" in every:  # somebody acted
            metrics["sebulba/policy_lag_max"] = every["sebulba/policy_lag_max"].max(keepdims=True)
        if episodes:
            self._no_episodes = jax.tree.map(np.zeros_like, episodes[0])
        summed = jax.tree.map(lambda *x: sum(np.asarray(y, np.float64) for y in x), self._no_episodes, *episodes)
        leaves, structure = jax.tree.flatten(summed)
        totals = np.concatenate([np.ravel(x) for x in leaves])
        with self._processes.collective():
            measurements = self._agreement(self.seconds, *self._times, self._depth, *self._stages.values(), *totals)
        spent, totals = measurements[:, : -len(totals)], measurements[:, -len(totals) :].sum(axis=0, dtype=np.float64)
        sums_of_all = [x.reshape(1, *np.shape(leaf)) for x, leaf in zip(np.split(totals, len(leaves)), leaves)]
        metrics |= episode_means(jax.tree.unflatten(structure, sums_of_all), self._tasks)
        self._clear()
        seconds, transitions = 0.0, 0
        if timed:
            seconds, transitions = float(spent[0, 0]), self._transitions
            metrics |= self._shares(spent, num_actors)
            self._restart_clock()
        steps = np.asarray([env_steps], np.int64)
        on_progress(Progress(env_steps, self._updates, metrics, steps, seconds, transitions))

    def _shares(self, spent: np.ndarray, num_actors: int) -> dict[str, np.ndarray]:
        """Shares of the learners' and the actors' time, means over processes, [1] each."""
        seconds, actors, peers, learning, depth, *stages = spent.mean(axis=0, dtype=np.float64)
        scalars = {
            "sebulba/queue_depth": depth / self._rounds,
            "sebulba/learn_share": learning / seconds,
            "sebulba/wait_share": actors / seconds,
        }
        for stage, total in zip(STAGES, stages):
            scalars[f"sebulba/{stage}_share"] = total / seconds / num_actors
        if len(spent) > 1:
            scalars |= {"pod/wait_share": peers / seconds, "pod/wait_share_max": spent[:, 2].max() / seconds}
            scalars |= {"pod/slowest": np.argmin(spent[:, 2]), "pod/round_seconds": seconds / self._rounds}
        return {name: np.asarray([value], np.float64) for name, value in scalars.items()}

    def _culprit(self, metrics: dict[str, np.ndarray]) -> str:
        """Names what was not finite in the rollouts until a metric [updates] was not; "" for nothing."""
        first = min(int(np.argmin(np.isfinite(x))) for x in metrics.values() if not np.all(np.isfinite(x)))
        learnt = first * len(self._rewards) // len(self._metrics)
        for rewards in itertools.chain(*jax.device_get(self._rewards[: learnt + 1])):
            if not np.all(np.isfinite(rewards)):
                row, lane = np.argwhere(~np.isfinite(rewards))[0]
                return f"the environment's reward is not finite in row {row} of a rollout, lane {lane} of its actor"
        return next((text for texts in self._faults[: learnt + 1] for text in texts if text), "")
