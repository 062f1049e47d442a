"""The parts of a run that both drivers share: settings, state, checkpoints, metrics and the run directory."""

# pyright: reportUnsupportedDunderAll=false
# Its public modules, imported only where they are used.
__all__ = ["config", "driver"]
