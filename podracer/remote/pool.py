"""Remote environments as host environments: what an actor sees of them (see `podracer.types.HostEnvironments`)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from podracer.remote.hub import Hub, Pool, Woken
from podracer.sebulba.channels import Closed
from podracer.types import EnvSpec, HostStep


class RemoteEnvironment:
    """Lanes that workers step (see `podracer.types.HostEnvironment`).

    A lane without a worker shows its last observation again, as the `first` row of an episode of which nothing is
    played: reward 0, discount 1. By the masks of the trajectory contract nothing is learnt from it, and memory,
    previous action and stacked frames begin anew behind it.
    """

    def __init__(self, hub: Hub, pool: Pool, spec: EnvSpec):
        self.spec = spec
        self._hub, self._pool = hub, pool
        self._lanes = np.arange(pool.lanes, dtype=np.int32)
        self._shown = HostStep.zeros(spec, pool.lanes)

    def recv(self) -> tuple[np.ndarray, HostStep]:
        try:
            parts = self._hub.take(self._pool)
        except Woken:
            raise Closed from None
        (block, rows), *more = parts
        if block.lanes < self._pool.lanes or more:
            rows = self._assembled(parts)
        self._shown = rows
        return self._lanes, rows

    def _assembled(self, parts: list[tuple[Any, HostStep]]) -> HostStep:
        whole = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), self._shown)
        waiting = np.ones(self._pool.lanes, bool)
        for block, rows in parts:
            lanes = slice(block.start, block.start + block.lanes)
            waiting[lanes] = False
            whole.scalars[:, lanes] = rows.scalars
            if self.spec.metrics:
                whole.metrics[:, lanes] = rows.metrics
            jax.tree.map(lambda to, x, lanes=lanes: to.__setitem__(lanes, x), whole.observation, rows.observation)
        if waiting.any():
            whole.scalars[:, waiting] = 0.0
            whole.scalars[1:3, waiting] = 1.0
            if self.spec.metrics:
                whole.metrics[:, waiting] = 0.0
            jax.tree.map(lambda to, x: to.__setitem__(waiting, x[waiting]), whole.observation, self._shown.observation)
        return whole

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        actions = np.asarray(actions)
        self._hub.act(self._pool, lambda start, end: self._hub.layout.pack_actions(actions[start:end]))

    def wake(self) -> None:
        """Ends a `recv` that waits."""
        self._hub.wake(self._pool)

    def close(self) -> None:
        self._hub.close_pool(self._pool)
