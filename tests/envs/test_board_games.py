"""Games for two: numbers of positions that are known, and play against naive Python."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from envs_jax import board_game, othello
from envs_jax.connect_four import has_four
from tests.support import games_oracles

GAMES = {
    "tic_tac_toe": ({}, games_oracles.TicTacToe),
    "connect_four": ({}, games_oracles.ConnectFour),
    "othello6": ({"size": 6}, functools.partial(games_oracles.Othello, 6)),
    "othello8": ({"size": 8}, functools.partial(games_oracles.Othello, 8)),
}
CHUNK = 512


@functools.cache
def make(name, opening_plies=0):
    return envs_jax.make(name.rstrip("68"), **GAMES[name][0], opening_plies=opening_plies)


@functools.cache
def expansion(name):
    """The jitted `states [CHUNK] -> (states, transitions [CHUNK, A], masks [CHUNK, A])` after every action."""
    env = make(name)
    actions = jnp.arange(env.spec.action_space.num_values, dtype=jnp.int32)

    def one(state):
        after, transitions = jax.vmap(lambda action: env.step(state, action, jax.random.key(0)))(actions)
        return after, transitions, env.observe(state)["action_mask"]

    return jax.jit(jax.vmap(one))


def layers(name, depth):
    """The numbers of each ply up to `depth`: distinct positions, positions that are over, and sequences of legal plies
    so far.

    Sequences are counted by position, so that no position is stepped twice.
    """
    states = jax.tree.map(lambda x: np.asarray(x)[None], make(name).reset(jax.random.key(0)))
    counts, found = np.ones(1, np.int64), [(1, 0, 1, 0)]
    for _ in range(depth):
        after, weights = [], []
        for start in range(0, len(counts), CHUNK):
            part = jax.tree.map(lambda x, start=start: x[start : start + CHUNK], states)
            n = len(part.over)
            padded = jax.tree.map(lambda x, n=n: np.concatenate([x, np.repeat(x[:1], CHUNK - n, axis=0)]), part)
            stepped, transitions, mask = jax.device_get(expansion(name)(padded))
            np.testing.assert_array_equal(transitions.last, stepped.over)
            legal = mask[:n] > 0
            after.append(jax.tree.map(lambda x, n=n, legal=legal: x[:n][legal], stepped))
            weights.append(np.repeat(counts[start : start + n], legal.sum(axis=1)))
        states, counts = jax.tree.map(lambda *x: np.concatenate(x), *after), np.concatenate(weights)
        rows = np.concatenate(
            [leaf.reshape(len(counts), -1).astype(np.int8) for leaf in jax.tree.leaves(states)], axis=1
        )
        _, index, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        counts = np.bincount(inverse.reshape(-1), weights=counts).astype(np.int64)
        states = jax.tree.map(lambda x, index=index: x[index], states)
        over = states.over
        found.append((len(over), int(over.sum()), int(counts.sum()), int(counts[over].sum())))
        states, counts = jax.tree.map(lambda x, over=over: x[~over], states), counts[~over]
    return np.array(found)


def test_all_of_tic_tac_toe():
    positions, over, _, games = layers("tic_tac_toe", 9).sum(axis=0)
    assert (positions, positions - over, games) == (5478, 4520, 255_168)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("connect_four", (7, 49, 343, 2401, 16807, 117_649)),
        pytest.param("connect_four", (7, 49, 343, 2401, 16807, 117_649, 823_536, 5_673_234), marks=pytest.mark.slow),
        pytest.param("othello8", (4, 12, 56, 244, 1396, 8200, 55_092), marks=pytest.mark.slow),
        pytest.param("othello6", (4, 12, 56, 244, 1364, 7604), marks=pytest.mark.slow),
    ],
)
def test_sequences_of_legal_plies(name, expected):
    """Perft: for Othello on 8 x 8 the numbers that everybody finds."""
    assert tuple(layers(name, len(expected))[1:, 2]) == expected


@functools.cache
def player(name, opening_plies=0):
    """The jitted `keys [B] -> (first observation, its state, per ply action, transition, observation)`."""
    env = make(name, opening_plies)
    limit = env.spec.max_episode_steps
    plies, rate = (limit // 2 + 8, 0.03) if "othello" in name else (limit, 0.1)

    def episode(key):
        reset_key, key = jax.random.split(key)
        state = env.reset(reset_key)

        def ply(state, key):
            key, illegal_key = jax.random.split(key)
            mask = env.observe(state)["action_mask"]
            illegal = (jax.random.uniform(illegal_key) < rate) & jnp.any(mask == 0)
            chance = jnp.where((mask == 0) == illegal, jax.random.uniform(key, mask.shape), -1.0)
            action = jnp.argmax(chance).astype(jnp.int32)
            state, transition = env.step(state, action, key)
            return state, (action, transition, env.observe(state))

        return env.observe(state), state, jax.lax.scan(ply, state, jax.random.split(key, plies))[1]

    return jax.jit(jax.vmap(episode))


def assert_shows(observation, game, num_actions):
    board = np.array(game.board())
    np.testing.assert_array_equal(observation["board"], np.stack([board == 1, board == -1], axis=-1))
    mask = np.ones(num_actions) if game.over else np.isin(np.arange(num_actions), game.legal())
    np.testing.assert_array_equal(observation["action_mask"], mask)
    assert observation["to_play"] == game.turn


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("othello")) for name in GAMES]
)
def test_play_is_that_of_naive_python(name):
    """Ply by ply: observation, reward, discount and end."""
    num_games, ends, passes = 24, [], 0
    A = make(name).spec.action_space.num_values
    keys = jax.random.split(jax.random.key(1), num_games)
    opening, _, (actions, transitions, observations) = jax.device_get(player(name)(keys))
    for lane in range(num_games):
        game = GAMES[name][1]()
        assert_shows(jax.tree.map(lambda x, lane=lane: x[lane], opening), game, A)
        for ply, action in enumerate(actions[lane]):
            illegal = action not in game.legal()
            passes += len(game.legal()) == 1 and action == A - 1
            reward = game.play(int(action))
            found = [x[lane, ply] for x in transitions[:3]]
            assert found == [reward, 0.0 if game.over else -1.0, game.over], (lane, ply)
            assert_shows(jax.tree.map(lambda x, lane=lane, ply=ply: x[lane, ply], observations), game, A)
            if game.over:
                ends.append((illegal, reward))
                break
    assert {(True, -1), (False, 1)} <= set(ends)
    assert passes or "othello" not in name


@functools.cache
def first_legal(name):
    """The jitted `state -> (state, transition)` after the legal action of the least number."""
    env = make(name)
    return jax.jit(lambda state: env.step(state, jnp.argmax(env.legal(state)).astype(jnp.int32), jax.random.key(0)))


@pytest.mark.parametrize(
    ("stones", "ends", "reward"),
    [
        ({(0, 0): 1, (0, 1): 1, (5, 5): -1}, 2, -1.0),  # both pass; the second one has fewer
        ({(0, 0): 1, (5, 5): -1}, 2, 0.0),
        ({(0, 1): -1, (0, 2): 1}, 1, 1.0),  # all the other's are turned
    ],
)
def test_how_othello_ends(stones, ends, reward):
    env, board = make("othello6"), np.zeros((6, 6), np.int8)
    for cell, stone in stones.items():
        board[cell] = stone
    state = env.start()._replace(board=jnp.asarray(board))
    for ply in range(1, ends + 1):
        state, transition = first_legal("othello6")(state)
        assert bool(transition.last) == (ply == ends)
    assert (float(transition.reward), float(transition.discount)) == (reward, 0.0)


def test_all_lines_of_connect_four():
    """69 of them win; with a stone less, or bent at a border, none does."""
    lines = []
    for row in range(6):
        for column in range(7):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                cells = [(row + i * down, column + i * right) for i in range(4)]
                if all(0 <= y < 6 and 0 <= x < 7 for y, x in cells):
                    lines.append(cells)
    boards = np.zeros((len(lines) * 5, 6, 7), bool)
    for i, cells in enumerate(lines):
        for missing in range(5):
            for y, x in (cell for j, cell in enumerate(cells) if j != missing):
                boards[5 * i + missing, y, x] = True
    found = np.asarray(jax.jit(jax.vmap(has_four))(boards)).reshape(-1, 5)
    assert len(lines) == 69
    np.testing.assert_array_equal(found, [[False] * 4 + [True]] * 69)
    rng = np.random.default_rng(0)
    random = rng.random((2000, 6, 7)) < rng.uniform(0.2, 0.6, (2000, 1, 1))
    expected = [any(all(board[cell] for cell in cells) for cells in lines) for board in random]
    np.testing.assert_array_equal(jax.jit(jax.vmap(has_four))(random), expected)
    assert 200 < sum(expected) < 1800


def test_games_open_behind_random_plies():
    """0 to k of them, as often each; none of the games is over, and both players are first."""
    keys = jax.random.split(jax.random.key(2), 900)
    states = jax.device_get(jax.jit(jax.vmap(make("tic_tac_toe", 8).reset))(keys))
    stones = np.count_nonzero(states.board, axis=(1, 2))
    assert not states.over.any()
    np.testing.assert_array_equal(states.to_play, stones % 2)
    short = np.bincount(stones, minlength=9)[:5]  # no game is over by then
    assert np.all(np.abs(short - 100) < 47)  # 5 standard deviations
    corner = np.bincount(np.abs(states.board[stones == 1]).reshape(-1, 9).argmax(axis=1), minlength=9)
    assert (corner > 0).all()


@pytest.mark.parametrize("size", [6, 8])
def test_states_are_small(size):
    """A search stores a state at every node."""
    sizes = {"tic_tac_toe": 14, "connect_four": 47, "othello6": 42, "othello8": 70}
    for name in ("tic_tac_toe", "connect_four", f"othello{size}"):
        state = jax.eval_shape(make(name).reset, jax.random.key(0))
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) == sizes[name]


def test_symmetries_of_a_square_are_all_eight():
    cells, actions = board_game.square_symmetries(3, passes=True)
    assert len({tuple(row) for row in cells}) == 8
    np.testing.assert_array_equal(actions, np.concatenate([cells, np.full((8, 1), 9)], axis=1))
    corners = cells[:, [0, 2, 6, 8]]
    assert (np.sort(corners, axis=1) == [0, 2, 6, 8]).all()
    assert (cells[:, 4] == 4).all()


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four", "othello6"])
def test_render_shows_stones(name):
    """A stone keeps the colour of its player whoever is to move."""
    env = make(name)
    state = env.start()
    board = np.zeros(state.board.shape, np.int8)
    board[0, 0], board[2, 1] = 1, -1
    render = jax.jit(env.render)
    image = np.asarray(render(state._replace(board=jnp.asarray(board))))
    turned = np.asarray(render(state._replace(board=jnp.asarray(-board), to_play=jnp.int32(1))))
    np.testing.assert_array_equal(image, turned)
    height, width = board.shape
    assert image.dtype == np.uint8
    centres = image.reshape(height, 24, width, 24, 3)[:, 12, :, 12]
    colours = {stone: {tuple(map(int, c)) for c in centres[board == stone]} for stone in (0, 1, -1)}
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 3


@pytest.mark.parametrize("options", [{"size": 7}, {"size": "8"}, {"opening_plies": -1}, {"opening_plies": 1.0}])
def test_refuses_bad_options(options):
    with pytest.raises(ValueError, match=rf"OthelloOptions\({next(iter(options))}=.*\): use "):
        othello.OthelloOptions(**options)


def test_best_play_of_tic_tac_toe_draws():
    values = games_oracles.tic_tac_toe_values((0,) * 9)
    assert values == dict.fromkeys(range(9), 0)
    assert games_oracles.tic_tac_toe_values((1, 1, 0, -1, -1, 0, 0, 0, 0))[2] == 1
    corner = games_oracles.tic_tac_toe_values((-1, *(0,) * 8))
    assert {action: value for action, value in corner.items() if value > -1} == {4: 0}, "only the middle holds it"
