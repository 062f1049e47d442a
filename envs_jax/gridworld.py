"""Gridworld: three small decision processes whose optimum can be computed exactly.

A reduced version of the toy family of Oh et al., "Discovering Reinforcement Learning Algorithms" (2020), appendix A:
a grid with objects in fixed places seen as a state index ("tabular"), the same grid with objects in random places seen
as a picture ("random_goals"), and a chain whose first action decides a reward that arrives at its end
("delayed_chain"). Differences from the paper: no walls, a collected object comes back where it was, and the chain
has one fixed length.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.gridworld_chain import AGENT, BAD, FLOOR, FLOOR_2, GOOD, Chain
from podracer import spaces
from podracer.types import EnvSpec, Transition

# (rows, columns) of each action: stay, then clockwise from north.
_MOVES = np.array([(0, 0), (-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1)], np.int32)


@dataclasses.dataclass(frozen=True)
class GridObject:
    """One object of a grid.

    Attributes:
      reward: paid when the agent collects the object, by entering or staying in its cell.
      termination_probability: probability that collecting it ends the episode.
      respawn_probability: probability that a collected object comes back to its cell, at the end of each step, that of
        the collection included.
    """

    reward: float
    termination_probability: float = 0.0
    respawn_probability: float = 0.0

    def __post_init__(self):
        if type(self.reward) not in (int, float) or not math.isfinite(self.reward):
            raise ValueError(f"GridObject(reward={self.reward!r}): use a finite number.")
        for name in ("termination_probability", "respawn_probability"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise ValueError(f"GridObject({name}={value!r}): use a number in [0, 1].")


@dataclasses.dataclass(frozen=True)
class GridworldOptions:
    """Options of `Gridworld`.

    Attributes:
      task: "tabular" or "random_goals" (the grids), or "delayed_chain".
      height: rows of the grid.
      width: columns of the grid.
      objects: the objects of the grid.
      object_cells: (row, column) of every object; "tabular" only.
      max_steps: the time limit of a grid episode, a truncation.
      flatten: True observes "random_goals" as a vector, False as an image.
      chain_length: steps of a chain episode.
      noisy_rewards: True pays +1 or -1 at random for every step of the chain before the last.
      distractor_bits: number of random bits at the end of the chain's observation.
    """

    task: Literal["tabular", "random_goals", "delayed_chain"] = "tabular"
    height: int = 4
    width: int = 4
    objects: tuple[GridObject, ...] = (GridObject(1.0, 1.0), GridObject(-1.0, 1.0))
    object_cells: tuple[tuple[int, int], ...] = ((0, 3), (1, 1))
    max_steps: int = 20
    flatten: bool = True
    chain_length: int = 10
    noisy_rewards: bool = False
    distractor_bits: int = 0

    def __post_init__(self):
        if self.task not in ("tabular", "random_goals", "delayed_chain"):
            raise ValueError(f"GridworldOptions(task={self.task!r}): use 'tabular', 'random_goals' or 'delayed_chain'.")
        for name, least in (("height", 1), ("width", 1), ("max_steps", 1), ("chain_length", 1), ("distractor_bits", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"GridworldOptions({name}={value!r}): use an integer of at least {least}.")
        for name in ("flatten", "noisy_rewards"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"GridworldOptions({name}={getattr(self, name)!r}): use True or False.")
        if type(self.objects) is not tuple or not all(isinstance(thing, GridObject) for thing in self.objects):
            raise ValueError(f"GridworldOptions(objects={self.objects!r}): use a tuple of GridObject.")
        if len(self.objects) >= self.height * self.width:
            raise ValueError(
                f"GridworldOptions(objects={self.objects!r}): {self.height} x {self.width} cells hold at most "
                f"{self.height * self.width - 1} objects beside the agent; use fewer objects or a larger grid."
            )
        if self.task == "tabular":
            self._check_cells()

    def _check_cells(self):
        def error(remedy: str) -> ValueError:
            return ValueError(f"GridworldOptions(object_cells={self.object_cells!r}): {remedy}")

        cells = self.object_cells
        if type(cells) is not tuple or not all(_is_pair(cell) for cell in cells):
            raise error("use a tuple of (row, column) pairs of integers.")
        if len(cells) != len(self.objects) or len(set(cells)) != len(cells):
            raise error(f"give each of the {len(self.objects)} objects a cell of its own.")
        if not all(0 <= row < self.height and 0 <= column < self.width for row, column in cells):
            raise error(f"use cells inside the {self.height} x {self.width} grid.")
        if len(cells) > 10:
            raise error("use at most 10, as the observation has height * width * 2^objects elements.")


def _is_pair(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and all(type(index) is int for index in value)


class GridState(NamedTuple):
    """A grid.

    Attributes:
      agent: int32 [2]; row and column.
      objects: int32 [N, 2]; row and column of every object, present or not.
      present: bool [N]; not collected, or back again.
      num_steps: int32 []; steps taken so far.
    """

    agent: jax.Array
    objects: jax.Array
    present: jax.Array
    num_steps: jax.Array


class GridParameters(NamedTuple):
    """The numbers in which the grids of a family differ; shapes are the same in all of them.

    Attributes:
      reward: float32 [N]; of every object.
      termination_probability: float32 [N]; as in `GridObject`.
      respawn_probability: float32 [N]; as in `GridObject`.
      size: int32 [2]; rows and columns, at most the height and width of the options. Cells beyond are never entered.
      cells: int32 [N, 2]; distinct (row, column) of every object within the size; "tabular" only, else ignored.
    """

    reward: jax.Array
    termination_probability: jax.Array
    respawn_probability: jax.Array
    size: jax.Array
    cells: jax.Array


class Gridworld:
    """The grids and the chain.

    "tabular" and "random_goals", a grid of height x width cells with N objects:
      Start: every object present, in a cell of its own (`object_cells`, or uniformly random ones); the agent in a
        uniformly random free cell.
      Observation: "tabular": float32 [height * width * 2^N], one-hot of (row * width + column) * 2^N + present, where
        bit i of `present` is object i. "random_goals": float32 [height, width, 1 + N] of zeros and ones, the agent in
        channel 0 and object i, while present, in channel 1 + i; `flatten` makes it a vector in the same order.
      Action: `Discrete(9)`: stay, or a step N, NE, E, SE, S, SW, W, NW; each coordinate stops at the border.
      Step: the agent moves; an object present in its new cell is collected: it pays its reward, disappears, and ends
        the episode with its probability; then every absent object comes back with its probability.
      Reward: of the object collected, else 0.
      End: terminates by collecting; truncated after `max_steps` steps.

    "delayed_chain":
      Start: a cue, 0 or 1 uniformly.
      Observation: float32 [2 + 2 * chain_length + distractor_bits]: one-hot of the state index, which is the cue before
        the first step and 2 * steps taken + right after it, followed by the distractors, each 0 or 1, drawn anew
        every step.
      Action: `Discrete(2)`; only the first one matters: it is right if it equals the cue.
      Reward: +1 at the last step if the first action was right, else -1; before it 0, or +-1 with `noisy_rewards`.
      End: terminates after exactly chain_length steps.
    """

    def __init__(self, options: GridworldOptions = GridworldOptions()):
        chain = (options.chain_length, options.noisy_rewards, options.distractor_bits)
        self._task = Chain(*chain) if options.task == "delayed_chain" else _Grid(options)
        self.spec: EnvSpec = self._task.spec

    def parameters(self, key: jax.Array) -> GridParameters:
        """Draws a grid of a family with as many objects, at most as large as this one.

        Rewards are uniform in [-1, 1], probabilities of termination in [0, 1] and of coming back in [0, 0.1]. Sizes
        begin at half the height and width, or where the objects have room.

        Raises:
          ValueError: for a chain.
        """
        return self._grid().parameters(key)

    def with_parameters(self, parameters: GridParameters) -> Gridworld:
        """The same grid with other numbers, which may be traced.

        Raises:
          ValueError: for a chain.
        """
        other = copy.copy(self)
        other._task = self._grid().with_parameters(parameters)
        return other

    def _grid(self) -> _Grid:
        if isinstance(self._task, Chain):
            raise ValueError(
                "GridworldOptions(task='delayed_chain') has no parameters; use 'tabular' or 'random_goals'."
            )
        return self._task

    def reset(self, key: jax.Array) -> Any:
        """The start of an episode: `GridState` or `gridworld_chain.ChainState`."""
        return self._task.reset(key)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Transition]:
        """One step, `action` int32 []."""
        return self._task.step(state, action, key)

    def observe(self, state: Any) -> jax.Array:
        """float32, of the shape that the class describes."""
        return self._task.observe(state)

    def render(self, state: Any) -> jax.Array:
        """uint8 [H, W, 3]: the agent is blue, what pays is green, what costs is red."""
        return self._task.render(state)


class _Grid:
    def __init__(self, options: GridworldOptions):
        self._options = options
        self._num_objects = len(options.objects)
        self._size: Any = (options.height, options.width)
        self._rewards: Any = np.array([thing.reward for thing in options.objects], np.float32)
        self._termination: Any = np.array([thing.termination_probability for thing in options.objects], np.float32)
        self._respawn: Any = np.array([thing.respawn_probability for thing in options.objects], np.float32)
        self._chance = not np.isin([self._termination, self._respawn], (0.0, 1.0)).all()
        cells = options.height * options.width
        if options.task == "tabular":
            observation_space = spaces.Box(0.0, 1.0, (cells * 2**self._num_objects,))
        elif options.flatten:
            observation_space = spaces.Box(0.0, 1.0, (cells * (1 + self._num_objects),))
        else:
            observation_space = spaces.Box(0.0, 1.0, (options.height, options.width, 1 + self._num_objects))
        self.spec = EnvSpec(
            name=f"gridworld_{options.task}",
            observation_space=observation_space,
            action_space=spaces.Discrete(len(_MOVES)),
            max_episode_steps=options.max_steps,
        )
        fixed = options.object_cells if options.task == "tabular" else ()
        self._fixed_cells: list[Any] = [np.int32(row * options.width + column) for row, column in fixed]

    def parameters(self, key: jax.Array) -> GridParameters:
        N, most = self._num_objects, np.array([self._options.height, self._options.width], np.int32)
        reward_key, termination_key, respawn_key, size_key, cell_key = jax.random.split(key, 5)
        # The smallest grid has a cell for each object and the agent.
        least = (most + 1) // 2
        while least.prod() <= N:
            least = np.minimum(least + 1, most)
        size = jax.random.randint(size_key, (2,), least, most + 1)
        # Distinct cells: the first of all cells of the size in a random order.
        rows, columns = np.divmod(np.arange(most.prod(), dtype=np.int32), most[1])
        inside = (rows < size[0]) & (columns < size[1])
        order = jnp.argsort(jnp.where(inside, jax.random.uniform(cell_key, rows.shape), 2.0))[:N]
        return GridParameters(
            reward=jax.random.uniform(reward_key, (N,), minval=-1.0),
            termination_probability=jax.random.uniform(termination_key, (N,)),
            respawn_probability=jax.random.uniform(respawn_key, (N,), maxval=0.1),
            size=size,
            cells=jnp.stack([jnp.asarray(rows)[order], jnp.asarray(columns)[order]], axis=-1),
        )

    def with_parameters(self, parameters: GridParameters) -> _Grid:
        other = copy.copy(self)
        other._rewards, other._termination, other._respawn = parameters[:3]
        other._chance, other._size = True, (parameters.size[0], parameters.size[1])
        if self._options.task == "tabular":
            cells = parameters.cells[:, 0] * parameters.size[1] + parameters.cells[:, 1]
            other._fixed_cells = list(cells)
        return other

    def reset(self, key: jax.Array) -> GridState:
        num_cells, width = self._size[0] * self._size[1], self._size[1]
        placed, taken = list(self._fixed_cells), _sorted(self._fixed_cells)
        num_free = num_cells - np.arange(len(placed), self._num_objects + 1, dtype=np.int32)
        # Not randint, which takes twice as long on CPU; the bias is below one in 2^23 / cells.
        draws = jnp.floor(jax.random.uniform(key, num_free.shape) * num_free.astype(np.float32)).astype(jnp.int32)
        for draw in draws:  # the i-th draw counts the free cells: step over the taken ones, in order
            cell = draw
            for other in taken:
                cell = cell + (cell >= other).astype(jnp.int32)
            placed.append(cell)
            taken = _insert(taken, cell)
        cells = jnp.stack(placed)
        places = jnp.stack([cells // width, cells % width], axis=-1)
        return GridState(
            agent=places[-1],
            objects=places[:-1],
            present=jnp.ones((self._num_objects,), bool),
            num_steps=jnp.int32(0),
        )

    def step(self, state: GridState, action: jax.Array, key: jax.Array) -> tuple[GridState, Transition]:
        move = jnp.sum(jnp.where((np.arange(len(_MOVES)) == action)[:, None], _MOVES, 0), axis=0, dtype=jnp.int32)
        border = self._border()
        agent = jnp.clip(state.agent + move, 0, border)
        collected = state.present & jnp.all(state.objects == agent[None], axis=-1)  # [N], at most one
        if self._chance:
            draws = jax.random.uniform(key, (2, self._num_objects))
        else:  # any number decides a probability of 0 or 1
            draws = jnp.full((2, self._num_objects), 0.5)
        terminated = jnp.any(collected & (draws[0] < self._termination))
        num_steps = state.num_steps + 1
        state = GridState(
            agent=agent,
            objects=state.objects,
            present=(state.present & ~collected) | (draws[1] < self._respawn),
            num_steps=num_steps,
        )
        return state, Transition(
            reward=jnp.sum(jnp.where(collected, self._rewards, jnp.float32(0))),
            discount=1.0 - terminated.astype(jnp.float32),
            last=terminated | (num_steps >= self._options.max_steps),
        )

    def _border(self) -> Any:
        """int32 [2]: the last row and column."""
        rows, columns = self._size
        if isinstance(rows, int):
            return np.array([rows - 1, columns - 1], np.int32)
        return jnp.stack([rows - 1, columns - 1])

    def observe(self, state: GridState) -> jax.Array:
        height, width = self._options.height, self._options.width
        if self._options.task == "tabular":
            cell = state.agent[0] * width + state.agent[1]
            bits = 2 ** np.arange(self._num_objects, dtype=np.int32)
            index = cell * 2**self._num_objects + jnp.sum(jnp.where(state.present, bits, 0), dtype=jnp.int32)
            return (np.arange(height * width * 2**self._num_objects) == index).astype(jnp.float32)
        image = self._planes(state).astype(jnp.float32)
        return image.reshape(-1) if self._options.flatten else image

    def render(self, state: GridState) -> jax.Array:
        height, width = self._options.height, self._options.width
        scale = max(8, -(-96 // min(height, width)))
        rows, columns = np.arange(height)[:, None], np.arange(width)[None, :]
        picture = np.where(((rows + columns) % 2 == 0)[..., None], FLOOR, FLOOR_2)
        picture = jnp.asarray(np.kron(picture, np.ones((scale, scale, 1), np.uint8)))
        offset = np.abs(np.arange(scale) - (scale - 1) / 2) / scale
        disc = np.hypot(offset[:, None], offset[None, :]) < 0.4
        diamond = offset[:, None] + offset[None, :] < 0.4
        planes = jnp.repeat(jnp.repeat(self._planes(state), scale, axis=0), scale, axis=1)
        colours = [jnp.where(reward > 0, GOOD, BAD) for reward in self._rewards]
        layers = [(1 + i, diamond, colour) for i, colour in enumerate(colours)]
        for channel, shape, colour in [(0, disc, AGENT), *layers]:
            shown = planes[..., channel] & np.tile(shape, (height, width))
            picture = jnp.where(shown[..., None], colour[None, None], picture)
        return picture

    def _planes(self, state: GridState) -> jax.Array:
        """bool [height, width, 1 + N]: where the agent is, and every object that is present."""
        places = jnp.concatenate([state.agent[None], state.objects])
        shown = jnp.concatenate([jnp.ones((1,), bool), state.present])
        rows = np.arange(self._options.height)[:, None, None] == places[:, 0][None, None]
        columns = np.arange(self._options.width)[None, :, None] == places[:, 1][None, None]
        return rows & columns & shown[None, None]


def _sorted(cells: list[Any]) -> list[Any]:
    """Cells in ascending order; those that are not traced stay NumPy's."""
    return sorted(cells) if all(isinstance(cell, np.integer) for cell in cells) else list(jnp.sort(jnp.stack(cells)))


def _insert(ascending: list[jax.Array], value: jax.Array) -> list[jax.Array]:
    """The list with `value` in its place."""
    result = []
    for other in ascending:
        result.append(jnp.minimum(other, value))
        value = jnp.maximum(other, value)
    return [*result, value]
