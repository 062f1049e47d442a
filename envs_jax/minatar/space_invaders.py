"""MinAtar's Space Invaders: a cannon shoots at aliens, which come down and shoot back."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.minatar.game import (
    COLUMNS,
    FIRE,
    INDEX,
    LEFT,
    NOOP,
    RIGHT,
    SIDE,
    MinAtarGame,
    RampingOptions,
    cell,
    moved,
)

__all__ = ["SpaceInvaders", "SpaceInvadersOptions"]

_ALIENS = np.array([0b0011111100] * 4 + [0] * 6, np.int32)
_INTERVAL, _LEAST_INTERVAL = 12, 6
_SHOT, _ALIEN_SHOT = 5, 10  # steps between two shots
_LEFT_WALL, _RIGHT_WALL = 1, 1 << SIDE - 1
_ROW = 2**SIDE - 1
_CHANNELS = ((96, 165, 250), (96, 211, 148), (96, 211, 148), (96, 211, 148), (255, 215, 64), (239, 108, 96))
_CANNON, _ALIEN, _TO_LEFT, _TO_RIGHT, _FRIENDLY, _ENEMY = range(6)


@dataclasses.dataclass(frozen=True)
class SpaceInvadersOptions(RampingOptions):
    """Options of `SpaceInvaders`: those of every game of MinAtar that becomes harder."""


class SpaceInvadersState(NamedTuple):
    """The cannon in the bottom row, and boards of aliens and bullets.

    Attributes:
      x: int32 []; the cannon's column.
      aliens: int32 [10]; for each row, bit c is set where an alien is in column c.
      friendly: int32 [10]; the same of the cannon's bullets.
      enemy: int32 [10]; the same of the aliens' bullets.
      direction: int32 []; -1 where the aliens go to the left, else 1.
      interval: int32 []; the largest number of steps between two moves of the aliens.
      move_timer: int32 []; steps until they move.
      enemy_timer: int32 []; steps until they shoot.
      shot_timer: int32 []; steps until the cannon can shoot.
    """

    x: jax.Array
    aliens: jax.Array
    friendly: jax.Array
    enemy: jax.Array
    direction: jax.Array
    interval: jax.Array
    move_timer: jax.Array
    enemy_timer: jax.Array
    shot_timer: jax.Array


class SpaceInvaders(MinAtarGame):
    """Space Invaders.

    Observation: uint8 [10, 10, 6]: cannon, aliens, aliens that go to the left, aliens that go to the right, the
      cannon's bullets, the aliens' bullets.
    Action: no-op, left, right, fire.
    Reward: 1 for each alien that is shot. When none is left, as many come again, and soon move faster.
    Start: 24 aliens in rows 0 to 3.
    End: terminates when an alien or its bullet meets the cannon, or the aliens would leave the board at the bottom. See
      `MinAtarGame` for the rest.
    """

    def __init__(self, options: SpaceInvadersOptions = SpaceInvadersOptions()):
        super().__init__("minatar_space_invaders", _CHANNELS, (NOOP, LEFT, RIGHT, FIRE), options)
        self._least_interval = _LEAST_INTERVAL if options.ramping else _INTERVAL

    def start(self, words: jax.Array) -> SpaceInvadersState:
        return SpaceInvadersState(
            x=jnp.int32(5),
            aliens=jnp.asarray(_ALIENS),
            friendly=jnp.zeros(SIDE, jnp.int32),
            enemy=jnp.zeros(SIDE, jnp.int32),
            direction=jnp.int32(-1),
            interval=jnp.int32(_INTERVAL),
            move_timer=jnp.int32(_INTERVAL),
            enemy_timer=jnp.int32(_ALIEN_SHOT),
            shot_timer=jnp.int32(0),
        )

    def draw(self, words: jax.Array) -> tuple[()]:
        """Nothing: a step has no chance."""
        return ()

    def play(
        self, game: SpaceInvadersState, action: jax.Array, chance: tuple[()]
    ) -> tuple[SpaceInvadersState, jax.Array, jax.Array]:
        fires = (action == FIRE) & (game.shot_timer == 0)
        x = moved(game.x, action, LEFT, RIGHT, 0, SIDE - 1)
        here = jnp.int32(1) << x
        friendly = jnp.append(game.friendly[1:], 0)
        friendly = jnp.where(fires & (INDEX == SIDE - 2), friendly | here, friendly)
        enemy = jnp.pad(game.enemy[:-1], (1, 0))
        over = (enemy[-1] | game.aliens[-1]) & here != 0

        aliens, direction, move_timer, lost = _after_move(game)
        over = over | lost | (aliens[-1] & here != 0)

        shoots = game.enemy_timer == 0
        row, column = _shooter(aliens, x)
        enemy = jnp.where(shoots & (row == INDEX), enemy | (jnp.int32(1) << column), enemy)

        struck = aliens & friendly
        aliens, friendly = aliens ^ struck, friendly ^ struck
        cleared = _union(aliens) == 0
        state = SpaceInvadersState(
            x=x,
            aliens=jnp.where(cleared, _ALIENS, aliens),
            friendly=friendly,
            enemy=enemy,
            direction=direction,
            interval=game.interval - (cleared & (game.interval > self._least_interval)).astype(jnp.int32),
            move_timer=move_timer - 1,
            enemy_timer=jnp.where(shoots, jnp.int32(_ALIEN_SHOT), game.enemy_timer) - 1,
            shot_timer=jnp.maximum(jnp.where(fires, jnp.int32(_SHOT), game.shot_timer) - 1, 0),
        )
        return state, _count(struck), over

    def cells(self, game: SpaceInvadersState) -> jax.Array:
        way = jnp.where(game.direction < 0, jnp.int32(1 << _TO_LEFT), 1 << _TO_RIGHT)
        boards = ((game.aliens, way | (1 << _ALIEN)), (game.friendly, 1 << _FRIENDLY), (game.enemy, 1 << _ENEMY))
        result = cell(game.x, jnp.int32(SIDE - 1), _CANNON)
        for board, bits in boards:
            result = result | (board[:, None] >> COLUMNS & 1) * bits
        return result


def _after_move(game: SpaceInvadersState) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Aliens, direction and timer after the timer has had its effect, and True if they were at the bottom already."""
    due = game.move_timer == 0
    wall = jnp.where(game.direction < 0, jnp.int32(_LEFT_WALL), _RIGHT_WALL)
    turns = due & (_union(game.aliens) & wall != 0)
    sideways = jnp.where(game.direction < 0, game.aliens >> 1, game.aliens << 1)
    down = jnp.roll(game.aliens, 1)
    aliens = jnp.where(turns, down, jnp.where(due, sideways, game.aliens))
    direction = jnp.where(turns, -game.direction, game.direction)
    timer = jnp.where(due, jnp.minimum(_count(game.aliens), game.interval), game.move_timer)
    return aliens, direction, timer, turns & (game.aliens[-1] != 0)


def _shooter(aliens: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row and column of the lowest alien in the column nearest to `x`, of two such columns the left one."""
    distance = 2 * jnp.abs(INDEX - x) + (x < INDEX).astype(jnp.int32)
    nearest = jnp.min(jnp.where(_union(aliens) >> INDEX & 1 == 1, distance, 2 * SIDE))
    column = x + jnp.where(nearest & 1 == 1, nearest >> 1, -(nearest >> 1))
    return jnp.max(jnp.where(aliens >> column & 1 == 1, INDEX, -1)), column


def _union(board: jax.Array) -> jax.Array:
    """int32 []; bit c is set where column c has something."""
    return jnp.bitwise_or.reduce(board)


def _count(board: jax.Array) -> jax.Array:
    """int32 []; the number of set bits."""
    return jnp.sum(jax.lax.population_count(board), dtype=jnp.int32)
