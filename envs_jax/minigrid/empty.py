"""MiniGrid's Empty: a room with a goal in its corner."""

from __future__ import annotations

import dataclasses

import jax

from envs_jax.chance import below
from envs_jax.minigrid.grid import EAST, GOAL_CELL, MiniGrid, MiniGridOptions, MiniGridState

__all__ = ["Empty", "EmptyOptions"]


@dataclasses.dataclass(frozen=True)
class EmptyOptions(MiniGridOptions):
    """Options of `Empty`.

    Attributes:
      size: cells on each side of the grid, walls included.
      random_start: True begins in any cell and direction; False in the corner opposite to the goal, looking east.
    """

    size: int = 8
    random_start: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("size", 4)
        self.check_flag("random_start")


class Empty(MiniGrid):
    """Empty: go to the goal. T is 4 size^2."""

    see_through_walls = True  # as the package has it, which shows the walls beyond the walls

    def __init__(self, options: EmptyOptions = EmptyOptions()):
        self._random_start, self._inside = options.random_start, options.size - 2
        self.start_words = 2 if options.random_start else 0
        super().__init__("minigrid_empty", options.size, options.size, options.max_steps or 4 * options.size**2)
        self._cells = self.walls()
        self._cells[-2, -2] = GOAL_CELL

    def start(self, words: jax.Array) -> MiniGridState:
        if not self._random_start:
            return self.begin(self._cells, 1, 1, EAST)
        place = below(words[0], self._inside**2 - 1)  # the goal is the last one
        return self.begin(self._cells, 1 + place % self._inside, 1 + place // self._inside, below(words[1], 4))
