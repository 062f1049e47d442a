"""The result of a sweep: its table, the winner on fresh seeds, and its files."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from podracer.result import plots
from podracer.result.result import Result
from podracer.run import rundir
from podracer.sweeps import picture, table
from podracer.sweeps.plan import Plan

FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep after its waves.

    Attributes:
      plan: its configurations and seeds.
      rows: a row for each configuration that is trained: the best mean over seeds first, diverged ones last.
      fresh: the best configuration, trained and evaluated again with seeds that had no part in its choice; None before
        the sweep is complete.
      results: its runs.
      command: the line that trains it.
      at_once: members of a wave, at most.
      settings: the settings that all members share.
      out: the directory, or None.
    """

    plan: Plan
    rows: list[table.Row]
    fresh: table.Row | None = None
    results: list[Result] = dataclasses.field(default_factory=list)
    command: str = ""
    at_once: int = 1
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    out: pathlib.Path | None = None

    @property
    def best(self) -> dict[str, float]:
        """The numbers of the configuration with the best mean over seeds."""
        return dict(self.rows[0].hyper) if self.rows else {}

    def to_json(self) -> dict[str, Any]:
        """The content of `sweep.json`."""
        best = None
        if self.fresh:
            of_sweep, fresh = self.rows[0].to_json(), self.fresh.to_json()
            best = {"hyper": self.best, "sweep": of_sweep, "fresh": fresh, "command": self.command}
        return {
            "request": self.plan.request(),
            "at_once": self.at_once,
            "settings": self.settings,
            "complete": self.fresh is not None,
            "best": best,
            "rows": [row.to_json() for row in self.rows],
        }

    def write(self) -> None:
        """Writes `sweep.json` and, of a complete sweep, `sweep.png` into the directory, if there is one.

        Raises:
          WriteError: where the disk refuses.
        """
        if self.out is None:
            return
        with rundir.writing(self.out / FILE):
            rundir.write_json(self.out / FILE, self.to_json())
        if self.fresh:
            with rundir.writing(self.out / "sweep.png"):
                self.plot()

    def plot(self, path: str | pathlib.Path | None = None) -> plots.Picture:
        """Draws the return against each number; as `sweep.png` in the directory, or in a temporary one, by default."""
        title = f"{self.settings['agent']} on {self.settings['env']}"
        path = path or plots.default_path(self.out, "sweep.png")
        return picture.draw(self.rows, self.fresh, self.plan.hyper, path, title=title)

    def __repr__(self) -> str:
        lines = [table.text(self.rows)]
        if self.fresh:
            chosen = ", ".join(f"{name}={value:g}" for name, value in self.best.items())
            lines += [
                "",
                f"best: {chosen}",
                f"  in the sweep, where it was chosen: {table.score(self.rows[0])}",
                f"  again, on fresh seeds and episodes: {table.score(self.fresh)}",
                f"train it with: {self.command}",
            ]
        return "\n".join(lines)
