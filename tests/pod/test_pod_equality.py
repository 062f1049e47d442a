"""Two processes with two devices each learn what one device learns, and continue what other numbers of them began."""

import contextlib
import json
import pathlib
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from podracer import topology
from podracer.training.session import Session
from tests.support import harness, pods
from tests.test_shards import assert_close, flat, moved, rates, train

pytestmark = pytest.mark.slow

# EfficientZero is MuZero and more, and PQN learns as PPO does: those two are in test_pod_others.py.
AGENTS = ("alphazero", "dqn", "efficientzero", "ppo", "vtrace", "r2d2")
# Plain gradient steps, of which one too large by a factor would show; Adam's are there where a checkpoint has its state.
CASES = [*((agent, "sgd") for agent in AGENTS), ("ppo", "adam")]
CONTINUED = [("ppo", "adam"), ("r2d2", "sgd")]
NIGHTLY = ("alphazero", "dqn", "efficientzero", "vtrace")
"""Agents of whose kind the others have one: without a replay, and with one."""
OUTPUTS = ("ppo", "adam")
"""The cases in which both processes keep their outputs."""
BEGUN = ("ppo", "r2d2", "vtrace")
"""The cases whose initial states are compared: with and without a replay, or states that environments carry along."""


def run(agent, name, directory, where="", **settings):
    """A run of a case; its states are kept only where something continues it, for that takes longer than the run."""
    run_dir = directory / f"{agent}-{name}{where}" if (agent, name) in CONTINUED else None
    return train(agent, name, run_dir=run_dir, **settings)


# In the processes of the pod


def on_a_pod(directory):
    directory = pathlib.Path(directory)
    for agent, name in json.loads((directory / "asked.json").read_text()):
        with beginning(directory / f"{agent}-begun.npz", agent in BEGUN and name == "sgd"):
            result = run(agent, name, directory, num_shards=8, topology="pod")
        save(result, directory / f"{agent}-{name}.npz")
        if (agent, name) == OUTPUTS:
            keep(result, directory / f"outputs-{jax.process_index()}.json")
    result = train("ppo", population=4, seed=5, hyper={"learning_rate": rates(4)}, topology="pod")
    members = [flat(result, member) for member in range(4)]
    if jax.process_index() == 0:
        np.savez(directory / "population.npz", **{n: np.stack([m[n] for m in members]) for n in members[0]})
    for agent, name in CONTINUED:
        result = run(agent, name, directory, "-alone", resume=True, topology="pod")
        save(result, directory / f"{agent}-{name}-alone-pod.npz")


@contextlib.contextmanager
def beginning(path, wanted=True):
    """Keeps the state that the run within begins with, whole."""
    begin = Session._begin

    def patched(self, *args):
        state = begin(self, *args)
        leaves, structure = jax.tree.flatten(state)
        meshes = [x.sharding.mesh if isinstance(x.sharding, NamedSharding) else None for x in leaves]
        for mesh in dict.fromkeys(meshes):  # under Sebulba what acts has one of its own
            of_it = [i for i, own in enumerate(meshes) if own == mesh]
            for i, x in zip(of_it, topology.here([leaves[i] for i in of_it])):
                leaves[i] = x
        whole = jax.tree.unflatten(structure, leaves)
        if jax.process_index() == 0:
            np.savez(path, **{name: np.asarray(x) for name, x in named(whole)})
        return state

    with mock.patch.object(Session, "_begin", patched) if wanted else contextlib.nullcontext():
        yield


def named(state):
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        yield (
            jax.tree_util.keystr(path),
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        )


def save(result, path):
    assert (result.summary["processes"], result.summary["devices"]) == (2, 4)
    if jax.process_index() == 0:
        np.savez(path, **flat(result))


def keep(result, path):
    boards = np.eye(50).reshape(50, 10, 5)
    actions = [result.policy(board) for board in boards]
    path.write_text(json.dumps({"summary": result.summary, "rows": result.history, "actions": actions}))


# Here


def some(cases):
    """Cases, some of which run nightly alone."""
    agent_of = lambda case: case if isinstance(case, str) else case[0]  # noqa: E731
    values = lambda case: (case,) if isinstance(case, str) else case  # noqa: E731
    return [pytest.param(*values(x), marks=pytest.mark.nightly if agent_of(x) in NIGHTLY else ()) for x in cases]


@pytest.fixture(scope="module")
def asked(request):
    """Cases that the tests of this session look at."""
    begun = [(agent, "sgd") for (agent,) in harness.asked(request, "test_two_processes_begin_as_one_bit_for_bit")]
    wanted = {*CONTINUED, *begun, *harness.asked(request, "test_two_processes_are_as_one")}
    return [case for case in CASES if case in wanted]


@pytest.fixture(scope="module")
def alone(asked, tmp_path_factory):
    """Runs on one device, by case."""
    directory = tmp_path_factory.mktemp("alone")
    for agent, name in asked:
        with beginning(directory / f"{agent}-begun.npz", agent in BEGUN and name == "sgd"):
            one = flat(run(agent, name, directory, num_shards=8))
        assert moved(one) > 0.005, "so little was learnt that anything would agree"
        np.savez(directory / f"{agent}-{name}.npz", **one)
    return directory


@pytest.fixture(scope="module")
def pod(asked, alone, tmp_path_factory):
    """The same on a pod, and what it made of half the runs of `alone`: one start, for that takes long."""
    directory = tmp_path_factory.mktemp("pod")
    (directory / "asked.json").write_text(json.dumps(asked))
    for agent, name in CONTINUED:
        pods.at_half(alone / f"{agent}-{name}", directory / f"{agent}-{name}-alone")
    pods.call(on_a_pod, directory, devices=2, directory=directory)
    return directory


@pytest.mark.parametrize(("agent", "name"), some(CASES))
def test_two_processes_are_as_one(agent, name, pod, alone):
    assert_close(dict(np.load(pod / f"{agent}-{name}.npz")), dict(np.load(alone / f"{agent}-{name}.npz")))


@pytest.mark.parametrize("agent", some(BEGUN))
def test_two_processes_begin_as_one_bit_for_bit(agent, pod, alone):
    pods.assert_same(alone / f"{agent}-begun.npz", pod / f"{agent}-begun.npz")


def test_both_return_the_same_and_one_writes_it(pod):
    run_dir = pod / "-".join(OUTPUTS)
    first, second = (json.loads((pod / f"outputs-{i}.json").read_text()) for i in range(2))
    assert first["summary"] == second["summary"] == json.loads((run_dir / "summary.json").read_text())
    assert first["summary"]["train_seconds"] > 0
    assert first["actions"] == second["actions"]
    assert len(set(first["actions"])) > 1
    assert first["rows"] == [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(first["rows"]) == len({row["env_steps"] for row in first["rows"]}) > 1
    without_clocks = [
        [{k: v for k, v in row.items() if not k.startswith("time/")} for row in each["rows"]]
        for each in (first, second)
    ]
    assert without_clocks[0] == without_clocks[1]
    assert len(list(run_dir.rglob("config.json"))) == len(list(run_dir.rglob("metrics.jsonl"))) == 1


def test_members_over_processes_are_the_single_runs(pod):
    members = dict(np.load(pod / "population.npz"))
    for member in (0, 3):
        single = flat(train("ppo", seed=5 + member, hyper={"learning_rate": rates(4)[member]}))
        assert_close(members, single, member)


@pytest.mark.parametrize(("agent", "name"), CONTINUED)
def test_one_process_continues_what_a_pod_began(agent, name, pod, alone, tmp_path):
    run_dir = pods.at_half(pod / f"{agent}-{name}", tmp_path / agent)
    resumed = train(agent, name, run_dir=run_dir, resume=True)
    assert_close(flat(resumed), dict(np.load(alone / f"{agent}-{name}.npz")))


@pytest.mark.parametrize(("agent", "name"), CONTINUED)
def test_a_pod_continues_what_one_process_began(agent, name, pod, alone):
    assert_close(dict(np.load(pod / f"{agent}-{name}-alone-pod.npz")), dict(np.load(alone / f"{agent}-{name}.npz")))
