"""Games with one fault each are refused with a sentence about it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from envs_jax import board_game
from envs_jax.testing import ConformanceError, check_briefly, check_game, validate_protocol
from envs_jax.tic_tac_toe import TicTacToeState
from podracer import spaces

CELLS = np.arange(3, dtype=np.int32)
MIRROR = np.stack([CELLS, CELLS[::-1]])


class Small(board_game.BoardGame):
    """Three cells in a row; who fills the last one wins."""

    def __init__(self):
        super().__init__("small", (1, 3), 3, 3, 0, board_game.Symmetries(MIRROR, MIRROR))

    def start(self):
        return TicTacToeState(jnp.zeros((1, 3), jnp.int8), jnp.int32(0), jnp.asarray(False))

    def legal(self, state):
        return state.board[0] == 0

    def play(self, state, action):
        board = jnp.where((CELLS == action)[None], jnp.int8(1), state.board)  # noqa: SIM300
        won = jnp.all(board != 0)
        return state._replace(board=board), won.astype(jnp.float32), won


def with_spec(**changes):
    game = Small()
    game.spec = game.spec._replace(**changes)
    return game


def with_symmetries(cells, actions):
    game = Small()
    game.symmetries = board_game.Symmetries(cells, actions)
    return game


def stepping(change):
    """A game whose `step` returns `change(state, action, key, after, transition)`."""

    class Mine(Small):
        def step(self, state, action, key):
            return change(state, action, key, *super().step(state, action, key))

    return Mine()


def observing(**changes):
    class Mine(Small):
        def observe(self, state):
            return super().observe(state) | {name: change(state) for name, change in changes.items()}

    return Mine()


def discounts(change):
    return stepping(lambda state, _, key, after, t: (after, t._replace(discount=change(state, after, t))))


def rewards(change):
    return stepping(lambda state, _, key, after, t: (after, t._replace(reward=change(state, key, after, t))))


def going_on(state, action, key, after, transition):
    """A finished game is stepped like another."""
    state = state._replace(over=jnp.asarray(False))
    return Small().step(state, action, key)


FAULTS = {
    "players": (with_spec(num_players=1), r"Small\.spec\.num_players is 1 \(expected 2\)"),
    "actions": (with_spec(action_space=spaces.Box(0.0, 1.0, ())), r"Small\.spec\.action_space is Box"),
    "observation": (with_spec(observation_space=spaces.Discrete(2)), r"observation_space\['board'\] is None "),
    "no permutation": (with_symmetries(np.zeros((2, 3), np.int32), MIRROR), r"symmetries\.cells does not hold perm"),
    "not the identity": (with_symmetries(MIRROR, MIRROR[::-1]), r"symmetries\.actions .*the first one the identity"),
    "symmetry": (with_symmetries(MIRROR, MIRROR[[0, 0]]), "a symmetry does not commute"),
    "nothing legal": (observing(action_mask=lambda state: jnp.zeros(3, jnp.uint8)), "action_mask is all 0 "),
    "illegal": (rewards(lambda s, k, a, t: jnp.maximum(t.reward, 0.0)), "an illegal action did not lose at once"),
    "mask": (
        observing(action_mask=lambda state: jnp.ones(3, jnp.uint8)),
        "a legal action lost at once .* after 1 plies",
    ),
    "reward": (
        rewards(lambda s, k, a, t: jnp.where(t.reward > 0, 2.0, t.reward)),
        "a reward is not that of a zero-sum",
    ),
    "discount": (discounts(lambda s, a, t: jnp.abs(t.discount)), "has another discount than -1"),
    "end": (discounts(lambda s, a, t: jnp.where(t.reward > 0, -1.0, t.discount)), "another discount than 0"),
    "turn": (observing(to_play=lambda state: jnp.int32(0)), "to_play stayed the same"),
    "keys": (
        rewards(lambda s, k, a, t: jnp.where(t.last, t.reward, jax.random.bernoulli(k).astype(jnp.float32))),
        "two results for two keys",
    ),
    "finished": (stepping(going_on), "a finished game went on"),
}
SLOW = ("nothing legal", "illegal", "reward", "discount", "end", "turn", "keys", "finished")


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW)) for f in FAULTS])
def test_names_the_fault(fault):
    game, message = FAULTS[fault]
    with pytest.raises(ConformanceError, match=f"^envs_jax conformance: .*{message}"):
        check_game(game)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tic_tac_toe", {}),
        pytest.param("othello", {"size": 6, "opening_plies": 3}, marks=pytest.mark.slow),
        pytest.param("connect_four", {"opening_plies": 20}, marks=pytest.mark.slow),
        pytest.param("othello", {}, marks=pytest.mark.slow),
    ],
)
def test_every_game_conforms(name, options):
    check_game(envs_jax.make(name, **options))


def test_only_games_for_two_have_signed_discounts():
    with pytest.raises(ConformanceError, match=r"returned discount -1\.0 .*\(expected 0 or 1\)"):
        check_briefly(with_spec(num_players=1), episodes=2)
    with pytest.raises(ValueError, match=r"Small\.spec\.num_players is 3 \(expected 1 or 2\)"):
        validate_protocol(with_spec(num_players=3))
