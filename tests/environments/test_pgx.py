"""pgx's games: equal to pgx itself and to our own games, ply by ply, and what is said of names and options."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pgx
import pytest

import envs_jax
import podracer
from envs_jax.testing import check_environment, check_game
from podracer import environments, nets, spaces
from podracer.evaluation import matches
from podracer.evaluation import players as _players
from tests.support import games_oracles, tiers

GAMES = 16
OURS = ("tic_tac_toe", "connect_four", "othello")


@functools.cache
def make(name, **options):
    return environments.make(f"pgx:{name}", **options)


def drawn(mask, key):
    """One of the actions with a mask [A] that is not 0, at random, int32 []."""
    return jnp.argmax(jnp.where(mask != 0, jax.random.uniform(key, mask.shape), -1.0)).astype(jnp.int32)


@functools.cache
def played(name):
    """Random games in pgx, here, and in our own game of that name: rows [GAMES, plies] on the host.

    In the second half of the games, some actions are illegal.
    """
    env = make(name)
    rules, own = pgx.make(name), envs_jax.make(name) if name in OURS else env
    plies = min(env.spec.max_episode_steps, 130) + 2

    def row(states, transitions, player, before):
        theirs, state, ours = states
        observation = env.observe(state)
        return {
            "theirs": (theirs.observation, theirs.legal_action_mask, theirs.terminated, theirs.rewards[player]),
            "here": (observation, transitions[0]),
            "own": (own.observe(ours), transitions[1]),
            "same position": matches_of(env.position(observation), state),
            "unchanged": matches_of(before, state),
            "seat": theirs._step_count % 2,
        }

    def matches_of(a, b):
        return jnp.all(jnp.stack([jnp.all(x == y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))]))

    def game(key, rate):
        key, first_key = jax.random.split(key)
        start = rules.init(first_key), env.reset(key), own.reset(key)

        def ply(states, key):
            theirs, state, ours = states
            mask = theirs.legal_action_mask
            action_key, illegal_key, key = jax.random.split(key, 3)
            illegal = (jax.random.uniform(illegal_key) < rate) & ~jnp.all(mask)
            action = drawn(mask != illegal, action_key)
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                after = rules.step(theirs, action)
            new, transition = env.step(state, action, key)
            ours, other = own.step(ours, action, key)
            states = after, new, ours
            return states, row(states, (transition, other), theirs.current_player, state) | {"illegal": illegal}

        return jax.lax.scan(ply, start, jax.random.split(key, plies))[1]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rates = jnp.where(jnp.arange(GAMES) < GAMES // 2, 0.0, 0.1)
        return jax.device_get(jax.jit(jax.vmap(game))(jax.random.split(jax.random.key(0), GAMES), rates))


@pytest.mark.parametrize(
    "name", ["connect_four", *tiers.slow("tic_tac_toe", "othello", "hex"), *tiers.nightly("go_9x9", "chess")]
)
def test_games_are_those_of_pgx(name):
    rows = played(name)
    board, mask, over, reward = rows["theirs"]
    observation, transition = rows["here"]
    np.testing.assert_array_equal(observation["board"], board)
    np.testing.assert_array_equal(observation["action_mask"], mask)
    np.testing.assert_array_equal(observation["to_play"], rows["seat"])
    np.testing.assert_array_equal(transition.reward, reward)
    np.testing.assert_array_equal(transition.last, over)
    np.testing.assert_array_equal(transition.discount, np.where(over, 0, -1))
    assert rows["same position"].all(), "a state comes back from its observation, at every ply"
    finished = over[:, :-1]
    assert rows["unchanged"][:, 1:][finished].all()
    assert (reward[:, 1:][finished] == 0).all()
    assert (observation["action_mask"][:, :-1][finished] == 1).all()
    assert {-1.0, 0.0, 1.0} >= set(reward.flat) > {0.0}
    assert rows["illegal"].any()
    assert over[:, -1].any()


@pytest.mark.parametrize("name", ["connect_four", *tiers.slow("tic_tac_toe", "othello")])
def test_our_own_games_are_those_of_pgx(name):
    rows = jax.tree.map(lambda x: x[: GAMES // 2], played(name))
    (observation, transition), (own, own_transition) = rows["here"], rows["own"]
    for item in ("board", "action_mask", "to_play"):
        np.testing.assert_array_equal(observation[item], own[item])
    for found, expected in zip(transition[:3], own_transition[:3]):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(make(name).symmetries.actions, envs_jax.make(name).symmetries.actions)


@pytest.mark.parametrize("name", [*tiers.slow("hex"), *tiers.nightly("go_9x9")])
def test_a_game_can_be_turned(name):
    """The same game, turned from its first ply on, looks turned."""
    env = make(name)
    cells, moves = (jnp.asarray(x) for x in env.symmetries)

    def game(key):
        def ply(state, key):
            state, turned = state
            mask = env.observe(state)["action_mask"]
            action = drawn(mask, key)
            state, transition = env.step(state, action, key)
            there = jnp.argmax(moves == action, axis=1).astype(jnp.int32)
            turned, transitions = jax.vmap(env.step, (0, 0, None))(turned, there, key)
            shown, expected = jax.vmap(env.observe)(turned), env.observe(state)
            board = expected["board"].reshape(-1, expected["board"].shape[-1])
            same = [
                jnp.all(shown["board"] == board[cells].reshape(shown["board"].shape)),
                jnp.all(shown["action_mask"] == expected["action_mask"][moves]),
                jnp.all(transitions.reward == transition.reward),
                jnp.all(transitions.last == transition.last),
            ]
            return (state, turned), (jnp.stack(same), transition.last)

        start = env.start()
        turned = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(cells), *x.shape)), start)
        return jax.lax.scan(ply, (start, turned), jax.random.split(key, env.spec.max_episode_steps))[1]

    same, over = jax.device_get(jax.jit(jax.vmap(game))(jax.random.split(jax.random.key(0), 4)))
    assert same.all(axis=(0, 1, 2)).all()
    assert over[:, -1].all()


@pytest.mark.parametrize("name", ["tic_tac_toe", *tiers.slow("connect_four", "othello", "hex")])
def test_what_a_search_relies_on(name, monkeypatch):
    env = make(name)
    monkeypatch.setattr(env, "symmetries", None)  # states are not turned here, games are, above
    check_game(env)


@pytest.mark.parametrize(
    "name", [*tiers.slow("2048", "minatar-breakout"), *tiers.nightly("tic_tac_toe", "leduc_holdem", "hex")]
)
def test_environments_keep_their_contract(name):
    check_environment(make(name, **({"opponent": "random"} if name == "leduc_holdem" else {})))


def test_openings_are_games_that_go_on():
    env = make("tic_tac_toe", opening_plies=6)
    keys = jax.random.split(jax.random.key(0), 256)
    state = jax.device_get(jax.jit(jax.vmap(env.reset))(keys))
    assert set(state._step_count) == set(range(7))
    assert not state.terminated.any()
    state = jax.device_get(jax.jit(jax.vmap(make("tic_tac_toe").reset))(keys))
    assert not state._step_count.any()


def test_a_random_opponent_plays_by_the_rules():
    """Its plies, read off what is seen, are legal, and both sides' rewards those of naive Python; both seats occur."""
    env = make("connect_four", opponent="random")
    assert env.spec.num_players == 1

    def game(key):
        key, reset_key = jax.random.split(key)
        state = env.reset(reset_key)

        def step(state, key):
            before = env.observe(state)
            action_key, key = jax.random.split(key)
            action = drawn(before["action_mask"], action_key)
            state, transition = env.step(state, action, key)
            return state, (before, action, transition, env.observe(state))

        return jax.lax.scan(step, state, jax.random.split(key, env.spec.max_episode_steps))[1]

    rows = jax.device_get(jax.jit(jax.vmap(game))(jax.random.split(jax.random.key(0), GAMES)))
    seats, results = set(), set()
    for lane in range(GAMES):
        rules = games_oracles.ConnectFour()
        seat = 0 if rows[0]["board"][lane, 0].sum() == 0 else 1
        for before, action, transition, after in zip(*(_unstacked(x, lane) for x in rows)):
            assert not rules.over
            board = before["board"]
            if rules.turn != seat:  # it opened the game
                rules.play(int(np.argwhere(board[..., 1])[0][1]))
            np.testing.assert_array_equal(before["action_mask"], np.isin(np.arange(7), rules.legal()))
            expected = rules.play(int(action))
            if not rules.over:
                new = after["board"][..., 1] > board[..., 1]
                (column,) = np.argwhere(new)[:, 1]
                expected = -rules.play(int(column))
            assert (transition.reward, transition.discount, transition.last) == (expected, not rules.over, rules.over)
            if rules.over:
                seats.add(seat)
                results.add(expected)
                break
    assert seats == {0, 1}
    assert results >= {-1, 1}


def _unstacked(rows, lane):
    return [jax.tree.map(lambda x, t=t: x[lane, t], rows) for t in range(len(jax.tree.leaves(rows)[0][lane]))]


@pytest.mark.slow
def test_other_players_move_until_it_is_ones_turn():
    """In cards, a round may end without a ply of the other side, and a payoff arrive with one."""
    env = make("leduc_holdem", opponent="random", opening_plies=1)

    def step(state, key):
        after, transition = env.step(state, drawn(env.observe(state)["action_mask"], key), key)
        return after, (state, transition)

    def game(key):
        return jax.lax.scan(step, env.reset(key), jax.random.split(key, 12))[1]

    with jax.debug_key_reuse(False):
        state, transition = jax.device_get(jax.jit(jax.vmap(game))(jax.random.split(jax.random.key(0), 64)))
    assert (state.current_player[~state.terminated] == 0).all()
    assert transition.last[:, -1].all()
    total = transition.reward.sum(axis=1)
    assert total.min() < 0 < total.max()
    assert abs(total.mean()) < 3


def test_networks_do_not_see_what_is_there_for_searches():
    env = make("tic_tac_toe")
    features = nets.encode(spaces.zeros(env.spec.observation_space), env.spec.observation_space, leading=0)
    assert features.shape == (18 + 2,), "neither the mask nor the state"


def test_the_mask_can_be_hidden_from_one_player():
    env = environments.make("pgx:2048", mask=False)
    state = jax.jit(env.reset)(jax.random.key(0))
    assert set(env.observe(state)) == {"board"} == {name for name, _ in env.spec.observation_space.items}


def test_what_cannot_be_played_is_said():
    for name, settings, message in (
        ("go_9", {}, "pgx has no environment 'go_9'; did you mean 'go_9x9'"),
        ("bridge_bidding", {}, "pgx has no environment 'bridge_bidding'; "),
        ("kuhn_poker", {}, "pgx:kuhn_poker has chance, hidden cards or more than two players, which .*='random'"),
        (
            "2048",
            {"opponent": "random"},
            "pgx:2048 has one player, who makes every move: it takes no options but mask.",
        ),
        ("hex", {"opponent": "mcts"}, "opponent='mcts'"),
        ("hex", {"opening_plies": -1}, "opening_plies=-1"),
        ("hex", {"size": 9}, "size"),
    ):
        with pytest.raises(ValueError, match=message):
            environments.make(f"pgx:{name}", **settings)
    with pytest.raises(ValueError, match="did you mean 'pgx:chess'"):
        environments.make("chess")
    with pytest.raises(ValueError, match="nobody solves it"):
        _players.player(make("tic_tac_toe"), "perfect")


def test_without_pgx_a_sentence_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pgx" else find(name))
    with pytest.raises(ValueError, match=r"^pgx: environments need pgx, not installed here: pip install pgx$"):
        environments.make("pgx:hex")


@pytest.mark.slow
@pytest.mark.nightly
def test_self_play_learns_what_it_does_in_our_own_game():
    """The same observations make the same run, bit for bit: boards, positions at the root, symmetries and returns."""
    config = {
        "rollout_length": 4,
        "simulations": 4,
        "batch_size": 16,
        "replay_capacity": 256,
        "replay_min_size": 32,
        "hidden_sizes": (8,),
    }
    runs = [
        podracer.train("alphazero", name, num_envs=8, total_steps=256, seed=3, eval_every=256, config=config)
        for name in ("tic_tac_toe", "pgx:tic_tac_toe")
    ]
    own, theirs = (jax.device_get(run.actor_params()) for run in runs)
    assert int(own.version) > 0
    jax.tree.map(np.testing.assert_array_equal, own, theirs)


@pytest.mark.slow
def test_matches_are_those_of_our_own_game():
    def scores(game):
        players = (_players.player(game, name) for name in ("tactical", "random"))
        return matches.play(game, *players, games=32, openings=2).scores

    np.testing.assert_array_equal(scores(make("tic_tac_toe")), scores(envs_jax.make("tic_tac_toe")))
