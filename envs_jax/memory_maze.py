"""Memory Maze: a colour is shown once, and the object of that colour is to be found in a maze seen from within.

A small grid version of the random mazes with an indicator of Oh et al., "Control of Memory, Active Perception, and
Action in Minecraft" (2016). Every episode has a new maze: a random spanning tree, grown with Prim's algorithm
("Shortest Connection Networks and Some Generalizations", 1957) over random weights.

The first action has no effect, so that no agent can keep the colour as its position instead of remembering it: all that
follows the first observation, up to the first object entered, is independent of the colour.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

_MOVES = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)], np.int32)  # (rows, columns): north, east, south, west
_NEVER = np.uint32(2**32 - 1)

_WALL, _FLOOR = np.array([24, 26, 36], np.uint8), np.array([52, 56, 72], np.uint8)
_AGENT = np.array([96, 165, 250], np.uint8)
_COLOURS = np.array([[255, 215, 64], [190, 140, 255], [96, 211, 148], [239, 108, 96]], np.uint8)


@dataclasses.dataclass(frozen=True)
class MemoryMazeOptions:
    """Options of `MemoryMaze`.

    Attributes:
      size: cells on each side of the grid, walls included: (size - 1) / 2 rooms on each side, one cell each, with one
        cell of wall or passage between neighbours.
      num_goals: number of objects, each with a colour of its own.
      view: distance that the agent sees, in cells: a square, through walls.
      max_steps: the time limit, a truncation; None means 8 times the number of rooms.
    """

    size: int = 7
    num_goals: int = 2
    view: int = 1
    max_steps: int | None = None

    def __post_init__(self):
        def check(name: str, valid: bool, remedy: str):
            if not valid:
                raise ValueError(f"MemoryMazeOptions({name}={getattr(self, name)!r}): use {remedy}.")

        # A set of rooms is one 32-bit word, which holds the 25 of size 11.
        check("size", type(self.size) is int and self.size in (5, 7, 9, 11), "5, 7, 9 or 11")
        most, least = 2 if self.size == 5 else 4, 4 * (self.num_rooms - 1) + 1
        remedy = f"an integer in [2, {most}], as the start of a maze of size {self.size} has {most} ways out"
        check("num_goals", type(self.num_goals) is int and 2 <= self.num_goals <= most, remedy)
        check("view", type(self.view) is int and self.view >= 1, "an integer of at least 1")
        remedy = f"None or an integer of at least {least}, as searching {self.num_rooms} rooms can take that long"
        limit = self.max_steps
        check("max_steps", limit is None or (type(limit) is int and limit >= least), remedy)

    @property
    def num_rooms(self) -> int:
        """Rooms of the maze."""
        return (self.size // 2) ** 2


class MemoryMazeState(NamedTuple):
    """The maze of this episode, and the agent's position in it.

    Attributes:
      num_steps: int32 []; steps taken so far.
      walls: bool [size, size].
      goals: int32 [num_goals, 2]; row and column of the object of each colour.
      cue: int32 []; the colour to fetch, in [0, num_goals).
      agent: int32 [2]; row and column.
    """

    num_steps: jax.Array
    walls: jax.Array
    goals: jax.Array
    cue: jax.Array
    agent: jax.Array


class MemoryMaze:
    """Memory Maze.

    Start: a random perfect maze, in which any two cells are joined by exactly one way, with at least `num_goals`
      passages from the middle room, where the agent starts; the objects in dead ends of their own, uniformly random; a
      uniformly random cue. So every object can be reached, and none stands in the way of another.
    Observation: float32 [(2 * view + 1)^2 * (1 + num_goals) + num_goals] of zeros and ones: for each cell of the square
      around the agent, row by row from the north-west, whether it is wall (as is all beyond the grid) and whether the
      object of each colour is there; then the one-hot cue, in the first observation, and zeros ever after.
    Action: `Discrete(4)`: a step north, east, south, west; walls stop it. The first action has no effect: the agent
      reads the cue.
    Reward: +1 for entering the cell of the object that the cue names, -1 for that of another, else 0.
    End: terminates at an object; truncated after `max_steps` steps.
    Optimum: 1, for depth-first search sees an object before it enters its cell, and needs at most 4 * (rooms - 1) + 1
      steps. A policy without memory earns at most 0 in expectation, for the first object it enters is the right one
      with probability 1 / num_goals, whatever the policy.
    """

    def __init__(self, options: MemoryMazeOptions = MemoryMazeOptions()):
        self._options = options
        self._max_steps = options.max_steps or 8 * options.num_rooms
        side, num_rooms = options.size // 2, options.num_rooms
        room = np.arange(num_rooms, dtype=np.int32).reshape(side, side)
        eastward, southward = (room[:, :-1], room[:, 1:]), (room[:-1], room[1:])
        self._ends = np.concatenate([np.stack(pair, -1).reshape(-1, 2) for pair in (eastward, southward)])  # [E, 2]
        self._joins = np.any(self._ends[..., None] == np.arange(num_rooms), axis=1)  # [E, num_rooms]
        self._cells = 2 * np.stack(np.divmod(room.reshape(-1), side), -1).astype(np.int32) + 1  # [num_rooms, 2]
        self._start_room = room[side // 2, side // 2]
        # Which cell is which passage; the others are the two after the last, which are shut (walls) and open (rooms).
        num_passages = len(self._ends)
        self._passage = np.full((options.size, options.size), num_passages, np.int32)
        self._passage[tuple(self._cells.T)] = num_passages + 1
        self._passage[tuple(self._cells[self._ends].sum(1).T // 2)] = np.arange(num_passages)
        window = (2 * options.view + 1) ** 2
        self.spec = EnvSpec(
            name="memory_maze",
            observation_space=spaces.Box(0.0, 1.0, (window * (1 + options.num_goals) + options.num_goals,)),
            action_space=spaces.Discrete(4),
            max_episode_steps=self._max_steps,
        )

    def reset(self, key: jax.Array) -> MemoryMazeState:
        """A fresh maze, fresh places and a fresh cue."""
        num_passages, num_rooms, num_goals = len(self._ends), self._options.num_rooms, self._options.num_goals
        bits = jax.random.bits(key, (num_passages + num_rooms + 1,), jnp.uint32)
        opened = self._grow(_distinct(bits[:num_passages]))  # [E]
        num_ways = jnp.sum(self._joins & opened[:, None], axis=0, dtype=jnp.int32)  # [num_rooms]
        # The start, with two ways or more, is no dead end; each of its ways leads to one, so that there are enough.
        order = jnp.where(num_ways == 1, _distinct(bits[num_passages:-1]), _NEVER)
        goals = []
        for _ in range(num_goals):
            first = order == jnp.min(order)
            goals.append(jnp.sum(jnp.where(first[:, None], self._cells, 0), axis=0, dtype=jnp.int32))
            order = jnp.where(first, _NEVER, order)
        return MemoryMazeState(
            num_steps=jnp.int32(0),
            walls=~jnp.concatenate([opened, np.array([False, True])])[self._passage],
            goals=jnp.stack(goals),
            cue=(bits[-1] % np.uint32(num_goals)).astype(jnp.int32),
            agent=jnp.asarray(self._cells[self._start_room]),
        )

    def step(self, state: MemoryMazeState, action: jax.Array, key: jax.Array) -> tuple[MemoryMazeState, Transition]:
        """One move, `action` int32 []. Nothing is drawn from `key`."""
        moves = (np.arange(len(_MOVES)) == action) & (state.num_steps > 0)
        agent = state.agent + jnp.sum(jnp.where(moves[:, None], _MOVES, 0), axis=0, dtype=jnp.int32)
        agent = jnp.where(state.walls[agent[0], agent[1]], state.agent, agent)
        entered = jnp.all(state.goals == agent[None], axis=-1)  # [num_goals], at most one
        right = jnp.any(entered & (np.arange(self._options.num_goals) == state.cue))
        terminated = jnp.any(entered)
        state = state._replace(num_steps=state.num_steps + 1, agent=agent)
        return state, Transition(
            reward=jnp.where(right, jnp.float32(1), jnp.where(terminated, jnp.float32(-1), jnp.float32(0))),
            discount=1.0 - terminated.astype(jnp.float32),
            last=terminated | (state.num_steps >= self._max_steps),
        )

    def observe(self, state: MemoryMazeState) -> jax.Array:
        """float32, of the shape that the class describes."""
        offsets = np.arange(-self._options.view, self._options.view + 1, dtype=np.int32)
        rows, columns = state.agent[0] + offsets, state.agent[1] + offsets
        # Clipping makes all beyond the grid wall, for so is its border.
        last = self._options.size - 1
        walls = state.walls[jnp.clip(rows, 0, last)[:, None], jnp.clip(columns, 0, last)[None, :]]
        goal_rows, goal_columns = state.goals[:, 0][None, None], state.goals[:, 1][None, None]
        goals = (rows[:, None, None] == goal_rows) & (columns[None, :, None] == goal_columns)
        cue = (np.arange(self._options.num_goals) == state.cue) & (state.num_steps == 0)
        seen = jnp.concatenate([walls[..., None], goals], axis=-1)
        return jnp.concatenate([seen.reshape(-1), cue]).astype(jnp.float32)

    def render(self, state: MemoryMazeState) -> jax.Array:
        """The maze from above, uint8 [H, W, 3]; the border has the colour to fetch, dimmed when it shows no more."""
        size, scale = self._options.size, max(8, -(-160 // self._options.size))
        colours = _COLOURS[: self._options.num_goals]
        wanted = jnp.asarray(colours)[state.cue]
        wanted = jnp.where(state.num_steps == 0, wanted, wanted // 3)
        inside = np.pad(np.ones((size - 2, size - 2, 1), bool), ((1, 1), (1, 1), (0, 0)))
        maze = jnp.where(state.walls[..., None], _WALL[None, None], _FLOOR[None, None])
        maze = things = jnp.where(inside, maze, wanted[None, None])
        for place, colour in [*zip(state.goals, colours), (state.agent, _AGENT)]:
            here = (np.arange(size)[:, None] == place[0]) & (np.arange(size)[None, :] == place[1])
            things = jnp.where(here[..., None], colour[None, None], things)
        disc = np.hypot(*np.ogrid[-1 : 1 : scale * 1j, -1 : 1 : scale * 1j]) < 0.75
        maze, things = (jnp.repeat(jnp.repeat(x, scale, axis=0), scale, axis=1) for x in (maze, things))
        return jnp.where(np.tile(disc, (size, size))[..., None], things, maze)

    def _grow(self, weights: jax.Array) -> jax.Array:
        """The passages bool [E] of a tree; `weights` uint32 [E] are distinct, and the least that fits is next."""
        ends = (np.uint32(1) << self._ends).astype(np.uint32)  # [E, 2]: sets of one room, as words
        at_start = self._joins[:, self._start_room]

        def join(i: jax.Array, tree: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            rooms, opened = tree
            inside = (rooms & ends) != 0  # [E, 2]
            fits = (inside[:, 0] != inside[:, 1]) & (at_start | (i >= self._options.num_goals))
            choices = jnp.where(fits, weights, _NEVER)
            chosen = choices == jnp.min(choices)
            added = jnp.sum(jnp.where(chosen, ends[:, 0] | ends[:, 1], np.uint32(0)), dtype=jnp.uint32)
            return rooms | added, opened | chosen

        tree = jnp.uint32(1 << int(self._start_room)), jnp.zeros(len(ends), bool)
        return jax.lax.fori_loop(0, self._options.num_rooms - 1, join, tree)[1]


def _distinct(bits: jax.Array) -> jax.Array:
    """The words [N] with their index as lowest bits, so that no two are equal; none is `_NEVER`."""
    mask = np.uint32(2 ** len(bits).bit_length() - 1)
    return (bits & ~mask) | np.arange(len(bits), dtype=np.uint32)
