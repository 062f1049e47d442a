"""Actors and learners on devices of their own: equal shards learn equally, and nothing grows.

Simulated devices need a process of their own, with NPROC set (more threads than cores, or collectives deadlock).
"""

import gc
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import agents, topology
from podracer.agents import PPOConfig, VTraceConfig
from podracer.environments.from_jax import SteppedEnvironments
from podracer.run.config import RunConfig
from podracer.sebulba import learner_program
from podracer.sebulba.driver import Sebulba
from tests.support import counting, harness

pytestmark = pytest.mark.slow

COUNTING = counting.CountingEnvironment()
T, B, SHARDS, UPDATES = 5, 24, 6, 10


def agent_of(name):
    common = {"rollout_length": T, "hidden_sizes": (16,), "max_grad_norm": 0.01}
    if name == "vtrace":
        return agents.vtrace.make(COUNTING.spec, VTraceConfig(**common, activation="tanh", entropy_cost=0.0))
    return agents.ppo.make(
        COUNTING.spec, PPOConfig(**common, num_epochs=2, num_minibatches=2, normalize_observations=True)
    )


def trajectories(agent):
    """The trajectories of one actor with parameters that never change."""
    layout = topology.make_host(num_envs=B, envs_per_actor=B, devices=jax.devices()[:1])
    driver = Sebulba(agent, SteppedEnvironments(COUNTING), layout, RunConfig(), agent.hyper)
    state = driver.init()
    driver.compile(state)
    made = []
    with driver.actor_pool(driver.learner(state).learner, 0.0) as actor_pool:
        for number in range(UPDATES):
            made.append(actor_pool.next_rollouts(number, lambda: False)[0].trajectory)
    return made


def learnt(agent, devices, made):
    """The learner's state after learning from trajectories on a number of devices, with SHARDS shards."""
    layout = topology.make_host(
        num_envs=None, envs_per_actor=B, num_shards=SHARDS, actor_devices=len(jax.devices()) - devices or None
    )
    assert layout.mesh.size == devices
    functions = learner_program.make(agent, layout, made[0])
    learner, norms = functions.init(jax.random.key(0), harness.hyper(agent)), []
    replay_state = functions.replay_state()
    programs = functions.compile(learner, replay_state, functions.spread(made[0]))
    for trajectory in made:
        learner, replay_state, metrics = programs.learn(
            learner, replay_state, functions.spread(trajectory), jnp.int32(0), jnp.float32(0.1), jax.random.key(1)
        )
        norms.append(float(metrics["grad/norm"]))
    assert min(norms) > 0.01, f"clipping is not active: {norms}"
    return harness.numbers_of((learner.params, learner.opt_state))


def on_eight_devices(directory):
    for name in ("vtrace", "ppo"):
        agent = agent_of(name)
        leaves = jax.tree.leaves(learnt(agent, 6, trajectories(agent)))
        np.savez(directory / f"{name}.npz", *leaves)
    result = podracer.train(
        "vtrace", "catch", arch="sebulba", mode="lockstep", num_envs=48, total_steps=5_000, progress=False
    )
    assert result.summary["devices"] == 8
    assert result.summary["complete"]
    config = {"rollout_length": 10, "burn_in": 0, "trace_length": 10, "batch_size": 48, "replay_ratio": 16.0}
    config |= {"replay_min_size": 960}
    ends = []
    for memory in ("device", "host"):
        result = podracer.train(
            "r2d2",
            "catch",
            arch="sebulba",
            mode="lockstep",
            replay_memory=memory,
            actor_devices=2,
            run_dir=directory / memory,
            num_envs=48,
            config=config,
            total_steps=1_500,  # of two programs, which round differently: after 70 updates they are 0.001 apart
            progress=False,
        )
        assert result.summary["updates"] > 10
        ends.append(harness.numbers_of(result.learner.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *ends)


def elsewhere(function, directory):
    code = (
        "import jax, pathlib; jax.config.update('jax_num_cpu_devices', 8); from tests.sebulba import test_devices; "
        f"test_devices.{function.__name__}(pathlib.Path({str(directory)!r}))"
    )
    environment = os.environ | {
        "NPROC": "32",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
    }
    # Compiled as for users: without optimisation, programs that are cut in other ways differ more by rounding.
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.nightly
def test_two_actors_and_six_learners_are_as_one_of_each(tmp_path):
    elsewhere(on_eight_devices, tmp_path)
    for memory in ("device", "host"):
        # Here is one device, which is neither two actors nor six learners.
        result = podracer.load(tmp_path / memory)
        assert int(result.learner.num_updates[0]) == result.summary["updates"] > 10
        assert result.evaluate(16).episodes == 16
    for name in ("vtrace", "ppo"):
        agent = agent_of(name)
        one = jax.tree.leaves(learnt(agent, 1, trajectories(agent)))
        six = np.load(tmp_path / f"{name}.npz")
        assert len(one) == len(six.files)
        for a, b in zip(one, six.values(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_a_long_run_does_not_grow():
    """Live arrays and memory, over 2,500 updates of a tiny agent."""

    def resident():
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    seen = []
    gc.freeze()  # what earlier tests left behind is not looked through at every report

    def log(steps, row):
        if "loss/total" in row:
            gc.collect()
            seen.append((row["updates"], len(jax.live_arrays()), resident()))

    podracer.train(
        "vtrace",
        "envpool:CartPole-v1",
        config={"rollout_length": 5, "hidden_sizes": (4,)},
        num_envs=8,
        total_steps=100_000,
        eval_every=100_000,
        eval_episodes=2,
        progress=False,
        log=log,
    )
    gc.unfreeze()
    quarter = [x for x in seen if x[0] > 500]
    assert seen[-1][0] > 2000
    first, last = quarter[: len(quarter) // 3], quarter[-len(quarter) // 3 :]
    assert np.mean([x[1] for x in last]) < np.mean([x[1] for x in first]) + 60
    assert np.mean([x[2] for x in last]) < np.mean([x[2] for x in first]) + 20, "MiB"
