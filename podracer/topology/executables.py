"""Executables on the disk, so that a second run of a kind traces, lowers and compiles nothing.

JAX's own cache is keyed by the lowered program, and so a program must be traced and lowered to be found. Here the key
is what a program is made of: the code of this package, the versions of what it calls, the settings of the run, the
devices, and the flags of XLA and JAX. It holds for runs whose parts all have names. The command line alone has it, for
in a process of the user's any function may have been replaced.

A file that cannot be read is as good as none. Files are loaded with `pickle`, and so those that another user may have
written are left alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import importlib.metadata
import importlib.util
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

from podracer.system import command, console, files, machine, spans
from podracer.version import __version__

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "chex", "mctx")
"""The packages that programs are made with, beside our own."""

MOST_FILES = 100
"""Executables that are kept, the newest used ones: of CartPole's size they take 100 MB."""

MOST_BYTES = 1_000_000_000
"""Bytes of executables that are kept."""

MARK = b"podracer executable 2\n"

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

    def _digest(self, name: str, body: bytes) -> bytes:
        return hashlib.sha256(f"{self._kind} {name}\n".encode() + body).digest()

    def has(self, name: str) -> bool:
        """True where there is a file for a program."""
        return self._path(name).exists()

    def load(self, name: str) -> Any:
        """The `jax.stages.Compiled` of a program, or None; a line where there is a file that cannot be used."""
        path = self._path(name)
        try:
            with path.open("rb") as file, spans.span(f"load {name}"):
                _require_own(os.fstat(file.fileno()))
                _require_own(self._folder.stat())
                data = file.read()
                head, body = data[: len(MARK) + 32], data[len(MARK) + 32 :]
                if head != MARK + self._digest(name, body):
                    raise ValueError("it is not whole")
                ids, parts = pickle.loads(body)
                devices = {device.id: device for device in jax.local_devices()}
                # Else it is loaded for all devices, and refuses arrays of its own ones.
                own = [devices[i] for i in ids]
                compiled = serialize_executable.deserialize_and_load(*parts, execution_devices=own)
            with contextlib.suppress(OSError):  # of a disk that is only read
                os.utime(path)
            return compiled
        except FileNotFoundError:
            return None
        except Exception as error:
            console.say(f"{path} is left out, and compiled again: {str(error).partition(chr(10))[0]}.")
            return None

    def save(self, name: str, compiled: Any) -> None:
        """Writes a program, if the disk lets it; removes those that were not used for longest."""
        if _has_changed():  # of modules that are imported late, the key has the source before
            return
        try:
            ids = [device.id for device in compiled.runtime_executable().local_devices()]
            body = pickle.dumps((ids, serialize_executable.serialize(compiled)))
        except Exception:  # of a platform, or with a callback, that cannot be kept
            return
        with contextlib.suppress(OSError), spans.span(f"save {name}"):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _require_own(self._folder.stat())
            with files.replacing(self._path(name)) as partial:
                partial.write_bytes(MARK + self._digest(name, body) + body)
                partial.chmod(0o600)
            self._remove_old()

    def _remove_old(self) -> None:
        found = sorted(((path.stat(), path) for path in self._folder.glob("*.bin")), key=lambda each: -each[0].st_mtime)
        size = 0
        for i, (stat, path) in enumerate(found):
            size += stat.st_size
            if i >= MOST_FILES or size > MOST_BYTES:
                path.unlink(missing_ok=True)


def _require_own(stat: os.stat_result) -> None:
    """Refuses a file or folder that another user may have written.

    Raises:
      PermissionError: for one of another user's, or that others may write to.
    """
    if stat.st_uid != os.getuid():
        raise PermissionError("it is another user's")
    if stat.st_mode & 0o022:
        raise PermissionError("others may write to it, or to its folder")


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


def is_sure() -> bool:
    """True where `kind` says all that decides a program.

    It does not where source was changed since this process began, which may have imported the one before; where a
    package is installed as editable, whose version stays when its code changes; and where XLA reads its flags from a
    file. Asked after `kind` has read the source.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    in_file = bool(flags) and not flags.startswith("-")
    return not in_file and not any(map(_is_editable, PACKAGES)) and not _has_changed()


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
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),  # which the driver's check compares with
        "cores": machine.num_cores(),
        "devices": [(device.platform, device.device_kind, device.id, device.process_index) for device in devices],
        "settings": settings,
    }
    return json.dumps(found, sort_keys=True)


def _sources() -> list[tuple[pathlib.Path, pathlib.Path]]:
    """The folders that hold this package and the environments, wherever they were imported from, each with a file."""
    specs = (importlib.util.find_spec(package) for package in ("podracer", "envs_jax"))
    folders = [pathlib.Path(spec.origin).parent for spec in specs if spec and spec.origin]
    return [(folder.parent, path) for folder in folders for path in sorted(folder.rglob("*.py"))]


@functools.cache
def _code() -> str:
    """A hash of the source of this package and of the environments."""
    found = hashlib.sha256()
    for root, path in _sources():
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def _has_changed() -> bool:
    """True where source is newer than this process, or gone."""
    try:
        return any(max(stat.st_mtime, stat.st_ctime) > command.BEGAN for stat in (p.stat() for _, p in _sources()))
    except OSError:
        return True


@functools.cache
def _is_editable(package: str) -> bool:
    try:
        text = importlib.metadata.distribution(package).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return bool(text) and json.loads(text).get("dir_info", {}).get("editable", False)


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
