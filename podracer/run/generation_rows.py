"""The rows of `pbt.jsonl`: what each member of an evolving population did in each generation."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

FILE = "pbt.jsonl"
"""The file of a run directory with a row for each member and generation."""


def read(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the rows; a last line that was cut off is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return
