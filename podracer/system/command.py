"""The process of a command."""

from __future__ import annotations

import time

IS_COMMAND = False
"""True in a process that `podracer.cli.main` runs: all code in it is ours, or a library's."""

BEGAN = time.time()
"""Seconds since 1970 when this process began to import our code."""
