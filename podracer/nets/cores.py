"""Cores, the memory of networks: their protocol, and each by its name."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol

import jax

from podracer.nets.layers import Weights
from podracer.nets.linear_recurrent import LRU, MinGRU
from podracer.nets.recurrent import GRU, LSTM
from podracer.nets.transformer import GTrXL, num_heads
from podracer.types import ArrayTree

CoreName = Literal["none", "lstm", "gru", "mingru", "lru", "gtrxl"]


class Core(Protocol):
    """A memory between a network's torso and its heads.

    The state restarts before every `first` row from that of `start`. So any cut of the rows in two gives the same, and
    acting is a single row. At row 0 it restarts by a selection, and a state of NaN is forgotten. Within an unroll
    minGRU, LRU and GTrXL weigh by 0, which keeps a NaN.
    """

    def start(self, num_lanes: int) -> ArrayTree:
        """Returns the state at an episode's start, zeros [num_lanes, ...]."""
        ...

    def __call__(self, x: jax.Array, first: jax.Array, state: ArrayTree) -> tuple[jax.Array, ArrayTree]:
        """Reads rows in their order.

        Args:
          x: float32 [T, B, F].
          first: bool [T, B]; the state restarts before these rows.
          state: [B, ...]; before row 0.

        Returns:
          The outputs, float32 [T, B, D], and the state after the last row.
        """
        ...


CORES: dict[str, Any] = {"lstm": LSTM, "gru": GRU, "mingru": MinGRU, "lru": LRU, "gtrxl": GTrXL}
"""The classes of cores: `(size, scale, name=...) -> Core`; those of `LAYERED` have `layers` too, and gtrxl `memory`."""

LAYERED = ("mingru", "lru", "gtrxl")


@dataclasses.dataclass(frozen=True)
class CoreSettings:
    """A core's settings; see `nets.NetworkConfig`.

    Raises:
      ValueError: for more layers than the core has, or a size that its heads do not divide.
    """

    core: CoreName = "none"
    size: int = 64
    layers: int = 1
    memory: int = 32

    def __post_init__(self):
        if self.layers > 1 and self.core not in LAYERED:
            raise ValueError(
                f"core_layers={self.layers}: core={self.core!r} has one layer; use 1, or core={' or '.join(LAYERED)}."
            )
        if self.core == "gtrxl" and self.size % (heads := num_heads(self.size)):
            raise ValueError(
                f"core_size={self.size}: gtrxl divides it by {heads} heads; use {self.size - self.size % heads}."
            )

    @property
    def rows_to_rebuild(self) -> int:
        """Rows of an episode after which an empty state is what it would have been, 0 where that takes all of them."""
        return self.layers * self.memory if self.core == "gtrxl" else 0

    def __bool__(self) -> bool:
        return self.core != "none"

    def make(self, scale: Weights = 1.0) -> Core:
        """Makes the core; within a module's compact call, its layer "core"."""
        others = {"layers": self.layers} if self.core in LAYERED else {}
        others |= {"memory": self.memory} if self.core == "gtrxl" else {}
        return CORES[self.core](self.size, scale, **others, name="core")

    def start(self, num_lanes: int) -> ArrayTree:
        """Returns the state at an episode's start, () without a core."""
        return self.make().start(num_lanes) if self else ()

    def describe(self) -> str:
        """Returns the core in words, such as "lstm of 64", or ""."""
        layers = f"{self.layers} layers of " if self.layers > 1 else ""
        memory = f" over {self.memory} rows" if self.core == "gtrxl" else ""
        return f"{self.core} of {layers}{self.size}{memory}" if self else ""


NO_CORE = CoreSettings()
"""No memory."""
