"""Worker processes of `python benchmarks/remote.py`; they start fast because they import no JAX."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, HostStep


class Still:
    """Host environments that do nothing, with rows as large as CartPole's."""

    spec = EnvSpec("still", spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2))

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> _StillLanes:
        return _StillLanes(num_lanes)


class _StillLanes:
    spec = Still.spec

    def __init__(self, num_lanes: int):
        self._lanes = np.arange(num_lanes, dtype=np.int32)
        self._first = True

    def recv(self) -> tuple[np.ndarray, HostStep]:
        rows = HostStep.zeros(self.spec, len(self._lanes))
        rows.scalars[1], rows.scalars[2] = 1.0, self._first
        return self._lanes, rows

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        self._first = False

    def close(self) -> None:
        pass


def serve(environment: str, where: str, lanes: int, options: dict[str, Any], connection: dict[str, Any]) -> None:
    """Runs a worker process."""
    from podracer.remote import worker

    source: Any = Still() if environment == "still" else environment
    with contextlib.suppress(worker.LearnerError):
        worker.serve_envs(source, where, lanes=lanes, env_options=options or None, quiet=True, **connection)
