"""MinAtar's Freeway: a chicken crosses a road with eight lanes of cars."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.chance import below
from envs_jax.minatar.game import COLUMNS, DOWN, NOOP, SIDE, UP, MinAtarGame, MinAtarOptions, cell, moved

__all__ = ["Freeway", "FreewayOptions"]

_STEPS = 2501
_COLUMN = 4  # of the chicken
_REST = 3  # steps between two moves of the chicken
_LANES = np.arange(1, 9, dtype=np.int32)  # of the cars
_CHANNELS = ((255, 215, 64), (239, 108, 96), *((40 + 24 * i, 40 + 24 * i, 56 + 24 * i) for i in range(5)))
_CHICKEN, _CAR, _SPEED = range(3)


@dataclasses.dataclass(frozen=True)
class FreewayOptions(MinAtarOptions):
    """Options of `Freeway`: those of every game of MinAtar, but the game is over after 2,501 steps."""


class FreewayState(NamedTuple):
    """The chicken in column 4, and a car in each of the rows 1 to 8.

    Attributes:
      y: int32 []; the chicken's row.
      rest: int32 []; steps until it can move.
      x: int32 [8]; the cars' columns.
      speed: int32 [8]; a car moves every `abs(speed) + 1` steps, to the right if positive.
      timer: int32 [8]; steps until it moves.
      left: int32 []; steps that are left.
    """

    y: jax.Array
    rest: jax.Array
    x: jax.Array
    speed: jax.Array
    timer: jax.Array
    left: jax.Array


class Freeway(MinAtarGame):
    """Freeway.

    Observation: uint8 [10, 10, 7]: chicken, cars, and five planes with the trails of cars of each speed, 1 the fastest.
    Action: no-op, up, down.
    Reward: 1 for each crossing. The chicken starts anew then, and the cars draw new speeds. A car throws it back to the
      start.
    Start: the cars in column 0, with speeds of 1 to 5 in both directions, all equally likely.
    End: terminates after 2,501 steps. See `MinAtarGame` for the rest.
    """

    start_words, step_words = 4, 4

    def __init__(self, options: FreewayOptions = FreewayOptions()):
        super().__init__("minatar_freeway", _CHANNELS, (NOOP, UP, DOWN), options, _STEPS)

    def start(self, words: jax.Array) -> FreewayState:
        speed = self.draw(words)
        return FreewayState(
            y=jnp.int32(SIDE - 1),
            rest=jnp.int32(_REST),
            x=jnp.zeros(8, jnp.int32),
            speed=speed,
            timer=jnp.abs(speed),
            left=jnp.int32(_STEPS),
        )

    def draw(self, words: jax.Array) -> jax.Array:
        """int32 [8]; the cars' new speeds, two of each word."""
        pair = below(words, 100)
        kind = jnp.concatenate([pair % 10, pair // 10])  # 0 to 9
        return jnp.where(kind < 5, kind + 1, 4 - kind)

    def play(
        self, game: FreewayState, action: jax.Array, chance: jax.Array
    ) -> tuple[FreewayState, jax.Array, jax.Array]:
        acts = (game.rest == 0) & ((action == UP) | (action == DOWN))
        y = jnp.where(acts, moved(game.y, action, UP, DOWN, 0, SIDE - 1), game.y)
        rest = jnp.where(acts, jnp.int32(_REST), game.rest)
        crossed = y == 0
        y = jnp.where(crossed, jnp.int32(SIDE - 1), y)
        speed = jnp.where(crossed, chance, game.speed)
        timer = jnp.where(crossed, jnp.abs(chance), game.timer)

        moves = timer == 0
        x = game.x + jnp.where(moves, jnp.sign(speed), 0)
        x = jnp.where(x < 0, SIDE - 1, jnp.where(x >= SIDE, 0, x))
        hit = jnp.any((y == _LANES) & ((game.x == _COLUMN) | (x == _COLUMN)))
        state = FreewayState(
            y=jnp.where(hit, jnp.int32(SIDE - 1), y),
            rest=jnp.maximum(rest - 1, 0),
            x=x,
            speed=speed,
            timer=jnp.where(moves, jnp.abs(speed), timer - 1),
            left=game.left - 1,
        )
        return state, crossed.astype(jnp.int32), state.left <= 0

    def cells(self, game: FreewayState) -> jax.Array:
        back = game.x - jnp.sign(game.speed)
        back = jnp.where(back < 0, SIDE - 1, jnp.where(back >= SIDE, 0, back))
        trail = jnp.int32(1) << (_SPEED - 1 + jnp.abs(game.speed))
        cars = jnp.where(game.x[:, None] == COLUMNS, jnp.int32(1 << _CAR), 0)
        cars = cars | jnp.where(back[:, None] == COLUMNS, trail[:, None], 0)
        return jnp.pad(cars, ((1, 1), (0, 0))) | cell(jnp.int32(_COLUMN), game.y, _CHICKEN)
