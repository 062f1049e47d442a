"""The command line of a benchmark whose arguments are a dataclass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from podracer.cli.arguments import InputError, parse


def run(name: str, arguments: type, main: Callable[[Any], int], argv: Sequence[str] | None = None) -> int:
    """Parses a command line and runs a benchmark; returns its exit code, which is 2 after a mistake in the line.

    Args:
      name: of the file, without its ending.
      arguments: the dataclass.
      main: runs the benchmark with an instance of it.
      argv: the words that the user typed; those of this process if None.
    """
    prog = f"python benchmarks/{name}.py"
    try:
        parsed = parse(arguments, list(sys.argv[1:] if argv is None else argv), prog)
    except (InputError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return main(parsed)
