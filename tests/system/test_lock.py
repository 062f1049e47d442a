"""One run at a time in a run directory: a second one is refused, and who is gone keeps nobody out."""

import contextlib
import fcntl
import json
import os
import re
import socket
import subprocess
import sys

import pytest

import podracer
from podracer.anakin.driver import Anakin
from podracer.system import lock
from podracer.system.lock import RunLock

RUN = {"total_steps": 400, "num_envs": 8, "eval_episodes": 4, "progress": False}
RUN |= {"config": {"rollout_length": 10, "hidden_sizes": (8,)}}


def take(directory):
    """Takes the lock and gives it back."""
    with contextlib.closing(RunLock(directory)) as one:
        one.take()


def test_a_second_run_in_a_directory_is_refused(tmp_path, monkeypatch):
    """The second run is refused whatever it is called with, and a refused run gives the directory back."""
    monkeypatch.setattr(Anakin, "check", lambda self: None)  # tracing takes seconds
    refused = []
    with contextlib.closing(RunLock(tmp_path / "run")) as first:
        first.take()
        for again in (True, False):
            with pytest.raises(ValueError, match="is in use") as caught:
                podracer.train("vtrace", "catch", run_dir=tmp_path / "run", resume=again, **RUN)
            refused.append(str(caught.value))
    who = rf"process {os.getpid()} on {re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d \S+,"
    assert re.fullmatch(rf"{tmp_path}/run is in use: {who} trains there; wait .* another run directory\.", refused[0])
    assert refused[0] == refused[1]
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no run of podracer"):
        podracer.train("vtrace", "catch", run_dir=tmp_path / "run", **RUN)
    take(tmp_path / "run")


def test_a_lock_is_free_when_its_process_is_gone(tmp_path):
    """However it ended, and also where what it has started holds the file open; another's is not."""
    text = f"""
import pathlib, os, signal, sys
from podracer.system.lock import RunLock
lock = RunLock(pathlib.Path({str(tmp_path)!r}))
lock.take()
if not os.fork():
    signal.pause()
print(flush=True)
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, process_group=0)
    try:
        process.stdout.readline()
        with pytest.raises(ValueError, match=f"process {process.pid} on "):
            take(tmp_path)
        process.kill()
        process.wait()
        take(tmp_path)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(("field", "value"), [("machine", "this one, before it was started again"), ("process", [0])])
def test_what_a_stale_lock_says_keeps_nobody_out(field, value, tmp_path, monkeypatch):
    """Also on a file system without locks, where nothing else is known."""
    (tmp_path / lock.NAME).write_text(json.dumps(lock._signature() | {field: value}))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "not supported")))
        take(tmp_path)
        (tmp_path / lock.NAME).write_text(json.dumps(lock._signature()))
        with pytest.raises(ValueError, match="is in use"):
            take(tmp_path)
    take(tmp_path)


def test_a_lock_that_is_not_signed_yet(tmp_path):
    with (tmp_path / lock.NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process trains there"):
            take(tmp_path)


def test_two_that_find_a_stale_lock_at_once_do_not_both_take_it(tmp_path, monkeypatch):
    """Processes that a killed run has started still hold its file."""
    first, second, read = RunLock(tmp_path), RunLock(tmp_path), lock._read

    def meanwhile(file):
        found = read(file)
        monkeypatch.undo()
        first.take()
        return found

    with (tmp_path / lock.NAME).open("w") as file:
        json.dump(lock._signature() | {"process": [0]}, file)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(lock, "_read", meanwhile)
        with contextlib.closing(first), pytest.raises(ValueError, match="is in use"):
            second.take()


def test_who_waited_for_a_file_that_was_removed_takes_the_new_one(tmp_path, monkeypatch):
    first, second, flock = RunLock(tmp_path), RunLock(tmp_path), fcntl.flock
    first.take()
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: (first.close(), flock(*arguments)))
    second.take()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="is in use"):
        take(tmp_path)
    second.close()
