"""Pendulum: swing a pendulum up and hold it there, with a motor too weak to lift it directly.

Equal to Gymnasium's `Pendulum-v1` transition by transition, in float32 where Gymnasium computes in float64.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

_GRAVITY, _MASS, _LENGTH, _TIME_STEP = 10.0, 1.0, 1.0, 0.05
_MAX_SPEED, _MAX_TORQUE = 8.0, 2.0
_START = np.array([math.pi, 1.0], np.float32)  # bounds of theta and theta_dot

_SIDE, _PIXELS_PER_METRE = 160, 64
_BACKGROUND, _ROD, _PIVOT = (24, 26, 36), (239, 108, 96), (222, 226, 240)


@dataclasses.dataclass(frozen=True)
class PendulumOptions:
    """Options of `Pendulum`.

    Attributes:
      max_steps: the time limit, which truncates the episode.
    """

    max_steps: int = 200

    def __post_init__(self):
        if type(self.max_steps) is not int or self.max_steps < 1:
            raise ValueError(f"PendulumOptions(max_steps={self.max_steps!r}): use an integer of at least 1.")


class PendulumState(NamedTuple):
    """The pendulum and the clock.

    Attributes:
      theta: float32 []; angle in radians, 0 upright, counter-clockwise, not wrapped.
      theta_dot: float32 []; its velocity in radians per second, in [-8, 8].
      num_steps: int32 []; steps taken so far.
    """

    theta: jax.Array
    theta_dot: jax.Array
    num_steps: jax.Array


class Pendulum:
    """Pendulum.

    Observation: float32 [3]: cos(theta), sin(theta), theta_dot.
    Action: `Box(-2, 2, [1])`, the torque, clipped to these bounds.
    Reward: -(theta^2 + 0.1 theta_dot^2 + 0.001 torque^2), with theta in [-pi, pi) and theta_dot as they were before
      the step; in [-16.3, 0].
    Start: theta uniform in [-pi, pi), theta_dot uniform in [-1, 1).
    End: never terminates; truncated after `max_steps` steps.
    """

    def __init__(self, options: PendulumOptions = PendulumOptions()):
        self._max_steps = options.max_steps
        self.spec = EnvSpec(
            name="pendulum",
            observation_space=spaces.Box(-_MAX_SPEED, _MAX_SPEED, (3,)),
            action_space=spaces.Box(-_MAX_TORQUE, _MAX_TORQUE, (1,)),
            max_episode_steps=self._max_steps,
        )

    def reset(self, key: jax.Array) -> PendulumState:
        """A pendulum anywhere, moving slowly."""
        theta, theta_dot = jax.random.uniform(key, (2,), jnp.float32, -_START, _START)
        return PendulumState(theta=theta, theta_dot=theta_dot, num_steps=jnp.int32(0))

    def step(self, state: PendulumState, action: jax.Array, key: jax.Array) -> tuple[PendulumState, Transition]:
        """One push, `action` float32 [1]. Nothing is drawn from `key`."""
        torque = jnp.clip(action[0], -_MAX_TORQUE, _MAX_TORQUE)
        angle = (state.theta + math.pi) % (2 * math.pi) - math.pi
        cost = jnp.square(angle) + 0.1 * jnp.square(state.theta_dot) + 0.001 * jnp.square(torque)
        acceleration = 3 * _GRAVITY / (2 * _LENGTH) * jnp.sin(state.theta) + 3.0 / (_MASS * _LENGTH**2) * torque
        theta_dot = jnp.clip(state.theta_dot + acceleration * _TIME_STEP, -_MAX_SPEED, _MAX_SPEED)
        state = PendulumState(
            # The new velocity moves the angle: a semi-implicit Euler step.
            theta=state.theta + theta_dot * _TIME_STEP,
            theta_dot=theta_dot,
            num_steps=state.num_steps + 1,
        )
        return state, Transition(
            reward=-cost,
            discount=jnp.float32(1),
            last=state.num_steps >= self._max_steps,
        )

    def observe(self, state: PendulumState) -> jax.Array:
        """float32 [3]: cos(theta), sin(theta), theta_dot."""
        return jnp.stack([jnp.cos(state.theta), jnp.sin(state.theta), state.theta_dot])

    def render(self, state: PendulumState) -> jax.Array:
        """The pendulum from the front, uint8 [160, 160, 3]."""
        # Pixel centres in metres, the pivot at the origin.
        x = ((np.arange(_SIDE) + 0.5 - _SIDE / 2) / _PIXELS_PER_METRE).astype(np.float32)[None, :, None]
        y = -x.swapaxes(0, 1)
        tip_x, tip_y = -jnp.sin(state.theta), jnp.cos(state.theta)
        along = jnp.clip(x * tip_x + y * tip_y, 0.0, _LENGTH)
        rod = jnp.square(x - along * tip_x) + jnp.square(y - along * tip_y) < 0.1**2
        pivot = np.square(x) + np.square(y) < 0.05**2
        image = jnp.where(rod, np.array(_ROD, np.uint8)[None, None], np.array(_BACKGROUND, np.uint8)[None, None])
        return jnp.where(pivot, np.array(_PIVOT, np.uint8)[None, None], image)
