"""Sebulba's layout: replicas of actor threads, and one mesh of learners over the devices of all processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from podracer.topology.anakin_mesh import DATA_AXIS, LayoutError


@dataclasses.dataclass(frozen=True)
class HostTopology:
    """The devices of a run with host environments: replicas of actor threads, and one mesh of learners.

    A replica is a host of the paper: A actor threads, whose rollouts are learnt from in turn, and S / R of the shards.
    An update learns from one rollout of every replica. Actors, lanes and shards are numbered by replica first,
    so equal (S, R, A) give equal results on any number of processes and devices (docs/adr/0024-replicas.md).

    Attributes:
      actors: the device of every actor thread of this process, by replica.
      mesh: the learner devices of all processes, with the one axis `data`.
      num_shards: S, logical shards of every trajectory.
      num_envs: environment lanes over all actor threads of all replicas.
      replicas: R.
      processes: P; each has R / P replicas.
      process: index of this process.
      devices: the devices of all processes, each once.
      reanalysers: devices for the replay and for reanalysis, as a mesh with the one axis `data`, or None.
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
      num_shards: S; if None, one per learner device, or per replica if there are more of them.
      replicas: R; one per process if None. The replicas of a process share its devices out.
      actor_devices: actor devices of a process; a quarter of its devices, at least one, if None (the paper's 1 to 3).
        A single device acts and learns.
      actor_threads: threads of every actor device of a replica.
      reanalyser_devices: devices of a process for the replay and for reanalysis, next after the actor devices.
      updates_per_batch: parts of every shard's lanes that are learnt from in turn.
      devices: all local devices if None; those of several processes in the order of processes.

    Raises:
      LayoutError: if shards or replicas do not divide.
      ValueError: if there are too few devices, or lanes do not divide.
    """
    devices = list(devices if devices is not None else jax.local_devices())
    owners = list(dict.fromkeys(device.process_index for device in devices))
    this_process = jax.process_index() if len(owners) > 1 else owners[0]
    by_process = [[device for device in devices if device.process_index == owner] for owner in owners]
    local, P = by_process[owners.index(this_process)], len(owners)
    num_acting = actor_devices or max(1, len(local) // 4)
    _check_devices(len(local), num_acting, reanalyser_devices)
    # Actors, reanalysers, learners, in the order of a process's devices; a single device is both actor and learner.
    not_learning = num_acting + reanalyser_devices
    learners = [device for owned in by_process for device in (owned[not_learning:] or owned)]
    reanalysers = [device for owned in by_process for device in owned[num_acting:not_learning]]
    R = replicas or P
    actors = _actors(local[:num_acting], len(learners) // P, R, P, actor_threads)
    S = _num_shards(num_shards, len(learners), len(reanalysers), R)
    num_envs = _num_envs(num_envs, envs_per_actor, len(actors) * P, S // R, R, updates_per_batch)
    return HostTopology(
        actors=tuple(actors),
        mesh=data_mesh(learners),
        num_shards=S,
        num_envs=num_envs,
        replicas=R,
        processes=P,
        process=owners.index(this_process),
        devices=tuple(devices),
        reanalysers=data_mesh(reanalysers) if reanalysers else None,
    )


def data_mesh(devices: Sequence[Any]) -> Mesh:
    """The mesh of devices that share a batch: its one axis is `DATA_AXIS`."""
    return Mesh(np.asarray(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))


def _check_devices(num_local: int, num_acting: int, num_reanalysing: int) -> None:
    """Checks that a process has a device left to learn.

    Raises:
      ValueError: where it has not.
    """
    if num_acting >= num_local > 1:
        raise ValueError(f"actor_devices={num_acting}: of {num_local} devices at least one must learn.")
    if num_local == 1 and num_acting > 1:
        raise ValueError(f"actor_devices={num_acting}: there is 1 device, which acts and learns.")
    if num_reanalysing and num_acting + num_reanalysing >= num_local:
        raise ValueError(
            f"reanalyser_devices={num_reanalysing}: of {num_local} devices {num_acting} act(s), and one must learn."
        )


def _actors(acting: list[Any], num_learners: int, R: int, P: int, threads: int) -> list[Any]:
    """Shares the acting devices of a process out to its replicas; returns the device of every thread.

    Args:
      acting: the process's acting devices.
      num_learners: learner devices of a process.
      R: replicas of all processes.
      P: processes.
      threads: threads of every actor device of a replica.

    Raises:
      LayoutError: where they do not divide.
    """
    if R % P:
        raise LayoutError(f"replicas={R} is not divisible by the {P} processes; use a multiple of {P}.")
    per_process = R // P
    for role, number in (("actor", len(acting)), ("learner", num_learners)):
        if not _divides(number, per_process):
            raise LayoutError(
                f"replicas={R}: the {per_process} of a process cannot share its {number} {role} devices out evenly; "
                f"use {role} devices that divide them, or are a multiple."
            )
    each = max(1, len(acting) // per_process)  # actor devices of a replica
    devices = [acting[(r * each + i) % len(acting)] for r in range(per_process) for i in range(each)]
    return [device for device in devices for _ in range(threads)]


def _num_shards(num_shards: int | None, num_learners: int, num_reanalysers: int, R: int) -> int:
    """Returns S; the least number that divides over learners, reanalysers and replicas if None.

    Raises:
      LayoutError: where it does not divide.
    """
    unit = math.lcm(num_learners, num_reanalysers or 1, R)
    num_shards = num_shards or unit
    if num_shards % unit:
        of = f"{num_learners} learner devices" + (f", {num_reanalysers} reanalyser devices" if num_reanalysers else "")
        of += f" and {R} replicas" if R > 1 else ""
        raise LayoutError(f"num_shards={num_shards} is not divisible by the {of}; use a multiple of {unit}.")
    return num_shards


def _num_envs(num_envs: int | None, per_actor: int, threads: int, shards: int, R: int, parts: int) -> int:
    """Returns the lanes of a run; about `per_actor` for each of its threads if None.

    Args:
      num_envs: as in `make_host`.
      per_actor: the agent's default.
      threads: actor threads of all replicas.
      shards: shards of a replica.
      R: replicas.
      parts: `updates_per_batch`.

    Raises:
      ValueError: where they do not divide.
    """
    unit = threads * shards * parts
    num_envs = num_envs or -(-per_actor // (shards * parts)) * unit
    if num_envs % unit:
        below, above = num_envs // unit * unit, -(-num_envs // unit) * unit
        of = f"{threads} actor thread(s) x {shards} shard(s)" + (" of a replica" if R > 1 else "")
        raise ValueError(
            f"num_envs={num_envs} is not divisible by {of} x {parts} update(s) per batch; use "
            f"{f'{below} or {above}' if below else above}."
        )
    return num_envs


def _divides(devices: int, replicas: int) -> bool:
    """Returns True if a process's replicas get equally many devices each, or equally many replicas share a device."""
    return devices % replicas == 0 or replicas % devices == 0


def continues_on(num_shards: int, replicas: int | None = None, population: int = 1) -> str:
    """Describes the devices that a run can continue on.

    Args:
      num_shards: S.
      replicas: R of a run of Sebulba; None for Anakin.
      population: members of a run of Anakin, which fill devices first.
    """
    if replicas is None:
        members = f"{population} members with {num_shards} shards each" if population > 1 else f"{num_shards} shards"
        of_member = lambda devices: devices // math.gcd(population, devices)  # noqa: E731 - as `make` lays them out
        devices = [n for n in _divisors(population * num_shards) if num_shards % of_member(n) == 0]
        return f"this run has {members}: it continues on {_listing(devices)} devices"
    ways = []
    for processes in _divisors(replicas):
        learners = [n for n in _divisors(num_shards // processes) if _divides(n, replicas // processes)]
        ways.append(f"{_listing([processes])} process(es) with {_listing(learners)} learner devices each")
    has = f"{replicas} replicas and {num_shards} shards" if replicas > 1 else f"{num_shards} shards"
    return f"this run has {has}: it continues on {'; '.join(ways)}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listing(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
