"""The five games of MinAtar (Young and Tian, 2019), one file each."""

# pyright: reportUnsupportedDunderAll=false
# The public modules, each imported at its first use.
__all__ = ["asterix", "breakout", "freeway", "seaquest", "space_invaders"]
