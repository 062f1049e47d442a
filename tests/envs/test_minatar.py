"""The games of MinAtar against the package `minatar`, step by step, and what chance, capacities and policies do."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from envs_jax.minatar.asterix import Asterix, AsterixOptions
from envs_jax.minatar.breakout import Breakout
from envs_jax.minatar.freeway import Freeway
from envs_jax.minatar.game import DOWN, FIRE, LEFT, NOOP, RIGHT, UP
from envs_jax.minatar.seaquest import ENEMIES
from tests.support.minatar_oracles import GAMES, compare
from tests.support.playing import play


def make(name, **options):
    return envs_jax.make(f"minatar_{name}", **options)


@pytest.mark.parametrize("name", GAMES)
def test_steps_equal_the_package(name):
    assert compare(name, num_lanes=8, num_steps=30, seed=0, later=True)["ends"] > 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", GAMES)
def test_20_000_steps_equal_the_package(name, later):
    found = compare(name, num_lanes=32, num_steps=625, seed=1, later=later)
    assert found["reward"] > 0
    assert found["ends"] > 0 or (name == "freeway" and not later)


# Chance, by chi-square: the limits are passed once in 10,000 times.


def chi_square(values, probabilities):
    """The statistic of counts of 0, 1, ... against probabilities."""
    counts = np.bincount(np.asarray(values).reshape(-1), minlength=len(probabilities))
    assert len(counts) == len(probabilities)
    expected = np.array(probabilities) * counts.sum()
    return np.sum((counts - expected) ** 2 / expected)


LIMITS = {2: 15.1, 3: 18.4, 5: 23.5, 8: 29.9, 10: 33.7}
"""The limit for k values."""


def uniform(values, k):
    assert chi_square(values, [1 / k] * k) < LIMITS[k]


def drawn(name, number=20_000):
    """The chance of many steps."""
    environment = make(name)
    words = np.random.default_rng(3).integers(0, 2**32, (number, environment.step_words), np.uint32)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(environment.draw))(words))


def test_starts_of_breakout_come_from_both_sides():
    starts = jax.vmap(Breakout().start)(np.random.default_rng(0).integers(0, 2**32, (20_000, 1), np.uint32))
    uniform(starts.x // 9, 2)
    assert set(zip(starts.x.tolist(), starts.dx.tolist())) == {(0, 1), (9, -1)}


def test_cars_draw_speeds_alike_and_for_themselves():
    speeds = drawn("freeway")
    kinds = speeds + 5 - (speeds > 0)
    for car in range(8):
        uniform(kinds[:, car], 10)
    for car in range(1, 8):
        uniform((kinds[:, 0] + kinds[:, car]) % 10, 10)


def test_things_of_asterix_are_gold_once_in_three_times():
    chance = drawn("asterix")
    uniform(chance.right, 2)
    assert chi_square(chance.gold, [2 / 3, 1 / 3]) < LIMITS[2]
    assert chi_square(2 * chance.gold + chance.right, [1 / 3, 1 / 3, 1 / 6, 1 / 6]) < 21.2


def test_a_new_thing_of_asterix_takes_any_empty_row():
    environment = Asterix()
    there = np.array([1, 0, 0, 1, 0, 1, 0, 0], bool)
    game = environment.start(jnp.zeros(0, jnp.uint32))._replace(there=jnp.asarray(there), spawn_timer=jnp.int32(0))
    words = np.random.default_rng(5).integers(0, 2**32, (20_000, 2), np.uint32)
    spawned = jax.jit(jax.vmap(lambda words: environment._spawned(game, environment.draw(words)).there))(words)
    new = np.asarray(spawned) & ~there
    assert np.all(new.sum(1) == 1)
    uniform(np.cumsum(~there)[np.argmax(new, 1)] - 1, 5)


def test_enemies_and_divers_of_seaquest():
    chance = drawn("seaquest")
    uniform(chance.enemy_right, 2)
    uniform(chance.diver_right, 2)
    uniform(chance.enemy_y - 1, 8)
    uniform(chance.diver_y - 1, 8)
    uniform((chance.enemy_y + chance.diver_y) % 8, 8)
    assert chi_square(chance.sub, [2 / 3, 1 / 3]) < LIMITS[2]


@pytest.mark.parametrize("name", ["breakout"])
def test_actions_stick_one_time_in_ten(name):
    """The paddle moves to the left unless the no-op before sticks, or what was executed then."""
    environment = make(name)
    state = environment.reset(jax.random.key(0))
    assert state.last_action == NOOP
    keys = jax.random.split(jax.random.key(1), 20_000)
    after, _ = jax.jit(jax.vmap(environment.step, in_axes=(None, None, 0)))(state, jnp.int32(1), keys)
    stuck = np.asarray(after.last_action) == NOOP
    assert chi_square(stuck, [0.9, 0.1]) < LIMITS[2]
    np.testing.assert_array_equal(after.last_action[~stuck], LEFT)
    np.testing.assert_array_equal(after.game.paddle, np.where(stuck, 4, 3))
    never, _ = make(name, sticky_actions=0.0).step(state, jnp.int32(1), keys[0])
    always, _ = make(name, sticky_actions=1).step(state, jnp.int32(1), keys[0])
    assert (never.last_action, always.last_action) == (LEFT, NOOP)


# Known returns


def rows(name, changes, actions, **options):
    """Rewards and ends [T] of actions, indices among the environment's, from a start with changes; nothing sticks."""
    environment = make(name, sticky_actions=0.0, **options)
    state = environment.reset(jax.random.key(0))
    state = state._replace(game=state.game._replace(**{key: np.array(value) for key, value in changes.items()}))
    _, transitions = play(environment, jax.tree.map(lambda x: x[None], state), np.array(actions)[None])
    return transitions.reward[0], transitions.discount[0], transitions.last[0]


def test_a_paddle_under_the_ball_breaks_bricks_until_the_time_limit():
    environment = make("breakout", sticky_actions=0.0, max_steps=400)

    @jax.jit
    def run(key):
        def body(state, key):
            x = jnp.clip(state.game.x + state.game.dx, 0, 9)
            action = jnp.where(state.game.paddle < x, jnp.int32(2), jnp.where(state.game.paddle > x, jnp.int32(1), 0))
            state, transition = environment.step(state, action, key)
            return state, transition

        state, transitions = jax.lax.scan(body, environment.reset(key), jax.random.split(key, 400))
        return state.game.bricks, transitions

    bricks, transitions = run(jax.random.key(0))
    assert np.sum(transitions.reward) == 30 - int(bricks).bit_count() > 20
    np.testing.assert_array_equal(np.flatnonzero(transitions.last), [399])
    assert transitions.discount[-1] == 1


def test_the_chicken_crosses_an_empty_road_in_28_steps():
    """It rests 3 steps at first, and then moves every third step, 9 rows up."""
    reward, _, last = rows("freeway", {"timer": np.full(8, 100, np.int32)}, [1] * 28)
    np.testing.assert_array_equal(np.flatnonzero(reward), [27])
    assert not last.any()


def test_freeway_ends_after_2501_steps():
    reward, discount, last = rows("freeway", {"left": np.int32(3)}, [0] * 3)
    np.testing.assert_array_equal(last, [False, False, True])
    np.testing.assert_array_equal(discount, [1, 1, 0])
    assert Freeway().reset(jax.random.key(0)).game.left == 2501
    assert not reward.any()


def test_a_bullet_takes_6_steps_to_the_lowest_aliens():
    reward, *_ = rows("space_invaders", {}, [3] * 12)
    np.testing.assert_array_equal(np.flatnonzero(reward), [5, 11])


def test_oxygen_lasts_200_steps_below_the_surface():
    alone = {"spawn_timer": np.int32(10_000), "diver_timer": np.int32(10_000)}
    reward, discount, last = rows("seaquest", alone, [DOWN] * 201)
    np.testing.assert_array_equal(np.flatnonzero(last), [200])
    assert discount[200] == 0
    assert not reward.any()
    _, discount, last = rows("seaquest", alone, [DOWN, UP] + [NOOP] * 199)
    assert last[1], "no diver is aboard"
    reward, discount, last = rows("seaquest", alone | {"aboard": np.int32(6)}, [DOWN, UP] + [NOOP] * 199)
    assert reward[1] == 199 // 20
    assert not last.any()


# Capacities


def test_seaquest_has_a_place_for_all():
    """A player at the surface, whom nothing can meet, at the highest speeds."""
    environment = make("seaquest", sticky_actions=0.0)

    @jax.jit
    @jax.vmap
    def run(key):
        def body(state, key):
            game, (action_key, step_key) = state.game, jax.random.split(key)
            action = jax.random.choice(action_key, np.array([NOOP, LEFT, RIGHT, FIRE]))
            place = np.arange(ENEMIES)
            taken = [
                jnp.any(game.enemies.there & (place == game.next_enemy)),
                jnp.any(game.shots.there & (place[:4] == game.next_shot)),
                jnp.any(game.divers.there & (place[:4] == game.next_diver)),
                jnp.any(game.bullets.there & game.enemies.there & game.sub & (game.enemy_shoots == 0)),
            ]
            state, transition = environment.step(state, action, step_key)
            return state, (jnp.stack(taken), transition.last, jnp.sum(state.game.enemies.there, dtype=jnp.int32))

        state = environment.reset(key)
        fastest = {"spawn_speed": 1, "move_speed": 2, "spawn_timer": 0}
        game = state.game._replace(**{name: jnp.int32(value) for name, value in fastest.items()})
        return jax.lax.scan(body, state._replace(game=game), jax.random.split(key, 1000))[1]

    taken, last, number = jax.device_get(run(jax.random.split(jax.random.key(0), 16)))
    assert not taken.any(), "a place was taken before it was free"
    assert not last[:, :-1].any()
    assert number.max() > 12


@pytest.mark.parametrize("gap", [2, 3, 4, 5, 7, 10, 20, 50, 10_000])
def test_a_place_of_an_enemy_is_free_when_its_turn_comes_again(gap):
    """Every enemy that is due comes, which is the worst case, while the player surfaces every `gap` steps."""
    for offset in range(gap if gap < 100 else 1):
        spawn_speed, move_speed, index, timer, enemies, came, most = 20, 5, 0, 20, [], 0, 0
        for t in range(600):
            if timer == 0:
                enemies.append([came, 0, move_speed])
                came, timer = came + 1, spawn_speed
            for enemy in enemies:
                moves = enemy[2] == 0
                enemy[1:] = [enemy[1] + 1, move_speed] if moves else [enemy[1], enemy[2] - 1]
            enemies = [enemy for enemy in enemies if enemy[1] < 10]
            most = max(most, came - min((enemy[0] for enemy in enemies), default=came))
            timer = max(timer - 1, 0)
            if t % gap == offset:
                move_speed -= move_speed > 2 and index % 2
                spawn_speed, index = max(spawn_speed - 1, 1), index + 1
        assert most <= ENEMIES - 1
        assert most >= 28 or gap > 20


# Golden traces


GOLDEN = {
    "asterix": 0x57ADB8E5,
    "breakout": 0x719A3E78,
    "freeway": 0xB0408488,
    "seaquest": 0xE655DE61,
    "space_invaders": 0x3116874A,
}


@pytest.mark.parametrize("name", GAMES)
def test_50_steps_are_as_they_were(name):
    environment = make(name, sticky_actions=0.3, minimal_actions=False)

    @jax.jit
    def run(key, actions):
        def body(state, now):
            state, transition = environment.step(state, *now)
            return state, (environment.observe(state), transition.reward, transition.last)

        return jax.lax.scan(body, environment.reset(key), (actions, jax.random.split(key, 50)))[1]

    actions = np.random.default_rng(0).integers(0, 6, 50).astype(np.int32)
    record = jax.device_get(run(jax.random.key(0), actions))
    assert zlib.crc32(b"".join(np.asarray(x).tobytes() for x in record)) == GOLDEN[name]


@pytest.mark.parametrize("name", GAMES)
def test_specs(name):
    environment = make(name)
    channels = {"asterix": 4, "breakout": 4, "freeway": 7, "seaquest": 10, "space_invaders": 6}[name]
    num_actions = {"asterix": 5, "breakout": 3, "freeway": 3, "seaquest": 6, "space_invaders": 4}[name]
    assert environment.spec.observation_space.shape == (10, 10, channels)
    assert environment.spec.action_space.num_values == num_actions
    assert environment.spec.max_episode_steps == (2501 if name == "freeway" else 10_000)
    assert make(name, minimal_actions=False).spec.action_space.num_values == 6
    assert make(name, max_steps=7).spec.max_episode_steps == 7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("sticky_actions", -0.1), ("sticky_actions", 1.5), ("sticky_actions", True), ("minimal_actions", 1)],
        *[("max_steps", 0), ("max_steps", 1.0), ("ramping", 0)],
    ],
)
def test_bad_options_name_field_value_and_remedy(field, value):
    with pytest.raises(ValueError, match=rf"^AsterixOptions\({field}={value!r}\): use "):
        AsterixOptions(**{field: value})
