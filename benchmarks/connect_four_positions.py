"""Positions of connect four with the moves that keep their values, for `benchmarks/connect_four.py`.

    python benchmarks/connect_four_positions.py

Writes 600 positions of 15 to 30 plies to `benchmarks/connect_four_positions.json`, each with at least one legal move
that gives away a win or a draw. Half come from random play, whose positions are nearly all won for the mover, and half
from a player who wins in one move, blocks, and moves at random a quarter of the time. The solver is tests'.
"""

from __future__ import annotations

import json
import pathlib
import random
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests.support import connect_four_solver as solver  # noqa: E402

FILE = HERE / "connect_four_positions.json"
POSITIONS, PLIES, BLUNDERS = 600, (15, 30), 0.25

Board = list[list[int]]


def drop(board: Board, column: int) -> Board:
    """The board after a move, as the other player sees it."""
    row = max(y for y in range(6) if board[y][column] == 0)
    after = [[-cell for cell in line] for line in board]
    after[row][column] = -1
    return after


def wins(board: Board, column: int) -> bool:
    """Returns True if a move makes four in a line."""
    cells = {(y, x) for y, line in enumerate(drop(board, column)) for x, cell in enumerate(line) if cell == -1}
    steps = ((0, 1), (1, 0), (1, 1), (1, -1))
    return any(all((y + i * a, x + i * b) in cells for i in range(4)) for y, x in cells for a, b in steps)


def legal(board: Board) -> list[int]:
    """Columns that are not full."""
    return [x for x in range(7) if board[0][x] == 0]


def choose(board: Board, is_tactical: bool, rng: random.Random) -> int:
    """A move of one of the two players."""
    moves = legal(board)
    if is_tactical and rng.random() >= BLUNDERS:
        winning = [move for move in moves if wins(board, move)]
        safe = [move for move in moves if not any(wins(drop(board, move), x) for x in legal(drop(board, move)))]
        moves = winning or safe or moves
    return rng.choice(moves)


def find(plies: int, is_tactical: bool, rng: random.Random) -> tuple[Board, dict[int, int]]:
    """A position of a game that is not over after so many plies, and what its moves are worth."""
    while True:
        board = [[0] * 7 for _ in range(6)]
        for _ in range(plies):
            move = choose(board, is_tactical, rng)
            if wins(board, move):
                break
            board = drop(board, move)
        else:
            values = solver.values(board)
            if len(set(values.values())) > 1:
                return board, values


def main() -> None:
    """Writes the file."""
    rng, lines = random.Random(0), {}
    least, most = PLIES
    while len(lines) < POSITIONS:
        i = len(lines)
        board, values = find(least + i // 2 % (most - least + 1), i % 2 == 1, rng)
        text = "/".join("".join(".xo"[cell] for cell in line) for line in board)
        best = max(values.values())
        lines[text] = {"value": best, "best": [move for move, value in values.items() if value == best]}
        print(f"\r{len(lines)} of {POSITIONS}", end="", flush=True)
    FILE.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in lines.items()) + "\n}\n")
    print(f" positions in {FILE}")


if __name__ == "__main__":
    main()
