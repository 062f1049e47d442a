"""MiniGrid's FourRooms: a goal somewhere in four rooms with gaps between them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from envs_jax.chance import below
from envs_jax.minigrid.grid import EMPTY_CELL, GOAL_CELL, WALL_CELL, MiniGrid, MiniGridOptions, MiniGridState

__all__ = ["FourRooms", "FourRoomsOptions"]

_SIZE, _WALL, _ROOM = 19, 9, 8  # cells: of the grid, of the walls between rooms, and of a room without its walls


@dataclasses.dataclass(frozen=True)
class FourRoomsOptions(MiniGridOptions):
    """Options of `FourRooms`: those of every task of MiniGrid."""


class FourRooms(MiniGrid):
    """FourRooms: go to the goal. T is 100.

    Start: a gap in each wall between two rooms; the agent and the goal in any two free cells.
    """

    start_words = 7

    def __init__(self, options: FourRoomsOptions = FourRoomsOptions()):
        super().__init__("minigrid_four_rooms", _SIZE, _SIZE, options.max_steps or 100)
        self._cells = self.walls()
        self._cells[_WALL] = self._cells[:, _WALL] = WALL_CELL

    def start(self, words: jax.Array) -> MiniGridState:
        gaps, wall = 1 + below(words[:4], _ROOM), jnp.int32(_WALL)
        columns = jnp.stack([wall, gaps[1], gaps[2] + _WALL, wall])
        rows = jnp.stack([gaps[0], wall, wall, gaps[3] + _WALL])
        inside = 4 * _ROOM**2
        agent, goal = below(words[4], inside + 4), below(words[5], inside + 3)
        goal = goal + (goal >= agent).astype(jnp.int32)

        def cell(place: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Column and row of one of the free cells: those of the rooms, and then the gaps."""
            x, y, gap = place % (2 * _ROOM), place // (2 * _ROOM), jnp.clip(place - inside, 0, 3)
            in_gap = place >= inside
            x, y = (1 + i + (i >= _ROOM).astype(jnp.int32) for i in (x, y))
            return jnp.where(in_gap, columns[gap], x), jnp.where(in_gap, rows[gap], y)

        free = jnp.zeros((_SIZE, _SIZE), bool)
        for i in range(4):
            free = free | self.at(columns[i], rows[i])
        cells = jnp.where(self.at(*cell(goal)), GOAL_CELL, jnp.where(free, EMPTY_CELL, self._cells))
        return self.begin(cells, *cell(agent), below(words[6], 4))
