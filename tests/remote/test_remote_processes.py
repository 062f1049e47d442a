"""Workers and learners as processes: killed, frozen, hanging, and coming back."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import hosts
import numpy as np
import pytest
import workers

import podracer

pytest.importorskip("grpc")
pytestmark = pytest.mark.slow

REMOTE = ["--remote.block", "4", "--remote.join-timeout", "60"]
TRAIN = ["vtrace", "gymnasium:CartPole-v1", "--num-envs", "8", "--eval-episodes", "2", "--agent.hidden-sizes", "8"]


def podracer_process(*arguments, **kwargs):
    here = str(pathlib.Path(__file__).parent)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "podracer", *map(str, arguments)]
    return subprocess.Popen(
        command, env=variables, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, **kwargs
    )


def ended(process, seconds):
    """The exit code and the words of a process that is to end in time."""
    try:
        said = process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still there after {seconds} s; it said: {process.communicate()[1]}")
    return process.returncode, said


def steps(run_dir):
    """How far a run is."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["env_steps"] for line in lines if line.endswith("}")), default=0)


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def announced(tmp_path):
    return ["--remote.listen", "127.0.0.1:0", "--remote.announce", tmp_path / "where"]


def children(process):
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def is_worker(pid):
    command = pathlib.Path(f"/proc/{pid}/cmdline")
    with contextlib.suppress(OSError):  # it may end while it is looked at
        return b"spawn_main" in command.read_bytes()
    return False


def test_a_worker_that_is_killed_is_replaced_and_the_run_goes_on(tmp_path, announced):
    """The lanes of the other one go on, and the steps that are counted are those that were played."""
    where, run = f"file:{tmp_path}/where", ["--total-steps", 40_000, "--run-dir", tmp_path / "run"]
    two = ("--processes", "2", "--lanes", "4")
    with (
        podracer_process("train", *TRAIN, *announced, *REMOTE, *run) as learner,
        workers.process("gymnasium:CartPole-v1", where, *two) as worker,
    ):
        for number in range(2):
            assert hosts.within(90.0, lambda number=number: steps(tmp_path / "run") > 4000 * (number + 1))
            victim = next(pid for pid in children(worker) if is_worker(pid))
            os.kill(victim, signal.SIGKILL)
            others = lambda victim=victim: [p for p in children(worker) if is_worker(p) and p != victim]  # noqa: E731
            assert hosts.within(20.0, lambda others=others: len(others()) == 2)
        code, said = ended(learner, 120)
        assert code == 0, said
        code, said = ended(worker, 15)
        assert code == 0, said
    assert said.count("ended (exit code -9); a new one in") == 2
    assert said.count("the learner is finished") == 2
    last = [row for row in rows(tmp_path / "run") if "remote/breaks" in row][-1]
    assert last["remote/breaks"] == 2
    assert last["remote/filler_rows"] > 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["remote"]["block"] == 4


def test_a_learner_that_is_killed_and_resumed_finds_its_workers(tmp_path, announced):
    where = f"file:{tmp_path}/where"
    run = ["--total-steps", 30_000, "--checkpoint-every", 3000, "--run-dir", tmp_path / "run"]
    with workers.process("gymnasium:CartPole-v1", where, "--lanes", "8") as worker:
        with podracer_process("train", *TRAIN, *announced, *REMOTE, *run) as learner:
            assert hosts.within(90.0, lambda: steps(tmp_path / "run") > 7000)
            learner.kill()
        with podracer_process("resume", tmp_path / "run") as learner:
            assert hosts.within(90.0, lambda: steps(tmp_path / "run") > 14_000)
            learner.send_signal(signal.SIGTERM)
            assert ended(learner, 30)[0] == 143
        assert worker.poll() is None, "it waits for the learner"
        with podracer_process("resume", tmp_path / "run") as learner:
            code, said = ended(learner, 120)
            assert code == 0, said
        code, said = ended(worker, 15)
        assert code == 0, said
    assert "the learner stops for now" in said
    assert "the learner is finished" in said


def test_environments_that_hang_are_replaced(tmp_path):
    """The worker's process too, for a thread cannot be ended."""
    (tmp_path / "hanging.py").write_text(
        "import pathlib, time\n"
        "import gymnasium\n"
        "import gymnasium.envs.classic_control as classic\n"
        "class Hanging(classic.CartPoleEnv):\n"
        "    number = 0\n"
        "    def step(self, action):\n"
        "        Hanging.number += 1\n"
        "        if Hanging.number == 400 and not pathlib.Path('hung').exists():\n"
        "            pathlib.Path('hung').touch()\n"
        "            time.sleep(1000)\n"
        "        return super().step(action)\n"
        "gymnasium.register('Hanging-v0', entry_point=Hanging, max_episode_steps=100)\n"
    )
    name = "gymnasium:hanging:Hanging-v0"
    listen = ["--remote.listen", "127.0.0.1:0", "--remote.announce", "where", "--env-timeout", "2"]
    run = ["--total-steps", 25_000, "--run-dir", "run"]
    with (
        podracer_process("train", "vtrace", name, *TRAIN[2:], *listen, *REMOTE, *run, cwd=tmp_path) as learner,
        workers.process(name, "file:where", "--lanes", "4", "--processes", "2", cwd=tmp_path) as worker,
    ):
        code, said = ended(learner, 120)
        assert code == 0, said
        assert re.search(r"has not answered for \d s.*; lanes \d to \d break", said)
        code, said = ended(worker, 20)
        assert code == 0, said
    assert (tmp_path / "hung").exists()
    assert "ended (its environments hang); a new one in" in said


def test_a_frozen_worker_is_given_up_and_comes_back(tmp_path):
    """What it sends after it was given up is not taken."""
    made = []
    remote = {"listen": f"unix:{tmp_path}/socket", "block": 4}
    with workers.process("gymnasium:CartPole-v1", remote["listen"], "--lanes", "4", "--processes", "2") as worker:

        def freeze():
            assert hosts.within(60.0, lambda: len(made) > 5)
            victim = next(pid for pid in children(worker) if is_worker(pid))
            os.kill(victim, signal.SIGSTOP)
            time.sleep(3.0)
            os.kill(victim, signal.SIGCONT)

        freezer = threading.Thread(target=freeze, daemon=True)
        freezer.start()
        result = podracer.train(
            "vtrace",
            "gymnasium:CartPole-v1",
            num_envs=8,
            total_steps=40_000,
            env_timeout=1.0,
            eval_episodes=2,
            config={"hidden_sizes": (8,)},
            remote=remote,
            progress=False,
            log=lambda steps, row: made.append(steps),
        )
        freezer.join(30.0)
        code, said = ended(worker, 20)
        assert code == 0, said
    assert result.summary["complete"]
    last = [row for row in result.history if "remote/breaks" in row][-1]
    assert last["remote/breaks"] >= 1
    assert all(np.isfinite(value) for row in result.history for name, value in row.items() if name.startswith("loss"))


def test_what_is_wrong_is_said_in_one_line(tmp_path):
    def said(*arguments, code):
        with podracer_process(*arguments) as process:
            assert process.wait(60) == code, process.stderr.read()
            lines = process.stderr.read().strip().splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    assert "needs the learner's address" in said("serve-envs", "gymnasium:CartPole-v1", code=2)
    assert "did you mean" in said("serve-envs", "gymnasium:CartPole-v1", "--connct", "x:1", code=2)
    assert "tls_ca must say" in said("serve-envs", "gymnasium:CartPole-v1", "--connect", "10.0.0.1:1", code=2)
    assert "unknown environment" in said("serve-envs", "cartpol", "--connect", "127.0.0.1:1", code=2)
    assert "needs tls_cert" in said("train", *TRAIN, "--remote.listen", "0.0.0.0:7777", code=2)
    assert "cannot be read" in said(
        "serve-envs", "gymnasium:CartPole-v1", "--connect", "127.0.0.1:1", "--token-file", tmp_path / "none", code=2
    )


def test_workers_end_with_their_supervisor(tmp_path):
    """Also one that is killed, which can tell nobody."""
    with workers.process("gymnasium:CartPole-v1", f"file:{tmp_path}/nowhere", "--processes", "2") as worker:
        assert hosts.within(20.0, lambda: len([pid for pid in children(worker) if is_worker(pid)]) == 2)
        there = [pid for pid in children(worker) if is_worker(pid)]
        worker.kill()
        assert hosts.within(10.0, lambda: not any(is_worker(pid) for pid in there))
