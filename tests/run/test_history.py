"""Rows of metrics in memory and in their file: bounded, evenly thinned, and read back line by line."""

import json

import numpy as np
import pytest

from podracer.run import metrics
from podracer.run.history import MAX_ROWS, History


def row(updates, evaluation=None, **more):
    value = {"loss/total": float(updates)} if evaluation is None else {"eval/return_mean": float(evaluation)}
    return {"env_steps": 10 * updates, "updates": updates, **value, **more}


def test_a_long_run_keeps_an_even_part_of_its_rows():
    kept = History(limit=1000)
    best, lengths = 12_340, []
    for i in range(1, 50_001):
        kept.add(row(i))
        if i % 10 == 0:
            kept.add(row(i, evaluation=1e9 if i == best else i))
        lengths.append(len(kept.rows))
    assert max(lengths) == 1000
    training = [one["updates"] for one in kept.rows if "loss/total" in one]
    evaluations = [one["updates"] for one in kept.rows if "eval/return_mean" in one]
    assert training[-1] == evaluations[-1] == 50_000
    assert best in evaluations
    assert [one["env_steps"] for one in kept.rows] == sorted(one["env_steps"] for one in kept.rows)
    assert np.diff(training).max() <= 256, "no part of the run is without rows"
    short = [row(i) for i in range(MAX_ROWS)]
    assert metrics.history(short) == short, "and a short one keeps all"


def test_members_keep_rows_of_the_same_updates():
    kept = History(limit=100)
    for i in range(1, 5001):
        for member in range(3):
            kept.add(row(i, member=member))
    assert len(kept.rows) <= 600
    updates = [[one["updates"] for one in kept.rows if one["member"] == member] for member in range(3)]
    assert updates[0] == updates[1] == updates[2]
    assert updates[0][-1] == 5000


def test_a_log_keeps_few_rows_and_its_file_all(tmp_path, monkeypatch):
    monkeypatch.setattr(History.__init__, "__defaults__", (50,))
    log = metrics.Log(tmp_path)
    for i in range(500):
        log.write(row(i))
    log.close()
    assert len(log.rows) <= 200
    assert len(metrics.read(tmp_path / "metrics.jsonl")) == 500
    again = metrics.Log(tmp_path, resume_at=(300, [3000]))
    again.close()
    assert len(again.rows) <= 200
    assert [one["updates"] for one in metrics.read(tmp_path / "metrics.jsonl")] == list(range(301))


def test_rows_of_members_are_cut_at_their_own_steps():
    """With replay many steps have one update. Evaluations have the steps of the member with the fewest."""
    training = [
        {"env_steps": 100 * i + 5 * member, "updates": 0, "member": member, "time/train_seconds": 0.0}
        for i in range(5)
        for member in range(2)
    ]
    evaluations = [{"env_steps": steps, "updates": 0, "member": member} for steps in (200, 204) for member in range(2)]
    kept = list(metrics.until([*training, *evaluations], 0, [200, 205]))
    assert kept == [*training[:6], *evaluations[:2]]


@pytest.mark.parametrize("damage", ['{"env_steps": 20, "upda', "\x00\x00", "[1]", '{"a": 1}'])
def test_lines_that_are_damaged_are_said(damage, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(row(1)), damage, json.dumps(row(3))]
    path.write_text("\n".join(lines) + '\n{"env_steps": 40, "upda')
    log = metrics.Log(tmp_path, resume_at=(9, [90]))
    log.close()
    assert log.notes == [f"{path}: line 2 is damaged and left out; the other rows are read."]
    assert [one["updates"] for one in metrics.read(path)] == [one["updates"] for one in log.rows] == [1, 3]
    assert capsys.readouterr().err == "", "what a kill cut off at the end is no damage, and now it is gone"
    path.write_text("\n".join([damage, *lines]) + "\n")
    assert len(metrics.read(path)) == 2
    assert f"{path}: line 1 and 1 more is damaged" in capsys.readouterr().err
