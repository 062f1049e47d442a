"""Reanalysers on devices of their own: as learners that reanalyse themselves, or a group of updates ahead of them.

Simulated devices, as in `test_devices`.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import jax
import numpy as np
import pytest

import podracer
from podracer import replay
from podracer.search import reanalysis
from podracer.sebulba import learner_loop
from podracer.sebulba.channels import Channel
from podracer.sebulba.replay_devices import SplitReplay
from podracer.training import train as training
from podracer.training.session import Session
from tests.support import harness

pytestmark = pytest.mark.slow

APART = {"reanalyser_devices": 2, "prepare_ahead": False}
AHEAD = {"reanalyser_devices": 2}
# Plain gradient steps: Adam's, of gradients that are nearly 0, are as large whatever the rounding.
SMALL = {
    "hidden_sizes": (8,),
    "state_size": 8,
    "head_size": 8,
    "lstm_size": 8,
    "projection_size": 16,
    "forecast_size": 8,
    "num_bins": 11,
    "simulations": 4,
    "unroll_length": 1,
    "n_step": 2,
    "batch_size": 16,
    "replay_min_size": 64,
    "replay_capacity": 2_000,
    "replay_ratio": 2.0,
    "target_interval": 8,
    "reanalyse_group": 2,
    "refresh_interval": 4,
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "max_grad_norm": 0.1,
}
DRIVER = {"arch": "sebulba", "mode": "lockstep", "num_shards": 2, "num_envs": 8, "total_steps": 400, "actor_devices": 1}
SOON = 10.0
"""Seconds from a signal to the end of a run, its checkpoint included, on a machine with other work."""
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def train(log=None, **settings):
    settings = DRIVER | {"eval_every": 400, "checkpoint_every": 100, "keep_checkpoints": 9} | settings
    with mock.patch.object(Session, "_evaluate", return_value=None):  # nothing to compile for it
        return podracer.train("efficientzero", "catch", config=SMALL, progress=False, log=log, **settings)


def numbers(result):
    return harness.numbers_of(result.learner._replace(hyper=()))


def mean(result, name):
    return np.nanmean([row[name] for row in result.history if name in row])


@contextlib.contextmanager
def drawn():
    """Records the draws meanwhile: slots in the ring, by draw and shard in any order."""
    sample, found = replay.Buffer.sample, []

    def watched(*arguments):
        at = sample(*arguments)
        jax.debug.callback(lambda index: found.append(tuple(np.ravel(index).tolist())), at.index)
        return at

    with mock.patch.object(replay.Buffer, "sample", watched):
        yield found
        jax.effects_barrier()
    found.sort()


def on_five_devices(_):
    two_learners = mock.patch.object(training, "_devices", return_value=jax.local_devices()[:3])
    with two_learners, drawn() as by_learners:
        fused = train()
    with drawn() as by_reanalysers:
        apart = train(**APART)
    assert int(np.max(fused.learner.num_updates)) > 40
    assert len(by_learners) > 40
    assert by_learners == by_reanalysers
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), numbers(apart), numbers(fused))
    ahead = train(**AHEAD)
    far = [not np.allclose(a, b, **TOLERANCE) for a, b in zip(*map(jax.tree.leaves, (numbers(ahead), numbers(apart))))]
    assert sum(far) > len(far) / 2, "priorities, and at times targets, are of a group earlier"
    # Targets are 0 to 7 updates old, and older by a group that was prepared ahead.
    assert 3.0 < mean(fused, "reanalyse/staleness") < 4.0
    assert 1.0 < mean(ahead, "reanalyse/staleness") - mean(fused, "reanalyse/staleness") <= 2.0
    # All groups but the first are drawn one earlier.
    assert mean(fused, "replay/priority_staleness") == mean(apart, "replay/priority_staleness") == 0.5
    assert 2.3 < mean(ahead, "replay/priority_staleness") <= 2.5


def whatever_ends_a_run(directory):
    """The next goes on with it."""
    ahead = train(**AHEAD)
    run = AHEAD | {"run_dir": directory / "run", "resume": True}
    stopped(run, SplitReplay, "compile", call=0)
    stopped(run, Channel, "put", call=0)
    stopped(run, Channel, "get", call=0)
    assert not train(lambda steps, row: row["updates"] >= 12, **run).summary["complete"]
    stopped(run, SplitReplay, "_update", call=3)
    for failing, message in (
        (broken_actor, "an actor fell over"),
        (out_of_memory, "a device is out of memory .*: lower num_envs"),
        (broken_search, "a reanalyser fell over"),
        (targets_of_nan, "not finite after .*last good checkpoint is "),
        (broken_learner, "a learner fell over"),
    ):
        threads = own_threads()
        with failing() as since, pytest.raises(RuntimeError, match=message):
            train(**run)
        assert own_threads() == threads
        assert time.monotonic() - since[0] < 5.0
    # Who is killed leaves a checkpoint of some time before, and no summary.
    killed = shutil.copytree(directory / "run", directory / "killed")
    saved = sorted((killed / "checkpoints").iterdir(), key=lambda path: int(path.name))
    assert len(saved) > 2
    shutil.rmtree(saved[-1])
    (killed / "summary.json").unlink(missing_ok=True)
    for run_dir in (directory / "run", killed):
        again = train(**(run | {"run_dir": run_dir}))
        assert again.summary["complete"]
        jax.tree.map(np.testing.assert_array_equal, numbers(again), numbers(ahead))
    without_lockstep(AHEAD | {"mode": "async"}, directory / "async", ahead)


def without_lockstep(run, run_dir, lockstep):
    """As many updates, whenever rollouts come: with slow reanalysers, and where a run was stopped, or lost what came
    after a save."""
    with changed_search(waiting):
        assert train(**run).summary["updates"] == lockstep.summary["updates"]
    run |= {"run_dir": run_dir, "resume": True}
    assert not train(lambda steps, row: row["updates"] >= 12, **run).summary["complete"]
    stopped(run, SplitReplay, "_update", call=3)
    saved = sorted((run_dir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(saved[-1])
    (run_dir / "summary.json").unlink(missing_ok=True)
    again = train(**run)
    assert again.summary["complete"]
    assert again.summary["updates"] == lockstep.summary["updates"]
    assert int(np.max(again.learner.num_updates)) == again.summary["updates"]


def own_threads():
    """The number of threads without XLA's, which Python knows once they have called it."""
    return sum(not isinstance(thread, threading._DummyThread) for thread in threading.enumerate())


def stopped(run, where, during, call):
    """A signal comes while the reanalysers compile or search, the learner waits for rollouts, or an actor for room."""
    function, calls = getattr(where, during), iter(range(call))

    def interrupted(*arguments, **named):
        searching = function(*arguments, **named) if during == "_update" else None  # under way when this returns
        now = next(calls, None) is None and not since
        if now:
            since.append(time.monotonic())
            signal.raise_signal(signal.SIGTERM)
        done = searching or function(*arguments, **named)
        if now and during == "compile":  # which is waited for
            since[:] = [time.monotonic()]
        return done

    since: list[float] = []
    with mock.patch.object(where, during, interrupted), pytest.raises(podracer.Interrupted):
        train(**run)
    assert time.monotonic() - since[0] < SOON


@contextlib.contextmanager
def out_of_memory():
    """A program of the reanalysers cannot begin; yields when."""
    update, calls, since = SplitReplay._update, iter(range(3)), []

    def failing(*arguments):
        if next(calls, None) is None:
            since.append(time.monotonic())
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return update(*arguments)

    with mock.patch.object(SplitReplay, "_update", failing):
        yield since


@contextlib.contextmanager
def broken_learner():
    """Makes publishing fail; yields when."""
    publish, calls, since = learner_loop.LearnerLoop.publish_to, iter(range(3)), []

    def failing(*arguments):
        if next(calls, None) is None:
            since.append(time.monotonic())
            raise RuntimeError("a learner fell over")
        return publish(*arguments)

    with mock.patch.object(learner_loop.LearnerLoop, "publish_to", failing):
        yield since


@contextlib.contextmanager
def broken_actor():
    """A rollout is not handed over; yields when."""
    since = []

    def failing(*arguments):
        since.append(time.monotonic())
        raise RuntimeError("an actor fell over")

    with mock.patch.object(Channel, "put", failing):
        yield since


def waiting(x):
    time.sleep(0.05)
    return x


def broken_search():
    """A program of the reanalysers ends with an error, long after it was dispatched; yields when."""

    def fail(x):
        raise RuntimeError("a reanalyser fell over")

    return changed_search(fail)


def targets_of_nan():
    """Makes the reanalysers' targets NaN; yields since when."""
    return changed_search(lambda x: x * np.float32(np.nan))


@contextlib.contextmanager
def changed_search(change):
    """Weights of samples go through a function, from the fifth group that is reanalysed on; yields since when."""
    reanalyse, calls, since = reanalysis.reanalyse, iter(range(4)), []

    def fail(x):
        if next(calls, None) is not None:
            return x
        since.append(time.monotonic())
        return change(x)

    def failing(plan, actor, batch, key, **sizes):
        weight = jax.pure_callback(
            fail, jax.ShapeDtypeStruct(batch.weight.shape, np.float32), batch.weight, vmap_method="sequential"
        )
        return reanalyse(plan, actor, batch._replace(weight=weight), key, **sizes)

    with mock.patch.object(reanalysis, "reanalyse", failing):
        yield since


def elsewhere(function, directory):
    """Runs a function of this file in a process with five devices."""
    code = (
        "import jax, pathlib; jax.config.update('jax_num_cpu_devices', 5); from tests.sebulba import test_reanalysers; "
        f"test_reanalysers.{function.__name__}(pathlib.Path({str(directory)!r}))"
    )
    environment = os.environ | {
        "NPROC": "32",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.nightly
def test_they_are_as_learners_that_reanalyse(tmp_path):
    elsewhere(on_five_devices, tmp_path)


@pytest.mark.nightly  # in the slow tier: runs that are stopped and go on (test_resume.py), actors and learners that fail
def test_whatever_ends_a_run_the_next_goes_on_with_it(tmp_path):
    elsewhere(whatever_ends_a_run, tmp_path)
