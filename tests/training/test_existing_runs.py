"""Runs that are there already, and runs that are stopped."""

import dataclasses
import json
import os
import shutil
import signal
import types

import jax
import numpy as np
import pytest

import podracer
from podracer.anakin.driver import Anakin
from podracer.evaluation import evaluation
from podracer.run.config import RunConfig
from podracer.topology.processes import ALONE
from podracer.training import summary
from podracer.training import train as training
from tests.support.harness import assert_same
from tests.support.small_run import RUN, SUMMARY_KEYS, rows_of, steps_of, train


def test_it_is_not_overwritten(copied):
    before = sorted((path, path.stat().st_mtime_ns) for path in copied.rglob("*"))
    with pytest.raises(ValueError, match="already holds this run; use --resume"):
        train(copied)
    with pytest.raises(ValueError, match=r"holds a run of another configuration: run.seed: 0 -> 1"):
        train(copied, seed=1)
    with pytest.raises(ValueError, match=r"agent_config\.rollout_length: 10 -> 20.*run\.num_envs: 8 -> 16"):
        podracer.train(
            "vtrace", "catch", config={"hidden_sizes": (8,)}, run_dir=copied, resume=True, **(RUN | {"num_envs": 16})
        )
    assert sorted((path, path.stat().st_mtime_ns) for path in copied.rglob("*")) == before


def test_resume_needs_a_directory():
    with pytest.raises(ValueError, match="needs the run_dir"):
        train(None, resume=True)


def test_resume_of_a_finished_run_changes_nothing(finished, copied, monkeypatch, capsys):
    """It is not even compiled."""
    monkeypatch.setattr(Anakin, "compile", pytest.fail)
    monkeypatch.setattr(evaluation.Evaluator, "__call__", pytest.fail)
    result = train(copied, resume=True, progress=True)
    assert capsys.readouterr().err.endswith("complete at 2,016 steps\n")
    assert_same(result.learner, finished[0].learner)
    assert rows_of(copied) == result.history == finished[0].history
    assert json.loads((copied / "summary.json").read_text()) == result.summary == finished[0].summary
    assert steps_of(copied) == [1008, 1512, 2016]


def test_evaluations_of_several_tasks_are_complete_with_the_episodes_of_each(tmp_path):
    run = RunConfig(total_steps=100, eval_episodes=8)
    environment = types.SimpleNamespace(spec=types.SimpleNamespace(tasks=("left", "right")))
    experiment = types.SimpleNamespace(run=run, environment=environment)
    one = evaluation.Evaluation(np.zeros(8, np.float32), np.ones(8, np.float32), 0)
    scores = evaluation.scores([evaluation.together({"left": one, "right": one})])
    summary.write(tmp_path, {"complete": True, "env_steps": 100, **scores})
    assert summary.stored(tmp_path, experiment, ALONE, 100)["tasks"]["left"]["eval_episodes"] == 8
    experiment.run = dataclasses.replace(run, eval_episodes=16)
    assert summary.stored(tmp_path, experiment, ALONE, 100) is None


@pytest.mark.slow
def test_resume_of_a_finished_run_evaluates_what_was_not(copied):
    assert train(copied, resume=True, eval_episodes=4).summary["eval_episodes"] == 4


def test_settings_without_effect_are_refused_for_new_runs_alone(finished, copied):
    """Earlier versions let them pass: such runs go on, and can be loaded."""
    path = copied / "config.json"
    stored = json.loads(path.read_text())
    stored["run"] |= {"actor_threads": 3, "queue_capacity": 2}
    path.write_text(json.dumps(stored))
    assert_same(podracer.load(copied).learner, finished[0].learner)
    assert podracer.resume(copied, progress=False).summary == finished[0].summary
    with pytest.raises(ValueError, match="actor_threads=3 has no effect without arch='sebulba'"):
        train(copied.parent / "new", resume=True, actor_threads=3)
    with pytest.raises(ValueError, match=r"env_timeout=5\.0 has no effect without arch='sebulba'; leave it out"):
        train(None, env_timeout=5.0)


def test_resume_of_nothing_begins(tmp_path, finished):
    assert_same(train(tmp_path / "run", resume=True).learner, finished[0].learner)


def test_resume_needs_nothing_but_the_directory(finished, copied):
    shutil.rmtree(copied / "checkpoints" / "2016")
    before = (copied / "config.json").read_text()
    result = podracer.resume(copied, progress=False)
    assert_same(result.learner, finished[0].learner)
    assert result.summary["complete"] is True
    assert (copied / "config.json").read_text() == before


def test_what_does_not_matter_may_change(finished, copied):
    shutil.rmtree(copied / "checkpoints" / "2016")
    result = train(copied, resume=True, eval_every=100, checkpoint_every=250, eval_episodes=4, keep_checkpoints=1)
    assert_same(result.learner, finished[0].learner)
    assert steps_of(copied) == [2016]


def test_a_run_that_does_not_fit_says_what_it_continues_on(copied, monkeypatch):
    monkeypatch.setattr(training, "_devices", lambda: jax.devices()[:1] * 3)
    with pytest.raises(
        ValueError, match=r"^num_shards=1 is not .* data axis; this run has 1 shards: it continues on 1 "
    ):
        podracer.resume(copied, progress=False)
    with pytest.raises(ValueError, match=r"^num_shards=1 is not .* data axis; use a multiple of 3\.$"):
        train(None, num_shards=1)


def test_resume_goes_on_where_it_was(finished, copied):
    """Killed between its last two checkpoints: no row twice, none missing, the same end."""
    shutil.rmtree(copied / "checkpoints" / "2016")
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 2088, "upda')  # a line that was being written
    result = train(copied, resume=True)
    assert_same(result.learner, finished[0].learner)
    rows = rows_of(copied)
    assert rows == result.history
    cut = [row for row in finished[0].history if row["env_steps"] <= 1512]
    assert rows[: len(cut)] == cut
    assert [row["env_steps"] for row in rows if "eval/return_mean" in row] == [504, 1008, 1512, 2016]
    assert sum(row.get("episode/count", 0) for row in rows) == 28 * 8
    for name in ("time/train_seconds", "time/wall_seconds"):
        times = [row[name] for row in rows if name in row]
        assert times == sorted(times)
    assert result.summary["wall_seconds"] >= times[-1]
    assert times[-1] > sum(result.summary[name] for name in ("train_seconds", "compile_seconds"))


def test_a_signal_stops_in_good_order(finished, tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    stop = lambda steps, row: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731 - after the first update
    with pytest.raises(podracer.Interrupted, match="stopped by SIGTERM at .* steps; continue with podracer") as stopped:
        train(tmp_path / "run", log=stop)
    assert isinstance(stopped.value, KeyboardInterrupt), "`except Exception` in a loop over runs does not take it"
    result = stopped.value.result
    assert signal.getsignal(signal.SIGTERM) == handler
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary) >= SUMMARY_KEYS - {"eval_return_interval"}
    assert (summary["complete"], summary["eval_return_mean"], summary["eval_episodes"]) == (False, None, 0)
    assert summary["stopped_by"] == "SIGTERM"
    assert steps_of(tmp_path / "run") == [summary["env_steps"]], "what was done is not lost"
    assert 0 < summary["env_steps"] < 504
    assert result.evaluate(16).episodes == 16
    with pytest.raises(podracer.Interrupted):
        podracer.resume(tmp_path / "run", progress=False, log=stop)
    assert_same(train(tmp_path / "run", resume=True).learner, finished[0].learner)


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait(tmp_path, capfd):
    def log(steps, row):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)  # a background shell starts its children with SIGINT ignored
    with pytest.raises(KeyboardInterrupt) as interrupted:
        train(tmp_path / "run", log=log)
    assert interrupted.value.__notes__ == ["podracer: There is no checkpoint yet."]
    assert signal.getsignal(signal.SIGINT) == handler
    assert "Ctrl-C again to interrupt at once" in capfd.readouterr().err


@pytest.mark.slow
def test_a_callback_that_fails_is_heard(tmp_path):
    def log(steps, row):
        if steps > 600:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(tmp_path / "run", log=log)
    assert steps_of(tmp_path / "run")[0] == 504
    assert 600 < steps_of(tmp_path / "run")[-1] < 1000, "where it stopped"
