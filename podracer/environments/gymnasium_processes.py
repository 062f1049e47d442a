"""Lanes in processes of their own: the text of their errors, and the script that begins them."""

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
    """An environment failed in its process; the message says with what and where."""


class Lane(gymnasium.Wrapper):
    """An environment whose errors say where they were raised: their tracebacks stay in their process."""

    def generators(self) -> dict[str, str]:
        """The states of its random generators (see `gymnasium_state.generators`)."""
        return gymnasium_state.generators(self.env)

    def reset(self, **arguments: Any) -> Any:
        return self._told(self.env.reset, **arguments)

    def step(self, action: Any) -> Any:
        return self._told(self.env.step, action)

    def _told(self, function: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
        try:
            return function(*args, **arguments)
        except Exception as error:
            own_code.show(error)
            raise LaneError(own_code.told(error)) from error


def require_guard() -> None:
    """Checks that the script that runs can be imported by processes.

    Raises:
      ValueError: where it has no `if __name__ == "__main__"`, and so each of them would begin as this one did.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:  # a notebook, or a shell: nothing is imported
        return
    if multiprocessing.current_process().name.startswith("Worker<"):
        sys.exit(1)  # a lane whose import of the script comes here: who began it says so
    try:
        with open(script, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, UnicodeDecodeError):  # not Python's text: an executable
        return
    compared = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    if not any("__name__" in ast.unparse(node) for node in compared):
        raise ValueError(GUARD.format(script))
