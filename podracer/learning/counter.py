"""Counts that outgrow an int32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

COUNTER_BASE = 2**20


class Counter(NamedTuple):
    """A count up to 2**51 as two int32 arrays, `high * 2**20 + low`: a long run outgrows one int32, and x64 is off."""

    high: jax.Array
    low: jax.Array

    @classmethod
    def of(cls, value: int) -> Counter:
        """A counter at `value`."""
        return cls(jnp.int32(value // COUNTER_BASE), jnp.int32(value % COUNTER_BASE))

    def add(self, n: jax.Array) -> Counter:
        """Adds int32 `n` >= 0 (less than 2**31 - 2**20)."""
        low = self.low + n
        return Counter(self.high + low // COUNTER_BASE, low % COUNTER_BASE)

    def less_than(self, other: Counter) -> jax.Array:
        """Returns True if this count is below `other`, bool []."""
        return (self.high < other.high) | ((self.high == other.high) & (self.low < other.low))

    def to_float(self) -> jax.Array:
        """The count as float32 (rounded)."""
        return self.high.astype(jnp.float32) * COUNTER_BASE + self.low.astype(jnp.float32)
