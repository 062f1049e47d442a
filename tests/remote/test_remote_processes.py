"""Workers and learners as processes: killed, frozen, slow, hanging, and coming back."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import podracer
from tests.support import hosts, tiers, workers

pytest.importorskip("grpc")
pytestmark = pytest.mark.slow

COUNTED = "gymnasium:gyms:Counted-v0"
REMOTE = ["--remote.block", "4", "--remote.join-timeout", "60"]
TRAIN = ["vtrace", "gymnasium:CartPole-v1", "--num-envs", "8", "--eval-episodes", "2", "--agent.hidden-sizes", "8"]
SETTINGS = {"num_envs": 8, "eval_episodes": 2, "progress": False, "config": {"hidden_sizes": (8,), "rollout_length": 5}}


def podracer_process(*arguments, **kwargs):
    here = str(pathlib.Path(workers.__file__).parent)  # of the module `gyms`
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
    """The environment steps of a run so far."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["env_steps"] for line in lines if line.endswith("}")), default=0)


def logged(path):
    """(process, its parent, whether it knows gRPC, seed) of environments that were begun, in order."""
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def listens(where):
    """Returns True if a process listens at an address."""
    host, port = where.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


def is_there(pid):
    """Returns True if a process runs."""
    with contextlib.suppress(OSError):
        return " Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()[:80]
    return False


@contextlib.contextmanager
def in_thread(function):
    """Does something beside what is in the context, and raises what it raised."""
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGINT)  # whoever waits for what it was to do waits no more

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(60.0)
        if errors:
            raise errors[0]
    assert not thread.is_alive()


@pytest.mark.parametrize("mode", [*tiers.nightly("all"), "ready"])
def test_workers_that_are_killed_or_frozen_are_replaced_and_the_run_goes_on(mode, tmp_path, monkeypatch, capfd):
    """No row is learnt from that was not played, and the steps that are counted are those that were."""
    seen, progress, kills = workers.consumed(monkeypatch), [0], []
    where = f"unix:{tmp_path}/socket"
    with workers.process(
        COUNTED, where, "--processes", "2", "--lanes", "4", "--env.settings", "delay=0.002"
    ) as supervisor:

        def kill():
            assert hosts.within(90.0, lambda: progress[-1] > 500)
            frozen = workers.children(supervisor.pid)[0]
            os.kill(frozen, signal.SIGSTOP)  # for longer than a step may take
            time.sleep(3.0)
            os.kill(frozen, signal.SIGCONT)
            for _ in range(3):
                assert hosts.within(20.0, lambda: len(workers.children(supervisor.pid)) == 2)
                kills.append(workers.children(supervisor.pid)[len(kills) % 2])
                os.kill(kills[-1], signal.SIGKILL)
                time.sleep(1.0)
                assert not workers.is_worker(kills[-1])

        with in_thread(kill):
            result = podracer.train(
                "vtrace",
                "remote:counted",
                total_steps=8000,
                run_dir=tmp_path / "run",
                remote={"listen": where, "mode": mode, "block": 4 if mode == "all" else 1},
                env_timeout=2.0,
                log=lambda steps, row: progress.append(steps),
                **SETTINGS,
            )
        code, said = ended(supervisor, 15)
        assert code == 0, said
    assert said.count("ended (exit code -9); a new one in") == 3
    assert "the learner is finished" in said
    assert result.summary["complete"]
    assert result.summary["env_steps"] == workers.check_consumed(seen)
    assert {0, 1} == {int(action) for _, actions in seen for action in actions.flat}
    last = [row for row in result.history if "remote/breaks" in row][-1]
    assert last["remote/breaks"] >= 2, "who is killed before it is welcomed breaks nothing"
    assert re.search(r"worker .* has not answered for [23] s", capfd.readouterr().err), "the frozen one"
    assert last["remote/filler_rows"] > 0
    lengths = {row["episode/length"] for row in result.history if np.isfinite(row.get("episode/length", np.nan))}
    assert lengths == {5.0}, "no broken episode is counted"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["remote"]["mode"] == mode


def test_a_learner_that_goes_finds_its_workers_when_it_is_back(tmp_path, monkeypatch):
    """Stopped by a signal and then killed; in time, and with episodes that nobody has seen."""
    where, run, log, said = f"127.0.0.1:{free_port()}", tmp_path / "run", tmp_path / "log", []
    flags = ["--remote.listen", where, "--total-steps", "16000", "--checkpoint-every", "2000", "--run-dir", run]
    with workers.process(COUNTED, where, "--lanes", "8", "--env.settings", "delay=0.0005", f"log={log}") as worker:
        listen = threading.Thread(target=lambda: said.extend((time.monotonic(), line) for line in worker.stderr))
        listen.start()
        # The first to say what the environment is comes twice: the learner listens anew with room for its rows.
        connected = lambda since: [at for at, line in said if "connected to" in line and at > since]  # noqa: E731
        with podracer_process("train", "vtrace", "remote:counted", *TRAIN[2:], *flags, *REMOTE) as learner:
            assert hosts.within(90.0, lambda: steps(run) > 3000)
            learner.send_signal(signal.SIGTERM)
            assert ended(learner, 30)[0] == -signal.SIGTERM
        stopped = json.loads((run / "summary.json").read_text())
        assert max(int(path.name) for path in (run / "checkpoints").iterdir()) == stopped["env_steps"] > 3000
        assert worker.poll() is None, "it waits for the learner"
        assert any("the learner stops for now" in line for _, line in said)
        with podracer_process("resume", run) as learner:
            assert hosts.within(90.0, lambda: listens(where))
            begin = time.monotonic()
            assert hosts.within(12.5, lambda: connected(begin))
            before = steps(run)
            assert hosts.within(90.0, lambda: steps(run) > before + 3000)
            learner.kill()
            learner.communicate()
        seeds, seen, back = {seed % 2**20 for *_, seed in logged(log)}, workers.consumed(monkeypatch), []
        there = lambda: hosts.within(90.0, lambda: listens(where)) and back.append(time.monotonic())  # noqa: E731
        with in_thread(there):
            result = podracer.resume(run, progress=False)
        assert result.summary["complete"]
        assert worker.wait(15) == 0
        listen.join(10.0)
    assert connected(back[0])[0] - back[0] < 12.5, "killed, it said no goodbye"
    assert "the learner is finished" in said[-1][1]
    opening = seen[0][0]
    assert opening.first[0].all()
    np.testing.assert_array_equal(opening.observation[0, :, 1:], [[0, -1]] * 8)
    assert not seeds & set((2**20 * opening.observation[0, :, 0]).astype(int).tolist())
    workers.check_consumed(seen, one_actor=True)


def test_environments_that_hang_are_named_and_replaced(tmp_path, capfd):
    """The worker's process too, for a thread cannot be ended; nobody else waits for it."""
    flags = ["--lanes", "2", "--processes", "2", "--env.settings", f"hang={tmp_path}/hung", "delay=0.005"]
    with (
        workers.learner(block=2, answer_timeout=6.5) as made,
        workers.process(COUNTED, made.where, *flags) as supervisor,
    ):
        players = [workers.Player(made.make(2, 1000 * i), 2) for i in range(2)]
        assert hosts.within(60.0, lambda: made.metrics()["remote/breaks"] == 1)
        there, played = set(workers.children(supervisor.pid)), [player.played for player in players]
        assert max(played) > 3 * min(played), "the other one goes on"
        assert hosts.within(30.0, lambda: len({*workers.children(supervisor.pid)} - there) == 1)
        assert hosts.within(30.0, lambda: made.metrics()["remote/sessions"] == 2)
        played = [player.played for player in players]
        assert hosts.within(30.0, lambda: all(p.played > n + 150 for p, n in zip(players, played)))
        for player in players:
            player.stop()
        made.close(workers.pb.Goodbye.FINISHED)
        code, said = ended(supervisor, 20)
        assert code == 0, said
    assert "ended (its environments hang); a new one in" in said
    pattern = r"worker .* has not answered for [67] s \(block \d has been at it for \d s\); lanes 0 to 1 break"
    assert re.search(pattern, capfd.readouterr().err)


def test_frozen_and_slow_workers_hold_up_nobody_else(tmp_path):
    """A frozen one is given up in 20 s, and comes back with other episodes, wherever it was when it froze."""
    log, slow = tmp_path / "log", ["--lanes", "2", "--env.settings", "delay=0.4"]
    three = ["--lanes", "2", "--processes", "3", "--env.settings", "delay=0.02", f"log={log}"]
    pace = lambda player, since: np.median(np.diff([at for at in player.times if at > since]))  # noqa: E731
    with workers.learner(block=2) as made, workers.process(COUNTED, made.where, *three):
        players = a, b, c = [workers.Player(made.make(2, 1000 * i), 2) for i in range(3)]
        assert hosts.within(60.0, lambda: all(len(player.times) > 50 for player in players))
        usual = [pace(player, player.times[20]) for player in players]
        with workers.process(COUNTED, made.where, *slow):
            late = workers.Player(made.make(2, 5000), 2)
            assert hosts.within(60.0, lambda: len(late.times) > 1)
            since = time.monotonic()
            time.sleep(2.5)
            assert len([at for at in late.times if at > since]) <= 4
            for player, seconds in zip(players, usual):
                assert pace(player, since) <= seconds / 0.9
            late.stop()
        owners = {seed: pid for pid, *_, seed in logged(log)}  # all have made one of seed 0, to know its spec
        os.kill(owners[1], signal.SIGSTOP)  # in a step, as it nearly always is: before its rows
        b.go.clear()
        assert b.at_rest.wait(10.0)
        os.kill(owners[1001], signal.SIGSTOP)
        b.go.set()  # what it is sent now it does not read
        begin, lost = time.monotonic(), made.metrics()["remote/breaks"]
        assert hosts.within(23.0, lambda: made.metrics()["remote/breaks"] == lost + 2)
        assert time.monotonic() - begin > 2.0
        assert pace(c, begin) <= usual[2] / 0.9
        assert made.metrics()["remote/sessions"] == 1
        a.lost = b.lost = True
        played = [player.played for player in players]
        for seed in (1, 1001):
            os.kill(owners[seed], signal.SIGCONT)
        assert hosts.within(30.0, lambda: all(p.played > n + 20 for p, n in zip(players, played)))
        assert made.metrics()["remote/sessions"] == 3
        assert len(a.seeds) == len(b.seeds) == 4
        assert {pid for pid, *_ in logged(log)} == set(owners.values()), "they are the same processes"
        begin, lost = time.monotonic(), made.metrics()["remote/breaks"]
        os.kill(owners[2001], signal.SIGKILL)
        assert hosts.within(1.0, lambda: made.metrics()["remote/breaks"] == lost + 1)
        c.lost, since, played = True, time.monotonic(), c.played
        assert hosts.within(30.0, lambda: c.played > played + 20)
        for player, seconds in zip((a, b), usual):
            assert pace(player, since) <= seconds / 0.9
        for player in players:
            player.stop()


def test_environments_that_have_processes_of_their_own(tmp_path):
    """They are spawned, and end with their worker as it ends with its supervisor, also one that is killed."""
    log = tmp_path / "log"
    flags = ["--lanes", "2", "--env.vectorization", "async", "--env.settings", f"log={log}"]
    with workers.learner(block=2) as made, workers.process(COUNTED, made.where, *flags) as supervisor:
        player = workers.Player(made.make(2, 5), 2)
        assert hosts.within(60.0, lambda: player.played > 40)
        (victim,) = workers.children(supervisor.pid)
        first = {pid for pid, parent, *_ in logged(log) if parent == victim}
        assert len(first) == 2
        assert not any(grpc for pid, _, grpc, _ in logged(log) if pid in first), "a fork would have inherited it"
        os.kill(victim, signal.SIGKILL)
        assert hosts.within(5.0, lambda: not any(map(is_there, first)))
        played = player.played
        assert hosts.within(60.0, lambda: player.played > played + 40)
        (victim,) = workers.children(supervisor.pid)
        second = {pid for pid, parent, *_ in logged(log) if parent == victim}
        assert len(second) == 2
        supervisor.kill()
        assert hosts.within(5.0, lambda: not any(map(is_there, {victim, *second})))
        player.stop()


def test_exit_codes(capfd):
    """Exit codes of a worker that is not understood, not wanted, or has nobody to work for; each says why in one
    line."""
    with workers.learner(block=2) as made, contextlib.ExitStack() as stack:
        start = lambda *arguments: stack.enter_context(workers.process(*arguments))  # noqa: E731
        refused = start("gymnasium:CartPole-v1", made.where, "--quiet")
        alone = start(COUNTED, f"127.0.0.1:{free_port()}", "--give-up-after", "1", "--quiet")
        code, said = ended(refused, 40)
        assert (code, said.count("\n")) == (2, 1)
        assert "refuses this worker: another environment: " in said
        assert made.metrics()["remote/rejected"] == 1, "it does not try again"
        assert "is sent away: another environment: " in capfd.readouterr().err
        code, said = ended(alone, 40)
        assert (code, said.count("\n")) == (3, 1)
        assert "no learner at 127.0.0.1" in said
        wrong = start(COUNTED, made.where, "--lanes", "2", "--quiet", "--env.settings", "reward=nan")
        player = workers.Player(made.make(2, 0), 2)
        code, said = ended(wrong, 60)
        assert (code, said.count("\n")) == (1, 1)
        assert re.search(r"does not understand this worker: lane \d: reward is nan", said)
        assert made.metrics()["remote/rejected"] == 4
        stopped = start(COUNTED, made.where, "--lanes", "2")
        assert hosts.within(40.0, lambda: made.metrics()["remote/sessions"] == 1)
        stopped.send_signal(signal.SIGTERM)
        assert ended(stopped, 20)[0] == -signal.SIGTERM
        player.stop()


def test_a_learner_that_diverges_sends_its_workers_home(tmp_path):
    where = f"unix:{tmp_path}/socket"
    flags = ["--processes", "2", "--lanes", "4", "--env.settings", "reward=1e30"]
    train = ["train", "vtrace", "remote:counted", *TRAIN[2:], "--total-steps", "100000", "--remote.listen", where]
    train += ["--remote.max-magnitude", "1e38"]
    with workers.process(COUNTED, where, *flags) as supervisor:
        with podracer_process(*train) as learner:
            code, said = ended(learner, 120)
        assert code == 1, said
        assert re.match(r"podracer: error: .* not finite after \d+ environment steps", said.splitlines()[-1]), said
        there = workers.children(supervisor.pid)
        code, said = ended(supervisor, 5)
        assert code == 3, said
        assert "the learner failed: TrainingDivergedError: " in said
        assert not any(map(is_there, there))


def test_nobody_comes_all_leave_and_the_port_is_taken(tmp_path, monkeypatch, capfd):
    """The waiting process names what is missing, and ends at once when it is told to."""
    assert podracer.remote.hub.SAY_SECONDS == 10.0
    monkeypatch.setattr("podracer.remote.hub.SAY_SECONDS", 0.5)
    where, progress, told = f"127.0.0.1:{free_port()}", [], []

    def play():
        assert hosts.within(60.0, lambda: listens(where))
        with podracer_process("train", *TRAIN, "--remote.listen", where, "--run-dir", tmp_path / "other") as second:
            code, said = ended(second, 60)
            assert code == 1, said
            assert f"cannot listen at {where}: the address is in use" in said.splitlines()[-1]  # gRPC says it too
        time.sleep(2.0)
        with workers.process(COUNTED, where, "--lanes", "8") as worker:
            assert hosts.within(60.0, lambda: len(progress) > 3)
            worker.kill()
        time.sleep(2.0)
        told.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with in_thread(play):
        with pytest.raises(podracer.Interrupted):
            podracer.train(
                "vtrace",
                workers.Counting(),
                total_steps=10**7,
                remote={"listen": where},
                log=lambda steps, row: progress.append(steps),
                **SETTINGS,
            )
        ended_at = time.monotonic()
    assert ended_at - told[0] < 1.5
    said = capfd.readouterr().err
    line = rf"lanes have no worker yet; workers connect to {re.escape(where)}"
    assert len(re.findall(f"remote: 8 of 8 {line}", said)) >= 3, "nobody has come"
    assert len(re.findall(f"remote: 4 of 4 {line}", said)) >= 2, "all have left: half of them would do"


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
