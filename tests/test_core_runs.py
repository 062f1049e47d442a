"""Cores in whole runs: alike on one, two and eight devices, resumed bit by bit, and as a member of a population.

One network has every core, for programs take long to compile; a difference is named by its core. Its export is in
tests/result/test_policy.py. Simulated devices need a process of their own, as in tests/test_shards.py.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import envs_jax
import podracer
from podracer.training import train as training
from podracer.training.session import Session
from tests.support import every_core

pytestmark = pytest.mark.slow

NETWORK = every_core.network(envs_jax.make("memory_chain", length=3).spec)
STEPS = 460
"""Six updates of 16 lanes and 6 rows, a fifth of which are resets: episodes end anywhere in a rollout."""


def train(devices: int, **run: Any) -> podracer.Result:
    """Trains in eight shards on some of the process's devices, lanes in minibatches, without an evaluation."""
    with (
        mock.patch.object(training, "_devices", return_value=jax.devices()[:devices]),
        mock.patch.object(Session, "_evaluate", return_value=None),
    ):
        return podracer.train(
            "ppo",
            "memory_chain",
            env_options={"length": 3},
            network=NETWORK,
            config={"rollout_length": 6, "num_epochs": 1, "num_minibatches": 2, "learning_rate": 0.01},
            num_envs=16,
            num_shards=8,
            total_steps=STEPS,
            checkpoint_every=STEPS // 2,
            progress=False,
            **run,
        )


def flat(result: podracer.Result, member: int = 0) -> dict[str, np.ndarray]:
    """Parameters, optimiser and counters of a member by name."""
    leaves = jax.tree_util.tree_leaves_with_path(result.learner._replace(hyper=()))
    return {jax.tree_util.keystr(path): np.asarray(x[member]) for path, x in leaves}


def checkpoints(run_dir: pathlib.Path) -> list[int]:
    """The steps of the two checkpoints of a run."""
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())


def resumed(devices: int, run_dir: pathlib.Path) -> dict[str, np.ndarray]:
    """The end of a run that goes on from the first of its two checkpoints."""
    copy = run_dir.with_name(f"on-{devices}")
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / str(checkpoints(run_dir)[1]))
    return flat(train(devices, run_dir=copy, resume=True))


def with_eight_devices(directory: pathlib.Path) -> None:
    """Writes what the tests compare, in a process with eight devices."""
    run_dir = directory / "run"
    whole, population = train(8, run_dir=run_dir), train(1, population=2)
    assert whole.summary["updates"] >= 6
    found = {
        "whole": flat(whole),
        "halfway": flat(podracer.load(run_dir, network=NETWORK, step=checkpoints(run_dir)[0])),
        "resumed": resumed(8, run_dir),
        "on two": resumed(2, run_dir),
        "member": flat(population),
    }
    for name, leaves in found.items():
        np.savez(directory / f"{name}.npz", **leaves)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    """The ends of the runs, by name."""
    directory = tmp_path_factory.mktemp("cores")
    code = (
        "import jax, pathlib; jax.config.update('jax_num_cpu_devices', 8); from tests import test_core_runs; "
        f"test_core_runs.with_eight_devices(pathlib.Path({str(directory)!r}))"
    )
    root = str(pathlib.Path(__file__).parents[1])
    environment = os.environ | {"NPROC": "32", "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.stem: dict(np.load(path)) for path in directory.glob("*.npz")}


def differences(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> list[str]:
    """Names of arrays that are further apart than the tolerance."""
    assert set(found) == set(expected)
    return [name for name, x in found.items() if not np.allclose(x, expected[name], rtol=tolerance, atol=tolerance)]


def test_every_core_learns(runs: dict[str, dict[str, np.ndarray]]) -> None:
    """Or anything would agree."""
    apart = differences(runs["halfway"], runs["whole"], 1e-3)
    assert all(any(f"'{name}'" in leaf for leaf in apart) for name in every_core.SETTINGS)


def test_a_resumed_run_is_the_same_bit_by_bit(runs: dict[str, dict[str, np.ndarray]]) -> None:
    for name, x in runs["resumed"].items():
        np.testing.assert_array_equal(x, runs["whole"][name], err_msg=name)


def test_eight_devices_are_as_two_and_as_one(runs: dict[str, dict[str, np.ndarray]]) -> None:
    """Equal shards, equal result. The run on two devices was resumed there; that on one is a member of two."""
    assert differences(runs["on two"], runs["whole"], 1e-5) == []
    assert differences(runs["member"], runs["whole"], 1e-5) == []
