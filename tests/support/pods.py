"""Helpers for the tests of pods: scripts that run in several processes, and threads that stand for processes."""

import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import numpy as np

from podracer.topology.processes import Processes

ROOT = str(pathlib.Path(__file__).parents[2])


def start(script, *, processes=2, devices=1, options=(), environment=None):
    """A launcher that runs a script in processes of their own."""
    command = [sys.executable, "-m", "podracer", "launch", "--processes", str(processes)]
    command += ["--devices-per-process", str(devices), *options, "--script", str(script), "--", "-"]
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ROOT} | (environment or {})
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(launcher, timeout=300):
    """The launcher's exit code and what was printed."""
    try:
        out, err = launcher.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        launcher.kill()
        out, err = launcher.communicate()
        raise AssertionError(f"no end after {timeout} s:\n{out}\n{err}") from None
    return launcher.returncode, out + err


def call(function, *arguments, processes=2, devices=1, directory):
    """Calls a function of a test file in every process of a pod, and waits for them."""
    module = function.__module__
    script = directory / f"{function.__name__}.py"
    values = ", ".join(repr(str(value)) for value in arguments)
    script.write_text(f"import {module}\n{module}.{function.__name__}({values})\n")
    code, said = finish(start(script, processes=processes, devices=devices), timeout=900)
    assert code == 0, said[-4000:]
    return said


def at_half(run_dir, to):
    """A copy of a run as it was at its first checkpoint."""
    shutil.copytree(run_dir, to)
    first, last = sorted(int(path.name) for path in (to / "checkpoints").iterdir())
    assert first * 2 == last
    shutil.rmtree(to / "checkpoints" / str(last))
    (to / "summary.json").unlink()
    return to


def assert_same(here, there):
    """Two files of arrays hold the same, bit for bit, whatever axes of one they have more."""
    one, other = dict(np.load(here)), dict(np.load(there))
    assert set(one) == set(other)
    for name in one:
        np.testing.assert_array_equal(other[name].ravel(), one[name].ravel(), err_msg=name)


def until(condition, seconds=60, what=""):
    """Waits for something that must happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what or condition} not after {seconds} s"
        time.sleep(0.02)


class Thread(Processes):
    """A process that is a thread of this one, as `as_threads` makes them."""

    def __init__(self, index, count, barrier, board):
        self.index, self.count, self._barrier, self._board = index, count, barrier, board

    def all_gather(self, value):
        self._board[self.index] = json.dumps(value)
        self._barrier.wait()
        said = [json.loads(there) for there in self._board]
        self._barrier.wait()
        return said

    def broadcast(self, value=None):
        return self.all_gather(value)[0]

    def barrier(self):
        self.all_gather(None)


def as_threads(function, count=2, seconds=20):
    """The results of `function(processes)`, or its errors, in each of some processes that are threads."""
    barrier, board = threading.Barrier(count, timeout=seconds), [None] * count

    def call(index):
        try:
            return function(Thread(index, count, barrier, board))
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        return list(threads.map(call, range(count)))
