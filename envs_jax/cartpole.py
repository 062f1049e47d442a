"""Cart pole: push a cart left or right to keep the pole on it upright.

From "Neuronlike Adaptive Elements That Can Solve Difficult Learning Control Problems" (Barto, Sutton and Anderson,
1983), with the equations, the Euler integrator and the limits of Gymnasium's `CartPole-v1`, to which it is equal
transition by transition, in float32 where Gymnasium computes in float64.
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

_GRAVITY, _FORCE, _TIME_STEP = 9.8, 10.0, 0.02
_POLE_MASS, _TOTAL_MASS = 0.1, 1.1
_HALF_POLE = 0.5  # metres
_POLE_MASS_LENGTH = _POLE_MASS * _HALF_POLE
_X_LIMIT, _THETA_LIMIT = 2.4, math.radians(12.0)
_START = 0.05

_HEIGHT, _WIDTH, _PIXELS_PER_METRE = 144, 360, 60
_SKY, _RAIL, _CART, _POLE, _AXLE = (24, 26, 36), (90, 96, 116), (96, 165, 250), (255, 183, 94), (239, 108, 96)


@dataclasses.dataclass(frozen=True)
class CartPoleOptions:
    """Options of `CartPole`.

    Attributes:
      max_steps: the time limit, which truncates the episode.
    """

    max_steps: int = 500

    def __post_init__(self):
        if type(self.max_steps) is not int or self.max_steps < 1:
            raise ValueError(f"CartPoleOptions(max_steps={self.max_steps!r}): use an integer of at least 1.")


class CartPoleState(NamedTuple):
    """The cart, the pole and the clock.

    Attributes:
      x: float32 []; position of the cart in metres, 0 in the middle.
      x_dot: float32 []; its velocity in metres per second.
      theta: float32 []; angle of the pole in radians, 0 upright, positive to the right.
      theta_dot: float32 []; its velocity in radians per second.
      num_steps: int32 []; steps taken so far.
    """

    x: jax.Array
    x_dot: jax.Array
    theta: jax.Array
    theta_dot: jax.Array
    num_steps: jax.Array


class CartPole:
    """Cart pole.

    Observation: float32 [4]: x, x_dot, theta, theta_dot.
    Action: `Discrete(2)`; 0 pushes the cart to the left, 1 to the right, with 10 newtons for 0.02 seconds.
    Reward: 1 at every step, the last one included.
    Start: each of the four numbers uniform in [-0.05, 0.05).
    End: terminates when the cart is more than 2.4 metres from the middle or the pole more than 12 degrees from
      upright; else truncated after `max_steps` steps.
    """

    def __init__(self, options: CartPoleOptions = CartPoleOptions()):
        self._max_steps = options.max_steps
        self.spec = EnvSpec(
            name="cartpole",
            observation_space=spaces.Box(-math.inf, math.inf, (4,)),
            action_space=spaces.Discrete(2),
            max_episode_steps=self._max_steps,
        )

    def reset(self, key: jax.Array) -> CartPoleState:
        """A cart near the middle with its pole nearly upright."""
        x, x_dot, theta, theta_dot = jax.random.uniform(key, (4,), jnp.float32, -_START, _START)
        return CartPoleState(x=x, x_dot=x_dot, theta=theta, theta_dot=theta_dot, num_steps=jnp.int32(0))

    def step(self, state: CartPoleState, action: jax.Array, key: jax.Array) -> tuple[CartPoleState, Transition]:
        """One push, `action` int32 []. Nothing is drawn from `key`."""
        force = jnp.where(action == 1, jnp.float32(_FORCE), jnp.float32(-_FORCE))
        cos, sin = jnp.cos(state.theta), jnp.sin(state.theta)
        push = (force + _POLE_MASS_LENGTH * jnp.square(state.theta_dot) * sin) / _TOTAL_MASS
        theta_acceleration = (_GRAVITY * sin - cos * push) / (
            _HALF_POLE * (4.0 / 3.0 - _POLE_MASS * jnp.square(cos) / _TOTAL_MASS)
        )
        x_acceleration = push - _POLE_MASS_LENGTH * theta_acceleration * cos / _TOTAL_MASS
        state = CartPoleState(
            x=state.x + _TIME_STEP * state.x_dot,
            x_dot=state.x_dot + _TIME_STEP * x_acceleration,
            theta=state.theta + _TIME_STEP * state.theta_dot,
            theta_dot=state.theta_dot + _TIME_STEP * theta_acceleration,
            num_steps=state.num_steps + 1,
        )
        terminated = (jnp.abs(state.x) > _X_LIMIT) | (jnp.abs(state.theta) > _THETA_LIMIT)
        return state, Transition(
            reward=jnp.float32(1),
            discount=1.0 - terminated.astype(jnp.float32),
            last=terminated | (state.num_steps >= self._max_steps),
        )

    def observe(self, state: CartPoleState) -> jax.Array:
        """float32 [4]: x, x_dot, theta, theta_dot."""
        return jnp.stack([state.x, state.x_dot, state.theta, state.theta_dot])

    def render(self, state: CartPoleState) -> jax.Array:
        """The cart from the side, uint8 [144, 360, 3]."""
        # Pixel centres in metres, the axle of an upright pole at the origin of y.
        x = ((np.arange(_WIDTH) + 0.5 - _WIDTH / 2) / _PIXELS_PER_METRE).astype(np.float32)[None, :, None]
        y = ((_HEIGHT * 0.7 - np.arange(_HEIGHT) - 0.5) / _PIXELS_PER_METRE).astype(np.float32)[:, None, None]
        from_cart = x - state.x
        sin, cos = jnp.sin(state.theta), jnp.cos(state.theta)
        along = jnp.clip(from_cart * sin + y * cos, 0.0, 2 * _HALF_POLE)
        pole = jnp.square(from_cart - along * sin) + jnp.square(y - along * cos) < 0.06**2
        axle = jnp.square(from_cart) + jnp.square(y) < 0.05**2
        cart = (jnp.abs(from_cart) < 0.3) & (np.abs(y + 0.12) < 0.17)
        rail = (np.abs(y + 0.33) < 0.02) & (np.abs(x) < _X_LIMIT)
        image = np.where(rail, np.array(_RAIL, np.uint8), np.array(_SKY, np.uint8))
        for mask, color in ((cart, _CART), (pole, _POLE), (axle, _AXLE)):
            image = jnp.where(mask, np.array(color, np.uint8)[None, None], image)
        return jnp.asarray(image)
