"""A worker's side alone: whom it talks to."""

import re
import sys
import threading
import time
import types

import pytest

from podracer import cli
from podracer.remote import block_thread, supervisor
from tests.support import workers

grpc = pytest.importorskip("grpc")
pb = pytest.importorskip("podracer.remote.session_pb2")
wire = pytest.importorskip("podracer.remote.wire")
worker = pytest.importorskip("podracer.remote.worker")

ELSEWHERE = "10.0.0.5:7777"


@pytest.mark.parametrize(
    "where",
    [
        ELSEWHERE,
        f"dns:///{ELSEWHERE}",
        f"localhost:7777,{ELSEWHERE}",
        f"{ELSEWHERE},unix:socket",
        "dns:///unix:7777",
        f"ipv4:{ELSEWHERE}",
        f"ipv4:127.0.0.1:1,{ELSEWHERE}",
    ],
)
def test_no_token_goes_to_another_machine_in_the_clear(where, tmp_path):
    """This holds for all sources of the address: also a file, which is read again before every try."""
    (tmp_path / "where").write_text("127.0.0.1:7777\n")
    (tmp_path / "token").write_bytes(b"a secret of sixteen bytes")
    with pytest.raises(ValueError, match="is on another machine, so tls_ca must say"):
        worker.Connection(where, token_file=str(tmp_path / "token"))
    connection = worker.Connection(f"file:{tmp_path}/where", token_file=str(tmp_path / "token"))
    assert connection.target("anybody") == "127.0.0.1:7777"
    (tmp_path / "where").write_text(where + "\n")
    with pytest.raises(ValueError, match="is on another machine, so tls_ca must say"):
        connection.target("anybody")
    with pytest.raises(ValueError, match="is on another machine"):
        worker.serve_envs("gymnasium:CartPole-v1", f"file:{tmp_path}/where", quiet=True, give_up_after=5.0)
    for allowed in ({"insecure": True}, {"tls_ca": "ca"}):
        assert worker.Connection(f"file:{tmp_path}/where", **allowed).target("w1") in where.split(",")


def test_where_a_learner_is(tmp_path):
    connection = worker.Connection(f"file:{tmp_path}/where")
    assert connection.target("w") == ""
    (tmp_path / "where").write_text("127.0.0.1:1,localhost:2\n")
    for name in ("w", "node", "host-", "node1-"):
        both = {connection.target(f"{name}{i}") for i in range(2)}
        assert both == {"127.0.0.1:1", "localhost:2"}, "neighbours take different ones"
    (tmp_path / "where").write_text("nonsense")
    with pytest.raises(ValueError, match="use HOST:PORT"):
        connection.target("w")
    (tmp_path / "where").write_text("")
    assert connection.target("w") == ""


def test_variables_say_what_flags_do(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(supervisor, "run", lambda env, settings, processes: asked.append(settings) or 0)
    (tmp_path / "token").write_bytes(b"a-secret-of-sixteen-bytes")
    monkeypatch.setenv("PODRACER_CONNECT", "localhost:7777")
    monkeypatch.setenv("PODRACER_TOKEN_FILE", str(tmp_path / "token"))
    assert cli.run(["serve-envs", "gymnasium:CartPole-v1"]) == 0
    assert cli.run(["serve-envs", "gymnasium:CartPole-v1", "--connect", "localhost:8888"]) == 0
    assert [settings["connect"] for settings in asked] == ["localhost:7777", "localhost:8888"]
    assert asked[0]["token_file"] == str(tmp_path / "token")


def test_a_certificate_is_not_carried_in_the_clear():
    with pytest.raises(ValueError, match="tls_cert needs tls_ca"):
        worker.Connection("localhost:1", tls_cert="a", tls_key="b")


class Ended(grpc.RpcError):
    """The error that ends a stream."""

    def __init__(self, code, details=""):
        self.code, self.details = lambda: code, lambda: details


def session(said=lambda line: None):
    settings = worker.Connection("localhost:1")
    made = worker._Session(settings, "localhost:1", None, "w", 4, worker._Made(workers.Counting(), None), said)
    made._environments = workers.Counting()
    return made


@pytest.mark.parametrize("why", ["FINISHED", "FAILED", "RESTARTING"])
def test_what_the_learner_said_goes_before_environments_that_hang(why, monkeypatch):
    """A new process would look for a learner that has ended."""
    monkeypatch.setattr(block_thread, "STEP_SECONDS", 0.05)
    one, stepping, hung, why = session(), threading.Event(), threading.Event(), getattr(pb.Goodbye, why)
    begun(one, workers.Counting(misbehave=lambda running: (stepping.set(), hung.wait())))
    stepping.wait()
    monkeypatch.setattr(one, "_listen", lambda *_: why)
    began = time.monotonic()
    if why == pb.Goodbye.RESTARTING:
        with pytest.raises(worker.HungError):
            one.talk(1)
    else:
        assert one.talk(1) == why
    assert time.monotonic() - began < 30.0, "it waits no longer than a step may last"
    hung.set()


def begun(one, environments, start=True):
    """A block of a session."""
    asked, layout = pb.Open(block=7, lanes=2, seed=0), wire.Layout(environments.spec)
    one._blocks[7] = block = worker.BlockThread(asked, environments, layout, one._outgoing.put, one._failed)
    if start:
        block.start()
    return block


@pytest.mark.parametrize("slow", ["make", "close"])
def test_environments_that_are_made_or_close_slowly_do_not_hang(slow, monkeypatch):
    """After their evaluation, say, which may end while a block of it is still made."""
    monkeypatch.setattr(block_thread, "STEP_SECONDS", 0.0)
    one, at_it, go_on = session(), threading.Event(), threading.Event()

    class Slow(workers.Counting):
        def make(self, *args, **kwargs):
            made = super().make(*args, **kwargs)
            wait = lambda: (at_it.set(), go_on.wait())  # noqa: E731
            made.close = wait if slow == "close" else made.close
            if slow == "make":
                wait()
            return made

    block = begun(one, Slow())
    block.close()
    at_it.wait()
    assert not block.hangs
    with monkeypatch.context() as context:
        context.setattr(block, "_limit", 0.0)
        assert block.hangs, "not for ever"
    go_on.set()
    assert one._close_all()


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_an_environment_that_raises_is_said_once_and_forgotten(error, monkeypatch, capsys):
    def misbehave(running):
        raise error("the plug was pulled")

    lines: list = []
    one, environments = session(lines.append), workers.Counting(misbehave=misbehave)
    block = begun(one, environments, start=False)
    monkeypatch.setenv("PODRACER_TRACEBACK", "1")
    block.run()
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):\n")
    (line,) = lines
    where = r"in misbehave, \S+test_worker\.py, line \d+, `raise error.*`"
    said = rf"{error.__name__}: the plug was pulled, {where}"
    assert re.fullmatch(f"environments of block 7 failed: {said}", line)
    assert not one._blocks, "it is not busy any more"
    message, _ = wire.unpack(pb.FromWorker, one._outgoing.get())
    assert message.failed.block == 7
    assert re.fullmatch(said, message.failed.error)


def test_a_block_sends_nothing_that_is_not_of_the_spec():
    class Whole(workers.Counting):
        def make(self, *args, **kwargs):
            made = super().make(*args, **kwargs)
            recv = made.recv

            def whole():
                lanes, rows = recv()
                return lanes, rows._replace(observation=rows.observation.astype(int))

            made.recv = whole
            return made

    failed: list = []
    put = lambda data: pytest.fail("rows were sent")  # noqa: E731
    asked, layout = pb.Open(block=7, lanes=2, seed=0), wire.Layout(workers.Counting().spec)
    worker.BlockThread(asked, Whole(), layout, put, lambda *what: failed.append(what)).run()
    ((number, error),) = failed
    assert (number, error) == (
        7, "ValueError: observation is int64[2, 3], and not float32[2, 3], as the environment says."
    )  # fmt: skip


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED])
@pytest.mark.parametrize(("seconds", "enough"), [(-1.0, False), (300.0, True)])
def test_tries_are_counted_anew_after_a_sound_session(seconds, enough, code, monkeypatch):
    ends = [Ended(code, "a\nreason")] * 5
    talk = lambda *_: (_ for _ in ()).throw(ends.pop()) if ends else pb.Goodbye.FINISHED  # noqa: E731
    monkeypatch.setattr(worker._Session, "talk", talk)
    monkeypatch.setattr(worker, "SOUND_SECONDS", seconds)
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: None)
    if enough:
        failing = worker.FailingError, "has sent this worker away 3 times: a reason"
        misunderstood = worker.MisunderstoodError, "does not understand this worker: a reason"
        error, match = failing if code == grpc.StatusCode.ABORTED else misunderstood
        with pytest.raises(error, match=match):
            worker.serve_envs(workers.Counting(), "localhost:1", quiet=True)
        assert len(ends) == 2
    else:
        worker.serve_envs(workers.Counting(), "localhost:1", quiet=True)


def test_a_worker_takes_no_options_of_the_learners_machine():
    made = worker._Made("gymnasium:CartPole-v1", None)
    made('{"vectorization": "async", "max_episode_steps": 7}')
    assert '"vectorization": "sync"' in made.options
    assert '"max_episode_steps": 7' in made.options


@pytest.mark.parametrize(("error", "code"), [(TypeError("x"), 2), (ValueError("x"), 2), (OSError("x"), 77)])
def test_what_cannot_be_made_is_one_line(error, code, monkeypatch, capsys):
    def make():
        raise error

    monkeypatch.setattr(worker.registry, "adopt", lambda source, options: make())
    for name in ("signal", "setpgid"):
        monkeypatch.setattr(
            *((supervisor.signal, name) if name == "signal" else (supervisor.os, name)), lambda *_: None
        )
    monkeypatch.setattr(supervisor, "_end_with_parent", lambda: None)
    monkeypatch.setattr(supervisor.os, "_exit", lambda code: sys.exit(code))
    with pytest.raises(SystemExit) as ended:
        supervisor._child(object(), {"connect": "localhost:1"})  # type: ignore[arg-type]
    assert ended.value.code == code
    err = capsys.readouterr().err
    assert err.startswith("podracer: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("codes", "returned", "started"),
    [([77, 77, 77], 1, 3), ([77, 77, 75, 77, 77, 0], 0, 6)],
)
def test_environments_that_cannot_be_made_are_given_up(codes, returned, started, processes, capsys):
    processes.codes = list(codes)
    assert supervisor.run("mine", {"name": "w"}, 1) == returned
    assert len(processes.names) == started
    assert "its environments cannot be made" in capsys.readouterr().err


def test_a_learner_that_ends_leaves_the_workers_of_others(processes, monkeypatch):
    """Each process of two is of another learner: the first one's ends, and the second one's goes on, and is replaced."""
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.0)
    processes.codes = [0, 75, 75, 0]
    assert supervisor.run("mine", {"name": "w", "connect": "a:1,b:1"}, 2) == 0
    assert processes.names == ["w-0", "w-1", "w-1", "w-1"]
    processes.codes = [0, 75]
    assert supervisor.run("mine", {"name": "w", "connect": "a:1"}, 2) == 0
    assert processes.names[4:] == ["w-0", "w-1"]


@pytest.fixture
def processes(monkeypatch):
    """Processes of a supervisor that end at once: `codes` are how, and `names` whose."""
    made = types.SimpleNamespace(codes=[], names=[])

    class Process:
        def __init__(self, **kwargs):
            self.name = kwargs["name"]
            made.names.append(self.name)

        def start(self):
            self.exitcode = made.codes.pop(0)

    context = types.SimpleNamespace(Process=Process)
    monkeypatch.setattr(supervisor.multiprocessing, "get_context", lambda how: context)
    monkeypatch.setattr(supervisor.signal, "signal", lambda *_: None)
    monkeypatch.setattr(supervisor, "_end", lambda child: None)
    monkeypatch.setattr(supervisor, "BACK_OFF", (0.0, 0.0))
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: None)
    return made
