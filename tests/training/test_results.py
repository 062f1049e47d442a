"""`podracer.load` and what a result is used for: policies, evaluations, pictures."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import envs_jax
import podracer
from envs_jax.gridworld import GridObject
from envs_jax.memory_chain import MemoryChain
from podracer import cli
from podracer.run.config import RunConfig
from podracer.training import resolve
from podracer.training import summary as summaries
from tests.support.harness import assert_same
from tests.support.small_run import AGENT, Cliff, rows_of, untrained


def test_load_gives_the_same_policy(finished):
    result, _ = finished
    again = podracer.load(result.run_dir)
    assert_same(again.learner, result.learner)
    assert again.history == result.history
    assert again.summary == result.summary
    assert again.description == result.description
    first, second = result.evaluate(16, seed=3), again.evaluate(16, seed=3)
    np.testing.assert_array_equal(first.returns, second.returns)


def test_a_run_of_more_devices_is_loaded_on_one(finished, copied):
    path = copied / "config.json"
    stored = json.loads(path.read_text())
    stored["run"] |= {"arch": "sebulba", "replicas": 1, "actor_devices": 2, "reanalyser_devices": 3}
    path.write_text(json.dumps(stored))
    assert_same(podracer.load(copied).learner, finished[0].learner)


def test_a_result_of_an_earlier_checkpoint_has_not_the_last_ones_return(finished):
    earlier = podracer.load(finished[0].run_dir, step=1008)
    assert earlier.summary == {}
    (row,) = (row for row in earlier.history if row["env_steps"] == 1008 and "eval/return_mean" in row)
    mean, std = row["eval/return_mean"], row["eval/return_std"]
    assert str(earlier) == f"vtrace on catch: return {mean:.3f} ± {std:.3f} over 16 episodes after 1,008 steps"


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


@pytest.fixture
def recorder(finished):
    """A result, and the kinds of actions that were asked of its agent: `evaluation` of `act`, and "best"."""
    result = podracer.load(finished[0].run_dir)
    agent, called = result.agent, []

    def act(params, memory, row, key, evaluation):
        called.append(evaluation)
        return agent.act(params, memory, row, key, evaluation)

    def best(params, memory, row):
        called.append("best")
        action, _, memory = agent.act(params, memory, row, jax.random.key(0), True)
        return action, memory

    result.agent = agent._replace(act=act, best=best)
    return result, called


@pytest.mark.parametrize(("greedy", "expected"), [(None, True), (True, "best"), (False, False)])
def test_an_evaluation_takes_the_best_actions_or_samples(greedy, expected, recorder, finished):
    """Whichever of them the run's own evaluations take."""
    result, called = recorder
    same = np.array_equal(result.evaluate(16, greedy=greedy).returns, finished[0].evaluate(16).returns)
    assert set(called) == {expected}
    assert same == (greedy is not False)


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


def test_an_animation_shows_the_best_actions(recorder, tmp_path):
    result, called = recorder
    result.animate(tmp_path / "best.gif")
    assert set(called) == {"best"}


def test_a_model_card_has_the_score_of_the_best_actions(recorder, tmp_path):
    """The files hold these actions, also where evaluations of the run sample."""
    result, called = recorder
    result.export(tmp_path / "files", episodes=4)
    assert set(called) == {"best"}


@pytest.mark.slow
def test_an_environment_without_render(tmp_path):
    with pytest.raises(ValueError, match="cliff has no render"):
        untrained("vtrace", Cliff()).animate(tmp_path / "x.gif")


def test_nonsense_asked_of_a_result(finished, tmp_path):
    with pytest.raises(ValueError, match="episodes=0"):
        finished[0].evaluate(0)
    with pytest.raises(ValueError, match="member=-1"):
        finished[0].evaluate(4, member=-1)
    for seed in (-1, 2**31):
        for use in (finished[0].evaluate, finished[0].animate, finished[0].actor):
            with pytest.raises(ValueError, match=f"seed={seed}: must be 0 to 2,147,483,647"):
                use(seed=seed)
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


def test_a_recurrent_policy_needs_its_memory():
    result = untrained("vtrace", "catch", config=AGENT | {"core": "lstm", "core_size": 4})
    with pytest.raises(ValueError, match=r"use actor = result\.actor\(\)"):
        result.policy(np.zeros((10, 5), np.float32))
    actor = result.actor()
    assert actor(np.zeros((10, 5))) == 0, "all weights are 0"
    assert [memory.shape for memory in actor.policy.start(1)] == [(1, 4), (1, 4), (1,)]
