"""Environments that answer as slowly as an emulator on a given number of cores."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from podracer.types import EnvSpec, HostEnvironment, HostEnvironments, HostStep


class Paced:
    """Environments (see `podracer.types.HostEnvironments`) that answer after `seconds` or later.

    Of many lanes, `at_a_time` wait side by side.
    """

    def __init__(self, environments: HostEnvironments, seconds: float, at_a_time: int):
        self._environments, self.seconds, self._at_a_time = environments, seconds, at_a_time

    @property
    def spec(self) -> EnvSpec:
        return self._environments.spec

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> _PacedEnvironment:
        """Starts lanes."""
        running = self._environments.make(num_lanes, seed, evaluation=evaluation)
        return _PacedEnvironment(running, self, math.ceil(num_lanes / self._at_a_time))


class _PacedEnvironment:
    """Running lanes (see `podracer.types.HostEnvironment`)."""

    def __init__(self, running: HostEnvironment, pace: Paced, rounds: int):
        self._running, self._pace, self._rounds, self._due = running, pace, rounds, 0.0
        self.spec, self.close = running.spec, running.close

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        self._due = time.perf_counter() + self._rounds * self._pace.seconds
        self._running.send(lanes, actions)

    def recv(self) -> tuple[np.ndarray, HostStep]:
        answer = self._running.recv()
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return answer
