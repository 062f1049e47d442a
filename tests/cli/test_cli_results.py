"""Results in the shell: the way from training to a picture, evaluations, curves and exports."""

import json
import pathlib
import shutil

import pytest
from PIL import Image

from podracer.cli import results
from podracer.run import rundir
from tests.support.shell import TRAIN, complaint, run


def test_from_training_to_a_picture(tmp_path, capsys):
    """train -> eval --json -> plot, in directories that the commands choose themselves."""
    assert run(f"{TRAIN} --gif catch.gif") == 0
    out, err = capsys.readouterr()
    run_dir = tmp_path / "runs" / "catch-vtrace-0"
    summary = json.loads((run_dir / "summary.json").read_text())
    first, second, third = out.splitlines()
    assert first.startswith(f"vtrace on catch: return {summary['eval_return_mean']:.3f} ± ")
    assert f"after {summary['env_steps']:,} steps" in first
    assert second == "run directory: runs/catch-vtrace-0 (curve.png, metrics.jsonl, summary.json, checkpoints/)"
    assert third == "animation: catch.gif"
    assert "2,016 steps   evaluation return" in err
    with Image.open("catch.gif") as gif:
        assert gif.n_frames == 10

    assert run(f"eval {run_dir} --episodes 16 --json") == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert err == ""
    assert set(figures) == {"mean", "std", "interval", "episodes", "unfinished"}
    assert (figures["mean"], figures["std"]) == (summary["eval_return_mean"], summary["eval_return_std"])
    assert figures["interval"] == summary["eval_return_interval"]

    assert run(f"eval {run_dir} --episodes 16 --gif again.gif") == 0
    assert capsys.readouterr().out.startswith(f"vtrace on catch: return {figures['mean']:.3f} ± ")
    assert pathlib.Path("again.gif").read_bytes() == pathlib.Path("catch.gif").read_bytes()

    shutil.copytree(run_dir, tmp_path / "other" / "catch-vtrace-0")  # of the same name
    assert run(f"plot {run_dir} other/catch-vtrace-0 -o pictures/both.svg --metric loss/value") == 0
    assert capsys.readouterr().out == "pictures/both.svg\n"
    assert pathlib.Path("pictures/both.svg").read_text().count("<!-- ") > 0


def test_runs_of_one_name_are_all_drawn(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "a" / "run")
    shutil.copytree(trained, tmp_path / "b" / "run")
    drawn = {}
    monkeypatch.setattr(results.plots, "learning_curve", lambda histories, *rest, **names: drawn.update(histories))
    assert run("plot a/run b/run") == 0
    assert set(drawn) == {"a/run", "b/run"}
    assert all(len(rows) > 10 for rows in drawn.values())


def test_runs_that_differ_in_their_seeds_share_a_line(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "a")
    shutil.copytree(trained, tmp_path / "b")
    description = rundir.read(tmp_path / "b")
    description["run"]["seed"] = 1
    rundir.write_json(tmp_path / "b" / "config.json", description)
    drawn = []
    monkeypatch.setattr(
        results.plots, "learning_curve", lambda histories, *rest, title, **names: drawn.append((title, set(histories)))
    )
    assert run("plot a b") == run("plot a b --no-group") == 0
    assert drawn == [("vtrace on catch", {"vtrace on catch"}), ("vtrace on catch", {"a", "b"})]


def test_eval_of_a_damaged_checkpoint_is_still_json(copied, capsys):
    for path in (copied / "checkpoints" / "2016" / "state").rglob("d/*"):
        path.write_bytes(b"")
    assert run(f"eval {copied} --episodes 16 --json") == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert err.startswith("checkpoint 2016 is damaged (")


@pytest.mark.slow  # what is behind it is quick: tests/training/test_damage.py
@pytest.mark.nightly
def test_all_checkpoints_damaged(copied, capsys):
    for path in (copied / "checkpoints").rglob("d/*"):
        path.write_bytes(b"")
    assert run(f"eval {copied}") == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "can be read: checkpoint 2016 is damaged" in err


def test_a_run_starts_from_another_and_is_exported(trained, tmp_path, capsys):
    assert run(f"{TRAIN} --init-from {trained} --run-dir {tmp_path / 'run'} --quiet") == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["init_from"] == str(trained)
    assert run(f"export {tmp_path / 'run'} -o {tmp_path / 'policy'} --step best --episodes 0") == 0
    assert "podracer.load_policy" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "policy").iterdir()}
    assert names == {"policy.stablehlo", "spec.json", "check.npz", "MODEL_CARD.md"}
    assert "--output" in complaint(capsys, f"export {tmp_path / 'run'}")
