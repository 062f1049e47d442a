"""Ten tasks of MiniGrid (Chevalier-Boisvert et al., 2023), one file each."""

# pyright: reportUnsupportedDunderAll=false
# The public modules, each imported at its first use.
__all__ = [
    "crossings",
    "doorkey",
    "dynamic_obstacles",
    "empty",
    "four_rooms",
    "key_corridor",
    "lava_gap",
    "memory",
    "multi_room",
    "unlock",
]
