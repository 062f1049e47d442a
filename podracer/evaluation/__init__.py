"""The strength of a policy: evaluations by episodes, matches between players, and ratings."""

# pyright: reportUnsupportedDunderAll=false
# Its public modules, imported only where they are used.
__all__ = ["elo", "matches", "players"]
