"""The command line (see `podracer.cli.commands`)."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from podracer.run.stopping import Ending


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits with its code, or by the signal that stopped it."""
    ending = Ending()
    atexit.register(ending)  # the first to be registered is the last to be called
    # As `python -m` has it: `gymnasium:my_module:Reach-v0` finds modules beside the shell.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    ending.code = run(list(sys.argv[1:] if argv is None else argv))
    sys.exit(ending.code)


def run(argv: list[str]) -> int:
    """Runs a command; returns its exit code."""
    if argv[:1] == ["serve-envs"]:  # workers need no JAX, which takes memory and seconds
        from podracer.cli import serve

        return serve.run(argv[1:])
    from podracer.cli import commands

    return commands.run(argv)
