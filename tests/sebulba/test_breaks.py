"""A break in the stream of a lane: a `first` row that no `last` one precedes, as after a lost environment."""

import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import agents, environments, spaces
from podracer.errors import Closed
from podracer.evaluation import evaluation
from podracer.sebulba import actor_program
from podracer.topology import collectives
from podracer.types import EnvSpec, HostStep, TimeStep, Trajectory
from tests.support import hosts

ROWS = 9


def counted(raw, broken):
    """Episode statistics of one lane, whose games have 2 episodes of 2 transitions, over rows 1 to 8."""
    # Row 0 opens a game; rows 3, 6 follow the end of an episode, 6 that of a game.
    first = np.isin(np.arange(ROWS), [0, 3, 6])
    last = np.isin(np.arange(ROWS), [2, 5, 8])
    over = np.isin(np.arange(ROWS), [5])
    if broken:  # in the second episode, at row 4, which is no end of anything
        first[4], last[5], over[5] = True, True, True
    score = np.where(first, 0.0, 1.0)
    rows = np.stack([score, ~last, first, last] + ([score, over] if raw else []))[..., None].astype(np.float32)
    zeros = jnp.zeros(1)
    games = actor_program.EpisodeCounters(zeros, zeros, zeros > 0, zeros > 0)
    score, over = (rows[4], rows[5]) if raw else (rows[0], rows[3])
    return actor_program._count(games, 1, *(jnp.asarray(x) for x in (score, over > 0, rows[2] > 0, rows[3] > 0)), ())[1]


@pytest.mark.parametrize("raw", [True, False])
def test_a_game_that_broke_is_not_counted(raw):
    sums = counted(raw, broken=False)
    assert (float(sums.count), float(sums.return_sum)) == ((1, 4) if raw else (3, 6))
    sums = counted(raw, broken=True)
    # What was played before the break belongs to no game that ended.
    assert (float(sums.count), float(sums.return_sum), float(sums.length_sum)) == ((1, 1, 1) if raw else (3, 5, 5))


@pytest.mark.slow  # quick: agents/test_ppo.py, of rows that wait
@pytest.mark.nightly
def test_moments_of_observations_leave_out_what_was_not_played():
    spec = EnvSpec("break", spaces.Box(-9.0, 9.0, (1,)), spaces.Discrete(2))
    config = agents.PPOConfig(hidden_sizes=(2,), normalize_observations=True, num_minibatches=1, num_epochs=1)
    agent = agents.ppo.make(spec, config)
    T, B = 6, 2
    key = jax.random.key(0)

    def learnt(first, observation):
        rows = TimeStep(observation, jnp.zeros((T + 1, B)), jnp.ones((T + 1, B)), first, jnp.zeros((T + 1, B), bool))
        learner = agent.init(key, agent.hyper)
        state = agent.start(jnp.arange(B, dtype=jnp.int32), B)
        acted = [
            agent.act(agent.actor_params(learner, 0.0), state, jax.tree.map(lambda x: x[0], rows), key, False)
            for _ in range(T)
        ]
        stack = lambda i: jax.tree.map(lambda *x: jnp.stack(x), *(a[i] for a in acted))  # noqa: E731
        trajectory = Trajectory(
            rows, stack(0), stack(1), state, jnp.zeros((T, B), jnp.int32), jnp.arange(B, dtype=jnp.int32)
        )
        learn = jax.vmap(
            lambda x: agent.learn(learner, x, jnp.float32(0), key), axis_name=collectives.DATA_AXES[0], in_axes=0
        )
        for name in collectives.DATA_AXES[1:]:
            inner = learn
            learn = lambda x, inner=inner, name=name: jax.vmap(inner, axis_name=name)(  # noqa: E731
                jax.tree.map(lambda y: y[None], x)
            )
        new, _ = learn(jax.tree.map(lambda x: x[None], trajectory))
        return jax.tree.map(lambda x: np.ravel(x), new.aux)

    first = jnp.zeros((T + 1, B), bool).at[0].set(True)
    observation = jnp.asarray(np.random.default_rng(0).normal(size=(T + 1, B, 1)), jnp.float32)
    # Lane 1 waits for an environment in rows 0 to 2; it shows something, and what that is must not matter.
    waiting = first.at[:4, 1].set(True)
    one, other = (learnt(waiting, observation.at[:3, 1].set(shown)) for shown in (0.0, 8.0))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    with pytest.raises(AssertionError):
        jax.tree.map(np.testing.assert_array_equal, one, learnt(first, observation.at[:3, 1].set(8.0)))


class Breaking(hosts.Steps):
    """Environments whose lane 0 breaks once, in its third step."""

    def make(self, num_lanes, seed, *, evaluation=False):
        running = super().make(num_lanes, seed, evaluation=evaluation)
        recv, asked = running.recv, []

        def broken():
            asked.append(None)
            lanes, step = recv()
            if len(asked) == 4:
                running.step[0] = 0
                lanes, step = recv()
                step.scalars[:4, 0] = [0.0, 1.0, 1.0, 0.0]
            return lanes, step

        running.recv = broken
        return running


def test_an_evaluated_episode_that_breaks_begins_again():
    agent = agents.vtrace.make(Breaking().spec, agents.VTraceConfig(hidden_sizes=(2,)))
    params = agent.actor_params(agent.init(jax.random.key(0), agent.hyper), jnp.float32(0))
    played = evaluation.on_host(agent, Breaking(), 2, max_steps=20)(params, 0)
    np.testing.assert_array_equal(played.returns, [hosts.LENGTH] * 2)
    np.testing.assert_array_equal(played.lengths, [hosts.LENGTH] * 2)
    assert played.unfinished == 0


class Waiting(hosts.Steps):
    """Environments whose rows do not come until they are woken: in training, or in an evaluation."""

    in_evaluations = False

    def make(self, num_lanes, seed, *, evaluation=False):
        running = super().make(num_lanes, seed, evaluation=evaluation)
        if evaluation != self.in_evaluations:
            return running
        woken, recv, number = threading.Event(), running.recv, []

        def waiting():
            number.append(None)
            if len(number) == (2 if evaluation else 8):
                self.when_it_waits()
                assert woken.wait(20.0)
                raise Closed
            return recv()

        running.recv, running.wake = waiting, woken.set
        return running


def test_who_can_be_woken_watches_itself_and_ends_at_once():
    waiting = Waiting()
    # The time-out is far shorter than it waits, until the learner hears of the signal.
    waiting.when_it_waits = lambda: threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    config = {"rollout_length": 5, "hidden_sizes": (4,)}
    settings = {"total_steps": 10**6, "num_envs": 2, "env_timeout": 0.2, "eval_episodes": 2, "progress": False}
    with pytest.raises(podracer.Interrupted) as stopped:
        podracer.train("vtrace", waiting, config=config, **settings)
    assert not stopped.value.result.summary["complete"]
    assert stopped.value.result.summary["stopped_by"] == "SIGTERM"
    assert hosts.within(2.0, lambda: not hosts.live_actors())


@pytest.mark.parametrize(
    "total_steps", [pytest.param(100, marks=pytest.mark.slow, id="the last"), pytest.param(10**6, id="one between")]
)
def test_an_evaluation_that_waits_hears_a_signal(total_steps, tmp_path):
    """The run is stopped, and not complete, with a checkpoint from which the evaluation is done again."""
    waiting = Waiting()
    waiting.in_evaluations = True
    timers = []

    def signal_once():
        timers.append(threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)))
        assert len(timers) == 1, "who was told to stop evaluates no more, and a second signal would end this process"
        timers[0].start()

    waiting.when_it_waits = signal_once
    config = {"rollout_length": 5, "hidden_sizes": (4,)}
    settings = {"total_steps": total_steps, "num_envs": 2, "eval_every": 100, "eval_episodes": 2, "progress": False}
    with pytest.raises(podracer.Interrupted) as stopped:
        podracer.train("vtrace", waiting, config=config, run_dir=tmp_path / "run", **settings)
    result = stopped.value.result
    assert (result.summary["complete"], result.summary["stopped_by"]) == (False, "SIGTERM")
    assert result.summary["eval_return_mean"] is None
    steps = result.summary["env_steps"]
    assert (tmp_path / "run" / "checkpoints" / str(steps)).is_dir()
    if total_steps > steps:
        return
    again = podracer.resume(tmp_path / "run", environment=hosts.Steps(), progress=False)
    assert again.summary["complete"]
    assert again.summary["eval_return_mean"] is not None


def test_environments_that_are_not_jax_need_none():
    """A worker that steps environments for a learner elsewhere has no use for JAX. (EnvPool imports JAX itself.)"""
    code = (
        "import sys, podracer.environments.envpool; from podracer import environments\n"
        "environments.make('gymnasium:CartPole-v1').make(2, 0).recv()\n"
        "assert 'jax' not in sys.modules, 'jax is imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_rows_of_zeros_are_what_environments_show():
    for name in ("gymnasium:CartPole-v1", "envpool:CartPole-v1", "envpool:Pong-v5"):
        made = environments.make(name)
        running = made.make(3, 0)
        shown, zeros = running.recv()[1], HostStep.zeros(made.spec, 3)
        running.close()
        assert jax.tree.structure(shown) == jax.tree.structure(zeros)
        for x, y in zip(jax.tree.leaves(shown), jax.tree.leaves(zeros)):
            assert (x.shape, x.dtype) == (y.shape, y.dtype), name
