"""Several tasks of host environments side by side (see `podracer.environments.tasks`).

Every actor has lanes of each task, so that each trajectory mixes them all, as IMPALA's batches do (there: actors of one
task each, and batches of whatever comes from the queue).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from podracer.environments import gate, tasks
from podracer.types import ArrayTree, HostEnvironment, HostEnvironments, HostStep


class _Part(NamedTuple):
    """One of K makers of host environments.

    Attributes:
      name: of the task.
      environments: the maker.
      index: k.
      num_actions: of its actions if all tasks together have more, else 0.
      metrics: places of the metrics of all tasks among its own.
    """

    name: str
    environments: HostEnvironments
    index: int
    num_actions: int
    metrics: list[int]


class HostTasks:
    """K makers of host environments for the lanes of one run (see `podracer.types.HostEnvironments`).

    Attributes:
      spec: of all of them (`tasks.common_spec`).
      saved: True if the environments of all tasks can be saved.
    """

    def __init__(
        self,
        environments: Mapping[str, HostEnvironments] | Sequence[HostEnvironments],
        *,
        union: tasks.Union = "none",
        task_input: bool = False,
    ):
        """Puts environments side by side; arguments as those of `tasks.Tasks`.

        Raises:
          ValueError: as in `tasks.common_spec`, and for environments that return rows of some lanes.
        """
        by_name = isinstance(environments, Mapping)
        found: list[HostEnvironments] = list(environments.values() if by_name else environments)  # type: ignore[union-attr]
        names = list(environments) if by_name else tasks.names_of(found)
        for name, one in zip(names, found):
            at_once = getattr(one, "lanes_at_once", None)
            if at_once and at_once(2):
                raise ValueError(f"{name} returns rows of some of its lanes; tasks need those of all at every step.")
        self.spec = spec = tasks.common_spec(names, [one.spec for one in found], tasks.TasksOptions(union, task_input))
        self._task_input = task_input
        self._parts = [
            _Part(name, one, k, tasks.fewer_actions(spec, one.spec), [one.spec.metrics.index(x) for x in spec.metrics])
            for k, (name, one) in enumerate(zip(names, found))
        ]
        self.saved = all(getattr(one, "saved", False) for one in found)

    def alone(self) -> dict[str, HostEnvironments]:
        """Each task by itself, by name."""
        found: dict[str, HostEnvironments] = {}
        for part in self._parts:
            one = copy.copy(self)
            limit = part.environments.spec.max_episode_steps
            one.spec, one._parts = self.spec._replace(name=part.name, max_episode_steps=limit, tasks=()), [part]
            found.setdefault(part.name, one)
        return found

    def shared_by(self, actors: int) -> HostTasks:
        """The same environments for several actors, each of which has as many as there are tasks."""

        def share(environments: Any) -> Any:
            shared_by = getattr(environments, "shared_by", None)
            return shared_by(actors * len(self._parts)) if shared_by else environments

        shared = copy.copy(self)
        shared._parts = [part._replace(environments=share(part.environments)) for part in self._parts]
        return shared

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> RunningTasks:
        """Starts B / K lanes of each task."""
        each = num_lanes // len(self._parts)
        running: list[HostEnvironment] = []
        with contextlib.ExitStack() as made:  # closes the others where one cannot be made
            for k, part in enumerate(self._parts):
                # No two lanes have one seed.
                running.append(part.environments.make(each, seed + k * each, evaluation=evaluation))
                made.callback(running[-1].close)
            together = RunningTasks(self.spec, self._parts, running, self._rows(num_lanes))
            made.pop_all()
        return together

    def metrics(self) -> dict[str, float]:
        """Numbers of the makers that have some, `NAME/TASK`."""
        found: dict[str, float] = {}
        for part in self._parts:
            of_part = getattr(part.environments, "metrics", None)
            found |= {f"{name}/{part.name}": value for name, value in (of_part() if of_part else {}).items()}
        return found

    def _rows(self, num_lanes: int) -> HostStep:
        """Rows of zeros [B] that say which task they are of, if they are to."""
        rows = HostStep.zeros(self.spec, num_lanes)
        if self._task_input:
            for k, part in enumerate(self._parts):
                rows.observation[tasks.TASK][k :: len(self._parts), part.index] = 1.0
        return rows

    def render(self, seed: int) -> Any:
        """Makes a lane of a task by itself (`alone`) that has `frame()`; None where it has none."""
        make = getattr(self._parts[0].environments, "render", None)
        running = make(seed) if make else None
        return running and RunningTasks(self.spec, self._parts, [running], self._rows(1))


class RunningTasks:
    """Running lanes, of which k::K are of the k-th of K batches (see `podracer.types.HostEnvironment`).

    All batches are sent their actions before any is waited for, so that those with threads of their own overlap.

    Attributes:
      spec: of all tasks.
      wake: wakes all batches, if all can be woken; else None.
    """

    def __init__(self, spec: Any, parts: list[_Part], running: Sequence[HostEnvironment], rows: HostStep):
        self.spec, self._parts, self._running, self._rows = spec, parts, running, rows
        self._lanes = np.arange(rows.scalars.shape[1], dtype=np.int32)
        self._lanes_of_parts: list[np.ndarray] = []
        # Whoever can be woken is not watched, so that one batch that cannot be leaves all to be watched.
        self.wake = self._wake if all(getattr(one, "wake", None) for one in running) else None

    def _wake(self) -> None:
        for one in self._running:
            one.wake()  # type: ignore[attr-defined]

    def recv(self) -> tuple[np.ndarray, HostStep]:
        # Arrays of its own at every step: the caller's are not written to again.
        shown, scalars = _copied(self._rows.observation), np.empty_like(self._rows.scalars)
        metrics: Any = np.empty_like(self._rows.metrics) if self.spec.metrics else ()
        K = len(self._parts)
        found = [one.recv() for one in self._running]
        if not self._lanes_of_parts:
            for part, (lanes, rows) in zip(self._parts, found):
                gate.check_rows(lanes, rows, part.environments.spec._replace(name=part.name), len(self._lanes) // K)
        self._lanes_of_parts = [lanes for lanes, _ in found]
        for k, (part, (_, rows)) in enumerate(zip(self._parts, found)):
            wrapped = isinstance(shown, dict) and not isinstance(rows.observation, dict)
            _put(shown[tasks.OBSERVATION] if wrapped else shown, rows.observation, k, K)
            scalars[:4, k::K] = rows.scalars[:4]
            if len(scalars) > 4:  # a task without raw scores: its rewards and ends of episodes are those
                scalars[4:, k::K] = rows.scalars[4:] if len(rows.scalars) > 4 else rows.scalars[[0, 3]]
            if self.spec.metrics:
                metrics[:, k::K] = rows.metrics[part.metrics]
        return self._lanes, HostStep(shown, scalars, metrics)

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        actions, K = np.asarray(actions), len(self._parts)
        for k, (part, one) in enumerate(zip(self._parts, self._running)):
            own = actions[k::K]
            if part.num_actions:
                own = np.where(own < part.num_actions, own, 0).astype(own.dtype)
            one.send(self._lanes_of_parts[k], own)

    def frame(self) -> np.ndarray:
        """Lane 0 as a picture, if it was made by `render`."""
        return self._running[0].frame()  # type: ignore[attr-defined]

    def save(self) -> Any:
        """The states of all batches, if they can be saved."""
        return tuple(one.save() for one in self._running)  # type: ignore[attr-defined]

    def load(self, saved: Any) -> None:
        """Restores states from `save`."""
        for one, state in zip(self._running, saved):
            one.load(state)  # type: ignore[attr-defined]

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # all of them, whatever one raises
            for one in reversed(self._running):
                closing.callback(one.close)


def _copied(tree: ArrayTree) -> ArrayTree:
    return {name: _copied(value) for name, value in tree.items()} if isinstance(tree, dict) else tree.copy()


def _put(rows: ArrayTree, values: ArrayTree, k: int, num_tasks: int) -> None:
    """Writes values [B / K, ...] into the lanes k::K of rows [B, ...], which may have more numbers each."""
    if isinstance(values, dict):
        for name, value in values.items():
            _put(rows[name], value, k, num_tasks)
        return
    rows[(slice(k, None, num_tasks), *map(slice, values.shape[1:]))] = values
