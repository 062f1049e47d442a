"""The platform that a program is traced and compiled for, and its compiler options."""

from __future__ import annotations

import contextlib
import contextvars
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

_PLATFORM: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Sets the platform that functions traced within will run on ("cpu", "gpu", "tpu"; `Device.platform`).

    A program need not run on the default backend: a process may hold several backends, and programs can be compiled for
    devices that this machine does not have. JAX caches traces by shapes, not by this setting, so a function must not be
    traced for two platforms. Use it as a decorator, `jax.jit(compiling_for(platform)(function))`.
    """
    token = _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def platform() -> str:
    """Returns the platform of the program being traced: that of `compiling_for`, or else JAX's default backend."""
    return _PLATFORM.get() or jax.default_backend()


def on_cpu() -> bool:
    """Returns True if the program being traced will run on CPU."""
    return platform() == "cpu"


def unroll(length: int) -> int:
    """Returns the `unroll` of a scan over `length` rows whose body is a few operations on small arrays.

    Off CPU an iteration costs some kernel launches, whatever its body; unrolled iterations become one kernel. On CPU an
    iteration costs next to nothing, and unrolling only takes time to compile.
    """
    if on_cpu():
        return 1
    return max(1, length) if length <= 64 else 16


def quick_to_compile(platform: str) -> dict[str, int] | None:
    """Returns compiler options for a program that runs once: optimising it takes longer than running it."""
    # 1.2 s for PPO on two cores; on a GPU, timing every product takes as long again.
    return {"cpu": {"xla_backend_optimization_level": 0}, "gpu": {"xla_gpu_autotune_level": 0}}.get(platform)


def compiler_options(platform: str) -> dict[str, int] | None:
    """Returns compiler options for a program that runs for long."""
    # On CPU, LLVM's third level takes a fifth of the time to compile, and PPO and V-trace run no slower without.
    if platform != "cpu" or "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", ""):
        return None
    return {"xla_backend_optimization_level": 2}


def memory_limit(devices: Sequence[Any]) -> int | None:
    """Returns the bytes of memory on each of `devices` (all of one kind), or None if they do not tell.

    CPU devices share the machine's memory and tell nothing; devices that are only compiled for have no memory to ask.
    """
    try:
        stats = devices[0].memory_stats() or {}
    except (NotImplementedError, RuntimeError):
        return None
    return stats.get("bytes_limit")


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk, unless the user has set a cache of their own."""
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError:  # a container's user without a home keeps none
        return
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache) / "podracer" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
