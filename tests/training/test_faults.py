"""Faults of a machine at every phase of a run: the run ends in order or goes on, and its end is the same."""

import itertools
import os
import resource
import signal
import time

import jax
import numpy as np
import pytest

import podracer
from podracer.anakin.driver import Anakin
from podracer.evaluation import evaluation
from podracer.result.result import Result
from podracer.run import checkpoint, metrics
from tests.system.test_console import unread

pytestmark = pytest.mark.slow

RUN = {"num_envs": 8, "total_steps": 600, "eval_every": 300, "eval_episodes": 8, "checkpoint_every": 300}
RUN |= {"progress": False, "config": {"rollout_length": 10, "hidden_sizes": (8,)}, "resume": True}


def train(run_dir, **changes):
    return podracer.train("vtrace", "catch", run_dir=run_dir, **(RUN | changes))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return parameters(train(tmp_path_factory.mktemp("undisturbed") / "run"))


def parameters(result):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(result.learner.params))])


PHASES = {
    "compiling": (Anakin, "compile", False),
    "training": (metrics.Log, "write", False),
    "evaluating": (evaluation.Evaluator, "_evaluate", False),
    "saving": (checkpoint.Checkpoints, "save", False),
    "plotting": (Result, "plot", True),
}
"""The phases in which a signal comes, and True for those after which the run is complete all the same."""


@pytest.mark.parametrize(
    "phase", [pytest.param(p, marks=pytest.mark.nightly) if p in ("training", "compiling") else p for p in PHASES]
)
def test_a_signal_in_every_phase(phase, undisturbed, tmp_path, monkeypatch):
    owner, name, complete = PHASES[phase]
    function, sent = getattr(owner, name), []

    def signalled(*arguments, **more):
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return function(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        with pytest.raises(podracer.Interrupted) as interrupted:
            train(tmp_path)
    assert sent
    stopped = interrupted.value.result
    assert stopped.summary["complete"] == complete
    assert stopped.summary["stopped_by"] == (None if complete else "SIGTERM")
    assert checkpoint.has_checkpoints(tmp_path)
    np.testing.assert_array_equal(parameters(train(tmp_path)), undisturbed)


def test_a_signal_in_the_last_evaluation_keeps_the_checkpoint(tmp_path, monkeypatch):
    """It was written before, and is not written again."""
    evaluate, replaced = evaluation.Evaluator._evaluate, []

    def signalled(self, *arguments):
        if checkpoint.Checkpoints(tmp_path, read_only=True).steps()[-1:] == [final]:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)  # an evaluation that is over by then counts
        return evaluate(self, *arguments)

    final = train(tmp_path / "whole").summary["env_steps"]
    with monkeypatch.context() as patch:
        patch.setattr(evaluation.Evaluator, "_evaluate", signalled)
        patch.setattr(checkpoint.Checkpoints, "replace", lambda self, step, state: replaced.append(step))
        with pytest.raises(podracer.Interrupted) as interrupted:
            train(tmp_path, keep_checkpoints=1)
    assert not interrupted.value.result.summary["complete"]
    assert not replaced
    assert train(tmp_path, keep_checkpoints=1).summary["complete"]


def test_members_that_go_on_are_evaluated_where_they_were_to_be(tmp_path):
    """Though their steps differ: the least of them count."""
    population = {"num_envs": 4, "total_steps": 6000, "eval_every": 1000, "eval_episodes": 4, "progress": False}
    population |= {"hyper": {"learning_rate": [1e-2, 1e-5, 1e-3]}}

    def evaluated(result):
        return [(row["env_steps"], row["updates"]) for row in result.history if "eval/return_mean" in row]

    whole = podracer.train("ppo", "cartpole", **population)
    steps = {}
    for row in whole.history:
        steps.setdefault(row["updates"], []).append(row["env_steps"])
    # A stop where one member has passed an evaluation that another has not.
    apart = next(u for u, s in steps.items() if u and min(s) // 1000 < max(s) // 1000)
    stop = lambda _, row: row["updates"] >= apart - 1  # noqa: E731 - the next update is under way by then
    stopped = podracer.train("ppo", "cartpole", run_dir=tmp_path, log=stop, **population)
    assert stopped.summary["updates"] == apart
    again = podracer.train("ppo", "cartpole", run_dir=tmp_path, resume=True, **population)
    assert evaluated(again) == evaluated(whole)


# What Orbax's other tasks say when they are collected, whenever that is.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_more_file_descriptors(undisturbed, tmp_path, monkeypatch):
    """The first checkpoint is there, and the second is made up for."""
    save, limits, saved = checkpoint.Checkpoints.save, resource.getrlimit(resource.RLIMIT_NOFILE), []

    def starved(self, step, state):
        if self.directory.name == "checkpoints" and saved:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            save(self, step, state)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        saved.append(step)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "save", starved)
        with pytest.raises(podracer.CheckpointError, match="Too many open files"):
            train(tmp_path)
    np.testing.assert_array_equal(parameters(train(tmp_path)), undisturbed)


def test_nobody_reads_and_the_clock_jumps(undisturbed, tmp_path, monkeypatch):
    """By hours, back and forth, which nothing may depend on."""
    jumps, now = itertools.cycle([0.0, -7200.0, 3600.0, 86400.0]), time.time
    with monkeypatch.context() as patch, unread():
        patch.setattr(time, "time", lambda: now() + next(jumps))
        result = train(tmp_path, progress=True)
    assert result.summary["complete"]
    np.testing.assert_array_equal(parameters(result), undisturbed)
