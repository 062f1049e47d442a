"""The platform that a program is traced and compiled for, and its compiler options."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jaxlib.version

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
    # On a GPU, timing every product takes as long as all the rest.
    if platform != "cpu":
        return {"gpu": {"xla_gpu_autotune_level": 0}}.get(platform)
    return {"xla_backend_optimization_level": 0} | _plain_loops()


def evaluation_options(platform: str) -> dict[str, int] | None:
    """Returns compiler options for a program that plays some episodes now and then."""
    # On CPU it is compiled in half the time, plays as fast, and finds the same bits.
    if platform != "cpu" or _level_is_set():
        return None
    return {"xla_backend_optimization_level": 2} | _plain_loops()


def compiler_options(platform: str, searches: bool = False) -> dict[str, Any] | None:
    """Returns compiler options for a program that runs for long, and perhaps searches trees."""
    # On CPU, LLVM's third level takes a fifth of the time to compile, and PPO and V-trace run no slower without.
    if platform != "cpu" or _level_is_set():
        return None
    options: dict[str, Any] = {"xla_backend_optimization_level": 2}
    # For each of a search's loops, these two copy all that it calls: half of the time of EfficientZero's compilation,
    # which runs no slower without, with equal bits (jaxlib 0.10).
    if searches and "xla_disable_hlo_passes" not in _flags() and _is_jaxlib_0_10():
        options["xla_disable_hlo_passes"] = "while-loop-invariant-code-motion,simplify-while-loops"
    return options


def _plain_loops() -> dict[str, int]:
    """The other way to emit loops: it takes half as long, and training is 8% slower by it. jaxlib 0.11 has none."""
    return {"xla_cpu_use_fusion_emitters": False} if _is_jaxlib_0_10() else {}


def _is_jaxlib_0_10() -> bool:
    return jaxlib.version.__version__.startswith("0.10.")


def _level_is_set() -> bool:
    """Returns True if XLA_FLAGS has a level, which is then that of all programs that run for long."""
    return "xla_backend_optimization_level" in _flags()


def _flags() -> str:
    return os.environ.get("XLA_FLAGS", "")


def memory_limit(devices: Sequence[Any]) -> int | None:
    """Returns the bytes of memory on each of `devices` (all of one kind), or None if they do not tell.

    CPU devices share the machine's memory and tell nothing; devices that are only compiled for have no memory to ask.
    """
    try:
        stats = devices[0].memory_stats() or {}
    except (NotImplementedError, RuntimeError):
        return None
    return stats.get("bytes_limit")
