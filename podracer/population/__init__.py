"""Population based training: members copy better ones and vary their tunable numbers.

`config` has the settings, `evolution` the rules (docs/populations.md).
"""

# pyright: reportUnsupportedDunderAll=false
# Its public modules, imported only where they are used.
__all__ = ["config", "evolution"]
