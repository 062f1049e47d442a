"""The figures of `python benchmarks/remote.py` beside their targets, and the needs of larger runs by these figures.

Everything is computed from `results`, the benchmark's measurements, so that pages can be made from its file.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

DEMANDS = (10_000, 50_000, 100_000, 400_000, 1_000_000)
"""The rows a second of the tables."""

NETWORKS = (1, 10, 25, 100, 400)
"""Networks in Gbit/s of Ethernet; nine tenths of them carry rows."""

GOODPUT = 0.9

NETWORK_FLOPS = {"shallow": 24e6, "ResNet": 434e6}
"""The FLOPs of acting and learning on a frame of 84 x 84: eight times the multiplications of a forward pass."""

H200_FLOPS = 30e12
"""The FLOP/s that these networks reach on an H200, 3 % of its peak in bfloat16: an assumption, not a measurement."""

REPORTED = (
    ("SEED RL, Atari (R2D2, 8 TPU v3 cores)", 260_000 / 4, 84 * 84, 213),
    ("SEED RL, DeepMind Lab (V-trace, 8 TPU v3 cores)", 330_000 / 4, 96 * 72 * 3, 520),
)
"""Runs of Espeholt et al. 2020: rows a second, of four frames each; bytes a row; cores of workers."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The target of a figure.

    Attributes:
      what: the figure in words.
      part: name of a part of the results.
      figure: name of a number in the part.
      bound: the number to reach.
      most: True if the number must stay below the bound instead.
    """

    what: str
    part: str
    figure: str
    bound: float
    most: bool = False

    def share(self, value: float) -> float:
        """The measured share of the target: 1 if it is just met, more if it is exceeded."""
        return self.bound / value if self.most else value / self.bound


TARGETS = (
    Target("CartPole acting, 64 lanes, remote / local", "cartpole, acting", "ratio", 0.25),
    Target("CartPole acting, 2 actors, remote / local", "cartpole, 2 actors, acting", "ratio", 0.40),
    Target("Pong alone, 64 lanes, remote / local", "pong, alone", "ratio", 0.85),
    Target("Pong acting, 64 lanes, remote / local", "pong, acting", "ratio", 0.90),
    Target("ms from actions to rows, median", "latency", "p50", 0.7, most=True),
    Target("ms from actions to rows, 99th percentile", "latency", "p99", 5.0, most=True),
    Target("messages/s there and back, 1 stream", "messages", "1 stream", 1_500),
    Target("messages/s there and back, 8 streams", "messages", "8 streams", 4_000),
    Target("messages/s, the hub alone", "messages", "the hub alone", 30_000),
    Target("bytes of a Pong row on the wire / of the row", "pong, alone", "wire_ratio", 1.02, most=True),
    Target("rows/s with TLS / plain", "ratios of ways", "TLS", 0.8),
    Target("loop busy, CartPole acting", "cartpole, acting", "loop_busy", 0.7, most=True),
)


def beside_targets(results: dict[str, Any]) -> list[list[str]]:
    """The rows [what, figure, target, met?] of the measured targets: misses first, the worst at the top."""
    found = []
    for target in TARGETS:
        value = results.get(target.part, {}).get(target.figure)
        if value is not None and math.isfinite(value):
            sign = "<=" if target.most else ">="
            met = target.share(value) >= 1
            line = [target.what, figure(value), f"{sign} {figure(target.bound)}", "yes" if met else "NO"]
            found.append((met, target.share(value), line))
    return [line for *_, line in sorted(found, key=lambda each: each[:2])]


def figure(number: float) -> str:
    """A number in as many digits as it deserves."""
    return f"{number:.2f}" if abs(number) < 100 else f"{number:,.0f}"


def arithmetic(results: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Tables of the networks and cores that Pong's rows need; the first line of each is its heading. Measured inputs:
    bytes a row; the learner's processor time to take a row in, in one Python process; rows a second of two cores.
    """
    pong = results.get("pong, alone")
    if not pong:
        return {}
    bits, intake, core = 8 * pong["bytes_up"], 1e6 / pong["learner_cpu_us_per_row"], pong["local"] / 2

    def needs(rows: float) -> list[str]:
        gigabits = rows * bits / 1e9
        network = next((f"{g} GbE" for g in NETWORKS if GOODPUT * g >= gigabits), "-")
        processes, cores = math.ceil(rows / intake), math.ceil(rows / core)
        return [f"{rows:,.0f}", f"{gigabits:.2f}", network, f"{processes:,}", f"{cores:,}"]

    heading = ["Gbit/s", "Ethernet", "processes that take rows in", "cores of workers"]
    carried = [[f"{g} GbE", f"{GOODPUT * g * 1e9 / bits:,.0f}"] for g in NETWORKS]
    frames = {name: H200_FLOPS / flops for name, flops in NETWORK_FLOPS.items()}
    checks = [
        [name, f"{rows:,.0f}", f"{8e-9 * rows * size:.1f}", f"{rows / cores:,.0f}", f"{core:,.0f}"]
        for name, rows, size, cores in REPORTED
    ]
    return {
        "demand": [["Pong rows/s", *heading], *(needs(rows) for rows in DEMANDS)],
        "networks": [["network", "Pong rows/s"], *carried],
        "H200": [["one H200 acts and learns", "rows/s", *heading], *([n, *needs(f)] for n, f in frames.items())],
        "reported": [["run", "rows/s", "Gbit/s", "rows/s a core", "rows/s a core here, Pong"], *checks],
    }


def blocks_a_core(round_ms: float, environment_ms: float) -> int:
    """The number of blocks that keep a worker's core busy: while one waits for its actions, others step."""
    return 1 + math.ceil(round_ms / environment_ms)
