"""Runs in the shell that fail or are stopped: exit codes 1 and 130, and one line."""

import errno
import os
import re
import shutil
import signal
import types
from unittest import mock

import jax
import pytest

import podracer
from podracer.run import metrics, rundir
from tests.support.shell import TRAIN, run


@pytest.mark.parametrize(
    "error",
    [
        podracer.TrainingDivergedError("loss/total not finite after 100 environment steps"),
        podracer.CheckpointError("could not write checkpoint 100"),
        OSError(28, "No space left on device"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand many lines\nabout where"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_run_that_fails(error, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(podracer, "train", fail)
    assert run(TRAIN) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert str(error).splitlines()[0] in err


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        (podracer.ActorError, 1, "podracer: error: the price; PODRACER_TRACEBACK=1 shows the whole traceback.\n"),
        (KeyError, 1, "podracer: error: KeyError: 'the price', in fail, {}; PODRACER_TRACEBACK=1 shows the"),
        (ValueError, 2, "podracer: error: ValueError: the price, in fail, {}\n"),
    ],
)
def test_an_error_of_ones_own_code_says_where(kind, code, said, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise kind("the price")

    monkeypatch.setattr(podracer, "train", fail)
    expected = re.escape(said).replace(r"\{\}", r"\S+test_cli_failures\.py, line \d+, `raise kind\(.*\)`")
    assert run(TRAIN) == code
    assert re.match(expected, capsys.readouterr().err)
    monkeypatch.setenv("PODRACER_TRACEBACK", "1")
    assert run(TRAIN) == code
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):\n")


def test_a_disk_that_is_full(copied, monkeypatch, capsys):
    """One whole line, which says how to go on; and going on works."""
    shutil.rmtree(copied / "checkpoints" / "2016")
    write = metrics.Log.write

    def refuse(self, row):
        with rundir.writing(copied / "metrics.jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics.Log, "write", refuse)
    assert run(f"resume {copied} --quiet") == 1
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        f"podracer: error: could not write {copied}/metrics.jsonl: No space left on device. The last good checkpoint is "
        f"{copied}/checkpoints/1512. Make room and continue with podracer resume {copied}.\n",
    )
    monkeypatch.setattr(metrics.Log, "write", write)
    assert run(f"resume {copied} --quiet") == 0
    assert (copied / "checkpoints" / "2016").exists()


def test_a_run_that_was_stopped_is_not_one_that_is_complete(tmp_path, monkeypatch):
    write = metrics.Log.write

    def stop(self, row):
        write(self, row)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(metrics.Log, "write", write)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
    monkeypatch.setattr(metrics.Log, "write", stop)
    try:
        assert run(f"{TRAIN} --quiet --run-dir {tmp_path / 'run'}") == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert run(f"resume {tmp_path / 'run'} --quiet") == 0


def test_an_interrupted_run(monkeypatch, capsys):
    error = KeyboardInterrupt()
    monkeypatch.setattr(podracer, "train", mock.Mock(side_effect=error))
    assert run(TRAIN) == 130
    assert capsys.readouterr().err == "podracer: error: interrupted.\n", "of checkpoints it knows nothing"
    error.add_note("podracer: There is no checkpoint yet.")
    assert run(TRAIN) == 130
    assert capsys.readouterr().err == "podracer: error: interrupted. There is no checkpoint yet.\n"


def test_a_signal_at_the_end_of_a_seed_ends_the_others(monkeypatch, tmp_path):
    """Also where that run was complete by then."""
    asked = []

    def train(agent, environment, **settings):
        asked.append(settings["seed"])
        summary = {"complete": True, "env_steps": 10, "eval_return_mean": 1.0}
        result = types.SimpleNamespace(summary=summary, run_dir=settings["run_dir"], description={"own": []})
        raise podracer.Interrupted(result, "SIGINT", "the run was complete")

    monkeypatch.setattr(podracer, "train", train)
    assert run(f"{TRAIN} --seeds 4 7 --run-dir {tmp_path / 'run'}") == 130
    assert asked == [4]
    assert run(f"{TRAIN} --seed 7 --run-dir {tmp_path / 'run'}") == 0, "all that was asked for is there"
