"""Tic-tac-toe: three in a row."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax import board_game

_CELLS = np.arange(9, dtype=np.int32).reshape(3, 3)
_BITS = np.left_shift(np.int32(1), _CELLS)
_LINES = np.concatenate([_BITS.sum(0), _BITS.sum(1), [np.trace(_BITS), np.trace(_BITS[::-1])]]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class TicTacToeOptions:
    """Options of `TicTacToe`.

    Attributes:
      opening_plies: largest number of random plies that a game opens with, drawn from 0 on; none of them ends it.
    """

    opening_plies: int = 0

    def __post_init__(self):
        board_game.check_opening(self)


class TicTacToeState(NamedTuple):
    """A position, as its mover sees it.

    Attributes:
      board: int8 [3, 3]; 1 the mover's stones, -1 the other's.
      to_play: int32 []; 0 for the first mover.
      over: bool [].
    """

    board: jax.Array
    to_play: jax.Array
    over: jax.Array


class TicTacToe(board_game.BoardGame):
    """Tic-tac-toe, a `BoardGame`: three stones in a row, a column or a diagonal win.

    Action: `Discrete(9)`; the cell for the next stone, row by row.
    End: three in a row, or a full board, which is a draw: after 9 plies at most.
    """

    def __init__(self, options: TicTacToeOptions = TicTacToeOptions()):
        symmetries = board_game.square_symmetries(3, passes=False)
        super().__init__("tic_tac_toe", (3, 3), 9, 9, options.opening_plies, symmetries)

    def start(self) -> TicTacToeState:
        """Returns the empty board."""
        return TicTacToeState(jnp.zeros((3, 3), jnp.int8), jnp.int32(0), jnp.asarray(False))

    def legal(self, state: TicTacToeState) -> jax.Array:
        """Returns the empty cells, bool [9]."""
        return state.board.reshape(-1) == 0

    def play(self, state: TicTacToeState, action: jax.Array) -> tuple[TicTacToeState, jax.Array, jax.Array]:
        """Puts a stone."""
        board = jnp.where(action == _CELLS, jnp.int8(1), state.board)
        mine = jnp.sum(jnp.where(board == 1, _BITS, 0))
        won = jnp.any((mine & _LINES) == _LINES)
        return state._replace(board=board), won.astype(jnp.float32), won | jnp.all(board != 0)
