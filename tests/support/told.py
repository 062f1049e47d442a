"""Environments whose rows tell which task they are of: in pure JAX, and the same on the host in NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import EnvSpec, HostStep, Transition


@dataclasses.dataclass(frozen=True)
class Told:
    """Episodes of `length` steps whose observations are (code, step, 0, ...) and whose rewards are the code."""

    code: float = 1.0
    length: int = 3
    size: int = 2
    choices: int = 2
    costly_reset: bool = False

    @property
    def spec(self) -> EnvSpec:
        box = spaces.Box(0.0, 1000.0, (self.size,))
        return EnvSpec("told", box, spaces.Discrete(self.choices), self.length, metrics=("codes", str(self.code)))

    def reset(self, key: jax.Array) -> jax.Array:
        return jnp.int32(0)

    def step(self, state: jax.Array, action: jax.Array, key: jax.Array) -> tuple[jax.Array, Transition]:
        last, code = state + 1 == self.length, jnp.float32(self.code)
        metrics = {"codes": code, str(self.code): code}
        return state + 1, Transition(code, 1.0 - last.astype(jnp.float32), last, metrics)

    def observe(self, state: jax.Array) -> jax.Array:
        shown = jnp.stack([jnp.float32(self.code), state.astype(jnp.float32)])
        return jnp.pad(shown, (0, self.size - 2))


TOLD = {"one": Told(1.0, 3), "two": Told(20.0, 2), "three": Told(300.0, 4, costly_reset=True)}


class HostRunning:
    def __init__(self, parent: Host, num_lanes: int):
        self.parent, self.spec = parent, parent.spec
        self.lanes, self.t = np.arange(num_lanes, dtype=np.int32), np.zeros(num_lanes, np.int64)

    def recv(self) -> tuple[np.ndarray, HostStep]:
        told = self.parent.told
        self.parent.log.append(("recv", told.code))
        first, last = self.t == 0, self.t == told.length
        shown = np.zeros((len(self.lanes), told.size), np.float32)
        shown[:, 0], shown[:, 1] = told.code, self.t
        raw = (np.full(len(self.lanes), 7.0), last & (self.t == 9)) if self.parent.raw else (None, None)
        metrics = np.stack([self.t * told.code, self.t * told.code])
        return self.lanes, HostStep.of(shown, np.full(len(self.lanes), told.code), last, first, last, *raw, metrics)

    def send(self, lanes: np.ndarray, actions: Any) -> None:
        self.parent.log.append(("send", self.parent.told.code, np.asarray(actions).tolist()))
        np.testing.assert_array_equal(lanes, self.lanes)
        self.t = np.where(self.t == self.parent.told.length, 0, self.t + 1)

    def close(self) -> None:
        self.parent.log.append(("close", self.parent.told.code))


class Host:
    """Host environments in NumPy, one of `Told`; `log` is told of every call."""

    running: type[HostRunning] = HostRunning

    def __init__(self, told: Told, log: list[Any], raw: bool = False):
        self.told, self.log, self.raw = told, log, raw
        self.spec = told.spec._replace(raw_scores=raw)

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> Any:
        self.log.append(("make", num_lanes, seed, evaluation))
        return self.running(self, num_lanes)
