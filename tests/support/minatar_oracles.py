"""The games of the package `minatar`, and what their states and their chance are in the games of `envs_jax.minatar`.

The package is played through its interface, its attributes and the random numbers that it asks for.
"""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np

from envs_jax.minatar.asterix import AsterixChance
from envs_jax.minatar.seaquest import SeaquestChance

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
ROW = np.arange(10)


class Recorder:
    """A source of random numbers that keeps what it gave."""

    def __init__(self, random: Any):
        self.random, self.given = random, []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.given.append(getattr(self.random, name)(*args, **kwargs))
            return self.given[-1]

        return call


class Original:
    """A game of the package: `play` makes a step without sticky actions, and `given` is its chance."""

    def __init__(self, name: str, seed: int, ramping: bool = True):
        logging.disable(logging.WARNING)  # it says that it cannot draw
        import minatar

        logging.disable(logging.NOTSET)
        self.name, environment = name, minatar.Environment(name, difficulty_ramping=ramping)
        environment.seed(seed)
        self.game = environment.env
        self.random = self.game.random = Recorder(self.game.random)
        self.game.reset()

    def set(self, game: Any) -> None:
        """Sets its state to one of ours."""
        for name, value in attributes(self.name, game).items():
            setattr(self.game, name, value)
        self.game.terminal = False

    def observe(self) -> np.ndarray:
        return np.asarray(self.game.state()).astype(np.uint8)

    def play(self, action: int) -> tuple[int, bool]:
        self.random.given = []
        return self.game.act(action)

    def chance(self) -> Any:
        """The chance of the newest step, as our game takes it; any where there was none."""
        given = self.random.given
        if self.name == "freeway":
            return np.array([car[3] for car in self.game.cars], np.int32)
        if self.name == "asterix":
            side, gold, place = (*given, *(0.0, 0.0, 0)[len(given) :])  # without a place where no row is empty
            empty = sum(x is None for x in self.entities)
            word = np.uint32(int((place + 0.5) / max(empty, 1) * 2**24) << 8)
            return AsterixChance(row=word, gold=np.bool_(gold < 1 / 3), right=np.bool_(side < 0.5))
        if self.name == "seaquest":
            enemy, diver = (given[:3], given[3:]) if len(given) != 2 else ((), given)
            side, kind, row = enemy or (0.0, 0.0, 1)
            diver_side, diver_row = diver or (0.0, 1)
            return SeaquestChance(
                enemy_right=np.bool_(side < 0.5),
                sub=np.bool_(kind < 1 / 3),
                enemy_y=np.int32(row),
                diver_right=np.bool_(diver_side < 0.5),
                diver_y=np.int32(diver_row),
            )
        return ()

    @property
    def entities(self) -> list[Any]:
        """Asterix's, before the newest step."""
        return self._before

    def remember(self) -> None:
        self._before = list(getattr(self.game, "entities", ()))


def attributes(name: str, game: Any) -> dict[str, Any]:
    """The attributes of a game of the package that say the same as a state of ours."""
    return {
        "asterix": _asterix,
        "breakout": _breakout,
        "freeway": _freeway,
        "seaquest": _seaquest,
        "space_invaders": _space_invaders,
    }[name](jax.tree.map(lambda x: x.item() if x.ndim == 0 else x, game))


def found(original: Original, like: dict[str, Any]) -> dict[str, Any]:
    """The same attributes of a game of the package; the order of enemy bullets there has no effect."""
    values = {name: getattr(original.game, name) for name in like}
    return values | ({"e_bullets": sorted(values["e_bullets"])} if "e_bullets" in values else {})


def same(one: Any, other: Any) -> bool:
    """True for equal attributes, of which some are arrays."""
    return all(np.array_equal(x, other[name]) if isinstance(x, np.ndarray) else x == other[name] for name, x in one.items())


def _breakout(game: Any) -> dict[str, Any]:
    bricks = np.zeros((10, 10))
    bricks[1:4] = (game.bricks >> np.arange(30) & 1).reshape(3, 10)
    return {
        "ball_x": game.x,
        "ball_y": game.y,
        "last_x": game.last_x,
        "last_y": game.last_y,
        "ball_dir": {(-1, -1): 0, (1, -1): 1, (1, 1): 2, (-1, 1): 3}[game.dx, game.dy],
        "pos": game.paddle,
        "brick_map": bricks,
        "strike": game.strike,
    }


def _freeway(game: Any) -> dict[str, Any]:
    cars = zip(game.x.tolist(), range(1, 9), game.timer.tolist(), game.speed.tolist())
    return {"pos": game.y, "move_timer": game.rest, "terminate_timer": game.left - 1, "cars": [list(car) for car in cars]}


def _asterix(game: Any) -> dict[str, Any]:
    rows = zip(game.there, game.thing_x.tolist(), range(1, 9), game.right.tolist(), game.gold.tolist())
    return {
        "player_x": game.x,
        "player_y": game.y,
        "entities": [list(thing) if there else None for there, *thing in rows],
        **{name: getattr(game, name) for name in ("spawn_speed", "spawn_timer", "move_speed", "move_timer")},
        "ramp_timer": game.ramp_timer,
        "ramp_index": game.ramp_index,
    }


def _space_invaders(game: Any) -> dict[str, Any]:
    boards = {"alien_map": game.aliens, "f_bullet_map": game.friendly, "e_bullet_map": game.enemy}
    return {
        **{name: (board[:, None] >> ROW & 1).astype(float) for name, board in boards.items()},
        "pos": game.x,
        "alien_dir": game.direction,
        "enemy_move_interval": game.interval,
        "alien_move_timer": game.move_timer,
        "alien_shot_timer": game.enemy_timer,
        "shot_timer": game.shot_timer,
    }


def _seaquest(game: Any) -> dict[str, Any]:
    def rows(things: Any, order: Any, *more: Any) -> list[list[Any]]:
        columns = [x[order].tolist() for x in (things.x, things.y, things.right, *more)]
        return [list(row) for row, there in zip(zip(*columns), things.there[order]) if there]

    enemies = np.roll(np.arange(len(game.sub)), -game.next_enemy)  # the oldest first
    fish, subs = enemies[~game.sub[enemies]], enemies[game.sub[enemies]]
    return {
        "sub_x": game.x,
        "sub_y": game.y,
        "sub_or": game.right,
        "surface": game.surfaced,
        "oxygen": game.oxygen,
        "diver_count": game.aboard,
        "shot_timer": game.shot_timer,
        "e_spawn_speed": game.spawn_speed,
        "e_spawn_timer": game.spawn_timer,
        "d_spawn_timer": game.diver_timer,
        "move_speed": game.move_speed,
        "ramp_index": game.ramp_index,
        "e_fish": rows(game.enemies, fish, game.enemy_moves),
        "e_subs": rows(game.enemies, subs, game.enemy_moves, game.enemy_shoots),
        "e_bullets": sorted(rows(game.bullets, enemies)),
        "f_bullets": rows(game.shots, np.roll(np.arange(4), -game.next_shot)),
        "divers": rows(game.divers, np.roll(np.arange(4), -game.next_diver), game.diver_moves),
    }
