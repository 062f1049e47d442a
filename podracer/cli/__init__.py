"""The command line (see `podracer.cli.commands`)."""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from podracer.system import command, spans
from podracer.system.stopping import Ending


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits with its code, or by the signal that stopped it."""
    command.IS_COMMAND = True
    # Imports and tracing make many objects and little garbage, and collecting it is a tenth of their time.
    gc.set_threshold(100_000, 20, 100)
    ending = Ending()
    atexit.register(ending)  # the first to be registered is the last to be called
    spans.write_at_end()
    argv = list(sys.argv[1:] if argv is None else argv)
    # Modules beside the shell, such as that of `gymnasium:my_module:Reach-v0`, are found where one was asked for, and
    # last: a file `tyro.py` there is none of ours.
    if "--trust" in argv or any(re.search("(^|,) *gymnasium:[^:,]+:[^:,]", word) for word in argv):
        sys.path.append(os.getcwd())
    ending.code = run(argv)
    sys.exit(ending.code)


def run(argv: list[str]) -> int:
    """Runs a command; returns its exit code."""
    if argv[:1] == ["serve-envs"]:  # workers need no JAX, which takes memory and seconds
        from podracer.cli import serve

        return serve.run(argv[1:])
    if argv[:1] == ["launch"]:  # nor do processes that only start others
        from podracer.cli import launch

        return launch.run(argv[1:])
    with spans.span("imports"):
        from podracer.cli import commands
    spans.listen()
    return commands.run(argv)
