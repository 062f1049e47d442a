"""Updates behind the last step: how many, that they survive stops bit for bit, and who cannot do them."""

import os
import shutil
import signal

import jax
import numpy as np
import pytest

import podracer
from podracer.anakin import runner as anakin
from podracer.sebulba import learner_loop as sebulba
from podracer.training import session
from tests.support import harness

STEPS, FINAL = 160, 24
DQN = {"hidden_sizes": (8,), "rollout_length": 8, "batch_size": 8, "replay_min_size": 40, "replay_capacity": 400}
DQN |= {"learning_rate_schedule": "constant"}
LOCKSTEP = {"arch": "sebulba", "mode": "lockstep", "updates_per_call": 4}


def train(log=None, final_updates=FINAL, **settings):
    settings = {"total_steps": STEPS, "num_envs": 4, "eval_episodes": 2, "eval_every": 2**40} | settings
    config = DQN | {"replay_ratio": 1.0}
    return podracer.train(
        "dqn", "catch", config=config, progress=False, log=log, final_updates=final_updates, **settings
    )


def updates(result):
    return int(np.max(result.learner.num_updates))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Reports as often as can be, so that there is where to stop."""
    for module, name in ((anakin, "SECONDS_PER_CALL"), (sebulba, "SECONDS_PER_REPORT")):
        monkeypatch.setattr(module, name, 0.0)


DRIVERS = pytest.mark.parametrize(
    "driver", [pytest.param({}, marks=pytest.mark.slow), LOCKSTEP], ids=["anakin", "sebulba"]
)


def behind_the_last_step(result):
    """Rows of the updates there."""
    base = updates(result) - FINAL
    return [row for row in result.history if row["updates"] > base and "loss/total" in row]


@pytest.mark.slow
@DRIVERS
def test_they_are_reported_as_they_are_done(driver):
    whole = train(**driver)
    rows = behind_the_last_step(whole)
    assert len(rows) > 4
    assert {row["env_steps"] for row in rows} == {whole.summary["env_steps"]}
    before = [row["updates"] for row in whole.history if row["env_steps"] < STEPS]
    assert 0 < max(before) <= updates(whole) - FINAL


@pytest.mark.slow
def test_updates_of_the_last_rollout_are_done_before_the_evaluation(tmp_path, monkeypatch):
    """A signal may come among them."""
    settings = LOCKSTEP | {"updates_per_call": 1, "final_updates": 0, "eval_every": STEPS}
    calls, dispatched = [], sebulba._Pace.dispatched

    def counted(self, number, result):
        dispatched(self, number, result)
        calls.append(number)
        if len(calls) == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sebulba._Pace, "dispatched", counted)
    stop = 0
    whole, stop = train(**settings), len(calls) - 1
    calls.clear()
    with pytest.raises(podracer.Interrupted):
        train(run_dir=tmp_path, **settings)
    assert updates(podracer.load(tmp_path)) == updates(whole) - 1
    done = train(run_dir=tmp_path, resume=True, **settings)
    evaluations = [
        [(row["env_steps"], row["updates"]) for row in result.history if "eval/return_mean" in row]
        for result in (whole, done)
    ]
    assert evaluations[0] == evaluations[1]
    harness.assert_same(done.learner, whole.learner)


@pytest.mark.slow
@DRIVERS
def test_they_survive_stops(driver, tmp_path):
    whole = train(**driver)
    base = updates(whole) - FINAL
    for stop in (5, 11):
        part = train(
            lambda steps, row, stop=stop: row["updates"] >= base + stop, run_dir=tmp_path, resume=True, **driver
        )
        assert base + stop <= updates(part) < base + FINAL
        assert not part.summary["complete"]
        assert updates(podracer.load(tmp_path)) == updates(part), "also of the second stop"
        assert part.summary["env_steps"] == whole.summary["env_steps"]
        pairs = zip(*(jax.tree.leaves(result.learner.params) for result in (part, whole)), strict=True)
        assert all(np.any(before != after) for before, after in pairs), "something is learnt in them"
    done = train(run_dir=tmp_path, resume=True, **driver)
    assert done.summary["complete"]
    harness.assert_same(done.learner, whole.learner)
    again = train(run_dir=tmp_path, resume=True, **driver)
    harness.assert_same(again.learner, whole.learner)


@pytest.mark.slow
@pytest.mark.parametrize("driver", [pytest.param({}, marks=pytest.mark.nightly), LOCKSTEP], ids=["anakin", "sebulba"])
def test_checkpoints_by_time_come_among_them(driver, tmp_path, monkeypatch):
    """And change nothing; a run that is killed after one goes on there. The last state alone is evaluated."""
    driver = driver | {"eval_every": STEPS}
    whole, kept = train(**driver), []

    def saving(self, state, env_steps):
        save(self, state, env_steps)
        done = int(np.max(jax.device_get(state.learner.num_updates)))
        if updates(whole) - FINAL < done < updates(whole):
            kept.append(tmp_path / str(done))
            shutil.copytree(tmp_path / "run", kept[-1])

    with monkeypatch.context() as patch:
        harness.late_after(6, patch)
        save = session.Session._save
        patch.setattr(session.Session, "_save", saving)
        late = train(run_dir=tmp_path / "run", **driver)
    harness.assert_same(late.learner, whole.learner)
    evaluated = lambda result: [row["updates"] for row in result.history if "eval/return_mean" in row]  # noqa: E731
    assert evaluated(late) == evaluated(whole) == [updates(whole)]
    assert kept
    again = train(run_dir=kept[-1], resume=True, **driver)
    assert next(row["updates"] for row in behind_the_last_step(again)) <= int(kept[-1].name)
    harness.assert_same(again.learner, whole.learner)


@pytest.mark.slow
def test_a_run_that_goes_on_does_them_at_its_new_end(tmp_path):
    base = updates(train(final_updates=0, total_steps=2 * STEPS))
    train(run_dir=tmp_path)
    longer = train(run_dir=tmp_path, resume=True, total_steps=2 * STEPS)
    assert updates(longer) == base + 2 * FINAL


@pytest.mark.slow
def test_nothing_is_learnt_of_nothing():
    """There are no updates if a replay never held enough."""
    assert updates(train(total_steps=32)) == 0


def test_who_cannot():
    with pytest.raises(ValueError, match="final_updates=5: ppo learns from every rollout once"):
        podracer.train("ppo", "catch", final_updates=5)
    for name, words in (("linear", "'linear' falls to 0 at the last step"), ("cosine", "'cosine' falls to 0")):
        config = {"learning_rate_schedule": name}
        with pytest.raises(ValueError, match=f"final_updates=5: learning_rate_schedule={words}"):
            podracer.train("dqn", "catch", config=config, final_updates=5)
    config = {"reanalyse_group": 4, "target_interval": 4}
    with pytest.raises(ValueError, match="final_updates=6 is not a multiple of the 4 updates that are drawn at once"):
        podracer.train("efficientzero", "catch", config=config, final_updates=6)
