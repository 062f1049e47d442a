"""Imports of user code that a run names, and consent before it runs.

A run directory may come from anybody. To evaluate its policy, the module of its environment is imported, and so run.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from podracer import environments


def import_path(thing: Any) -> str | None:
    """Returns the `module:name` that imports a class or function, or None without one, as for a lambda."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name or module == "__main__":
        return None
    return f"{module}:{name}" if _attribute(sys.modules.get(module), name) is thing else None


def check_name(directory: pathlib.Path, stored: Mapping[str, Any], trust: bool) -> None:
    """Asks for consent if the environment's name, or a task's, has a module that is not imported yet.

    Args:
      directory: the run's directory.
      stored: its description.
      trust: True gives consent.

    Raises:
      ValueError: without consent.
    """
    for module in environments.modules_of(stored["env"]):
        if not trust and module not in sys.modules:
            raise ValueError(
                f"{directory} was trained on {stored['env']}, and to play it the module {module} is imported, which "
                "runs its code: add --trust (in Python, trust=True) if you trust that."
            )


def restored(directory: pathlib.Path, stored: Mapping[str, Any], part: str, trust: bool) -> Any:
    """Imports a part of a run that was given as an object.

    Raises:
      ValueError: if it cannot be imported, or without consent.
    """
    path = stored.get("imports", {}).get(part)
    if path is None:
        raise ValueError(f"{directory} was trained with your own {part}; in Python, give it as {part}=.")
    if not trust:
        raise ValueError(
            f"{directory} was trained with your own {part}, {path}: add --trust to import it, which runs its code (in "
            f"Python, trust=True or {part}=...)."
        )
    module, _, name = path.partition(":")
    try:
        found = _attribute(importlib.import_module(module), name)
    except Exception as error:
        raise ValueError(
            f"{directory} was trained with your own {part}, {path}, which cannot be imported here "
            f"({type(error).__name__}: {error}); go to the folder that has it, or give it in Python as {part}=."
        ) from None
    if found is None:
        raise ValueError(f"{directory} was trained with your own {part}, {path}, but {module} has no {name} any more.")
    return found


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module
