"""The games of the package `minatar`, and what their states and their chance are in the games of `envs_jax.minatar`.

The package is played through its interface, its attributes and the random numbers that it asks for.
"""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np

import envs_jax
from envs_jax.minatar.asterix import AsterixChance
from envs_jax.minatar.game import UP, MinAtarState
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
        self._rows = list(getattr(self.game, "entities", ()))  # Asterix's, of which the empty ones are drawn from
        return self.game.act(action)

    def found(self, like: dict[str, Any]) -> dict[str, Any]:
        """Its attributes of the same names; the order of enemy bullets has no effect."""
        values = {name: getattr(self.game, name) for name in like}
        return values | ({"e_bullets": sorted(values["e_bullets"])} if "e_bullets" in values else {})

    def chance(self) -> Any:
        """The chance of the newest step, as our game takes it; any where there was none."""
        given = self.random.given
        if self.name == "freeway":
            return np.array([car[3] for car in self.game.cars], np.int32)
        if self.name == "asterix":
            side, gold, place = (*given, *(0.0, 0.0, 0)[len(given) :])  # without a place where no row is empty
            empty = sum(x is None for x in self._rows)
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


def compare(name: str, num_lanes: int, num_steps: int, seed: int, later: bool) -> dict[str, int]:
    """Plays the package and our game side by side with random actions, and asserts that they are equal in every step.

    Equal are the observation, the reward, the end, and all attributes, also those of games that are over.

    Args:
      name: of the game.
      num_lanes: games at a time.
      num_steps: steps of each; a game that is over begins anew.
      seed: of actions and chance.
      later: True begins with states that random play seldom sees (`later_state`).

    Returns:
      The sum of rewards, and the number of games that ended.
    """
    environment, rng = envs_jax.make(f"minatar_{name}"), np.random.default_rng(seed)

    @jax.jit
    @jax.vmap
    def step(game: Any, action: jax.Array, chance: Any) -> Any:
        game, reward, over = environment.play(game, action, chance)
        return game, reward, over, environment.observe(MinAtarState(game, action, action))

    def begin(i: int) -> None:
        start = jax.tree.map(lambda x: x[i], starts)
        jax.tree.map(lambda x, y: x.__setitem__(i, y), games, later_state(name, start, rng) if later else start)
        originals[i].set(jax.tree.map(lambda x: x[i], games))

    words = rng.integers(0, 2**32, (num_lanes, environment.start_words), np.uint32)
    starts = jax.tree.map(np.array, jax.jit(jax.vmap(environment.start))(words))
    originals = [Original(name, seed + i) for i in range(num_lanes)]
    games, found = jax.tree.map(np.copy, starts), {"reward": 0, "ends": 0}
    for i in range(num_lanes):
        begin(i)
    for t in range(num_steps):
        actions = rng.integers(0, 6, num_lanes).astype(np.int32)
        if name == "freeway":  # at random, the chicken hardly crosses the road
            actions[rng.random(num_lanes) < 0.7] = UP
        theirs = [original.play(int(action)) for original, action in zip(originals, actions)]
        chance = jax.tree.map(lambda *x: np.stack(x), *[original.chance() for original in originals])
        games, rewards, over, seen = jax.tree.map(np.array, step(games, actions, chance))
        for i, original in enumerate(originals):
            where = f"{name}, lane {i}, step {t}"
            assert theirs[i] == (rewards[i], over[i]), where
            np.testing.assert_array_equal(seen[i], original.observe(), where)
            expected = attributes(name, jax.tree.map(lambda x, i=i: x[i], games))
            assert same(expected, original.found(expected)), where
            if over[i]:
                begin(i)
        found = {"reward": found["reward"] + int(sum(rewards)), "ends": found["ends"] + int(sum(over))}
    return found


def later_state(name: str, start: Any, rng: np.random.Generator) -> Any:
    """A state of a game that is fast, crowded or nearly over."""
    return {
        "asterix": _late_asterix,
        "breakout": _late_breakout,
        "freeway": _late_freeway,
        "seaquest": _late_seaquest,
    }.get(name, _late_space_invaders)(start, rng)


def _late_asterix(game: Any, rng: np.random.Generator) -> Any:
    return game._replace(
        spawn_speed=np.int32(rng.integers(1, 11)),
        spawn_timer=np.int32(0),
        move_speed=np.int32(rng.integers(1, 6)),
        ramp_timer=np.int32(rng.integers(-1, 5)),
        ramp_index=np.int32(rng.integers(0, 9)),
    )


def _late_breakout(game: Any, rng: np.random.Generator) -> Any:
    few = (0, 1 << int(rng.integers(0, 30)), int(rng.integers(0, 2**30) & rng.integers(0, 2**30)))
    return game._replace(
        bricks=np.int32(few[rng.integers(3)]),
        x=np.int32(rng.integers(0, 10)),
        y=np.int32(rng.integers(4, 9)),
        dx=np.int32(rng.choice([-1, 1])),
        dy=np.int32(rng.choice([-1, 1])),
        paddle=np.int32(rng.integers(0, 10)),
    )


def _late_freeway(game: Any, rng: np.random.Generator) -> Any:
    return game._replace(left=np.int32(rng.integers(1, 200)), y=np.int32(rng.integers(1, 10)))


def _late_space_invaders(game: Any, rng: np.random.Generator) -> Any:
    aliens = np.bitwise_and.reduce(rng.integers(0, 1024, (3, 10)))
    aliens[9] &= rng.choice([0, 1023])
    if rng.random() < 0.5 or not aliens.any():
        aliens[:] = 0
        aliens[rng.integers(10)] = 1 << rng.integers(10)
    return game._replace(
        aliens=aliens.astype(np.int32),
        direction=np.int32(rng.choice([-1, 1])),
        move_timer=np.int32(rng.integers(0, 4)),
        enemy_timer=np.int32(rng.integers(0, 4)),
        interval=np.int32(rng.integers(6, 13)),
        x=np.int32(rng.integers(0, 10)),
    )


def _late_seaquest(game: Any, rng: np.random.Generator) -> Any:
    """Half of the time crowded, with several enemies in one cell, and at the highest speed.

    Places of a ring that come next are free, and enemies in the others leave the board before it comes to them.
    """
    N, crowded = len(game.sub), rng.random() < 0.5
    ramps = 19 if crowded else int(rng.integers(20))
    ways, rows = rng.random(10) < 0.5, rng.integers(1, 9, N)  # all enemies of a row go one way
    next_enemy, next_diver = rng.integers(N), rng.integers(4)
    enemies = game.enemies._replace(
        there=(rng.random(N) < 0.9 * crowded) & ((np.arange(N) - next_enemy) % N >= N // 2),
        x=np.where(ways[rows], rng.integers(5, 10, N), rng.integers(0, 5, N)).astype(np.int32),
        y=rows.astype(np.int32),
        right=ways[rows],
    )
    return game._replace(
        x=np.int32(rng.integers(1, 9)),
        y=np.int32(rng.integers(0, 9)),
        right=np.bool_(rng.random() < 0.5),
        surfaced=np.bool_(rng.random() < 0.2),
        aboard=np.int32(rng.integers(-1, 7)),
        oxygen=np.int32(rng.integers(0, 201)),
        spawn_speed=np.int32(max(20 - ramps, 1)),
        spawn_timer=np.int32(rng.integers(0, 3)),
        diver_timer=np.int32(rng.integers(0, 3)),
        move_speed=np.int32(max(5 - ramps // 2, 2)),
        ramp_index=np.int32(ramps),
        enemies=enemies,
        sub=rng.random(N) < 0.4,
        enemy_moves=rng.integers(0, 3, N).astype(np.int32),
        enemy_shoots=rng.integers(0, 11, N).astype(np.int32),
        next_enemy=np.int32(next_enemy),
        divers=game.divers._replace(
            there=(rng.random(4) < 0.6) & ((np.arange(4) - next_diver) % 4 >= 2),
            x=rng.integers(0, 10, 4).astype(np.int32),
            y=rng.integers(1, 9, 4).astype(np.int32),
            right=rng.random(4) < 0.5,
        ),
        diver_moves=rng.integers(0, 6, 4).astype(np.int32),
        next_diver=np.int32(next_diver),
    )


def attributes(name: str, game: Any) -> dict[str, Any]:
    """The attributes of a game of the package that say the same as a state of ours."""
    return {
        "asterix": _asterix,
        "breakout": _breakout,
        "freeway": _freeway,
        "seaquest": _seaquest,
        "space_invaders": _space_invaders,
    }[name](jax.tree.map(lambda x: x.item() if x.ndim == 0 else x, game))


def same(one: Any, other: Any) -> bool:
    """True for equal attributes, of which some are arrays."""
    return all(
        np.array_equal(x, other[name]) if isinstance(x, np.ndarray) else x == other[name] for name, x in one.items()
    )


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
    return {
        "pos": game.y,
        "move_timer": game.rest,
        "terminate_timer": game.left - 1,
        "cars": [list(car) for car in cars],
    }


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
