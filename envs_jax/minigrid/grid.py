"""The common part of the tasks of MiniGrid: cells, actions, what the agent sees, rewards and pictures.

MiniGrid is "Minigrid & Miniworld: Modular & Customizable Reinforcement Learning Environments for Goal-Oriented Tasks"
(Chevalier-Boisvert et al., 2023). The tasks here are written from a description of their rules, and are equal to the
package `minigrid` (3.2.0) transition by transition. Their starts are drawn from the same distributions, in a bounded
number of draws. They differ in one point: the mission, a sentence that is nearly always the same, is not observed.

A task defines its starts, and what ends it beside a goal or lava; `MiniGrid` makes an environment of that.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE, DONE = range(7)
EAST, SOUTH, WEST, NORTH = range(4)
MOVES = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)], np.int32)
"""Change of column and row of a step forward in each direction."""

# A cell is one code: a kind in the lower four bits, a colour in those above. Kinds up to lava have MiniGrid's numbers,
# and a door is one of three kinds, where MiniGrid has a door with a state.
UNSEEN, EMPTY, WALL, FLOOR, OPEN, KEY, BALL, BOX, GOAL, LAVA, CLOSED, LOCKED = range(12)
RED, GREEN, BLUE, PURPLE, YELLOW, GREY = range(6)
_COLOUR_SHIFT = 4

VIEW = 7
"""Cells on each side of what the agent sees."""

_COLOURS = np.array(
    [(239, 108, 96), (96, 211, 148), (96, 165, 250), (190, 140, 255), (255, 215, 64), (110, 114, 130)], np.uint8
)
_DARK, _LAVA, _AGENT = np.array([(36, 40, 54), (255, 140, 40), (245, 245, 245)], np.uint8)
_PIXELS = 16  # on each side of a cell in a picture


def code(kind: int, colour: int | jax.Array) -> Any:
    """The code of a cell, uint8; `colour` is a number or int32 []."""
    if isinstance(colour, int):
        return np.uint8(kind | colour << _COLOUR_SHIFT)
    return (colour.astype(jnp.uint8) << np.uint8(_COLOUR_SHIFT)) | np.uint8(kind)


EMPTY_CELL, WALL_CELL = code(EMPTY, 0), code(WALL, GREY)
GOAL_CELL = code(GOAL, GREEN)
OBSTACLES = {"lava": code(LAVA, RED), "wall": WALL_CELL}


def kind_of(cell: jax.Array) -> jax.Array:
    """The kind of a code, uint8."""
    return cell & np.uint8(15)


def among(kind: jax.Array, *kinds: int) -> jax.Array:
    """Marks cells by True whose kind is one of `kinds`."""
    return (np.int32(sum(1 << k for k in kinds)) >> kind.astype(jnp.int32)) & 1 == 1


@dataclasses.dataclass(frozen=True)
class MiniGridOptions:
    """Options of every task of MiniGrid.

    Attributes:
      max_steps: the time limit T of an episode, a truncation, and the measure of rewards; None means the task's own.
    """

    max_steps: int | None = None

    def __post_init__(self):
        limit = self.max_steps
        self.check("max_steps", limit is None or (type(limit) is int and limit >= 1), "None or an integer >= 1")

    def check(self, name: str, valid: bool, remedy: str) -> None:
        """Raises ValueError for a field that is not valid."""
        if not valid:
            raise ValueError(f"{type(self).__name__}({name}={getattr(self, name)!r}): use {remedy}.")

    def check_integer(self, name: str, least: int, most: int | None = None, odd: bool = False) -> None:
        """Raises ValueError for a field that is no integer of [least, most], or an even one where it must be odd."""
        value = getattr(self, name)
        valid = type(value) is int and value >= least and (most is None or value <= most)
        valid = valid and not (odd and value % 2 == 0)
        limits = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        self.check(name, valid, f"an {'odd ' if odd else ''}integer {limits}")

    def check_flag(self, name: str) -> None:
        """Raises ValueError for a field that is neither True nor False."""
        self.check(name, type(getattr(self, name)) is bool, "True or False")


class MiniGridState(NamedTuple):
    """A task within an episode.

    Attributes:
      cells: uint8 [H, W]; the code of every cell, rows from the top.
      x: int32 []; the agent's column.
      y: int32 []; its row.
      direction: int32 []; it looks east, south, west or north: 0, 1, 2 or 3.
      carried: uint8 []; the code of what it carries, else that of an empty cell.
      num_steps: int32 []; steps taken so far.
      task: what the task keeps beside this; () for most.
    """

    cells: jax.Array
    x: jax.Array
    y: jax.Array
    direction: jax.Array
    carried: jax.Array
    num_steps: jax.Array
    task: Any


class MiniGrid:
    """A task of MiniGrid.

    Observation: `direction`, `Discrete(4)`, and `image`, uint8 [7, 7, 3]: the square ahead of the agent, turned so that
      the agent is at [3, 6] and looks towards [3, 0]. The first axis is the column and the second one the row. The last
      one has the kind (unseen 0, empty 1, wall 2, floor 3, door 4, key 5, ball 6, box 7, goal 8, lava 9), the colour
      (red 0, green 1, blue 2, purple 3, yellow 4, grey 5) and the state (of a door: open 0, closed 1, locked 2). The
      agent's own cell shows what it carries. Cells that it cannot see are 0 in all three.
    Action: `Discrete(7)`: turn left, turn right, go forward, pick up, drop, toggle, and one without effect.
    Reward: 1 - 0.9 t / T at the t-th step, if that reaches what the task asks for, else 0. T is `max_steps`.
    End: terminates there and in lava; truncated after `max_steps` steps.
    """

    start_words, step_words = 0, 0
    """Random words that a start and a step of the task take."""

    see_through_walls = False
    num_actions = 7
    failure_reward = 0.0

    def __init__(self, name: str, height: int, width: int, max_steps: int):
        """Makes the environment of a task.

        Args:
          name: the name of the environment.
          height: rows of the grid.
          width: its columns.
          max_steps: the time limit.
        """
        self.height, self.width, self._max_steps = height, width, max_steps
        self.rows = np.arange(height, dtype=np.int32)[:, None]
        self.columns = np.arange(width, dtype=np.int32)[None, :]
        # In double precision, as the package computes them.
        self._rewards = (1 - 0.9 * (np.arange(max_steps + 1) / max_steps)).astype(np.float32)
        image = spaces.Box(0, 10, (VIEW, VIEW, 3), np.uint8)
        self.spec = EnvSpec(
            name=name,
            observation_space=spaces.Dict({"direction": spaces.Discrete(4), "image": image}),
            action_space=spaces.Discrete(self.num_actions),
            max_episode_steps=max_steps,
        )

    def start(self, words: jax.Array) -> MiniGridState:
        """Returns the first state of an episode, `words` uint32 [start_words]."""
        raise NotImplementedError

    def outcome(self, state: MiniGridState, action: jax.Array, front: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Says whether a step has done what the task asks for, and whether it has failed: bool [], bool [].

        Args:
          state: after the action.
          action: int32 [].
          front: uint8 []; the code of the cell ahead of the agent before the action.
        """
        goes, kind = action == FORWARD, kind_of(front)
        return goes & (kind == GOAL), goes & (kind == LAVA)

    def move(self, state: MiniGridState, words: jax.Array) -> MiniGridState:
        """Returns the state after what moves by itself, before the agent acts; `words` uint32 [step_words]."""
        return state

    def reset(self, key: jax.Array) -> MiniGridState:
        """The start of an episode."""
        return self.start(jax.random.bits(key, (self.start_words,), jnp.uint32))

    def step(self, state: MiniGridState, action: jax.Array, key: jax.Array) -> tuple[MiniGridState, Transition]:
        """One step, `action` int32 []."""
        return self.advance(state, action, jax.random.bits(key, (self.step_words,), jnp.uint32))

    def advance(self, state: MiniGridState, action: jax.Array, words: jax.Array) -> tuple[MiniGridState, Transition]:
        """One step whose chance is `words`, uint32 [step_words]."""
        front = self.front(state)
        state = self.act(self.move(state, words), action)
        done, failed = self.outcome(state, action, front)
        over, num_steps = done | failed, state.num_steps + 1
        success = jnp.asarray(self._rewards)[num_steps]
        transition = Transition(
            reward=jnp.where(done, success, jnp.where(failed, jnp.float32(self.failure_reward), 0.0)),
            discount=1.0 - over.astype(jnp.float32),
            last=over | (num_steps >= self._max_steps),
        )
        return state._replace(num_steps=num_steps), transition

    def begin(self, cells: Any, x: Any, y: Any, direction: Any, task: Any = ()) -> MiniGridState:
        """A first state, in which the agent carries nothing."""
        x, y, direction = (jnp.asarray(value, jnp.int32) for value in (x, y, direction))
        return MiniGridState(jnp.asarray(cells), x, y, direction, jnp.uint8(EMPTY_CELL), jnp.int32(0), task)

    def walls(self) -> np.ndarray:
        """uint8 [H, W]: walls at the border, and all else empty."""
        inside = np.full((self.height - 2, self.width - 2), EMPTY_CELL)
        return np.pad(inside, 1, constant_values=WALL_CELL)

    def at(self, x: Any, y: Any) -> Any:
        """bool [H, W]: True in one cell."""
        return (self.rows == y) & (self.columns == x)

    def front(self, state: MiniGridState) -> jax.Array:
        """The code of the cell ahead of the agent, uint8 []."""
        dx, dy = _ahead(state.direction)
        return state.cells[state.y + dy, state.x + dx]

    def act(self, state: MiniGridState, action: jax.Array) -> MiniGridState:
        """The state after an action, without its time."""
        dx, dy = _ahead(state.direction)
        x, y = state.x + dx, state.y + dy
        front, carried = self.front(state), state.carried
        kind, nothing = kind_of(front), carried == EMPTY_CELL
        turn = (action == RIGHT).astype(jnp.int32) - (action == LEFT).astype(jnp.int32)
        goes = (action == FORWARD) & among(kind, EMPTY, FLOOR, OPEN, GOAL, LAVA)
        takes = (action == PICKUP) & among(kind, KEY, BALL, BOX) & nothing
        drops = (action == DROP) & (front == EMPTY_CELL) & ~nothing
        colour = front & np.uint8(0xF0)
        fits = (kind == LOCKED) & (carried == colour | np.uint8(KEY))
        opens = (kind == CLOSED) | fits
        new = jnp.where(opens, colour | np.uint8(OPEN), front)
        new = jnp.where(kind == OPEN, colour | np.uint8(CLOSED), new)
        new = jnp.where(kind == BOX, EMPTY_CELL, new)  # boxes hold nothing
        new = jnp.where(action == TOGGLE, new, jnp.where(takes, EMPTY_CELL, jnp.where(drops, carried, front)))
        return state._replace(
            cells=jnp.where(self.at(x, y), new, state.cells),
            x=jnp.where(goes, x, state.x),
            y=jnp.where(goes, y, state.y),
            direction=(state.direction + turn) & 3,
            carried=jnp.where(takes, front, jnp.where(drops, EMPTY_CELL, carried)),
        )

    def observe(self, state: MiniGridState) -> dict[str, jax.Array]:
        """The direction int32 [], and the image uint8 [7, 7, 3]."""
        dx, dy = _ahead(state.direction)
        side = np.arange(VIEW, dtype=np.int32)[:, None] - VIEW // 2
        ahead = VIEW - 1 - np.arange(VIEW, dtype=np.int32)[None, :]
        # All beyond the grid is wall, as is the part of its border that can be seen.
        x = jnp.clip(state.x + dx * ahead - dy * side, 0, self.width - 1)
        y = jnp.clip(state.y + dy * ahead + dx * side, 0, self.height - 1)
        codes = state.cells[y, x]
        if not self.see_through_walls:
            codes = jnp.where(visible(~among(kind_of(codes), WALL, CLOSED, LOCKED)), codes, np.uint8(0))
        codes = jnp.where((side == 0) & (ahead == 0), state.carried, codes)
        kind, colour = kind_of(codes), codes >> np.uint8(_COLOUR_SHIFT)
        door = kind > LAVA
        state_of_door = jnp.where(door, kind - np.uint8(LAVA), np.uint8(0))
        image = jnp.stack([jnp.where(door, np.uint8(OPEN), kind), colour, state_of_door], axis=-1)
        return {"direction": state.direction, "image": image}

    def render(self, state: MiniGridState) -> jax.Array:
        """The whole grid from above, uint8 [16 H, 16 W, 3]."""
        kind, colour = kind_of(state.cells), (state.cells >> np.uint8(_COLOUR_SHIFT)).astype(jnp.int32)
        paint = jnp.where((kind == LAVA)[..., None], _LAVA[None, None], jnp.asarray(_COLOURS)[colour])
        shapes = jnp.asarray(_SHAPES)[kind.astype(jnp.int32)]  # [H, W, P, P]; an empty cell has no pixel of its colour
        image = jnp.where(shapes[..., None], paint[:, :, None, None], _DARK[None, None, None, None])
        agent = jnp.asarray(_ARROWS)[state.direction][None, None] & self.at(state.x, state.y)[:, :, None, None]
        image = jnp.where(agent[..., None], _AGENT[None, None, None, None], image)
        return image.transpose(0, 2, 1, 3, 4).reshape(self.height * _PIXELS, self.width * _PIXELS, 3)


def visible(clear: jax.Array) -> jax.Array:
    """The cells that the agent sees, bool [7, 7] as `clear`, those that it can see through; it is at [3, 6].

    Row by row from the agent's: a visible clear cell shows its neighbour on the right, and the two cells above both;
    then the same to the left. A row is a word of seven bits. Light goes to the right as the carry of an addition does,
    through ones up to and with the first zero, and to the left in steps of 1, 2 and 4 cells.
    """
    bits = np.left_shift(np.int32(1), np.arange(VIEW, dtype=np.int32))
    words = jnp.sum(jnp.where(clear, bits[:, None], 0), axis=0, dtype=jnp.int32)
    lit, rows = jnp.int32(1 << VIEW // 2), []
    for y in reversed(range(VIEW)):
        clear_row = words[y]
        lit = lit | (clear_row ^ (clear_row + (lit & clear_row)))
        right = lit & clear_row
        left, through = right, clear_row
        for distance in (1, 2, 4):
            left, through = left | (through & (left >> distance)), through & (through >> distance)
        lit = (lit | left >> 1) & (2**VIEW - 1)
        rows.append(lit)
        lit = right | right << 1 | left | left >> 1
    seen = jnp.stack(rows[::-1])
    return (seen[None, :] >> np.arange(VIEW, dtype=np.int32)[:, None]) & 1 == 1


def _ahead(direction: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The change of column and row of a step forward, int32 []."""
    dx = (direction == EAST).astype(jnp.int32) - (direction == WEST).astype(jnp.int32)
    return dx, (direction == SOUTH).astype(jnp.int32) - (direction == NORTH).astype(jnp.int32)


def _shapes() -> np.ndarray:
    """bool [12, P, P]: the pixels of each kind that have its colour."""
    y, x = np.mgrid[0 : 1 : _PIXELS * 1j, 0 : 1 : _PIXELS * 1j]
    shapes = np.zeros((12, _PIXELS, _PIXELS), bool)
    edge = np.maximum(abs(x - 0.5), abs(y - 0.5))
    shapes[[WALL, GOAL, LAVA]] = True
    shapes[FLOOR] = (x + y) * _PIXELS % 4 < 1
    shapes[OPEN] = x > 0.85
    shapes[CLOSED] = (edge > 0.4) | (np.hypot(x - 0.75, y - 0.5) < 0.1)
    shapes[LOCKED] = ~((edge > 0.3) & (edge < 0.4))
    ring, shaft = abs(np.hypot(x - 0.5, y - 0.3) - 0.17) < 0.08, (abs(x - 0.5) < 0.08) & (y > 0.45) & (y < 0.9)
    shapes[KEY] = ring | shaft | ((x > 0.25) & (x < 0.5) & (abs(y - 0.8) < 0.08))
    shapes[BALL] = np.hypot(x - 0.5, y - 0.5) < 0.35
    shapes[BOX] = (abs(edge - 0.35) < 0.08) | ((abs(y - 0.5) < 0.05) & (edge < 0.35))
    return shapes


def _arrows() -> np.ndarray:
    """bool [4, P, P]: the agent in each direction."""
    y, x = np.mgrid[0 : 1 : _PIXELS * 1j, 0 : 1 : _PIXELS * 1j]
    east = (x > 0.15) & (x < 0.85) & (abs(y - 0.5) < (0.85 - x) / 2)
    return np.stack([np.rot90(east, -i) for i in range(4)])


_SHAPES, _ARROWS = _shapes(), _arrows()
