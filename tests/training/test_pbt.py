"""Population based training of whole runs: what decides it is in the state, however a run is cut, stopped or spread."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pytest

import podracer
from podracer.anakin import runner
from podracer.run import generation_rows as generations
from podracer.training import train
from tests.support import harness

pytestmark = pytest.mark.slow

MEMBERS, LANES, LENGTH = 4, 16, 9
INTERVAL = 10 * LANES * LENGTH
TOTAL_STEPS = 8 * INTERVAL
RATES = np.array([3e-3, 1e-2, 3e-2, 1e30], np.float32)
"""Learning rates of the members; the last one leaves no finite numbers in parameters and memory."""

PBT = podracer.PBT(
    INTERVAL, burn_in=2 * INTERVAL, fraction=0.5, min_episodes=3, hyper=("learning_rate", "entropy_cost")
)


def run(run_dir, **others):
    """A run of small recurrent members on catch, with an evaluation at every generation."""
    return podracer.train(
        "vtrace",
        "catch",
        **{
            "config": {
                **{"hidden_sizes": (8,), "core": "lstm", "core_size": 4, "rollout_length": LENGTH},
                **{"learning_rate_schedule": "constant"},
            },
            "hyper": {"learning_rate": RATES},
            "pbt": PBT,
            "total_steps": TOTAL_STEPS,
            "num_envs": LANES,
            "population": MEMBERS,
            "seed": 3,
            "eval_episodes": 4,
            "eval_every": INTERVAL,
            "checkpoint_every": 3 * INTERVAL,
            "keep_checkpoints": 50,
            "run_dir": run_dir,
            "progress": False,
            **others,
        },
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that nothing happened to, and its rows."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    return run(run_dir), list(generations.read(run_dir / generations.FILE))


def assert_same(result, undisturbed):
    reference, rows = undisturbed
    harness.assert_same(result.learner, reference.learner)
    assert list(generations.read(result.run_dir / generations.FILE)) == rows
    evaluations = lambda one: [  # noqa: E731
        {name: row[name] for name in row if not name.startswith("time/")}
        for row in one.history
        if "eval/return_mean" in row
    ]
    assert evaluations(result) == evaluations(reference)


def test_replaying_the_rows_gives_the_last_numbers(undisturbed):
    result, rows = undisturbed
    assert [row["member"] for row in rows] == list(range(MEMBERS)) * (len(rows) // MEMBERS)
    assert rows[-1]["generation"] == 5, "from the burn-in's end on, and none at the last step"
    entropy_cost = np.float32(result.agent.config.entropy_cost)
    numbers = [{"learning_rate": rate, "entropy_cost": entropy_cost} for rate in RATES]
    for start in range(0, len(rows), MEMBERS):
        after = []
        for row in rows[start : start + MEMBERS]:
            assert row["copied"] == (row["parent"] != row["member"])
            parent = numbers[row["parent"]]
            for name, value in parent.items():
                factors = (1.2, 1 / 1.2) if row["copied"] else (1.0,)
                assert row[f"hyper/{name}"] in {float(value * np.float32(factor)) for factor in factors}
            after.append({name: np.float32(row[f"hyper/{name}"]) for name in parent})
        numbers = after
    for member, last in enumerate(numbers):
        summary = result.summary["members"][member]
        assert {name: summary[name] for name in last} == {name: float(value) for name, value in last.items()}
        assert {name: result.learner.hyper[name][member] for name in last} == last
    untouched = set(result.agent.hyper) - {"learning_rate", "entropy_cost"}
    for name in untouched:
        assert (np.asarray(result.learner.hyper[name]) == np.float32(result.agent.hyper[name])).all()


def test_a_member_that_diverges_is_replaced(undisturbed):
    result, rows = undisturbed
    assert "fitness" not in rows[3], "it has not diverged"
    assert rows[3]["copied"]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.learner.params))
    assert not any(member["diverged"] for member in result.summary["members"])


def test_a_member_that_cannot_learn_is_replaced(tmp_path):
    config = {"hidden_sizes": (8,), "rollout_length": LENGTH, "learning_rate_schedule": "constant"}
    burn_in = 24_000  # which the others need to learn
    settings = {
        "config": config,
        "hyper": {"learning_rate": [1e-2, 1e3, 2e-2, 2e-2]},
        "total_steps": burn_in + INTERVAL,
    }
    result = run(tmp_path / "run", pbt=dataclasses.replace(PBT, fraction=0.25, burn_in=burn_in), **settings)
    row = list(generations.read(tmp_path / "run" / generations.FILE))[1]
    assert (row["generation"], row["copied"]) == (0, True)
    assert result.summary["members"][1]["learning_rate"] < 0.1


def test_rows_of_metrics_have_the_numbers(undisturbed):
    result, rows = undisturbed
    trained = [row for row in result.history if "loss/total" in row or "episode/return" in row]
    for row in trained:
        before = [r for r in rows if r["member"] == row["member"] and r["env_steps"] < row["env_steps"]]
        expected = before[-1]["hyper/learning_rate"] if before else float(RATES[row["member"]])
        assert row["hyper/learning_rate"] == expected


def test_calls_of_one_update_change_nothing(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SECONDS_PER_CALL", 0.0)  # one update each
    result = run(tmp_path / "run")
    assert_same(result, undisturbed)


@pytest.mark.parametrize(
    ("where", "generation"),
    [
        *(("at its end", 1), ("within it", 3)),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("within it", 1), ("at its end", 3))),
    ],
)
def test_stopped_and_resumed_is_the_same(where, generation, undisturbed, tmp_path):
    steps = PBT.milestone(generation) + (0 if where == "at its end" else INTERVAL // 2)
    wanted = "eval/return_mean" if where == "at its end" else "loss/total"
    run_dir = tmp_path / "run"
    with mock.patch.object(runner, "SECONDS_PER_CALL", 0.0):
        stopped = run(run_dir, log=lambda env_steps, row: wanted in row and env_steps >= steps)
    assert not stopped.summary["complete"]
    done = {row["generation"] for row in generations.read(run_dir / generations.FILE)}
    assert done == set(range(generation + 1))
    assert_same(podracer.resume(run_dir, progress=False), undisturbed)


def test_rows_after_the_checkpoint_of_a_killed_run_are_written_again(undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed[0].run_dir, run_dir)
    (run_dir / "summary.json").unlink()
    # One that was written at the end of a generation, which is to be ended again.
    checkpoints = {int(path.name): path for path in (run_dir / "checkpoints").iterdir()}
    kept = min(steps for steps in checkpoints if steps >= PBT.milestone(1))
    assert {row["env_steps"] for row in undisturbed[1] if row["generation"] == 1} == {kept}
    for steps in checkpoints.keys() - {kept}:
        shutil.rmtree(checkpoints[steps])
    shutil.rmtree(run_dir / "best")
    with (run_dir / generations.FILE).open("a") as file:
        file.write('{"generation": 6, "mem')
    assert_same(podracer.resume(run_dir, progress=False), undisturbed)


def test_checkpoints_without_evolution_are_restored(tmp_path):
    plain = {"pbt": None, "total_steps": 2 * INTERVAL, "checkpoint_every": INTERVAL}
    result = run(tmp_path / "run", **plain)
    assert not (tmp_path / "run" / generations.FILE).exists()
    assert "pbt" not in result.description
    assert "hyper/learning_rate" not in result.history[0]
    podracer.resume(tmp_path / "run", total_steps=3 * INTERVAL, progress=False)
    with pytest.raises(ValueError, match="pbt: absent"):
        run(tmp_path / "run", resume=True, total_steps=3 * INTERVAL)


@pytest.mark.nightly
def test_devices_change_neither_parents_nor_numbers(tmp_path):
    code = (
        "import jax, pathlib; jax.config.update('jax_num_cpu_devices', 4); from tests.training import test_pbt; "
        f"test_pbt.on_devices(pathlib.Path({str(tmp_path)!r}))"
    )
    root = str(pathlib.Path(__file__).parents[2])
    environment = os.environ | {"NPROC": "32", "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two, four = (json.loads((tmp_path / f"{devices}.json").read_text()) for devices in (1, 2, 4))
    for other in (two, four):
        for a, b in zip(one, other, strict=True):
            assert a | {"fitness": None} == b | {"fitness": None}
            np.testing.assert_allclose(a.get("fitness", np.nan), b.get("fitness", np.nan), rtol=1e-5)


def on_devices(directory):
    """Runs the same population on 1, 2 and 4 devices; called in another process."""
    for devices in (1, 2, 4):
        with mock.patch.object(train, "_devices", functools.partial(jax.local_devices().__getitem__, slice(devices))):
            result = run(directory / f"run-{devices}", num_shards=1)
        mesh = jax.tree.leaves(result.learner.params)[0].sharding.mesh
        assert dict(mesh.shape) == {"population": devices, "data": 1}
        rows = list(generations.read(directory / f"run-{devices}" / generations.FILE))
        (directory / f"{devices}.json").write_text(json.dumps(rows))
