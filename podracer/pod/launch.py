"""Several processes of one run on this machine.

Every process runs the same command and finds the others by environment variables. Their output is copied line by line,
each after its process's number. Signals are passed on; when one process fails, the others have time to end in good
order.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from podracer import configs
from podracer.errors import LOST
from podracer.system import console, stopping
from podracer.system.children import start

PATIENCE = 10.0
"""Seconds for the others to end when one process has failed, before SIGTERM, and again before SIGKILL."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start a podracer command, which comes after --, in several processes of this machine.

    Attributes:
      processes: how many.
      devices_per_process: simulated CPU devices of each; on GPUs, how many of the machine's each sees.
      restarts: number of restarts of all processes after one has failed, with --resume for `train`.
      script: run this Python file with the arguments after --, instead of a podracer command.
      module: run this module likewise.
    """

    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = configs.field(2, low=1)
    devices_per_process: int = configs.field(1, low=1)
    restarts: int = configs.field(0, low=0)
    script: pathlib.Path | None = None
    module: str | None = None

    def __post_init__(self):
        configs.check(self)
        if self.script and self.module:
            raise ValueError("give --script or --module, not both.")


class Group:
    """The processes of one start."""

    def __init__(self, arguments: Launch, command: Sequence[str]):
        program = [str(arguments.script)] if arguments.script else ["-m", arguments.module or "podracer"]
        self._program = [sys.executable, *program, *command]
        self._arguments, self._signal = arguments, 0

    def run(self) -> tuple[int, bool]:
        """Runs the processes; returns the exit code, and True if a signal to this process has ended them."""
        P = self._arguments.processes
        reserved = _reserved_port()
        port = reserved.getsockname()[1]
        children = [start(self._program, subprocess.PIPE, environment(self._arguments, i, port)) for i in range(P)]
        before = {number: signal.signal(number, self._pass_on(children)) for number in stopping.heard()}
        readers = [threading.Thread(target=_copy, args=(i, child), daemon=True) for i, child in enumerate(children)]
        for reader in readers:
            reader.start()
        try:
            first, late = self._wait(children)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            reserved.close()
        for reader, child in zip(readers, children):
            reader.join(timeout=5)
            if child.stdout and not reader.is_alive():
                child.stdout.close()
        codes = [child.returncode if child.returncode >= 0 else 128 - child.returncode for child in children]
        failed = [i for i, code in enumerate(codes) if code not in (0, LOST) and i not in late]
        guilty = first if first in failed else next(iter(failed), None)
        for i in late if guilty is None else [guilty]:
            ending = _ending(i, children[i], "did not end with the others and " if i in late else "")
            console.say(f"podracer launch: {ending}")
        if guilty is not None:
            return codes[guilty], bool(self._signal)
        return LOST if late else max(codes), bool(self._signal)

    def _wait(self, children: Sequence[subprocess.Popen[bytes]]) -> tuple[int | None, list[int]]:
        """Waits for all; returns the index of the first that ended with an error, and the indices of those that had to
        be ended."""
        first, since, step, late = None, 0.0, 0, list[int]()
        while any(child.poll() is None for child in children):
            if first is None:
                first = next((i for i, child in enumerate(children) if child.poll() not in (None, 0)), None)
                since = time.monotonic()
            elif step < 2 and time.monotonic() - since > PATIENCE:
                late = late or [i for i, child in enumerate(children) if child.poll() is None]
                for i in late:
                    if children[i].poll() is None:
                        children[i].send_signal((signal.SIGTERM, signal.SIGKILL)[step])
                since, step = time.monotonic(), step + 1
            time.sleep(0.05)
        return first, late

    def _pass_on(self, children: Sequence[subprocess.Popen[bytes]]) -> Any:
        def handler(number: int, frame: Any) -> None:
            self._signal = number
            for child in children:
                if child.poll() is None:
                    child.send_signal(number)

        return handler


def environment(arguments: Launch, index: int, port: int) -> dict[str, str]:
    """The environment variables by which a process finds the others, added to those that are set here."""
    D = arguments.devices_per_process
    where = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(arguments.processes),
        "JAX_PROCESS_ID": str(index),
        "JAX_NUM_CPU_DEVICES": str(D),
        "NPROC": os.environ.get("NPROC", "32"),  # a rank waits on a thread of XLA's pool, which has one a core
        "PODRACER_LOCAL_COUNT": str(arguments.processes),
        "PYTHONUNBUFFERED": "1",
    }
    if (os.environ.get("JAX_PLATFORMS") or _own_platform()).startswith(("cuda", "gpu", "rocm")):
        where["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(index * D + i) for i in range(D))
    # On Colab a pod is refused, where it can only be a mistake; these processes are no mistake.
    return {name: value for name, value in os.environ.items() if name != "COLAB_RELEASE_TAG"} | where


def _own_platform() -> str:
    """The platform that JAX chooses by default, found without starting JAX; on CPUs the ids of GPUs do no harm."""
    return "cuda" if shutil.which("nvidia-smi") or os.path.exists("/proc/driver/nvidia") else "cpu"


def _copy(index: int, child: subprocess.Popen[bytes]) -> None:
    """Copies the lines of a process, with its number. It reads on even if nobody reads the copy: else the process would
    block."""
    assert child.stdout is not None
    for line in child.stdout:
        console.write(sys.stdout, f"[{index}] {line.decode(errors='replace')}")


def _ending(index: int, child: subprocess.Popen[bytes], before: str) -> str:
    code = child.returncode
    ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"process {index} (pid {child.pid}) {before}{ending}"


def _reserved_port() -> socket.socket:
    """A socket at a free port, which the system gives to no other process while it is open.

    Process 0 can listen there all the same, because both sockets set SO_REUSEADDR.
    """
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return found
