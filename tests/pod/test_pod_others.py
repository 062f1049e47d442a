"""Other runs on pods, equal to runs on one device: agents of whose kind test_pod_equality.py has one, remote workers,
reanalysers."""

import threading
from unittest import mock

import jax
import numpy as np
import pytest

import envs_jax
from podracer.environments.from_jax import SteppedEnvironments
from podracer.remote import environments as remote_environments
from tests import test_shards
from tests.pod.test_pod_replicas import train as train_sebulba
from tests.support import pods
from tests.test_shards import assert_close, flat, moved

pytest.importorskip("grpc")

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

AGENTS = ("muzero", "pqn")
REMOTE, APART = "vtrace", "efficientzero"


def stepped(name):
    """An environment that its host steps, so that workers can."""
    return mock.patch.dict(test_shards.GAMES, {name: SteppedEnvironments(envs_jax.make("catch"))})


# In the processes of the pod


def on_a_pod(directory):
    for agent in AGENTS:
        save(test_shards.train(agent, "sgd", num_shards=8, topology="pod"), f"{directory}/{agent}.npz")
    with stepped(REMOTE), a_worker_here():
        result = train_sebulba(REMOTE, topology="pod", remote={"listen": "127.0.0.1:0", "join_timeout": 60.0})
    assert [row["remote/rows"] for row in result.history if row.get("remote/rows")], "workers stepped nothing"
    save(result, f"{directory}/{REMOTE}.npz")


def with_reanalysers(directory):
    run = {"actor_devices": 1, "reanalyser_devices": 1, "prepare_ahead": False, "topology": "pod"}
    save(train_sebulba(APART, **run), f"{directory}/{APART}.npz", devices=6)


def a_worker_here():
    """A worker of this process's learner, from when it listens on."""
    begin = remote_environments.RemoteEnvironments.__init__

    def patched(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        from podracer.remote import worker

        made, settings = SteppedEnvironments(envs_jax.make("catch")), {"lanes": 16, "quiet": True}
        threading.Thread(target=worker.serve_envs, args=(made, self.where), kwargs=settings, daemon=True).start()

    return mock.patch.object(remote_environments.RemoteEnvironments, "__init__", patched)


def save(result, path, devices=4):
    assert (result.summary["processes"], result.summary["devices"]) == (2, devices)
    if jax.process_index() == 0:
        np.savez(path, **flat(result))


# Here


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pod")
    pods.call(on_a_pod, directory, devices=2, directory=directory)
    return directory


@pytest.mark.parametrize("agent", AGENTS)
def test_two_processes_are_as_one(agent, pod):
    one = flat(test_shards.train(agent, "sgd", num_shards=8))
    assert moved(one) > 0.005, "so little was learnt that anything would agree"
    assert_close(dict(np.load(pod / f"{agent}.npz")), one)


def test_environments_that_workers_step_are_as_those_of_one_process(pod):
    with stepped(REMOTE):
        one = flat(train_sebulba(REMOTE))
    assert_close(dict(np.load(pod / f"{REMOTE}.npz")), one)


def test_reanalysers_of_two_processes_are_as_one_device_that_does_all(tmp_path):
    pods.call(with_reanalysers, tmp_path, devices=3, directory=tmp_path)
    assert_close(dict(np.load(tmp_path / f"{APART}.npz")), flat(train_sebulba(APART)))
