"""MiniGrid's Memory: an object is seen at the start, and its like is to be found at the end of a hallway."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from envs_jax.chance import below
from envs_jax.minigrid.grid import (
    BALL,
    EAST,
    EMPTY_CELL,
    GREEN,
    KEY,
    PICKUP,
    TOGGLE,
    WALL_CELL,
    MiniGrid,
    MiniGridOptions,
    MiniGridState,
    code,
)

__all__ = ["Memory", "MemoryOptions"]


@dataclasses.dataclass(frozen=True)
class MemoryOptions(MiniGridOptions):
    """Options of `Memory`.

    Attributes:
      size: cells on each side of the grid, walls included; an odd number.
      random_length: True draws the length of the hallway; False makes it as long as the grid allows.
    """

    size: int = 7
    random_length: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("size", 7, odd=True)
        self.check_flag("random_length")


class Memory(MiniGrid):
    """Memory: go to the object that is like the one in the first room. T is 5 size^2.

    Start: a key or a ball in a room in the west; from there a hallway to the east, with a key at one side of its end
      and a ball at the other; the agent anywhere between, looking east.
    Action: as in all tasks; picking up has no effect.
    End: terminates beside either of the two objects at the end, with a reward for the right one only.
    """

    start_words = 4

    def __init__(self, options: MemoryOptions = MemoryOptions()):
        self._middle, self._longest, self._random = options.size // 2, options.size - 3, options.random_length
        super().__init__("minigrid_memory", options.size, options.size, options.max_steps or 5 * options.size**2)

    def start(self, words: jax.Array) -> MiniGridState:
        end = 4 + below(words[0], self._longest - 3) if self._random else self._longest
        off = abs(self.rows - self._middle)  # rows from the hallway
        wall = (self.walls() == WALL_CELL) | ((off == 2) & (self.columns <= 4))
        wall = wall | ((off == 1) & (self.columns >= 4) & (self.columns < end))
        wall = wall | ((off > 0) & (self.columns == end)) | (self.columns == end + 2)
        ball_first, ball_above = words[1] >> 31 == 1, words[2] >> 31 == 1
        key, ball = code(KEY, GREEN), code(BALL, GREEN)
        cells = jnp.where(wall, WALL_CELL, EMPTY_CELL)
        cells = jnp.where(self.at(1, self._middle - 1), jnp.where(ball_first, ball, key), cells)
        cells = jnp.where(self.at(end + 1, self._middle - 2), jnp.where(ball_above, ball, key), cells)
        cells = jnp.where(self.at(end + 1, self._middle + 2), jnp.where(ball_above, key, ball), cells)
        x = 1 + below(words[3], end)
        goal = self._middle + jnp.where(ball_first == ball_above, jnp.int32(-1), 1)
        return self.begin(cells, x, self._middle, EAST, task=goal)

    def outcome(self, state: MiniGridState, action: jax.Array, front: jax.Array) -> tuple[jax.Array, jax.Array]:
        there = (state.x > 4) & (state.y != self._middle)
        right = state.y == state.task
        return there & right, there & ~right

    def act(self, state: MiniGridState, action: jax.Array) -> MiniGridState:
        return super().act(state, jnp.where(action == PICKUP, jnp.int32(TOGGLE), action))
