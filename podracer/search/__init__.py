"""Tree search, and the learned models to search in."""

# pyright: reportUnsupportedDunderAll=false
# The public modules, each imported at its first use.
__all__ = ["prefix_models", "search", "tree", "world_models"]
