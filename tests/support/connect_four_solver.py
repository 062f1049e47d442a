"""Exact values of connect four's late positions: alpha-beta on win, draw and loss, in plain Python.

A set of cells is an integer with 7 bits for a column, of which the lowest is the bottom cell and the highest is never
set, so that no line goes on in the next column. A hundredth of a second at 24 plies, one at 14, and far more before.
"""

from __future__ import annotations

from collections.abc import Sequence

STEP = 7
BOTTOM = sum(1 << STEP * column for column in range(7))
CELLS = BOTTOM * 0b111111
COLUMNS = [0b111111 << STEP * column for column in range(7)]
MIDDLE_FIRST = [COLUMNS[i] for i in (3, 2, 4, 1, 5, 0, 6)]

Table = dict[tuple[int, int], tuple[int, int]]
"""Lowest and highest possible value by the mover's stones and all stones."""


def values(board: Sequence[Sequence[int]], table: Table | None = None) -> dict[int, int]:
    """The value of each legal column for the player to move, with best play: 1, 0 or -1.

    Args:
      board: 6 rows of 7, the top first; 1 where the player to move has a stone, -1 where the other has, else 0. No line
        of four may be there yet.
      table: what was found before, which grows; an own one if None.
    """
    mine, other = (
        sum(1 << STEP * x + 5 - y for y, row in enumerate(board) for x, cell in enumerate(row) if cell == player)
        for player in (1, -1)
    )
    table, taken, found = {} if table is None else table, mine | other, {}
    for column in range(7):
        move = _playable(taken) & COLUMNS[column]
        if move & _winning(mine, taken):
            found[column] = 1
        elif move:
            loses = _winning(other, taken | move) & _playable(taken | move)
            found[column] = -1 if loses else -_value(other, taken | move, -1, 1, table)
    return found


def _value(mine: int, taken: int, low: int, high: int, table: Table) -> int:
    """The value of a position whose mover cannot win at once: exact within (low, high), else a bound."""
    if taken == CELLS:
        return 0
    known_low, known_high = table.get((mine, taken), (-1, 1))
    low, high = max(low, known_low), min(high, known_high)
    if low >= high:
        return low
    other = mine ^ taken
    moves, threats = _playable(taken), _winning(other, taken)
    forced = moves & threats
    if forced & (forced - 1):
        return -1  # two threats, of which one reply leaves one
    moves = (forced or moves) & ~(threats >> 1)  # nothing below a threat
    best, floor = -1, low
    each = [moves & column for column in MIDDLE_FIRST if moves & column]
    for move in sorted(each, key=lambda m: _winning(mine | m, taken | m).bit_count(), reverse=True):
        best = max(best, -_value(other, taken | move, -high, -floor, table))
        floor = max(floor, best)
        if best >= high:
            break
    # Above `low` the value is at least `best`, and below `high` at most.
    known = (best if best > low else known_low, best if best < high else known_high)
    table[mine, taken] = known
    return best


def _playable(taken: int) -> int:
    """The lowest empty cell of every column."""
    return (taken + BOTTOM) & CELLS


def _winning(stones: int, taken: int) -> int:
    """Empty cells that make four in a line of `stones`."""
    found = (stones << 1) & (stones << 2) & (stones << 3)
    for step in (STEP - 1, STEP, STEP + 1):
        above, below = (stones << step) & (stones << 2 * step), (stones >> step) & (stones >> 2 * step)
        found |= above & ((stones << 3 * step) | (stones >> step))
        found |= below & ((stones >> 3 * step) | (stones << step))
    return found & CELLS & ~taken
