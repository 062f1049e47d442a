"""The files, metrics, pictures and summary of a run."""

import itertools
import json
import math

import numpy as np
import pytest
from PIL import Image

from podracer.result import plots
from tests.support.harness import assert_same
from tests.support.small_run import STEPS_PER_UPDATE, SUMMARY_KEYS, rows_of, steps_of, train


def test_summary(finished):
    result, _ = finished
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary == result.summary
    assert set(summary) >= SUMMARY_KEYS
    assert (summary["agent"], summary["env"], summary["arch"]) == ("vtrace", "catch", "anakin")
    assert (summary["torso"], summary["memory"]) == ("mlp", "none")
    assert summary["complete"] is True
    assert summary["updates"] == math.ceil(2000 / STEPS_PER_UPDATE), "it stops at the first update past total_steps"
    assert summary["env_steps"] == summary["updates"] * STEPS_PER_UPDATE
    assert summary["eval_episodes"] == 16
    assert summary["train_seconds"] > 0
    assert summary["steps_per_second"] == pytest.approx(summary["env_steps"] / summary["train_seconds"])


def test_config_is_resolved(finished):
    config = json.loads((finished[0].run_dir / "config.json").read_text())
    assert config == finished[0].description
    assert config["agent_config"]["hidden_sizes"] == [8]
    assert config["env_options"] == {"rows": 10, "columns": 5}
    assert config["own"] == []
    assert config["run"] == {
        **{"total_steps": 2000, "seed": 0, "num_envs": 8, "num_shards": 1, "population": 1, "reset_pool": None},
        "member_seeds": [],
        **{
            "mode": "async",
            "replicas": None,
            "actor_devices": None,
            "actor_threads": 1,
            "reanalyser_devices": 0,
            "prepare_ahead": True,
            "updates_per_batch": 1,
            "queue_capacity": 1,
        },
        **{
            "env_timeout": 60.0,
            "env_restarts": 0,
            "checkpoint_replay": True,
            "replay_memory": "device",
            "updates_per_call": None,
            "final_updates": 0,
        },
        **{
            "arch": "anakin",
            "eval_every": 500,
            "eval_episodes": 16,
            "checkpoint_every": 500,
            "checkpoint_minutes": 15.0,
        },
        "keep_checkpoints": 3,
    }


def test_metrics(finished):
    result, calls = finished
    rows = rows_of(result.run_dir)
    assert rows == result.history
    assert [(row["env_steps"], row) for row in rows] == calls
    assert all(isinstance(value, int | float) and math.isfinite(value) for row in rows for value in row.values())
    training = [row for row in rows if "loss/total" in row]
    assert {"env_steps", "updates", "loss/value", "policy/entropy", "episode/return", "episode/length"} <= set(
        training[0]
    )
    assert {"time/steps_per_second", "time/train_seconds"} <= set(training[0])
    cpu = [row["time/cpu_seconds"] for row in training]
    assert all(0 < before < after for before, after in itertools.pairwise(cpu))
    assert cpu[-1] == result.summary["cpu_seconds"]
    updates = [row["updates"] for row in training]
    assert updates == sorted(set(updates))
    assert updates[-1] == result.summary["updates"]
    assert all(row["env_steps"] == row["updates"] * STEPS_PER_UPDATE for row in rows)
    assert sum(row["episode/count"] for row in training) == result.summary["updates"] * 8
    assert {row["episode/length"] for row in training if row["episode/count"]} == {9}


def test_evaluations_come_when_they_should(finished):
    evaluations = [row for row in finished[0].history if "eval/return_mean" in row]
    assert [row["env_steps"] for row in evaluations] == [504, 1008, 1512, 2016]  # the first updates past 500, 1000, ...
    assert evaluations[-1]["eval/return_mean"] == finished[0].summary["eval_return_mean"]


def test_checkpoints_come_when_they_should(finished):
    assert steps_of(finished[0].run_dir) == [1008, 1512, 2016]  # keep_checkpoints=3


def test_tensorboard(finished):
    from tensorboardX.proto import event_pb2
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    (file,) = (finished[0].run_dir / "tensorboard").iterdir()
    data, values, others = file.read_bytes(), {}, {}
    while data:  # length, checksum of it, event, checksum of it
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                values[value.tag, event.step] = value.simple_value
            else:
                others[value.tag] = value
        data = data[16 + size :]
    expected = {
        (name, row["env_steps"]): value for row in finished[0].history for name, value in row.items() if "/" in name
    }
    assert values == pytest.approx(expected, rel=1e-6)
    (table,) = others["configuration/text_summary"].tensor.string_val
    assert {"|agent|vtrace|", "|run.seed|0|", "|agent_config.hidden_sizes|[8]|"} <= set(table.decode().splitlines())
    data = others["_hparams_/session_start_info"].metadata.plugin_data
    assert data.plugin_name == "hparams"
    settings = HParamsPluginData.FromString(data.content).session_start_info.hparams
    assert settings["agent_config.discount"].number_value == 0.99
    assert settings["env"].string_value == "catch"
    assert settings["run.checkpoint_replay"].bool_value is True


def test_curve(finished, tmp_path):
    with Image.open(finished[0].run_dir / "curve.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300
        assert len(picture.convert("RGB").getcolors(100_000)) > 10, "nothing is drawn"
    assert finished[0].plot(tmp_path / "a" / "b.svg").read_text().startswith("<?xml")


def test_nothing_is_written_without_a_run_dir(finished, tmp_path, monkeypatch):
    result = train(None)
    assert_same(result.learner, finished[0].learner)
    assert list(tmp_path.iterdir()) == []
    assert result.run_dir is None
    assert result.summary["complete"]
    monkeypatch.setattr(plots, "default_path", lambda run_dir, name: tmp_path / "temporary" / str(run_dir) / name)
    assert result.plot() == tmp_path / "temporary" / "None" / "curve.png"
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]


@pytest.mark.slow
def test_another_seed_talks_on_stderr_and_ends_with_a_sentence(finished, tmp_path, capsys):
    result = train(tmp_path / "run", seed=1, progress=True)
    out, err = capsys.readouterr()
    assert not np.array_equal(*(x.learner.params["params"]["policy"]["kernel"] for x in (result, finished[0])))
    assert out == f"{result}\n"
    assert out.startswith("vtrace on catch: return ")
    assert err.splitlines()[:2] == ["8 environments in 1 shard(s) on 1 cpu device(s)", "torso: mlp, memory: none"]
    assert "2,016 steps   evaluation return" in err
