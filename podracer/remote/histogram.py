"""A histogram of durations, in the form that Prometheus reads."""

from __future__ import annotations

import bisect

BOUNDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds up to which each bucket counts; one more counts all that took longer."""


class Histogram:
    """Seconds, of which only counts and a sum are kept. Whoever calls it holds a lock."""

    def __init__(self):
        self.counts, self.sum = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> list[str]:
        """In Prometheus's format, in which a bucket counts those below it too."""
        found, so_far = [f"# TYPE {name} histogram"], 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts):
            so_far += count
            found.append(f'{name}_bucket{{le="{bound}"}} {so_far}')
        return [*found, f"{name}_sum {self.sum:.17g}", f"{name}_count {so_far}"]
