"""Matches: players, seats, intervals and ratings."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from podracer.evaluation import elo, evaluation, matches
from podracer.evaluation import players as _players
from podracer.evaluation.players import Player, check, solve
from podracer.types import ActorParams, Agent, LearnerState

GAME = envs_jax.make("tic_tac_toe")


def player(name, game=GAME):
    return _players.player(game, name)


def lowest(memory, timestep):
    return jnp.argmax(timestep.observation["action_mask"], axis=-1).astype(jnp.int32)


def highest(memory, timestep):
    mask = timestep.observation["action_mask"]
    return (mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=-1)).astype(jnp.int32)


def fixed(name, move):
    """A player that draws nothing."""
    return Player(name, lambda lanes: (), lambda params, memory, row, key: (move(memory, row), memory))


@pytest.mark.slow
def test_perfect_play_draws_and_never_loses():
    perfect = player("perfect")
    assert matches.play(GAME, perfect, perfect, 20, openings=0).counts() == (0, 20, 0)
    match = matches.play(GAME, perfect, player("random"), 1000, openings=0)
    for seat, least in ((0, 450), (1, 350)):
        won, drawn, lost = match.counts(seat)
        assert lost == 0
        assert won + drawn == 500
        assert won > least


def agent_of(move):
    """An agent that makes `(observations, key) -> moves` and learns nothing."""

    def act(params, memory, timestep, key, evaluation):
        assert evaluation
        return move(timestep.observation, key), (), memory

    init = lambda key, hyper: LearnerState((), (), {}, jnp.int32(0))  # noqa: E731
    params = lambda learner, progress: ActorParams((), learner.num_updates)  # noqa: E731
    return Agent("fixed", None, init, params, lambda lanes, num_lanes: (), act, lambda *args: args[0], {})


@pytest.mark.parametrize("episodes", [8, 5])
def test_evaluation_plays_half_of_the_games_from_each_seat(episodes):
    """The player of an illegal move loses at once: with the first move of a game, or the second."""
    agent = agent_of(lambda observation, key: jnp.full(len(observation["to_play"]), 9, jnp.int32))
    seeds, params = np.zeros(1, np.int32), ActorParams((), jnp.zeros(1, jnp.int32))
    (found,) = evaluation.Evaluator(agent, GAME, episodes)(params, seeds)
    first = -(-episodes // 2)
    np.testing.assert_array_equal(found.lengths, [1] * first + [2] * (episodes - first))
    np.testing.assert_array_equal(found.returns, [-1] * episodes)
    assert (found.mean, found.unfinished) == (-1.0, 0)


def test_evaluation_is_of_won_drawn_and_lost_games():
    """Perfect play against random moves never loses, and wins more often when it begins."""
    perfect = _players._perfect(GAME)
    (found,) = evaluation.Evaluator(agent_of(perfect), GAME, 400)(
        ActorParams((), jnp.zeros(1, jnp.int32)), np.zeros(1, np.int32)
    )
    assert set(found.returns.tolist()) == {0.0, 1.0}
    assert found.mean == found.returns.mean()
    first, second = found.returns[:200], found.returns[200:]
    assert first.mean() > second.mean() > 0.75
    won, lengths = found.returns > 0, found.lengths
    assert set(lengths[:200][won[:200]].tolist()) == {5.0, 7.0, 9.0}, "who begins makes the last move of a game it won"
    assert set(lengths[200:][won[200:]].tolist()) == {6.0, 8.0}
    assert set(lengths[~won].tolist()) == {9.0}, "a drawn game fills the board"


def test_the_table_of_perfect_moves_is_the_minimax():
    codes, best = solve(GAME)
    assert len(codes) == 4520
    boards = (codes[:, None] // 3 ** np.arange(9)) % 3 - 1
    values = {}
    lines = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]

    def value(board):  # of who is to move, stones 1
        if board not in values:
            values[board] = max(after(board, i) for i in range(9) if board[i] == 0)
        return values[board]

    def after(board, i):
        played = (*board[:i], 1, *board[i + 1 :])
        if any(all(played[c] == 1 for c in line) for line in lines):
            return 1
        return -value(tuple(-x for x in played)) if 0 in played else 0

    for board, moves in zip(boards.tolist(), best):
        expected = [board[i] == 0 and after(tuple(board), i) == value(tuple(board)) for i in range(9)]
        assert moves.tolist() == expected


def test_seats_are_swapped():
    """One player's score is the complement of the other's, game by game."""
    a, b = fixed("a", lowest), fixed("b", highest)
    one, other = matches.play(GAME, a, b, 40, openings=2), matches.play(GAME, b, a, 40, openings=2)
    np.testing.assert_array_equal(one.scores[:, 0], 1.0 - other.scores[:, 1])
    np.testing.assert_array_equal(one.scores[:, 1], 1.0 - other.scores[:, 0])
    assert {0.0, 1.0} <= set(one.scores.ravel().tolist())
    assert sum(one.counts()) == 40
    assert one.counts(0)[0] + one.counts(1)[0] == one.counts()[0]
    mirror = matches.play(GAME, a, fixed("a too", lowest), 40, openings=2)
    assert mirror.mean == 0.5
    assert mirror.interval == (0.5, 0.5), "pairs share their opening"


def test_who_plays_better_wins():
    """Tactical play beats random moves, and a search by random games beats it, also in connect four."""
    tactical, random = player("tactical"), player("random")
    assert matches.play(GAME, tactical, random, 200, openings=0).interval[0] > 0.75
    four = envs_jax.make("connect_four")
    assert matches.play(four, player("tactical", four), player("random", four), 100).interval[0] > 0.8


@pytest.mark.slow
@pytest.mark.nightly
def test_a_search_by_random_games_is_stronger_than_tactics():
    four = envs_jax.make("connect_four")
    match = matches.play(four, player("mcts:200", four), player("tactical", four), 100)
    assert match.interval[0] > 0.6


def test_ratings_are_those_of_simulated_players():
    """Players of known strengths, 0, 100 and 300 Elo: the intervals hold them."""
    rng = np.random.default_rng(4)
    strengths = {"random": 0.0, "b": 100.0, "c": 300.0}
    played = []
    for a, b in (("b", "random"), ("c", "b"), ("c", "random")):
        chance = 1 / (1 + 10 ** ((strengths[b] - strengths[a]) / 400))
        played.append(matches.Match((a, b), (rng.random((1500, 2)) < chance).astype(float)))
    ratings = elo.elo(played)
    assert [rating.name for rating in ratings] == ["c", "b", "random"]
    for rating in ratings:
        low, high = rating.interval
        assert low <= strengths[rating.name] <= high
        assert high - low < 60
        assert low <= rating.elo <= high


@pytest.mark.parametrize("share", [0.75, 0.95, 1.0])
def test_ratings_of_a_chain_are_exact(share):
    """Each beats the one before, and plays no other: every pair fits exactly, with the drawn game that is added."""
    names = ["random", *(f"s{i}" for i in range(9))]
    scores = (np.arange(400) < 400 * share).astype(float).reshape(200, 2)
    played = [matches.Match((better, worse), scores) for worse, better in itertools.pairwise(names)]
    gap = 400 * np.log10((400 * share + 0.5) / (400 * (1 - share) + 0.5))
    ratings = {rating.name: rating for rating in elo.elo(played)}
    for i, name in enumerate(names):
        assert ratings[name].elo == pytest.approx(i * gap, abs=1e-4)
        low, high = ratings[name].interval
        assert low - 1e-4 <= i * gap <= high + 1e-4


def test_ratings_expect_the_points_that_were_made():
    """The likelihood is largest where everybody's points are those that the ratings expect."""
    rng = np.random.default_rng(1)
    names = ["random", "a", "b", "c", "d"]
    played = [
        matches.Match((one, other), (rng.random((50, 2)) < chance).astype(float))
        for i, one in enumerate(names)
        for other in names[:i]
        for chance in (rng.random(),)
    ]
    ratings = {rating.name: rating.elo for rating in elo.elo(played)}
    surplus = dict.fromkeys(names, 0.0)
    for match in played:
        one, other = match.players
        expected = (match.scores.size + 1) / (1 + 10 ** ((ratings[other] - ratings[one]) / 400))
        surplus[one] += match.scores.sum() + 0.5 - expected
        surplus[other] -= match.scores.sum() + 0.5 - expected
    assert max(abs(x) for x in surplus.values()) < 1e-6


def test_what_makes_no_match():
    random = player("random")
    for games in (0, 3):
        with pytest.raises(ValueError, match="even"):
            matches.play(GAME, random, random, games)
    with pytest.raises(ValueError, match="use fewer"):
        matches.play(GAME, random, random, 64, openings=8)
    for name in ("stockfish", "mcts", "mcts:0", "mcts:x", "random:3"):
        with pytest.raises(ValueError, match="no player is called"):
            player(name)
    with pytest.raises(ValueError, match="too large"):
        player("perfect", envs_jax.make("connect_four"))
    with pytest.raises(ValueError, match="one player"):
        check(envs_jax.make("catch"))
    with pytest.raises(ValueError, match="nobody is called"):
        elo.elo([matches.Match(("a", "b"), np.ones((2, 2)))])
    with pytest.raises(ValueError, match="no matches connect c, d with random"):
        elo.elo([matches.Match(players, np.ones((2, 2))) for players in (("random", "b"), ("c", "d"))])
