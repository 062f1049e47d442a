"""Othello (Reversi): a disc turns the other player's enclosed discs; more discs win."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax import board_game

_STEPS = np.array([[1, 7, 8, 9]], np.uint32)
"""Four of the directions as distances between bits; the other four are these on the board turned by 180 degrees."""


class Bits(NamedTuple):
    """Sets of cells as 64 bits, 8 for a row of the board: uint32 [2, 1 or 4], of the board and of the turned one.

    Whole boards are shifted and combined in a few operations without any index, and lanes fill the vector units.
    """

    low: Any
    high: Any

    def __and__(self, other: Bits) -> Bits:
        return Bits(self.low & other.low, self.high & other.high)

    def __or__(self, other: Bits) -> Bits:
        return Bits(self.low | other.low, self.high | other.high)

    def shift(self) -> Bits:
        """Shifts every cell a step in each of the four directions; past a border it gets into the next row."""
        return Bits(self.low << _STEPS, (self.high << _STEPS) | (self.low >> (32 - _STEPS)))


@dataclasses.dataclass(frozen=True)
class OthelloOptions:
    """Options of `Othello`.

    Attributes:
      size: the board is size x size; 6 or 8.
      opening_plies: largest number of random plies that a game opens with, drawn from 0 on; none of them ends it.
    """

    size: int = 8
    opening_plies: int = 0

    def __post_init__(self):
        if self.size not in (6, 8):
            raise ValueError(f"OthelloOptions(size={self.size!r}): use 6 or 8.")
        board_game.check_opening(self)


class OthelloState(NamedTuple):
    """A position, as its mover sees it.

    Attributes:
      board: int8 [size, size]; 1 the mover's discs, -1 the other's.
      to_play: int32 []; 0 for the first mover.
      over: bool [].
      passed: bool []; the last ply was a pass.
    """

    board: jax.Array
    to_play: jax.Array
    over: jax.Array
    passed: jax.Array


class Othello(board_game.BoardGame):
    """Othello, a `BoardGame`.

    Action: `Discrete(size^2 + 1)`; the cell for the next disc, row by row. It must enclose discs of the other
      player between itself and another of the mover's, in a row, a column or a diagonal; these become the mover's. The
      last action passes, and is legal only if no other is.
    End: the board is full, a side has no disc, or both have passed; more discs win, and as many draw.
    """

    def __init__(self, options: OthelloOptions = OthelloOptions()):
        size = self._size = options.size
        cell = np.arange(64, dtype=np.uint64).reshape(8, 8)[:size, :size].reshape(-1)
        one, half = np.uint64(1), np.uint64(32)
        bits = np.stack([one << cell, one << (np.uint64(63) - cell)])
        self._words = Bits(bits.astype(np.uint32), (bits >> half).astype(np.uint32))  # [2, size^2]
        # Nothing at the left or right border is enclosed but in its column, and so nothing gets into the next row.
        inside = (cell % np.uint64(8) > 0) & (cell % np.uint64(8) < size - 1) | (_STEPS == 8).T  # [4, size^2]
        low, high = (np.sum(word[:, None] * inside, axis=2, dtype=np.uint32) for word in self._words)
        self._enclosable = Bits(low, high)
        plies, symmetries = 2 * (size**2 - 4) + 2, board_game.square_symmetries(size, passes=True)
        super().__init__("othello", (size, size), size**2 + 1, plies, options.opening_plies, symmetries)

    def start(self) -> OthelloState:
        """Returns the board with two discs each in the middle, crosswise."""
        board, half = np.zeros((self._size, self._size), np.int8), self._size // 2
        board[half - 1 : half + 1, half - 1 : half + 1] = [[-1, 1], [1, -1]]
        return OthelloState(jnp.asarray(board), jnp.int32(0), jnp.asarray(False), jnp.asarray(False))

    def legal(self, state: OthelloState) -> jax.Array:
        """Returns the cells that enclose discs, or else the pass, bool [A]."""
        mine, other = self._pack(state.board == 1), self._pack(state.board == -1)
        cells = self._cells(self._lines(mine, other).shift()) & (state.board == 0)
        return jnp.append(cells.reshape(-1), ~jnp.any(cells))

    def play(self, state: OthelloState, action: jax.Array) -> tuple[OthelloState, jax.Array, jax.Array]:
        """Puts a disc and turns others, or passes."""
        mine, other = self._pack(state.board == 1), self._pack(state.board == -1)
        disc = self._actions[:-1].reshape(state.board.shape) == action
        lines = self._lines(self._pack(disc), other)
        closing = lines.shift() & mine
        closed = (closing.low | closing.high) != 0
        flipped = self._cells(Bits(*(jnp.where(closed, word, jnp.uint32(0)) for word in lines)))
        board = jnp.where(flipped | disc, jnp.int8(1), state.board)
        passed = action == self._actions[-1]
        lead = jnp.sum(board, dtype=jnp.int32)
        over = jnp.all(board != 0) | ~jnp.any(board == 1) | ~jnp.any(board == -1) | (passed & state.passed)
        reward = jnp.where(over, jnp.sign(lead).astype(jnp.float32), 0.0)
        return state._replace(board=board, passed=passed), reward, over

    def _lines(self, start: Bits, other: Bits) -> Bits:
        """Finds the other player's discs next to cells of `start` without a gap, in each direction, [2, 4]."""
        other &= self._enclosable
        lines = start.shift() & other
        for _ in range(self._size - 3):
            lines |= lines.shift() & other
        return lines

    def _pack(self, cells: jax.Array) -> Bits:
        """Packs cells bool [size, size] into bits [2, 1]."""
        cells = cells.reshape(1, -1)
        low, high = (jnp.sum(jnp.where(cells, word, 0), 1, jnp.uint32)[:, None] for word in self._words)
        return Bits(low, high)

    def _cells(self, bits: Bits) -> jax.Array:
        """Unpacks cells in any direction of bits [2, 4], bool [size, size]."""
        low, high = (jnp.bitwise_or.reduce(word, axis=1)[:, None] for word in bits)
        cells = jnp.any(((self._words.low & low) | (self._words.high & high)) != 0, axis=0)
        return cells.reshape(self._size, self._size)
