"""Continuous mountain car: rock a car out of a valley with an engine whose use costs reward.

Equal to Gymnasium's `MountainCarContinuous-v0` transition by transition, in float32 where Gymnasium computes in
float64. The valley is that of `envs_jax.mountain_car`; the engine is stronger and the goal a little nearer. A policy
that never reaches the goal does best by standing still, which makes exploration hard.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from envs_jax import mountain_car
from envs_jax.mountain_car import MountainCarState
from podracer import spaces
from podracer.types import EnvSpec, Transition

_POWER, _GOAL = 0.0015, 0.45


@dataclasses.dataclass(frozen=True)
class MountainCarContinuousOptions(mountain_car.MountainCarOptions):
    """Options of `MountainCarContinuous`.

    Attributes:
      max_steps: the time limit, which truncates the episode.
    """

    max_steps: int = 999


class MountainCarContinuous:
    """Continuous mountain car.

    Observation: float32 [2]: position, velocity.
    Action: `Box(-1, 1, [1])`, the push to the right, clipped to these bounds.
    Reward: 100 on reaching the goal, minus 0.1 a^2 at every step for the action a as it was given, not clipped.
    Start: at rest, the position uniform in [-0.6, -0.4).
    End: terminates at a position of at least 0.45 with a velocity of at least 0; else truncated after `max_steps`
      steps.
    """

    def __init__(self, options: MountainCarContinuousOptions = MountainCarContinuousOptions()):
        self._max_steps = options.max_steps
        self.spec = EnvSpec(
            name="mountain_car_continuous",
            observation_space=mountain_car.OBSERVATION_SPACE,
            action_space=spaces.Box(-1.0, 1.0, (1,)),
            max_episode_steps=self._max_steps,
        )

    def reset(self, key: jax.Array) -> MountainCarState:
        """A car at rest near the bottom of the valley."""
        return mountain_car.start(key)

    def step(self, state: MountainCarState, action: jax.Array, key: jax.Array) -> tuple[MountainCarState, Transition]:
        """One push, `action` float32 [1]. Nothing is drawn from `key`."""
        state = mountain_car.drive(state, jnp.clip(action[0], -1.0, 1.0) * _POWER)
        terminated = mountain_car.at_goal(state, _GOAL)
        reached = terminated.astype(jnp.float32)
        return state, Transition(
            reward=100.0 * reached - 0.1 * jnp.square(action[0]),
            discount=1.0 - reached,
            last=terminated | (state.num_steps >= self._max_steps),
        )

    def observe(self, state: MountainCarState) -> jax.Array:
        """float32 [2]: position, velocity."""
        return jnp.stack([state.position, state.velocity])

    def render(self, state: MountainCarState) -> jax.Array:
        """The valley from the side, uint8 [144, 216, 3]."""
        return mountain_car.draw(state, _GOAL)
