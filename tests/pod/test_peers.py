"""What a process says where a pod cannot be, and which cluster it takes a machine for; there is no other process."""

import subprocess
import sys
import types

import jax
import pytest

from podracer.pod import peers
from podracer.pod.settings import Pod
from podracer.run.processes import DisagreementError


def test_jax_must_not_have_begun():
    jax.devices()
    with pytest.raises(ValueError, match=r"JAX has computed something before; call train\(topology='pod'\) before any"):
        peers.start(Pod(coordinator="127.0.0.1:1", processes=2, process_id=1))


def test_processes_have_as_many_devices():
    pod = object.__new__(peers.Peers)
    pod.count, pod.all = 3, tuple(peers.Peer(i, f"host{i}", 10 + i) for i in range(3))
    pod.everyones = lambda facts: [facts, facts | {"local devices": 7}, facts]
    found = r"process 1 \(host1, pid 11\) has local devices 7, the others \d"
    with pytest.raises(DisagreementError, match=found):
        pod.agree(peers._versions())


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
import podracer, podracer.training, podracer.anakin.driver, podracer.sebulba.driver, podracer.run.session
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
