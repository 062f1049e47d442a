"""Rules of games for two in plain Python, written without looking at speed, and exact play of tic-tac-toe."""

from __future__ import annotations

import functools

DIRECTIONS = [(-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1)]


class Game:
    """A game in progress: `cells[row][column]` is None, 0 or 1, the player whose stone is there; `turn` is to play."""

    def __init__(self, height: int, width: int):
        self.height, self.width = height, width
        self.cells: list[list[int | None]] = [[None] * width for _ in range(height)]
        self.turn, self.over = 0, False

    def at(self, row: int, column: int) -> int | None:
        """The player whose stone is in a cell; None for an empty cell and outside of the board."""
        inside = 0 <= row < self.height and 0 <= column < self.width
        return self.cells[row][column] if inside else None

    def full(self) -> bool:
        return all(cell is not None for row in self.cells for cell in row)

    def has_line(self, player: int, length: int) -> bool:
        """Returns True if so many stones of a player are in a line."""
        for row in range(self.height):
            for column in range(self.width):
                for down, right in DIRECTIONS if self.cells[row][column] == player else []:
                    if all(self.at(row + i * down, column + i * right) == player for i in range(length)):
                        return True
        return False

    def legal(self) -> list[int]:
        """The actions that may be played."""
        raise NotImplementedError

    def put(self, action: int) -> int:
        """Plays a legal action for `turn`; sets `over` at the end and returns the reward of the player."""
        raise NotImplementedError

    def play(self, action: int) -> int:
        """Plays an action, legal or not; returns the reward of the player who acted."""
        if action not in self.legal():
            self.over, reward = True, -1
        else:
            reward = self.put(action)
        self.turn = 1 - self.turn
        return reward

    def board(self) -> list[list[int]]:
        """As the player to move sees it: 1 the own stones, -1 the other's."""
        return [[0 if cell is None else 1 if cell == self.turn else -1 for cell in row] for row in self.cells]


class TicTacToe(Game):
    def __init__(self):
        super().__init__(3, 3)

    def legal(self) -> list[int]:
        return [3 * row + column for row in range(3) for column in range(3) if self.cells[row][column] is None]

    def put(self, action: int) -> int:
        self.cells[action // 3][action % 3] = self.turn
        won = self.has_line(self.turn, 3)
        self.over = won or self.full()
        return int(won)


class ConnectFour(Game):
    def __init__(self):
        super().__init__(6, 7)

    def legal(self) -> list[int]:
        return [column for column in range(7) if self.cells[0][column] is None]

    def put(self, action: int) -> int:
        row = max(row for row in range(6) if self.cells[row][action] is None)
        self.cells[row][action] = self.turn
        won = self.has_line(self.turn, 4)
        self.over = won or self.full()
        return int(won)


class Othello(Game):
    def __init__(self, size: int):
        super().__init__(size, size)
        half = size // 2
        self.cells[half - 1][half] = self.cells[half][half - 1] = 0
        self.cells[half - 1][half - 1] = self.cells[half][half] = 1
        self.passed = False

    def turned(self, row: int, column: int) -> list[tuple[int, int]]:
        """The cells that a disc of `turn` would turn."""
        found = []
        if self.cells[row][column] is not None:
            return found
        for down, right in DIRECTIONS:
            enclosed, y, x = [], row + down, column + right
            while self.at(y, x) == 1 - self.turn:
                enclosed.append((y, x))
                y, x = y + down, x + right
            if self.at(y, x) == self.turn:
                found += enclosed
        return found

    def legal(self) -> list[int]:
        n = self.height
        return [n * y + x for y in range(n) for x in range(n) if self.turned(y, x)] or [n * n]

    def put(self, action: int) -> int:
        passes = action == self.height**2
        if not passes:
            row, column = divmod(action, self.width)
            for y, x in [*self.turned(row, column), (row, column)]:
                self.cells[y][x] = self.turn
        stones = [cell for row in self.cells for cell in row]
        mine, other = stones.count(self.turn), stones.count(1 - self.turn)
        self.over = None not in stones or mine == 0 or other == 0 or (passes and self.passed)
        self.passed = passes
        return ((mine > other) - (mine < other)) if self.over else 0


LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


@functools.cache
def tic_tac_toe_values(board: tuple[int, ...]) -> dict[int, int]:
    """The value of every legal action for the player to move, with best play: 1, 0 or -1; {} where the game is over.

    `board` holds 9 cells, 1 for stones of the player to move and -1 for the other's.
    """
    if any(all(board[i] == -1 for i in line) for line in LINES):
        return {}
    values = {}
    for action in (i for i in range(9) if board[i] == 0):
        after = tuple(-(1 if i == action else cell) for i, cell in enumerate(board))
        won = any(all(after[i] == -1 for i in line) for line in LINES)
        values[action] = 1 if won else -max(tic_tac_toe_values(after).values(), default=0)
    return values
