"""MinAtar's Seaquest: a submarine shoots at fish and submarines, and brings divers to the surface."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.chance import below
from envs_jax.minatar.game import (
    ALL_ACTIONS,
    COLUMNS,
    DOWN,
    FIRE,
    LEFT,
    RIGHT,
    ROWS,
    SIDE,
    UP,
    MinAtarGame,
    RampingOptions,
    cell,
    moved,
)

__all__ = ["Seaquest", "SeaquestOptions"]

ENEMIES, SHOTS, DIVERS = 32, 4, 4
"""Places. None is taken again before it is free: at most 30 enemies come in the 30 steps that one lives at the highest
speed, and fewer at lower ones."""

_OXYGEN, _MOST_DIVERS = 200, 6
_SPAWN, _SPAWN_DIVER, _MOVE, _LEAST_MOVE, _MOVE_DIVER = 20, 30, 5, 2, 5
_SHOT, _ENEMY_SHOT = 5, 10
_CHANNELS = (
    *((96, 165, 250), (56, 96, 150), (255, 255, 255), (70, 70, 84), (239, 108, 96)),
    *((250, 150, 60), (190, 90, 200), (80, 190, 220), (255, 215, 64), (255, 215, 64)),
)
_FRONT, _BACK, _FRIENDLY, _TRAIL, _BULLET, _FISH, _SUB, _AIR, _ABOARD, _DIVER = range(10)


@dataclasses.dataclass(frozen=True)
class SeaquestOptions(RampingOptions):
    """Options of `Seaquest`: those of every game of MinAtar that becomes harder."""


class Things(NamedTuple):
    """N things that move sideways.

    Attributes:
      there: bool [N]; False where the place is free.
      x, y: int32 [N]; columns and rows.
      right: bool [N]; they go to the right.
    """

    there: jax.Array
    x: jax.Array
    y: jax.Array
    right: jax.Array


class SeaquestState(NamedTuple):
    """The player's submarine and all things in the sea.

    Attributes:
      x, y: int32 []; the player's column and row; row 0 is the surface.
      right: bool []; it faces to the right.
      surfaced: bool []; it has not dived since it was last at the surface.
      oxygen: int32 []; steps until it is used up.
      aboard: int32 []; divers aboard; -1 after a full load, as in the original.
      shot_timer: int32 []; steps until the player can shoot.
      spawn_speed, spawn_timer: int32 []; steps from an enemy to the next one, and those left.
      diver_timer: int32 []; steps until the next diver comes.
      move_speed: int32 []; an enemy moves every `move_speed + 1` steps.
      ramp_index: int32 []; number of changes of these speeds.
      enemies: `Things` [32]; fish and submarines. A new one takes the next place of a ring: see `next_enemy`.
      sub: bool [32]; it is a submarine.
      enemy_moves: int32 [32]; steps until it moves.
      enemy_shoots: int32 [32]; steps until it shoots, if it is a submarine.
      next_enemy: int32 []; place of the next enemy, which is also that of the oldest.
      bullets: `Things` [32]; the bullet of the enemy of the same place, or of the one before it there.
      shots: `Things` [4]; the player's bullets, a ring.
      next_shot: int32 []; place of the next one.
      divers: `Things` [4]; a ring.
      diver_moves: int32 [4]; steps until it moves.
      next_diver: int32 []; place of the next one, which is also that of the oldest.
    """

    x: jax.Array
    y: jax.Array
    right: jax.Array
    surfaced: jax.Array
    oxygen: jax.Array
    aboard: jax.Array
    shot_timer: jax.Array
    spawn_speed: jax.Array
    spawn_timer: jax.Array
    diver_timer: jax.Array
    move_speed: jax.Array
    ramp_index: jax.Array
    enemies: Things
    sub: jax.Array
    enemy_moves: jax.Array
    enemy_shoots: jax.Array
    next_enemy: jax.Array
    bullets: Things
    shots: Things
    next_shot: jax.Array
    divers: Things
    diver_moves: jax.Array
    next_diver: jax.Array


class SeaquestChance(NamedTuple):
    """The enemy and the diver that a step may bring.

    Attributes:
      enemy_right, diver_right: bool []; they go to the right; probability 1/2.
      sub: bool []; the enemy is a submarine; probability 1/3.
      enemy_y, diver_y: int32 []; rows, uniform over 1 to 8.
    """

    enemy_right: jax.Array
    sub: jax.Array
    enemy_y: jax.Array
    diver_right: jax.Array
    diver_y: jax.Array


class Seaquest(MinAtarGame):
    """Seaquest.

    Observation: uint8 [10, 10, 10]: the player's front and back, its bullets, trails, enemy bullets, fish, enemy
      submarines, the bar of oxygen and that of divers aboard in the bottom row, divers.
    Action: all six.
    Reward: 1 for each enemy that is shot; oxygen left / 20 for each time that six divers are brought to the surface.
    Start: the player at the surface, facing left.
    End: terminates when the player meets an enemy or a bullet, without oxygen, or at the surface without a diver. See
      `MinAtarGame` for the rest.
    """

    step_words = 2

    def __init__(self, options: SeaquestOptions = SeaquestOptions()):
        super().__init__("minatar_seaquest", _CHANNELS, ALL_ACTIONS, options)
        self._ramping = options.ramping

    def start(self, words: jax.Array) -> SeaquestState:
        def no_things(number: int) -> Things:
            no, zeros = jnp.zeros(number, bool), jnp.zeros(number, jnp.int32)
            return Things(there=no, x=zeros, y=zeros, right=no)

        return SeaquestState(
            x=jnp.int32(5),
            y=jnp.int32(0),
            right=jnp.bool_(False),
            surfaced=jnp.bool_(True),
            oxygen=jnp.int32(_OXYGEN),
            aboard=jnp.int32(0),
            shot_timer=jnp.int32(0),
            spawn_speed=jnp.int32(_SPAWN),
            spawn_timer=jnp.int32(_SPAWN),
            diver_timer=jnp.int32(_SPAWN_DIVER),
            move_speed=jnp.int32(_MOVE),
            ramp_index=jnp.int32(0),
            enemies=no_things(ENEMIES),
            sub=jnp.zeros(ENEMIES, bool),
            enemy_moves=jnp.zeros(ENEMIES, jnp.int32),
            enemy_shoots=jnp.zeros(ENEMIES, jnp.int32),
            next_enemy=jnp.int32(0),
            bullets=no_things(ENEMIES),
            shots=no_things(SHOTS),
            next_shot=jnp.int32(0),
            divers=no_things(DIVERS),
            diver_moves=jnp.zeros(DIVERS, jnp.int32),
            next_diver=jnp.int32(0),
        )

    def draw(self, words: jax.Array) -> SeaquestChance:
        bits = words[0].astype(jnp.int32)
        return SeaquestChance(
            enemy_right=bits & 1 == 1,
            sub=below(words[1], 3) == 0,
            enemy_y=1 + (bits >> 1 & 7),
            diver_right=bits >> 4 & 1 == 1,
            diver_y=1 + (bits >> 5 & 7),
        )

    def play(
        self, game: SeaquestState, action: jax.Array, chance: SeaquestChance
    ) -> tuple[SeaquestState, jax.Array, jax.Array]:
        game = _with_diver(_with_enemy(game, chance), chance)
        game = _after_action(game, action)
        game, shot = _after_shots(game)
        game = _after_divers(game)
        game, shot_later, met = _after_enemies(game)
        game, struck = _after_bullets(game)
        game = game._replace(
            spawn_timer=jnp.maximum(game.spawn_timer - 1, 0),
            diver_timer=jnp.maximum(game.diver_timer - 1, 0),
            shot_timer=jnp.maximum(game.shot_timer - 1, 0),
        )
        game, bonus, drowned = self._after_breath(game)
        return game, shot + shot_later + bonus, met | struck | drowned

    def _after_breath(self, game: SeaquestState) -> tuple[SeaquestState, jax.Array, jax.Array]:
        """The game, the reward of divers, and the end, by oxygen and the surface."""
        empty = game.oxygen <= 0
        surfaces = (game.y == 0) & ~game.surfaced
        lost = surfaces & (game.aboard == 0)
        saved = surfaces & (game.aboard != 0)
        full = saved & (game.aboard == _MOST_DIVERS)
        bonus = jnp.where(full, game.oxygen // 20, 0)
        can_ramp = (game.spawn_speed > 1) | (game.move_speed > _LEAST_MOVE)
        ramps = saved & can_ramp if self._ramping else jnp.bool_(False)
        faster = ramps & (game.move_speed > _LEAST_MOVE) & (game.ramp_index % 2 == 1)
        dived = game.y > 0
        state = game._replace(
            oxygen=jnp.where(saved, jnp.int32(_OXYGEN), game.oxygen - dived.astype(jnp.int32)),
            surfaced=(game.surfaced & ~dived) | saved,
            aboard=jnp.where(full, jnp.int32(0), game.aboard) - saved.astype(jnp.int32),
            move_speed=game.move_speed - faster.astype(jnp.int32),
            spawn_speed=game.spawn_speed - (ramps & (game.spawn_speed > 1)).astype(jnp.int32),
            ramp_index=game.ramp_index + ramps.astype(jnp.int32),
        )
        return state, bonus, empty | lost

    def cells(self, game: SeaquestState) -> jax.Array:
        enemies, divers = game.enemies, game.divers
        kinds = jnp.where(game.sub, jnp.int32(1 << _SUB), 1 << _FISH)
        planes = _lit(enemies, kinds) | _lit(game.bullets, np.int32(1 << _BULLET))
        planes = planes | _lit(_behind(enemies), np.int32(1 << _TRAIL)) | _lit(_behind(divers), np.int32(1 << _TRAIL))
        planes = planes | _lit(divers, np.int32(1 << _DIVER)) | _lit(game.shots, np.int32(1 << _FRIENDLY))
        planes = planes | cell(game.x, game.y, _FRONT)
        planes = planes | cell(game.x + jnp.where(game.right, jnp.int32(-1), 1), game.y, _BACK)
        air = jnp.where(game.oxygen * SIDE // _OXYGEN > COLUMNS, jnp.int32(1 << _AIR), 0)
        aboard = (SIDE - 1 - game.aboard <= COLUMNS) & (COLUMNS < SIDE - 1)
        bars = air | jnp.where(aboard, jnp.int32(1 << _ABOARD), 0)
        return planes | jnp.where(ROWS == SIDE - 1, bars, 0)


def _with_enemy(game: SeaquestState, chance: SeaquestChance) -> SeaquestState:
    """Step 1: the enemy that is due comes, unless another one in its row goes the other way."""
    due, old = game.spawn_timer == 0, game.enemies
    comes = due & ~jnp.any(old.there & (old.y == chance.enemy_y) & (old.right != chance.enemy_right))
    new = comes & (np.arange(ENEMIES, dtype=np.int32) == game.next_enemy)
    return game._replace(
        enemies=_added(old, new, chance.enemy_right, chance.enemy_y),
        sub=jnp.where(new, chance.sub, game.sub),
        enemy_moves=jnp.where(new, game.move_speed, game.enemy_moves),
        enemy_shoots=jnp.where(new, jnp.int32(_ENEMY_SHOT), game.enemy_shoots),
        next_enemy=(game.next_enemy + comes.astype(jnp.int32)) % ENEMIES,
        spawn_timer=jnp.where(due, game.spawn_speed, game.spawn_timer),
    )


def _with_diver(game: SeaquestState, chance: SeaquestChance) -> SeaquestState:
    """Step 1: the diver that is due comes."""
    due = game.diver_timer == 0
    new = due & (np.arange(DIVERS, dtype=np.int32) == game.next_diver)
    return game._replace(
        divers=_added(game.divers, new, chance.diver_right, chance.diver_y),
        diver_moves=jnp.where(new, jnp.int32(_MOVE_DIVER), game.diver_moves),
        next_diver=(game.next_diver + due.astype(jnp.int32)) % DIVERS,
        diver_timer=jnp.where(due, jnp.int32(_SPAWN_DIVER), game.diver_timer),
    )


def _after_action(game: SeaquestState, action: jax.Array) -> SeaquestState:
    """Step 2: the player shoots or moves."""
    fires = (action == FIRE) & (game.shot_timer == 0)
    new = fires & (np.arange(SHOTS, dtype=np.int32) == game.next_shot)
    old = game.shots
    return game._replace(
        shots=Things(
            there=old.there | new,
            x=jnp.where(new, game.x, old.x),
            y=jnp.where(new, game.y, old.y),
            right=jnp.where(new, game.right, old.right),
        ),
        next_shot=(game.next_shot + fires.astype(jnp.int32)) % SHOTS,
        shot_timer=jnp.where(fires, jnp.int32(_SHOT), game.shot_timer),
        x=moved(game.x, action, LEFT, RIGHT, 0, SIDE - 1),
        y=moved(game.y, action, UP, DOWN, 0, SIDE - 2),
        right=(game.right | (action == RIGHT)) & (action != LEFT),
    )


def _after_shots(game: SeaquestState) -> tuple[SeaquestState, jax.Array]:
    """Step 3: the player's bullets move; the game and the number of enemies that they meet."""
    game = game._replace(shots=_moved(game.shots, jnp.bool_(True)))
    return _struck(game, jnp.ones(ENEMIES, bool), first=~game.sub)


def _after_divers(game: SeaquestState) -> SeaquestState:
    """Step 4: divers move, and come aboard."""
    old, due = game.divers, game.diver_moves == 0
    new = _moved(old, due)
    meets = _at(old, game) | _at(new, game)
    age = (game.next_diver - 1 - np.arange(DIVERS, dtype=np.int32)) % DIVERS  # of the oldest, DIVERS - 1
    before = jnp.sum(meets[None, :] & (age[None, :] > age[:, None]), axis=1, dtype=jnp.int32)
    taken = meets & (game.aboard + before < _MOST_DIVERS)
    return game._replace(
        divers=new._replace(there=new.there & ~taken),
        diver_moves=jnp.where(due, jnp.int32(_MOVE_DIVER), game.diver_moves - 1),
        aboard=game.aboard + jnp.sum(taken, dtype=jnp.int32),
    )


def _after_enemies(game: SeaquestState) -> tuple[SeaquestState, jax.Array, jax.Array]:
    """Steps 5 and 7: submarines, then fish move; the game, the number of those shot, and True if the player is met."""
    old, due = game.enemies, game.enemy_moves == 0
    new = _moved(old, due)
    met = jnp.any(_at(old, game) | _at(new, game))
    shoots = old.there & game.sub & (game.enemy_shoots == 0)
    bullets = game.bullets
    game = game._replace(
        enemies=new,
        enemy_moves=jnp.where(due, game.move_speed, game.enemy_moves - 1),
        enemy_shoots=jnp.where(shoots, jnp.int32(_ENEMY_SHOT), game.enemy_shoots - 1),
        bullets=Things(
            there=bullets.there | shoots,
            x=jnp.where(shoots, new.x, bullets.x),
            y=jnp.where(shoots, new.y, bullets.y),
            right=jnp.where(shoots, new.right, bullets.right),
        ),
    )
    game, number = _struck(game, due, first=game.sub)
    return game, number, met


def _after_bullets(game: SeaquestState) -> tuple[SeaquestState, jax.Array]:
    """Step 6: the enemies' bullets move; the game, and True if one meets the player."""
    new = _moved(game.bullets, jnp.bool_(True))
    return game._replace(bullets=new), jnp.any(_at(game.bullets, game) | _at(new, game))


def _struck(game: SeaquestState, can: jax.Array, first: jax.Array) -> tuple[SeaquestState, jax.Array]:
    """The game without the player's bullets that are on an enemy, and without one enemy for each; their number.

    Args:
      game: the game.
      can: bool [32]; enemies that may be struck.
      first: bool [32]; enemies that are struck before the others; among these, the oldest is.
    """
    enemies, shots = game.enemies, game.shots
    here = (enemies.x[None, :] == shots.x[:, None]) & (enemies.y[None, :] == shots.y[:, None])
    here = here & shots.there[:, None] & (enemies.there & can)[None, :]
    turn = (np.arange(ENEMIES, dtype=np.int32) - game.next_enemy) % ENEMIES + jnp.where(first, jnp.int32(0), ENEMIES)
    turn = jnp.where(here, turn[None, :], 2 * ENEMIES)
    best = jnp.min(turn, axis=1)
    strikes = best < 2 * ENEMIES
    gone = jnp.any(strikes[:, None] & (turn == best[:, None]), axis=0)
    state = game._replace(
        enemies=enemies._replace(there=enemies.there & ~gone), shots=shots._replace(there=shots.there & ~strikes)
    )
    return state, jnp.sum(strikes, dtype=jnp.int32)


def _added(things: Things, new: jax.Array, right: jax.Array, y: jax.Array) -> Things:
    """Things and, where `new`, one at the left or right side."""
    return Things(
        there=things.there | new,
        x=jnp.where(new, jnp.where(right, jnp.int32(0), SIDE - 1), things.x),
        y=jnp.where(new, y, things.y),
        right=jnp.where(new, right, things.right),
    )


def _moved(things: Things, due: jax.Array) -> Things:
    """Things of which those that are due have moved by one cell; those off the board are gone."""
    x = jnp.where(due, things.x + jnp.where(things.right, jnp.int32(1), -1), things.x)
    return things._replace(x=x, there=things.there & (x >= 0) & (x < SIDE))


def _behind(things: Things) -> Things:
    """The cells that things came from."""
    return things._replace(x=things.x + jnp.where(things.right, jnp.int32(-1), 1))


def _at(things: Things, game: SeaquestState) -> jax.Array:
    """bool [N]: those at the player's cell."""
    return things.there & (things.x == game.x) & (things.y == game.y)


def _lit(things: Things, bits: np.int32 | jax.Array) -> jax.Array:
    """int32 [10, 10], with `bits` at the cells of things."""
    bits = jnp.where(things.there, bits, 0)
    rows = jnp.where(things.y[None, :] == ROWS, bits[None, :], 0)
    return jnp.bitwise_or.reduce(jnp.where((things.x[None, :] == ROWS)[None], rows[:, None], 0), axis=-1)
