"""Going on: longer runs, other runs' weights, ends that `log` decides, and the best checkpoint."""

import json
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer.agents.ppo import PPOAux
from podracer.anakin import runner
from podracer.result.result import Result
from podracer.run import best as best_folder
from podracer.run import checkpoint, metrics
from podracer.run.config import RunConfig
from podracer.topology import processes
from podracer.training import resolve, session
from podracer.training.transfer import transferred
from podracer.types import LearnerState
from tests.support import harness
from tests.support.small_run import AGENT, RUN


def train(run_dir, total_steps=1000, **changes):
    settings = RUN | {"total_steps": total_steps, "config": AGENT} | changes
    return podracer.train("vtrace", "catch", run_dir=run_dir, **settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def copied(finished, tmp_path):
    return pathlib.Path(shutil.copytree(finished.run_dir, tmp_path / "run"))


def parameters(result):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(result.learner.params))])


@pytest.mark.slow
def test_a_finished_run_trains_further(copied, capsys):
    longer = podracer.resume(copied, total_steps=2000)
    assert "total_steps grows from 1,000 to 2,000" in capsys.readouterr().err
    assert longer.summary["complete"]
    assert longer.summary["env_steps"] >= 2000
    steps = [row["env_steps"] for row in longer.history if "loss/total" in row]
    assert steps == sorted(steps)
    assert steps[0] < 500 < 2000 <= steps[-1]
    # What decays jumps to where it is along the new length: half of it is left.
    rates = {row["env_steps"]: row["grad/learning_rate"] for row in longer.history if "loss/total" in row}
    assert rates[1008] < 0.1 * rates[72]
    assert rates[1080] == pytest.approx(0.5 * rates[72], rel=0.02)
    stored = json.loads((copied / "config.json").read_text())
    assert (stored["run"]["total_steps"], stored["extended"]) == (2000, [1000])
    assert train(copied, 2000, resume=True).summary["env_steps"] == longer.summary["env_steps"]
    with pytest.raises(ValueError, match=r"another configuration: run.total_steps: 2000 -> 1000"):
        train(copied, 1000, resume=True)
    with pytest.raises(ValueError, match=r"run.total_steps: 2000 -> 3000"):
        train(copied, 3000)


def test_an_adapted_learning_rate_begins_anew():
    """It is the fresh one of each member, whatever the other run ended with."""
    learner = lambda rates: LearnerState({"w": jnp.zeros((2, 3))}, (), {}, jnp.zeros(2), PPOAux((), (), rates))  # noqa: E731
    for ended in (jnp.full(2, 0.01), ()):
        source = types.SimpleNamespace(learner=learner(ended), best_member=1)
        for fresh in (jnp.asarray([1e-5, 1e-4]), ()):
            found = transferred(source, learner(fresh)).aux.learning_rate
            np.testing.assert_array_equal(found, fresh)


@pytest.mark.slow
def test_a_run_begins_with_anothers_weights(finished, tmp_path):
    begun = train(tmp_path / "run", init_from=str(finished.run_dir), log=lambda *_: True)
    assert not begun.summary["complete"]
    first = podracer.load(tmp_path / "run", step=0)
    np.testing.assert_array_equal(parameters(first), parameters(finished))
    assert int(first.learner.num_updates[0]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["init_from"] == str(finished.run_dir)
    # Nothing of the other run is needed to go on; killed before its first checkpoint, it begins with it again.
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints")
    podracer.resume(tmp_path / "killed", progress=False, log=lambda *_: True)
    np.testing.assert_array_equal(parameters(podracer.load(tmp_path / "killed", step=0)), parameters(finished))
    with pytest.raises(ValueError, match=r"init_from: .* params.policy.kernel is \[8, 3\] there and \[4, 3\] here"):
        train(tmp_path / "other", init_from=finished, config=AGENT | {"hidden_sizes": (4,)})
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_what_is_transferred_and_what_begins_anew():
    """Parameters and what else was learnt (R2D2's target) of the best member, for all members; not the optimiser."""
    config = {"hidden_sizes": (4,), "core": "none", "head_size": 4, "replay_capacity": 1280, "replay_min_size": 160}

    def learner(population, offset):
        run = RunConfig(total_steps=10, num_envs=8, population=population)
        made = resolve.resolve("r2d2", "catch", run, config=config)
        numbers = lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) + jnp.asarray(offset, x.dtype)  # noqa: E731
        return made, jax.tree.map(numbers, made.driver.like().learner)

    made, old = learner(3, 0)
    rows = [{"env_steps": 1, "updates": 1, "member": i, "eval/return_mean": float(i == 1)} for i in range(3)]
    source = Result(made, old, rows, None)
    _, fresh = learner(2, 1000)
    new = transferred(source, fresh)
    for mine, theirs in ((new.params, old.params), (new.aux, old.aux)):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.stack([y[1], y[1]])), mine, theirs)
    harness.assert_same((new.opt_state, new.num_updates, new.hyper), (fresh.opt_state, fresh.num_updates, fresh.hyper))


def test_log_ends_a_run_in_good_order(tmp_path, capsys):
    result = train(tmp_path / "run", log=lambda steps, row: steps > 400, progress=True)
    assert "stopped by log at" in capsys.readouterr().err
    assert not result.summary["complete"]
    assert 400 < result.summary["env_steps"] < 1000


@pytest.mark.slow
def test_a_failing_log_loses_nothing(finished, tmp_path):
    calls = []

    def log(steps, row):
        calls.append(steps)
        if steps > 400:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        train(tmp_path / "run", log=log)
    assert calls[-1] > 400 >= calls[-2]
    (note,) = raised.value.__notes__
    assert note.startswith("podracer: stopped by an error in log (KeyError) at ")
    assert note.endswith(f" steps; continue with podracer resume {tmp_path / 'run'}")
    assert raised.traceback[-1].name == "log"
    resumed = podracer.resume(tmp_path / "run", progress=False)
    assert resumed.summary["complete"]
    np.testing.assert_array_equal(parameters(resumed), parameters(finished))


def test_other_processes_stay_until_the_first_has_written(tmp_path):
    """The first one's `log` has raised; a process that left before would end it."""
    path, there = tmp_path / "run" / "summary.json", []

    class Watched(processes.Processes):
        def barrier(self):
            there.append(path.exists())

    def log(steps, row):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(path.parent, log=log, topology=Watched())
    assert there == [False, True], "after compiling, and at the end"


def test_checkpoints_come_by_time_as_well(finished, tmp_path, monkeypatch):
    """Process 0 decides when, between the steps for which others are due; they change nothing."""
    harness.late_after(6, monkeypatch)
    monkeypatch.setattr(runner, "SECONDS_PER_CALL", 0.0)
    result = train(tmp_path / "run", keep_checkpoints=100, checkpoint_every=10**6, eval_every=10**6)
    saved = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert len(saved) > 1, saved
    np.testing.assert_array_equal(parameters(result), parameters(finished))
    with pytest.raises(ValueError, match="checkpoint_minutes"):
        podracer.RunConfig(checkpoint_minutes=0.0)


def test_it_is_late_when_the_minutes_are_over(monkeypatch):
    run = types.SimpleNamespace(run=podracer.RunConfig(checkpoint_minutes=2.0))
    here = types.SimpleNamespace(_experiment=run, _saved_at=1000.0, _checkpoints=object())
    for now, late in ((1119.0, False), (1121.0, True)):
        monkeypatch.setattr(session.time, "monotonic", lambda now=now: now)
        assert session.Session._is_late(here) == late
    here._checkpoints = None
    assert not session.Session._is_late(here)


def test_the_best_checkpoint_is_kept(tmp_path, monkeypatch):
    """Evaluations of these steps are told to be 0.1, 0.9, 0.3 and 0.5."""
    told = iter([0.1, 0.9, 0.3, 0.5])

    def evaluated(self, params, seeds):
        return [podracer.Evaluation(np.float32([next(told)]), np.float32([1.0]), 0)]

    monkeypatch.setattr(podracer.evaluation.evaluation.Evaluator, "__call__", evaluated)
    run = train(tmp_path / "run", 2000)
    returns = {row["env_steps"]: row["eval/return_mean"] for row in run.history if "eval/return_mean" in row}
    assert list(returns.values()) == pytest.approx([0.1, 0.9, 0.3, 0.5])
    (best,) = [step for step, value in returns.items() if value == pytest.approx(0.9)]
    assert [path.name for path in (run.run_dir / "best").iterdir() if path.name.isdigit()] == [str(best)]
    loaded = podracer.load(run.run_dir, step="best")
    np.testing.assert_array_equal(parameters(loaded), parameters(podracer.load(run.run_dir, step=best)))
    assert (parameters(loaded) != parameters(run)).any()
    assert max(row["env_steps"] for row in loaded.history) == best
    with pytest.raises(podracer.CheckpointError, match=rf"no checkpoint 17 in .*; there are .*{best}"):
        podracer.load(run.run_dir, step=17)


@pytest.mark.parametrize("every", [None, 500])
def test_what_comes_soon_is_written_once(every, tmp_path, monkeypatch):
    """If nobody asks for checkpoints, a run of seconds has those of its end and of its best, written at its end. Else
    a best state is written after the next one, from which a run that is killed goes on."""
    told = iter([0.1, 0.9, 0.3, 0.5])

    def evaluated(self, params, seeds):
        return [podracer.Evaluation(np.float32([next(told)]), np.float32([1.0]), 0)]

    saved = []
    save = checkpoint.Checkpoints.save

    def noted(self, step, state):
        saved.append((self.directory.name, step))
        return save(self, step, state)

    monkeypatch.setattr(podracer.evaluation.evaluation.Evaluator, "__call__", evaluated)
    monkeypatch.setattr(checkpoint.Checkpoints, "save", noted)
    monkeypatch.setattr(best_folder, "SOON_SECONDS", 1e6)
    monkeypatch.setattr(session, "SOON_SECONDS", 1e6)
    run = train(tmp_path / "run", 2000, checkpoint_every=every)
    steps = [row["env_steps"] for row in run.history if "eval/return_mean" in row]
    if every is None:
        assert saved == [("checkpoints", steps[-1]), ("best", steps[1])]
    else:
        assert saved[:5] == [
            *(("checkpoints", steps[0]), ("checkpoints", steps[1]), ("best", steps[0])),
            *(("checkpoints", steps[2]), ("best", steps[1])),
        ]
    best = podracer.load(run.run_dir, step="best")
    assert (parameters(best) != parameters(run)).any()


@pytest.mark.parametrize("full", [False, True])
def test_the_best_that_is_held_is_written_however_a_run_ends(full, tmp_path, monkeypatch):
    """No error of writing it replaces the one that ended the run."""
    if full:
        monkeypatch.setattr(checkpoint.Checkpoints, "_write", lambda *arguments: 1 / 0)
    best = best_folder.Best(tmp_path, [], 0)
    best.hold(5, 1.0, {"x": jnp.zeros(2)})
    best.close()
    steps = checkpoint.Checkpoints(tmp_path, name=best_folder.BEST, read_only=True).steps()
    assert steps == ([] if full else [5])


def test_the_best_that_is_held_is_written_beside_the_one_before(tmp_path):
    """A run that goes on may begin before its step."""
    best = best_folder.Best(tmp_path, [], 0)
    best.offer(1, 0.5, {"x": jnp.zeros(2)})
    best.hold(5, 1.0, {"x": jnp.ones(2)})
    best.close()
    best = best_folder.Best(tmp_path, [(1, 0.5)], 3)
    assert best._checkpoints.steps() == [1]
    assert [best.wants(score) for score in (0.4, 0.6)] == [False, True]
    best.close()


@pytest.mark.slow
def test_the_best_is_never_lost_by_a_run_that_is_killed(tmp_path, monkeypatch):
    """After an evaluation that was the best so far there is a checkpoint, and the best one is made up for."""
    told = iter([0.1, 0.9, 0.3, 0.5])

    def evaluated(self, params, seeds):
        return [podracer.Evaluation(np.float32([next(told)]), np.float32([1.0]), 0)]

    def killed(self, env_steps, score, state):
        if score > 0.8:
            raise KeyboardInterrupt

    monkeypatch.setattr(podracer.evaluation.evaluation.Evaluator, "__call__", evaluated)
    monkeypatch.setattr(best_folder, "SOON_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(best_folder.Best, "offer", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", 2000, checkpoint_every=10**6)
    again = train(tmp_path / "run", 2000, checkpoint_every=10**6, resume=True)
    returns = {row["env_steps"]: row["eval/return_mean"] for row in again.history if "eval/return_mean" in row}
    assert list(returns.values()) == pytest.approx([0.1, 0.9, 0.3, 0.5])
    (best,) = [step for step, value in returns.items() if value == pytest.approx(0.9)]
    assert checkpoint.Checkpoints(tmp_path / "run", name=best_folder.BEST, read_only=True).steps() == [best]


def test_the_best_of_a_part_that_is_done_again_is_not_kept(finished, tmp_path):
    (step,) = checkpoint.Checkpoints(finished.run_dir, name=best_folder.BEST, read_only=True).steps()
    for at, there in ((step, [step]), (step - 1, [])):
        directory = pathlib.Path(shutil.copytree(finished.run_dir, tmp_path / str(at)))
        best = best_folder.Best(directory, [(step, 0.5)], at)
        assert best._checkpoints.steps() == there
        best.close()


def test_what_has_diverged_is_never_the_best():
    row = lambda updates, member, mean: {  # noqa: E731
        "updates": updates, "member": member, **({} if mean is None else {"eval/return_mean": mean})
    }  # fmt: skip
    assert metrics.best_member([]) == 0
    assert metrics.best_member([row(1, 0, 5.0), row(1, 1, 9.0), row(2, 0, 3.0), row(2, 1, None), row(2, 2, 4.0)]) == 2
