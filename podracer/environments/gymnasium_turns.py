"""Turns of training and evaluation, for environments of which only one can exist, such as a simulator with a port."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from podracer.system.console import note
from podracer.types import EnvSpec, HostEnvironment, HostStep


class Turns:
    """Makes lanes for training and for evaluation; if both cannot exist, training's close during evaluation."""

    def __init__(self):
        self._training: list[_Training] = []
        self._has_noted = False

    def __reduce__(self) -> Any:
        return Turns, ()  # lanes stay in their process

    def train(self, make: Callable[[int], HostEnvironment], num_lanes: int, seed: int) -> HostEnvironment:
        """Makes lanes that an evaluation may replace for a while; `make(seed)` makes them."""
        self._training = [lanes for lanes in self._training if not lanes.closed]
        lanes = _Training(make, num_lanes, seed)
        self._training.append(lanes)
        return lanes

    def evaluate(self, make: Callable[[], HostEnvironment]) -> HostEnvironment:
        """Makes lanes for an evaluation: first beside those of training, then in their place."""
        try:
            return make()
        except Exception as error:
            training = [lanes for lanes in self._training if not lanes.closed]
            made = self._replace(training, make)
            if made is None:
                raise
            if not self._has_noted:
                self._has_noted = True
                note(
                    f"{made.spec.name} cannot be made twice ({type(error).__name__}: {error}): for every evaluation "
                    "training's is closed and its episode broken off."
                )
            return made

    @staticmethod
    def _replace(training: list[_Training], make: Callable[[], HostEnvironment]) -> HostEnvironment | None:
        """Closes the lanes of training and calls `make`; None if that fails too."""
        for lanes in training:
            lanes.lend()
        try:
            return _Evaluation(make(), training) if training else None
        except Exception:
            for lanes in training:
                lanes.take_back()
            return None


class _Training:
    """Lanes of training; an evaluation closes them, and afterwards they are made anew: a break in their streams."""

    def __init__(self, make: Callable[[int], HostEnvironment], num_lanes: int, seed: int):
        self._make, self._num_lanes, self._seed = make, num_lanes, seed
        self._turn = threading.Lock()
        self._running: HostEnvironment | None = make(seed)
        self.spec: EnvSpec = self._running.spec
        self.closed = False

    def recv(self) -> tuple[np.ndarray, HostStep]:
        with self._turn:
            if self._running is None:
                self._seed += self._num_lanes  # not the same episode again
                self._running = self._make(self._seed)
            return self._running.recv()

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        running = self._running
        if running is not None:  # None if an evaluation closed them: their action is lost
            running.send(lanes, actions)

    def lend(self) -> None:
        """Closes the lanes after their step; `recv` waits until they are taken back."""
        self._turn.acquire()
        running, self._running = self._running, None
        if running is not None:
            with contextlib.suppress(Exception):  # the evaluation can begin even so
                running.close()

    def take_back(self) -> None:
        self._turn.release()

    def close(self) -> None:
        self.closed = True
        running, self._running = self._running, None
        if running is not None:
            running.close()


class _Evaluation:
    """Lanes of an evaluation that replace those of training until it closes."""

    def __init__(self, running: HostEnvironment, replaced: list[_Training]):
        self._running, self._replaced = running, replaced
        self.spec, self.recv, self.send = running.spec, running.recv, running.send

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for lanes in self._replaced:
                stack.callback(lanes.take_back)
            self._running.close()
