"""Umbrella Chain: take an umbrella or leave it, and learn only at the end of a long day if that was right.

After bsuite's `umbrella_length` and `umbrella_distract` experiments (Osband et al., "Behaviour Suite for Reinforcement
Learning", 2020, environment `umbrella_chain`), equal to it transition by transition. Random rewards on the way and
random bits in the observation hide the one action and the one reward that matter.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.memory_chain import draw_time
from podracer import spaces
from podracer.types import EnvSpec, Transition

_SIDE = 48  # pixels of a square
_BACKGROUND, _NO, _YES = (24, 26, 36), (90, 96, 116), (96, 165, 250)


@dataclasses.dataclass(frozen=True)
class UmbrellaChainOptions:
    """Options of `UmbrellaChain`.

    Attributes:
      length: steps of an episode. bsuite's `umbrella_length` takes 1 to 100; 20 is that of `umbrella_distract`.
      num_distractors: random bits of the observation. `umbrella_length` has 20; `umbrella_distract` takes 1 to 100.
    """

    length: int = 20
    num_distractors: int = 20

    def __post_init__(self):
        for field, least in (("length", 1), ("num_distractors", 0)):
            value = getattr(self, field)
            if type(value) is not int or value < least:
                raise ValueError(f"UmbrellaChainOptions({field}={value!r}): use an integer of at least {least}.")


class UmbrellaChainState(NamedTuple):
    """The weather, the umbrella, the clock and the random bits.

    Attributes:
      need: int32 []; 1 if it is going to rain.
      have: int32 []; 1 with an umbrella: random at first, and then the first action.
      num_steps: int32 []; steps taken so far, in [0, length].
      distractors: int32 [num_distractors]; the random bits of this step's observation.
    """

    need: jax.Array
    have: jax.Array
    num_steps: jax.Array
    distractors: jax.Array


class UmbrellaChain:
    """Umbrella Chain.

    Observation: float32 [1, 3 + num_distractors]: `need` and `have`, the time left, 1 - t/length, and fresh random
      bits.
    Action: `Discrete(2)`. The first one leaves the umbrella or takes it; the others have no effect.
    Reward: +1 at the end if `have` equals `need`, else -1; +1 or -1 at random before.
    Start: `need` and `have` are random bits.
    End: terminates after exactly `length` steps.
    """

    def __init__(self, options: UmbrellaChainOptions = UmbrellaChainOptions()):
        self._length, self._num_distractors = options.length, options.num_distractors
        # A table, because compilers turn a division by a constant into a product that is off by one ulp.
        self._time_left = (1 - np.arange(self._length + 1) / self._length).astype(np.float32)
        self.spec = EnvSpec(
            name="umbrella_chain",
            observation_space=spaces.Box(0.0, 1.0, (1, 3 + self._num_distractors)),
            action_space=spaces.Discrete(2),
            max_episode_steps=self._length,
        )

    def reset(self, key: jax.Array) -> UmbrellaChainState:
        """A fresh day."""
        bits = _random_bits(key, 2 + self._num_distractors)
        return UmbrellaChainState(need=bits[0], have=bits[1], num_steps=jnp.int32(0), distractors=bits[2:])

    def step(
        self, state: UmbrellaChainState, action: jax.Array, key: jax.Array
    ) -> tuple[UmbrellaChainState, Transition]:
        """One tick of the clock, `action` int32 []."""
        bits = _random_bits(key, 1 + self._num_distractors)
        have = jnp.where(state.num_steps == 0, action, state.have)
        state = UmbrellaChainState(state.need, have, state.num_steps + 1, distractors=bits[1:])
        last = state.num_steps >= self._length
        good = jnp.where(last, have == state.need, bits[0] == 1)
        return state, Transition(
            reward=jnp.where(good, jnp.float32(1), jnp.float32(-1)),
            discount=1.0 - last.astype(jnp.float32),
            last=last,
        )

    def observe(self, state: UmbrellaChainState) -> jax.Array:
        """float32 [1, 3 + num_distractors]."""
        bits = jnp.stack([state.need, state.have]).astype(jnp.float32)
        time_left = jnp.asarray(self._time_left)[state.num_steps]
        return jnp.concatenate([bits, time_left[None], state.distractors.astype(jnp.float32)])[None]

    def render(self, state: UmbrellaChainState) -> jax.Array:
        """The time left as a bar above two squares, `need` and `have`, uint8 [64, 96, 3]; they are lit for 1."""
        inside = np.zeros((_SIDE, _SIDE, 1), bool)
        inside[6:-6, 6:-6] = True
        lit = jnp.repeat(jnp.stack([state.need, state.have]) == 1, _SIDE)[None, :, None]
        face = jnp.where(lit, np.array(_YES, np.uint8)[None, None], np.array(_NO, np.uint8)[None, None])
        squares = jnp.where(np.tile(inside, (1, 2, 1)), face, np.array(_BACKGROUND, np.uint8)[None, None])
        return jnp.concatenate([draw_time(jnp.asarray(self._time_left)[state.num_steps], 2 * _SIDE), squares])


def _random_bits(key: jax.Array, number: int) -> jax.Array:
    """Draws bits, int32 [number], of which a random word has 32."""
    words = jax.random.bits(key, (-(-number // 32),), jnp.uint32)
    bits = (words[:, None] >> np.arange(32, dtype=np.uint32)[None]) & np.uint32(1)
    return bits.reshape(-1)[:number].astype(jnp.int32)
