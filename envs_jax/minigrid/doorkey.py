"""MiniGrid's DoorKey: a key opens the door to the other half of a room."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from envs_jax.chance import below
from envs_jax.minigrid.grid import (
    GOAL_CELL,
    KEY,
    LOCKED,
    WALL_CELL,
    YELLOW,
    MiniGrid,
    MiniGridOptions,
    MiniGridState,
    code,
)

__all__ = ["DoorKey", "DoorKeyOptions"]


@dataclasses.dataclass(frozen=True)
class DoorKeyOptions(MiniGridOptions):
    """Options of `DoorKey`.

    Attributes:
      size: cells on each side of the grid, walls included.
    """

    size: int = 8

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("size", 5)


class DoorKey(MiniGrid):
    """DoorKey: take the key, open the door with it, and go to the goal. T is 10 size^2.

    Start: a wall from top to bottom, with a locked door, between the agent and the key on its left side, each in a
      random cell, and the goal in the corner on its right side.
    """

    start_words = 5

    def __init__(self, options: DoorKeyOptions = DoorKeyOptions()):
        self._size = options.size
        super().__init__("minigrid_doorkey", options.size, options.size, options.max_steps or 10 * options.size**2)
        self._cells = self.walls()
        self._cells[-2, -2] = GOAL_CELL

    def start(self, words: jax.Array) -> MiniGridState:
        wall, door = 2 + below(words[0], self._size - 4), 1 + below(words[1], self._size - 3)
        left = wall - 1  # columns
        agent, key = below(words[2], left * (self._size - 2)), below(words[3], left * (self._size - 2) - 1)
        key = key + (key >= agent).astype(jnp.int32)
        cells = jnp.where(self.columns == wall, WALL_CELL, self._cells)
        cells = jnp.where(self.at(wall, door), code(LOCKED, YELLOW), cells)
        cells = jnp.where(self.at(1 + key % left, 1 + key // left), code(KEY, YELLOW), cells)
        return self.begin(cells, 1 + agent % left, 1 + agent // left, below(words[4], 4))
