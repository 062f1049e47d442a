"""MiniGrid's KeyCorridor: a ball in a locked room, and the key to it in another room along a corridor."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.chance import below, ranks
from envs_jax.minigrid.grid import (
    BALL,
    CLOSED,
    EAST,
    EMPTY_CELL,
    KEY,
    LOCKED,
    PICKUP,
    WALL_CELL,
    MiniGrid,
    MiniGridOptions,
    MiniGridState,
    code,
    kind_of,
)

__all__ = ["KeyCorridor", "KeyCorridorOptions"]

_NEVER = np.uint32(2**32 - 1)


@dataclasses.dataclass(frozen=True)
class KeyCorridorOptions(MiniGridOptions):
    """Options of `KeyCorridor`.

    Attributes:
      room_size: cells on each side of a room, walls included.
      num_rows: rooms on each side of the corridor.
    """

    room_size: int = 6
    num_rows: int = 3

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("room_size", 3)
        self.check_integer("num_rows", 1)


class KeyCorridor(MiniGrid):
    """KeyCorridor: take the key, open the locked room with it, drop it, and pick up the ball. T is 30 room_size^2.

    Start: rooms to the left and to the right of a corridor, in which the agent begins. The ball is in a room on the
      right, behind a locked door; the key to it, of the same colour, in a room on the left. Doors between two other
      rooms, or a room and the corridor, are added in random order until all rooms can be reached.
    End: terminates when the ball is picked up.
    """

    def __init__(self, options: KeyCorridorOptions = KeyCorridorOptions()):
        size, rows = options.room_size, options.num_rows
        self._step, self._inside, self._num_rows = size - 1, size - 2, rows
        super().__init__(
            "minigrid_key_corridor", rows * self._step + 1, 3 * self._step + 1, options.max_steps or 30 * size**2
        )
        self._cells = self.walls()
        self._cells[:: self._step] = self._cells[:, :: self._step] = WALL_CELL
        self._cells[1:-1, size : 2 * self._step] = EMPTY_CELL
        # Doors that there can be: between corridor and left, corridor and right, two on the left, two on the right.
        row = np.arange(rows)
        level, upright = np.concatenate([row, row, row[1:], row[1:]]), np.arange(4 * rows - 2) < 2 * rows
        side = np.repeat([0, 1, 0, 1], [rows, rows, rows - 1, rows - 1])
        corner_x = np.where(upright, self._step * (1 + side), 2 * self._step * side)
        self._corners = np.stack([corner_x, self._step * level], -1).astype(np.int32)  # [E, 2]
        self._along = np.stack([~upright, upright], -1).astype(np.int32)  # [E, 2]
        self._side, self._level, self._upright = side, level.astype(np.int32), upright
        # Where the agent begins: the middle room, with what is open of the corridor above and below it.
        middle = rows // 2
        self._first_y = middle * self._step + (middle == 0)
        num_y = (middle + 1) * self._step - (middle == rows - 1) - self._first_y + 1
        self._middle, self._num_starts = middle, 4 * self._inside * num_y
        self.start_words = 3 * len(level) + 6

    def start(self, words: jax.Array) -> MiniGridState:
        num_doors, inside, step = len(self._level), self._inside, self._step
        order, offsets, colours, words = jnp.split(words, [num_doors, 2 * num_doors, 3 * num_doors])
        places = self._corners + self._along * (1 + below(offsets, inside))[:, None]  # [E, 2]
        colours = below(colours, 6)
        room, key_room = below(words[0], self._num_rows), below(words[1], self._num_rows)
        locked = np.arange(num_doors, dtype=np.int32) == self._num_rows + room
        doors = jnp.where(locked, code(LOCKED, colours), code(CLOSED, colours))
        there = locked | self._added(order, room)

        cells = jnp.asarray(self._cells)
        for i in range(num_doors):
            cells = jnp.where(there[i] & self.at(*places[i]), doors[i], cells)
        ball, key = below(words[2], inside**2), below(words[3], inside**2)
        ball_x, ball_y = 2 * step + 1 + ball % inside, room * step + 1 + ball // inside
        cells = jnp.where(self.at(ball_x, ball_y), code(BALL, below(words[4], 6)), cells)
        key_x, key_y = 1 + key % inside, key_room * step + 1 + key // inside
        colour = jnp.sum(jnp.where(locked, colours, 0), dtype=jnp.int32)
        cells = jnp.where(self.at(key_x, key_y), code(KEY, colour), cells)

        # Any cell and direction of the middle, but for the one that looks at the locked door.
        door_y = jnp.sum(jnp.where(locked, places[:, 1], 0), dtype=jnp.int32)
        at_door = 4 * ((door_y - self._first_y) * inside + inside - 1) + EAST
        beside = room == self._middle
        agent = below(words[5], self._num_starts - beside.astype(jnp.int32))
        agent = agent + (beside & (agent >= at_door)).astype(jnp.int32)
        x, y = step + 1 + agent // 4 % inside, self._first_y + agent // 4 // inside
        return self.begin(cells, x, y, agent % 4)

    def _added(self, order: jax.Array, room: jax.Array) -> jax.Array:
        """The doors that are added, bool [E]: the first ones, by their random words, with which no room is shut off."""
        level, upright = self._level, self._upright
        shut = (self._side == 1) & ((level == room) | (~upright & (level == room + 1)))
        rank = ranks(jnp.where(shut, _NEVER, order))
        added = (rank[None] < np.arange(len(level) + 1)[:, None]) & ~shut[None]  # [E + 1, E]: for each number of them
        joined = jnp.ones(len(level) + 1, bool)
        for side in (0, 1):
            opened = [added[:, i] for i in np.flatnonzero(upright & (self._side == side))]  # to the corridor
            between = [added[:, i] for i in np.flatnonzero(~upright & (self._side == side))]
            for i, door in enumerate(between):
                opened[i + 1] = opened[i + 1] | (opened[i] & door)
            for i, door in reversed(list(enumerate(between))):
                opened[i] = opened[i] | (opened[i + 1] & door)
            for i, reached in enumerate(opened):
                joined = joined & (reached | ((room == i) & (side == 1)))
        return (rank < jnp.sum(~joined, dtype=jnp.int32)) & ~shut

    def outcome(self, state: MiniGridState, action: jax.Array, front: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (action == PICKUP) & (kind_of(state.carried) == BALL), jnp.bool_(False)
