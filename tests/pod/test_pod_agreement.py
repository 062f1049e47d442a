"""Process 0's look at a directory decides for all processes; threads stand for the processes here."""

import json
import pathlib
import shutil
import threading
import types

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import envs_jax
from podracer.errors import CheckpointError, TrainingDivergedError
from podracer.run import checkpoint
from podracer.run.checkpoint import Checkpoints
from podracer.sebulba.metrics import Report
from podracer.training import shared, train
from podracer.training import summary as summaries
from tests.support import pods


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with checkpoints 1 and 2."""
    directory = tmp_path_factory.mktemp("written")
    checkpoints = Checkpoints(directory)
    for step in (1, 2):
        checkpoints.save(step, {"n": jnp.int32(step)})
    checkpoints.close()
    return directory


def seen_late(written, directory, has, seconds):
    """Opens a directory in two processes, the second of which sees only some checkpoints in it, for some time."""
    for index, steps in enumerate(((1, 2), has)):
        for step in steps:
            place = directory / str(index) / "checkpoints" / str(step)
            shutil.copytree(written / "checkpoints" / "1", place)

    def become_alike():
        for step in (1, 2):
            place = directory / "1" / "checkpoints" / str(step)
            shutil.copytree(written / "checkpoints" / "1", place, dirs_exist_ok=True)
        shutil.rmtree(directory / "1" / "checkpoints" / "3", ignore_errors=True)

    def open_it(processes):
        checkpoints = Checkpoints(directory / str(processes.index), processes=processes)
        steps = checkpoints.steps()
        checkpoints.close()
        return steps

    timer = threading.Timer(seconds, become_alike)
    timer.start()
    found = pods.as_threads(open_it)
    timer.cancel()
    return found


@pytest.mark.parametrize("has", [(1,), (1, 2, 3)], ids=["misses one", "sees one that is gone"])
def test_all_wait_until_they_see_the_same_checkpoints(has, written, tmp_path):
    assert seen_late(written, tmp_path, has, seconds=0.5) == [[1, 2], [1, 2]]


def test_one_that_goes_while_it_is_looked_at_is_looked_for_again(written, tmp_path, monkeypatch):
    """Process 0 removes old checkpoints, and who lists a directory may find one that is not there a moment later."""
    look, looks = ocp.CheckpointManager.reload, []

    def reload(manager):
        looks.append(manager)
        if len(looks) == 1:
            raise FileNotFoundError("checkpoints/3/state")
        look(manager)

    monkeypatch.setattr(ocp.CheckpointManager, "reload", reload)
    assert seen_late(written, tmp_path, (1,), seconds=0.5) == [[1, 2], [1, 2]]
    assert len(looks) > 1


def test_who_never_sees_a_checkpoint_is_named_by_all(written, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "AGREEMENT_SECONDS", 0.2)
    for error in seen_late(written, tmp_path, (1,), seconds=60):
        assert isinstance(error, CheckpointError)
        assert "process 1 sees checkpoints [1] in" in str(error)
        assert "process 0 [1, 2], for 0.2 s" in str(error)


@pytest.mark.parametrize("sees", [0, 1])
def test_whether_a_run_is_finished_is_said_by_process_0(sees, tmp_path, monkeypatch):
    """One of the two does not see its summary."""
    summary = {"complete": True, "env_steps": 8, "eval_episodes": 4, "train_seconds": 1.5}
    for index in range(2):
        (tmp_path / str(index)).mkdir()
    (tmp_path / str(sees) / "summary.json").write_text(json.dumps(summary))
    run, environment = (types.SimpleNamespace(total_steps=8, eval_episodes=4), envs_jax.make("catch"))
    experiment = types.SimpleNamespace(run=run, environment=environment)

    def stored(processes):
        return summaries.stored(tmp_path / str(processes.index), experiment, processes, env_steps=8)

    assert pods.as_threads(stored) == ([summary] * 2 if sees == 0 else [None] * 2)


def test_all_say_why_process_0_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    for error in pods.as_threads(lambda processes: shared.directory(tmp_path / "file" / "run", processes)):
        assert isinstance(error, ValueError)
        assert "cannot write to run directory" in str(error)
        assert "Not a directory" in str(error)


def test_what_is_resumed_is_read_by_process_0(written, tmp_path, monkeypatch):
    """Each has a directory of its own, as where it is not shared, which `train` finds out."""
    run = {"agent": "ppo", "agent_config": {}, "env": "catch", "env_options": {}, "hyper": {}, "own": []}
    run |= {"podracer": "0", "run": {"seed": 3}, "init_from": "elsewhere"}
    shutil.copytree(written, tmp_path / "0")
    (tmp_path / "0" / "config.json").write_text(json.dumps(run))
    monkeypatch.setattr(train, "train", lambda **asked: (asked["seed"], asked["init_from"]))
    resume = lambda processes: train.resume(tmp_path / str(processes.index), topology=processes)  # noqa: E731
    assert pods.as_threads(resume) == [(3, None)] * 2
    for error in pods.as_threads(lambda processes: train.resume(pathlib.Path("nowhere"), topology=processes)):
        assert "nowhere holds no run" in str(error)


def test_all_name_what_one_was_rewarded_with():
    def diverge(processes):
        report = Report(0, None, processes)
        rewards = np.zeros((3, 2))
        rewards[1, 0] = np.inf if processes.index else 0
        report._metrics, report._rewards = [{"loss": np.float32(np.inf)}], [[rewards]]
        report.send(None, 100, 1)

    for error in pods.as_threads(diverge):
        assert isinstance(error, TrainingDivergedError)
        assert "reward is not finite in row 1 of a rollout, lane 0 of its actor of process 1, and so" in str(error)
