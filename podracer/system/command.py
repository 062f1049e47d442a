"""The process of a command."""

from __future__ import annotations

IS_COMMAND = False
"""True in a process that `podracer.cli.main` runs: all code in it is ours, or a library's."""
