"""The user's own line in which an error was raised; without JAX, which workers do not have."""

from __future__ import annotations

import importlib.util
import linecache
import os
import pathlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable

from podracer.system import console

TRACEBACK = "PODRACER_TRACEBACK"
"""The environment variable that, set to 1, shows whole tracebacks."""

HOW = f"{TRACEBACK}=1 shows the whole traceback"

_HERE = pathlib.Path(__file__).parents[1]
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts"))
_PACKAGES = ("site-packages", "dist-packages")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')

_SENT = "<dynamic-code>"
"""The file name of a script's code in a process to which it was sent."""


def _folder(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)  # which imports nothing
    return [f"{pathlib.Path(spec.origin).parent}{os.sep}"] if spec and spec.origin else []


_LIBRARIES = (
    f"{_HERE}{os.sep}",
    *(str(_HERE.parent / "envs_jax" / name) for name in ("testing.py", "play.py", "adapters")),
    *(folder for package in ("jax", "jaxlib", "numpy", "gymnasium", "grpc") for folder in _folder(package)),
)


def line(error: BaseException | str) -> str:
    """The innermost line that is the user's own: `, in FUNCTION, FILE, line N, `source``, or "" if there is none.

    Args:
      error: raised, or the text of a traceback. A line of an installed package serves where there is no other.
    """
    frames = _frames(error)
    return next((text for own in (_is_own, _is_installed) if (text := _innermost(frames, own))), "")


def is_fault(error: BaseException) -> bool:
    """True where the user's own code raised an error, itself or in what it called, and not this library within."""
    files = [file for file, _, _ in _frames(error)]
    ours = max((i for i, file in enumerate(files) if file.startswith(_LIBRARIES[0])), default=-1)
    return any(_is_own(file) for file in files[ours + 1 :])


def _innermost(frames: list[tuple[str, int, str]], own: Callable[[str], bool]) -> str:
    for file, number, function in reversed(frames):
        if own(file) and (source := linecache.getline(file, number).strip()):
            return f", in {function}, {file}, line {number}, `{source}`"
    return ""


def _frames(error: BaseException | str) -> list[tuple[str, int, str]]:
    """File, line and function of the frames of an error, the outermost first."""
    if isinstance(error, str):
        return [(file, int(number), function) for file, number, function in _FRAME.findall(error)]
    script = str(getattr(sys.modules.get("__main__"), "__file__", None) or _SENT)
    return [
        (script if frame.filename == _SENT else frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
    ]


def _is_own(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, *_INSTALLED, "<frozen"))


def _is_installed(file: str) -> bool:
    """True for a file of an installed package, except packages that call environments."""
    return not file.startswith((*_LIBRARIES, "<frozen")) and any(name in file for name in _PACKAGES)


def describe(error: BaseException) -> str:
    """`ErrorType: reason, in FUNCTION, FILE, line N, `source``; without the line if it is not the user's own.

    If the text of an error is a traceback, as of a callback that JAX called, the result describes the error in it.
    """
    text, where = str(error), line(error)
    if quotes(error):
        return f"{text.strip().splitlines()[-1].rstrip('.')}{line(text)}"
    return f"{type(error).__name__}: {text.rstrip('.') if where else text}{where}"


def said(error: BaseException) -> str:
    """The text of an error for the caller, with the line if the user's own code raised it."""
    return describe(error) if is_fault(error) else str(error)


def quotes(error: BaseException) -> bool:
    """True where the text of an error has the traceback of another one."""
    return "Traceback (most recent call last)" in str(error)


def show(error: BaseException) -> None:
    """Prints the whole traceback if the environment variable `TRACEBACK` asks for it."""
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        console.say("".join(traceback.format_exception(error)).rstrip())
