"""Lines that say what is unwise, though it can be done."""

from __future__ import annotations

import contextlib
import sys


def note(text: str) -> None:
    """Says a line on standard error, also where no progress is shown; without a reader there it is lost."""
    with contextlib.suppress(OSError):
        print(f"podracer: note: {' '.join(text.split())}", file=sys.stderr, flush=True)
