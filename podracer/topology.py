"""Where a run lives: devices, logical shards and the population, as one mesh.

A run has S logical shards. Random keys, lanes and minibatches belong to a shard, so runs with equal S give equal
results on any number of devices that divides S (docs/adr/0003-shards.md; docs/glossary.md).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

POPULATION_AXIS = "population"
DATA_AXIS = "data"

_PLATFORM: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """What is traced within is for devices of `platform` ("cpu", "gpu", "tpu"; `Device.platform`).

    The default backend need not be where a program will run: a process may hold several backends, and programs can be
    compiled for devices that are not there. JAX traces a function once for arguments of the same shapes, whatever is
    said here: what one platform's program is made of must not be traced for another before. So it is best used as a
    decorator, `jax.jit(compiling_for(platform)(function))`.
    """
    token = _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def platform() -> str:
    """Where what is being traced will run: as `compiling_for` says, or else JAX's default backend."""
    return _PLATFORM.get() or jax.default_backend()


def on_cpu() -> bool:
    """Whether what is being traced will run on CPU."""
    return platform() == "cpu"


def unroll(length: int) -> int:
    """The `unroll` of a scan over `length` rows whose body is a few operations on small arrays.

    Off CPU a turn of a loop costs some launches, whatever is in it; unrolled, the turns become one kernel. On CPU a
    turn costs next to nothing, and unrolling only takes time to compile.
    """
    if on_cpu():
        return 1
    return max(1, length) if length <= 64 else 16


def quick_to_compile(platform: str) -> dict[str, int] | None:
    """Compiler options for what runs once: compiling it well takes longer than running it badly."""
    # 1.2 s for PPO on two cores; on a GPU, timing every product takes as long again.
    return {"cpu": {"xla_backend_optimization_level": 0}, "gpu": {"xla_gpu_autotune_level": 0}}.get(platform)


def compiler_options(platform: str) -> dict[str, int] | None:
    """Compiler options for what runs for long."""
    # On CPU, LLVM's third level takes a fifth of the time to compile, and PPO and V-trace run no slower without.
    if platform != "cpu" or "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", ""):
        return None
    return {"xla_backend_optimization_level": 2}


def memory_limit(devices: Sequence[Any]) -> int | None:
    """Bytes that a program may have on each of `devices` (all of one kind), or None where they do not say.

    CPU devices share the machine's memory and say nothing; devices to compile for alone have no memory to ask.
    """
    try:
        stats = devices[0].memory_stats() or {}
    except (NotImplementedError, RuntimeError):
        return None
    return stats.get("bytes_limit")


@dataclasses.dataclass(frozen=True)
class Topology:
    """How a run is laid out.

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

    Population members fill devices first; what is left over of them shares the data of each member.

    Args:
      num_envs: global lanes of each member; `envs_per_device` times its devices (or shards, where
        those are more) if None.
      envs_per_device: the agent's default.
      num_shards: S; one per device of a member if None.
      population: number of members.
      devices: all local devices if None.

    Raises:
      ValueError: where shards do not divide over devices, or lanes over shards.
    """
    devices = list(devices if devices is not None else jax.local_devices())
    population_devices = math.gcd(population, len(devices))
    data_devices = len(devices) // population_devices
    num_shards = num_shards or data_devices
    if num_shards % data_devices:
        raise ValueError(
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


# Sebulba


@dataclasses.dataclass(frozen=True)
class HostTopology:
    """How a run with host environments is laid out: actor threads on their devices, and a mesh of learners.

    Attributes:
      actors: the device of every actor thread.
      mesh: the learner devices, with the one axis `data`.
      num_shards: S, logical shards of every trajectory.
      num_envs: environment lanes over all actor threads.
    """

    actors: tuple[Any, ...]
    mesh: Mesh
    num_shards: int
    num_envs: int

    @property
    def envs_per_actor(self) -> int:
        return self.num_envs // len(self.actors)

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def devices(self) -> list[Any]:
        """All devices, each once."""
        return list(dict.fromkeys((*self.actors, *self.mesh.devices.flat)))

    def describe(self) -> str:
        """One line for people."""
        actors, learners = len(set(self.actors)), self.mesh.size
        shared = set(self.actors) & set(self.mesh.devices.flat)
        where = "1 shared" if shared else f"{actors} actor and {learners} learner"
        return (
            f"{self.num_envs} environments in {len(self.actors)} actor thread(s), {self.num_shards} shard(s) on "
            f"{where} {self.platform} device(s)"
        )


def make_host(
    *,
    num_envs: int | None,
    envs_per_actor: int,
    num_shards: int | None = None,
    actor_devices: int | None = None,
    actor_threads: int = 1,
    updates_per_batch: int = 1,
    devices: Sequence[Any] | None = None,
) -> HostTopology:
    """Splits a host's devices into actors and learners (Hessel et al. 2021, "Sebulba").

    Args:
      num_envs: lanes over all actor threads; `envs_per_actor` for each if None.
      envs_per_actor: the agent's default.
      num_shards: S; one per learner device if None.
      actor_devices: how many devices act; a quarter of them, at least one, if None (the paper's 1 to 3). A single
        device acts and learns.
      actor_threads: of every actor device.
      updates_per_batch: how many parts of every shard's lanes are learnt from in turn.
      devices: all local devices if None.

    Raises:
      ValueError: where there are too few devices, or lanes do not divide.
    """
    devices = list(devices if devices is not None else jax.local_devices())
    acting = actor_devices or max(1, len(devices) // 4)
    if acting >= len(devices) > 1:
        raise ValueError(f"actor_devices={acting}: of {len(devices)} devices at least one must learn.")
    learners = devices[acting:] or devices
    if len(devices) == 1 and acting > 1:
        raise ValueError(f"actor_devices={acting}: there is 1 device, which acts and learns.")
    actors = tuple(device for device in devices[:acting] for _ in range(actor_threads))
    num_shards = num_shards or len(learners)
    if num_shards % len(learners):
        raise ValueError(
            f"num_shards={num_shards} is not divisible by the {len(learners)} learner devices; "
            f"use a multiple of {len(learners)}."
        )
    unit = len(actors) * num_shards * updates_per_batch
    num_envs = num_envs or -(-envs_per_actor // (num_shards * updates_per_batch)) * unit
    if num_envs % unit:
        below, above = num_envs // unit * unit, -(-num_envs // unit) * unit
        raise ValueError(
            f"num_envs={num_envs} is not divisible by {len(actors)} actor thread(s) x {num_shards} shard(s) x "
            f"{updates_per_batch} update(s) per batch; use {f'{below} or {above}' if below else above}."
        )
    mesh = Mesh(np.asarray(learners), (DATA_AXIS,), axis_types=(AxisType.Auto,))
    return HostTopology(actors, mesh, num_shards, num_envs)


def host_cpu(what: str) -> Any:
    """The host's CPU as a device.

    Args:
      what: needs it, for the message.

    Raises:
      ValueError: where JAX was told not to use it.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        raise ValueError(
            f"{what} needs JAX's CPU backend beside the accelerator's: add it to JAX_PLATFORMS, as in "
            "JAX_PLATFORMS=cuda,cpu."
        ) from None
