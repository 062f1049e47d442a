"""The lineage of a population: ancestors, and the curve that is traced back through them."""

import json

import numpy as np
import pytest

from podracer.result import lineage

PARENTS = [[0, 0, 2], [0, 1, 1], [2, 1, 2]]
"""Member 0 comes from 2, that from 1, and that from 0."""


@pytest.fixture
def run_dir(tmp_path):
    """Three generations of three members, each of five updates and 50 steps; a return says who played it and when."""
    rows = []
    for g, parents in enumerate(PARENTS):
        for member, parent in enumerate(parents):
            row = {"env_steps": 50 * (g + 1), "updates": 5 * (g + 1), "generation": g, "member": member}
            rows.append(row | {"parent": parent, "hyper/learning_rate": 10.0 * (g + 1) + member})
    (tmp_path / "pbt.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    description = dict.fromkeys(("podracer", "env_options", "own"), "")
    description |= {"agent": "ppo", "env": "catch", "agent_config": {"learning_rate": 0.5}}
    description |= {"hyper": {"learning_rate": [0.0, 1.0, 2.0]}, "pbt": {"hyper": ["learning_rate"]}}
    description["run"] = {"population": 3, "total_steps": 200, "seed": 0}
    (tmp_path / "config.json").write_text(json.dumps(description))
    history = [
        {
            "env_steps": 10 * update + member,
            "updates": update,
            "member": member,
            "episode/return": 100 * update + member,
        }
        for update in range(1, 21)
        for member in range(3)
    ]
    history += [
        {"env_steps": 200, "updates": 20, "member": i, "eval/return_mean": value} for i, value in enumerate((9, 1, 3))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    return tmp_path


def test_ancestors_and_their_curve(run_dir):
    history = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = lineage.read(run_dir, history)
    assert found.best == 0
    np.testing.assert_array_equal(found.ancestors(0), [0, 1, 2, 0])
    np.testing.assert_array_equal(found.ancestors(1), [0, 1, 1, 1])
    np.testing.assert_array_equal(found.numbers["learning_rate"], [[0, 1, 2], [10, 11, 12], [20, 21, 22], [30, 31, 32]])
    players = np.repeat([0, 1, 2, 0], 5)
    updates = np.arange(1, 21)
    curve = np.stack([10 * updates + players, 100 * updates + players], axis=1)
    np.testing.assert_array_equal(lineage.traced_back(found, history), curve)


def test_a_damaged_line_costs_one_row(run_dir, capsys):
    path = run_dir / "pbt.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], "{damaged\n", *lines[5:]]))
    found = lineage.read(run_dir, [])
    assert "pbt.jsonl: line 5 is damaged and left out" in capsys.readouterr().err
    np.testing.assert_array_equal(found.parents, PARENTS)  # member 1 has kept its weights
    np.testing.assert_array_equal(found.numbers["learning_rate"][:, 1], [1, 11, 11, 31])
    np.testing.assert_array_equal(found.env_steps, [50, 100, 150])


def test_generations_after_the_evaluation_are_no_ancestry_of_what_was_evaluated(run_dir):
    found = lineage.read(run_dir, [{"env_steps": 100, "updates": 10, "member": 0, "eval/return_mean": 1.0}])
    np.testing.assert_array_equal(found.ancestors(0), [0, 0, 0, 0])  # by the first generation alone
    np.testing.assert_array_equal(found.ancestors(1), [0, 1, 1, 1])


def test_a_picture_is_drawn(run_dir):
    assert lineage.picture(run_dir, run_dir / "pbt.png").stat().st_size > 10_000
    (run_dir / "pbt.jsonl").unlink()
    with pytest.raises(ValueError, match="has no generations"):
        lineage.picture(run_dir, run_dir / "pbt.png")
