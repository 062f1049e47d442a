"""Reanalysers on devices of their own: as learners that reanalyse themselves, or a group of updates ahead of them.

Simulated devices, as in `test_devices`.
"""

import os
import pathlib
import subprocess
import sys
import threading
from unittest import mock

import harness
import jax
import numpy as np
import pytest

import podracer
from podracer.sebulba.split_replay import SplitReplay

pytestmark = pytest.mark.slow

APART = {"reanalyser_devices": 2, "prepare_ahead": False}
AHEAD = {"reanalyser_devices": 2}
SMALL = {
    "hidden_sizes": (16,),
    "state_size": 8,
    "head_size": 8,
    "lstm_size": 8,
    "projection_size": 16,
    "forecast_size": 8,
    "num_bins": 11,
    "simulations": 4,
    "unroll_length": 2,
    "n_step": 2,
    "batch_size": 16,
    "replay_min_size": 64,
    "replay_capacity": 2_000,
    "samples_per_row": 2.0,
    "target_interval": 8,
    "reanalyse_group": 2,
    "refresh_interval": 4,
    "max_grad_norm": 0.1,
}
DRIVER = {"arch": "sebulba", "mode": "lockstep", "num_shards": 4, "num_envs": 8, "total_steps": 800, "eval_episodes": 2}


def train(log=None, **settings):
    settings = DRIVER | settings
    return podracer.train("efficientzero", "catch", config=SMALL, progress=False, log=log, **settings)


def numbers(result):
    return harness.numbers_of(result.learner._replace(hyper=()))


def mean(result, name):
    return np.nanmean([row[name] for row in result.history if name in row])


def on_five_devices(directory):
    devices = {"actor_devices": 1}
    fused, apart = train(**devices), train(**devices, **APART)
    assert int(np.max(fused.learner.num_updates)) > 50
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), numbers(apart), numbers(fused))
    ahead = train(**devices, **AHEAD)
    differ = [np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (numbers(ahead), numbers(apart))))]
    assert any(differ), "priorities, and at times targets, are of a group earlier"
    # Targets are 0 to 7 updates old, in steps of a group, and older by a group that was prepared ahead.
    assert 3.0 < mean(fused, "reanalyse/staleness") < 4.0
    assert 1.0 < mean(ahead, "reanalyse/staleness") - mean(fused, "reanalyse/staleness") <= 2.0
    # All groups but the first are drawn one earlier.
    assert mean(fused, "replay/priority_staleness") == mean(apart, "replay/priority_staleness") == 0.5
    assert 2.3 < mean(ahead, "replay/priority_staleness") <= 2.5
    run = {**devices, **AHEAD, "run_dir": directory / "run", "resume": True}
    assert not train(lambda steps, row: row["updates"] >= 30, **run).summary["complete"]
    for problem in PROBLEMS:
        fail(problem, **run)
    jax.tree.map(np.testing.assert_array_equal, numbers(train(**run)), numbers(ahead))


PROBLEMS = (
    (RuntimeError("a reanalyser fell over"), "fell over"),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory"), "a device is out of memory .*: lower num_envs"),
)


def fail(problem, **run):
    """A program of the reanalysers fails: the run ends in a line, and its threads too."""
    update, threads, calls = SplitReplay._update, threading.active_count(), iter(range(20))

    def failing(*args):
        if next(calls, None) is None:
            raise problem[0]
        return update(*args)

    with mock.patch.object(SplitReplay, "_update", failing), pytest.raises(RuntimeError, match=problem[1]):
        train(**run)
    assert threading.active_count() == threads


def test_they_are_as_learners_that_reanalyse(tmp_path):
    tests = pathlib.Path(__file__).parent
    code = (
        "import jax, pathlib; jax.config.update('jax_num_cpu_devices', 5); import test_reanalysers; "
        f"test_reanalysers.on_five_devices(pathlib.Path({str(tmp_path)!r}))"
    )
    path = os.pathsep.join((str(tests), str(tests.parent)))
    environment = os.environ | {"NPROC": "32", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
