"""The hardware of a run: platforms, devices, logical shards, replicas and processes."""

from podracer.topology.anakin_mesh import DATA_AXIS, POPULATION_AXIS, LayoutError, Topology, make
from podracer.topology.arrays import here, host_cpu, host_cpus, is_key, spread, to_global
from podracer.topology.backend import (
    compiler_options,
    compiling_for,
    evaluation_options,
    memory_limit,
    on_cpu,
    platform,
    quick_to_compile,
    unroll,
)
from podracer.topology.sebulba_mesh import HostTopology, continues_on, data_mesh, make_host

__all__ = [
    "DATA_AXIS",
    "POPULATION_AXIS",
    "HostTopology",
    "LayoutError",
    "Topology",
    "compiler_options",
    "compiling_for",
    "continues_on",
    "data_mesh",
    "evaluation_options",
    "here",
    "host_cpu",
    "host_cpus",
    "is_key",
    "make",
    "make_host",
    "memory_limit",
    "on_cpu",
    "platform",
    "quick_to_compile",
    "spread",
    "to_global",
    "unroll",
]
