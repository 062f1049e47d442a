"""Lanes in processes of their own: their errors, and a check of the script that starts them."""

from __future__ import annotations

import ast
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import gymnasium

from podracer.environments import gymnasium_state
from podracer.system import own_code

GUARD = (
    'vectorization="async": every lane is a process that begins by importing {}, so what starts training there belongs '
    'under if __name__ == "__main__".'
)


class LaneError(RuntimeError):
    """An environment failed in its process; the message has the error and its line."""


class Lane(gymnasium.Wrapper):
    """An environment whose errors name the line that raised them, because tracebacks do not leave their process."""

    def generators(self) -> dict[str, str]:
        """Returns the states of its random generators (see `gymnasium_state.generators`)."""
        return gymnasium_state.generators(self.env)

    def reset(self, **arguments: Any) -> Any:
        return self._call(self.env.reset, **arguments)

    def step(self, action: Any) -> Any:
        return self._call(self.env.step, action)

    def _call(self, function: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
        try:
            return function(*args, **arguments)
        except Exception as error:
            own_code.show(error)
            raise LaneError(own_code.describe(error)) from error


def require_guard() -> None:
    """Checks that processes can import the running script.

    Raises:
      ValueError: if it has no `if __name__ == "__main__"`, so that each process would start training again.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:  # a notebook, or a shell: nothing is imported
        return
    if multiprocessing.current_process().name.startswith("Worker<"):
        sys.exit(1)  # a lane whose import of the script comes here: who began it says so
    try:
        with open(script, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # not Python's text: an executable, whose zeros are either error
        return
    compared = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    if not any("__name__" in ast.unparse(node) for node in compared):
        raise ValueError(GUARD.format(script))
