"""The rows of `pbt.jsonl`: what each member of an evolving population did in each generation."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from podracer.run import metrics

FILE = "pbt.jsonl"
"""The file of a run directory with a row for each member and generation."""


def read(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the rows; a line that is damaged is left out, which is said, and a last one that was cut off."""
    return (row for row in metrics.stream(path) if row.keys() >= {"generation", "member"})
