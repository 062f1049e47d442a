"""MiniGrid's crossings: rivers of lava, or walls, with one opening each."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.chance import below, ranks
from envs_jax.minigrid.grid import EAST, EMPTY_CELL, GOAL_CELL, OBSTACLES, MiniGrid, MiniGridOptions, MiniGridState

__all__ = ["Crossings", "CrossingsOptions"]


@dataclasses.dataclass(frozen=True)
class CrossingsOptions(MiniGridOptions):
    """Options of `Crossings`.

    Attributes:
      size: cells on each side of the grid, walls included; an odd number.
      num_crossings: number of rivers, at most size - 3.
      obstacle: "lava", or "wall", which harms nobody.
    """

    size: int = 9
    num_crossings: int = 1
    obstacle: Literal["lava", "wall"] = "lava"

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("size", 5, odd=True)
        self.check_integer("num_crossings", 1, self.size - 3)
        self.check("obstacle", self.obstacle in OBSTACLES, "'lava' or 'wall'")


class Crossings(MiniGrid):
    """Crossings: go to the goal through the openings of the rivers. T is 4 size^2.

    Start: the agent in the corner opposite to the goal, looking east; rivers along random even columns and rows, and a
      random way across all of them, to the east and the south, which has an opening in each.
    """

    def __init__(self, options: CrossingsOptions = CrossingsOptions()):
        self._size, self._num_rivers, self._obstacle = options.size, options.num_crossings, OBSTACLES[options.obstacle]
        self._places = np.arange(2, options.size - 2, 2, dtype=np.int32)
        self.start_words = 2 * len(self._places) + 2 * self._num_rivers
        super().__init__("minigrid_crossings", options.size, options.size, options.max_steps or 4 * options.size**2)
        self._cells = self.walls()
        self._cells[-2, -2] = GOAL_CELL
        self._inside = np.pad(np.ones((options.size - 2, options.size - 2), bool), 1)

    def start(self, words: jax.Array) -> MiniGridState:
        num_places = len(self._places)
        order, ways, openings = jnp.split(words, [2 * num_places, 2 * num_places + self._num_rivers])
        chosen = ranks(order) < self._num_rivers
        vertical, horizontal = chosen[:num_places], chosen[num_places:]
        river = jnp.any(vertical[:, None] & (self._places[:, None] == self.columns), axis=0)[None]
        river = river | jnp.any(horizontal[None] & (self._places[None] == self.rows), axis=1)[:, None]

        def following(chosen: jax.Array, place: jax.Array) -> jax.Array:
            """The next river after a place, or the wall."""
            return jnp.min(jnp.where(chosen & (self._places > place), self._places, self._size - 1))

        x = y = jnp.int32(0)  # the river or wall that the way has left last
        left = jnp.sum(vertical, dtype=jnp.int32)  # vertical rivers to cross
        opened = jnp.zeros((self._size, self._size), bool)
        for i in range(self._num_rivers):
            next_x, next_y = following(vertical, x), following(horizontal, y)
            east = below(ways[i], self._num_rivers - i) < left
            along = jnp.where(east, next_y - y, next_x - x) - 1
            off = 1 + below(openings[i], along)
            opened = opened | self.at(jnp.where(east, next_x, x + off), jnp.where(east, y + off, next_y))
            x, y = jnp.where(east, next_x, x), jnp.where(east, y, next_y)
            left = left - east.astype(jnp.int32)
        cells = jnp.where(river & self._inside, jnp.where(opened, EMPTY_CELL, self._obstacle), self._cells)
        return self.begin(cells, 1, 1, EAST)
