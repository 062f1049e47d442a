"""Connect four: stones fall to the bottom of a column, and four in a row win."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax import board_game

_ROWS, _COLUMNS = 6, 7
_COLUMN = np.arange(_COLUMNS, dtype=np.int32)
_BITS = np.left_shift(np.int32(1), _COLUMN)
_CELLS = np.arange(_ROWS * _COLUMNS, dtype=np.int32).reshape(_ROWS, _COLUMNS)
_SYMMETRIES = board_game.Symmetries(
    cells=np.stack([_CELLS.reshape(-1), _CELLS[:, ::-1].reshape(-1)]), actions=np.stack([_COLUMN, _COLUMN[::-1]])
)


@dataclasses.dataclass(frozen=True)
class ConnectFourOptions:
    """Options of `ConnectFour`.

    Attributes:
      opening_plies: largest number of random plies that a game opens with, drawn from 0 on; none of them ends it.
    """

    opening_plies: int = 0

    def __post_init__(self):
        board_game.check_opening(self)


class ConnectFourState(NamedTuple):
    """A position, as its mover sees it.

    Attributes:
      board: int8 [6, 7]; 1 the mover's stones, -1 the other's; row 0 is the top.
      to_play: int32 []; 0 for the first mover.
      over: bool [].
    """

    board: jax.Array
    to_play: jax.Array
    over: jax.Array


class ConnectFour(board_game.BoardGame):
    """Connect four on 6 rows and 7 columns, a `BoardGame`.

    Action: `Discrete(7)`; the column that the next stone falls into.
    End: four in a row, a column or a diagonal win; a full board is a draw: after 42 plies at most.
    """

    def __init__(self, options: ConnectFourOptions = ConnectFourOptions()):
        super().__init__("connect_four", (_ROWS, _COLUMNS), _COLUMNS, 42, options.opening_plies, _SYMMETRIES)

    def start(self) -> ConnectFourState:
        """Returns the empty board."""
        return ConnectFourState(jnp.zeros((_ROWS, _COLUMNS), jnp.int8), jnp.int32(0), jnp.asarray(False))

    def legal(self, state: ConnectFourState) -> jax.Array:
        """Returns the columns that are not full, bool [7]."""
        return state.board[0] == 0

    def play(self, state: ConnectFourState, action: jax.Array) -> tuple[ConnectFourState, jax.Array, jax.Array]:
        """Drops a stone."""
        taken = state.board != 0
        supported = jnp.concatenate([taken[1:], jnp.ones((1, _COLUMNS), bool)])
        board = jnp.where(~taken & supported & (action == _COLUMN)[None], jnp.int8(1), state.board)
        won = has_four(board == 1)
        return state._replace(board=board), won.astype(jnp.float32), won | jnp.all(board[0] != 0)


def has_four(stones: jax.Array) -> jax.Array:
    """Returns True, bool [], if four of `stones`, bool [6, 7], are in a line."""
    rows = jnp.sum(jnp.where(stones, _BITS, 0), axis=1)  # a row's stones as bits
    lines = rows & (rows >> 1) & (rows >> 2) & (rows >> 3)
    found = jnp.any(lines != 0)
    # Columns and diagonals: four rows above each other, of which each is moved by a column more than the one before.
    for shifts in ((0, 0, 0, 0), (0, 1, 2, 3), (3, 2, 1, 0)):
        a, b, c, d = (rows[i : i + 3] << shift for i, shift in enumerate(shifts))
        found |= jnp.any((a & b & c & d) != 0)
    return found
