"""MiniGrid's MultiRoom: rooms in a row, with doors between them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.chance import below, digits
from envs_jax.minigrid.grid import (
    CLOSED,
    EAST,
    EMPTY_CELL,
    GOAL_CELL,
    NORTH,
    SOUTH,
    WALL_CELL,
    WEST,
    MiniGrid,
    MiniGridOptions,
    MiniGridState,
    code,
)

__all__ = ["MultiRoom", "MultiRoomOptions"]

_SIZE, _LEAST = 25, 4  # cells on each side of the grid, and of the smallest room, walls included
_TRIES = 8  # places that are tried for each room


@dataclasses.dataclass(frozen=True)
class MultiRoomOptions(MiniGridOptions):
    """Options of `MultiRoom`.

    Attributes:
      num_rooms: number of rooms, at most 6.
      max_room_size: cells on each side of the largest room, walls included, at most 10.
    """

    num_rooms: int = 4
    max_room_size: int = 5

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("num_rooms", 2, 6)
        self.check_integer("max_room_size", _LEAST, 10)


class Rooms(NamedTuple):
    """Places of rooms, each int32 [N].

    Attributes:
      x, y: column and row of the upper left corner.
      width, height: cells, walls included.
      side: the wall that has the door to the room before: east, south, west or north.
      door_x, door_y: column and row of that door; those of the first room mean nothing.
    """

    x: jax.Array
    y: jax.Array
    width: jax.Array
    height: jax.Array
    side: jax.Array
    door_x: jax.Array
    door_y: jax.Array


class MultiRoom(MiniGrid):
    """MultiRoom: go through all the rooms to the goal. T is 20 times the number of rooms.

    Start: each room has a random size, and a closed door in a random place of a wall of the room before it; two doors
      one after the other differ in colour. The agent is in the first room, and the goal in the last one. As in the
      package, eight places are tried for each room, and all begins anew where none of them is free; but after
      2 max_room_size attempts the longest one is taken, which has fewer rooms in less than one of 1,000 starts.
    """

    def __init__(self, options: MultiRoomOptions = MultiRoomOptions()):
        self._num_rooms, self._max_size = options.num_rooms, options.max_room_size
        super().__init__("minigrid_multi_room", _SIZE, _SIZE, options.max_steps or 20 * options.num_rooms)
        later, self._num_chains = options.num_rooms - 1, 2 * options.max_room_size  # large rooms fit more seldom
        self._shapes = [(self._num_chains, 2), (later, self._num_chains, _TRIES, 2), (later,), (3,)]
        self.start_words = sum(int(np.prod(shape)) for shape in self._shapes)
        # The first room is one of all that lie within the grid: the size and the place on each axis.
        sizes = range(_LEAST, options.max_room_size + 1)
        self._first_x, self._first_y = (
            np.array([(size, at) for size in sizes for at in range(_SIZE - 2) if at + size <= end], np.int32)
            for end in (_SIZE, _SIZE - 1)
        )

    def start(self, words: jax.Array) -> MiniGridState:
        cuts = np.cumsum([int(np.prod(shape)) for shape in self._shapes])[:-1]
        parts = zip(jnp.split(words, cuts), self._shapes)
        first, tries, colours, others = (part.reshape(shape) for part, shape in parts)
        rooms, lengths = self._chains(first, tries)
        longest = jnp.argmax(lengths)
        length, rooms = lengths[longest], [jax.tree.map(lambda leaf: leaf[longest], room) for room in rooms]

        cells, colour, last = jnp.full((_SIZE, _SIZE), EMPTY_CELL), jnp.int32(-1), rooms[0]
        for i, room in enumerate(rooms):
            there = i < length
            columns = (self.columns >= room.x) & (self.columns < room.x + room.width)
            rows = (self.rows >= room.y) & (self.rows < room.y + room.height)
            edge = (self.columns == room.x) | (self.columns == room.x + room.width - 1)
            edge = edge | (self.rows == room.y) | (self.rows == room.y + room.height - 1)
            cells = jnp.where(there & rows & columns & edge, WALL_CELL, cells)
            if i:
                other = below(colours[i - 1], 6 if i == 1 else 5)
                colour = other + ((i > 1) & (other >= colour)).astype(jnp.int32)
                cells = jnp.where(there & self.at(room.door_x, room.door_y), code(CLOSED, colour), cells)
                last = jax.tree.map(lambda new, old, there=there: jnp.where(there, new, old), room, last)
        x, y = _inside(rooms[0], others[0])
        cells = jnp.where(self.at(*_inside(last, others[1])), GOAL_CELL, cells)
        return self.begin(cells, x, y, below(others[2], 4))

    def _chains(self, first: jax.Array, tries: jax.Array) -> tuple[list[Rooms], jax.Array]:
        """Rows of rooms, each int32 [C], and the number of rooms of each that have found a place."""
        x = jnp.asarray(self._first_x)[below(first[:, 0], len(self._first_x))]
        y = jnp.asarray(self._first_y)[below(first[:, 1], len(self._first_y))]
        none = jnp.zeros(self._num_chains, jnp.int32)
        rooms = [Rooms(x[:, 1], y[:, 1], x[:, 0], y[:, 0], none + WEST, none, none)]
        lengths, alive = none + 1, jnp.ones(self._num_chains, bool)
        for words in tries:
            tried = self._next(rooms[-1], words)  # [C, _TRIES]
            fits = (tried.x >= 0) & (tried.y >= 0)
            fits = fits & (tried.x + tried.width <= _SIZE) & (tried.y + tried.height < _SIZE)
            for room in rooms[:-1]:
                room = jax.tree.map(lambda leaf: leaf[:, None], room)
                free = (tried.x + tried.width < room.x) | (room.x + room.width <= tried.x)
                free = free | (tried.y + tried.height < room.y) | (room.y + room.height <= tried.y)
                fits = fits & free
            first_fit = jnp.argmax(fits, axis=1)[:, None]
            rooms.append(Rooms(*(jnp.take_along_axis(leaf, first_fit, axis=1)[:, 0] for leaf in tried)))
            alive = alive & jnp.any(fits, axis=1)
            lengths = lengths + alive.astype(jnp.int32)
        return rooms, lengths

    def _next(self, room: Rooms, words: jax.Array) -> Rooms:
        """Rooms [C, _TRIES] that follow rooms [C], wherever they lie."""
        room = jax.tree.map(lambda leaf: leaf[:, None], room)
        sizes = self._max_size - _LEAST + 1
        side, width, height = digits(words[..., 0], 3, sizes, sizes)
        side = side + (side >= room.side).astype(jnp.int32)  # any but that of its own door
        width, height = width + _LEAST, height + _LEAST
        level = (side == EAST) | (side == WEST)
        longs = jnp.where(level, room.height, room.width), jnp.where(level, height, width)
        along, off = digits(words[..., 1], longs[0] - 2, longs[1] - 2)
        door_x = room.x + jnp.where(level, jnp.where(side == EAST, room.width - 1, 0), 1 + along)
        door_y = room.y + jnp.where(level, 1 + along, jnp.where(side == SOUTH, room.height - 1, 0))
        back_x = jnp.where(level, jnp.where(side == WEST, width - 1, 0), width - 2 - off)
        back_y = jnp.where(level, height - 2 - off, jnp.where(side == NORTH, height - 1, 0))
        return Rooms(door_x - back_x, door_y - back_y, width, height, side ^ 2, door_x, door_y)


def _inside(room: Rooms, word: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Column and row of a random cell within the walls of a room."""
    place = below(word, (room.width - 2) * (room.height - 2))
    return room.x + 1 + place % (room.width - 2), room.y + 1 + place // (room.width - 2)
