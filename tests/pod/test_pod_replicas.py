"""Sebulba over processes: two processes with two devices each learn what one device learns, and continue each other."""

import json
import os
import pathlib
import random
import time
from unittest import mock

import jax
import numpy as np
import pytest

import podracer
from podracer.environments.from_jax import SteppedEnvironment
from podracer.sebulba import learner_loop
from podracer.training.session import Session
from tests.pod.test_pod_equality import beginning
from tests.support import harness, pods
from tests.test_shards import assert_close, flat, moved
from tests.test_shards import train as train_anakin

pytestmark = pytest.mark.slow

LAYOUT = {"num_shards": 4, "replicas": 2}
# EfficientZero is MuZero and more; PQN learns as PPO does; AlphaZero's batches are compared in test_pod_equality.py.
AGENTS = ("dqn", "efficientzero", "ppo", "r2d2", "vtrace")
CONTINUED = ("r2d2", "vtrace")
NIGHTLY = ("dqn", "efficientzero", "ppo")
"""Agents of whose kind the others have one: without a replay, and with one."""
BEGUN = ("ppo", "r2d2", "vtrace")
"""The cases whose initial states are compared."""
# Plain gradient steps, of which one too large by a factor would show; Adam's are there where a checkpoint has its state.
OPTIMISERS = dict.fromkeys(AGENTS, "sgd") | {"vtrace": "adam"}


def train(agent, name=None, **settings):
    return train_anakin(agent, name or OPTIMISERS[agent], arch="sebulba", mode="lockstep", **LAYOUT, **settings)


def run(agent, directory, **settings):
    """A run whose states are kept only where something continues it, for that takes longer than the run."""
    return train(agent, run_dir=f"{directory}/{agent}" if agent in CONTINUED else None, **settings)


# In other processes


def on_a_pod(directory):
    asked = json.loads((pathlib.Path(directory) / "asked.json").read_text())
    for agent in asked["agents"]:
        with beginning(f"{directory}/{agent}-begun.npz", agent in BEGUN):
            result = run(agent, directory, topology="pod")
        save(result, f"{directory}/{agent}.npz", (2, 4))
    for agent in asked["host"]:
        save(train(agent, replay_memory="host", topology="pod"), f"{directory}/{agent}-host.npz", (2, 4))
    for agent in CONTINUED:
        run_dir = f"{directory}/{agent}-alone"
        save(train(agent, run_dir=run_dir, resume=True, topology="pod"), f"{run_dir}.npz", (2, 4))
    save(train("vtrace", "sgd", topology="pod"), f"{directory}/vtrace-sgd.npz", (2, 4))
    in_disorder(directory)


def on_four_devices(directory):
    for agent in ("r2d2", "vtrace"):
        save(train(agent, actor_devices=2), f"{directory}/{agent}-four.npz", (1, 4))


def in_disorder(directory):
    """Actors, learners and what is told of them are slow at other times in every process."""
    chance = random.Random(os.environ["JAX_PROCESS_ID"])

    def slowly(method):
        def patched(*args):
            time.sleep(0.01 * (chance.random() < 0.2))
            return method(*args)

        return patched

    for where, name in (
        (SteppedEnvironment, "send"),
        (Session, "_on_progress"),
        (learner_loop.LearnerLoop, "publish_to"),
    ):
        mock.patch.object(where, name, slowly(getattr(where, name))).start()
    mock.patch.object(learner_loop, "SECONDS_PER_REPORT", 0.05).start()
    for mode in ("lockstep", "async"):
        result = two_threads(mode, topology="pod")
        with open(f"{directory}/{mode}-{jax.process_index()}.json", "w") as file:
            own = ("time/cpu_seconds", "time/wall_seconds")
            json.dump([{k: v for k, v in row.items() if k not in own} for row in result.history], file)
        np.savez(f"{directory}/{mode}-{jax.process_index()}.npz", **flat(result))


def two_threads(mode, **settings):
    config = {"rollout_length": 5, "hidden_sizes": (8,)}
    settings |= {"num_envs": 16, "actor_threads": 2, "total_steps": 3000, "eval_episodes": 4, "progress": False}
    return podracer.train("vtrace", "catch", arch="sebulba", mode=mode, config=config, **LAYOUT, **settings)


def save(result, path, size):
    assert (result.summary["processes"], result.summary["devices"]) == size
    if jax.process_index() == 0:
        np.savez(path, **flat(result))


# Here


def some(agents):
    """Agents, some of which run nightly alone."""
    return [pytest.param(agent, marks=pytest.mark.nightly if agent in NIGHTLY else ()) for agent in agents]


@pytest.fixture(scope="module")
def asked(request):
    """Agents that the tests of this session compare."""
    tests = ("test_two_processes_are_as_one", "test_two_processes_begin_as_one_bit_for_bit")
    host = [agent for (agent,) in harness.asked(request, "test_a_replay_in_the_memory_of_hosts_is_as_one")]
    agents = {*CONTINUED, *host, *(agent for test in tests for (agent,) in harness.asked(request, test))}
    return {"agents": [agent for agent in AGENTS if agent in agents], "host": host}


@pytest.fixture(scope="module")
def alone(asked, tmp_path_factory):
    """Runs on one device, by agent."""
    directory = tmp_path_factory.mktemp("alone")
    for agent in asked["agents"]:
        with beginning(directory / f"{agent}-begun.npz", agent in BEGUN):
            one = flat(run(agent, directory))
        assert moved(one) > 0.005, "so little was learnt that anything would agree"
        np.savez(directory / f"{agent}.npz", **one)
    np.savez(directory / "vtrace-sgd.npz", **flat(train("vtrace", "sgd")))
    return directory


@pytest.fixture(scope="module")
def pod(asked, alone, tmp_path_factory):
    """The same on a pod, and what it made of half the runs of `alone`: one start, for that takes long."""
    directory = tmp_path_factory.mktemp("pod")
    (directory / "asked.json").write_text(json.dumps(asked))
    for agent in CONTINUED:
        pods.at_half(alone / agent, directory / f"{agent}-alone")
    pods.call(on_a_pod, directory, devices=2, directory=directory)
    return directory


@pytest.mark.parametrize("run", some([*AGENTS, "vtrace-sgd"]))
def test_two_processes_are_as_one(run, pod, alone):
    assert_close(dict(np.load(pod / f"{run}.npz")), dict(np.load(alone / f"{run}.npz")))


@pytest.mark.parametrize("agent", some(BEGUN))
def test_two_processes_begin_as_one_bit_for_bit(agent, pod, alone):
    pods.assert_same(alone / f"{agent}-begun.npz", pod / f"{agent}-begun.npz")


@pytest.mark.nightly
@pytest.mark.parametrize("agent", ["dqn", "r2d2"])
def test_a_replay_in_the_memory_of_hosts_is_as_one(agent, pod, alone):
    assert_close(dict(np.load(pod / f"{agent}-host.npz")), dict(np.load(alone / f"{agent}.npz")))


@pytest.mark.nightly
def test_devices_of_one_process_are_as_one(alone, tmp_path):
    pods.call(on_four_devices, tmp_path, processes=1, devices=4, directory=tmp_path)
    for agent in ("r2d2", "vtrace"):
        assert_close(dict(np.load(tmp_path / f"{agent}-four.npz")), dict(np.load(alone / f"{agent}.npz")))


def test_who_is_slow_when_does_not_matter(pod):
    for mode in ("lockstep", "async"):
        histories = [json.loads((pod / f"{mode}-{i}.json").read_text()) for i in range(2)]
        assert len(histories[0]) > 12
        assert histories[0] == histories[1]
        assert_close(*(dict(np.load(pod / f"{mode}-{i}.npz")) for i in range(2)))
        assert max(row.get("pod/wait_share_max", 0) for row in histories[0]) > 0
    assert_close(dict(np.load(pod / "lockstep-0.npz")), flat(two_threads("lockstep")))


@pytest.mark.parametrize("agent", CONTINUED)
def test_one_process_continues_what_a_pod_began(agent, pod, alone, tmp_path):
    resumed = train(agent, run_dir=pods.at_half(pod / agent, tmp_path / agent), resume=True)
    assert_close(flat(resumed), dict(np.load(alone / f"{agent}.npz")))


@pytest.mark.parametrize("agent", CONTINUED)
def test_a_pod_continues_what_one_process_began(agent, pod, alone):
    assert_close(dict(np.load(pod / f"{agent}-alone.npz")), dict(np.load(alone / f"{agent}.npz")))
