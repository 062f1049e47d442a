"""Gridworld's chain, whose first action decides a reward at its end, and the colours of all its tasks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

FLOOR = np.array([36, 40, 54], np.uint8)
FLOOR_2 = np.array([42, 47, 63], np.uint8)
GOOD = np.array([96, 211, 148], np.uint8)
BAD = np.array([239, 108, 96], np.uint8)
AGENT = np.array([96, 165, 250], np.uint8)
CUES = np.array([[255, 215, 64], [190, 140, 255]], np.uint8)


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


class Chain:
    """The task itself; `Gridworld` says what it is, and its options what the arguments are."""

    def __init__(self, length: int, noisy_rewards: bool, distractor_bits: int):
        self._length, self._noisy = length, noisy_rewards
        self._num_distractors, self._num_states = distractor_bits, 2 + 2 * length
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
        floor = np.where(((rows + columns) % 2 == 0)[..., None], FLOOR, FLOOR_2)
        floor[:, -1] = GOOD // 2, BAD // 2
        started = state.num_steps > 0
        cue = jnp.where(state.cue == 1, CUES[1], CUES[0])
        here = (columns == state.num_steps) & (~started | (rows == jnp.where(state.right, 0, 1)))
        colour = jnp.where(started, AGENT, cue)
        cells = jnp.where(here[..., None], colour[None, None], floor)
        image = jnp.repeat(jnp.repeat(cells, scale, axis=0), scale, axis=1)
        frame = np.ones((scale, scale), bool)
        frame[2:-2, 2:-2] = False
        return jnp.where(np.tile(frame, (2, self._length + 1))[..., None], FLOOR[None, None], image)
