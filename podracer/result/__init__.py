"""A run's result: the trained agent, its policy, explanations, pictures and exports."""

# pyright: reportUnsupportedDunderAll=false
# Its public modules, imported only where they are used.
__all__ = ["explainer", "explanation", "policy", "result"]
