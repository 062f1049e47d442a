"""Remote environments as host environments: what an actor sees of them (see `podracer.types.HostEnvironments`)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from podracer.errors import Closed
from podracer.remote.blocks import Block, Pool
from podracer.remote.hub import Hub, WaitCancelled
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
        self._all = np.arange(pool.lanes, dtype=np.int32)
        self._last: dict[int, Any] = {}  # observations, by the first lane of their block

    def recv(self) -> tuple[np.ndarray, HostStep]:
        try:
            parts = self._hub.take(self._pool)
        except WaitCancelled:
            raise Closed from None
        rows = [self._filler(block) if rows is None else rows for block, rows in parts]
        self._last |= {block.start: each.observation for (block, _), each in zip(parts, rows)}
        lanes = self._all
        if self._pool.batching:
            lanes = np.concatenate([lanes[block.start : block.start + block.lanes] for block, _ in parts])
        return lanes, rows[0] if len(rows) == 1 else self._together(rows)

    def _filler(self, block: Block) -> HostStep:
        rows = HostStep.zeros(self.spec, block.lanes)
        rows.scalars[1:3] = 1.0
        return rows._replace(observation=self._last.get(block.start, rows.observation))

    def _together(self, rows: list[HostStep]) -> HostStep:
        scalars = np.concatenate([each.scalars for each in rows], axis=1)
        metrics = np.concatenate([each.metrics for each in rows], axis=1) if self.spec.metrics else ()
        observation = jax.tree.map(lambda *x: np.concatenate(x), *[each.observation for each in rows])
        return HostStep(observation, scalars, metrics)

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        actions = np.asarray(actions)
        if not self._pool.batching:
            pack = lambda start, end: self._hub.layout.pack_actions(actions[start:end])  # noqa: E731
            self._hub.act(self._pool, self._last, pack)
            return
        place = {lane: i for i, lane in enumerate(lanes.tolist())}
        pack = lambda start, end: self._hub.layout.pack_actions(actions[place[start] : place[start] + end - start])  # noqa: E731
        self._hub.act(self._pool, place, pack)

    def wake(self) -> None:
        """Ends a `recv` that waits."""
        self._hub.wake(self._pool)

    def close(self) -> None:
        self._hub.close_pool(self._pool)
