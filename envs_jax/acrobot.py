"""Acrobot: swing the tip of two linked rods above a line, with a motor at the joint between them only.

From "Generalization in Reinforcement Learning: Successful Examples Using Sparse Coarse Coding" (Sutton, 1996), with the
dynamics of Sutton and Barto's book, which has terms that the paper lacks. Equal to Gymnasium's `Acrobot-v1` transition
by transition, in float32 where Gymnasium computes in float64.
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

_GRAVITY, _TIME_STEP, _START = 9.8, 0.2, 0.1
_MAX_SPEED_1, _MAX_SPEED_2 = 4 * math.pi, 9 * math.pi
_LIMITS = np.array([1, 1, 1, 1, _MAX_SPEED_1, _MAX_SPEED_2], np.float32)

_SIDE, _PIXELS_PER_METRE = 160, 36
_BACKGROUND, _LINE, _JOINT = (24, 26, 36), (90, 96, 116), (222, 226, 240)
_UPPER, _LOWER = (96, 165, 250), (239, 108, 96)


@dataclasses.dataclass(frozen=True)
class AcrobotOptions:
    """Options of `Acrobot`.

    Attributes:
      max_steps: the time limit, which truncates the episode.
    """

    max_steps: int = 500

    def __post_init__(self):
        if type(self.max_steps) is not int or self.max_steps < 1:
            raise ValueError(f"AcrobotOptions(max_steps={self.max_steps!r}): use an integer of at least 1.")


class AcrobotState(NamedTuple):
    """The two rods and the clock.

    Attributes:
      theta_1: float32 []; angle of the upper rod in radians, 0 hanging down, in [-pi, pi].
      theta_2: float32 []; angle of the lower rod relative to the upper one, in [-pi, pi].
      theta_1_dot: float32 []; velocity of `theta_1` in radians per second, in [-4 pi, 4 pi].
      theta_2_dot: float32 []; velocity of `theta_2`, in [-9 pi, 9 pi].
      num_steps: int32 []; steps taken so far.
    """

    theta_1: jax.Array
    theta_2: jax.Array
    theta_1_dot: jax.Array
    theta_2_dot: jax.Array
    num_steps: jax.Array


class Acrobot:
    """Acrobot.

    Observation: float32 [6]: cos(theta_1), sin(theta_1), cos(theta_2), sin(theta_2), theta_1_dot, theta_2_dot.
    Action: `Discrete(3)`; a torque of -1, 0 or 1 newton metre at the joint between the rods, for 0.2 seconds.
    Reward: -1 at every step, and 0 at the one that ends the episode by reaching the line.
    Start: each angle and velocity uniform in [-0.1, 0.1).
    End: terminates when the tip is more than a rod's length above the upper end; else truncated after `max_steps`
      steps.
    """

    def __init__(self, options: AcrobotOptions = AcrobotOptions()):
        self._max_steps = options.max_steps
        self.spec = EnvSpec(
            name="acrobot",
            observation_space=spaces.Box(-_LIMITS, _LIMITS),
            action_space=spaces.Discrete(3),
            max_episode_steps=self._max_steps,
        )

    def reset(self, key: jax.Array) -> AcrobotState:
        """Two rods that hang down and hardly move."""
        start = jax.random.uniform(key, (4,), jnp.float32, -_START, _START)
        return AcrobotState(*start, num_steps=jnp.int32(0))

    def step(self, state: AcrobotState, action: jax.Array, key: jax.Array) -> tuple[AcrobotState, Transition]:
        """One push, `action` int32 []. Nothing is drawn from `key`."""
        torque = (action - 1).astype(jnp.float32)
        theta_1, theta_2, theta_1_dot, theta_2_dot = _runge_kutta(state[:4], torque)
        state = AcrobotState(
            theta_1=_wrap(theta_1),
            theta_2=_wrap(theta_2),
            theta_1_dot=jnp.clip(theta_1_dot, -_MAX_SPEED_1, _MAX_SPEED_1),
            theta_2_dot=jnp.clip(theta_2_dot, -_MAX_SPEED_2, _MAX_SPEED_2),
            num_steps=state.num_steps + 1,
        )
        terminated = -jnp.cos(state.theta_1) - jnp.cos(state.theta_1 + state.theta_2) > 1.0
        return state, Transition(
            reward=jnp.where(terminated, jnp.float32(0), jnp.float32(-1)),
            discount=1.0 - terminated.astype(jnp.float32),
            last=terminated | (state.num_steps >= self._max_steps),
        )

    def observe(self, state: AcrobotState) -> jax.Array:
        """float32 [6]: cosine and sine of each angle, and the two velocities."""
        angles = [f(angle) for angle in (state.theta_1, state.theta_2) for f in (jnp.cos, jnp.sin)]
        return jnp.stack([*angles, state.theta_1_dot, state.theta_2_dot])

    def render(self, state: AcrobotState) -> jax.Array:
        """The rods from the front and the line, uint8 [160, 160, 3]."""
        # Pixel centres in metres, the upper end at the origin.
        x = ((np.arange(_SIDE) + 0.5 - _SIDE / 2) / _PIXELS_PER_METRE).astype(np.float32)[None, :, None]
        y = -x.swapaxes(0, 1)
        image = np.where(np.abs(y - 1.0) < 0.02, np.array(_LINE, np.uint8), np.array(_BACKGROUND, np.uint8))
        image = jnp.asarray(np.broadcast_to(image, (_SIDE, _SIDE, 3)))
        end_x, end_y, angle = jnp.float32(0), jnp.float32(0), jnp.float32(0)
        for turn, color in ((state.theta_1, _UPPER), (state.theta_2, _LOWER)):
            angle = angle + turn
            to_x, to_y = jnp.sin(angle), -jnp.cos(angle)
            along = jnp.clip((x - end_x) * to_x + (y - end_y) * to_y, 0.0, 1.0)
            rod = jnp.square(x - end_x - along * to_x) + jnp.square(y - end_y - along * to_y) < 0.1**2
            joint = jnp.square(x - end_x) + jnp.square(y - end_y) < 0.06**2
            image = jnp.where(rod, np.array(color, np.uint8)[None, None], image)
            image = jnp.where(joint, np.array(_JOINT, np.uint8)[None, None], image)
            end_x, end_y = end_x + to_x, end_y + to_y
        return image


_Numbers = tuple[jax.Array, ...]


def _derivative(state: _Numbers, torque: jax.Array) -> _Numbers:
    """Velocities and accelerations of the two angles, by the book's equations.

    Masses, lengths and moments of inertia are 1, and the centres of mass are in the middle of the rods.
    """
    theta_1, theta_2, theta_1_dot, theta_2_dot = state
    cos, sin = jnp.cos(theta_2), jnp.sin(theta_2)
    d_1, d_2 = 3.5 + cos, 1.25 + 0.5 * cos
    phi_2 = 0.5 * _GRAVITY * jnp.sin(theta_1 + theta_2)
    phi_1 = (
        -0.5 * jnp.square(theta_2_dot) * sin
        - theta_1_dot * theta_2_dot * sin
        + 1.5 * _GRAVITY * jnp.sin(theta_1)
        + phi_2
    )
    acceleration_2 = (torque + d_2 / d_1 * phi_1 - 0.5 * jnp.square(theta_1_dot) * sin - phi_2) / (
        1.25 - jnp.square(d_2) / d_1
    )
    acceleration_1 = -(d_2 * acceleration_2 + phi_1) / d_1
    return theta_1_dot, theta_2_dot, acceleration_1, acceleration_2


def _runge_kutta(state: _Numbers, torque: jax.Array) -> _Numbers:
    """The state after one step of the classical Runge-Kutta method of fourth order."""

    def after(time: float, slope: _Numbers) -> _Numbers:
        return tuple(x + time * k for x, k in zip(state, slope))

    k_1 = _derivative(state, torque)
    k_2 = _derivative(after(_TIME_STEP / 2, k_1), torque)
    k_3 = _derivative(after(_TIME_STEP / 2, k_2), torque)
    k_4 = _derivative(after(_TIME_STEP, k_3), torque)
    return after(_TIME_STEP / 6, tuple(a + 2 * b + 2 * c + d for a, b, c, d in zip(k_1, k_2, k_3, k_4)))


def _wrap(angle: jax.Array) -> jax.Array:
    """The same angle in [-pi, pi]."""
    return jnp.clip(angle - 2 * math.pi * jnp.round(angle / (2 * math.pi)), -math.pi, math.pi)
