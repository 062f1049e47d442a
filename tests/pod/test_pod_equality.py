"""Two processes with two devices each learn what one device learns, and continue what other numbers of them began."""

import pathlib

import jax
import numpy as np
import pods
import pytest
from test_shards import AGENTS, assert_close, flat, moved, rates, train

pytestmark = pytest.mark.slow


# In the processes of the pod


def on_a_pod(directory):
    directory = pathlib.Path(directory)
    for agent in AGENTS:
        save(train(agent, num_shards=8, run_dir=directory / agent, topology="pod"), directory / f"{agent}.npz")
    result = train("ppo", population=4, seed=5, hyper={"learning_rate": rates(4)}, topology="pod")
    members = [flat(result, member) for member in range(4)]
    if jax.process_index() == 0:
        np.savez(directory / "population.npz", **{n: np.stack([m[n] for m in members]) for n in members[0]})


def resumed_on_a_pod(directory):
    directory = pathlib.Path(directory)
    for agent in ("ppo", "r2d2"):
        result = train(agent, run_dir=directory / f"{agent}-alone", resume=True, topology="pod")
        save(result, directory / f"{agent}-alone-pod.npz")


def save(result, path):
    if jax.process_index() == 0:
        assert (result.summary["processes"], result.summary["devices"]) == (2, 4)
        np.savez(path, **flat(result))


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pod")
    pods.call(on_a_pod, directory, devices=2, directory=directory)
    return directory


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs on one device, by agent."""
    directory = tmp_path_factory.mktemp("alone")
    for agent in AGENTS:
        one = flat(train(agent, num_shards=8, run_dir=directory / agent))
        assert moved(one) > 0.005, "so little was learnt that anything would agree"
        np.savez(directory / f"{agent}.npz", **one)
    return directory


@pytest.mark.parametrize("agent", AGENTS)
def test_two_processes_are_as_one(agent, pod, alone):
    assert_close(dict(np.load(pod / f"{agent}.npz")), dict(np.load(alone / f"{agent}.npz")))


def test_members_over_processes_are_the_single_runs(pod):
    members = dict(np.load(pod / "population.npz"))
    for member, rate in enumerate(rates(4)):
        single = flat(train("ppo", seed=5 + member, hyper={"learning_rate": rate}))
        assert_close(members, single, member)


@pytest.mark.parametrize("agent", ["ppo", "r2d2"])
def test_one_process_continues_what_a_pod_began(agent, pod, alone, tmp_path):
    resumed = train(agent, run_dir=pods.at_half(pod / agent, tmp_path / agent), resume=True)
    assert_close(flat(resumed), dict(np.load(alone / f"{agent}.npz")))


def test_a_pod_continues_what_one_process_began(alone, tmp_path):
    for agent in ("ppo", "r2d2"):
        pods.at_half(alone / agent, tmp_path / f"{agent}-alone")
    pods.call(resumed_on_a_pod, tmp_path, devices=2, directory=tmp_path)
    for agent in ("ppo", "r2d2"):
        assert_close(dict(np.load(tmp_path / f"{agent}-alone-pod.npz")), dict(np.load(alone / f"{agent}.npz")))
