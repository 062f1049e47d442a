"""Runs that go on in the shell: which one is found, how far it trains, and what is printed."""

import json
import shutil

from tests.support.shell import TRAIN, run


def test_resume_without_a_run_dir(tmp_path, capsys, trained):
    """Begins a run if there is none, and finds the newest of its kind otherwise."""
    shutil.copytree(trained, tmp_path / "runs" / "catch-vtrace-0")
    shutil.copytree(trained, tmp_path / "runs" / "catch-vtrace-0-2")
    shutil.rmtree(tmp_path / "runs" / "catch-vtrace-0-2" / "checkpoints" / "2016")
    assert run(f"{TRAIN} --resume") == 0
    assert "run directory: runs/catch-vtrace-0-2 " in capsys.readouterr().out
    assert (tmp_path / "runs" / "catch-vtrace-0-2" / "checkpoints" / "2016").exists()
    assert not (tmp_path / "runs" / "catch-vtrace-0-3").exists()


def test_resume_asks_for_nothing_but_the_directory(copied, capsys):
    shutil.rmtree(copied / "checkpoints" / "2016")
    assert run(f"resume {copied} --gif {copied / 'policy.gif'}") == 0
    out = capsys.readouterr().out
    assert out.startswith("vtrace on catch: return ")
    assert f"animation: {copied / 'policy.gif'}" in out
    assert (copied / "checkpoints" / "2016").exists()
    assert (copied / "policy.gif").stat().st_size > 1000


def test_resume_trains_further(copied, capsys):
    assert run(f"resume {copied} --total-steps 2600") == 0
    assert "total_steps grows from 2,000 to 2,600" in capsys.readouterr().err
    assert json.loads((copied / "summary.json").read_text())["env_steps"] >= 2600


def test_quiet_says_nothing(copied, capsys):
    assert run(f"{TRAIN} --run-dir {copied} --resume --quiet") == 0
    assert capsys.readouterr() == ("", "")
