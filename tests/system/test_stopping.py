"""The end of a process that a signal stopped: by that signal, at last."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from podracer.system import stopping

STOPPED = """
import atexit, sys
from podracer import cli
atexit.register(print, "never before", flush=True)
cli.run = lambda argv: atexit.register(print, "what is left to do", flush=True) and {code}
cli.main([])
"""


@pytest.mark.parametrize(
    ("code", "ended"),
    [(129, -signal.SIGHUP), (130, -signal.SIGINT), (143, -signal.SIGTERM), (0, 0), (1, 1), (137, 137)],
)
def test_a_process_ends_by_the_signal_that_stopped_it(code, ended):
    """After all else: what begins later is called before it, such as a pod's goodbye."""
    done = subprocess.run([sys.executable, "-c", STOPPED.format(code=code)], stdout=subprocess.PIPE, check=False)
    assert done.returncode == ended
    assert b"what is left to do" in done.stdout


def test_a_closed_terminal_stops_a_run_unless_it_was_told_to_ignore_that():
    handler = signal.getsignal(signal.SIGHUP)
    try:
        for before, requested in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
            signal.signal(signal.SIGHUP, before)
            with stopping.StopSignal() as stop:
                signal.raise_signal(signal.SIGHUP)
            assert stop.requested == requested
            assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, handler)


def test_a_shells_loop_ends_with_ctrl_c_alone(tmp_path):
    """The one of docs/reference/exit_codes.md; SIGTERM begins the run again."""
    (tmp_path / "stopped.py").write_text("""
import os, signal, time
from podracer.system.stopping import Ending
ending = Ending()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: setattr(ending, "code", 128 + number))
print(os.getpid(), flush=True)
while not ending.code:
    time.sleep(0.01)
ending()
""")
    loop = f"until {sys.executable} {tmp_path}/stopped.py; do test $? -ge 128 || exit 1; done"
    variables = os.environ | {"PYTHONPATH": str(pathlib.Path(stopping.__file__).parents[2])}
    heard = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp('bash', sys.argv[1:])"
    command = [sys.executable, "-c", heard, "bash", "-c", loop]  # in the background it would be ignored
    shell = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, env=variables)
    try:
        os.kill(int(shell.stdout.readline()), signal.SIGTERM)
        assert int(shell.stdout.readline())
        os.killpg(shell.pid, signal.SIGINT)
        assert shell.wait(timeout=20) in (-signal.SIGINT, 130)
        assert shell.stdout.read() == b""
    finally:
        shell.kill()
        shell.wait()
        shell.stdout.close()


def test_the_first_process_of_a_container_hears_sigterm_from_the_start(monkeypatch):
    handler = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stopping.Ending()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        monkeypatch.setattr(os, "getpid", lambda: 1)
        ending = stopping.Ending()
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.code == 143
        monkeypatch.setattr(os, "kill", lambda *arguments: None)  # no signal ends it
        ending.code = 143
        ending()
    finally:
        signal.signal(signal.SIGTERM, handler)
