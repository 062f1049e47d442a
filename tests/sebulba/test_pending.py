"""Pending updates: however they are cut, beside whatever they run, stopped and resumed, runs are the same bit for bit."""

import functools
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, topology
from podracer.environments.from_jax import SteppedEnvironments
from podracer.learning.learner import add_updates
from podracer.run.config import RunConfig
from podracer.run.driver import RunHooks
from podracer.sebulba import learner_loop
from podracer.sebulba.driver import Sebulba
from tests.support import counting, harness

T, B = 10, 4
DUE = 5  # updates after a rollout
COUNTING = counting.CountingEnvironment()


@functools.cache
def agent():
    """DUE updates a rollout, once there are two."""
    replayed = {"batch_size": 8, "replay_capacity": 200 * T, "replay_min_size": 8 * T, "replay_ratio": DUE * 8 / B}
    config = agents.R2D2Config(
        rollout_length=T, hidden_sizes=(8,), core="none", head_size=8, burn_in=0, trace_length=T, **replayed
    )
    return agents.r2d2.make(COUNTING.spec, config)


class Forgetful(SteppedEnvironments):
    """Environments that cannot be saved, as EnvPool's."""

    saved = False

    def make(self, *args, **kwargs):
        environment = super().make(*args, **kwargs)

        class Running:
            spec, recv, send, close = environment.spec, environment.recv, environment.send, environment.close

        return Running()


class Sleepy(SteppedEnvironments):
    """Environments that take their time."""

    def make(self, *args, **kwargs):
        environment = super().make(*args, **kwargs)
        send, rng = environment.send, random.Random(0)

        def late(*arguments):
            time.sleep(rng.random() * 0.01)
            send(*arguments)

        environment.send = late
        return environment


@functools.cache
def compiled(threads, updates_per_call, memory):
    driver = made(SteppedEnvironments(COUNTING), "lockstep", threads, updates_per_call, memory)
    driver.compile(driver.init())
    return driver


def made(environments, mode, threads, updates_per_call, memory):
    layout = topology.make_host(
        num_envs=B * threads, envs_per_actor=B, actor_threads=threads, devices=jax.local_devices()[:1]
    )
    settings = {"mode": mode, "replay_memory": memory, "updates_per_call": updates_per_call}
    return Sebulba(agent(), environments, layout, RunConfig(seed=3, **settings), agent().hyper)


def driver_of(mode, threads=1, updates_per_call=1, memory="device", environments=SteppedEnvironments):
    """A driver; those of one shape share what is compiled."""
    driver = made(environments(COUNTING), mode, threads, updates_per_call, memory)
    shared = compiled(threads, updates_per_call, memory)
    for name in ("_actor_programs", "_programs"):
        setattr(driver, name, getattr(shared, name))
    return driver


def run(driver, state=None, total_steps=240, stop_after=None, milestone=None, nap=0.0, reports=None):
    """Trains; returns the final state, whether it is complete, and the states of milestones; fills `reports`.

    With `stop_after`, a signal comes after so many calls of updates.
    """
    calls, states = [], []
    drain = driver._programs.run_pending_updates

    def counted(*arguments):
        calls.append(int(arguments[3]))
        time.sleep(nap)
        return drain(*arguments)

    driver._programs = driver._programs._replace(run_pending_updates=counted)
    final, complete = driver.run(
        driver.init() if state is None else state,
        RunHooks(
            next_milestone=lambda steps: total_steps if milestone is None or steps >= milestone else milestone,
            on_progress=[].append if reports is None else reports.append,
            on_milestone=lambda state, steps: states.append(jax.tree.map(jnp.copy, state)),
            should_stop=lambda: stop_after is not None and len(calls) >= stop_after,
        ),
        total_steps=total_steps,
    )
    return final, complete, states


@functools.cache
def whole(mode, threads):
    """The result of an undisturbed run."""
    return run(driver_of(mode, threads))[0]


def assert_same(state, expected):
    """All arrays: learner, replay, counts, and where actors go on."""
    harness.assert_same(harness.numbers_of(state), harness.numbers_of(expected))


@pytest.mark.parametrize(
    ("updates_per_call", "memory", "environments"),
    [
        pytest.param(3, "device", Sleepy, marks=pytest.mark.slow),
        pytest.param(None, "device", SteppedEnvironments, marks=pytest.mark.slow),
        pytest.param(100, "host", SteppedEnvironments, marks=pytest.mark.slow),
    ],
)
def test_how_updates_are_cut_changes_nothing(updates_per_call, memory, environments):
    driver = driver_of("lockstep", 1, updates_per_call, memory, environments)
    final, complete, _ = run(driver, nap=0.002 if environments is Sleepy else 0.0)
    assert complete
    assert_same(final, whole("lockstep", 1))
    assert int(final.replay_state.counts.draws) == int(final.learner.num_updates[0]) > 2 * DUE


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "threads"),
    [
        ("lockstep", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("lockstep", 2), ("serial", 1), ("serial", 2))),
    ],
)
def test_a_run_stopped_between_updates_goes_on_bit_for_bit(mode, threads):
    stopped, complete, _ = run(driver_of(mode, threads), stop_after=DUE + 2)
    counts = stopped.replay_state.counts
    assert not complete
    assert int(counts.pending_updates) == DUE - 2
    assert int(counts.draws) == int(stopped.learner.num_updates[0]) == DUE + 2
    driver, begun = driver_of(mode, threads), int(counts.batches)
    actor_pool = driver.actor_pool

    def before_the_updates(*args, **kwargs):
        made = actor_pool(*args, **kwargs)
        published = [version.number for version in made.context.store.snapshot()]
        assert published == [begun - threads + i for i in range(threads)], "the next is what they lead to"
        return made

    driver.actor_pool = before_the_updates
    final, complete, _ = run(driver, stopped)
    assert complete
    assert_same(final, whole(mode, threads))


@pytest.mark.slow
def test_updates_that_a_lost_replay_puts_off_are_done_once_it_is_filled():
    """So whatever counts updates, as target networks do, stays in step with rollouts and publications."""
    stopped, *_ = run(driver_of("lockstep"), stop_after=DUE + 2)
    replay_state = stopped.replay_state
    empty = jax.tree.map(jnp.zeros_like, replay_state)._replace(counts=replay_state.counts.without_rollouts())
    assert (int(empty.counts.pending_updates), int(empty.counts.deferred_updates)) == (0, DUE - 2)
    reports: list = []
    final, complete, _ = run(driver_of("lockstep"), stopped._replace(replay_state=empty), 400, reports=reports)
    assert complete
    assert int(final.replay_state.counts.deferred_updates) == 0
    assert int(final.replay_state.counts.draws) == int(final.learner.num_updates[0]) > 4 * DUE
    assert int(final.replay_state.counts.draws) % DUE == 0


@pytest.mark.slow
def test_no_update_behind_the_last_step_is_due_on_a_replay_that_was_lost():
    replay_state = whole("lockstep", 1).replay_state
    assert int(add_updates(replay_state, 3).counts.pending_updates) == 3
    assert (
        int(add_updates(replay_state._replace(counts=replay_state.counts.without_rollouts()), 3).counts.pending_updates)
        == 0
    )


def test_a_milestone_does_not_wait():
    """The state there has pending updates, from which a run goes on; only the end waits for them."""
    final, _, (middle, end) = run(driver_of("lockstep"), milestone=100)
    assert int(middle.replay_state.counts.pending_updates) == DUE
    assert int(end.replay_state.counts.pending_updates) == 0
    assert_same(final, whole("lockstep", 1))
    assert_same(run(driver_of("lockstep"), middle)[0], final)


@pytest.mark.parametrize("mode", ["lockstep", pytest.param("serial", marks=pytest.mark.slow)])
def test_without_saved_environments_pending_updates_come_first(mode):
    """As for EnvPool: what acts next is what they lead to, in new environments."""
    stopped, complete, _ = run(driver_of(mode, environments=Forgetful), stop_after=DUE + 2)
    assert stopped.actors == ()
    assert not complete
    driver, seen = driver_of(mode, environments=Forgetful), []
    spread = driver.learning.spread

    def capture(trajectory, replica):
        seen.append(np.unique(trajectory.policy_version))
        return spread(trajectory, replica)

    driver.learning = driver.learning._replace(spread=capture)
    assert not run(driver, jax.tree.map(jnp.copy, stopped), stop_after=1)[1], "a signal is heard before actors start"
    assert not seen
    driver = driver_of(mode, environments=Forgetful)
    driver.learning = driver.learning._replace(spread=capture)
    assert run(driver, stopped)[1]
    np.testing.assert_array_equal(seen[0], 2 * DUE)


def test_a_stop_before_the_last_updates_is_made_good():
    """All rollouts are there, and the updates after the last are not: they are done, and the end is told once more."""
    total = int(whole("lockstep", 1).learner.num_updates[0])  # one a call
    stopped, complete, states = run(driver_of("lockstep"), stop_after=total - 2)
    assert not complete
    assert not states
    assert int(stopped.replay_state.counts.pending_updates) == 2
    assert int(stopped.env_steps.low[0]) >= 240
    final, complete, (end,) = run(driver_of("lockstep"), stopped)
    assert complete
    assert_same(end, whole("lockstep", 1))
    assert_same(final, whole("lockstep", 1))


@pytest.mark.slow
def test_serial_actors_wait_for_the_learner():
    """Every round of the actors is acted by what all rollouts before it led to: with one, the lag is 0."""
    for threads in (1, 2):
        driver, seen = driver_of("serial", threads), []
        spread = driver.learning.spread

        def capture(trajectory, replica, spread=spread, seen=seen):
            seen.append((int(trajectory.lane[0]), np.unique(trajectory.policy_version).tolist()))
            return spread(trajectory, replica)

        driver.learning = driver.learning._replace(spread=capture)
        run(driver)
        for actor in range(threads):
            versions = [version for lane, version in seen if lane == actor * B]
            # The first two sequences of a lane are there with the third rollout of one actor, or the second of both.
            due = [max(0, (round_ * threads - (threads + 1)) * DUE) for round_ in range(len(versions))]
            assert versions == [[number] for number in due]


def test_the_time_of_a_rollout_is_reported_with_its_updates(monkeypatch):
    """The report of a milestone, which comes before long updates, has no seconds; the next one has all of them."""
    monkeypatch.setattr(learner_loop, "SECONDS_PER_REPORT", 0.0)
    reports = []
    start = time.perf_counter()
    run(driver_of("lockstep"), milestone=120, nap=0.01, reports=reports)
    seconds = time.perf_counter() - start
    (late,) = [i for i, report in enumerate(reports) if not report.seconds]
    before, untimed, following = reports[late - 1 : late + 2]
    assert untimed.transitions == 0
    assert not any(name.endswith("_share") for name in untimed.metrics)
    assert following.transitions == following.env_steps - before.env_steps
    assert following.seconds > 0.01 * 2 * DUE
    assert sum(report.transitions for report in reports) == reports[-1].env_steps
    assert sum(report.seconds for report in reports) <= seconds


@pytest.mark.parametrize("updates_per_call", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_an_update_is_traced_once(updates_per_call):
    """For the check of an agent, for the shapes of its metrics, and for its program."""
    traced = []

    def learn(*arguments):
        traced.append(arguments)
        return agent().learn(*arguments)

    counted = agent()._replace(learn=learn)
    layout = topology.make_host(num_envs=B, envs_per_actor=B, devices=jax.local_devices()[:1])
    settings = {"mode": "lockstep", "updates_per_call": updates_per_call}
    driver = Sebulba(counted, SteppedEnvironments(COUNTING), layout, RunConfig(seed=3, **settings), agent().hyper)
    driver.check()
    driver.compile(driver.init())
    assert len(traced) == 1
