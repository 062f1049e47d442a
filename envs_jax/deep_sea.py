"""Deep Sea: a diver who must move right at every step to find the treasure, against a small cost of doing so.

After bsuite's `deep_sea` (Osband et al., "Behaviour Suite for Reinforcement Learning", 2020; the problem is from
"Deep Exploration via Randomized Value Functions", 2019), deterministic variant, equal to it transition by transition.
A uniformly random policy finds the treasure once in 2^size episodes: the task separates exploration from luck.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

_SURFACE, _DEEP = np.array([64, 152, 206]), np.array([8, 34, 78])
_DIVER, _TREASURE = np.array([[[255, 140, 60]]], np.uint8), np.array([255, 215, 64], np.uint8)


@dataclasses.dataclass(frozen=True)
class DeepSeaOptions:
    """Options of `DeepSea`.

    Attributes:
      size: the grid is size x size, and an episode lasts `size` steps.
      randomize_actions: True draws for each cell the action that means "right". With False it is action 1 everywhere,
        far too easy for a policy that generalises over cells: for debugging only.
      mapping_seed: seed of that mapping; 42 is bsuite's own.
      unscaled_move_cost: the cost of `size` moves to the right; the optimal return is 1 minus it.
    """

    size: int = 8
    randomize_actions: bool = True
    mapping_seed: int = 42
    unscaled_move_cost: float = 0.01

    def __post_init__(self):
        if type(self.size) is not int or self.size < 1:
            raise ValueError(f"DeepSeaOptions(size={self.size!r}): use an integer of at least 1.")
        if type(self.randomize_actions) is not bool:
            raise ValueError(f"DeepSeaOptions(randomize_actions={self.randomize_actions!r}): use True or False.")
        if type(self.mapping_seed) is not int or not 0 <= self.mapping_seed < 2**32:
            raise ValueError(f"DeepSeaOptions(mapping_seed={self.mapping_seed!r}): use an integer in [0, 2**32).")
        if type(self.unscaled_move_cost) not in (int, float) or not 0 <= self.unscaled_move_cost < 1:
            raise ValueError(
                f"DeepSeaOptions(unscaled_move_cost={self.unscaled_move_cost!r}): use a number in [0, 1); "
                "from 1 on the treasure is not worth the way."
            )


class DeepSeaState(NamedTuple):
    """The position of the diver.

    Attributes:
      row: int32 []; steps taken so far; `size` once the episode is over.
      column: int32 []; in [0, size).
    """

    row: jax.Array
    column: jax.Array


class DeepSea:
    """Deep Sea.

    Observation: float32 [size, size], 1 at the diver's cell; all 0 once the episode is over.
    Action: `Discrete(2)`; which of the two means right depends on the cell (`randomize_actions`), the other is left.
      Either way the diver sinks one row; walls stop sideways moves.
    Reward: 1 for a move to the right in the last column (reached in the last row only), minus
      `unscaled_move_cost / size` for every move to the right.
    End: terminates when the diver has passed the last row, after exactly `size` steps.
    """

    def __init__(self, options: DeepSeaOptions = DeepSeaOptions()):
        self._size = size = options.size
        if options.randomize_actions:
            # The legacy generator and this very call, because bsuite's mapping comes from them.
            mapping = np.random.RandomState(options.mapping_seed).binomial(1, 0.5, (size, size))
        else:
            mapping = np.ones((size, size))
        self._right_action = mapping.astype(np.int32)  # [size, size]
        move_cost = options.unscaled_move_cost / size
        self._right_reward, self._treasure_reward = np.float32(-move_cost), np.float32(1.0 - move_cost)
        self.spec = EnvSpec(
            name="deep_sea",
            observation_space=spaces.Box(0.0, 1.0, (size, size)),
            action_space=spaces.Discrete(2),
            max_episode_steps=size,
        )

    def reset(self, key: jax.Array) -> DeepSeaState:
        """The diver at the surface, top left. Nothing is drawn from `key`."""
        return DeepSeaState(row=jnp.int32(0), column=jnp.int32(0))

    def step(self, state: DeepSeaState, action: jax.Array, key: jax.Array) -> tuple[DeepSeaState, Transition]:
        """One move, `action` int32 []. Nothing is drawn from `key`."""
        right_action = jnp.sum(jnp.where(self._diver(state), self._right_action, 0), dtype=jnp.int32)
        right = action == right_action
        at_wall = state.column == self._size - 1
        column = jnp.clip(state.column + jnp.where(right, 1, -1), 0, self._size - 1)
        reward = jnp.where(right, jnp.where(at_wall, self._treasure_reward, self._right_reward), jnp.float32(0))
        state = DeepSeaState(row=state.row + 1, column=column)
        last = state.row >= self._size
        return state, Transition(reward=reward, discount=1.0 - last.astype(jnp.float32), last=last)

    def observe(self, state: DeepSeaState) -> jax.Array:
        """float32 [size, size]."""
        return self._diver(state).astype(jnp.float32)

    def render(self, state: DeepSeaState) -> jax.Array:
        """The sea from the side, uint8 [H, W, 3]: one more row than the observation, for the sea bed."""
        scale = max(4, -(-96 // self._size))
        depth = np.linspace(0.0, 1.0, self._size + 1)[:, None, None]
        water = ((1 - depth) * _SURFACE + depth * _DEEP).astype(np.uint8)
        background = np.repeat(water, self._size, axis=1)
        background[-1, -1] = _TREASURE
        rows, columns = np.arange(self._size + 1)[:, None], np.arange(self._size)[None, :]
        diver = (rows == state.row) & (columns == state.column)
        image = jnp.where(diver[..., None], _DIVER, background)
        return jnp.repeat(jnp.repeat(image, scale, axis=0), scale, axis=1)

    def _diver(self, state: DeepSeaState) -> jax.Array:
        """bool [size, size]: the diver's cell."""
        rows, columns = np.arange(self._size)[:, None], np.arange(self._size)[None, :]
        return (rows == state.row) & (columns == state.column)
