"""Memory Chain: bits shown at the start are asked for at the end, and nothing in between helps.

After bsuite's `memory_len` and `memory_size` experiments (Osband et al., "Behaviour Suite for Reinforcement Learning",
2020, environment `memory_chain`), equal to it transition by transition. An agent without memory scores 0 on average.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

_BACKGROUND, _QUERY = np.array([[[24, 26, 36]]], np.uint8), np.array([[[255, 215, 64]]], np.uint8)
_ELAPSED, _TIME_LEFT = np.array([[[52, 56, 72]]], np.uint8), np.array([[[96, 165, 250]]], np.uint8)
_ZERO, _ONE = np.array([[[239, 108, 96]]], np.uint8), np.array([[[96, 211, 148]]], np.uint8)


@dataclasses.dataclass(frozen=True)
class MemoryChainOptions:
    """Options of `MemoryChain`.

    Attributes:
      length: steps over which the bits must be remembered; an episode lasts length + 1 steps.
      num_bits: number of bits shown; one of them is asked for.
    """

    length: int = 10
    num_bits: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"MemoryChainOptions({field.name}={value!r}): use an integer of at least 1.")


class MemoryChainState(NamedTuple):
    """The hidden bits and the clock.

    Attributes:
      num_steps: int32 []; steps taken so far, in [0, length + 1].
      context: int32 [num_bits]; the bits, 0 or 1.
      query: int32 []; index of the bit asked for, in [0, num_bits).
    """

    num_steps: jax.Array
    context: jax.Array
    query: jax.Array


class MemoryChain:
    """Memory Chain.

    Observation: float32 [1, num_bits + 2]. With t = max(0, steps taken - 1), element 0 is the time left, 1 - t/length;
      element 1 is the index of the bit asked for at t = length - 1 and else 0; the rest are the bits, -1 or +1, at
      t = 0 and else 0. So the first observation is shown twice, as bsuite does, before and after the first step.
    Action: `Discrete(2)`, the value of the bit asked for; without effect before the last step.
    Reward: +1 if the last action is the bit asked for, -1 if not; 0 before.
    End: terminates after exactly length + 1 steps.
    """

    def __init__(self, options: MemoryChainOptions = MemoryChainOptions()):
        self._length, self._num_bits = options.length, options.num_bits
        # A table, because compilers turn a division by a constant into a product that is off by one ulp.
        self._time_left = (1 - np.arange(self._length + 1) / self._length).astype(np.float32)
        self.spec = EnvSpec(
            name="memory_chain",
            observation_space=spaces.Box(-1.0, max(1.0, self._num_bits - 1.0), (1, self._num_bits + 2)),
            action_space=spaces.Discrete(2),
            max_episode_steps=self._length + 1,
        )

    def reset(self, key: jax.Array) -> MemoryChainState:
        """Fresh bits and a fresh query, uniformly."""
        context_key, query_key = jax.random.split(key)
        return MemoryChainState(
            num_steps=jnp.int32(0),
            context=jax.random.bernoulli(context_key, 0.5, (self._num_bits,)).astype(jnp.int32),
            query=jnp.floor(jax.random.uniform(query_key) * self._num_bits).astype(jnp.int32),
        )

    def step(self, state: MemoryChainState, action: jax.Array, key: jax.Array) -> tuple[MemoryChainState, Transition]:
        """One tick of the clock, `action` int32 []. Nothing is drawn from `key`."""
        state = state._replace(num_steps=state.num_steps + 1)
        last = state.num_steps > self._length
        answer = jnp.sum(jnp.where(jnp.arange(self._num_bits) == state.query, state.context, 0), dtype=jnp.int32)
        reward = jnp.where(last, jnp.where(action == answer, jnp.float32(1), jnp.float32(-1)), jnp.float32(0))
        return state, Transition(reward=reward, discount=1.0 - last.astype(jnp.float32), last=last)

    def observe(self, state: MemoryChainState) -> jax.Array:
        """float32 [1, num_bits + 2]."""
        t = jnp.maximum(state.num_steps - 1, 0)
        query = jnp.where(t == self._length - 1, state.query, 0).astype(jnp.float32)
        context = jnp.where(t == 0, 2 * state.context - 1, 0).astype(jnp.float32)
        return jnp.concatenate([jnp.stack([jnp.asarray(self._time_left)[t], query]), context])[None]

    def render(self, state: MemoryChainState) -> jax.Array:
        """The clock as a bar above the hidden bits, uint8 [H, W, 3]; the frame marks the bit asked for."""
        height, side = 80, max(8, -(-96 // self._num_bits))
        margin = max(1, side // 8)
        inside = np.zeros((height, side, 1), bool)
        inside[margin:-margin, margin:-margin] = True
        face = jnp.where(jnp.repeat(state.context, side)[None, :, None] == 1, _ONE, _ZERO)
        asked_for = jnp.repeat(jnp.arange(self._num_bits) == state.query, side)[None, :, None]
        bits = jnp.where(np.tile(inside, (1, self._num_bits, 1)), face, jnp.where(asked_for, _QUERY, _BACKGROUND))
        return jnp.concatenate([draw_time(self.observe(state)[0, 0], side * self._num_bits), bits])


def draw_time(left: jax.Array, width: int) -> jax.Array:
    """A bar of the part of an episode that is left, a float32 [] in [0, 1], as uint8 [16, width, 3]."""
    fraction = np.linspace(0.0, 1.0, width, dtype=np.float32)[None, :, None]
    return jnp.repeat(jnp.where(fraction <= left, _TIME_LEFT, _ELAPSED), 16, axis=0)
