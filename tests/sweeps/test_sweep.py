"""Sweeps: their choice and their files with a stub for training, and against single runs."""

import json
import math
import os
import re
import signal
import types
from unittest import mock

import jax
import numpy as np
import pytest
from scipy import stats

import envs_jax
import podracer
from podracer.anakin import runner
from podracer.sweeps import sweep as sweeps
from podracer.sweeps import table
from podracer.sweeps.plan import Member

SMALL = {"total_steps": 400, "num_envs": 8, "eval_episodes": 4, "progress": False}
SMALL |= {"config": {"rollout_length": 5, "hidden_sizes": (8,)}}
RATES = [1e-4, 1e-3, 1e-2, 1.0]


def score(hyper, seed):
    """The stub's return: best at a rate of 1e-2, and worse by 0.1 for every seed from 2 on."""
    return -abs(math.log10(hyper["learning_rate"]) + 2) + 0.01 * seed - 0.1 * (seed >= 2)


@pytest.fixture
def stub(monkeypatch):
    """Takes the place of `train`: rates of 1 diverge; `calls` are its arguments."""
    calls = []

    def train(agent, environment, **settings):
        calls.append(settings)
        rates = np.atleast_1d(settings["hyper"]["learning_rate"]).tolist()
        seeds = settings.get("member_seeds", [settings["seed"]])
        members = [
            {"seed": s, "eval_return_mean": score({"learning_rate": rate}, s), "diverged": rate == 1.0}
            for rate, s in zip(rates, seeds)
        ]
        if all(member["diverged"] for member in members):
            raise podracer.TrainingDivergedError("the loss is not finite.")
        several = {"members": members} if len(members) > 1 else {}
        summary = {"complete": True, "train_seconds": 6.0, "eval_return_mean": members[0]["eval_return_mean"]}
        return types.SimpleNamespace(summary=summary | several)

    monkeypatch.setattr(sweeps, "train", train)
    return calls


def test_the_best_mean_is_first_and_its_number_on_fresh_seeds_beside(stub, tmp_path):
    swept = podracer.sweep("vtrace", "catch", hyper={"learning_rate": RATES}, seeds=2, out=tmp_path / "s", **SMALL)
    assert [row.hyper["learning_rate"] for row in swept.rows] == [1e-2, 1e-3, 1e-4, 1.0]
    assert [row.diverged for row in swept.rows] == [0, 0, 0, 2]
    assert swept.rows[-1].mean is None
    assert swept.rows[0].mean == pytest.approx(0.005)
    assert swept.fresh.seeds == [2, 3]
    assert swept.fresh.mean == pytest.approx(-0.075), "lower than in the sweep, where it was chosen"
    assert [call["population"] for call in stub] == [8, 2]
    assert stub[0]["member_seeds"] == [0, 1] * 4
    assert stub[0]["hyper"]["learning_rate"] == [1e-4, 1e-4, 1e-3, 1e-3, 1e-2, 1e-2, 1.0, 1.0]
    assert stub[1]["hyper"]["learning_rate"] == [1e-2, 1e-2]
    assert [row.train_seconds for row in swept.rows] == [pytest.approx(2 * 6 / 8)] * 4


def test_table_and_json_agree(stub, tmp_path):
    swept = podracer.sweep("vtrace", "catch", hyper={"learning_rate": RATES}, seeds=2, out=tmp_path / "s", **SMALL)
    stored = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert stored["complete"]
    head, *lines = str(swept).splitlines()
    assert re.split(r"\s{2,}", head.strip()) == ["learning_rate", "return", "95% interval", "seconds"]
    for line, row in zip(lines, stored["rows"], strict=False):
        rate, mean, spread, seconds = re.split(r"\s{2,}", line.strip())
        assert float(rate) == row["hyper"]["learning_rate"]
        assert float(seconds) == pytest.approx(row["train_seconds"], abs=0.051)
        if row["diverged"]:
            assert (mean, row["mean"], spread) == ("-", None, "2 of 2 diverged")
        else:
            assert float(mean) == pytest.approx(row["mean"], abs=5e-4)
            assert [float(x) for x in spread.split(" to ")] == pytest.approx(row["interval"], abs=5e-4)
            assert np.mean(row["scores"]) == pytest.approx(row["mean"])
    best = stored["best"]
    for key in ("sweep", "fresh"):
        assert f"{best[key]['mean']:.3f} (" in str(swept)
    assert best["hyper"] == {"learning_rate": 1e-2}
    assert f"train it with: {best['command']}" in str(swept)
    assert eval(best["command"], {"podracer": types.SimpleNamespace(train=lambda *a, **k: (a, k))}) == (
        ("vtrace", "catch"),
        {name: value for name, value in SMALL.items() if name != "progress"} | {"hyper": {"learning_rate": 0.01}},
    )
    assert (tmp_path / "s" / "sweep.png").stat().st_size > 1000


def test_a_wave_that_diverges_is_not_the_end(stub, tmp_path):
    swept = podracer.sweep("vtrace", "catch", hyper={"learning_rate": RATES}, seeds=1, at_once=1, **SMALL)
    assert [call["hyper"]["learning_rate"] for call in stub] == [*RATES, 1e-2]
    assert [call["seed"] for call in stub] == [0, 0, 0, 0, 1]
    assert swept.rows[-1].diverged == 1
    assert swept.rows[0].interval is None
    with pytest.raises(podracer.TrainingDivergedError, match="all 1 members of the sweep have diverged") as error:
        podracer.sweep("vtrace", "catch", hyper={"learning_rate": [1.0]}, seeds=1, **SMALL)
    assert "the loss is not finite" in str(error.value.__cause__)


def test_a_directory_goes_on_with_its_own_sweep_alone(stub, tmp_path):
    settings = {"hyper": {"learning_rate": RATES}, "seeds": 2, "out": tmp_path / "s", **SMALL}
    first = podracer.sweep("vtrace", "catch", at_once=3, **settings)
    assert podracer.sweep("vtrace", "catch", **settings).to_json() == first.to_json(), "at_once is the stored one"
    assert [row.seeds for row in first.rows] == [[0, 1]] * 4, "nobody is counted twice who fills a wave up"
    (tmp_path / "s" / "wave-0" / "checkpoints" / "400").mkdir(parents=True)
    for message, changed in (
        ("at_once: 3 -> 4", {"at_once": 4}),
        ("init_from: absent -> /a/run", {"init_from": "/a/run"}),
        ("seeds: 2 -> 3", {"seeds": 3}),
        ("run.total_steps: 400 -> 500", {"total_steps": 500}),
        ("hyper.learning_rate: ", {"hyper": {"learning_rate": [1e-3]}}),
    ):
        with pytest.raises(ValueError, match=f"s holds another sweep: .*{message}"):
            podracer.sweep("vtrace", "catch", **settings | changed)


def test_waves_may_have_another_size_until_one_has_a_checkpoint(stub, tmp_path):
    settings = {"hyper": {"learning_rate": RATES}, "seeds": 2, "out": tmp_path / "s", **SMALL}
    podracer.sweep("vtrace", "catch", at_once=4, **settings)
    (tmp_path / "s" / "wave-0").mkdir()
    (tmp_path / "s" / "wave-0" / "config.json").write_text("{}")
    stub.clear()
    assert podracer.sweep("vtrace", "catch", at_once=2, **settings).at_once == 2
    assert [call["resume"] for call in stub] == [False] * 5


def test_a_complete_sweep_stays_complete_whatever_happens_when_it_is_run_again(stub, tmp_path, monkeypatch):
    settings = {"hyper": {"learning_rate": RATES}, "seeds": 2, "at_once": 2, "out": tmp_path / "s", **SMALL}
    podracer.sweep("vtrace", "catch", **settings)
    before, train = (tmp_path / "s" / "sweep.json").read_bytes(), sweeps.train
    stub.clear()

    def stopped(*arguments, **settings):
        if len(stub) == 2:
            raise podracer.Interrupted(types.SimpleNamespace(summary={"env_steps": 5}), "SIGTERM", "")
        return train(*arguments, **settings)

    monkeypatch.setattr(sweeps, "train", stopped)
    with pytest.raises(podracer.Interrupted):
        podracer.sweep("vtrace", "catch", **settings)
    assert (tmp_path / "s" / "sweep.json").read_bytes() == before


def test_a_sweep_that_is_stopped_keeps_the_waves_before(stub, tmp_path, monkeypatch):
    train = sweeps.train

    def stopped(*arguments, **settings):
        if len(stub) == 2:
            summary = {"env_steps": 5, "complete": False}
            raise podracer.Interrupted(types.SimpleNamespace(summary=summary), "SIGTERM", "")
        return train(*arguments, **settings)

    monkeypatch.setattr(sweeps, "train", stopped)
    settings = {"hyper": {"learning_rate": RATES}, "seeds": 2, "at_once": 2, "out": tmp_path / "s", **SMALL}
    with pytest.raises(podracer.Interrupted, match="the same sweep goes on from there") as error:
        podracer.sweep("vtrace", "catch", **settings)
    assert error.value.signal == "SIGTERM"
    stored = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert not stored["complete"]
    assert stored["best"] is None
    assert [row["hyper"]["learning_rate"] for row in stored["rows"]] == [1e-3, 1e-4]


def test_a_list_of_tasks_may_have_a_preset(stub):
    tasks = ["pendulum", "pendulum"]
    podracer.sweep("sac", tasks, preset="td3", hyper={"learning_rate": [1e-3]}, total_steps=400, progress=False)
    assert [call["preset"] for call in stub] == ["td3", "td3"]
    with pytest.raises(ValueError, match="needs an agent and an environment by name"):
        podracer.sweep("sac", envs_jax.make("pendulum"), preset="td3", hyper={"learning_rate": [1e-3]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"hyper": {"rollout_length": [5, 10]}},
            "a sweep varies tunable numbers .*Start a sweep for each value of roll",
        ),
        ({"hyper": {"num_envs": [5, 10]}}, "Start a sweep for each value of num_envs, or .*podracer suite"),
        ({"hyper": {"lr": [1, 2]}}, "hyper.'lr'.: not a tunable number of VTraceConfig; did you mean 'learning_rate'"),
        ({"hyper": {"learning_rate": [1e-3, -1.0]}}, "must be at least 0.0"),
        ({"hyper": {"learning_rate": [1e-3]}, "population": 4}, "population is not for a sweep: members="),
        ({"hyper": {"learning_rate": [1e-3]}, "resume": True}, "resume is not for a sweep: "),
        ({"hyper": {"learning_rate": [1e-3]}, "at_once": 0}, "at_once=0: must be at least 1"),
        ({"hyper": {"learning_rate": [1e-3]}, "at_once": 2, "arch": "sebulba"}, "at_once=2: Sebulba trains one member"),
    ],
)
def test_what_is_no_sweep(settings, message, stub, tmp_path):
    with pytest.raises(ValueError, match=message):
        podracer.sweep("vtrace", "catch", out=tmp_path / "s", **SMALL | settings)
    assert not stub
    assert not (tmp_path / "s").exists()


def test_configurations_with_a_diverged_member_are_last_and_those_without_a_score_the_very_last():
    trained = [
        table.Trained(Member(i, seed), score, 1.0, "")
        for i, pair in enumerate([(None, None), (1.0, None), (0.5, 0.3), (0.6, 0.4)])
        for seed, score in enumerate(pair)
    ]
    rows = table.rows([{"discount": 0.1 * i} for i in range(4)], trained)
    assert [row.hyper["discount"] for row in rows] == pytest.approx([0.3, 0.2, 0.1, 0.0])
    assert "1 of 2 diverged" in table.text(rows)


def test_an_interval_is_students():
    scores = [0.3, 0.9, 0.4]
    expected = stats.t.interval(0.95, 2, np.mean(scores), stats.sem(scores))
    assert table.interval(scores) == pytest.approx(expected)
    assert table.interval([1.0]) is None


def scores(swept):
    return {(row.hyper["learning_rate"], seed): x for row in swept.rows for seed, x in zip(row.seeds, row.scores)}


GRID = {"hyper": {"learning_rate": RATES[1:3]}, "seeds": 3, **SMALL}


@pytest.fixture(scope="module")
def programs():
    """The programs that were compiled, as text."""
    texts, start_step = [], runner.start_step

    def recorded(program, state=None, finish=False):
        like = program.like() if state is None else state
        texts.append(program.step.lower(like, program.like_limits()).as_text())
        return start_step(program, state, finish)

    with mock.patch.object(runner, "start_step", recorded):
        yield texts


@pytest.fixture(scope="module")
def waves(programs, tmp_path_factory):
    """Six members, in three waves of two; the second one has seeds 2 and 0."""
    return podracer.sweep("vtrace", "catch", at_once=2, out=tmp_path_factory.mktemp("waves") / "s", **GRID)


@pytest.mark.slow
@pytest.mark.nightly
def test_waves_have_one_program(waves, programs):
    """So the cache of compilations has it from the second wave on."""
    assert len(programs) >= 3
    assert len(set(programs[:3])) == 1


@pytest.mark.slow
def test_members_of_waves_are_single_runs_of_their_numbers_and_seeds(waves):
    of_wave, checked = podracer.load(waves.out / "wave-1"), 0
    for row in waves.rows:
        for seed, found, run in zip(row.seeds, row.scores, row.runs):
            name, _, member = run.partition(":")
            if name != "wave-1":
                continue
            single = podracer.train("vtrace", "catch", seed=seed, hyper=row.hyper, **SMALL)
            assert single.summary["eval_return_mean"] == found
            jax.tree.map(
                lambda a, b, i=int(member): np.testing.assert_allclose(a[i], b[0], rtol=1e-6, atol=1e-6),
                of_wave.learner.params,
                single.learner.params,
            )
            checked += 1
    assert checked == 2


@pytest.mark.slow
@pytest.mark.nightly
def test_waves_together_are_one_wave(waves, tmp_path):
    one = podracer.sweep("vtrace", "catch", at_once=64, out=tmp_path / "s", **GRID)
    assert scores(one) == scores(waves)
    assert one.best == waves.best
    assert one.fresh.scores == waves.fresh.scores


@pytest.mark.slow
@pytest.mark.nightly
def test_a_signal_in_the_middle_changes_nothing(waves, tmp_path):
    rows = []

    def log(env_steps, row):
        rows.append(row)
        if (tmp_path / "s" / "wave-1" / "config.json").exists() and env_steps > 100:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(podracer.Interrupted, match="the same sweep goes on"):
        podracer.sweep("vtrace", "catch", at_once=2, out=tmp_path / "s", log=log, **GRID)
    assert rows
    assert json.loads((tmp_path / "s" / "wave-0" / "summary.json").read_text())["complete"]
    assert not json.loads((tmp_path / "s" / "wave-1" / "summary.json").read_text())["complete"]
    again = podracer.sweep("vtrace", "catch", at_once=2, out=tmp_path / "s", **GRID)
    assert scores(again) == scores(waves)
    assert again.fresh.scores == waves.fresh.scores
