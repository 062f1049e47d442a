"""The command line (see `podracer.cli.main`)."""

from podracer.cli.main import main, run

__all__ = ["main", "run"]
