"""Runs with several members."""

import dataclasses
import json
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer.evaluation import evaluation
from podracer.run.config import RunConfig
from podracer.training import resolve
from tests.support.harness import assert_same
from tests.support.small_run import rows_of, train


@pytest.fixture(scope="module")
def population(tmp_path_factory):
    rates = np.asarray([1e-4, 1e-3, 1e-2], np.float32)
    return train(tmp_path_factory.mktemp("population") / "run", seed=7, hyper={"learning_rate": rates}), rates


@pytest.mark.slow
def test_a_population_reports_every_member(population):
    result, rates = population
    assert result.population == 3, "as many as there are learning rates"
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert [member["seed"] for member in summary["members"]] == [7, 8, 9]
    assert [member["learning_rate"] for member in summary["members"]] == pytest.approx(rates)
    means = [member["eval_return_mean"] for member in summary["members"]]
    assert summary["eval_return_mean"] == pytest.approx(np.mean(means))
    assert means[summary["best_member"]] == max(means)
    for member in range(3):
        rows = [row for row in rows_of(result.run_dir) if row["member"] == member]
        assert [row["updates"] for row in rows if "loss/total" in row][-1] == summary["updates"]
        assert [row for row in rows if "eval/return_mean" in row][-1]["eval/return_mean"] == means[member]
        first = next(row for row in rows if "grad/learning_rate" in row)
        assert first["grad/learning_rate"] == pytest.approx(rates[member], rel=0.05)
    assert (result.run_dir / "curve.png").exists()


def test_one_default_member_everywhere(population):
    """The best one, named as such; figures of the run are those of all of its members."""
    result, _ = population
    summary, again = result.summary, podracer.load(result.run_dir)
    means = [member["eval_return_mean"] for member in summary["members"]]
    assert summary["eval_return_mean"] == pytest.approx(np.mean(means))
    assert summary["eval_return_std"] == pytest.approx(np.std(means, ddof=1))
    assert summary["eval_return_range"] == [min(means), max(means)]
    best = int(np.argmax(means))
    assert result.best_member == summary["best_member"] == again.best_member == best
    assert again.evaluate(16, seed=7 + best).mean == means[best]
    board = np.zeros((10, 5), np.float32)
    assert again.policy(board) == again.policy(board, member=best) == again.actor()(board)
    assert_same(again.actor_params(), again.actor_params(best))


def test_members_can_be_used(population):
    result, rates = population
    again = podracer.load(result.run_dir)
    assert_same(again.learner, result.learner)
    for member in range(3):
        evaluation = again.evaluate(16, seed=7 + member, member=member)
        assert evaluation.mean == result.summary["members"][member]["eval_return_mean"]
        again.policy(np.zeros((10, 5)), member=member)
    assert jax.tree.leaves(result.actor_params(1).params)[0].ndim == jax.tree.leaves(result.learner.params)[0].ndim - 1
    with pytest.raises(ValueError, match="members 0 to 2"):
        result.evaluate(4, member=3)
    np.testing.assert_array_equal(np.asarray(again.learner.hyper["learning_rate"]), rates)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"learning_rate": [1e-3, 1e-4]}, "give one number, or 3 numbers"),
        ({"learning_rat": 1e-3}, "did you mean 'learning_rate'"),
        ({"learning_rate": [1e-3, 1e-4, -1.0]}, "must be at least 0"),
        ({"learning_rate": ["a", "b", "c"]}, "give one number, or 3"),
        ({"rollout_length": [5, 6, 7]}, "not a tunable number"),
    ],
)
def test_wrong_hyper(hyper, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "run", population=3, hyper=hyper)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "value", [np.float32(0.5), jnp.float32(0.5), jnp.full(3, 0.5), (0.5, 0.5, 0.5), math.inf, [math.inf, 1, 2]]
)
def test_any_kind_of_number_can_be_stored(value):
    run = RunConfig(population=3)
    parts = resolve.resolve("vtrace", "catch", run, hyper={"max_grad_norm": value})
    stored = json.loads(json.dumps(parts.description, allow_nan=False))
    assert stored == parts.description
    again = np.asarray(stored["hyper"]["max_grad_norm"], np.float64)
    np.testing.assert_array_equal(np.broadcast_to(again, 3), parts.hyper["max_grad_norm"])


def test_a_population_keeps_all_its_rows(population, tmp_path):
    """Members may be at different steps."""
    result, rates = population
    run_dir = pathlib.Path(shutil.copytree(result.run_dir, tmp_path / "run"))
    rows = rows_of(run_dir)
    for row in rows:
        if "loss/total" in row:
            row["env_steps"] -= row["member"]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = train(run_dir, population=3, seed=7, hyper={"learning_rate": rates}, resume=True)
    assert again.history == rows
    assert podracer.load(run_dir).history == rows


@pytest.mark.slow
def test_one_member_may_diverge(tmp_path, capsys, monkeypatch):
    """A learning rate that is far too large for one member stops neither the others nor the run, and is said once.

    What a policy that is not a number does may look good: here it scores best.
    """
    play = evaluation.Evaluator.__call__

    def flattered(self, *arguments):
        results = play(self, *arguments)
        results[1] = dataclasses.replace(results[1], returns=results[1].returns + 10)
        return results

    monkeypatch.setattr(evaluation.Evaluator, "__call__", flattered)
    rates = [1e-3, 1e38, 1e-3]
    result = train(tmp_path / "run", population=3, hyper={"learning_rate": rates}, progress=True)
    finite = [all(np.isfinite(x[i]).all() for x in jax.tree.leaves(result.learner.params)) for i in range(3)]
    assert finite == [True, False, True]
    assert capsys.readouterr().err.count("member 1 (seed 1) has diverged") == 1
    assert [member["diverged"] for member in result.summary["members"]] == [False, True, False]
    assert result.summary["best_member"] != 1
    json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)
