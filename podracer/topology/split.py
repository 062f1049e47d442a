"""Where a run lives: devices, logical shards and the population, as one mesh.

A run has S logical shards. Random keys, lanes and minibatches belong to a shard, so runs with equal S give equal
results on any number of devices that divides S (docs/adr/0003-shards.md; docs/glossary.md).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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


class LayoutError(ValueError):
    """Shards or replicas do not divide over the devices and processes that there are."""


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
      LayoutError: where shards do not divide over devices.
      ValueError: where lanes do not divide over shards.
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


# Sebulba


@dataclasses.dataclass(frozen=True)
class HostTopology:
    """How a run with host environments is laid out: replicas of actor threads, and one mesh of learners.

    A replica is what a host of the paper is: A actor threads, whose rollouts are learnt from in turn, and S / R of the
    shards. An update learns from one rollout of every replica. Actors, lanes and shards are numbered by replica first,
    so equal (S, R, A) give equal results on any number of processes and devices (docs/adr/0024-replicas.md).

    Attributes:
      actors: the device of every actor thread of this process, by replica.
      mesh: the learner devices of all processes, with the one axis `data`.
      num_shards: S, logical shards of every trajectory.
      num_envs: environment lanes over all actor threads of all replicas.
      replicas: R.
      processes: P, each of which has R / P replicas.
      process: of these the one that this is.
      devices: those of all processes, each once.
      reanalysers: the devices that hold the replay and reanalyse, as a mesh with the one axis `data`, or None.
    """

    actors: tuple[Any, ...]
    mesh: Mesh
    num_shards: int
    num_envs: int
    replicas: int
    processes: int
    process: int
    devices: tuple[Any, ...]
    reanalysers: Mesh | None = None

    @property
    def replicas_here(self) -> int:
        """Replicas of this process."""
        return self.replicas // self.processes

    @property
    def threads(self) -> int:
        """A, actor threads of a replica."""
        return len(self.actors) // self.replicas_here

    @property
    def first_actor(self) -> int:
        """The number of this process's first actor thread, among those of all."""
        return self.process * len(self.actors)

    @property
    def envs_per_actor(self) -> int:
        return self.num_envs // (self.replicas * self.threads)

    @property
    def shards_per_replica(self) -> int:
        return self.num_shards // self.replicas

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def describe(self) -> str:
        """One line for people."""
        shared = set(self.actors) & set(self.mesh.devices.flat)
        learners = self.mesh.size
        total = len(self.devices)
        others = self.reanalysers.size if self.reanalysers else 0
        reanalysing = f", {others} reanalyser" if others else ""
        where = f"{total - learners - others} actor{reanalysing} and {learners} learner"
        where = f"{total} shared" if shared else where
        each = f"{self.replicas} replicas of " if self.replicas > 1 else ""
        return (
            f"{self.num_envs} environments in {each}{self.threads} actor thread(s), {self.num_shards} shard(s) on "
            f"{where} {self.platform} device(s)"
        )


def make_host(
    *,
    num_envs: int | None,
    envs_per_actor: int,
    num_shards: int | None = None,
    replicas: int | None = None,
    actor_devices: int | None = None,
    actor_threads: int = 1,
    reanalyser_devices: int = 0,
    updates_per_batch: int = 1,
    devices: Sequence[Any] | None = None,
) -> HostTopology:
    """Splits every process's devices into actors and learners (Hessel et al. 2021, "Sebulba").

    Args:
      num_envs: lanes over all actor threads; `envs_per_actor` for each if None.
      envs_per_actor: the agent's default.
      num_shards: S; one per learner device, or replica where those are more, if None.
      replicas: R; one per process if None. The replicas of a process share its devices out.
      actor_devices: how many devices of a process act; a quarter of them, at least one, if None (the paper's 1 to 3).
        A single device acts and learns.
      actor_threads: of every actor device of a replica.
      reanalyser_devices: how many devices of a process hold the replay and reanalyse, behind those that act.
      updates_per_batch: how many parts of every shard's lanes are learnt from in turn.
      devices: all local devices if None; those of several processes by process.

    Raises:
      LayoutError: where shards or replicas do not divide.
      ValueError: where there are too few devices, or lanes do not divide.
    """
    devices = list(devices if devices is not None else jax.local_devices())
    owners = list(dict.fromkeys(device.process_index for device in devices))
    here = jax.process_index() if len(owners) > 1 else owners[0]
    by_process = [[device for device in devices if device.process_index == owner] for owner in owners]
    local, P = by_process[owners.index(here)], len(owners)
    acting = actor_devices or max(1, len(local) // 4)
    if acting >= len(local) > 1:
        raise ValueError(f"actor_devices={acting}: of {len(local)} devices at least one must learn.")
    if len(local) == 1 and acting > 1:
        raise ValueError(f"actor_devices={acting}: there is 1 device, which acts and learns.")
    if reanalyser_devices and acting + reanalyser_devices >= len(local):
        raise ValueError(
            f"reanalyser_devices={reanalyser_devices}: of {len(local)} devices {acting} act(s), and one must learn."
        )
    behind = acting + reanalyser_devices
    learners = [device for there in by_process for device in (there[behind:] or there)]
    reanalysers = [device for there in by_process for device in there[acting:behind]]
    replicas = replicas or P
    if replicas % P:
        raise LayoutError(f"replicas={replicas} is not divisible by the {P} processes; use a multiple of {P}.")
    R, own = replicas, replicas // P
    for what, number in (("actor", acting), ("learner", len(learners) // P)):
        if not _share_out(number, own):
            raise LayoutError(
                f"replicas={R}: the {own} of a process cannot share its {number} {what} devices out evenly; use "
                f"{what} devices that divide them, or are a multiple."
            )
    each = max(1, acting // own)  # actor devices of a replica
    actors = [local[(r * each + i) % acting] for r in range(own) for i in range(each) for _ in range(actor_threads)]
    unit = math.lcm(len(learners), len(reanalysers) or 1, R)
    num_shards = num_shards or unit
    if num_shards % unit:
        of = f"{len(learners)} learner devices" + (f", {len(reanalysers)} reanalyser devices" if reanalysers else "")
        of += f" and {R} replicas" if R > 1 else ""
        raise LayoutError(f"num_shards={num_shards} is not divisible by the {of}; use a multiple of {unit}.")
    threads, shards_each = R * each * actor_threads, num_shards // R
    unit = threads * shards_each * updates_per_batch
    num_envs = num_envs or -(-envs_per_actor // (shards_each * updates_per_batch)) * unit
    if num_envs % unit:
        below, above = num_envs // unit * unit, -(-num_envs // unit) * unit
        of = f"{threads} actor thread(s) x {shards_each} shard(s)" + (" of a replica" if R > 1 else "")
        raise ValueError(
            f"num_envs={num_envs} is not divisible by {of} x {updates_per_batch} update(s) per batch; use "
            f"{f'{below} or {above}' if below else above}."
        )
    mesh = lambda some: Mesh(np.asarray(some), (DATA_AXIS,), axis_types=(AxisType.Auto,))  # noqa: E731
    apart = mesh(reanalysers) if reanalysers else None
    return HostTopology(
        tuple(actors), mesh(learners), num_shards, num_envs, R, P, owners.index(here), tuple(devices), apart
    )


def _share_out(devices: int, replicas: int) -> bool:
    """Whether the replicas of a process can have as many of its devices each, or as many of them share one."""
    return devices % replicas == 0 or replicas % devices == 0


def continues_on(num_shards: int, replicas: int | None = None) -> str:
    """What a run with these shards, and these replicas under Sebulba, can continue on, in words."""
    if replicas is None:
        return f"this run has {num_shards} shards: it continues on {_these(_divisors(num_shards))} devices"
    ways = []
    for processes in _divisors(replicas):
        learners = [n for n in _divisors(num_shards // processes) if _share_out(n, replicas // processes)]
        ways.append(f"{_these([processes])} process(es) with {_these(learners)} learner devices each")
    has = f"{replicas} replicas and {num_shards} shards" if replicas > 1 else f"{num_shards} shards"
    return f"this run has {has}: it continues on {'; '.join(ways)}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _these(numbers: Sequence[int]) -> str:
    *some, last = map(str, numbers)
    return f"{', '.join(some)} or {last}" if some else last


@functools.cache
def _spreader(where: NamedSharding) -> Any:
    # One function for each: a new one would be compiled at every call.
    return jax.jit(lambda tree: tree, out_shardings=where)


def here(tree: Any) -> Any:
    """Arrays, whole, as this process's own; the processes of a pod must all ask at once."""
    afar = [x for x in jax.tree.leaves(tree) if not x.is_fully_addressable]
    if not afar:
        return tree
    if not all(x.is_fully_replicated for x in afar):
        tree = _spreader(NamedSharding(afar[0].sharding.mesh, PartitionSpec()))(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), tree)


def spread(tree: Any, where: NamedSharding) -> Any:
    """Arrays that every process has alike, as arrays of a mesh."""
    return jax.tree.map(lambda x: jax.make_array_from_callback(np.shape(x), where, np.asarray(x).__getitem__), tree)


def together(tree: Any, where: NamedSharding) -> Any:
    """Arrays of which every process has its part, as arrays of a mesh."""

    def whole(x: Any) -> jax.Array:
        if is_key(x):
            return jax.random.wrap_key_data(whole(jax.random.key_data(x)))
        return jax.make_array_from_process_local_data(where, np.asarray(x))

    return jax.tree.map(whole, tree)


def is_key(x: Any) -> bool:
    """Whether an array is of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


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


def host_cpus(what: str, mesh: Mesh) -> list[Any]:
    """A CPU of every process that has devices of a mesh, in the order of the mesh.

    Args:
      what: needs them, for the message.
      mesh: the devices.

    Raises:
      ValueError: where JAX was told not to use them.
    """
    processes = dict.fromkeys(device.process_index for device in mesh.devices.flat)
    if len(processes) == 1:
        return [host_cpu(what)]
    host_cpu(what)
    cpus = {device.process_index: device for device in reversed(jax.devices("cpu"))}
    return [cpus[process] for process in processes]
