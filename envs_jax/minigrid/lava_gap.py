"""MiniGrid's LavaGap: a strip of lava with one gap in it."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from envs_jax.chance import below
from envs_jax.minigrid.grid import EAST, GOAL_CELL, OBSTACLES, MiniGrid, MiniGridOptions, MiniGridState

__all__ = ["LavaGap", "LavaGapOptions"]


@dataclasses.dataclass(frozen=True)
class LavaGapOptions(MiniGridOptions):
    """Options of `LavaGap`.

    Attributes:
      size: cells on each side of the grid, walls included.
      obstacle: "lava", or "wall", which harms nobody.
    """

    size: int = 7
    obstacle: Literal["lava", "wall"] = "lava"

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("size", 5)
        self.check("obstacle", self.obstacle in OBSTACLES, "'lava' or 'wall'")


class LavaGap(MiniGrid):
    """LavaGap: go through the gap to the goal. T is 4 size^2.

    Start: the agent in the corner opposite to the goal, looking east; between them a strip from top to bottom with a
      gap, both in random places.
    """

    start_words = 2

    def __init__(self, options: LavaGapOptions = LavaGapOptions()):
        self._size, self._obstacle = options.size, OBSTACLES[options.obstacle]
        super().__init__("minigrid_lava_gap", options.size, options.size, options.max_steps or 4 * options.size**2)
        self._walls, self._cells = self.walls() == self.walls()[0, 0], self.walls()
        self._cells[-2, -2] = GOAL_CELL

    def start(self, words: jax.Array) -> MiniGridState:
        x, y = 2 + below(words[0], self._size - 4), 1 + below(words[1], self._size - 2)
        strip = (self.columns == x) & (self.rows != y) & ~self._walls
        return self.begin(jnp.where(strip, self._obstacle, self._cells), 1, 1, EAST)
