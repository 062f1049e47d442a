"""The solver of connect four against brute force, and on positions that can be read."""

from __future__ import annotations

import copy
import json
import pathlib
import random

import pytest

from tests.support import connect_four_solver, games_oracles


def position(plies: int, seed: int) -> games_oracles.ConnectFour:
    """A random game that is not over after so many plies."""
    rng = random.Random(seed)
    while True:
        game = games_oracles.ConnectFour()
        while not game.over:
            game.play(rng.choice(game.legal()))
            if sum(cell is not None for row in game.cells for cell in row) == plies:
                break
        if not game.over:
            return game


def brute_force(game: games_oracles.ConnectFour, known: dict) -> dict[int, int]:
    """Every legal move's value: all games to their ends."""
    found = {}
    for action in game.legal():
        after = copy.deepcopy(game)
        reward = after.play(action)
        if not after.over:
            key = str(after.cells)
            if key not in known:
                known[key] = max(brute_force(after, known).values())
            reward = -known[key]
        found[action] = reward
    return found


@pytest.mark.parametrize(
    ("plies", "games"), [(34, 8), (32, 1), pytest.param(30, 12, marks=pytest.mark.slow)], ids=lambda x: str(x)
)
def test_equals_brute_force(plies, games):
    found = []
    for seed in range(games):
        game = position(plies, seed)
        found.append(connect_four_solver.values(game.board()))
        assert found[-1] == brute_force(game, {}), game.board()
    assert len({value for values in found for value in values.values()}) == 3 or plies < 34


def test_moves_that_can_be_read():
    board = [[0] * 7 for _ in range(6)]
    board[5][1:4] = [1, 1, 1]
    board[5][5:] = [-1, -1]
    board[4][6] = -1
    assert connect_four_solver.values(board)[4] == connect_four_solver.values(board)[0] == 1  # at once, at either end
    other = [[-cell for cell in row] for row in board]
    assert set(connect_four_solver.values(other).values()) == {-1}  # two threats


def test_a_table_may_be_shared():
    """Values of one position after another do not depend on what was found before."""
    table = {}
    for seed in range(6):
        board = position(24, seed).board()
        assert connect_four_solver.values(board, table) == connect_four_solver.values(board)
    assert table


@pytest.mark.parametrize(
    "plies", [range(25, 31), pytest.param(range(15, 25), marks=pytest.mark.slow)], ids=["late", "early"]
)
def test_the_committed_positions_are_solved(plies):
    """Each position of `benchmarks/connect_four_positions.json` is solved, and has a move to lose by."""
    file = pathlib.Path(__file__).parents[2] / "benchmarks" / "connect_four_positions.json"
    solved = json.loads(file.read_text())
    assert len(solved) == 600
    checked = 0
    for text, answer in list(solved.items())[:: 10 if plies.start < 25 else 2]:
        board = [[{".": 0, "x": 1, "o": -1}[cell] for cell in row] for row in text.split("/")]
        stones = [cell for row in board for cell in row if cell]
        assert sum(stones) == -(len(stones) % 2), "the mover's turn"
        assert 15 <= len(stones) <= 30
        if len(stones) in plies:
            values = connect_four_solver.values(board)
            best = max(values.values())
            assert answer == {"value": best, "best": [move for move, value in values.items() if value == best]}
            assert len(set(values.values())) > 1
            checked += 1
    assert checked > 30
