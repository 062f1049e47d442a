"""MiniGrid's Unlock: a key opens the door between two rooms."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.chance import below, choose
from envs_jax.minigrid.grid import (
    KEY,
    LOCKED,
    MOVES,
    OPEN,
    TOGGLE,
    WALL_CELL,
    MiniGrid,
    MiniGridOptions,
    MiniGridState,
    code,
    kind_of,
)

__all__ = ["Unlock", "UnlockOptions"]

_ROOM = 6  # cells on each side of a room, walls included
_INSIDE = _ROOM - 2


@dataclasses.dataclass(frozen=True)
class UnlockOptions(MiniGridOptions):
    """Options of `Unlock`: those of every task of MiniGrid."""


class Unlock(MiniGrid):
    """Unlock: take the key, and open the door with it. T is 288.

    Start: the agent and the key in the left one of two rooms, and a locked door of the key's colour between them; the
      agent looks at neither.
    End: terminates when the door opens.
    """

    start_words = 4

    def __init__(self, options: UnlockOptions = UnlockOptions()):
        super().__init__("minigrid_unlock", _ROOM, 2 * _ROOM - 1, options.max_steps or 8 * _ROOM**2)
        self._cells = self.walls()
        self._cells[:, _ROOM - 1] = WALL_CELL
        place = np.arange(_INSIDE**2, dtype=np.int32)
        # Where the agent may be, and the cell ahead of it in each direction.
        self._here = np.stack([1 + place % _INSIDE, 1 + place // _INSIDE], -1)[:, None]  # [16, 1, 2]
        self._ahead = self._here + MOVES  # [16, 4, 2]

    def start(self, words: jax.Array) -> MiniGridState:
        door = jnp.stack([jnp.int32(_ROOM - 1), 1 + below(words[0], _INSIDE)])
        colour, place = below(words[1], 6), below(words[2], _INSIDE**2)
        key = jnp.stack([1 + place % _INSIDE, 1 + place // _INSIDE])
        is_there = lambda cells, thing: jnp.all(cells == thing[None, None], axis=-1)  # noqa: E731
        allowed = ~(is_there(self._here, key) | is_there(self._ahead, key) | is_there(self._ahead, door))
        agent = choose(words[3], allowed.reshape(-1))
        cells = jnp.where(self.at(*door), code(LOCKED, colour), self._cells)
        cells = jnp.where(self.at(*key), code(KEY, colour), cells)
        x, y = 1 + agent // 4 % _INSIDE, 1 + agent // 4 // _INSIDE
        return self.begin(cells, x, y, agent % 4)

    def outcome(self, state: MiniGridState, action: jax.Array, front: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (action == TOGGLE) & (kind_of(self.front(state)) == OPEN), jnp.bool_(False)
