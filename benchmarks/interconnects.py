"""The cost of an all-reduce and of an update on many devices: a model, not a measurement.

    E = 1 / (1 + t_comm / t_c)        t_comm: sum over an update's all-reduces of  latency + 2 (n - 1) / n bytes / W

Latencies and bandwidths of TPUs are from jax-ml/scaling-book (tpus, sharding); those of an H200, and the rates of
computing, are estimates. docs/results/scaling.md shows the tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

HOP = 1e-6
"""Seconds of a hop on a torus."""

SIZES = (8, 128, 2048)
"""Devices in the tables."""


@dataclasses.dataclass(frozen=True)
class Network:
    """Parameters of an agent, and the work of an update on each device.

    Attributes:
      name: the usual name.
      num_params: float32.
      flops: FLOPs of an update on each device.
      large: all-reduces of the gradient in an update.
      small: other all-reduces, which cost their latency.
    """

    name: str
    num_params: int
    flops: float
    large: int
    small: int

    @property
    def bytes(self) -> int:
        return 4 * self.num_params


NETWORKS = (
    Network("V-trace, catch, MLP; 1,024 x 20 rows", 7_684, 0.0, 1, 4),
    Network("V-trace, shallow; 1,280 rows", 677_943, 31e9, 1, 4),
    Network("V-trace, ResNet; 1,280 rows", 1_091_031, 556e9, 1, 4),
    Network("PPO, Nature; 4,096 rows", 1_687_719, 1.28e12, 16, 8),
    Network("R2D2, Nature, LSTM 512; 64 x 121 rows", 4_326_567, 620e9, 1, 8),
)
CATCH_SECONDS = 1e-3
"""The seconds of an update of catch, which is too small for its arithmetic to predict them."""


def torus(bytes: float, axes: tuple[int, ...], wrapped: Callable[[int], bool], bandwidth: float) -> float:
    """Seconds on a torus.

    Args:
      bytes: size of the array in bytes.
      axes: devices along each.
      wrapped: True if an axis of so many devices is a ring.
      bandwidth: bytes a second of an axis that is one; half of it where it is not.
    """
    n = math.prod(axes)
    latency = sum(HOP * (x if wrapped(x) else 2 * (x - 1)) for x in axes)
    return latency + 2 * (n - 1) / n * bytes / sum(bandwidth if wrapped(x) else bandwidth / 2 for x in axes)


def v4(bytes: float, n: int) -> float:
    axes = {8: (2, 2, 2), 128: (4, 4, 8), 2048: (8, 16, 16)}[n]
    return torus(bytes, axes, lambda x: x >= 4, 9e10)


def v5e(bytes: float, n: int) -> float:
    """Slices of at most 256 chips; between those, the data centre's network."""
    slices = max(1, n // 256)
    axes = {8: (2, 4), 128: (8, 16), 256: (16, 16)}[n // slices]
    within = torus(bytes, axes, lambda x: x == 16, 9e10)
    if slices == 1:
        return within
    return within + 300e-6 + 2 * (slices - 1) / slices * bytes / (3.1e9 * 256)


def h200(bytes: float, n: int) -> float:
    """NVLink within nodes of 8, and half of 4e11 bytes a second between them."""
    nodes = n // 8
    within = 15e-6 + 2 * 7 / 8 * bytes / 1e11
    return within + 12e-6 * math.log2(nodes) + 2 * (nodes - 1) / nodes * bytes / 2e11


DEVICES = {"v4": (v4, 20e12), "v5e": (v5e, 14e12), "H200": (h200, 30e12)}
"""The time of an all-reduce and the arithmetic of a second, by device."""


def efficiency(network: Network, device: str, n: int, packed: bool = False) -> float:
    """E, the share of n times the rate of one device; `packed`: all that is small in one all-reduce."""
    all_reduce, rate = DEVICES[device]
    computing = network.flops / rate or CATCH_SECONDS
    small = min(network.small, 1) if packed else network.small
    communicating = network.large * all_reduce(network.bytes, n) + small * all_reduce(0, n)
    return 1 / (1 + communicating / computing)


def all_reduce_table() -> list[str]:
    """Microseconds of one all-reduce of the gradient."""
    lines = ["| one all-reduce, microseconds | bytes | " + " | ".join(map(_header, DEVICES)) + " |"]
    lines.append("|---|---|" + "---|" * len(DEVICES))
    for network in NETWORKS:
        cells = [" / ".join(f"{1e6 * call(network.bytes, n):.0f}" for n in SIZES) for call, _ in DEVICES.values()]
        size = f"{network.bytes / 1e6:.1f} MB" if network.bytes > 1e6 else f"{network.bytes / 1e3:.0f} kB"
        lines.append(f"| {network.name}: {network.num_params:,} parameters | {size} | {' | '.join(cells)} |")
    return lines


def efficiency_table() -> list[str]:
    """E, as programs are and with all that is small packed into one all-reduce."""
    lines = ["| share of linear | all-reduces | " + " | ".join(map(_header, DEVICES)) + " |"]
    lines.append("|---|---|" + "---|" * len(DEVICES))
    for network in NETWORKS:
        for packed in (False, True):
            number = network.large + (1 if packed else network.small)
            cells = [" / ".join(f"{efficiency(network, d, n, packed):.2f}" for n in SIZES) for d in DEVICES]
            lines.append(f"| {network.name} | {number}{', packed' * packed} | {' | '.join(cells)} |")
    return lines


def _header(device: str) -> str:
    sizes = [f"{n // 256} x 256" if device == "v5e" and n > 256 else f"{n:,}" for n in SIZES]
    return f"{device}: {' / '.join(sizes)}"


if __name__ == "__main__":
    print("\n".join([*all_reduce_table(), "", *efficiency_table()]))
