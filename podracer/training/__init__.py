"""A run from what was asked for to its result: names resolved, a session, its files."""

# pyright: reportUnsupportedDunderAll=false
# Its public modules, imported only where they are used.
__all__ = ["train"]
