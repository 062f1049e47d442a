"""Bandit: eleven arms with rewards that never change, and one pull an episode.

After bsuite's `bandit` experiment (Osband et al., "Behaviour Suite for Reinforcement Learning", 2020, environment
`SimpleBandit`), equal to it transition by transition. It is exploration and nothing else: an agent that stops trying
arms too early never finds the best one.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

_NUM_ARMS = 11

_COLUMN, _HEIGHT = 12, 80  # pixels
_BACKGROUND, _REWARD, _PULLED = (24, 26, 36), (90, 96, 116), (255, 215, 64)


@dataclasses.dataclass(frozen=True)
class BanditOptions:
    """Options of `Bandit`.

    Attributes:
      mapping_seed: seed of the order of the arms.
    """

    mapping_seed: int = 0

    def __post_init__(self):
        if type(self.mapping_seed) is not int or not 0 <= self.mapping_seed < 2**32:
            raise ValueError(f"BanditOptions(mapping_seed={self.mapping_seed!r}): use an integer in [0, 2**32).")


class BanditState(NamedTuple):
    """The pull of an episode.

    Attributes:
      arm: int32 []; the arm that was pulled, -1 before.
    """

    arm: jax.Array


class Bandit:
    """Bandit.

    Half of all rows are first rows, whose transition is masked (docs/adr/0001-next-step-reset.md): a rollout of T rows
    has T / 2 pulls.

    Observation: float32 [1, 1], always 1.
    Action: `Discrete(11)`, the arm to pull.
    Reward: one of 0, 0.1, ... 1 for each arm, in an order that `mapping_seed` draws.
    End: terminates after one step.
    """

    def __init__(self, options: BanditOptions = BanditOptions()):
        # The legacy generator and this very call, because bsuite's order comes from them.
        order = np.random.RandomState(options.mapping_seed).choice(range(_NUM_ARMS), _NUM_ARMS, replace=False)
        self._rewards = np.linspace(0, 1, _NUM_ARMS)[order].astype(np.float32)  # [11]
        self.spec = EnvSpec(
            name="bandit",
            observation_space=spaces.Box(0.0, 1.0, (1, 1)),
            action_space=spaces.Discrete(_NUM_ARMS),
            max_episode_steps=1,
        )

    def reset(self, key: jax.Array) -> BanditState:
        """No arm pulled yet. Nothing is drawn from `key`."""
        return BanditState(arm=jnp.int32(-1))

    def step(self, state: BanditState, action: jax.Array, key: jax.Array) -> tuple[BanditState, Transition]:
        """One pull, `action` int32 []. Nothing is drawn from `key`."""
        reward = jnp.sum(jnp.where(np.arange(_NUM_ARMS) == action, self._rewards, np.float32(0)))
        return BanditState(arm=action), Transition(reward=reward, discount=jnp.float32(0), last=jnp.bool_(True))

    def observe(self, state: BanditState) -> jax.Array:
        """float32 [1, 1]."""
        return jnp.ones((1, 1), jnp.float32)

    def render(self, state: BanditState) -> jax.Array:
        """A column as high as its reward for each arm, uint8 [80, 132, 3]; the arm that was pulled is lit."""
        arms = np.repeat(np.arange(_NUM_ARMS), _COLUMN)
        height = 4 + self._rewards[arms] * (_HEIGHT - 8)
        column = (_HEIGHT - np.arange(_HEIGHT)[:, None] <= height[None]) & (np.arange(len(arms)) % _COLUMN > 1)[None]
        lit = (jnp.asarray(arms) == state.arm)[None, :, None]
        color = jnp.where(lit, np.array(_PULLED, np.uint8)[None, None], np.array(_REWARD, np.uint8)[None, None])
        return jnp.where(column[..., None], color, np.array(_BACKGROUND, np.uint8)[None, None])
