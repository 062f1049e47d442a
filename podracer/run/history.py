"""The metric rows of a run in memory: all of a short run, evenly fewer of a long one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]
"""One flat row: `env_steps`, `updates`, and metrics by name; `member` in a population."""

MAX_ROWS = 20_000
"""The most rows in memory, except for large populations. A row takes 2 to 3 kB."""

MAX_ROWS_PER_MEMBER = 200
"""The number of rows that each member may have in any case."""


class History:
    """Rows in their order of arrival, bounded in number.

    When there are too many, every second training row and every second evaluation are dropped, then every fourth, and
    so on. The rows of a population's members that belong together stay together. The newest of both kinds and the best
    evaluation always stay.

    Args:
      limit: the most rows; 200 for each member of a population, if that is more.

    Attributes:
      rows: the remaining rows.
    """

    def __init__(self, limit: int = MAX_ROWS):
        self.rows: list[Row] = []
        self._limit, self._stride, self._members = limit, 1, 1
        self._places: list[tuple[bool, int]] = []  # of each row: whether it is an evaluation, and its number
        self._newest = {False: -1, True: -1}
        self._at: dict[bool, Any] = {}
        self._best: Row | None = None

    def add(self, row: Row) -> None:
        """Adds a row."""
        evaluation, at = _is_evaluation(row), (row["updates"], row.get("member", 0))
        before = self._at.get(evaluation)
        # Those of later members have the same updates; without members every row is one by itself.
        if before is None or at[0] != before[0] or at[1] <= before[1]:
            self._newest[evaluation] += 1
        self._at[evaluation] = at
        self.rows.append(row)
        self._places.append((evaluation, self._newest[evaluation]))
        if row.get("eval/return_mean", -math.inf) > (self._best or {}).get("eval/return_mean", -math.inf):
            self._best = row
        self._members = max(self._members, at[1] + 1)
        if len(self.rows) > max(self._limit, MAX_ROWS_PER_MEMBER * self._members):
            self._thin()

    def _thin(self) -> None:
        """Doubles the stride between rows until at most half of them are left."""
        while True:
            indices = [i for i, place in enumerate(self._places) if self._stays(self.rows[i], *place)]
            if len(indices) <= len(self.rows) // 2:
                break
            self._stride *= 2
        self.rows[:] = [self.rows[i] for i in indices]
        self._places = [self._places[i] for i in indices]

    def _stays(self, row: Row, evaluation: bool, place: int) -> bool:
        return place % self._stride == 0 or place == self._newest[evaluation] or row is self._best


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return "eval/return_mean" in row or not any("/" in name for name in row)  # nothing, of a member that has diverged
