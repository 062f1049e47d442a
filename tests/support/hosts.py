"""A host environment in plain NumPy, which can be told to misbehave."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, HostStep

LENGTH = 5


@dataclasses.dataclass
class Steps:
    """Host environments whose observation is the step number, or `beyond`; episodes have 5 transitions of reward 1.

    `misbehave(number of the step, thread's name)` is called at every step. `seeds` are those that were asked for.
    """

    misbehave: Callable[[int, str], None] = lambda number, thread: None
    reward: float = 1.0
    beyond: float = 0.0
    seeds: list[Any] = dataclasses.field(default_factory=list)
    closed: list[str] = dataclasses.field(default_factory=list)

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("steps", spaces.Box(0.0, LENGTH, (1,)), spaces.Discrete(2), LENGTH)

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> Any:
        if not evaluation and num_lanes > 1:
            self.seeds.append((seed, num_lanes))
        return _Running(self, num_lanes, evaluation)


class _Running:
    def __init__(self, parent: Steps, num_lanes: int, evaluation: bool):
        self.parent, self.spec, self.evaluation = parent, parent.spec, evaluation
        self.lanes = np.arange(num_lanes, dtype=np.int32)
        self.step, self.number = np.zeros(num_lanes, np.int32), 0

    def recv(self) -> tuple[np.ndarray, HostStep]:
        first, last = self.step == 0, self.step == LENGTH
        reward, shown = np.full(len(self.lanes), self.parent.reward), self.step[:, None] + self.parent.beyond
        return self.lanes, HostStep.of(shown.astype(np.float32), reward, last, first, last)

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        assert actions.shape == lanes.shape
        self.number += 1
        if not self.evaluation:
            self.parent.misbehave(self.number, threading.current_thread().name)
        self.step = np.where(self.step == LENGTH, 0, self.step + 1)

    def close(self) -> None:
        self.parent.closed.append(threading.current_thread().name)


def live_actors() -> list[str]:
    """Names of actor threads that are running."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("actor ")]


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Waits for a condition; returns True if it becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
