"""Several tasks side by side: every row, sum and metric belongs to the task of its lane, in both drivers."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from envs_jax import make, wrappers
from podracer import agents, environments
from podracer.anakin import random_play, rollout
from podracer.anakin.driver import Anakin
from podracer.environments import task_lists
from podracer.environments import tasks as task_module
from podracer.environments.from_jax import SteppedEnvironments
from podracer.environments.host_tasks import HostTasks
from podracer.environments.tasks import Tasks
from podracer.evaluation import evaluation
from podracer.run import rundir
from podracer.run.driver import episode_means
from podracer.sebulba import actor_program
from podracer.topology import collectives
from podracer.types import Agent, EnvSpec, EpisodeStats, task_of
from tests.support import harness
from tests.support.told import TOLD, Host, Told

T, B = 5, 6


CODES, LENGTHS = np.array([1.0, 20.0, 300.0]), np.array([3.0, 2.0, 4.0])


def agent_of(spec: EnvSpec) -> Agent:
    """A tiny agent; `learn` reports the rows that are not of the task of their lane."""
    agent = agents.vtrace.make(spec, agents.VTraceConfig(rollout_length=T, hidden_sizes=(4,)))

    def learn(learner: Any, trajectory: Any, *rest: Any) -> Any:
        new, metrics = agent.learn(learner, trajectory, *rest)
        task = task_of(trajectory.lane, len(spec.tasks))
        shown = trajectory.timesteps.observation[..., 0]
        wrong = jnp.sum((shown != jnp.asarray(CODES, jnp.float32)[task][None]).astype(jnp.float32))
        return new, metrics | collectives.global_sum({"wrong": wrong, "rows": jnp.float32(shown.size)})

    return agent._replace(learn=learn)


def roll(environment: Any, reset_pool: int | None = None, updates: int = 2, lanes: int = B) -> Any:
    """Trajectories of one shard by the first parameters, and the sums of their episodes."""
    agent = agents.vtrace.make(environment.spec, agents.VTraceConfig(rollout_length=T, hidden_sizes=(4,)))
    prog = harness.make_program(agent, environment, num_envs=lanes)
    state = harness.initial(prog, agent, [0])
    learner, actors = jax.tree.map(lambda x: x[0], state.learner), jax.tree.map(lambda x: x[0, 0], state.actors)
    settings, found = rollout.RolloutSettings(T, reset_pool), []
    act = jax.jit(
        lambda actors, key: rollout.rollout(
            agent, environment, settings, learner, actors, jnp.float32(0), jax.random.split(key, 2 + T)
        )
    )
    for i in range(updates):
        with jax.debug_key_reuse(True):
            actors, trajectory, episodes = act(actors, jax.random.key(i))
        found.append((harness.numbers_of(trajectory), jax.device_get(episodes)))
    return found


def check_rows(trajectory: Any, episodes: EpisodeStats) -> None:
    """Every row and every sum is that of the task of its lane."""
    rows, task = trajectory.timesteps, trajectory.lane % 3
    code, step = np.moveaxis(np.asarray(rows.observation)[..., :2], -1, 0)
    np.testing.assert_array_equal(code, np.broadcast_to(CODES[task], code.shape))
    np.testing.assert_array_equal(rows.reward, np.where(rows.first, 0.0, code))
    np.testing.assert_array_equal(rows.last, step == LENGTHS[task])
    np.testing.assert_array_equal(np.where(rows.first[1:], 0, step[:-1] + 1), step[1:])
    ended = np.array([np.sum(rows.last[1:][:, task == k]) for k in range(3)])
    np.testing.assert_array_equal(episodes.count, ended)
    np.testing.assert_array_equal(episodes.length_sum, ended * LENGTHS)
    np.testing.assert_array_equal(episodes.return_sum, ended * LENGTHS * CODES)
    assert list(episodes.metrics) == ["codes"], "the metrics that all tasks have"
    np.testing.assert_array_equal(episodes.metrics["codes"], ended * LENGTHS * CODES)


def test_rows_of_anakin() -> None:
    for trajectory, episodes in roll(Tasks(TOLD)):
        check_rows(trajectory, episodes)


@pytest.mark.slow
def test_rows_of_a_pool_of_states() -> None:
    """As above, also where states are drawn from a pool for each task."""
    for trajectory, episodes in roll(Tasks(TOLD), reset_pool=2):
        check_rows(trajectory, episodes)


@pytest.mark.slow
def test_one_task_is_none() -> None:
    """The same program, whatever the resets."""

    def program(environment: Any, reset_pool: int | None) -> str:
        agent = agents.vtrace.make(environment.spec, agents.VTraceConfig(rollout_length=2, hidden_sizes=(4,)))
        prog = harness.make_program(agent, environment, num_envs=2, reset_pool=reset_pool)
        return prog.step.lower(prog.like(), prog.like_limits()).as_text()

    for reset_pool in (None, 2):
        catch = make("catch")
        assert program(Tasks([catch]), reset_pool) == program(catch, reset_pool)


@pytest.mark.slow
def test_equal_tasks_are_one() -> None:
    """Random numbers belong to lanes, so two equal tasks have the rows and the sums of one."""
    catch = make("catch")
    for (one, sums), (two, of_two) in zip(roll(catch, updates=4), roll(Tasks([catch, catch]), updates=4)):
        harness.assert_same(one, two)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.sum(b)), sums, of_two)
        means, whole = episode_means(of_two, ("catch", "catch")), episode_means(sums)
        assert set(means) == {*whole, "episode/return/catch"}
        np.testing.assert_array_equal(means["episode/return"], whole["episode/return"])


def test_sums_of_sebulba() -> None:
    log: list[Any] = []
    tasks = HostTasks({name: Host(told, log) for name, told in TOLD.items()})
    running, rows, lanes = tasks.make(B, 0), [], np.arange(B, dtype=np.int32)
    for _ in range(2 * T + 1):
        rows.append(running.recv()[1])
        running.send(lanes, np.zeros(B, np.int32))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    zeros = jnp.zeros(B)
    counters = actor_program.EpisodeCounters(zeros, zeros, zeros > 0, zeros > 0)
    _, episodes = jax.jit(functools.partial(actor_program.count, tasks.spec))(counters, stacked)
    trajectory = harness.numbers_of(
        podracer.types.Trajectory(actor_program.timesteps(stacked), (), (), (), jnp.int32(0), jnp.asarray(lanes))
    )
    check_rows(trajectory, jax.device_get(episodes))


def test_the_task_that_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_play, "STEPS", 2)
    monkeypatch.setattr(random_play, "LANES", 2)
    bad = Told(float("inf"))
    said = "in bad, the environment's observation is not finite after 0 steps of random actions"
    assert random_play.not_finite(Tasks({"good": Told(), "bad": bad})) == said
    assert random_play.not_finite(bad) == said.removeprefix("in bad, ")  # type: ignore[arg-type]


def test_tasks_without_each_by_itself_are_refused() -> None:
    class Own:
        spec = Told().spec._replace(tasks=("one", "other"))

    with pytest.raises(ValueError, match=r"Own has spec.tasks=\('one', 'other'\) and no alone\(\)"):
        task_module.alone(Own())


def test_options_of_tasks_that_share_no_base() -> None:
    """Options of classes that no order of bases joins."""
    for names in ("memory_maze,minigrid_multi_room", "minigrid_multi_room,memory_maze"):
        cls, separate = environments.options(names), map(environments.options, names.split(","))
        every = {field.name for one in separate for field in dataclasses.fields(one)}
        assert {field.name for field in dataclasses.fields(cls)} == every | {"union", "task_input"}
        cls()
        # Command lines show these.
        assert all(f"\n  {name}: " in str(cls.__doc__) for name in ("union", "task_input", "view", "num_rooms"))
    with pytest.raises(ValueError, match=r"OptionsOfAllTasks.union='all'"):
        cls(union="all")


def test_names_of_tasks() -> None:
    assert task_lists.text("catch, cartpole ") == task_lists.text(["catch", " cartpole"]) == "catch,cartpole"
    with pytest.raises(ValueError, match="'catch,,cartpole' has an empty name between commas"):
        environments.options("catch,,cartpole")
    for name in (3, "one,other", ""):
        with pytest.raises(ValueError, match=f"a task is called {name!r}; use a text without commas"):
            Tasks({name: Told()})  # type: ignore[dict-item]


def test_a_mistake_of_an_environment_is_its_own() -> None:
    class Unfinished:
        spec = Told().spec

        def observe(self, state: Any) -> Any:
            return state

    with pytest.raises(TypeError, match=r"Unfinished.reset is missing"):
        podracer.train("vtrace", [Told(), Unfinished()], wrap=["flatten"])


def test_means_by_task() -> None:
    sums = np.array([[10.0, 0.0, 30.0]])
    episodes: Any = EpisodeStats(sums, 2 * sums, np.array([[5.0, 1.0, 5.0]]), {"own": sums})
    means = episode_means(episodes, ("a", "b", "a"))
    assert means["episode/return/a"] == [4.0]
    assert means["episode/return/b"] == [0.0]
    assert means["episode/return"] == means["episode/own"] == [2.0]
    assert means["episode/length"] == [4.0]
    assert means["episode/count"] == [11.0]
    assert not any(name.startswith("score/") for name in means)
    # A task none of whose episodes ended has no mean, and so they have none together.
    absent = episode_means(episodes._replace(count=np.array([[5.0, 0.0, 5.0]])), ("a", "b", "a"))
    assert np.isnan(absent["episode/return"])
    assert absent["episode/return/a"] == [4.0]
    # Pong: 0 and 35.3 above random play's -20.7; Breakout: 1.7 and 28.8.
    scores = episode_means(
        EpisodeStats(np.array([[14.6, 116.9]]), sums[:, :2], np.ones((1, 2))),  # type: ignore[arg-type]
        ("envpool:Pong-v5", "envpool:Breakout-v5"),
    )
    assert scores["score/capped_mean"] == pytest.approx(1.0)
    assert scores["score/mean"] == scores["score/median"] == pytest.approx((1 + 115.2 / 28.8) / 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 15}, "num_envs=15: 15 lanes of a shard do not divide among 2 tasks; use num_envs=14 or 16."),
        ({"num_envs": 1, "arch": "sebulba"}, "1 lanes of an actor do not divide among 2 tasks; use num_envs=2."),
        ({"num_envs": 12, "num_shards": 4}, "3 lanes of a shard do not divide among 2 tasks; use num_envs=8 or 16."),
    ],
)
def test_lanes_that_do_not_divide(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        podracer.train("vtrace", ["catch", "catch"], **settings)


def test_tasks_by_name() -> None:
    made = task_lists.make(["catch", "cartpole", "catch"], {"union": "pad", "rows": 5}, ["flatten"])
    assert made.spec.tasks == ("catch", "cartpole", "catch")
    assert made.spec.observation_space.shape == (25,)
    assert list(made.alone()) == ["catch", "cartpole"]
    options = environments.options("catch,cartpole")
    assert options(rows=7, union="pad").rows == 7
    with pytest.raises(ValueError, match="union"):
        options(union="all")
    assert rundir.default("ppo", "envpool:A-v1,envpool:B-v1", 3).name == "envpool-A-v1+envpool-B-v1-ppo-3"
    assert rundir.default("ppo", ",".join(["envpool:Pong-v5"] * 57), 3).name == "57-tasks-ppo-3"
    assert environments.modules_of("catch,gymnasium:own.module:Own-v0,gymnasium:CartPole-v1") == ["own.module"]


@pytest.mark.parametrize(
    ("things", "settings", "message"),
    [
        (["catch", "cartpole"], {}, "catch and cartpole observe .* and one network has one space: union='pad'"),
        (["catch", "cartpole"], {"union": "pad"}, "union='pad' pads only observations that are vectors"),
        (
            ["mountain_car_continuous", "pendulum"],
            {"union": "pad"},
            "take actions in .* and one network has one space: union='pad' pads only observations",
        ),
        (["catch", "catch"], {"size": 3}, "no task has the option 'size'; known: columns, rows, task_input, union"),
        (["catch", "tic_tac_toe"], {}, "tic_tac_toe is a game for two"),
        (["catch", Host(Told(), [])], {}, "tasks in pure JAX and tasks of the host cannot be mixed"),
        (
            [make("catch"), wrappers.scale_reward(-1.0)(make("catch"))],
            {},
            "two tasks are called 'catch'; name them: Tasks",
        ),
        (["catch"] * 33, {}, "33 tasks: a program holds at most 32"),
        ([], {}, "no tasks"),
    ],
)
def test_tasks_that_do_not_fit(things: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_lists.make(things, settings)


@pytest.mark.slow
def test_every_task_is_evaluated_by_itself(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catch = make("catch")
    negated = wrappers.scale_reward(-1.0)(catch)
    both = Tasks({"catch": catch, "negated": negated})
    config = {"hidden_sizes": (8,), "rollout_length": T}
    result = podracer.train(
        "vtrace", both, config=config, num_envs=4, total_steps=200, eval_episodes=8, run_dir=tmp_path, progress=False
    )
    found, alone = result.evaluate(8, seed=3), []
    for environment in (catch, negated):
        params = jax.tree.map(lambda x: x[None], result.actor_params())
        alone += evaluation.Evaluator(result.agent, environment, 8)(params, np.asarray([3], np.int32))
    np.testing.assert_array_equal(found.returns, np.concatenate([one.returns for one in alone]))
    assert {name: task.mean for name, task in found.tasks.items()} == {"catch": alone[0].mean, "negated": alone[1].mean}
    assert found.mean == pytest.approx(np.mean([one.mean for one in alone]))
    spread = np.sqrt(sum(one.std**2 / 8 for one in alone)) / 2  # of a mean over tasks
    assert found.interval[1] - found.mean == pytest.approx(1.96 * spread)
    assert result.summary["tasks"]["negated"]["eval_episodes"] == 8
    rows = [row for row in result.history if "eval/return_mean" in row]
    assert rows[-1]["eval/return/catch"] == result.summary["tasks"]["catch"]["eval_return_mean"]
    assert any("episode/return/negated" in row for row in result.history)
    again = podracer.load(tmp_path, environment=both)
    np.testing.assert_array_equal(again.evaluate(8, seed=3).returns, found.returns)
    monkeypatch.setattr(Anakin, "compile", pytest.fail)  # it is complete
    assert podracer.resume(tmp_path, environment=both, progress=False).summary == result.summary


def on_eight_devices() -> None:
    """Learners of both drivers get the rows of each lane's task."""
    assert len(jax.devices()) == 8
    for environment in (Tasks(TOLD), HostTasks({name: SteppedEnvironments(told) for name, told in TOLD.items()})):
        arch = "sebulba" if isinstance(environment, HostTasks) else "anakin"
        settings = {"num_envs": 36 if arch == "sebulba" else 24, "total_steps": 600, "eval_episodes": 4}
        agent = agent_of(environment.spec)
        result = podracer.train(agent, environment, arch=arch, progress=False, **settings)
        assert result.summary["devices"] == 8
        rows = [row for row in result.history if "wrong" in row]
        assert rows
        assert {row["wrong"] for row in rows} == {0.0}
        lanes = settings["num_envs"] // (2 if arch == "sebulba" else 1)  # a batch is of one of two actors
        assert {row["rows"] for row in rows} == {lanes * (T + 1.0)}
        for name, told in TOLD.items():
            assert rows[-1][f"episode/return/{name}"] == told.code * told.length
            assert result.summary["tasks"][name]["eval_return_mean"] == told.code * told.length


@pytest.mark.nightly
@pytest.mark.slow
def test_eight_devices() -> None:
    code = "import jax; jax.config.update('jax_num_cpu_devices', 8); from tests.environments import test_tasks as t; "
    environment = os.environ | {"NPROC": "32", "JAX_PLATFORMS": "cpu"}
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-c", code + "t.on_eight_devices()"]
    done = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(root)}, cwd=root, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
