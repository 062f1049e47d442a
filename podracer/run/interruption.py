"""The error of a run that a signal stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podracer.run import rundir

if TYPE_CHECKING:
    from podracer.result import Result


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped a run in good order: with its checkpoint, if it has a run directory.

    A KeyboardInterrupt, so that a loop over runs ends with it, and `except Exception` does not take it.

    Attributes:
      result: what was learnt until then; `summary` says how far it came.
      signal: its name, such as "SIGINT".
    """

    def __init__(self, result: Result, signal: str):
        summary, own = result.summary, result.description["own"]
        if summary["complete"]:
            then = "the run was complete"
        elif result.run_dir is None:
            then = "without a run_dir only this error's `result` has what was learnt"
        else:
            then = f"continue with {rundir.how_to_resume(result.run_dir, own)}"
        super().__init__(f"stopped by {signal} at {summary['env_steps']:,} steps; {then}")
        self.result, self.signal = result, signal
