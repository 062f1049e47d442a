"""Discounting Chain: the first action chooses when a reward is paid, after 1 step, 3, 10, 30 or 100.

After bsuite's `discounting_chain` experiment (Osband et al., "Behaviour Suite for Reinforcement Learning", 2020), equal
to it transition by transition. One chain pays a tenth more than the others. An agent that discounts too much misses it
where it is long.
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

_PAID_AT = (1, 3, 10, 30, 100)
_LENGTH, _NUM_CHAINS = 100, len(_PAID_AT)

_SIDE = 24  # pixels of a chain's square
_BACKGROUND, _CHAIN, _CHOSEN = (24, 26, 36), (90, 96, 116), (255, 215, 64)


@dataclasses.dataclass(frozen=True)
class DiscountingChainOptions:
    """Options of `DiscountingChain`.

    Attributes:
      mapping_seed: the chain that pays 1.1 is `mapping_seed` modulo 5, as in bsuite.
    """

    mapping_seed: int = 0

    def __post_init__(self):
        if type(self.mapping_seed) is not int or self.mapping_seed < 0:
            raise ValueError(f"DiscountingChainOptions(mapping_seed={self.mapping_seed!r}): use an integer from 0 on.")


class DiscountingChainState(NamedTuple):
    """The chosen chain and the clock.

    Attributes:
      chain: int32 []; the first action, -1 before.
      num_steps: int32 []; steps taken so far, in [0, 100].
    """

    chain: jax.Array
    num_steps: jax.Array


class DiscountingChain:
    """Discounting Chain.

    Observation: float32 [1, 2]: the first action, -1 before it; and the steps taken so far, divided by 100.
    Action: `Discrete(5)`. The first one chooses the chain; the others have no effect.
    Reward: 1 after 1, 3, 10, 30 or 100 steps, by the chosen chain, and 1.1 in one of the chains; else 0.
    End: terminates after exactly 100 steps.
    """

    def __init__(self, options: DiscountingChainOptions = DiscountingChainOptions()):
        self._rewards = np.ones(_NUM_CHAINS, np.float32)
        self._rewards[options.mapping_seed % _NUM_CHAINS] = 1.1
        # A table, because compilers turn a division by a constant into a product that is off by one ulp.
        self._time = (np.arange(_LENGTH + 1) / _LENGTH).astype(np.float32)
        self.spec = EnvSpec(
            name="discounting_chain",
            observation_space=spaces.Box([[-1.0, 0.0]], [[_NUM_CHAINS - 1.0, 1.0]]),
            action_space=spaces.Discrete(_NUM_CHAINS),
            max_episode_steps=_LENGTH,
        )

    def reset(self, key: jax.Array) -> DiscountingChainState:
        """No chain chosen yet. Nothing is drawn from `key`."""
        return DiscountingChainState(chain=jnp.int32(-1), num_steps=jnp.int32(0))

    def step(
        self, state: DiscountingChainState, action: jax.Array, key: jax.Array
    ) -> tuple[DiscountingChainState, Transition]:
        """One tick of the clock, `action` int32 []. Nothing is drawn from `key`."""
        chain = jnp.where(state.num_steps == 0, action, state.chain)
        state = DiscountingChainState(chain, state.num_steps + 1)
        last, reward = state.num_steps >= _LENGTH, jnp.float32(0)
        for i, paid_at in enumerate(_PAID_AT):
            reward = jnp.where((chain == i) & (state.num_steps == paid_at), self._rewards[i], reward)
        return state, Transition(
            reward=reward,
            discount=1.0 - last.astype(jnp.float32),
            last=last,
        )

    def observe(self, state: DiscountingChainState) -> jax.Array:
        """float32 [1, 2]."""
        return jnp.stack([state.chain.astype(jnp.float32), jnp.asarray(self._time)[state.num_steps]])[None]

    def render(self, state: DiscountingChainState) -> jax.Array:
        """The time left as a bar above a square for each chain, uint8 [40, 120, 3]; the chosen one is lit."""
        inside = np.zeros((_SIDE, _SIDE, 1), bool)
        inside[3:-3, 3:-3] = True
        chosen = (np.repeat(np.arange(_NUM_CHAINS), _SIDE) == state.chain)[None, :, None]
        face = jnp.where(chosen, np.array(_CHOSEN, np.uint8)[None, None], np.array(_CHAIN, np.uint8)[None, None])
        inside = np.tile(inside, (1, _NUM_CHAINS, 1))
        squares = jnp.where(inside, face, np.array(_BACKGROUND, np.uint8)[None, None])
        return jnp.concatenate([draw_time(1 - self.observe(state)[0, 1], _SIDE * _NUM_CHAINS), squares])
