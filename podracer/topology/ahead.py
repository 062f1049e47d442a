"""Programs that are read from the disk, or compiled in a thread while Python does something else.

Tracing and lowering stay in the thread that asks: JAX's settings may be that thread's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from podracer.topology import executables


class Program:
    """A jitted function that may be compiled before it is called.

    Args:
      name: of the program among those of a run.
      function: what `jax.jit` returned.
    """

    def __init__(self, name: str, function: Any):
        self._name, self._function = name, function
        self._compiling: dict[Any, Compiling] = {}

    def prepare(self, *arguments: Any) -> None:
        """Begins to compile for arguments, or their shapes; once for each."""
        shapes = _shapes(arguments)
        if shapes not in self._compiling:
            self._compiling[shapes] = Compiling(self._name, lambda: self._function.lower(*arguments))

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function; waits until it is compiled, if it was prepared for such arguments."""
        if executables.current():
            self.prepare(*arguments)
        compiling = self._compiling.get(_shapes(arguments))
        function: Callable[..., Any] = compiling.result() if compiling else self._function
        return function(*arguments)


def _shapes(arguments: tuple[Any, ...]) -> Any:
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((x.shape, str(x.dtype)) for x in leaves)


class Compiling:
    """A program that a thread compiles, unless it is on the disk; `result` waits for it.

    Args:
      name: of the program among those of a run.
      lower: traces and lowers it, where it is to be compiled.

    Attributes:
      seconds: that reading it, or lowering and compiling took.
    """

    def __init__(self, name: str, lower: Callable[[], Any]):
        self._began, self.seconds = time.perf_counter(), 0.0
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._compiled = executables.stored(name)
        if self._compiled is not None:
            self.seconds = time.perf_counter() - self._began
            self._done.set()
            return
        # Python waits for it at its end: a process that leaves while XLA compiles may crash.
        arguments = name, lower(), executables.current()
        threading.Thread(target=self._compile, args=arguments, name=f"compile {name}").start()

    def _compile(self, name: str, lowered: Any, store: executables.Executables | None) -> None:
        fresh = False
        try:
            self._compiled, fresh = executables.compiled(lowered)
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - self._began
        self._done.set()
        if store and fresh:
            store.save(name, self._compiled)

    def result(self) -> Any:
        """The compiled program.

        Raises:
          Exception: what the compiler raised.
        """
        self._done.wait()
        if self._error:
            raise self._error
        return self._compiled
