"""Checkpoints that are damaged, disks that are full."""

import pathlib
import re
import threading
from unittest import mock

import numpy as np
import pytest

import podracer
from podracer.run import checkpoint, metrics, rundir
from podracer.run.best import Best
from podracer.training import session
from tests.support import tiers
from tests.support.harness import assert_same
from tests.support.small_run import steps_of, train


def newest_data(run_dir):
    """The largest data file of the newest checkpoint."""
    newest = run_dir / "checkpoints" / str(steps_of(run_dir)[-1])
    return max((path for path in newest.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    data[len(data) // 2 :: 97] ^= 0xFF
    path.write_bytes(data.tobytes())


@pytest.mark.parametrize(
    "damage",
    [flip, *tiers.slow(truncate), *tiers.nightly(pathlib.Path.unlink)],
)
def test_a_damaged_checkpoint(finished, copied, damage, capsys):
    damage(newest_data(copied))
    loaded = podracer.load(copied)
    out, err = capsys.readouterr()
    assert out == "", "which would break `podracer eval --json`"
    assert err.startswith("checkpoint 2016 is damaged (")
    assert err.endswith("); used 1512.\n")
    assert loaded.history[-1]["env_steps"] == 1512
    assert steps_of(copied) == [1008, 1512, 2016], "loading moves nothing"
    result = train(copied, resume=True, progress=True)
    err = capsys.readouterr().err
    assert "checkpoint 2016 is damaged" in err
    assert f"moved it to {copied / 'damaged' / '2016'}" in " ".join(err.split())
    assert (copied / "damaged" / "2016").is_dir()
    assert_same(result.learner, finished[0].learner)
    assert steps_of(copied) == [1008, 1512, 2016]
    assert_same(podracer.load(copied).learner, finished[0].learner)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_all_checkpoints_damaged(copied):
    for step in steps_of(copied):
        for path in (copied / "checkpoints" / str(step)).rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
    metrics = (copied / "metrics.jsonl").read_text()
    for _ in range(2):  # the second time too: it must not begin afresh over the ruins
        with pytest.raises(podracer.CheckpointError, match=r"can be read: checkpoint 2016 .* checkpoint 1512 "):
            train(copied, resume=True)
        assert steps_of(copied) == [1008, 1512, 2016]
    assert (copied / "metrics.jsonl").read_text() == metrics


def test_metrics_that_cannot_be_written(tmp_path):
    """Whichever file it is; nothing is left behind that could wait or complain."""
    from tests.run.test_checkpoint import full_disk

    before = set(threading.enumerate())
    short = {f"a/{i}": 0 for i in range(40)}  # as JSON; as events they are longer
    for metric, file in (({"x" * 600: 1.0}, r"metrics\.jsonl"), (short, r"tensorboard/events\.\S+")):
        log = metrics.Log(tmp_path)
        with full_disk(), pytest.raises(rundir.WriteError) as caught:
            log.write({"env_steps": 1, "updates": 1} | metric)
        assert re.fullmatch(rf"could not write {tmp_path}/{file}: File too large\.", str(caught.value))
        with full_disk():
            log.close()
    assert set(threading.enumerate()) <= before  # those of earlier tests may end meanwhile


@pytest.mark.slow
# Orbax's other tasks, which nobody waits for, complain when they are collected, whenever that is.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_that_cannot_be_written(finished, tmp_path, monkeypatch):
    from tests.run.test_checkpoint import full_disk

    save = checkpoint.Checkpoints.save

    def save_until_full(self, step, state):
        with full_disk() if step > 1000 else full_disk(2**30):
            save(self, step, state)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "save", save_until_full)
        with pytest.raises(
            podracer.CheckpointError, match=r"could not write checkpoint 1008 in \S+: .*intact"
        ) as caught:
            train(tmp_path / "run")
    assert str(caught.value).endswith(
        f"checkpoints/504. Make room and continue with podracer resume {tmp_path / 'run'}."
    )
    assert steps_of(tmp_path / "run") == [504]
    assert podracer.load(tmp_path / "run").history[-1]["env_steps"] == 504
    assert_same(train(tmp_path / "run", resume=True).learner, finished[0].learner)


def test_an_error_at_the_start_leaves_nothing_open(tmp_path, monkeypatch):
    """The bar was there already."""
    closed = []
    for owner in (metrics.Display, metrics.Log, Best, checkpoint.Checkpoints):
        close = owner.close

        def noted(self, close=close):
            closed.append(type(self).__name__)
            close(self)

        monkeypatch.setattr(owner, "close", noted)
    monkeypatch.setattr(session, "Evaluations", mock.Mock(side_effect=ValueError("something")))
    with pytest.raises(ValueError, match="something"):
        train(tmp_path / "run")
    assert closed == ["Display", "Best", "Checkpoints", "Log", "Checkpoints"]
