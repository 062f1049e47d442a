"""Population based training among runs: what is written, who is copied, who is passed over, and a run of Sebulba."""

import json
import pathlib
import shutil
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer.agents import VTraceConfig
from podracer.learning.counter import Counter
from podracer.run.driver import Progress, RunState
from podracer.topology import here
from podracer.training import exchange
from podracer.types import LearnerState

PBT = {"interval": 100, "rule": "impala", "score": (0.0, 10.0), "min_episodes": 4, "probability": 1.0}
PBT |= {"hyper": ("learning_rate", "entropy_cost")}


def state_of(value, rate=1e-3, updates=7):
    """A state all of whose parameters are one number."""
    lead = lambda x: jnp.asarray(x)[None]  # noqa: E731
    learner = LearnerState(
        params={"w": jnp.full((1, 2, 3), value)},
        opt_state=(jnp.full((1, 3), 10 * value),),
        num_updates=lead(jnp.int32(updates)),
        hyper={
            n: lead(jnp.float32(x)) for n, x in {"learning_rate": rate, "entropy_cost": 0.5, "discount": 0.9}.items()
        },
        aux=jnp.full((1, 1), -value),
    )
    return RunState(learner, (), jax.tree.map(lead, Counter.of(100)), ())


class Runs:
    """Members of one directory, made as a session makes them."""

    def __init__(self, root):
        self.root, self.lines, self.members = root, [], {}

    def member(self, name, returns, state, count=4, agent="vtrace", **settings):
        """A member whose window has so many episodes of such returns."""
        pbt = podracer.PBT(**PBT | settings)
        description = {"agent": agent, "agent_config": {}, "env": "catch", "env_options": {}, "own": []}
        description |= {"run": {"seed": len(self.members), "total_steps": 1000, "num_envs": 8}, "hyper": {}}
        run = types.SimpleNamespace(total_steps=1000, seed=0)
        experiment = types.SimpleNamespace(
            pbt=pbt,
            pbt_dir=self.root / "population",
            run=run,
            agent=types.SimpleNamespace(config=VTraceConfig()),
            description=description,
        )
        (self.root / name).mkdir(exist_ok=True)
        made = exchange.Exchange(experiment, self.root / name, state, self.lines.append)  # type: ignore[arg-type]
        self.members[name] = made
        self.play(name, returns, count)
        assert not made.is_due(0)
        return made

    def play(self, name, returns, count=4):
        found = {"episode/count": np.array([float(count)]), "episode/return": np.array([returns])}
        self.members[name].add(Progress(0, 0, found, np.zeros(1), 0.0, 0))

    def rows(self, name):
        return [json.loads(line) for line in (self.root / name / exchange.ROWS).read_text().splitlines()]

    def close(self):
        for member in self.members.values():
            member.close()


@pytest.fixture
def runs(tmp_path):
    found = Runs(tmp_path)
    yield found
    found.close()


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_the_worse_run_goes_on_with_the_better_ones_learner_and_varies_its_numbers(runs):
    good, bad = state_of(1.0, rate=1e-2, updates=50), state_of(2.0)
    first, second = runs.member("good", 8.0, good), runs.member("bad", 3.0, bad)
    assert first.is_due(100)
    same(first.evolve(good, 100).learner.params, good.learner.params)  # there is nobody yet
    after = second.evolve(bad, 150).learner
    same((after.params, after.opt_state, after.aux), (good.learner.params, good.learner.opt_state, good.learner.aux))
    assert int(after.num_updates[0]) == 7, "a counter is a member's own"
    factor = float(after.hyper["learning_rate"][0]) / 1e-2
    assert factor == pytest.approx(1.2) or factor == pytest.approx(1 / 1.2)
    assert float(after.hyper["discount"][0]) == pytest.approx(0.9)
    (row,) = runs.rows("bad")
    assert (row["copied"], row["other"], row["other_env_steps"], row["env_steps"]) == (True, "good", 100, 150)
    assert (row["fitness"], row["other_fitness"]) == (pytest.approx(0.3), pytest.approx(0.8))
    assert row["hyper/learning_rate"] == pytest.approx(float(second.hyper["learning_rate"][0]))
    assert any(
        "goes on with good, whose score is 0.800 at 100 steps, and was 0.300 here" in line for line in runs.lines
    )
    runs.play("good", 8.0)
    kept = first.evolve(good, 200).learner
    same(kept.params, good.learner.params)
    assert float(kept.hyper["learning_rate"][0]) != pytest.approx(1e-2), "whoever copies nobody varies its numbers too"


def test_a_score_within_the_threshold_is_not_copied(runs):
    runs.member("a", 5.4, state_of(1.0)).evolve(state_of(1.0), 100)
    after = runs.member("b", 5.0, state_of(2.0)).evolve(state_of(2.0), 100)
    same(after.learner.params, state_of(2.0).learner.params)
    (row,) = runs.rows("b")
    assert (row["copied"], row["other"]) == (False, "a")


def test_returns_that_are_not_finite_are_the_worst_score_and_are_not_offered(runs):
    good, bad = state_of(1.0), state_of(2.0)
    runs.member("good", 1.0, good).evolve(good, 100)
    after = runs.member("bad", float("nan"), bad).evolve(bad, 100)
    same(after.learner.params, good.learner.params)
    (row,) = runs.rows("bad")
    assert row["copied"]
    assert "fitness" not in row
    assert not (runs.root / "population" / "bad" / exchange.SCORE).exists()


def test_too_few_episodes_are_counted_on(runs):
    member = runs.member("a", 4.0, state_of(1.0), count=3)
    assert member.evolve(state_of(1.0), 100).learner.hyper == state_of(1.0).learner.hyper
    assert not (runs.root / "population" / "a" / exchange.SCORE).exists()
    assert not member.is_due(100)
    assert member.is_due(200)
    runs.play("a", 8.0, count=1)
    member.evolve(state_of(1.0), 200)
    assert [row["ready"] for row in runs.rows("a")] == [False, True]
    assert runs.rows("a")[1]["fitness"] == pytest.approx(0.5), "(3 * 4 + 8) / 4 of 10"
    runs.play("a", 2.0)
    member.evolve(state_of(1.0), 300)
    assert runs.rows("a")[2]["fitness"] == pytest.approx(0.2), "of the newest generation alone"


@pytest.mark.slow
def test_missing_partial_and_foreign_members_are_passed_over_with_a_line_each(runs):
    population = runs.root / "population"
    for name in ("partial", "unreadable", "missing"):
        runs.member(name, 9.0, state_of(1.0)).evolve(state_of(1.0), 100)
    runs.member("foreign", 9.0, state_of(1.0), agent="ppo").evolve(state_of(1.0), 100)
    (population / "partial" / exchange.SCORE).write_text('{"generation": 1, "fit')
    shutil.rmtree(population / "missing" / "learner-1")
    for file in (population / "unreadable" / "learner-1").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    (population / "empty").mkdir()
    (population / ".writing.partial").mkdir()
    (population / "a file").touch()
    runs.lines.clear()
    member = runs.member("a", 1.0, state_of(2.0))
    same(member.evolve(state_of(2.0), 100).learner.params, state_of(2.0).learner.params)
    said = sorted(line for line in runs.lines if " is passed over: " in line)
    assert [pathlib.Path(line.partition(" is")[0]).name for line in said] == [
        *("empty", "foreign", "missing", "partial", "unreadable")
    ]
    for line, reason in zip(
        said,
        (
            "it has no score.json yet",
            "agent: vtrace -> ppo",
            "learner-1 is missing",
            "cannot be read",
            "cannot be read",
        ),
    ):
        assert reason in line
        assert "\n" not in line
    assert "other" not in runs.rows("a")[0]
    runs.play("a", 1.0)
    count = len(runs.lines)
    member.evolve(state_of(2.0), 200)
    assert len(runs.lines) == count, "each is said once"


def test_numbers_stay_within_their_limits_and_two_learners_are_kept(runs, monkeypatch):
    generator = np.random.default_rng(0)  # its draws go up and down; those of a new one might all go up
    monkeypatch.setattr(np.random, "default_rng", lambda: generator)
    member, state, seen = runs.member("a", 1.0, state_of(1.0), factor=4.0, hyper=("discount",)), state_of(1.0), set()
    for step in range(1, 9):
        runs.play("a", 1.0)
        state = member.evolve(state, 100 * step)
        seen.add(float(state.learner.hyper["discount"][0]))
    assert max(seen) <= 1.0
    assert len(seen) > 1
    kept = sorted(path.name for path in (runs.root / "population" / "a").glob("learner-*"))
    assert kept == ["learner-7", "learner-8"]


def test_a_run_that_goes_on_drops_later_rows_and_what_it_was_writing(runs):
    member, state = runs.member("a", 1.0, state_of(1.0, updates=7)), state_of(1.0, updates=7)
    member.evolve(state, 100)
    runs.play("a", 1.0)
    member.evolve(state_of(1.0, updates=9), 200)
    member.close()
    own, others = (runs.root / "population" / f".{name}.{'0a' * 16}.partial" for name in ("a", "a.b"))
    own.mkdir()
    others.mkdir()
    runs.member("a", 1.0, state)
    assert [row["updates"] for row in runs.rows("a")] == [7]
    assert (own.exists(), others.exists()) == (False, True)


def test_a_population_that_cannot_be_listed_is_passed_over(runs, monkeypatch):
    member = runs.member("a", 1.0, state_of(1.0))
    monkeypatch.setattr(pathlib.Path, "iterdir", mock.Mock(side_effect=OSError("stale")))
    assert member._other(state_of(1.0), np.random.default_rng(0)) is None
    assert [line for line in runs.lines if "population is passed over: it cannot be read (stale)" in line]


def test_a_place_is_one_runs(runs):
    runs.member("a", 1.0, state_of(1.0))
    with pytest.raises(ValueError, match="is in use"):
        runs.member("a", 1.0, state_of(1.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pbt": None}, "pbt_dir needs pbt: interval"),
        ({"arch": "anakin"}, "pbt_dir is for runs of Sebulba"),
        ({"pbt_dir": None}, "pbt: only Anakin has populations in one program. Start several runs with a directory"),
        (
            {"pbt": {"interval": 1000}},
            "PBT.rule='truncation' ranks all members, and runs with pbt_dir look at one other",
        ),
        ({"environment": "catch,catch"}, "compare the return of one task, not of 2"),
    ],
)
def test_what_is_refused(settings, message, tmp_path):
    config = {"learning_rate_schedule": "constant"}
    asked = {"arch": "sebulba", "pbt": PBT | {"interval": 1000}, "pbt_dir": tmp_path / "population", "num_envs": 8}
    with pytest.raises(ValueError, match=message):
        podracer.train("vtrace", config=config, **{"environment": "catch"} | asked | settings)
    assert not (tmp_path / "population").exists()


@pytest.mark.slow
def test_a_run_of_sebulba_goes_on_with_what_another_has_learnt(tmp_path):
    """With a learning rate of 0 parameters are those that they began with, or those that were copied."""
    settings = {"arch": "sebulba", "total_steps": 240, "num_envs": 8, "eval_episodes": 4, "progress": False}
    settings |= {"checkpoint_every": 80}
    settings |= {"config": {"rollout_length": 5, "hidden_sizes": (8,), "learning_rate_schedule": "constant"}}
    settings |= {"hyper": {"learning_rate": 0.0}, "pbt_dir": tmp_path / "population"}
    settings |= {"pbt": PBT | {"interval": 80, "score": (-1.0, 1.0), "min_episodes": 1, "hyper": ("entropy_cost",)}}
    first = podracer.train("vtrace", "catch", seed=0, run_dir=tmp_path / "first", **settings)
    path = tmp_path / "population" / "first" / exchange.SCORE
    score = json.loads(path.read_text())
    assert score["generation"] >= 1
    assert score["essence"]["agent"] == "vtrace"
    path.write_text(json.dumps(score | {"fitness": 1.0 + 1e-9 + PBT["interval"]}))
    second = podracer.train("vtrace", "catch", seed=1, run_dir=tmp_path / "second", **settings)
    rows = [json.loads(line) for line in (tmp_path / "second" / exchange.ROWS).read_text().splitlines()]
    assert any(row["copied"] and row["other"] == "first" for row in rows)
    same(here(second.learner.params), here(first.learner.params))
    saved = [row for row in rows if row["ready"] and row["env_steps"] < 240]
    for row in saved:
        number = podracer.load(tmp_path / "second", step=row["env_steps"]).learner.hyper["entropy_cost"]
        assert number == np.float32(row["hyper/entropy_cost"]), "or a run that goes on from there would not have it"
    assert saved
    further = podracer.resume(tmp_path / "second", total_steps=400, progress=False)
    same(here(further.learner.params), here(first.learner.params))
    assert len((tmp_path / "second" / exchange.ROWS).read_text().splitlines()) > len(rows), "it knows its directory"
