"""Injected faults of an actor/learner system: each surfaces at once, names its thread, and leaves nothing running."""

import itertools
import json
import math
import os
import re
import signal
import threading
import time
import types
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import podracer
from podracer import cli
from podracer.sebulba import actor_factory, actor_pool, learner_loop
from podracer.training import session
from tests.support import harness, hosts

CONFIG = {"rollout_length": 5, "hidden_sizes": (4,)}
SETTINGS = {"num_envs": 4, "eval_episodes": 2, "progress": False, "config": CONFIG}


def train(environments, total_steps=400, **settings):
    return podracer.train("vtrace", environments, total_steps=total_steps, **(SETTINGS | settings))


class InjectedError(RuntimeError):
    pass


@pytest.fixture(scope="module", autouse=True)
def _programs_are_shared():
    with harness.shared_programs():
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_running():
    yield
    assert hosts.within(5.0, lambda: not hosts.live_actors())


def test_a_run_ends_with_its_environments_closed():
    environments = hosts.Steps()
    result = train(environments, actor_threads=2)
    assert result.summary["complete"]
    assert result.summary["arch"] == "sebulba"
    assert sum(name.startswith("actor ") for name in environments.closed) == 2


@pytest.mark.parametrize("mode", ["async", "lockstep"])
@pytest.mark.parametrize("at", [1, 7])
def test_an_actor_that_raises_ends_the_run(mode, at):
    def misbehave(number, thread):
        if number == at and thread.startswith("actor 1"):
            raise InjectedError("the plug was pulled")

    start = time.monotonic()
    with pytest.raises(podracer.ActorError, match=r"actor 1 on .* failed in steps: InjectedError: the plug") as raised:
        train(hosts.Steps(misbehave), total_steps=10**6, actor_threads=2, num_envs=8, mode=mode)
    assert time.monotonic() - start < 20.0  # compilation included
    assert isinstance(raised.value.__cause__, InjectedError)


def test_time_in_which_the_learner_evaluates_does_not_count():
    """An environment may wait for the lanes of an evaluation."""
    waits: Any = types.SimpleNamespace(
        name="actor 0", error=None, is_alive=lambda: True, waiting_since=time.perf_counter() - 60
    )
    context: Any = None
    watch = actor_pool.ActorPool([waits], context, "steps", 30.0, 0, lambda actor: actor)
    with pytest.raises(podracer.ActorError, match="actor 0: steps has not answered for 60 s"):
        watch.check()
    watch.back()
    watch.check()


def test_an_actor_that_fails_while_its_errors_are_read_is_named():
    """Another one, which it ends, ends without a word."""
    errors = itertools.chain([None], itertools.repeat(InjectedError("the plug was pulled")))

    class Failing:
        name, waiting_since, is_alive = "actor 0", None, staticmethod(lambda: False)
        error = property(lambda self: next(errors))

    actors: Any = [types.SimpleNamespace(name="actor 1", error=None, is_alive=lambda: False, waiting_since=None)]
    context: Any = None
    watch = actor_pool.ActorPool([*actors, Failing()], context, "steps", 30.0, 0, lambda actor: actor)
    with pytest.raises(podracer.ActorError, match="actor 0 failed in steps: InjectedError: the plug"):
        watch.check()


def test_an_actor_that_dies_while_the_learner_waits(monkeypatch):
    """Not after a time-out: the learner is woken."""
    monkeypatch.setattr(actor_pool, "POLL_SECONDS", 5.0)
    died = []

    def misbehave(number, thread):
        if number == 12:
            time.sleep(1.0)  # the learner is waiting by now
            died.append(time.monotonic())
            raise InjectedError("gone")

    with pytest.raises(podracer.ActorError, match="InjectedError: gone"):
        train(hosts.Steps(misbehave))
    assert time.monotonic() - died[0] < 3.0


def test_an_environment_that_cannot_be_made():
    class Refusing(hosts.Steps):
        def make(self, num_lanes, seed, *, evaluation=False):
            if num_lanes > 1:
                raise InjectedError("no more of these")
            return super().make(num_lanes, seed, evaluation=evaluation)

    with pytest.raises(podracer.ActorError, match="no more of these"):
        train(Refusing(), eval_episodes=1)


def test_an_environment_that_hangs_is_named():
    def misbehave(number, thread):
        if number == 8 and thread.startswith("actor 0"):
            time.sleep(2.0)

    start = time.monotonic()
    with pytest.raises(
        podracer.ActorError, match=r"actor 0 on .*: steps has not answered for \d+ s; .*env_timeout=0.5"
    ):
        train(hosts.Steps(misbehave), env_timeout=0.5)
    assert time.monotonic() - start < 20.0


@pytest.mark.parametrize("mode", ["async", pytest.param("lockstep", marks=pytest.mark.slow)])
def test_an_environment_that_hangs_is_replaced_if_asked(mode, capfd):
    hangs = [2.0, 2.0]

    def misbehave(number, thread):
        if number == 8 and thread.startswith("actor 0") and hangs:
            time.sleep(hangs.pop())
        if thread.startswith("actor 1") and len({seed for seed, _ in environments.seeds}) < 4:
            time.sleep(0.1)  # or the run might end before the first one has hung twice

    environments = hosts.Steps(misbehave)
    result = train(environments, env_timeout=0.5, env_restarts=2, actor_threads=2, mode=mode, total_steps=2000)
    assert result.summary["complete"]
    said = re.findall(r"actor 0 .*: steps has not answered for .*\((\d) restart", capfd.readouterr().err)
    assert said == ["1", "0"]
    # Lockstep also makes the first ones to see whether they can be saved.
    assert len({seed for seed, _ in environments.seeds}) == 4, "two actors, and two of the first one's"
    assert hosts.within(10.0, lambda: not hosts.live_actors()), "who woke up too late went home"


@pytest.mark.parametrize(("which", "named"), [("reward", "reward"), ("beyond", "observation")])
def test_a_loss_that_is_not_finite_ends_the_run(which, named, tmp_path):
    environments = hosts.Steps()

    def misbehave(number, thread):
        if number > 60:
            setattr(environments, which, math.inf)

    environments.misbehave = misbehave
    with pytest.raises(
        podracer.TrainingDivergedError,
        match=rf"^the environment's {named} is not finite in row \d+ of a rollout, lane 0 of its actor, and so .* not finite "
        r"after .*last good checkpoint is .*checkpoints",
    ):
        train(environments, total_steps=10**5, run_dir=tmp_path / "run", checkpoint_every=100, eval_every=10**5)
    steps = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert steps
    environments = hosts.Steps()
    restored = podracer.load(tmp_path / "run", environment=environments)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(restored.learner.params))


def test_an_environment_that_cannot_go_on_is_closed():
    environment = mock.Mock(load=mock.Mock(side_effect=InjectedError("of another version")))
    with pytest.raises(InjectedError):
        actor_factory._load(lambda: environment, mock.Mock())
    environment.close.assert_called_once_with()


def test_a_learner_that_raises_ends_the_actors():
    def log(steps, row):
        raise InjectedError("the disk is full")

    with pytest.raises(InjectedError):
        train(hosts.Steps(), total_steps=10**6, log=log, eval_every=10**6)


def test_an_actor_that_hangs_does_not_hold_up_an_error():
    """In a pod, the others learn of it only then."""
    actor, context = mock.Mock(join=time.sleep), mock.Mock()
    team = actor_pool.ActorPool([actor, actor], context, "its environment", 1.0, 0, mock.Mock())
    begin = time.monotonic()
    with pytest.raises(InjectedError), team:
        raise InjectedError
    assert time.monotonic() - begin < 1.0
    assert actor.stop.call_count == 2


def test_an_error_that_comes_with_a_signal_is_a_stop():
    requested = []

    def fail():
        requested.append(True)  # the signal reaches the learner a little later
        raise podracer.ActorError("its processes are gone")

    assert actor_pool.stops(lambda: bool(requested), fail)
    with pytest.raises(podracer.ActorError):
        actor_pool.stops(lambda: False, fail)
    assert not actor_pool.stops(lambda: False, lambda: None)


def stop_after(seconds, monkeypatch):
    """Requests a stop that long after the actors began."""
    enter = actor_pool.ActorPool.__enter__
    requested = []

    def begin(actor_pool):
        timer = threading.Timer(seconds, lambda: requested.append(time.monotonic()))
        timer.start()
        return enter(actor_pool)

    monkeypatch.setattr(actor_pool.ActorPool, "__enter__", begin)
    monkeypatch.setattr(session.StopSignal, "requested", property(lambda self: bool(requested), lambda self, x: None))
    monkeypatch.setattr(session.StopSignal, "number", signal.SIGTERM)
    return requested


@pytest.mark.parametrize("where", ["queue full", "queue empty", "lockstep"])
def test_a_stop_reaches_every_wait(where, monkeypatch):
    """The learner is slow, so actors wait for room or parameters; or the environment is, so the learner waits."""
    requested = stop_after(1.0, monkeypatch)
    slow_environment = where == "queue empty"
    environments = hosts.Steps(lambda number, thread: time.sleep(0.4 * slow_environment))
    learn = learner_loop.LearnerLoop.learn

    def slowly(self, *args):
        if not slow_environment:
            time.sleep(0.4)
        return learn(self, *args)

    monkeypatch.setattr(learner_loop.LearnerLoop, "learn", slowly)
    mode = "lockstep" if where == "lockstep" else "async"
    with pytest.raises(podracer.Interrupted) as stopped:
        train(environments, total_steps=10**6, eval_every=10**6, mode=mode, actor_threads=2, num_envs=8)
    assert not stopped.value.result.summary["complete"]
    assert time.monotonic() - requested[0] < 4.0


@pytest.mark.slow
def test_a_slow_learner_holds_up_its_actors(monkeypatch):
    """Queue and policy lag stay bounded, and are in the metrics."""
    learn = learner_loop.LearnerLoop.learn

    def slowly(self, *args):
        time.sleep(0.02)
        return learn(self, *args)

    monkeypatch.setattr(learner_loop.LearnerLoop, "learn", slowly)
    result = train(hosts.Steps(), total_steps=2000, actor_threads=2, num_envs=8, queue_capacity=2)
    rows = [row for row in result.history if "sebulba/queue_depth" in row]
    assert rows
    assert max(row["sebulba/queue_depth"] for row in rows) <= 4
    # A rollout waits behind the queue, and may have been begun one learning earlier per actor.
    assert 1 <= max(row["sebulba/policy_lag_max"] for row in rows) <= 4 + 2 + 1
    assert max(row["sebulba/queue_share"] for row in rows) > 0.1


@pytest.mark.slow
def test_every_lane_has_a_seed_of_its_own(tmp_path):
    """Over threads, evaluation, seeds and a resumed run."""
    seen = []
    for seed in (0, 1):
        environments = hosts.Steps()
        settings = {"actor_threads": 2, "num_envs": 8, "seed": seed, "run_dir": tmp_path / str(seed)}
        train(environments, mode="async", checkpoint_every=80, **settings)
        resumed = hosts.Steps()
        # The last checkpoint goes, so that there is something left to do.
        checkpoints = tmp_path / str(seed) / "checkpoints"
        newest = max(checkpoints.iterdir(), key=lambda path: int(path.name))
        newest.rename(tmp_path / f"{seed}-{newest.name}")
        train(resumed, resume=True, **settings)
        seen += environments.seeds + resumed.seeds
    lanes = [first + i for first, lanes in seen for i in range(lanes)]
    assert len(lanes) > 30
    training = set(seen)
    assert len(training) == len(seen), "the same environments were made twice"
    evaluations = [first for first, lanes in seen if lanes == 2]
    assert not set(evaluations) & set(lanes[: 8 * 4])


def test_one_line_and_a_code(capsys, tmp_path):
    for arguments, message in (
        (["train", "vtrace", "envpol:CartPole-v1"], "unknown kind of environment 'envpol'"),
        (["train", "vtrace", "envpool:CartPole-v7"], "EnvPool has no environment 'CartPole-v7'; did you mean"),
        (["train", "vtrace", "gymnasium:CartPole-v7"], "Gymnasium cannot make 'CartPole-v7'"),
        (["train", "vtrace", "envpool:CartPole-v1", "--env.settings", "nonsense=1"], "has no setting 'nonsense'"),
        (["train", "vtrace", "envpool:CartPole-v1", "--env.settings", "nonsense"], "write name=value"),
        (["train", "vtrace", "envpool:CartPole-v1", "--population", "2"], "population=2: only Anakin has it"),
        (["train", "vtrace", "envpool:CartPole-v1", "--num-envs", "7", "--num-shards", "2"], "use 6 or 8"),
        (["train", "vtrace", "envpool:CartPole-v1", "--actor-devices", "3"], "actor_devices=3"),
        (["train", "vtrace", "envpool:CartPole-v1", "--arch", "anakin"], "arch='anakin' needs a pure-JAX environment"),
        (
            ["train", "ppo", "envpool:CartPole-v1", "--num-envs", "9", "--agent.rollout-length", "5"],
            "num_minibatches=4",
        ),
    ):
        assert cli.run([*arguments, "--run-dir", str(tmp_path / "run")]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not os.path.exists(tmp_path / "run")


@pytest.mark.slow
def test_a_run_directory_is_like_anakins(tmp_path):
    """The same files, and metrics of the same names, whichever driver ran."""
    names, files = {}, {}
    for arch in ("anakin", "sebulba"):
        run_dir = tmp_path / arch
        podracer.train(
            "vtrace",
            "catch",
            config=CONFIG,
            arch=arch,
            total_steps=500,
            num_envs=8,
            eval_episodes=4,
            progress=False,
            run_dir=run_dir,
        )
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        names[arch] = {name for row in rows for name in row if not name.startswith("sebulba/")}
        files[arch] = {path.name for path in run_dir.iterdir()}
        summary = json.loads((run_dir / "summary.json").read_text())
        names[arch, "summary"] = set(summary)
        assert summary["arch"] == arch
        result = podracer.load(run_dir)
        assert result.evaluate(4).episodes == 4
        result.animate(run_dir / "policy.gif")
    assert names["anakin"] == names["sebulba"]
    assert names["anakin", "summary"] == names["sebulba", "summary"]
    assert files["anakin"] == files["sebulba"]
