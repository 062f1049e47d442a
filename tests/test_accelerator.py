"""On whatever device JAX finds (`make test-accelerator`): the CPU's numbers, equal bits, and replays that are not copied."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import podracer
from podracer import environments, topology
from podracer.agents.registry import make_agent
from podracer.bench.anakin import trainer

pytestmark = pytest.mark.accelerator

SMALL = {"num_envs": 16, "eval_episodes": 8}
SEARCH = {"simulations": 4, "batch_size": 16, "replay_min_size": 320}
SEQUENCES = {"rollout_length": 10, "burn_in": 2, "trace_length": 12, "replay_min_size": 160, "replay_capacity": 4_000}
ROWS = {"replay_min_size": 320, "replay_capacity": 3_200, "target_interval": 160}
# An agent, its environment, its settings, and how many steps.
CASES = {
    "ppo": ("ppo", "catch", {}, 8_000),
    "vtrace": ("vtrace", "pixel_catch", {"torso": "resnet", "rollout_length": 10}, 1_600),
    "lstm": ("ppo", "memory_chain", {"core": "lstm", "core_size": 16}, 8_000),
    "r2d2": (
        "r2d2",
        "pixel_catch",
        SEQUENCES | {"torso": "shallow", "core": "lstm", "core_size": 16, "batch_size": 8},
        3_200,
    ),
    "dqn": ("dqn", "pixel_catch", ROWS | {"torso": "shallow"}, 1_600),
    "pqn": ("pqn", "catch", {}, 8_000),
    "alphazero": ("alphazero", "tic_tac_toe", SEARCH, 1_600),
    "efficientzero": (
        "efficientzero",
        "catch",
        SEARCH | {"unroll_length": 2, "n_step": 2, "refresh_interval": 8},
        1_600,
    ),
}
HERE = pathlib.Path(__file__)


def train(case, **settings):
    agent, environment, config, steps = CASES[case]
    return podracer.train(
        agent, environment, config=config, total_steps=steps, progress=False, check=False, **(SMALL | settings)
    )


def flat(result):
    leaves = jax.tree_util.tree_leaves_with_path(result.learner)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def in_process(what, case, path, **variables):
    """Runs `what(case, path)` of this file in a process of its own, whose memory of the device grows as it needs."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | variables
    command = [sys.executable, str(HERE), what, case, str(path)]
    done = subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


# In processes of their own


def rows(case, path):
    """Metrics of a run, but its clock's."""
    history = [{k: v for k, v in row.items() if not k.startswith(("time/", "eval/"))} for row in train(case).history]
    name = jax.default_backend()
    (path / f"{name}.json").write_text(json.dumps(history))


def bits(case, path):
    """A run twice, and once more from its checkpoint at half of it: all equal."""
    saved = {"run_dir": path / "run", "checkpoint_every": CASES[case][3] // 2}
    first, second = flat(train(case)), flat(train(case, **saved))
    for name in first:
        np.testing.assert_array_equal(second[name], first[name], err_msg=f"again: {name}")
    *_, half, whole = sorted(int(folder.name) for folder in (path / "run" / "checkpoints").iterdir())
    assert half < whole
    shutil.rmtree(path / "run" / "checkpoints" / str(whole))
    for name, array in flat(train(case, **saved, resume=True)).items():
        np.testing.assert_array_equal(array, first[name], err_msg=f"resumed: {name}")


@pytest.mark.parametrize("case", CASES)
def test_first_updates_are_the_cpus(case, tmp_path):
    """With exact products (the make target asks for them); later ones part, as actions are drawn from the numbers."""
    in_process("rows", case, tmp_path, JAX_PLATFORMS="cpu", JAX_DEFAULT_MATMUL_PRECISION="highest")
    cpu = json.loads((tmp_path / "cpu.json").read_text())
    in_process("rows", case, tmp_path, JAX_DEFAULT_MATMUL_PRECISION="highest")
    there = json.loads((tmp_path / f"{jax.default_backend()}.json").read_text())
    learnt = [[row for row in history if row.get("updates", 0) and "grad/norm" in row][:1] for history in (cpu, there)]
    (ours,), (theirs,) = learnt
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, rtol=0.02, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_bits(case, tmp_path):
    """Equal ones again, and from a checkpoint, where operations are asked to be deterministic."""
    flags = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"} if jax.default_backend() == "gpu" else {}
    in_process("bits", case, tmp_path, **flags)


@pytest.mark.parametrize("agent", ["r2d2", "dqn"])
def test_a_replay_is_not_copied(agent):
    """A program's memory is the replay and little else."""
    config = {"torso": "nature", "frame_stack": 4, "replay_capacity": 160_000}
    if agent == "r2d2":
        config |= {
            "core": "lstm",
            "core_size": 64,
            "rollout_length": 40,
            "burn_in": 40,
            "trace_length": 80,
            "replay_min_size": 20_000,
        }
    environment = environments.make("pixel_catch")
    made = make_agent(agent, environment, config)
    layout = topology.make(num_envs=16, envs_per_device=16, devices=jax.local_devices()[:1])
    memory = trainer(made, environment, layout, made.config.rollout_length).compiled.memory
    if memory is None:
        pytest.skip("the device does not say how much memory a program takes")
    ring = 160_000 * int(np.prod(environment.spec.observation_space.shape))
    assert ring > 2**30, "smaller than what else there is"
    assert memory < 1.2 * ring + 2**29


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2], pathlib.Path(sys.argv[3]))
