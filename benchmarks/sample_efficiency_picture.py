"""The picture of the sample efficiency of EfficientZero and its controls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure


def picture(results: Mapping[str, Any], total_steps: Mapping[str, int], arms: list[str], title: str) -> Figure:
    """Draws every seed's steps, by task and arm; of those that never passed, all.

    Args:
      results: the summary, by "task, arm".
      total_steps: of each task.
      arms: in the order of their lines.
      title: above all.
    """
    drawn = Figure(figsize=(9, 4.2), dpi=120, layout="constrained")
    for axes, (name, steps_of_task) in zip(drawn.subplots(1, len(total_steps), sharey=True), total_steps.items()):
        for i, arm in enumerate(arms):
            found = results.get(f"{name}, {arm}")
            if found is None:
                continue
            steps = found["steps"]
            there = [x for x in steps if x is not None]
            axes.plot(there, [i] * len(there), "o", color="tab:blue", alpha=0.6)
            never = len(steps) - len(there)
            axes.plot([found["most"]] * never, [i] * never, "x", color="tab:red")
            if found["median"]:
                axes.plot(found["median"], i, "|", color="black", markersize=16)
        axes.set_title(name, fontsize="medium")
        axes.set_xlim(0, steps_of_task * 1.03)
        axes.set_xlabel("environment steps")
        axes.locator_params(axis="x", nbins=4)
        axes.grid(alpha=0.3)
    drawn.axes[0].set_yticks(range(len(arms)), arms)
    drawn.axes[0].invert_yaxis()
    drawn.suptitle(title, fontsize="medium")
    return drawn
