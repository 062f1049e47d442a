"""Tests of the benches: their measurements, and their errors without optional packages."""

import dataclasses
import importlib
import importlib.machinery
import json
import pathlib
import sys
import types
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import envs_jax
from podracer.agents import EfficientZeroConfig, MuZeroConfig, efficientzero
from podracer.bench import measure, replay, search, sebulba
from podracer.bench.anakin import AnakinArguments
from podracer.bench.sebulba import SebulbaArguments
from podracer.learning import gradients
from podracer.search import prefix_models
from tests.support import benchmarks

dqn, reanalyse, remote, remote_plan = map(benchmarks.load, ("dqn", "reanalyse", "remote", "remote_plan"))


@pytest.mark.parametrize("path", sorted(benchmarks.FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_does_not_have_the_name_of_a_module(path):
    """Once imported it would be taken for the module, in every later test."""
    with mock.patch.object(sys, "path", [entry for entry in sys.path if pathlib.Path(entry or ".") != path.parent]):
        assert importlib.machinery.PathFinder.find_spec(path.stem) is None
        assert path.stem not in sys.stdlib_module_names


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
    sebulba._run_simulated(arguments)
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


def test_arms_differ_in_what_they_are_named_for(monkeypatch):
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    efficiency: Any = importlib.import_module("sample_efficiency")
    for name, task in efficiency.TASKS.items():
        ours, other = (efficiency.config_of(name, arm) for arm in ("efficientzero", "muzero"))
        assert efficiency.most(name, "efficientzero") > ours["correction_interval"] == 0.3 * task.total_steps
        whole = EfficientZeroConfig(**ours), MuZeroConfig(**other)
        assert whole[0].replay_min_size == whole[1].replay_min_size
        assert whole[1].learning_rate_schedule == "constant", "as efficientzero"
        sgd, lars = (efficiency.config_of(name, f"large batch, {arm}") for arm in ("sgd", "clipped lars"))
        assert sgd["l2_cost"] == lars["l2_cost"] > 0
        assert sgd.keys() <= lars.keys()


@pytest.mark.slow
def test_blind_dynamics_are_the_same_after_every_action(monkeypatch):
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    controls: Any = importlib.import_module("efficientzero_controls")
    spec, config = envs_jax.make("catch").spec, EfficientZeroConfig(hidden_sizes=(8,), state_size=6)
    seeing = prefix_models.make(spec, config)
    params, statistics = jax.jit(seeing.init)(jax.random.key(0), jax.numpy.zeros((1, 10, 5)))
    rng = np.random.default_rng(1)
    normal = lambda shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    moved = jax.tree.map(lambda x: x + np.float32(0.1) * normal(x.shape), params)
    state, actions = normal((1, 6)).repeat(3, axis=0), np.arange(3, dtype=np.int32)
    after, blindly = (
        np.asarray(jax.jit(partial(model.call, "advance"))(moved, statistics, state, actions))
        for model in (seeing, controls.blind(seeing))
    )
    assert np.all(np.abs(np.diff(after, axis=0)).max(-1) > 1e-4)
    np.testing.assert_array_equal(blindly, after[:1].repeat(3, axis=0))


def test_what_never_passed_is_compared_as_far_as_that_goes(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    efficiency: Any = importlib.import_module("sample_efficiency")
    monkeypatch.setattr(efficiency, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(efficiency, "RUNS", tmp_path / "runs")
    (tmp_path / "runs").mkdir()

    def ran(task, arm, seed, steps):
        one = {"steps": steps, "seconds": 1.0, "commit": "c", "settings": efficiency.settings_of(task, arm)}
        efficiency.path_of(task, arm, seed).write_text(json.dumps(one | {"evaluations": []}))

    for seed, (ours, other) in enumerate([(5_000, 11_000), (6_000, None), (None, None)]):
        ran("catch", "efficientzero", seed, ours)
        ran("catch", "muzero", seed, other)
        ran("cartpole", "efficientzero", seed, None)
        ran("cartpole", "muzero", seed, 30_000)
    efficiency.write()
    lines = json.loads((tmp_path / "results" / "sample_efficiency.json").read_text())["results"]["beside MuZero"]
    assert lines["catch"].startswith("MuZero needs more than 5.00 times as many")
    assert lines["cartpole"].startswith("MuZero needs less than 0.50 times as many")
    assert (tmp_path / "results" / "sample_efficiency.png").exists()
    for path in (tmp_path / "runs").iterdir():
        path.unlink()
    there = efficiency.found()
    assert len(there) == 12, "results are what is not run again"
    monkeypatch.setitem(efficiency.TASKS, "catch", efficiency.Task("catch", 0.8, 30_000, 500))
    assert len(efficiency.found()) == 6, "but for those with other settings"


def test_seeds_side_by_side_need_each_their_own_steps(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    efficiency: Any = importlib.import_module("sample_efficiency")
    monkeypatch.setattr(efficiency, "RUNS", tmp_path / "runs")
    values = {500: (1.0, 1.0), 1000: (1.0, 0.0), 1500: (1.0, 1.0), 2000: (0.0, 1.0), 2500: (0.0, 0.9), 3000: (1.0, 1.0)}

    def train(agent, env, *, log, seed, population, **settings):
        assert (agent, env, seed, population) == ("muzero", "catch", 3, 2)
        for steps, row in values.items():
            ends = [log(steps, {"member": i, "eval/return_mean": value}) for i, value in enumerate(row)]
            if any(ends):
                assert steps == 2500
                return types.SimpleNamespace(summary={"train_seconds": 1.0, "device": "a device", "jax": "0.0"})
        raise AssertionError("both have passed")

    def stopped(agent, env, *, log, **settings):
        log(500, {"member": 0, "eval/return_mean": 1.0})
        return types.SimpleNamespace(summary={"train_seconds": 1.0, "device": "a device", "jax": "0.0"})

    monkeypatch.setattr(efficiency.podracer, "train", stopped)
    with pytest.raises(SystemExit, match="muzero on catch was stopped on the way"):
        efficiency.run("catch", "muzero", range(3, 5))
    assert not list(tmp_path.glob("runs/*"))
    monkeypatch.setattr(efficiency.podracer, "train", train)
    efficiency.run("catch", "muzero", range(3, 5))
    found = [json.loads(efficiency.path_of("catch", "muzero", seed).read_text()) for seed in (3, 4)]
    assert [one["steps"] for one in found] == [1500, 2500]
    assert [len(one["evaluations"]) for one in found] == [5, 5]
    assert found[0]["side by side"] == 2
    monkeypatch.setattr(efficiency, "RESULTS", tmp_path / "results")
    alone = efficiency.missing(["catch"], ["muzero", "without augmentation"], 7, side_by_side=False)
    assert alone == [("catch", "muzero", range(seed, seed + 1)) for seed in (0, 1, 2, 5, 6)]
    joined = efficiency.missing(["catch"], ["muzero", "without augmentation"], 7, side_by_side=True)
    assert joined == [("catch", "muzero", range(3)), ("catch", "muzero", range(5, 7))]


@pytest.mark.slow
def test_replay_is_measured(tmp_path):
    small = {"sequences": (64,), "batch_size": 4, "lanes": 2, "repeats": 1, "seconds": 0.01}
    assert replay.main(replay.ReplayArguments(**small, json=tmp_path / "replay.json")) == 0
    (result,) = json.loads((tmp_path / "replay.json").read_text())["results"]
    assert result["sequences"] == 64
    assert min(result[name] for name in ("add_ms", "sample_ms", "gather_ms", "update_ms")) > 0


@pytest.mark.slow
@pytest.mark.nightly
def test_updates_of_efficientzero_are_measured(tmp_path, capsys):
    small = {"env": "catch", "batch_size": 4, "simulations": 2, "channels": 2, "rows": 1000, "seconds": 0.01}
    arguments = {"only": ("reanalysing",), "repeats": 1, "json": tmp_path / "reanalyse.json"}
    with mock.patch.dict(gradients.ROWS_IN_CACHE, {"vectors": 11}):  # samples go through the network one by one
        assert reanalyse.main(reanalyse.ReanalyseArguments(**small, **arguments)) == 0
    found = json.loads((tmp_path / "reanalyse.json").read_text())["results"]
    assert list(found["rates"]) == ["learning", "reanalysing"]
    operations = found["operations_a_sample"]
    agent = efficientzero.make(envs_jax.make("catch").spec)
    sizes = jax.eval_shape(agent.init, jax.random.key(0), dict.fromkeys(agent.hyper, jax.numpy.float32(0))).params
    # 64 operations for each parameter: most are used in each of five steps, forth and back. Of the loop, a turn has 37.
    assert operations["learning"] > 50 * sum(x.size for x in jax.tree.leaves(sizes))
    assert 0 < operations["learning"] < operations["reanalysing"]
    assert "reanalysing / learning: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="only='speed': unknown; there are learning, "):
        reanalyse.ReanalyseArguments(only=("speed",))


@pytest.mark.slow
def test_remote_environments_are_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(benchmarks.FOLDER)  # for the processes of workers
    pytest.importorskip("grpc")
    monkeypatch.setattr(remote, "STREAMS", (1, 2))  # each is a process
    monkeypatch.setattr(remote, "BLOCKS", (8,))
    monkeypatch.setattr(remote, "LANES", 8)
    arguments = remote.RemoteArguments(("alone", "wire"), repeats=1, seconds=0.05, json=tmp_path / "remote.json")
    assert remote.main(arguments) == 0
    results = json.loads((tmp_path / "remote.json").read_text())["results"]
    pong = results["pong, alone"]
    assert 84 * 84 <= pong["bytes_up"] <= 1.02 * 84 * 84
    assert pong["ratio"] > 0
    assert pong["learner_cpu_us_per_row"] > 0
    assert pong["loop_busy"] > 0
    assert 0 < results["latency"]["p50"] < 1000
    where = results["where"]
    assert where["whole"] == pytest.approx(sum(where.values()) / 2)
    assert {"learner's loop", "learner's actor and gRPC's threads", "worker"} < set(where)
    assert set(results["messages"]) == {"1 stream", "2 streams", "the hub alone"}
    assert set(results["ratios of ways"]) >= {"unix"}
    said = capsys.readouterr().out
    missing = {target.what for target in remote_plan.TARGETS if target.what not in said}
    assert missing == {t.what for t in remote_plan.TARGETS if "acting" in t.part or t.figure == "8 streams"}


def test_what_larger_runs_need_of_networks_and_cores():
    """By the figures of the paper's plan: a frame of 84 x 84 at 85,000 a second and process, 3,000 a second and core."""
    frame = {"bytes_up": 84 * 84, "learner_cpu_us_per_row": 1e6 / 85_000, "local": 2 * 2_944}
    tables = remote_plan.arithmetic({"pong, alone": frame})
    assert [row[1] for row in tables["demand"][1:]] == ["0.56", "2.82", "5.64", "22.58", "56.45"]
    assert [row[3] for row in tables["demand"][1:]] == ["1", "1", "2", "5", "12"]
    assert [row[4] for row in tables["demand"][1:]] == ["4", "17", "34", "136", "340"]
    assert [row[1] for row in tables["networks"][1:]] == ["15,944", "159,439", "398,597", "1,594,388", "6,377,551"]
    (shallow, rows, *_, processes, _), (resnet, slower, gigabits, _, one, cores) = tables["H200"][1:]
    assert (shallow, rows, processes) == ("shallow", "1,250,000", "15")
    assert (resnet, slower, gigabits, one, cores) == ("ResNet", "69,124", "3.90", "1", "24")
    assert [row[1:4] for row in tables["reported"][1:]] == [["65,000", "3.7", "305"], ["82,500", "13.7", "159"]]
    assert remote_plan.blocks_a_core(1.0, 10.0) == 2
    assert remote_plan.blocks_a_core(1.0, 0.3) == 5


def test_misses_come_first():
    results = {
        "cartpole, acting": {"ratio": 0.24, "loop_busy": 0.2},
        "latency": {"p50": 1.4, "p99": 2.0},
        "pong, acting": {"ratio": float("nan")},
    }
    lines = remote_plan.beside_targets(results)
    assert [line[3] for line in lines] == ["NO", "NO", "yes", "yes"]
    assert lines[0] == ["ms from actions to rows, median", "1.40", "<= 0.70", "NO"]
    assert lines[1][0].startswith("CartPole acting, 64 lanes")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("network", ["planes", "connect_four"])
def test_search_is_measured(network, tmp_path):
    small = {"lanes": (2,), "actions": (3,), "simulations": (4,), "repeats": 2, "seconds": 0.01}
    arguments = search.SearchArguments(
        **small, network=network, anakin=network == "connect_four", json=tmp_path / "search.json"
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # mctx's
        assert search.main(arguments) == 0
    (result,) = json.loads((tmp_path / "search.json").read_text())["results"]
    programs = {"network alone", "puct", "gumbel", "muzero_policy", "mctx without draws", "gumbel_muzero_policy"}
    assert set(result["programs"]) == programs | ({"puct in Anakin"} if arguments.anakin else set())
    assert len(result["ratios"]) == 5 + arguments.anakin
    assert result["A"] == (7 if arguments.anakin else 3)
    assert 1 <= result["programs"]["puct"]["depth"] <= result["programs"]["puct"]["deepest"] <= 4


def test_time_of_a_simulation_among_many_and_few():
    cell = lambda N, S, rate: {"N": N, "A": 6, "S": S, "programs": {x: {"rate": rate} for x in ("puct", "gumbel")}}  # noqa: E731
    lines = search.growth([cell(32, 50, 300.0), cell(32, 200, 200.0), cell(8, 50, 100.0)])
    assert lines == [f"32, 6: {x}, time of a simulation at 200 / at 50: 1.50" for x in ("puct", "gumbel")]


def test_depths_of_trees():
    """A chain of two and a root with two children; a walk that ended at the cap once more."""
    child = np.full((2, 3, 2), -1)
    child[0, 0, 1], child[0, 1, 0], child[1, 0] = 1, 2, (1, 2)
    assert search._depths(child, None) == {"depth": 1.25, "deepest": 2}
    child = np.full((1, 4, 2), -1)
    child[0, 0, 1], child[0, 1, 0] = 1, 2
    assert search._depths(child, 3) == {"depth": 2.0, "deepest": 3}


@pytest.mark.slow
@pytest.mark.nightly
def test_fast_dqn_is_measured(tmp_path, monkeypatch, capsys):
    pytest.importorskip("envpool")
    small = {
        "paced": {"target_interval": 2, "batch_size": 512, "replay_ratio": 128.0},
        "pong": {"target_interval": 2, "batch_size": 2, "replay_ratio": 0.5},
    }
    for name, changes in small.items():
        setting = dqn.SETTINGS[name]
        changed = dataclasses.replace(setting, config={**setting.config, **changes})
        monkeypatch.setitem(dqn.SETTINGS, name, changed)
    arguments = dqn.DQNArguments(lanes=(1, 2), repeats=1, seconds=0.01, json=tmp_path / "dqn.json")
    assert dqn.main(arguments) == 0
    found = json.loads((tmp_path / "dqn.json").read_text())["results"]
    assert found["setting"]["config"]["batch_size"] == 512
    alone, cells, arithmetic = (found[name] for name in ("alone", "cells", "arithmetic"))
    row = alone["update_seconds"] / 4
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
    environments, setting = types.SimpleNamespace(seconds=sampling), types.SimpleNamespace(rows_per_update=4)
    grid = types.SimpleNamespace(environments=environments, setting=setting)
    predicted = dqn._predict(grid, dict.fromkeys((1, 8, 16), 0.0), 4 * learning, (1, 8, 16))
    hours = {name: 50e6 / rate / 3600 for name, rate in predicted.items()}
    assert hours["standard 1"] == pytest.approx(25.08, rel=0.01)
    assert hours["concurrent 1"] == pytest.approx(20.64, rel=0.01)
    assert predicted["both 8"] == pytest.approx(1 / learning)
    assert predicted["synchronised 16"] == pytest.approx(1 / (2 * sampling / 16 + learning))
    with pytest.raises(ValueError, match="lanes=3 must divide the 40 rows between copies to the target"):
        dqn.DQNArguments(lanes=(3,))
