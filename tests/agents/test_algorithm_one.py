"""DQN through both drivers is algorithm 1 of the fast DQN paper, and DQN itself, as plain NumPy does them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from podracer import agents, environments, topology
from podracer.agents import DQNConfig
from podracer.environments.from_jax import SteppedEnvironments
from podracer.run.config import RunConfig
from podracer.run.driver import RunHooks
from podracer.sebulba.driver import Sebulba
from podracer.types import Agent, EnvSpec, LearnerState, TimeStep
from tests.support import fast_dqn_reference as reference
from tests.support import harness
from tests.support.recorded import Record, Walk

F, BATCH = 4, 8
PERIODS = 5
"""The least number of periods with updates."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a run: lanes, rollout length, rows between copies, rows that D holds."""

    W: int
    T: int
    C: int
    capacity: int = 1000

    @property
    def at_first(self) -> int:
        """N, rows before anything is learnt."""
        return 2 * self.C


WIDE, NARROW = Shape(4, 10, 40, capacity=4 * 49), Shape(1, 16, 16)  # with row 50 they fill 5 rollouts
SEQUENTIAL, ALL_AT_ONCE = Shape(1, 4, 16), Shape(4, 1, 16)


def agent_of(shape: Shape, spec: EnvSpec) -> Agent:
    """Exploration falls from 1 to 0 in the first two periods that are learnt in."""
    config = DQNConfig(
        rollout_length=shape.T,
        batch_size=BATCH,
        replay_ratio=BATCH / F,
        target_interval=shape.C // F,
        replay_capacity=shape.capacity,
        replay_min_size=shape.at_first,
        double=False,
        optimizer="rmsprop",
        learning_rate=1e-3,
        learning_rate_schedule="constant",
        max_grad_norm=float("inf"),
        max_error=1.0,
        epsilon_decay=2 * shape.C,
        epsilon_final=0.0,
        hidden_sizes=(8,),
        init="uniform",
    )
    return agents.dqn.make(spec, config)


@functools.cache
def made(shape: Shape) -> tuple[Agent, Record]:
    """An agent, recorded, for the walk."""
    record = Record()
    return record.of(agent_of(shape, Walk().spec)), record


def setting(shape: Shape) -> reference.Setting:
    return reference.Setting(
        F=F,
        C=shape.C,
        N=shape.at_first,
        capacity=shape.capacity,
        gamma=0.99,
        learning_rate=1e-3,
        decay=0.95,
        stability=1e-5,
        epsilon=lambda t: max(0.0, 1.0 - t / (2 * shape.C)),
        late=1,  # a row waits for the one behind it, which comes with the next rollout
    )


def layers(params: Any) -> reference.Theta:
    params = params["params"]
    return [(np.asarray(x["kernel"]), np.asarray(x["bias"])) for x in (params["torso"]["Dense_0"], params["q"])]


def flat(theta: reference.Theta) -> np.ndarray:
    return np.concatenate([np.ravel(x) for layer in theta for x in layer])


def assert_close(params: Any, theta: reference.Theta) -> None:
    np.testing.assert_allclose(flat(layers(params)), flat(theta), rtol=0, atol=1e-6)


# Runs.


class Sleepy(SteppedEnvironments):
    """Environments that take their time."""

    def make(self, *args: Any, **kwargs: Any) -> Any:
        environment = super().make(*args, **kwargs)
        send, rng = environment.send, random.Random(repr(args))

        def late(*arguments: Any) -> None:
            time.sleep(rng.random() * 0.005)
            send(*arguments)

        environment.send = late  # type: ignore[method-assign]
        return environment


def driver_of(
    agent: Agent, shape: Shape, mode: Any, environments: Any, updates_per_call: int | None, threads: int = 1
) -> Sebulba:
    layout = topology.make_host(
        num_envs=shape.W, envs_per_actor=shape.W // threads, actor_threads=threads, devices=jax.local_devices()[:1]
    )
    settings: Any = {"mode": mode, "updates_per_call": updates_per_call}
    return Sebulba(agent, environments, layout, RunConfig(seed=5, **settings), agent.hyper)


@functools.cache
def compiled(shape: Shape, updates_per_call: int) -> Sebulba:
    driver = driver_of(made(shape)[0], shape, "lockstep", SteppedEnvironments(Walk()), updates_per_call)
    driver.compile(driver.init())
    return driver


def share(driver: Sebulba, shared: Sebulba) -> Sebulba:
    """The driver, with what another has compiled."""
    for name in ("_actor_programs", "_programs"):
        setattr(driver, name, getattr(shared, name))
    return driver


def train(driver: Sebulba, state: Any, shape: Shape) -> Any:
    total = shape.at_first + PERIODS * shape.C
    state, complete = driver.run(
        state,
        RunHooks(
            next_milestone=lambda steps: total,
            on_progress=lambda progress: None,
            on_milestone=lambda state, steps: None,
            should_stop=lambda: False,
        ),
        total_steps=total,
    )
    assert complete
    return state


class Run(NamedTuple):
    """A run: its first parameters, its last learner, all of its last state, and its record."""

    first: Any
    learner: LearnerState
    state: Any
    record: Record

    @property
    def rollouts(self) -> int:
        return int(self.state.replay_state.counts.batches)


def run_of(first: Any, state: Any, record: Record) -> Run:
    jax.effects_barrier()
    state = harness.numbers_of(state)
    one = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
    return Run(one(first), one(state.learner), state, copy.deepcopy(record))


def cut(driver: Sebulba, at_once: int, pause: float) -> None:
    """Up to `at_once` updates a call, with pauses between calls."""
    drain, rng = driver._programs.run_pending_updates, random.Random(1)

    def late(*arguments: Any) -> Any:
        time.sleep(rng.random() * pause)
        assert drain is not None
        return drain(*arguments)

    driver._programs = driver._programs._replace(run_pending_updates=late, at_once=at_once, seconds=1e6)


def sebulba(shape: Shape, mode: str, updates_per_call: int = 7, at_once: int = 7, sleepy: bool = False) -> Run:
    """Trains, with up to `at_once` updates a call; drivers of one shape share what is compiled."""
    agent, record = made(shape)
    source = (Sleepy if sleepy else SteppedEnvironments)(Walk())
    driver = share(driver_of(agent, shape, mode, source, updates_per_call), compiled(shape, updates_per_call))
    cut(driver, at_once, 0.005 * sleepy)
    state = driver.init()
    first = harness.numbers_of(state.learner.params)
    record.clear()
    return run_of(first, train(driver, state, shape), record)


def anakin(shape: Shape) -> Run:
    agent, record = made(shape)
    prog = harness.make_program(agent, Walk(), num_envs=shape.W, lockstep=True)
    state = harness.initial(prog, agent, [5])
    first = harness.numbers_of(state.learner.params)
    record.clear()
    for _ in range(shape.at_first // shape.C + PERIODS + 1):
        state, _ = prog.step(state, prog.limits(10**6, 10**6, 1))
    return run_of(first, state, record)


# What is checked.


def streams(run: Run, shape: Shape) -> list[reference.Stream]:
    """The stream of each lane, up to the last rollout that was added."""
    number = run.rollouts * shape.T
    acted = run.record.acted[: number + 1]
    rows: TimeStep = jax.tree.map(lambda *x: np.stack(x), *[step.row for step in acted])
    if len(acted) == number:  # nobody saw the row behind them, and no transition into it is drawn
        behind = rows._replace(first=np.ones_like(rows.first))
        rows = jax.tree.map(lambda x, y: np.concatenate([x, y[-1:]]), rows, behind)
    each = *(np.asarray(x) for x in rows[:4]), np.stack([step.action for step in acted])[:number]
    return [reference.Stream(*(x[:, lane] for x in each)) for lane in range(shape.W)]


def minibatches(run: Run, seen: list[reference.Stream]) -> list[reference.Minibatch]:
    """(lane, row) of all that was drawn, update by update."""
    where = {x.tobytes(): (lane, row) for lane, s in enumerate(seen) for row, x in enumerate(s.observation[:-1])}
    assert len(where) == sum(len(s.action) for s in seen), "an observation says which row it is"
    assert sorted(run.record.learnt) == list(range(len(run.record.learnt)))
    return [[where[x.tobytes()] for x in learnt.observation] for _, learnt in sorted(run.record.learnt.items())]


def check(run: Run, shape: Shape, learn: Any = reference.fast_dqn, pending: int = 0) -> None:
    """Raises AssertionError unless a run is what the reference makes of what it saw, did and drew.

    Rollouts are as long as a period of the reference: C rows in fast DQN, F in DQN. `pending` of their updates are not
    done yet.
    """
    seen = streams(run, shape)
    samplers = [reference.Sampler(lane, stream) for lane, stream in enumerate(seen)]
    period = shape.W * shape.T
    before, due = shape.at_first // period, period // F  # rollouts that only fill D; updates after each of the others
    drawn = minibatches(run, seen)
    steps = run.rollouts - before - pending // due
    trainer, begun = learn(samplers, iter(drawn), layers(run.first), setting(shape), steps)

    assert trainer.updates == len(drawn) == due * (steps + 1) >= 4 * (shape.C // F)
    assert trainer.updates == run.learner.num_updates == run.state.replay_state.counts.draws
    assert run.state.replay_state.counts.pending_updates == pending
    assert_close(run.learner.params, trainer.theta)
    assert_close(run.learner.aux, trainer.target if learn is reference.dqn else trainer.theta)

    for number in range(run.rollouts):
        acted = run.record.acted[number * shape.T : (number + 1) * shape.T]
        published = acted[0].params
        for step in acted[1:]:
            harness.assert_same(step.params, published)
        if number < before:
            harness.assert_same(published.params, run.first)
            assert (published.version, published.aux) == (0, 1.0)
            continue
        expected = begun[number - before]
        assert int(published.version) == expected.updates
        assert expected.size == min(number * period - shape.W, shape.capacity)
        assert_close(published.params, expected.acting)
        np.testing.assert_allclose(published.aux, expected.epsilon, atol=1e-6)
        if learn is reference.fast_dqn:  # what acts is the target network, which stays for a period
            for update in range(expected.updates, min(expected.updates + due, trainer.updates)):
                harness.assert_same(run.record.learnt[update].target, published.params)
    explored = np.array([x for sampler in samplers for x in sampler.explored])
    for epsilon in np.unique(explored[:, 0]):
        found = explored[explored[:, 0] == epsilon, 1]
        assert abs(found.mean() - 0.75 * epsilon) <= 2.0 / np.sqrt(len(found))  # four standard deviations
    assert np.min(explored[:, 0]) == 0.0, "from then on, every action must be greedy"


# Algorithms.


@functools.cache
def wide() -> Run:
    return sebulba(WIDE, "lockstep")


@pytest.mark.slow
def test_sebulba_in_lockstep_is_algorithm_one() -> None:
    check(wide(), WIDE)


@pytest.mark.slow
def test_one_lane_in_lockstep_is_algorithm_one() -> None:
    check(sebulba(NARROW, "lockstep"), NARROW)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SEQUENTIAL, marks=pytest.mark.slow),
        pytest.param(ALL_AT_ONCE, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
    ids=lambda shape: f"W={shape.W}",
)
def test_sebulba_in_series_is_dqn(shape: Shape) -> None:
    check(sebulba(shape, "serial"), shape, reference.dqn)


@pytest.mark.slow
def test_anakin_in_lockstep_is_algorithm_one() -> None:
    check(anakin(WIDE), WIDE, pending=WIDE.C // F)


# Order.


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"at_once": 7}, marks=pytest.mark.slow),
        {"at_once": 1, "sleepy": True},
        {"at_once": 100, "sleepy": True},
        pytest.param({"at_once": 1, "updates_per_call": 1}, marks=pytest.mark.slow),
    ],
    ids=["again", "one by one", "all at once", "without a loop"],
)
def test_order_does_not_matter(how: dict[str, Any]) -> None:
    """Twice, with pauses on either side, with updates one by one or all at once: the same bits."""
    run, expected = sebulba(WIDE, "lockstep", **how), wide()
    harness.assert_same((run.state, run.record.learnt), (expected.state, expected.record.learnt))


@pytest.mark.slow
def test_the_order_of_two_threads_does_not_matter() -> None:
    """Two threads act, each for half of the lanes; either may be late."""
    agent, states, shared = agent_of(WIDE, Walk().spec), [], None
    for source, at_once, pause in ((SteppedEnvironments, 7, 0.0), (Sleepy, 1, 0.005), (Sleepy, 100, 0.005)):
        driver = driver_of(agent, WIDE, "lockstep", source(Walk()), 7, threads=2)
        state = driver.init()
        if shared is None:
            driver.compile(state)
            shared = driver
        driver = share(driver, shared)
        programs = driver._programs
        cut(driver, at_once, pause)
        states.append(harness.numbers_of(train(driver, state, WIDE)))
        shared._programs = programs
        harness.assert_same(states[-1], states[0])
    assert states[0].learner.num_updates[0] >= PERIODS * (WIDE.C // F)


@pytest.mark.slow
def test_how_many_threads_step_a_pool_does_not_matter() -> None:
    pytest.importorskip("envpool")
    states, shared = [], None
    for threads in (1, 2, 4):
        source: Any = environments.make("envpool:CartPole-v1", num_threads=threads)
        driver = driver_of(agent_of(WIDE, source.spec), WIDE, "lockstep", source, None)
        state = driver.init()
        if shared is None:
            driver.compile(state)
        shared = share(driver, shared or driver)
        states.append(harness.numbers_of(train(driver, state, WIDE)))
        harness.assert_same(states[-1], states[0])
    assert states[0].learner.num_updates[0] >= PERIODS * (WIDE.C // F)
