"""The errors of a process where a pod cannot be, and the cluster that it recognises; there is no other process."""

import socket
import subprocess
import sys
import time
import types
from unittest import mock

import jax
import pytest

from podracer.errors import DisagreementError, PeerError
from podracer.pod import peers
from podracer.pod.settings import NoClusterError, Pod


def test_jax_must_not_have_begun():
    jax.devices()
    with pytest.raises(ValueError, match=r"JAX has computed something before; call train\(topology='pod'\) before any"):
        peers.start(Pod(coordinator="127.0.0.1:1", processes=2, process_id=1))


def process_of_three(index=0):
    pod = object.__new__(peers.Peers)
    pod.index, pod.count, pod.all = index, 3, tuple(peers.Peer(i, f"host{i}", 10 + i) for i in range(3))
    return pod


def test_processes_have_as_many_devices():
    pod = process_of_three()
    pod.all_gather = lambda facts: [facts, facts | {"local devices": 7}, facts]
    found = r"process 1 \(host1, pid 11\) has local devices 7, the others \d"
    with pytest.raises(DisagreementError, match=found):
        pod.check_equal(peers._versions())


def test_other_code_is_another_hash(tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "a.py"

    def found(text):
        path.write_text(text)
        return peers._code(tmp_path)

    before = found("x = 1")
    assert found("x = 2") != before
    assert found("x = 1") == before
    (tmp_path / "config.json").write_text("{}")
    assert peers._code(tmp_path) == before
    path.rename(tmp_path / "run" / "b.py")
    assert peers._code(tmp_path) != before
    assert {"podracer's code", "jaxlib"} <= set(peers._versions())


@pytest.mark.parametrize(("error", "sent"), [(KeyError("x"), True), (PeerError("process 0 has failed"), False)])
def test_what_another_process_has_told_is_not_sent_back(error, sent, monkeypatch):
    """Process 0 would be given seconds to end, while it writes what is to come before its own error."""
    pod, left = process_of_three(1), []
    pod._heartbeats = line = mock.MagicMock(ended=None)
    monkeypatch.setattr(peers, "_leave_without_waiting", left.append)
    pod.__exit__(type(error), error, None)
    assert [call.args[0] for call in line.end.call_args_list] == sent * [
        "process 1 (host1, pid 11) has failed: KeyError: 'x'"
    ]
    assert left == [error]


def test_who_is_waited_for_is_named(capsys):
    pod = process_of_three()
    pod._pod, pod._heartbeats, pod._client = Pod(stall_timeout=1), mock.MagicMock(ended=None), mock.Mock()
    answers = {0: iter(["0"]), 1: iter([None] * 8 + ["1"]), 2: iter(["2"])}

    def get(key, timeout):
        time.sleep(0.05)
        answer = next(answers[int(key[-1])])
        if answer is None:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return answer

    pod._client.blocking_key_value_get = get
    assert pod.all_gather("x") == [0, 1, 2]
    assert capsys.readouterr().err == "podracer: waiting for process 1 (host1, pid 11)\n"


def test_jax_waits_for_the_end_of_others_no_longer_than_for_a_lost_one(monkeypatch):
    """By itself it would for five minutes."""
    found = {}

    def initialize(*args, **settings):
        found.update(settings)
        raise RuntimeError("no more of it here")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(peers, "_has_begun", lambda: False)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(NoClusterError, match="no more of it here"):
        peers.start(Pod(coordinator=f"127.0.0.1:{port}", processes=1, process_id=0))
    assert found["shutdown_timeout_seconds"] == 30


def test_an_error_that_was_caught_is_forgotten_where_all_start_again(monkeypatch):
    """The next run's end is an end in good order."""
    registered = []
    monkeypatch.setattr(peers.atexit, "register", lambda *call: registered.append(call))
    monkeypatch.setattr(peers.atexit, "unregister", lambda function: registered.clear())
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(peers, "Peers", mock.Mock())
    peers._leave_without_waiting(ValueError("x"))
    assert registered == [(peers._leave, 2)]
    peers.start(Pod())
    assert not registered


SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (dict.fromkeys(SLURM, "1"), "slurm"),
        (dict.fromkeys(SLURM[:-1], "1"), None),
        ({"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.0.0.1:34911"}, "ompi"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "K8sCluster"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1", "TPU_SKIP_MDS_QUERY": "1"}, "gketpu"),
    ],
    ids=["nothing", "SLURM", "outside of a step", "Open MPI", "Kubernetes", "TPU"],
)
def test_clusters_are_known_by_their_variables(environ, expected, monkeypatch):
    from jax._src.clusters import cloud_tpu_cluster

    for name in (*SLURM, "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", expected == "gketpu")
    api = types.SimpleNamespace(
        CoreV1Api=object, BatchV1Api=object, exceptions=types.SimpleNamespace(ApiException=OSError)
    )
    there = types.SimpleNamespace(config=types.SimpleNamespace(load_incluster_config=lambda: None), client=api)
    monkeypatch.setitem(sys.modules, "kubernetes", there)
    assert peers._cluster() == expected


def test_what_needs_no_device_starts_none():
    """Nor does a local run know of pods, but for the command line, which has their settings as options."""
    script = """
import contextlib, io, sys
import podracer, podracer.training.train, podracer.anakin.driver, podracer.sebulba.driver, podracer.training.session
def of_pods():
    return {name for name in sys.modules if name.startswith("podracer.pod")}
assert not of_pods(), of_pods()
from podracer.cli import commands
with contextlib.redirect_stdout(io.StringIO()):
    assert commands.run(["--help"]) == commands.run(["envs"]) == commands.run(["agents"]) == 0
assert of_pods() <= {"podracer.pod", "podracer.pod.settings"}, of_pods()
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
