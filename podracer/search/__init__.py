"""Tree search, and the models that it searches."""

# pyright: reportUnsupportedDunderAll=false
# Its public modules, imported only where they are used.
__all__ = ["prefix_models", "search", "tree", "world_models"]
