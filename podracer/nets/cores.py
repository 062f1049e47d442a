"""Cores, the memory of networks: their protocol, and each by its name."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol

import jax

from podracer.nets.layers import Weights
from podracer.nets.recurrent import GRU, LSTM
from podracer.types import ArrayTree

CoreName = Literal["none", "lstm", "gru"]


class Core(Protocol):
    """A memory between a network's torso and its heads.

    The state restarts before every `first` row from that of `start`: by a selection, for a product keeps a NaN. So any
    cut of the rows in two gives the same, and acting is a single row.
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


CORES: dict[str, Any] = {"lstm": LSTM, "gru": GRU}
"""The classes of cores: `(size, scale, name=...) -> Core`."""


@dataclasses.dataclass(frozen=True)
class CoreSettings:
    """A core's settings; see `nets.NetworkConfig`.

    Raises:
      ValueError: for settings that the core does not have.
    """

    core: CoreName = "none"
    size: int = 64

    def __bool__(self) -> bool:
        return self.core != "none"

    def make(self, scale: Weights = 1.0) -> Core:
        """Makes the core; within a module's compact call, its layer "core"."""
        return CORES[self.core](self.size, scale, name="core")

    def start(self, num_lanes: int) -> ArrayTree:
        """Returns the state at an episode's start, () without a core."""
        return self.make().start(num_lanes) if self else ()

    def describe(self) -> str:
        """Returns the core in words, such as "lstm of 64", or ""."""
        return f"{self.core} of {self.size}" if self else ""


NO_CORE = CoreSettings()
"""No memory."""
