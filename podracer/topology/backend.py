"""The platform that a program is traced and compiled for, and what follows from it."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax

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
