"""MinAtar's Breakout: a paddle keeps a ball in play, which breaks bricks."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.minatar.game import COLUMNS, LEFT, NOOP, RIGHT, ROWS, SIDE, MinAtarGame, MinAtarOptions, moved

__all__ = ["Breakout", "BreakoutOptions"]

_WALL = 2**30 - 1  # three rows of bricks
_CHANNELS = ((96, 165, 250), (255, 215, 64), (120, 104, 48), (239, 108, 96))
_PADDLE, _BALL, _TRAIL, _BRICK = range(4)


@dataclasses.dataclass(frozen=True)
class BreakoutOptions(MinAtarOptions):
    """Options of `Breakout`: those of every game of MinAtar."""


class BreakoutState(NamedTuple):
    """The ball, the paddle in the bottom row, and the bricks of rows 1 to 3.

    Attributes:
      x, y: int32 []; the ball's column and row.
      last_x, last_y: int32 []; the cell that it came from.
      dx, dy: int32 []; its direction, 1 or -1 each.
      paddle: int32 []; the paddle's column.
      bricks: int32 []; bit 10 (row - 1) + column is set where a brick is.
      strike: bool []; the ball has just broken a brick, and enters the next one without effect.
    """

    x: jax.Array
    y: jax.Array
    last_x: jax.Array
    last_y: jax.Array
    dx: jax.Array
    dy: jax.Array
    paddle: jax.Array
    bricks: jax.Array
    strike: jax.Array


class Breakout(MinAtarGame):
    """Breakout.

    Observation: uint8 [10, 10, 4]: paddle, ball, the ball's trail, bricks.
    Action: no-op, left, right.
    Reward: 1 for each brick. When none is left and the ball reaches the bottom row, all come back.
    Start: the ball falls from the left or the right side of row 3, equally likely.
    End: terminates when the ball passes the paddle. See `MinAtarGame` for the rest.
    """

    start_words = 1

    def __init__(self, options: BreakoutOptions = BreakoutOptions()):
        super().__init__("minatar_breakout", _CHANNELS, (NOOP, LEFT, RIGHT), options)

    def start(self, words: jax.Array) -> BreakoutState:
        right = words[0] >> 31 == 1
        x, y = jnp.where(right, jnp.int32(SIDE - 1), 0), jnp.int32(3)
        return BreakoutState(
            x=x,
            y=y,
            last_x=x,
            last_y=y,
            dx=jnp.where(right, jnp.int32(-1), 1),
            dy=jnp.int32(1),
            paddle=jnp.int32(4),
            bricks=jnp.int32(_WALL),
            strike=jnp.bool_(False),
        )

    def draw(self, words: jax.Array) -> tuple[()]:
        """Nothing: a step has no chance."""
        return ()

    def play(
        self, game: BreakoutState, action: jax.Array, chance: tuple[()]
    ) -> tuple[BreakoutState, jax.Array, jax.Array]:
        paddle = moved(game.paddle, action, LEFT, RIGHT, 0, SIDE - 1)
        free_x, y = game.x + game.dx, game.y + game.dy
        x = jnp.clip(free_x, 0, SIDE - 1)
        dx = jnp.where(x == free_x, game.dx, -game.dx)

        place = SIDE * (y - 1) + x
        in_wall = (y >= 1) & (y <= 3)
        bit = jnp.where(in_wall, jnp.int32(1) << jnp.clip(place, 0, 29), 0)
        strike = game.bricks & bit != 0  # while it lasts, no other brick breaks
        breaks = strike & ~game.strike
        bricks = jnp.where(breaks, game.bricks ^ bit, game.bricks)

        bottom = y == SIDE - 1
        bricks = jnp.where(bottom & (bricks == 0), jnp.int32(_WALL), bricks)
        flat = bottom & (game.x == paddle)
        edge = bottom & ~flat & (x == paddle)
        back = breaks | flat | edge
        state = BreakoutState(
            x=x,
            y=jnp.where(back, game.y, jnp.maximum(y, 0)),
            last_x=game.x,
            last_y=game.y,
            dx=jnp.where(edge, -dx, dx),
            dy=jnp.where(back | (y < 0), -game.dy, game.dy),
            paddle=paddle,
            bricks=bricks,
            strike=strike,
        )
        return state, breaks.astype(jnp.int32), bottom & ~flat & ~edge

    def cells(self, game: BreakoutState) -> jax.Array:
        places = SIDE * ROWS + COLUMNS
        in_wall = (places >= SIDE) & (places < 4 * SIDE)
        bricks = jnp.where(in_wall, game.bricks >> np.clip(places - SIDE, 0, 29) & 1, 0) << _BRICK
        paddle = jnp.where(places == game.paddle + SIDE * (SIDE - 1), jnp.int32(1 << _PADDLE), 0)
        ball = jnp.where(places == game.x + SIDE * game.y, jnp.int32(1 << _BALL), 0)
        trail = jnp.where(places == game.last_x + SIDE * game.last_y, jnp.int32(1 << _TRAIL), 0)
        return bricks | paddle | ball | trail
