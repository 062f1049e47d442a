"""What the benches measure, and what they do without."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from podracer.bench import dqn, measure, reanalyse, remote, replay, search, sebulba
from podracer.bench.anakin import AnakinArguments
from podracer.bench.sebulba import SebulbaArguments


def test_anakin_on_any_environment():
    arguments = AnakinArguments(env="gridworld", env_options='{"task": "random_goals"}')
    assert arguments.environment("ppo").spec.name.startswith("gridworld")
    assert arguments.environment("ppo").spec != AnakinArguments(env="gridworld").environment("ppo").spec
    assert [AnakinArguments().environment(name).spec.name for name in ("ppo", "vtrace")] == ["cartpole", "catch"]


def test_presets_for_another_machine(monkeypatch):
    arguments = SebulbaArguments(presets=("pong",), num_envs=128, pool_threads=7, torso="resnet")
    pong = arguments.preset("pong")
    assert (pong.env, pong.num_envs, pong.num_threads, pong.config["torso"]) == ("envpool:Pong-v5", 128, 7, "resnet")
    assert SebulbaArguments().preset("pong") == sebulba.PRESETS["pong"]
    ran = []

    def run(command, **kwargs):
        ran.append(" ".join(command))
        return type("Done", (), {"returncode": 1})

    monkeypatch.setattr(sebulba.subprocess, "run", run)
    sebulba._simulated(arguments)
    assert "--num-envs 128 --pool-threads 7 --torso resnet" in ran[0], "the simulated devices measure the same"


def test_a_yardstick_that_cannot_be_imported(monkeypatch, tmp_path, capsys):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "plain.py").write_text("import nothing_of_this_name\n")
    monkeypatch.setattr(measure, "SOURCE", tmp_path)
    assert measure.yardstick("plain.py") is None
    assert measure.yardstick("missing.py") is None
    first, second = capsys.readouterr().err.splitlines()
    assert first == "no yardstick: plain.py cannot be used here (No module named 'nothing_of_this_name')."
    assert second.startswith("no yardstick: ")


@pytest.mark.slow
def test_replay_is_measured(tmp_path):
    small = {"sequences": (64,), "batch_size": 4, "lanes": 2, "repeats": 1, "seconds": 0.01}
    assert replay.main(replay.ReplayArguments(**small, json=tmp_path / "replay.json")) == 0
    (result,) = json.loads((tmp_path / "replay.json").read_text())["results"]
    assert result["sequences"] == 64
    assert min(result[name] for name in ("add_ms", "sample_ms", "gather_ms", "update_ms")) > 0


@pytest.mark.slow
def test_updates_of_efficientzero_are_measured(tmp_path, capsys):
    small = {"env": "catch", "batch_size": 4, "simulations": 2, "channels": 2, "rows": 1000, "seconds": 0.01}
    arguments = {"only": ("reanalysing", "refreshing"), "repeats": 1, "json": tmp_path / "reanalyse.json"}
    assert reanalyse.main(reanalyse.ReanalyseArguments(**small, **arguments)) == 0
    found = json.loads((tmp_path / "reanalyse.json").read_text())["results"]
    assert list(found["rates"]) == ["learning", "reanalysing", "refreshing"]
    operations = found["operations_a_sample"]
    assert 0 < operations["learning"] < operations["reanalysing"] < operations["refreshing"]
    assert "refreshing / reanalysing: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="only='speed': unknown; there are learning, "):
        reanalyse.ReanalyseArguments(only=("speed",))


@pytest.mark.slow
def test_remote_environments_are_measured(tmp_path):
    pytest.importorskip("grpc")
    arguments = remote.RemoteArguments(("alone",), repeats=1, seconds=0.05, json=tmp_path / "remote.json")
    assert remote.main(arguments) == 0
    results = json.loads((tmp_path / "remote.json").read_text())["results"]
    pong = results["pong, alone"]
    assert 84 * 84 <= pong["bytes_up"] <= 1.02 * 84 * 84
    assert pong["ratio"] > 0
    assert len(results["arithmetic"]) == len(remote.DEMANDS)
    assert 0 < remote.latency(arguments)["p50"] < 1000


@pytest.mark.slow
def test_search_is_measured(tmp_path):
    small = {"lanes": (2,), "actions": (3,), "simulations": (4,), "network": "planes", "repeats": 2, "seconds": 0.01}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # mctx's
        assert search.main(search.SearchArguments(**small, json=tmp_path / "search.json")) == 0
    (result,) = json.loads((tmp_path / "search.json").read_text())["results"]
    programs = {"network alone", "puct", "gumbel", "muzero_policy", "mctx without draws", "gumbel_muzero_policy"}
    assert set(result["programs"]) == programs
    assert len(result["ratios"]) == 5
    assert 1 <= result["programs"]["puct"]["depth"] <= result["programs"]["puct"]["deepest"] <= 4


def test_depths_of_trees():
    """A chain of two and a root with two children."""
    child = np.full((2, 3, 2), -1)
    child[0, 0, 1], child[0, 1, 0], child[1, 0] = 1, 2, (1, 2)
    assert search._depths(child) == {"depth": 1.25, "deepest": 2}


@pytest.mark.slow
def test_fast_dqn_is_measured(tmp_path, monkeypatch, capsys):
    pytest.importorskip("envpool")
    small = {"paced": {"target_period": 8, "batch_size": 512}, "pong": {"target_period": 8, "batch_size": 2}}
    for name, changes in small.items():
        setting = dqn.SETTINGS[name]
        changed = dataclasses.replace(setting, config={**setting.config, **changes})
        monkeypatch.setitem(dqn.SETTINGS, name, changed)
    arguments = dqn.DQNArguments(lanes=(1, 2), repeats=1, seconds=0.01, json=tmp_path / "dqn.json")
    assert dqn.main(arguments) == 0
    found = json.loads((tmp_path / "dqn.json").read_text())["results"]
    assert found["setting"]["config"]["batch_size"] == 512
    alone, cells, arithmetic = (found[name] for name in ("alone", "cells", "arithmetic"))
    row = alone["update_seconds"] / found["setting"]["config"]["update_period"]
    assert row / (alone["acting_seconds"]["1"] + alone["pace_seconds"]) == pytest.approx(4.44 / 20.64)
    names = {(cell["kind"], cell["lanes"]) for cell in cells}
    assert names == {("standard", 1), ("concurrent", 1), *((kind, 2) for kind in dqn.KINDS)}
    assert all(cell["rows_per_second"] > 0 for cell in cells)
    seconds = 2 / arithmetic["gradients_per_second"] + 4 / arithmetic["forwards_per_second"]
    assert arithmetic["share"] == pytest.approx(seconds / arithmetic["update_seconds"])
    assert f"{arithmetic['share']:.2f} of which are 2 gradients at " in capsys.readouterr().out


def test_fast_dqn_is_predicted():
    """With the paper's seconds of a row, the paper's rows a second (table 1), of one lane and of lanes that wait as one."""
    sampling, learning = 1.49e-3, 0.32e-3
    environments, setting = types.SimpleNamespace(seconds=sampling), types.SimpleNamespace(config={"update_period": 4})
    grid = types.SimpleNamespace(environments=environments, setting=setting)
    predicted = dqn._predicted(grid, dict.fromkeys((1, 8, 16), 0.0), 4 * learning, (1, 8, 16))
    hours = {name: 50e6 / rate / 3600 for name, rate in predicted.items()}
    assert hours["standard 1"] == pytest.approx(25.08, rel=0.01)
    assert hours["concurrent 1"] == pytest.approx(20.64, rel=0.01)
    assert predicted["both 8"] == pytest.approx(1 / learning)
    assert predicted["synchronised 16"] == pytest.approx(1 / (2 * sampling / 16 + learning))
    with pytest.raises(ValueError, match="lanes=3 must divide the target period of 40 rows"):
        dqn.DQNArguments(lanes=(3,))
