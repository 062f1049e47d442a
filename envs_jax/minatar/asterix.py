"""MinAtar's Asterix: the player takes gold and keeps clear of enemies, which all come from the sides."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.chance import below
from envs_jax.minatar.game import (
    COLUMNS,
    DOWN,
    LEFT,
    NOOP,
    RIGHT,
    SIDE,
    UP,
    MinAtarGame,
    RampingOptions,
    cell,
    moved,
)

__all__ = ["Asterix", "AsterixOptions"]

_LANES = np.arange(1, 9, dtype=np.int32)
_RAMP = 100  # steps between two changes of speed
_CHANNELS = ((96, 165, 250), (239, 108, 96), (96, 96, 110), (255, 215, 64))
_PLAYER, _ENEMY, _TRAIL, _GOLD = range(4)


@dataclasses.dataclass(frozen=True)
class AsterixOptions(RampingOptions):
    """Options of `Asterix`: those of every game of MinAtar that becomes harder."""


class AsterixState(NamedTuple):
    """The player, and at most one thing in each of the rows 1 to 8.

    Attributes:
      x, y: int32 []; the player's column and row.
      there: bool [8]; a thing is in the row.
      thing_x: int32 [8]; its column.
      right: bool [8]; it goes to the right.
      gold: bool [8]; it is gold, not an enemy.
      spawn_speed, spawn_timer: int32 []; steps from a new thing to the next one, and those left.
      move_speed, move_timer: int32 []; the same of the things' moves.
      ramp_timer: int32 []; steps until the speeds change.
      ramp_index: int32 []; changes so far.
    """

    x: jax.Array
    y: jax.Array
    there: jax.Array
    thing_x: jax.Array
    right: jax.Array
    gold: jax.Array
    spawn_speed: jax.Array
    spawn_timer: jax.Array
    move_speed: jax.Array
    move_timer: jax.Array
    ramp_timer: jax.Array
    ramp_index: jax.Array


class AsterixChance(NamedTuple):
    """The new thing of a step.

    Attributes:
      row: uint32 []; a word that chooses among the empty rows.
      gold: bool []; probability 1/3.
      right: bool []; it comes from the left and goes to the right; probability 1/2.
    """

    row: jax.Array
    gold: jax.Array
    right: jax.Array


class Asterix(MinAtarGame):
    """Asterix.

    Observation: uint8 [10, 10, 4]: player, enemies, trails, gold.
    Action: no-op, left, up, right, down.
    Reward: 1 for each gold that the player meets.
    Start: the player in the middle of an empty board.
    End: terminates when the player meets an enemy. See `MinAtarGame` for the rest.
    """

    step_words = 2

    def __init__(self, options: AsterixOptions = AsterixOptions()):
        super().__init__("minatar_asterix", _CHANNELS, (NOOP, LEFT, UP, RIGHT, DOWN), options)
        self._ramping = options.ramping

    def start(self, words: jax.Array) -> AsterixState:
        return AsterixState(
            x=jnp.int32(5),
            y=jnp.int32(5),
            there=jnp.zeros(8, bool),
            thing_x=jnp.zeros(8, jnp.int32),
            right=jnp.zeros(8, bool),
            gold=jnp.zeros(8, bool),
            spawn_speed=jnp.int32(10),
            spawn_timer=jnp.int32(10),
            move_speed=jnp.int32(5),
            move_timer=jnp.int32(5),
            ramp_timer=jnp.int32(_RAMP),
            ramp_index=jnp.int32(0),
        )

    def draw(self, words: jax.Array) -> AsterixChance:
        return AsterixChance(row=words[0], gold=below(words[1], 3) == 0, right=words[1] & 1 == 1)

    def play(
        self, game: AsterixState, action: jax.Array, chance: AsterixChance
    ) -> tuple[AsterixState, jax.Array, jax.Array]:
        game = self._spawned(game, chance)
        x = moved(game.x, action, LEFT, RIGHT, 0, SIDE - 1)
        y = moved(game.y, action, UP, DOWN, 1, SIDE - 2)
        met = game.there & (y == _LANES) & (game.thing_x == x)
        there = game.there & ~(met & game.gold)

        moves = game.move_timer == 0
        thing_x = game.thing_x + jnp.where(moves, jnp.where(game.right, jnp.int32(1), -1), 0)
        there = there & (thing_x >= 0) & (thing_x < SIDE)
        met_later = there & moves & (y == _LANES) & (thing_x == x)
        there = there & ~(met_later & game.gold)
        met = met | met_later
        state = game._replace(
            x=x,
            y=y,
            there=there,
            thing_x=thing_x,
            spawn_timer=game.spawn_timer - 1,
            move_timer=jnp.where(moves, game.move_speed, game.move_timer) - 1,
        )
        # A row has one thing, so no more than one can be met.
        return self._ramped(state), jnp.any(met & game.gold).astype(jnp.int32), jnp.any(met & ~game.gold)

    def _spawned(self, game: AsterixState, chance: AsterixChance) -> AsterixState:
        """The game after its spawn timer has had its effect."""
        due = game.spawn_timer == 0
        empty = (~game.there).astype(jnp.int32)
        place = jnp.cumsum(empty, dtype=jnp.int32)  # of an empty row among them, from 1
        new = due & ~game.there & (place == below(chance.row, place[-1]) + 1)
        return game._replace(
            there=game.there | new,
            thing_x=jnp.where(new, jnp.where(chance.right, jnp.int32(0), SIDE - 1), game.thing_x),
            right=jnp.where(new, chance.right, game.right),
            gold=jnp.where(new, chance.gold, game.gold),
            spawn_timer=jnp.where(due, game.spawn_speed, game.spawn_timer),
        )

    def _ramped(self, game: AsterixState) -> AsterixState:
        """The game after its ramp timer has had its effect."""
        if not self._ramping:
            return game
        ramps = (game.spawn_speed > 1) | (game.move_speed > 1)
        due = ramps & (game.ramp_timer < 0)
        odd = game.ramp_index % 2 == 1
        return game._replace(
            move_speed=game.move_speed - (due & odd & (game.move_speed > 1)).astype(jnp.int32),
            spawn_speed=game.spawn_speed - (due & (game.spawn_speed > 1)).astype(jnp.int32),
            ramp_index=game.ramp_index + due.astype(jnp.int32),
            ramp_timer=jnp.where(due, jnp.int32(_RAMP), game.ramp_timer - ramps.astype(jnp.int32)),
        )

    def cells(self, game: AsterixState) -> jax.Array:
        back = game.thing_x + jnp.where(game.right, jnp.int32(-1), 1)
        kind = jnp.where(game.there, jnp.where(game.gold, jnp.int32(1 << _GOLD), 1 << _ENEMY), 0)
        trail = jnp.where(game.there, jnp.int32(1 << _TRAIL), 0)
        things = jnp.where(game.thing_x[:, None] == COLUMNS, kind[:, None], 0)
        things = things | jnp.where(back[:, None] == COLUMNS, trail[:, None], 0)
        return jnp.pad(things, ((1, 1), (0, 0))) | cell(game.x, game.y, _PLAYER)
