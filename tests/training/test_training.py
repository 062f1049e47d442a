"""`podracer.train` and `podracer.load` as a user meets them, and as a bad day treats them."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import envs_jax
import podracer
from envs_jax.gridworld import GridObject
from envs_jax.memory_chain import MemoryChain
from podracer import cli, nets, spaces
from podracer.agents import registry
from podracer.anakin import random_play
from podracer.anakin.driver import Anakin
from podracer.evaluation import evaluation
from podracer.result import plots
from podracer.result.result import Result
from podracer.run import checkpoint, metrics, rundir
from podracer.run.config import RunConfig
from podracer.training import resolve
from podracer.training import summary as summaries
from podracer.training import train as training
from podracer.types import Caution, EnvSpec, Transition
from tests.support import harness, tiers
from tests.support.counting import CountingEnvironment

AGENT = {"rollout_length": 10, "hidden_sizes": (8,)}
RUN = {
    "total_steps": 2000,
    "num_envs": 8,
    "eval_every": 500,
    "eval_episodes": 16,
    "checkpoint_every": 500,
    "progress": False,
}
STEPS_PER_UPDATE = 72  # of 8 x 10 rows: an episode of catch is 9 transitions and a masked one
SUMMARY_KEYS = {
    *("agent", "env", "arch", "seed", "complete", "env_steps", "updates", "compile_seconds", "train_seconds"),
    *("steps_per_second", "eval_return_mean", "eval_return_std", "eval_return_interval", "eval_episodes"),
}


def train(run_dir, **changes):
    """The small run that most tests share: one compilation for all of them."""
    return podracer.train("vtrace", "catch", config=AGENT, run_dir=run_dir, **(RUN | changes))


@pytest.fixture(scope="module", autouse=True)
def _programs_are_shared():
    with harness.shared_programs():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its result, and what `log` was called with."""
    calls = []
    directory = tmp_path_factory.mktemp("finished") / "run"
    result = train(directory, log=lambda steps, row: calls.append((steps, dict(row))))
    return result, calls


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run's directory, to break."""
    return pathlib.Path(shutil.copytree(finished[0].run_dir, tmp_path / "run"))


def rows_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def steps_of(directory):
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir() if path.name.isdigit())


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def leaves(tree):
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def assert_same(a, b):
    """Two trees are equal bit by bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(leaves(a), leaves(b)):
        np.testing.assert_array_equal(x, y)


def untrained(agent, environment, run_dir=None, **parts):
    """A result and, in `run_dir`, a run, all of whose numbers are 0: for what does not need training to be seen."""
    made = resolve.resolve(agent, environment, RunConfig(total_steps=1, num_envs=8), **parts)
    zeros = lambda x: jnp.zeros(x.shape, x.dtype) if not is_key(x) else jnp.broadcast_to(jax.random.key(0), x.shape)  # noqa: E731
    state = jax.tree.map(zeros, made.driver.like())
    if run_dir:
        rundir.prepare(run_dir, made.description, resume=False)
        checkpoints = checkpoint.Checkpoints(run_dir)
        checkpoints.save(0, state)
        checkpoints.close()
    return Result(made, state.learner, [], run_dir)


# What a run leaves behind


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


# Results


def test_load_gives_the_same_policy(finished):
    result, _ = finished
    again = podracer.load(result.run_dir)
    assert_same(again.learner, result.learner)
    assert again.history == result.history
    assert again.summary == result.summary
    assert again.description == result.description
    first, second = result.evaluate(16, seed=3), again.evaluate(16, seed=3)
    np.testing.assert_array_equal(first.returns, second.returns)


def test_a_loaded_run_compiles_into_the_cache(finished, monkeypatch, tmp_path):
    """As training does: `podracer eval` of the same run again should not compile again."""
    cache = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        podracer.load(finished[0].run_dir)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "podracer" / "xla")
    finally:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops_too=true", False),
    ],
)
def test_the_summary_says_whether_a_gpu_repeats_itself(flags, expected, finished):
    assert summaries.deterministic_ops(flags) == expected
    assert finished[0].summary["deterministic_ops"] == summaries.deterministic_ops(os.environ.get("XLA_FLAGS", ""))


def test_evaluation_statistics(finished):
    evaluation = finished[0].evaluate(16, seed=5)
    returns = evaluation.returns
    assert evaluation.episodes == len(returns) == 16
    assert set(np.unique(returns)) == {-1.0, 1.0}, "every lane plays one episode, no more and no less"
    np.testing.assert_array_equal(evaluation.lengths, np.full(16, 9.0))
    assert evaluation.unfinished == 0
    assert evaluation.mean == pytest.approx(np.mean(returns))
    assert evaluation.std == pytest.approx(np.std(returns, ddof=1))
    half = 1.96 * np.std(returns, ddof=1) / np.sqrt(16)
    assert evaluation.interval == pytest.approx((np.mean(returns) - half, np.mean(returns) + half))
    assert f"return {np.mean(returns):.3f} ±" in str(evaluation)
    np.testing.assert_array_equal(finished[0].evaluate(16, seed=5).returns, returns)
    assert not np.array_equal(finished[0].evaluate(16, seed=6).returns, returns)


def test_one_episode_has_no_spread():
    evaluation = podracer.Evaluation(np.float32([3.0]), np.float32([7.0]), 0)
    assert evaluation.std == 0.0
    assert evaluation.interval == (3.0, 3.0)


def test_policy_is_what_evaluation_plays(finished):
    result, env = finished[0], finished[0].environment
    step, observe = jax.jit(env.step), jax.jit(env.observe)
    keys = jax.random.split(jax.random.split(jax.random.key(0), 3)[2])[0]  # the evaluation key of seed 0, for resets
    returns = []
    for key in jax.random.split(keys, 16):
        state, last, total = env.reset(key), False, 0.0
        while not last:
            action = result.policy(observe(state))
            assert env.spec.action_space.contains(action)
            state, transition = step(state, jnp.asarray(action), key)
            total, last = total + float(transition.reward), bool(transition.last)
        returns.append(total)
    np.testing.assert_array_equal(returns, result.evaluate(16, seed=0).returns)


def test_policy_takes_what_people_have(finished):
    board = np.zeros((10, 5))
    board[0, 1] = board[9, 2] = 1.0
    action = finished[0].policy(board)
    assert type(action) is int, "FrozenLake's dict of transitions has no arrays as keys"
    assert action == finished[0].policy(board.astype(np.float32)) == finished[0].policy(board.tolist())
    with pytest.raises(ValueError, match=r"float64 \(50,\); the environment shows Box"):
        finished[0].policy(board.ravel())
    with pytest.raises(ValueError, match="this run has members 0 to 0"):
        finished[0].policy(board, member=1)


def test_animation(finished, tmp_path):
    path = finished[0].animate(tmp_path / "new" / "catch.gif", seed=2)
    assert finished[0].animate(seed=2) == finished[0].run_dir / "policy.gif"
    assert (finished[0].run_dir / "policy.gif").read_bytes() == path.read_bytes()
    with Image.open(path) as gif:
        assert gif.n_frames == 10, "one for every state of an episode of nine steps"
        assert gif.info["loop"] == 0
        durations, pictures = [], []
        for i in range(gif.n_frames):
            gif.seek(i)
            durations.append(gif.info["duration"])
            pictures.append(np.asarray(gif.convert("RGB")))
    assert durations[-1] == 1000 > durations[0]
    env = finished[0].environment
    assert pictures[0].shape == jax.eval_shape(env.render, jax.eval_shape(env.reset, jax.random.key(0))).shape
    assert len({picture.tobytes() for picture in pictures}) == 10


@pytest.mark.slow
def test_an_environment_without_render(tmp_path):
    with pytest.raises(ValueError, match="cliff has no render"):
        untrained("vtrace", Cliff()).animate(tmp_path / "x.gif")


def test_nonsense_asked_of_a_result(finished, tmp_path):
    with pytest.raises(ValueError, match="episodes=0"):
        finished[0].evaluate(0)
    with pytest.raises(ValueError, match="member=-1"):
        finished[0].evaluate(4, member=-1)
    with pytest.raises(ValueError, match="holds no run"):
        podracer.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "of another library"}')
    with pytest.raises(ValueError, match="no run of podracer"):
        podracer.load(tmp_path)
    (tmp_path / "config.json").write_text('{"agent": "vtr')
    with pytest.raises(ValueError, match="not JSON"):
        podracer.load(tmp_path)


def test_a_run_without_a_checkpoint_cannot_be_loaded(copied):
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(podracer.CheckpointError, match=r"no checkpoint in .* yet"):
        podracer.load(copied)
    assert not (copied / "checkpoints").exists(), "reading writes nothing"


@pytest.mark.slow
def test_load_of_environment_options(tmp_path):
    untrained("vtrace", "memory_chain", tmp_path / "run", env_options={"length": 3})  # which shows in no shape
    assert podracer.load(tmp_path / "run").environment.spec.max_episode_steps == 4
    with pytest.raises(ValueError, match=r"env_options\.length: 3 -> 4"):
        podracer.train("vtrace", "memory_chain", env_options={"length": 4}, run_dir=tmp_path / "run", resume=True)


@pytest.mark.slow
def test_wrappers_are_the_runs(tmp_path):
    """By name, in their order, and around an environment that is given as an object too."""
    wrap = ["scale_reward=0.5", "time_limit=3"]
    for name, environment in (("by name", "memory_chain"), ("own", MemoryChain())):
        untrained("vtrace", environment, tmp_path / name, wrap=wrap)
        own = {} if isinstance(environment, str) else {"environment": environment}
        found = podracer.load(tmp_path / name, **own)
        assert found.environment.spec.max_episode_steps == 3
        assert found.description["wrap"] == wrap
        assert set(found.evaluate(4).lengths) == {3}
        with pytest.raises(ValueError, match=r"wrap: \['scale_reward=0.5', 'time_limit=3'\] -> \['time_limit=3'\]"):
            podracer.train("vtrace", environment, wrap=wrap[1:], run_dir=tmp_path / name, resume=True)
        with pytest.raises(ValueError, match=r"wrap: .* -> absent"):
            podracer.train("vtrace", environment, run_dir=tmp_path / name, resume=True)


@pytest.mark.slow
def test_a_run_with_wrappers_goes_on(tmp_path):
    """From the command line to the last of its episodes, all of them by the wrappers."""
    settings = f"--run-dir {tmp_path} --quiet --num-envs 4 --agent.rollout-length 4 --agent.hidden-sizes 4"
    train = f"train vtrace catch --wrap time_limit=3 sticky_actions=0.25 --total-steps 200 {settings} --eval-episodes 8"
    assert cli.run(train.split()) == 0
    assert cli.run(f"resume {tmp_path} --total-steps 400 --quiet".split()) == 0
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["wrap"] == ["time_limit=3", "sticky_actions=0.25"]
    rows = [row for row in rows_of(tmp_path) if row.get("episode/count")]
    assert {row["episode/length"] for row in rows} == {3}
    assert rows[-1]["env_steps"] >= 400


def test_wrappers_of_a_run_come_in_their_order():
    parts = resolve.resolve("vtrace", "catch", RunConfig(), wrap={"time_limit": 3, "sticky_actions": 0.25})
    assert parts.description["wrap"] == ["time_limit=3", "sticky_actions=0.25"]
    assert parts.environment.spec.max_episode_steps == 3
    assert type(parts.environment).__name__ == "StickyActions"
    assert "wrap" not in resolve.resolve("vtrace", "catch", RunConfig()).description
    catch = type(envs_jax.make("catch"))
    bare = type("Bare", (), {name: getattr(catch, name) for name in ("__init__", "reset", "step")})
    with pytest.raises(
        TypeError, match=r"Bare\.observe is missing \(expected a method of podracer\.types\.Environment"
    ):
        resolve.resolve("vtrace", bare(), RunConfig(), wrap=["time_limit=3"])


def test_options_survive_json():
    options = {"objects": (GridObject(2.0, 0.5, 0.25),), "object_cells": ((1, 2),), "task": "tabular"}
    parts = resolve.resolve("vtrace", "gridworld", RunConfig(), env_options=options)
    stored = json.loads(json.dumps(parts.description["env_options"]))
    again = resolve.stored_options("gridworld", stored)
    assert envs_jax.options("gridworld")(**again) == envs_jax.options("gridworld")(**options)


# Populations


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


# Objects instead of names


@dataclasses.dataclass(frozen=True)
class Cliff:
    """Somebody's own environment: two steps, reward for action 1, and something wrong from step `good_steps` on."""

    good_steps: int = 10**6
    bad_reward: float = 0.0
    name: str = "cliff"

    @property
    def spec(self):
        return EnvSpec(self.name, spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2), 2)

    def reset(self, key):
        return {"time": jnp.int32(0), "side": jax.random.uniform(key)}

    def step(self, state, action, key):
        state = state | {"time": state["time"] + 1}
        last = state["time"] >= 2
        reward = jnp.where(action == 1, jnp.float32(1), jnp.float32(0))
        return state, Transition(reward, 1.0 - last.astype(jnp.float32), last)

    def observe(self, state):
        return jnp.stack([state["time"].astype(jnp.float32) / 2, state["side"]])


class Unseen(Cliff):
    """Observations are numbers until a lane has taken 100 steps."""

    def reset(self, key):
        return jnp.int32(0)

    spec = EnvSpec("unseen", spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2), None)

    def step(self, state, action, key):
        return state + 1, Transition(jnp.float32(1), jnp.float32(1), jnp.asarray(False))

    def observe(self, state):
        return jnp.where(state >= 100, jnp.nan, jnp.zeros(1))


class EverLonger(Cliff):
    """Pays `bad_reward` once its lane has taken `good_steps` steps; the count outlives episodes, as a bug would."""

    spec = EnvSpec("ever_longer", spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2), None)

    def reset(self, key):
        return jnp.int32(0)

    def step(self, state, action, key):
        reward = jnp.where(state >= self.good_steps, jnp.float32(self.bad_reward), jnp.float32(1))
        return state + 1, Transition(reward, jnp.float32(1), jnp.asarray(False))

    def observe(self, state):
        return jnp.zeros(1)


def my_network(num_features=2):
    def init(key):
        return {"w": 0.1 * jax.random.normal(key, (num_features, 3))}

    def apply(params, observation):
        out = observation @ params["w"]
        return out[:, :2], out[:, 2]

    return nets.feed_forward(init, apply)


def test_objects_of_ones_own(tmp_path):
    """An environment and a network of one's own, which a file cannot hold and `load` must be given."""
    run_dir, env, network = tmp_path / "run", Cliff(), my_network()
    result = podracer.train(
        "vtrace", env, network=network, config={"rollout_length": 10, "learning_rate": 0.05}, run_dir=run_dir, **RUN
    )
    assert result.summary["env"] == "cliff"
    assert result.evaluate(16).mean == 2.0
    assert result.policy([0.5, 0.5]) == 1
    assert set(result.learner.params) == {"w"}
    with pytest.raises(ValueError, match="your own environment; in Python, give it as environment="):
        podracer.load(run_dir, network=network)
    with pytest.raises(ValueError, match="your own network; in Python, give it as network="):
        podracer.load(run_dir, environment=env)
    again = podracer.load(run_dir, environment=env, network=network)
    assert_same(again.learner, result.learner)
    with pytest.raises(
        podracer.CheckpointError, match=r"another layout: .* it needs the network, devices and actors that"
    ):
        podracer.load(run_dir, environment=env, network=nets.make(env.spec))
    shutil.rmtree(run_dir / "checkpoints" / str(result.summary["env_steps"]))
    with pytest.raises(ValueError, match="your own environment; in Python, give it as environment="):
        podracer.resume(run_dir, network=network)
    assert_same(podracer.resume(run_dir, environment=env, network=network, progress=False).learner, result.learner)


@pytest.mark.parametrize(
    "name",
    ["adam", "rmsprop", "sgd"],
)
def test_every_optimizer_makes_an_agent(name):
    agent = registry.make_agent("vtrace", Cliff(), {"optimizer": name})
    hyper = {name: jax.ShapeDtypeStruct((), np.float32) for name in agent.hyper}
    jax.eval_shape(agent.init, jax.eval_shape(lambda: jax.random.key(0)), hyper)


@pytest.mark.slow
def test_an_agent_of_ones_own(tmp_path):
    env = envs_jax.make("catch")
    config = podracer.agents.VTraceConfig(**AGENT)
    made = podracer.agents.vtrace.make(env.spec, config)._replace(name="mine")
    made = made._replace(cautions=(Caution("loss/value", 0.0, "mind it"),))
    with pytest.warns(UserWarning, match=r"^loss/value is [0-9.]+: mind it$") as said:
        result = podracer.train(made, env, run_dir=tmp_path / "run", **RUN)
    assert len(said) == 1, "once"
    assert result.summary["agent"] == "mine"
    with pytest.raises(ValueError, match="your own agent"):
        podracer.load(tmp_path / "run")
    again = podracer.load(tmp_path / "run", agent=made, environment=env)
    assert_same(again.learner, result.learner)


def test_objects_and_names_give_the_same(finished):
    env = envs_jax.make("catch")
    agent = podracer.agents.vtrace.make(env.spec, podracer.agents.VTraceConfig(**AGENT))
    assert_same(podracer.train(agent, env, **RUN).learner, finished[0].learner)


def test_a_namesake_is_not_taken_for_the_original(tmp_path):
    """An environment of one's own that is called like one of the library's."""
    namesake = Cliff(name="catch")
    untrained("vtrace", namesake, tmp_path / "run")
    with pytest.raises(ValueError, match="your own environment"):
        podracer.load(tmp_path / "run")
    assert podracer.load(tmp_path / "run", environment=namesake).environment == namesake


def test_a_recurrent_policy_needs_its_memory():
    result = untrained("vtrace", "catch", config=AGENT | {"core": "lstm", "core_size": 4})
    with pytest.raises(ValueError, match=r"use actor = result\.actor\(\)"):
        result.policy(np.zeros((10, 5), np.float32))
    actor = result.actor()
    assert actor(np.zeros((10, 5))) == 0, "all weights are 0"
    assert [memory.shape for memory in actor.policy.start(1)] == [(1, 4), (1, 4), (1,)]


# Bad input: nothing is compiled, nothing is written


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("vtrac", "catch"), ValueError, "unknown agent 'vtrac'; did you mean 'vtrace'"),
        (("vtrace", "catsh"), ValueError, "unknown environment 'catsh'; did you mean 'catch'"),
        ((podracer.agents.vtrace.make, "catch"), TypeError, "agent is a function; give a name"),
        ((podracer.agents.VTraceConfig(), "catch"), TypeError, "agent is a VTraceConfig; give a name"),
        (("vtrace", object()), TypeError, "a object is no environment; give a name"),
        (("vtrace", None), TypeError, "a NoneType is no environment; give a name"),
    ],
)
def test_wrong_parts(arguments, error, message, tmp_path):
    with pytest.raises(error, match=message):
        podracer.train(*arguments, run_dir=tmp_path / "run", **RUN)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 10, "num_shards": 4}, "num_envs=10 is not divisible by the 4 shards; use 8 or 12"),
        ({"num_env": 8}, "RunConfig has no field 'num_env'; did you mean 'num_envs'"),
        ({"seed": "zero"}, r"RunConfig\.seed='zero': expected an integer"),
        ({"total_steps": 0}, r"RunConfig\.total_steps=0: must be at least 1"),
        ({"total_steps": 1.5}, r"RunConfig\.total_steps=1\.5: expected an integer"),
        ({"population": True}, r"RunConfig\.population=True: expected an integer"),
        ({"env_options": {"row": 3}}, "no option 'row'; did you mean 'rows'"),
        ({"env_options": {"rows": 1}}, r"CatchOptions\(rows=1\)"),
        ({"config": {"learning_rte": 1.0}}, "did you mean 'learning_rate'"),
        ({"config": {"learning_rate": "fast"}}, r"VTraceConfig\.learning_rate='fast': expected"),
        ({"config": {"hidden_sizes": (0,)}}, "must be at least 1"),
        ({"config": {"torso": "resnet"}}, "use torso='mlp'"),
        ({"config": podracer.agents.PPOConfig()}, "agent 'vtrace' takes a VTraceConfig, not PPOConfig"),
    ],
)
def test_wrong_settings(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        podracer.train("vtrace", "catch", run_dir=tmp_path / "run", **(RUN | changes))
    assert not (tmp_path / "run").exists()


def test_what_only_tracing_finds_is_found_before_anything_is_written(tmp_path):
    settings = RUN | {"num_envs": 3}
    with pytest.raises(ValueError, match="num_minibatches=4 does not divide"):
        podracer.train("ppo", "catch", config={"rollout_length": 5}, run_dir=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists(), "or the corrected command would find a run of another configuration"


def test_a_network_of_the_wrong_shape(tmp_path):
    network = nets.feed_forward(lambda key: {}, lambda params, observation: (observation, observation))
    with pytest.raises(ValueError, match=r"it must return outputs \[6, P\] and values \[6\]"):
        podracer.train("vtrace", Cliff(), network=network, run_dir=tmp_path / "run", **RUN)
    assert not (tmp_path / "run").exists()


def test_options_for_an_object():
    with pytest.raises(ValueError, match="env_options belong to an environment given by name"):
        podracer.train("vtrace", Cliff(), env_options={"good_steps": 1}, **RUN)
    agent = podracer.agents.vtrace.make(Cliff().spec)
    with pytest.raises(ValueError, match="config, network and optimizer belong to an agent given by name"):
        podracer.train(agent, Cliff(), config=AGENT, **RUN)


def test_a_run_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"cannot write to run directory .*file"):
        train(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# A run that is there already


def test_it_is_not_overwritten(copied):
    before = sorted((path, path.stat().st_mtime_ns) for path in copied.rglob("*"))
    with pytest.raises(ValueError, match="already holds this run; use --resume"):
        train(copied)
    with pytest.raises(ValueError, match=r"holds a run of another configuration: run.seed: 0 -> 1"):
        train(copied, seed=1)
    with pytest.raises(ValueError, match=r"agent_config\.rollout_length: 10 -> 20.*run\.num_envs: 8 -> 16"):
        podracer.train(
            "vtrace", "catch", config={"hidden_sizes": (8,)}, run_dir=copied, resume=True, **(RUN | {"num_envs": 16})
        )
    assert sorted((path, path.stat().st_mtime_ns) for path in copied.rglob("*")) == before


def test_resume_needs_a_directory():
    with pytest.raises(ValueError, match="needs the run_dir"):
        train(None, resume=True)


def test_resume_of_a_finished_run_changes_nothing(finished, copied, monkeypatch, capsys):
    """It is not even compiled."""
    monkeypatch.setattr(Anakin, "compile", pytest.fail)
    monkeypatch.setattr(evaluation.Evaluator, "__call__", pytest.fail)
    result = train(copied, resume=True, progress=True)
    assert capsys.readouterr().err.endswith("complete at 2,016 steps\n")
    assert_same(result.learner, finished[0].learner)
    assert rows_of(copied) == result.history == finished[0].history
    assert json.loads((copied / "summary.json").read_text()) == result.summary == finished[0].summary
    assert steps_of(copied) == [1008, 1512, 2016]


@pytest.mark.slow
def test_resume_of_a_finished_run_evaluates_what_was_not(copied):
    assert train(copied, resume=True, eval_episodes=4).summary["eval_episodes"] == 4


def test_resume_of_nothing_begins(tmp_path, finished):
    assert_same(train(tmp_path / "run", resume=True).learner, finished[0].learner)


def test_resume_needs_nothing_but_the_directory(finished, copied):
    shutil.rmtree(copied / "checkpoints" / "2016")
    before = (copied / "config.json").read_text()
    result = podracer.resume(copied, progress=False)
    assert_same(result.learner, finished[0].learner)
    assert result.summary["complete"] is True
    assert (copied / "config.json").read_text() == before


def test_what_does_not_matter_may_change(finished, copied):
    shutil.rmtree(copied / "checkpoints" / "2016")
    result = train(copied, resume=True, eval_every=100, checkpoint_every=250, eval_episodes=4, keep_checkpoints=1)
    assert_same(result.learner, finished[0].learner)
    assert steps_of(copied) == [2016]


def test_a_run_that_does_not_fit_says_what_it_continues_on(copied, monkeypatch):
    monkeypatch.setattr(training, "_devices", lambda: jax.devices()[:1] * 3)
    with pytest.raises(
        ValueError, match=r"^num_shards=1 is not .* data axis; this run has 1 shards: it continues on 1 "
    ):
        podracer.resume(copied, progress=False)
    with pytest.raises(ValueError, match=r"^num_shards=1 is not .* data axis; use a multiple of 3\.$"):
        train(None, num_shards=1)


def test_resume_goes_on_where_it_was(finished, copied):
    """Killed between its last two checkpoints: no row twice, none missing, the same end."""
    shutil.rmtree(copied / "checkpoints" / "2016")
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 2088, "upda')  # a line that was being written
    result = train(copied, resume=True)
    assert_same(result.learner, finished[0].learner)
    rows = rows_of(copied)
    assert rows == result.history
    cut = [row for row in finished[0].history if row["env_steps"] <= 1512]
    assert rows[: len(cut)] == cut
    assert [row["env_steps"] for row in rows if "eval/return_mean" in row] == [504, 1008, 1512, 2016]
    assert sum(row.get("episode/count", 0) for row in rows) == 28 * 8
    for name in ("time/train_seconds", "time/wall_seconds"):
        times = [row[name] for row in rows if name in row]
        assert times == sorted(times)
    assert result.summary["wall_seconds"] >= times[-1]
    assert times[-1] > sum(result.summary[name] for name in ("train_seconds", "compile_seconds"))


def test_a_population_keeps_all_its_rows(population, tmp_path):
    """Members may be at different steps; rows are kept by updates, which they share."""
    result, rates = population
    run_dir = pathlib.Path(shutil.copytree(result.run_dir, tmp_path / "run"))
    ahead = rows_of(run_dir)
    for row in ahead:
        if "loss/total" in row:
            row["env_steps"] += row["member"]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ahead))
    again = train(run_dir, population=3, seed=7, hyper={"learning_rate": rates}, resume=True)
    assert again.history == ahead
    assert podracer.load(run_dir).history == ahead


# Signals (tests/test_resume.py sends them to a process)


def test_a_signal_stops_in_good_order(finished, tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    stop = lambda steps, row: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731 - after the first update
    with pytest.raises(podracer.Interrupted, match="stopped by SIGTERM at .* steps; continue with podracer") as stopped:
        train(tmp_path / "run", log=stop)
    assert isinstance(stopped.value, KeyboardInterrupt), "`except Exception` in a loop over runs does not take it"
    result = stopped.value.result
    assert signal.getsignal(signal.SIGTERM) == handler
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary) >= SUMMARY_KEYS - {"eval_return_interval"}
    assert (summary["complete"], summary["eval_return_mean"], summary["eval_episodes"]) == (False, None, 0)
    assert summary["stopped_by"] == "SIGTERM"
    assert steps_of(tmp_path / "run") == [summary["env_steps"]], "what was done is not lost"
    assert 0 < summary["env_steps"] < 504
    assert result.evaluate(16).episodes == 16
    with pytest.raises(podracer.Interrupted):
        podracer.resume(tmp_path / "run", progress=False, log=stop)
    assert_same(train(tmp_path / "run", resume=True).learner, finished[0].learner)


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait(tmp_path, capfd):
    def log(steps, row):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)  # a background shell starts its children with SIGINT ignored
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", log=log)
    assert signal.getsignal(signal.SIGINT) == handler
    assert "Ctrl-C again to interrupt at once" in capfd.readouterr().err


# Damage


def newest_data(run_dir):
    """The largest data file of the newest checkpoint."""
    newest = run_dir / "checkpoints" / str(steps_of(run_dir)[-1])
    return max((path for path in newest.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    data[len(data) // 2 :: 97] ^= 0xFF
    path.write_bytes(data.tobytes())


@pytest.mark.parametrize(
    "damage",
    [flip, *tiers.slow(truncate), *tiers.nightly(pathlib.Path.unlink)],
)
def test_a_damaged_checkpoint(finished, copied, damage, capsys):
    damage(newest_data(copied))
    loaded = podracer.load(copied)
    out, err = capsys.readouterr()
    assert out == "", "which would break `podracer eval --json`"
    assert err.startswith("checkpoint 2016 is damaged (")
    assert err.endswith("); used 1512.\n")
    assert loaded.history[-1]["env_steps"] == 1512
    assert steps_of(copied) == [1008, 1512, 2016], "loading moves nothing"
    result = train(copied, resume=True, progress=True)
    err = capsys.readouterr().err
    assert "checkpoint 2016 is damaged" in err
    assert f"moved it to {copied / 'damaged' / '2016'}" in " ".join(err.split())
    assert (copied / "damaged" / "2016").is_dir()
    assert_same(result.learner, finished[0].learner)
    assert steps_of(copied) == [1008, 1512, 2016]
    assert_same(podracer.load(copied).learner, finished[0].learner)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_all_checkpoints_damaged(copied):
    for step in steps_of(copied):
        for path in (copied / "checkpoints" / str(step)).rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
    metrics = (copied / "metrics.jsonl").read_text()
    for _ in range(2):  # the second time too: it must not begin afresh over the ruins
        with pytest.raises(podracer.CheckpointError, match=r"can be read: checkpoint 2016 .* checkpoint 1512 "):
            train(copied, resume=True)
        assert steps_of(copied) == [1008, 1512, 2016]
    assert (copied / "metrics.jsonl").read_text() == metrics


def test_metrics_that_cannot_be_written(tmp_path):
    """Whichever file it is; nothing is left behind that could wait or complain."""
    from tests.run.test_checkpoint import full_disk

    threads = threading.active_count()
    short = {f"a/{i}": 0 for i in range(40)}  # as JSON; as events they are longer
    for metric, file in (({"x" * 600: 1.0}, r"metrics\.jsonl"), (short, r"tensorboard/events\.\S+")):
        log = metrics.Log(tmp_path)
        with full_disk(), pytest.raises(rundir.WriteError) as caught:
            log.write({"env_steps": 1, "updates": 1} | metric)
        assert re.fullmatch(rf"could not write {tmp_path}/{file}: File too large\.", str(caught.value))
        with full_disk():
            log.close()
    assert threading.active_count() == threads


@pytest.mark.slow
# Orbax's other tasks, which nobody waits for, complain when they are collected, whenever that is.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_that_cannot_be_written(finished, tmp_path, monkeypatch):
    from tests.run.test_checkpoint import full_disk

    save = checkpoint.Checkpoints.save

    def save_until_full(self, step, state):
        with full_disk() if step > 1000 else full_disk(2**30):
            save(self, step, state)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "save", save_until_full)
        with pytest.raises(
            podracer.CheckpointError, match=r"could not write checkpoint 1008 in \S+: .*intact"
        ) as caught:
            train(tmp_path / "run")
    assert str(caught.value).endswith(
        f"checkpoints/504. Make room and continue with podracer resume {tmp_path / 'run'}."
    )
    assert steps_of(tmp_path / "run") == [504]
    assert podracer.load(tmp_path / "run").history[-1]["env_steps"] == 504
    assert_same(train(tmp_path / "run", resume=True).learner, finished[0].learner)


def test_observations_that_are_not_finite_are_named():
    settings = RUN | {"eval_every": 10**6, "network": my_network(1)}
    with pytest.raises(
        podracer.TrainingDivergedError, match="^the environment's observation is not finite in lane 0, and"
    ):
        podracer.train("vtrace", Unseen(), config={"rollout_length": 10}, check=False, **settings)
    # As where actions are numbers, which are not finite either by then.
    said = "the environment's observation is not finite after 100 steps of random actions"
    assert random_play.not_finite(Unseen()) == said
    assert not random_play.not_finite(envs_jax.make("pendulum"))


@pytest.mark.parametrize(
    ("agent", "bad_reward"), [("ppo", math.inf), pytest.param("vtrace", math.nan, marks=pytest.mark.slow)]
)
def test_a_loss_that_is_not_finite(agent, bad_reward, tmp_path):
    env, network = EverLonger(good_steps=100, bad_reward=bad_reward), my_network(1)  # 8 lanes: at step 800
    settings = RUN | {"eval_every": 10**6, "checkpoint_every": 240, "network": network, "run_dir": tmp_path / "run"}
    with pytest.raises(
        podracer.TrainingDivergedError,
        match=r"^the environment's reward is not finite in lane 0, and so .*loss/.* not finite after 880 .*\(11 updates\)",
    ) as caught:
        podracer.train(agent, env, config={"rollout_length": 10}, check=False, **settings)
    assert steps_of(tmp_path / "run") == [240, 480, 720]
    assert str(tmp_path / "run" / "checkpoints" / "720") in str(caught.value)
    good = podracer.load(tmp_path / "run", environment=env, network=network)
    assert all(np.isfinite(x).all() for x in leaves(good.learner.params))
    assert good.history[-1]["env_steps"] == 720
    rows = rows_of(tmp_path / "run")
    assert all(math.isfinite(value) for row in rows for value in row.values())


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
    finite = [all(np.isfinite(x[i]).all() for x in leaves(result.learner.params)) for i in range(3)]
    assert finite == [True, False, True]
    assert capsys.readouterr().err.count("member 1 (seed 1) has diverged") == 1
    assert [member["diverged"] for member in result.summary["members"]] == [False, True, False]
    assert result.summary["best_member"] != 1
    json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.slow
def test_a_callback_that_fails_is_heard(tmp_path):
    def log(steps, row):
        if steps > 600:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(tmp_path / "run", log=log)
    assert steps_of(tmp_path / "run")[0] == 504
    assert 600 < steps_of(tmp_path / "run")[-1] < 1000, "where it stopped"


def play(env, episodes, **limit):
    """An evaluation of a policy that knows nothing."""
    agent = podracer.agents.vtrace.make(env.spec, network=my_network(*env.spec.observation_space.shape))
    learner = agent.init(jax.random.key(0), {name: jnp.float32(value) for name, value in agent.hyper.items()})
    evaluator = evaluation.make(agent, env, episodes, **limit)
    return evaluation.summarize(*evaluator(agent.actor_params(learner, jnp.float32(1)), jax.random.key(0)))


def test_every_lane_plays_one_episode_whatever_its_length():
    result = play(CountingEnvironment(num_actions=2), 64)  # rewards 1, 2, ..., n
    assert set(result.lengths) == {1, 2, 3, 4, 5, 6}
    np.testing.assert_array_equal(result.returns, result.lengths * (result.lengths + 1) / 2)
    assert result.unfinished == 0


def test_evaluation_cuts_endless_episodes():
    result = play(EverLonger(), 3, max_steps=25)
    np.testing.assert_array_equal(result.returns, [25.0] * 3)
    assert result.unfinished == 3
    assert "3 cut at the step limit" in str(result)


def test_evaluations_take_no_more_steps_than_training():
    spec = EverLonger().spec
    limit = lambda episodes, every: evaluation.step_limit(spec, episodes, every)  # noqa: E731
    assert [limit(32, 10**6), limit(32, 200_000), limit(32, 100)] == [10_000, 6_250, 1_000]
    assert evaluation.step_limit(spec._replace(max_episode_steps=27_000), 32, 100) == 27_000


def test_a_run_whose_episodes_never_end_says_so(capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "LEAST_MAX_STEPS", 10)
    settings = {"total_steps": 160, "num_envs": 8, "eval_every": 80, "eval_episodes": 4, "config": AGENT}
    result = podracer.train("vtrace", EverLonger(), check=False, **settings)
    assert (result.summary["eval_unfinished"], result.summary["eval_longest_episode"]) == (4, 20)
    out, err = capsys.readouterr()
    assert "vtrace on ever_longer: return 20.000 ± 0.000 over 4 episodes (4 cut at 20 steps) after 160 steps" in out
    assert err.count("evaluation return 20.000, 4 of 4 episodes cut at 20 steps\n") == 2
    assert (
        err.count("4 of 4 episodes cut at 20 steps: the evaluation's returns are those until then; in training non")
        == 1
    )
    assert "max_episode_steps (in env_options" in err
