"""Mountain car: rock a car out of a valley with an engine too weak to climb the hill directly.

From "Efficient Memory-based Learning for Robot Control" (Moore, 1990), with the equations and the limits of Gymnasium's
`MountainCar-v0`, to which it is equal transition by transition, in float32 where Gymnasium computes in float64. The
continuous variant, `envs_jax.mountain_car_continuous`, has the same valley.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, Transition

_FORCE, _GRAVITY, _GOAL = 0.001, 0.0025, 0.5
_LEFT, _RIGHT, _MAX_SPEED = -1.2, 0.6, 0.07
_START = (-0.6, -0.4)

_LIMITS = np.array([_RIGHT, _MAX_SPEED], np.float32)
OBSERVATION_SPACE = spaces.Box(np.array([_LEFT, -_MAX_SPEED], np.float32), _LIMITS)

_HEIGHT, _WIDTH, _PIXELS_PER_UNIT = 144, 216, 120
_SKY, _HILL, _CAR, _FLAG = (24, 26, 36), (90, 96, 116), (96, 165, 250), (255, 183, 94)


@dataclasses.dataclass(frozen=True)
class MountainCarOptions:
    """Options of `MountainCar`.

    Attributes:
      max_steps: the time limit, which truncates the episode.
    """

    max_steps: int = 200

    def __post_init__(self):
        if type(self.max_steps) is not int or self.max_steps < 1:
            raise ValueError(f"{type(self).__name__}(max_steps={self.max_steps!r}): use an integer of at least 1.")


class MountainCarState(NamedTuple):
    """The car and the clock.

    Attributes:
      position: float32 []; along the horizontal axis, in [-1.2, 0.6]; the bottom of the valley is at -pi / 6.
      velocity: float32 []; change of the position a step, in [-0.07, 0.07].
      num_steps: int32 []; steps taken so far.
    """

    position: jax.Array
    velocity: jax.Array
    num_steps: jax.Array


class MountainCar:
    """Mountain car.

    Observation: float32 [2]: position, velocity.
    Action: `Discrete(3)`; 0 pushes the car to the left, 2 to the right, 1 does not push.
    Reward: -1 at every step, the last one included.
    Start: at rest, the position uniform in [-0.6, -0.4).
    End: terminates at a position of at least 0.5 with a velocity of at least 0; else truncated after `max_steps` steps.
    """

    def __init__(self, options: MountainCarOptions = MountainCarOptions()):
        self._max_steps = options.max_steps
        self.spec = EnvSpec(
            name="mountain_car",
            observation_space=OBSERVATION_SPACE,
            action_space=spaces.Discrete(3),
            max_episode_steps=self._max_steps,
        )

    def reset(self, key: jax.Array) -> MountainCarState:
        """A car at rest near the bottom of the valley."""
        return start(key)

    def step(self, state: MountainCarState, action: jax.Array, key: jax.Array) -> tuple[MountainCarState, Transition]:
        """One push, `action` int32 []. Nothing is drawn from `key`."""
        state = drive(state, (action - 1).astype(jnp.float32) * _FORCE)
        terminated = at_goal(state, _GOAL)
        return state, Transition(
            reward=jnp.float32(-1),
            discount=1.0 - terminated.astype(jnp.float32),
            last=terminated | (state.num_steps >= self._max_steps),
        )

    def observe(self, state: MountainCarState) -> jax.Array:
        """float32 [2]: position, velocity."""
        return jnp.stack([state.position, state.velocity])

    def render(self, state: MountainCarState) -> jax.Array:
        """The valley from the side, uint8 [144, 216, 3]."""
        return draw(state, _GOAL)


def start(key: jax.Array) -> MountainCarState:
    """Draws a car at rest near the bottom of the valley."""
    position = jax.random.uniform(key, (), jnp.float32, *_START)
    return MountainCarState(position=position, velocity=jnp.float32(0), num_steps=jnp.int32(0))


def drive(state: MountainCarState, acceleration: jax.Array) -> MountainCarState:
    """Moves the car by one step; `acceleration` float32 [] is the engine's."""
    velocity = state.velocity + acceleration - _GRAVITY * jnp.cos(3 * state.position)
    velocity = jnp.clip(velocity, -_MAX_SPEED, _MAX_SPEED)
    position = jnp.clip(state.position + velocity, _LEFT, _RIGHT)
    # The wall on the left stops the car; the one on the right is beyond the goal.
    velocity = jnp.where((position <= np.float32(_LEFT)) & (velocity < 0), jnp.float32(0), velocity)
    return MountainCarState(position, velocity, state.num_steps + 1)


def at_goal(state: MountainCarState, goal: float) -> jax.Array:
    """Returns True for a car at the goal or beyond that does not roll back."""
    return (state.position >= goal) & (state.velocity >= 0)


def draw(state: MountainCarState, goal: float) -> jax.Array:
    """The valley from the side, uint8 [144, 216, 3], with a flag at the goal."""

    def height(x):
        return 0.45 * np.sin(3 * x) + 0.55

    x = (_LEFT + (np.arange(_WIDTH) + 0.5) / _PIXELS_PER_UNIT).astype(np.float32)[None, :, None]
    y = ((_HEIGHT - np.arange(_HEIGHT) - 0.5) / _PIXELS_PER_UNIT).astype(np.float32)[:, None, None]
    image = np.where(y < height(x), np.array(_HILL, np.uint8), np.array(_SKY, np.uint8))
    pole = (np.abs(x - goal) < 0.01) & (y > height(goal)) & (y < height(goal) + 0.16)
    image = np.where(pole, np.array(_FLAG, np.uint8), image)
    centre = 0.45 * jnp.sin(3 * state.position) + 0.6
    car = jnp.square(x - state.position) + jnp.square(y - centre) < 0.05**2
    return jnp.where(car, np.array(_CAR, np.uint8)[None, None], image)
