"""Settings of runs on workers: changed one by one on resuming, or refused; and runs that miss workers or gRPC."""

import importlib.util
import time
import types

import pytest

import podracer
from podracer import cli
from podracer.cli import train as train_command
from podracer.errors import PeerError
from podracer.remote.settings import Remote
from podracer.training import train as training
from podracer.training.workers import Workers
from tests.support import workers

pytest.importorskip("grpc")

SETTINGS = {"num_envs": 8, "eval_episodes": 2, "progress": False}
CONFIGS = {"vtrace": {"rollout_length": 5, "hidden_sizes": (8,)}}


def test_without_workers_a_run_says_what_is_missing(capfd, monkeypatch):
    monkeypatch.setattr("podracer.remote.hub.SAY_SECONDS", 0.2)
    begin = time.monotonic()
    with pytest.raises(
        podracer.ActorError, match=r"8 of 8 lanes have no worker yet; .*127.0.0.1:\d+; none came for 1 s"
    ):
        podracer.train(
            "vtrace",
            workers.Counting(),
            config=CONFIGS["vtrace"],
            remote=Remote(listen="127.0.0.1:0", join_timeout=1.0),
            **SETTINGS,
        )
    assert time.monotonic() - begin < 20
    assert "remote: 8 of 8 lanes have no worker yet" in capfd.readouterr().err


def test_without_grpc_it_says_what_to_install(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "grpc" else find(name, *args))
    with pytest.raises(ValueError, match="need grpcio, not installed here: pip install grpcio"):
        podracer.train("vtrace", workers.Counting(), remote={"listen": "127.0.0.1:0"}, **SETTINGS)
    assert cli.run(["serve-envs", "gymnasium:CartPole-v1", "--connect", "127.0.0.1:1"]) == 2
    assert "pip install grpcio" in capsys.readouterr().err


def test_settings_of_a_resumed_run_are_changed_one_by_one(tmp_path, monkeypatch):
    stored = {"listen": "10.0.0.5:1", "tls_cert": "c", "tls_key": "k", "token_file": "t", "join_timeout": 60.0}
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(training.rundir, "read", lambda directory: {"remote": stored})
    found = lambda remote: Workers(remote, tmp_path).described()["remote"]  # noqa: E731
    was = found(None)
    assert was.items() >= stored.items()
    assert found({"join_timeout": 600.0}) == was | {"join_timeout": 600.0}
    assert found(Remote(block=2)) == was | {"block": 2}
    called: list = []
    monkeypatch.setattr(podracer, "resume", lambda *args, **kwargs: called.append(kwargs["remote"]))
    monkeypatch.setattr(train_command, "_conclude", lambda *args: 0)
    for flags, given in (
        ((), None),
        (("--remote.join-timeout", "600", "--remote.token-file=u"), {"join_timeout": 600.0, "token_file": "u"}),
        (("--remote.listen", "10.0.0.6:1"), {"listen": "10.0.0.6:1"}),
    ):
        assert cli.run(["resume", str(tmp_path), *flags]) == 0
        assert called.pop() == given
        assert found(given) == was | (given or {})


def test_processes_of_a_pod_have_addresses_of_their_own(tmp_path):
    made = [Workers(Remote(listen=f"10.0.0.{i}:1", token_file=f"{i}", insecure=True, block=2), None) for i in (1, 2)]
    one, other = (each.shared_description({"seed": 1} | each.described()) for each in made)
    assert one == other
    assert one["remote"]["block"] == 2
    assert Workers(None, None).shared_description({"seed": 1}) == {"seed": 1}


@pytest.mark.parametrize(
    ("error", "why"), [(PeerError("b is gone"), "RESTARTING"), (OSError("full"), "FAILED"), (None, "FINISHED")]
)
def test_what_workers_hear_at_the_end(error, why):
    """After a lost peer its pod may be started again, and they wait."""
    heard: list = []
    made = Workers(Remote(listen="127.0.0.1:0"), None)
    made.finished = error is None
    made._environments = types.SimpleNamespace(close=lambda *said: heard.append(said))  # type: ignore[assignment]
    made.__exit__(type(error), error, None)
    assert heard[0][0] == getattr(workers.pb.Goodbye, why)


def test_settings_without_an_address_are_refused(tmp_path, capsys):
    for remote in (Remote(block=2), {"block": 2}):
        with pytest.raises(ValueError, match=r"^remote: block needs listen, for without it"):
            podracer.train("vtrace", workers.Counting(), remote=remote, **SETTINGS)
    assert cli.run(["train", "ppo", "gymnasium:CartPole-v1", "--remote.join-timeout", "60"]) == 2
    assert "remote: join_timeout needs listen" in capsys.readouterr().err


def test_several_seeds_want_workers_of_their_own(capsys):
    command = ["train", "ppo", "gymnasium:CartPole-v1", "--remote.listen", "127.0.0.1:0", "--seeds", "0", "1"]
    assert cli.run(command) == 2
    assert "workers go home when the first run ends" in capsys.readouterr().err


def test_settings_that_contradict_each_other_are_refused():
    settings = SETTINGS | {"config": CONFIGS["vtrace"]}
    with pytest.raises(ValueError, match="catch is pure JAX"):
        podracer.train("vtrace", "catch", remote={"listen": "127.0.0.1:0"}, arch="sebulba", **settings)
    with pytest.raises(ValueError, match="takes rows as they come, and mode='lockstep'"):
        podracer.train(
            "vtrace", workers.Counting(), remote={"listen": "127.0.0.1:0", "mode": "ready"}, mode="lockstep", **settings
        )
    for wrong in ({"block": 4, "max_lanes": 2}, {"min_lanes": 5, "max_lanes": 4}):
        with pytest.raises(ValueError, match="do not go with blocks of"):
            podracer.train(
                "vtrace",
                workers.Counting(),
                remote={"listen": "127.0.0.1:0", "mode": "ready", **wrong},
                **settings,
            )
    with pytest.raises(ValueError, match="need remote.listen"):
        podracer.train("vtrace", "remote:mine", **settings)
    with pytest.raises(ValueError, match="did you mean"):
        podracer.train("vtrace", workers.Counting(), remote={"listn": "127.0.0.1:0"}, **settings)
    for settings, what in (
        ({"listen": "0.0.0.0:1"}, "needs tls_cert and tls_key"),
        ({"listen": "10.0.0.5:1", "tls_cert": "a", "tls_key": "b"}, "must show who they are"),
        ({"listen": "nowhere"}, "use HOST:PORT"),
        ({"listen": "0.0.0.0:1", "insecure": True, "announce": "a"}, "announce needs an address at which"),
        ({"listen": "[::]:1", "insecure": True, "announce": "a"}, "announce needs an address at which"),
        ({"listen": "127.0.0.1:1", "tls_cert": "a"}, "needs its key"),
        ({"listen": "127.0.0.1:1", "client_ca": "a"}, "client_ca needs tls_cert"),
    ):
        with pytest.raises(ValueError, match=what):
            Remote(**settings)
    Remote(listen="0.0.0.0:1", insecure=True)
    Remote(listen="localhost:1")
