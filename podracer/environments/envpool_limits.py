"""Time limits of EnvPool's tasks where they differ from `max_episode_steps`, as played with EnvPool 1.2.5."""

from __future__ import annotations

FIXED = ("envpool.jumanji", "envpool.highway", "envpool.pgx")
"""Families whose tasks end by their own rules, whatever limit is asked for; `ADJUSTABLE` names exceptions."""

ADJUSTABLE = ("Sokoban-v0",)

FIXED_TASKS = ("Catch-v0", "CliffWalking-v0", "CliffWalking-v1", "CliffWalkingSlippery-v1")
"""Tasks of other families with no limit that could be set."""

ENDLESS = ("LaneKeeping-v0", "lane-keeping-v0")
"""Tasks that never end, though they name a limit."""

LATE = ("envpool.gfootball",)
"""Families that end a step after the limit."""

REPORTED_AS_ENDS = (
    *("Cleaner-v0", "Connector-v2", "MMST-v0", "Maze-v0", "PacMan-v1", "RobotWarehouse-v0", "RubiksCube-v0"),
    *("RubiksCube-partly-scrambled-v0", "SearchAndRescue-v0", "SlidingTilePuzzle-v0", "Snake-v1", "Tetris-v0"),
)
"""Tasks that report their time limit as an end of the task; those of Jumanji that have one, but for two."""


def _family(task: str) -> str:
    from envpool.registration import registry

    return str(registry.specs[task][0])


def _name(task: str) -> str:
    return task.rpartition("/")[2]


def check_adjustable(task: str) -> None:
    """Checks that a task's time limit can be set.

    Raises:
      ValueError: where EnvPool would take the setting and not follow it.
    """
    if _name(task) in FIXED_TASKS or (_family(task) in FIXED and _name(task) not in ADJUSTABLE):
        raise ValueError(
            f"max_episode_steps has no effect on {task}, whose episodes end by its own rules; leave it out."
        )


def longest_episode(task: str, limit: int) -> int | None:
    """The number of steps of a task's longest episode, None if there is none, for the limit that EnvPool names."""
    if _name(task) in ENDLESS:
        return None
    return limit + (_family(task) in LATE)


def is_reported_as_end(task: str) -> bool:
    """True for a task that reports its time limit as its end, which is a truncation."""
    return _name(task) in REPORTED_AS_ENDS
