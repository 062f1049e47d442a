"""The replay: a buffer of rollouts (`buffer`) over pure functions of a ring (`ring`), of draws from it (`sampling`) and
of sweeps over it."""

from podracer.replay.buffer import Buffer, make
from podracer.replay.ring import (
    LEAST_PRIORITY,
    PriorityState,
    Ring,
    Sample,
    priority_state,
    with_priority_state,
)
from podracer.replay.sampling import BLOCK
from podracer.replay.shape import RingShape

__all__ = [
    "BLOCK",
    "LEAST_PRIORITY",
    "Buffer",
    "PriorityState",
    "Ring",
    "RingShape",
    "Sample",
    "make",
    "priority_state",
    "with_priority_state",
]
