"""The launcher with processes that are plain Python: numbers before lines, exit codes, signals, and no orphans."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from podracer.cli import launch as command_line
from podracer.pod import launch, settings
from podracer.pod.launch import environment
from tests.support import pods


def started(tmp_path, text, *options, **settings):
    """A launcher, running two processes of a script."""
    script = tmp_path / "script.py"
    script.write_text(f"import os, signal, sys, time\ni = int(os.environ['JAX_PROCESS_ID'])\n{text}\n")
    command = [sys.executable, "-m", "podracer", "launch", *options, "--script", str(script), "--", "x"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)


def ended(process):
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()  # else it would outlive a test that failed, and break others
    return process.returncode, out, err


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_lines_have_numbers_and_processes_know_each_other(tmp_path):
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_NUM_CPU_DEVICES", "PODRACER_LOCAL_COUNT")
    text = f"print(sys.argv[1:], *(os.environ[name] for name in {names}))"
    code, out, err = ended(started(tmp_path, text, "--processes", "3", "--devices-per-process", "2"))
    assert (code, err) == (0, "")
    lines = sorted(out.splitlines())
    assert [line[:4] for line in lines] == ["[0] ", "[1] ", "[2] "]
    assert len({line[4:] for line in lines}) == 1
    assert re.fullmatch(r"\['x'\] 127\.0\.0\.1:\d+ 3 2 3", lines[0][4:])


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("sys.exit(5 if i == 1 else 3)", 5, r"process 1 \(pid \d+\) ended with exit code 5"),
        ("os.kill(os.getpid(), 9) if i == 0 else sys.exit(3)", 137, r"process 0 \(pid \d+\) was ended by SIGKILL"),
        ("sys.exit(3 if i else 0)", 3, ""),
    ],
    ids=["an error", "killed", "only a follower"],
)
def test_the_code_is_that_of_who_failed(tmp_path, text, code, message):
    found, _, err = ended(started(tmp_path, text))
    assert found == code
    assert re.search(message, err), err


def test_on_colab_processes_may_be_launched(monkeypatch):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    variables = environment(launch.Launch(), 1, 80)
    assert settings.find(settings.Pod(), variables, None).process_id == 1


def test_launchers_at_once_have_ports_of_their_own():
    """Nobody else is given one before process 0 listens there, which it can."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(launch._reserved_port()) for _ in range(50)]
        ports = {one.getsockname()[1] for one in held}
        assert len(ports) == 50
        for _ in range(500):
            other = stack.enter_context(socket.socket())
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] not in ports
        for one in held[:3]:
            stack.enter_context(socket.create_server(("", one.getsockname()[1])))


def test_the_others_are_ended(tmp_path, monkeypatch):
    """By SIGTERM, and those that do not listen by SIGKILL."""
    text = "print(os.getpid()); signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif i: sys.exit(7)\ntime.sleep(60)"
    script = tmp_path / "script.py"
    script.write_text(f"import os, signal, sys, time\ni = int(os.environ['JAX_PROCESS_ID'])\n{text}\n")
    monkeypatch.setattr(launch, "PATIENCE", 0.3)
    begin = time.monotonic()
    assert command_line.run(["--script", str(script), "--", "x"]) == 7
    assert time.monotonic() - begin < 10


def test_who_does_not_follow_is_ended(tmp_path, monkeypatch, capsys):
    """Also where nobody has failed: the others have lost one that is frozen, and it is the one to name."""
    script = tmp_path / "script.py"
    freeze = "os.kill(os.getpid(), signal.SIGSTOP)"
    text = f"{freeze} if os.environ['JAX_PROCESS_ID'] == '1' else sys.exit(3)"
    script.write_text(f"import os, signal, sys\n{text}\n")
    monkeypatch.setattr(launch, "PATIENCE", 0.3)
    assert command_line.run(["--script", str(script), "--", "x"]) == 3
    said = r"podracer launch: process 1 \(pid \d+\) did not end with the others and was ended by SIGKILL\n"
    assert re.fullmatch(said, capsys.readouterr().err)


def test_an_interrupt_at_the_terminal_is_heard_once(tmp_path):
    text = """
heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
print("there", flush=True)
while not heard:
    time.sleep(0.01)
time.sleep(0.5)
print(len(heard))
"""
    process = started(tmp_path, text, start_new_session=True)
    assert process.stdout is not None
    for _ in range(2):
        assert "there" in process.stdout.readline()
    process.send_signal(signal.SIGSTOP)  # two at once would be one
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGCONT)
    code, out, _ = ended(process)
    assert (code, sorted(out.splitlines())) == (0, ["[0] 1", "[1] 1"])


def test_no_process_outlives_its_launcher(tmp_path):
    process = started(tmp_path, "print(os.getpid(), flush=True); time.sleep(60)")
    assert process.stdout is not None
    children = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.kill()
    ended(process)
    pods.until(lambda: not any(map(is_there, children)), 10)


def test_a_signal_is_passed_on(tmp_path):
    # Python hears a signal after a sleep that began just as it came: short ones.
    sleep = "[time.sleep(0.1) for _ in range(600)]"
    text = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print(os.getpid(), flush=True); {sleep}"
    process = started(tmp_path, text, "--restarts", "3")
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    code, _, _ = ended(process)
    assert code == 0
    assert not any(map(is_there, pids))


def test_all_start_again_after_a_failure(tmp_path):
    text = f"""
path = {str(tmp_path)!r} + f"/tries-{{i}}"
tries = os.path.exists(path)
open(path, "w").close()
sys.exit(0 if tries else 4 - i)
"""
    code, _, err = ended(started(tmp_path, text, "--restarts", "1"))
    assert code == 0, err
    assert "start 2 of 2" in err


@pytest.mark.parametrize("code", [129, 130, 143])
def test_what_a_signal_has_stopped_does_not_start_again(code, monkeypatch):
    starts = []
    monkeypatch.setattr(launch.Group, "run", lambda self: starts.append(code) or (code, False))
    assert command_line.run(["--restarts", "1", "--", "train", "--topology", "pod"]) == code
    assert starts == [code]


@pytest.mark.parametrize(("command", "again"), [("train", ["--resume"]), ("resume", [])])
def test_what_goes_on_by_itself_is_not_told_to(command, again, monkeypatch):
    """`resume` has no such option."""
    commands = []
    monkeypatch.setattr(launch.Group, "run", lambda self: commands.append(self._program[3:]) or (1, False))
    given = [command, "runs/1", "--topology", "pod"]
    assert command_line.run(["--restarts", "1", "--", *given]) == 1
    assert commands == [given, given + again]


@pytest.mark.parametrize(
    ("platforms", "gpus", "ids"),
    [(None, True, "2,3"), ("", True, "2,3"), (None, False, None), ("cpu", True, None), ("cuda", False, "2,3")],
)
def test_processes_divide_the_gpus(platforms, gpus, ids, monkeypatch):
    """Also where nothing says that JAX is to use them, but that they are there."""
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(launch.shutil, "which", lambda name: f"/usr/bin/{name}" if gpus else None)
    variables = environment(launch.Launch(devices_per_process=2), 1, 80)
    assert variables.get("JAX_LOCAL_DEVICE_IDS") == ids


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--processes", "2"], "what to run comes after --"),
        (["--processes", "0", "--", "x"], "processes=0"),
        (["--", "train", "ppo", "catch"], "add --topology pod"),
        (["--script", "a.py", "--module", "b", "--", "x"], "not both"),
    ],
)
def test_what_cannot_be_launched(argv, message, capsys):
    assert command_line.run(argv) == 2
    assert message in capsys.readouterr().err


def test_processes_go_on_where_nobody_reads_what_they_print(tmp_path):
    process = started(tmp_path, "for k in range(20000): print(k)\nprint('end', file=sys.stderr)")
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""
