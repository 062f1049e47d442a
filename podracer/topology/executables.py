"""Executables on the disk, so that a second run of a kind traces, lowers and compiles nothing.

JAX's own cache is keyed by the lowered program, and so a program must be traced and lowered to be found. Here the key
is what a program is made of: the code of this package, the versions of what it calls, the settings of the run, the
devices, and the flags of XLA and JAX. It holds for runs whose parts all have names. The command line alone has it, for
in a process of the user's any function may have been replaced.

A file that cannot be read is as good as none. Files are loaded with `pickle`, and so those of another user are left
alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pickle
import platform
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental import serialize_executable

from podracer.system import console, files, spans
from podracer.version import __version__

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "chex", "mctx")
"""The packages that programs are made with, beside our own."""

MOST_FILES = 100
"""Executables that are kept, the newest used ones: of CartPole's size they take 100 MB."""

MARK = b"podracer executable 1\n"

_CURRENT: contextvars.ContextVar[Executables | None] = contextvars.ContextVar("executables", default=None)


class Executables:
    """The executables of runs of one kind.

    Args:
      folder: where they are.
      kind: all that decides the programs (see `kind`); the name of a program completes the key.
    """

    def __init__(self, folder: pathlib.Path, kind: str):
        self._folder, self._kind = folder, kind

    def _path(self, name: str) -> pathlib.Path:
        return self._folder / f"{hashlib.sha256(f'{self._kind} {name}'.encode()).hexdigest()}.bin"

    def has(self, name: str) -> bool:
        """True where there is a file for a program."""
        return self._path(name).exists()

    def load(self, name: str) -> Any:
        """The `jax.stages.Compiled` of a program, or None; a line where there is a file that cannot be used."""
        path = self._path(name)
        try:
            with path.open("rb") as file, spans.span(f"load {name}"):
                if os.fstat(file.fileno()).st_uid != os.getuid():
                    raise PermissionError("it is another user's")
                data = file.read()
                head, body = data[: len(MARK) + 32], data[len(MARK) + 32 :]
                if head != MARK + hashlib.sha256(body).digest():
                    raise ValueError("it is not whole")
                compiled = serialize_executable.deserialize_and_load(*pickle.loads(body))
            os.utime(path)
            return compiled
        except FileNotFoundError:
            return None
        except Exception as error:
            console.say(f"{path} is left out, and compiled again: {str(error).partition(chr(10))[0]}.")
            return None

    def save(self, name: str, compiled: Any) -> None:
        """Writes a program, if the disk lets it; removes those that were not used for longest."""
        try:
            body = pickle.dumps(serialize_executable.serialize(compiled))
        except Exception:  # of a platform, or with a callback, that cannot be kept
            return
        with contextlib.suppress(OSError), spans.span(f"save {name}"):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.write(self._path(name), MARK + hashlib.sha256(body).digest() + body)
            kept = sorted(self._folder.glob("*.bin"), key=lambda path: path.stat().st_mtime)
            for path in kept[:-MOST_FILES]:
                path.unlink(missing_ok=True)


class Fresh(threading.local):
    """Tells whether this thread's newest program was compiled, and not read from JAX's own cache.

    What XLA read of that cache on a CPU can be written again, and is not whole then: it fails when it is called.
    """

    asked = hit = False

    def note(self, event: str, **labels: Any) -> None:
        self.asked |= event == "/jax/compilation_cache/compile_requests_use_cache"
        self.hit |= event == "/jax/compilation_cache/cache_hits"

    def __bool__(self) -> bool:
        return self.asked and not self.hit


_FRESH = Fresh()


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_listener(_FRESH.note)


def compiled(lowered: Any) -> tuple[Any, bool]:
    """Compiles a lowered program; returns it, and whether it may be saved (see `Fresh`)."""
    _listen()
    _FRESH.asked = _FRESH.hit = False
    return lowered.compile(), bool(_FRESH)


def current() -> Executables | None:
    """The executables of the run that is made in this context, or None."""
    return _CURRENT.get()


def stored(name: str) -> Any:
    """A program of the run that is made in this context, or None."""
    executables = _CURRENT.get()
    return executables.load(name) if executables else None


@contextlib.contextmanager
def using(executables: Executables | None) -> Iterator[None]:
    """A context in which programs are taken from executables, and added to them."""
    token = _CURRENT.set(executables)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def kind(settings: Mapping[str, Any], devices: list[Any]) -> str:
    """All that decides the programs of a run, as text.

    Args:
      settings: of the run, in JSON's types.
      devices: that it runs on.
    """
    flags = {name: repr(getattr(jax.config, name, value)) for name, value in jax.config.values.items()}
    found = {
        "podracer": __version__,
        "code": _code(),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": _machine(),
        "variables": {name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC")},
        "flags": {name: value for name, value in flags.items() if "cache" not in name},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": [(device.platform, device.device_kind, device.id, device.process_index) for device in devices],
        "settings": settings,
    }
    return json.dumps(found, sort_keys=True)


@functools.cache
def _code() -> str:
    """A hash of the source of this package and of the environments."""
    found, root = hashlib.sha256(), pathlib.Path(__file__).parents[2]
    for package in ("podracer", "envs_jax"):
        for path in sorted((root / package).rglob("*.py")):
            found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _machine() -> str:
    """The processor: code for one may not run on another."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        named = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
        return f"{platform.machine()} {hashlib.sha256(repr(sorted(set(named))).encode()).hexdigest()}"
    return f"{platform.machine()} {platform.processor()}"
