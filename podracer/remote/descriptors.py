"""Files that a learner may have open: connections must leave some for its checkpoints."""

from __future__ import annotations

import contextlib
import resource

RESERVED = 512
"""For everything but connections, such as checkpoints and environments; half of them all where there are so few."""


def room(connections: int) -> int:
    """Raises the soft limit of open files by what connections need; returns how many connections there is room for."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (1 << 30 if each == resource.RLIM_INFINITY else each for each in limits)
    wanted = min(connections + RESERVED, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system may have a limit of its own beside these
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
            soft = wanted
    return min(connections, soft - min(RESERVED, soft // 2))
