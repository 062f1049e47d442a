"""MiniGrid's DynamicObstacles: a room with a goal, in which balls move about."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.chance import below, choose
from envs_jax.minigrid.grid import (
    BALL,
    BLUE,
    EAST,
    EMPTY_CELL,
    FORWARD,
    GOAL_CELL,
    MiniGrid,
    MiniGridOptions,
    MiniGridState,
    code,
)

__all__ = ["DynamicObstacles", "DynamicObstaclesOptions"]

_NEAR = np.array([(x, y) for y in (-1, 0, 1) for x in (-1, 0, 1)], np.int32)
_BALL = code(BALL, BLUE)


@dataclasses.dataclass(frozen=True)
class DynamicObstaclesOptions(MiniGridOptions):
    """Options of `DynamicObstacles`.

    Attributes:
      size: cells on each side of the grid, walls included.
      num_obstacles: number of balls, at most size // 2 + 1.
      random_start: True begins in any cell and direction; False in the corner opposite to the goal, looking east.
    """

    size: int = 8
    num_obstacles: int = 4
    random_start: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.check_integer("size", 5)
        self.check_integer("num_obstacles", 1, self.size // 2 + 1)
        self.check_flag("random_start")


class DynamicObstacles(MiniGrid):
    """DynamicObstacles: go to the goal, and run into nothing. T is 4 size^2.

    Start: the balls in random cells.
    Action: `Discrete(3)`: turn left, turn right, go forward. Before it, one ball after the other moves to a random free
      cell among the eight around it, if there is one.
    Reward: -1 for going forward where there was a ball, or is a wall, before the balls moved.
    End: terminates there too.
    """

    see_through_walls = True  # as the package has it, which shows the walls beyond the walls
    num_actions = 3
    failure_reward = -1.0

    def __init__(self, options: DynamicObstaclesOptions = DynamicObstaclesOptions()):
        size, self._inside, self._random_start = options.size, options.size - 2, options.random_start
        self.step_words = self._num_balls = options.num_obstacles
        self.start_words = options.num_obstacles + 2 * options.random_start
        super().__init__("minigrid_dynamic_obstacles", size, size, options.max_steps or 4 * size**2)
        self._cells = self.walls()
        self._cells[-2, -2] = GOAL_CELL

    def start(self, words: jax.Array) -> MiniGridState:
        """The start; `task` is int32 [num_obstacles, 2], the column and row of each ball."""
        place = np.arange(self._inside**2 - 1, dtype=np.int32)  # of all free cells; the goal would be the last one
        agent, direction = jnp.int32(0), jnp.int32(EAST)
        if self._random_start:
            agent, direction = below(words[-2], len(place)), below(words[-1], 4)
        cells, free, balls = jnp.asarray(self._cells), place != agent, []
        for word in words[: self._num_balls]:
            ball = choose(word, free)
            free = free & (place != ball)
            balls.append(jnp.stack([1 + ball % self._inside, 1 + ball // self._inside]))
            cells = jnp.where(self.at(*balls[-1]), _BALL, cells)
        x, y = 1 + agent % self._inside, 1 + agent // self._inside
        return self.begin(cells, x, y, direction, task=jnp.stack(balls))

    def move(self, state: MiniGridState, words: jax.Array) -> MiniGridState:
        cells, balls = state.cells, []
        for word, ball in zip(words, state.task):
            near = ball[None] + _NEAR
            x, y = near[:, 0], near[:, 1]
            free = (cells[y, x] == EMPTY_CELL) & ~((x == state.x) & (y == state.y))
            found = choose(word, free)
            new = jnp.where(found < len(_NEAR), near[jnp.minimum(found, len(_NEAR) - 1)], ball)
            cells = jnp.where(self.at(*new), _BALL, jnp.where(self.at(*ball), EMPTY_CELL, cells))
            balls.append(new)
        return state._replace(cells=cells, task=jnp.stack(balls))

    def outcome(self, state: MiniGridState, action: jax.Array, front: jax.Array) -> tuple[jax.Array, jax.Array]:
        goes, goal = action == FORWARD, front == GOAL_CELL
        return goes & goal, goes & ~goal & (front != EMPTY_CELL)
