"""Gridworld: three small decision processes whose optimum can be computed exactly.

A reduced version of the toy family of Oh et al., "Discovering Reinforcement Learning Algorithms" (2020), appendix A:
a grid with objects in fixed places seen as a state index ("tabular"), the same grid with objects in random places seen
as a picture ("random_goals"), and a chain whose first action decides a reward that arrives at its end
("delayed_chain"). Differences from the paper: no walls, a collected object comes back where it was, and the chain
has one fixed length.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

# (rows, columns) of each action: stay, then clockwise from north.
_MOVES = np.array([(0, 0), (-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1)], np.int32)

_FLOOR, _FLOOR_2 = np.array([36, 40, 54], np.uint8), np.array([42, 47, 63], np.uint8)
_GOOD, _BAD = np.array([96, 211, 148], np.uint8), np.array([239, 108, 96], np.uint8)
_AGENT = np.array([96, 165, 250], np.uint8)
_CUES = np.array([[255, 215, 64], [190, 140, 255]], np.uint8)


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


class ChainState(NamedTuple):
    """A chain.

    Attributes:
      num_steps: int32 []; steps taken so far, in [0, chain_length].
      cue: int32 []; the first action that will be rewarded, 0 or 1.
      right: bool []; whether the first action was that one; False before it.
      distractors: bool [distractor_bits]; noise.
    """

    num_steps: jax.Array
    cue: jax.Array
    right: jax.Array
    distractors: jax.Array


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
        self._task = _Chain(options) if options.task == "delayed_chain" else _Grid(options)
        self.spec: EnvSpec = self._task.spec

    def reset(self, key: jax.Array) -> Any:
        """The start of an episode: `GridState` or `ChainState`."""
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
        self._rewards = np.array([thing.reward for thing in options.objects], np.float32)
        self._termination = np.array([thing.termination_probability for thing in options.objects], np.float32)
        self._respawn = np.array([thing.respawn_probability for thing in options.objects], np.float32)
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

    def reset(self, key: jax.Array) -> GridState:
        num_cells, width = self._options.height * self._options.width, self._options.width
        placed, taken = list(self._fixed_cells), sorted(self._fixed_cells)
        num_free = np.arange(num_cells - len(placed), num_cells - self._num_objects - 1, -1, dtype=np.int32)
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
        border = np.array([self._options.height - 1, self._options.width - 1], np.int32)
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
        picture = np.where(((rows + columns) % 2 == 0)[..., None], _FLOOR, _FLOOR_2)
        picture = jnp.asarray(np.kron(picture, np.ones((scale, scale, 1), np.uint8)))
        offset = np.abs(np.arange(scale) - (scale - 1) / 2) / scale
        disc = np.hypot(offset[:, None], offset[None, :]) < 0.4
        diamond = offset[:, None] + offset[None, :] < 0.4
        planes = jnp.repeat(jnp.repeat(self._planes(state), scale, axis=0), scale, axis=1)
        layers = [(1 + i, diamond, _GOOD if reward > 0 else _BAD) for i, reward in enumerate(self._rewards)]
        for channel, shape, colour in [(0, disc, _AGENT), *layers]:
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


def _insert(ascending: list[jax.Array], value: jax.Array) -> list[jax.Array]:
    """The list with `value` in its place."""
    result = []
    for other in ascending:
        result.append(jnp.minimum(other, value))
        value = jnp.maximum(other, value)
    return [*result, value]


class _Chain:
    def __init__(self, options: GridworldOptions):
        self._length, self._noisy = options.chain_length, options.noisy_rewards
        self._num_distractors, self._num_states = options.distractor_bits, 2 + 2 * options.chain_length
        self.spec = EnvSpec(
            name="gridworld_delayed_chain",
            observation_space=spaces.Box(0.0, 1.0, (self._num_states + self._num_distractors,)),
            action_space=spaces.Discrete(2),
            max_episode_steps=self._length,
        )

    def reset(self, key: jax.Array) -> ChainState:
        bits = jax.random.bernoulli(key, 0.5, (1 + self._num_distractors,))
        return ChainState(
            num_steps=jnp.int32(0), cue=bits[0].astype(jnp.int32), right=jnp.bool_(False), distractors=bits[1:]
        )

    def step(self, state: ChainState, action: jax.Array, key: jax.Array) -> tuple[ChainState, Transition]:
        bits = jax.random.bernoulli(key, 0.5, (1 + self._num_distractors,))
        right = jnp.where(state.num_steps == 0, action == state.cue, state.right)
        num_steps = state.num_steps + 1
        last = num_steps >= self._length
        noise = jnp.where(bits[0], jnp.float32(1), jnp.float32(-1)) if self._noisy else jnp.float32(0)
        reward = jnp.where(last, jnp.where(right, jnp.float32(1), jnp.float32(-1)), noise)
        state = ChainState(num_steps=num_steps, cue=state.cue, right=right, distractors=bits[1:])
        return state, Transition(reward=reward, discount=1.0 - last.astype(jnp.float32), last=last)

    def observe(self, state: ChainState) -> jax.Array:
        index = jnp.where(state.num_steps == 0, state.cue, 2 * state.num_steps + state.right.astype(jnp.int32))
        position = np.arange(self._num_states) == index
        return jnp.concatenate([position, state.distractors]).astype(jnp.float32)

    def render(self, state: ChainState) -> jax.Array:
        """The right branch above the wrong one; the cue fills the first column until the choice is made."""
        scale = 32
        rows, columns = np.arange(2)[:, None], np.arange(self._length + 1)[None, :]
        floor = np.where(((rows + columns) % 2 == 0)[..., None], _FLOOR, _FLOOR_2)
        floor[:, -1] = _GOOD // 2, _BAD // 2
        started = state.num_steps > 0
        cue = jnp.where(state.cue == 1, _CUES[1], _CUES[0])
        here = (columns == state.num_steps) & (~started | (rows == jnp.where(state.right, 0, 1)))
        colour = jnp.where(started, _AGENT, cue)
        cells = jnp.where(here[..., None], colour[None, None], floor)
        image = jnp.repeat(jnp.repeat(cells, scale, axis=0), scale, axis=1)
        frame = np.ones((scale, scale), bool)
        frame[2:-2, 2:-2] = False
        return jnp.where(np.tile(frame, (2, self._length + 1))[..., None], _FLOOR[None, None], image)
