"""Lines that say what is unwise, though it can be done."""

from __future__ import annotations

from podracer import console


def note(text: str) -> None:
    """Says a line on standard error, also where no progress is shown; without a reader there it is lost."""
    console.say(f"podracer: note: {' '.join(text.split())}")
