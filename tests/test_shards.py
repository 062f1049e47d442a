"""Equal shards, equal result: on any number of devices, in a population or alone.

Simulated devices need a process of their own, with NPROC set (more threads than cores, or collectives deadlock).
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import podracer
from envs_jax.catch import Catch
from podracer import spaces
from podracer.training.session import Session
from tests.support import harness

pytestmark = pytest.mark.slow

UPDATES = 10
CLIP = 0.01
# Batch norm enlarges rounding: with steps of 10, one device differs as much from itself when compiled in another way.
LEARNING_RATES = {"adam": 3e-3, "own": 3e-3, "sgd": 10.0, "small sgd": 0.3}
# EfficientZero is MuZero and more, and is below with batch norm; without it, MuZero and AlphaZero are in tests/pod.
AGENTS = ("dqn", "ppo", "pqn", "sac", "vtrace", "r2d2")
BATCH_NORM = ("efficientzero-batch_norm", "small sgd")
COSTLY = ("vtrace-costly_reset", "adam")
MEMBERS = (("ppo", "adam"), ("r2d2", "adam"), BATCH_NORM)
"""The cases with populations: without a replay, with sequences, and with rows and networks beside the newest. DQN's is
compared below."""
ON_TWO = (("ppo", "adam"), BATCH_NORM)
# Plain gradient steps show the size of a gradient, which Adam's hide; Adam's are there where a checkpoint is resumed.
CASES = [(agent, "sgd") for agent in AGENTS] + [("ppo", "adam"), ("vtrace", "adam"), ("ppo", "own")]
CASES += [BATCH_NORM, COSTLY, ("vtrace-popart", "sgd")]
NIGHTLY = {("dqn", "sgd"), ("pqn", "sgd"), ("vtrace", "sgd"), ("vtrace-popart", "sgd"), BATCH_NORM}
"""Agents without a replay and with one are compared before as well; that each has its mean over shards, beside each agent."""
CONFIGS = {
    "ppo": {"num_minibatches": 2, "num_epochs": 2},
    "pqn": {"num_minibatches": 2, "num_epochs": 8},  # the first steps of RAdam are small
    "vtrace": {},
    "vtrace-popart": {"popart": True},
    # One update per rollout, once the first sequences of 15 rows are complete.
    "r2d2": {
        "burn_in": 2,
        "trace_length": 12,
        "batch_size": 16,
        "replay_ratio": 0.6,
        "replay_min_size": 1,
        "reset_interval": 3,
    },
    "dqn": {"n_step": 3, "batch_size": 16, "replay_min_size": 1, "priority_exponent": 0.5, "reset_interval": 4},
    "sac": {"n_step": 3, "batch_size": 16, "replay_min_size": 1, "policy_interval": 2, "target_policy": True},
    "efficientzero": {
        **{"simulations": 4, "unroll_length": 2, "n_step": 2, "state_size": 8, "head_size": 8, "lstm_size": 8},
        **{"projection_size": 8, "forecast_size": 8, "batch_size": 16, "replay_min_size": 1, "target_interval": 2},
        **{"reanalyse_group": 2, "refresh_interval": 4},
    },
    "muzero": {
        **{"simulations": 4, "unroll_length": 2, "n_step": 2, "state_size": 8, "head_size": 8},
        **{"batch_size": 16, "replay_min_size": 1, "target_interval": 2, "reanalyse": 0.5, "termination_cost": 1.0},
    },
    "alphazero": {"simulations": 4, "n_step": 3, "batch_size": 16, "replay_min_size": 1},
}
CONFIGS[COSTLY[0]] = CONFIGS["vtrace"]
# Statistics of layers, which are of a shard's rows, and which learning, searches, targets and sweeps each have their own of.
CONFIGS["efficientzero-batch_norm"] = CONFIGS["efficientzero"] | {
    "norm": "batch", "torso": "convolutions", "channels": 8, "augment": False,
}  # fmt: skip


class SmallImages(Catch):
    """Catch as images of 10x5, which convolutions take."""

    def __init__(self):
        super().__init__()
        self.spec = self.spec._replace(observation_space=spaces.Box(0, 255, (10, 5, 1), np.uint8))

    def observe(self, state):
        return (255 * super().observe(state)).astype(np.uint8)[..., None]


class CostlyCatch(Catch):
    """Catch, of which only lanes that are over are reset, in a loop that each device leaves when its own are."""

    costly_reset = True


class Steered(Catch):
    """Catch with its three actions as parts of an interval."""

    def __init__(self):
        super().__init__()
        self.spec = self.spec._replace(action_space=spaces.Box(-1.0, 1.0, (1,)))

    def step(self, state, action, key):
        return super().step(state, jnp.clip(1.5 * (action[0] + 1.0), 0.0, 2.0).astype(jnp.int32), key)


GAMES = {
    "sac": Steered(),
    "alphazero": "tic_tac_toe",
    "efficientzero-batch_norm": SmallImages(),
    COSTLY[0]: CostlyCatch(),
}


def train(case, optimizer_name="adam", *, num_envs=32, run_dir=None, resume=False, hyper=None, **run):
    """Ten updates, on catch (but AlphaZero's), whose episodes keep rounding errors small, with small steps and clipping on."""
    config = {"rollout_length": 10, "hidden_sizes": (16,), "max_grad_norm": CLIP}
    agent = case.partition("-")[0]
    config |= CONFIGS[case]
    config |= {"optimizer": "sgd"} if optimizer_name.endswith("sgd") else {}  # Adam hides the size of a gradient
    if agent == "dqn":  # one update per rollout
        config |= {"replay_ratio": 16 / (10 * num_envs), "target_interval": 2}
    if agent in ("alphazero", "efficientzero", "muzero", "sac"):
        config["replay_ratio"] = 16 / (10 * num_envs)
    steps = UPDATES * num_envs * 9  # 9 transitions in 10 rows
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Session, "_evaluate", return_value=None))  # nothing to compile for it
        result = podracer.train(
            agent,
            GAMES.get(case, "catch"),
            config=config,
            hyper={"learning_rate": LEARNING_RATES[optimizer_name]} | (hyper or {}),
            total_steps=steps,
            num_envs=num_envs,
            checkpoint_every=steps // 2,
            run_dir=run_dir,
            resume=resume,
            progress=False,
            optimizer=optax.contrib.muon if optimizer_name == "own" else None,
            **run,
        )
    updates = result.summary["updates"]
    few = agent == "r2d2" and 0 < updates < UPDATES
    more = agent == "alphazero" and UPDATES <= updates <= 1.5 * UPDATES  # games are shorter than 9 moves
    assert updates == UPDATES or few or more
    norms = [row["grad/norm"] for row in result.history if "grad/norm" in row]
    assert min(norms) > CLIP, "clipping is not active"
    return result


def flat(result, member=0):
    """Parameters, optimiser and counters of a member by name."""
    leaves = jax.tree_util.tree_leaves_with_path(result.learner._replace(hyper=()))
    return {jax.tree_util.keystr(path): np.asarray(x[member]) for path, x in leaves}


def assert_close(a, b, member=None):
    assert set(a) == set(b)
    for name in a:
        x = a[name] if member is None else a[name][member]
        np.testing.assert_allclose(x, b[name], rtol=1e-5, atol=1e-5, err_msg=name)


def moved(a):
    """The largest distance of a bias from 0, where all runs begin."""
    return max(float(np.abs(x).max()) for name, x in a.items() if name.startswith(".params") and "bias" in name)


# In the other process


def on_eight_devices(directory):
    cases, members = json.loads((directory / "asked.json").read_text())
    for agent, name in cases:
        result = train(agent, name, num_shards=8, run_dir=directory / f"{agent}-{name}")
        assert result.summary["devices"] == 8
        np.savez(directory / f"{agent}-{name}.npz", **flat(result))
    for agent, name in members:
        result = train(agent, name, population=4, seed=5, hyper={"learning_rate": rates(4, name)})
        mesh = jax.tree.leaves(result.learner.params)[0].sharding.mesh
        assert dict(mesh.shape) == {"population": 4, "data": 2}, "members fill devices first"
        members = [flat(result, member) for member in range(4)]
        np.savez(
            directory / f"{agent}-population.npz", **{name: np.stack([m[name] for m in members]) for name in members[0]}
        )


def on_two_devices(directory):
    for agent, name in json.loads((directory / "asked_of_two.json").read_text()):
        run_dir = directory / f"{agent}-{name}-on-2"
        result = train(agent, name, run_dir=run_dir, resume=True)
        assert result.summary["devices"] == 2
        np.savez(f"{run_dir}.npz", **flat(result))


def elsewhere(function, devices, directory):
    """Runs a function of this file in a process with simulated devices."""
    code = (
        f"import jax, pathlib; jax.config.update('jax_num_cpu_devices', {devices}); from tests import test_shards; "
        f"test_shards.{function.__name__}(pathlib.Path({str(directory)!r}))"
    )
    environment = os.environ | {
        "NPROC": "32",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


def rates(n, name="adam"):
    largest = {"adam": 1e-2, "small sgd": 0.3}[name]
    return np.geomspace(largest / 100, largest, n).astype(np.float32)


# Tests


def some(cases, nightly):
    """Cases, some of which run nightly alone."""
    return [pytest.param(*case, marks=pytest.mark.nightly if case in nightly else ()) for case in cases]


@pytest.fixture(scope="module")
def eight(request, tmp_path_factory):
    """The directory of the runs on eight devices."""
    directory = tmp_path_factory.mktemp("eight")
    compared = (
        "test_eight_devices_are_as_one",
        "test_a_checkpoint_of_eight_devices_resumes_on_one",
        "test_a_checkpoint_of_eight_devices_resumes_on_two",
    )
    cases = {case for test in compared for case in harness.asked(request, test)}
    members = harness.asked(request, "test_members_over_devices_are_the_single_runs")
    (directory / "asked.json").write_text(json.dumps((sorted(cases), members)))
    elsewhere(on_eight_devices, 8, directory)
    return directory


@pytest.mark.parametrize(("agent", "name"), some(CASES, NIGHTLY))
def test_eight_devices_are_as_one(agent, name, eight):
    one = flat(train(agent, name, num_shards=8))
    assert moved(one) > 0.005, "so little was learnt that anything would agree"
    assert_close(dict(np.load(eight / f"{agent}-{name}.npz")), one)


def half_a_run(agent, name, devices, eight):
    """Copies a run on eight devices up to the first of its two checkpoints."""
    run_dir = eight / f"{agent}-{name}-on-{devices}"
    shutil.copytree(eight / f"{agent}-{name}", run_dir)
    first, last = sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    assert first * 2 == last
    shutil.rmtree(run_dir / "checkpoints" / str(last))
    return run_dir


@pytest.fixture(scope="module")
def two(request, eight):
    """The directory of those runs, resumed on two devices."""
    cases = harness.asked(request, "test_a_checkpoint_of_eight_devices_resumes_on_two")
    (eight / "asked_of_two.json").write_text(json.dumps(cases))
    for agent, name in cases:
        half_a_run(agent, name, 2, eight)
    elsewhere(on_two_devices, 2, eight)
    return eight


@pytest.mark.parametrize(("agent", "name"), [("ppo", "adam"), ("vtrace", "adam"), COSTLY])
def test_a_checkpoint_of_eight_devices_resumes_on_one(agent, name, eight):
    run_dir = half_a_run(agent, name, 1, eight)
    resumed = flat(train(agent, name, run_dir=run_dir, resume=True))  # num_shards is not given: the run knows
    assert_close(resumed, dict(np.load(eight / f"{agent}-{name}.npz")))


@pytest.mark.parametrize(("agent", "name"), some(ON_TWO, {BATCH_NORM}))
def test_a_checkpoint_of_eight_devices_resumes_on_two(agent, name, two):
    resumed = dict(np.load(two / f"{agent}-{name}-on-2.npz"))
    assert_close(resumed, dict(np.load(two / f"{agent}-{name}.npz")))


@pytest.mark.parametrize(("agent", "name"), some(MEMBERS, {BATCH_NORM}))
def test_members_over_devices_are_the_single_runs(agent, name, eight):
    members = dict(np.load(eight / f"{agent}-population.npz"))
    for member in (0, 3):
        single = flat(
            train(agent, name, num_shards=2, seed=5 + member, hyper={"learning_rate": rates(4, name)[member]})
        )
        assert_close(members, single, member)


@pytest.mark.parametrize("agent", [pytest.param("dqn", marks=pytest.mark.nightly), "ppo"])  # with a replay and without
def test_a_population_of_64_is_64_single_runs(agent):
    result = train(agent, num_envs=8, population=64, seed=3, hyper={"learning_rate": rates(64)})
    for member in (0, 31, 63):
        single = train(agent, num_envs=8, seed=3 + member, hyper={"learning_rate": rates(64)[member]})
        assert_close(flat(result, member), flat(single))
    weights = np.asarray(
        result.learner.params["params"][{"r2d2": "advantage", "dqn": "q", "pqn": "q"}.get(agent, "policy")]["kernel"]
    )
    assert len({w.tobytes() for w in weights}) == 64, "members that are alike"


def test_the_comparison_can_fail():
    """Other lanes give other results: the tests above compare something that may differ."""
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(flat(train("vtrace", num_shards=8, seed=1)), flat(train("vtrace", num_shards=8)))
