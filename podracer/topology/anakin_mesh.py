"""Anakin's mesh: devices, logical shards and the population.

A run has S logical shards. Random keys, lanes and minibatches belong to a shard, so runs with equal S give equal
results on any number of devices that divides S (docs/adr/0003-shards.md; docs/glossary.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

POPULATION_AXIS = "population"

DATA_AXIS = "data"


class LayoutError(ValueError):
    """Shards or replicas do not divide over the devices and processes."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """The mesh, shards and lanes of a run.

    Attributes:
      mesh: devices as (population, data).
      num_shards: S, logical shards of every member.
      num_envs: environment lanes of every member, over all shards.
      population: number of members.
    """

    mesh: Mesh
    num_shards: int
    num_envs: int
    population: int

    @property
    def envs_per_shard(self) -> int:
        return self.num_envs // self.num_shards

    @property
    def num_devices(self) -> int:
        return self.mesh.size

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def describe(self) -> str:
        """One line for people."""
        members = f"{self.population} members, each with " if self.population > 1 else ""
        devices = f"{self.num_devices} {self.platform} device(s)"
        return f"{members}{self.num_envs} environments in {self.num_shards} shard(s) on {devices}"

    def sharding(self, *axes: str | None) -> NamedSharding:
        """A sharding on this mesh by axis names."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def make(
    *,
    num_envs: int | None,
    envs_per_device: int,
    num_shards: int | None = None,
    population: int = 1,
    devices: Sequence[Any] | None = None,
) -> Topology:
    """Lays a run out over devices.

    Population members fill devices first. Devices left over share the data of each member.

    Args:
      num_envs: global lanes of each member; `envs_per_device` times its devices (or shards, where
        there are more) if None.
      envs_per_device: the agent's default.
      num_shards: S; one per device of a member if None.
      population: number of members.
      devices: all local devices if None.

    Raises:
      LayoutError: if shards do not divide over devices.
      ValueError: if lanes do not divide over shards.
    """
    devices = list(devices if devices is not None else jax.local_devices())
    population_devices = math.gcd(population, len(devices))
    data_devices = len(devices) // population_devices
    num_shards = num_shards or data_devices
    if num_shards % data_devices:
        raise LayoutError(
            f"num_shards={num_shards} is not divisible by the {data_devices} devices of the data axis; "
            f"use a multiple of {data_devices}."
        )
    num_envs = num_envs or envs_per_device * max(data_devices, num_shards if num_shards > data_devices else 1)
    if num_envs % num_shards:
        below, above = num_envs // num_shards * num_shards, -(-num_envs // num_shards) * num_shards
        nearest = f"{below} or {above}" if below else str(above)
        raise ValueError(f"num_envs={num_envs} is not divisible by the {num_shards} shards; use {nearest}.")
    grid = np.asarray(devices).reshape(population_devices, data_devices)
    mesh = Mesh(grid, (POPULATION_AXIS, DATA_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))
    return Topology(mesh, num_shards, num_envs, population)
