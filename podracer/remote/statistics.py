"""Counts and times of what happens at a hub, as metrics and as Prometheus reads them."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from podracer.remote.blocks import Pool, State
from podracer.remote.histogram import Histogram

BREAKS: tuple[str, ...] = ("left", "violation", "failed", "late")
"""Reasons for the loss of a block: its worker's stream ended, by itself or because it broke a rule; its environments
failed, or took too long."""


class HubStatistics:
    """Counts of a hub; they are updated with the hub's lock.

    Attributes:
      counts: rows, messages and bytes.
      breaks: blocks that were lost, for each of `BREAKS`.
      rejected: streams that were ended because of what their workers did, by reason.
      seconds: from actions to rows ("round"), of environments ("env"), and of waiting for rows ("wait").
    """

    def __init__(self):
        self.counts: collections.Counter[str] = collections.Counter()
        self.breaks: collections.Counter[str] = collections.Counter(dict.fromkeys(BREAKS, 0))
        self.rejected: collections.Counter[str] = collections.Counter()
        self.seconds = {name: Histogram() for name in ("round", "env", "wait")}
        self._env_seconds = 0.0

    def add_rows(self, lanes: int, num_bytes: int, env_seconds: float, round_seconds: float | None) -> None:
        """Counts a message of rows.

        Args:
          lanes: rows in it.
          num_bytes: of its payload.
          env_seconds: that the environments took.
          round_seconds: since the actions were sent; None for the first rows of a block, which answer none.
        """
        if round_seconds is not None:
            self.seconds["round"].add(round_seconds)
            self.seconds["env"].add(env_seconds)
        self.counts["rows"] += lanes
        self.counts["bytes_up"] += num_bytes
        self.counts["messages"] += 1
        self._env_seconds += env_seconds

    def histograms(self) -> list[str]:
        """Lines of Prometheus' text for `seconds`."""
        found = [each.lines(f"podracer_remote_{name}_seconds") for name, each in self.seconds.items()]
        return [line for lines in found for line in lines]

    def labelled(self, pools: Sequence[Pool]) -> dict[str, tuple[str, Mapping[str, float]]]:
        """Numbers of several kinds: the label's name, and a number for each of its values."""
        lanes = {state: sum(block.lanes for pool in pools for block in pool.of[state]) for state in State}
        return {
            "lanes": ("state", {state.lower(): n for state, n in lanes.items()}),
            "breaks": ("reason", dict(self.breaks)),
            "rejected": ("reason", dict(self.rejected)),
            "bytes": ("direction", {way: self.counts[f"bytes_{way}"] for way in ("up", "down")}),
        }

    def metrics(self, pools: Sequence[Pool], num_sessions: int) -> dict[str, float]:
        """Numbers by name, as they are logged with those of training."""
        counts = ("rows", "filler_rows", "stale", "bytes_up", "bytes_down", "messages")
        return {
            "remote/sessions": float(num_sessions),
            "remote/lanes": float(sum(pool.lanes for pool in pools)),
            "remote/lanes_working": float(sum(pool.live for pool in pools)),
            "remote/lanes_ready": float(sum(block.lanes for pool in pools for block in pool.of[State.READY])),
            "remote/breaks": float(self.breaks.total()),
            "remote/rejected": float(self.rejected.total()),
            "remote/env_seconds": self._env_seconds,
            "remote/batch_fill": 1.0 - self.counts["filler_rows"] / max(self.counts["shown_rows"], 1),
        } | {f"remote/{name}": float(self.counts[name]) for name in counts}
