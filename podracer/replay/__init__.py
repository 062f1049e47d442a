"""The replay: a ring of rollouts per lane (`ring`), and sweeps that recompute priorities (`refresh`)."""

from podracer.replay.ring import (
    BLOCK,
    LEAST_PRIORITY,
    Ring,
    Sample,
    add,
    changed,
    changes,
    cut,
    gather,
    init,
    sample,
    scaled_priority,
    transitions_since,
    update,
)
from podracer.replay.shape import Layout, generation_of, layout, num_sequences

__all__ = [
    "BLOCK",
    "LEAST_PRIORITY",
    "Layout",
    "Ring",
    "Sample",
    "add",
    "changed",
    "changes",
    "cut",
    "gather",
    "generation_of",
    "init",
    "layout",
    "num_sequences",
    "sample",
    "scaled_priority",
    "transitions_since",
    "update",
]
