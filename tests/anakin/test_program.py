"""Anakin's program with the counting environment: runs do not depend on how they are cut, and mistakes are found."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import spaces, topology
from podracer.anakin import loop, program, rollout
from podracer.learning import learner
from podracer.learning.counter import COUNTER_BASE, Counter
from podracer.topology import collectives
from podracer.types import Agent, EnvSpec, LearnerState, Metrics, Trajectory, Transition
from tests.support import harness, tiers
from tests.support.small_anakin import COUNTING, B, T, agent_of

FAR = 10**9
TOTAL_STEPS = 10_000


def observed(agent: Agent) -> Agent:
    """The same agent; `learn` also reports what it saw, recognised by the counting environment's tags."""

    def learn(learner: LearnerState, trajectory: Trajectory, *rest: Any) -> tuple[LearnerState, Metrics]:
        new, metrics = agent.learn(learner, trajectory, *rest)
        rows = trajectory.timesteps
        tag, step, previous = jnp.moveaxis(rows.observation, -1, 0)
        length = (tag.astype(jnp.int32) // 2 % 32).astype(jnp.float32)
        closes = (step == length).astype(jnp.float32)[1:]
        follows = (step[1:] == step[:-1] + 1.0) & (previous[1:] == trajectory.actions.astype(jnp.float32))
        opens = (step[1:] == 0.0) & (step[:-1] == length[:-1])
        lane = 1.0 + trajectory.lane.astype(jnp.float32)
        print_of = lambda row: jnp.sum((tag[row] % 1009.0) * (1.0 + step[row]) * lane)  # noqa: E731
        seen = {
            "transitions": jnp.sum((step[1:] > 0).astype(jnp.float32)),
            "count": jnp.sum(closes),
            "length": jnp.sum(closes * length[1:]),
            "return": jnp.sum(closes * length[1:] * (length[1:] + 1.0) / 2.0),
            "wrong": jnp.sum((~(follows | opens)).astype(jnp.float32)),
            "row 0": print_of(0),
            "row T": print_of(T),
            "version": jnp.sum(trajectory.policy_version.astype(jnp.float32)) / (T * B),
        }
        return new, metrics | collectives.global_sum(seen)

    return agent._replace(learn=learn)


@dataclasses.dataclass
class Run:
    """A program of one member (and its first state by seed)."""

    agent: Agent
    program: program.Program

    def start(self, seed: int = 0, **overrides: list[float]) -> program.RunState:
        return harness.initial(self.program, self.agent, [seed], overrides)

    def advance(self, state: program.RunState, updates: int, until: int = FAR) -> tuple[Any, program.Report]:
        return self.program.step(state, self.program.limits(until, TOTAL_STEPS, updates))


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    made = {name: observed(agent_of(name)) for name in ("vtrace", "ppo", "pqn")}
    return {name: Run(agent, harness.make_program(agent, COUNTING, num_envs=B)) for name, agent in made.items()}


@pytest.fixture(params=["vtrace", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ppo", "pqn"))])
def run(request: pytest.FixtureRequest, runs: dict[str, Run]) -> Run:
    return runs[request.param]


def integer(counter: Counter) -> int:
    return int(counter.high[0]) * COUNTER_BASE + int(counter.low[0])


# Runs.


def test_updates_follow_each_other(run: Run) -> None:
    """Calls of one update: each begins at the row where the last one ended, with newer parameters; sums are right."""
    state, last, done, keys, tags = run.start(), None, 0, set(), []
    for i in range(8):
        state, report = run.advance(state, 1)
        seen = {name: float(value[0]) for name, value in report.metrics.items()}
        assert int(report.updates[0]) == 1
        assert bool(report.finite[0])
        assert seen["wrong"] == 0
        assert seen["version"] == i == int(state.learner.num_updates[0]) - 1
        assert last is None or seen["row 0"] == last
        last = seen["row T"]
        done += int(seen["transitions"])
        assert integer(report.env_steps) == integer(state.env_steps) == done
        sums = [float(x[0]) for x in report.episodes[:3]]
        np.testing.assert_allclose(sums, [seen["return"], seen["length"], seen["count"]], rtol=1e-6)
        keys.add(jax.random.key_data(state.actors.key).tobytes())
        tags += set(np.ravel(state.actors.lanes.env.tag).tolist())
    assert 0.5 * 8 * T * B < done < 8 * T * B  # resets are no transitions
    assert len(keys) == 8
    assert len(set(tags)) > 0.7 * len(tags)  # episodes are new ones: few lanes are still in the one that they were in


def test_runs_are_repeatable_and_do_not_depend_on_calls(run: Run) -> None:
    """Bit by bit: the same seed; and one call of 12 updates, 12 of one, or three of 1, 4 and 7."""
    results = []
    for calls in ([12], [12], [1] * 12, [1, 4, 7]):
        state, reports = run.start(), []
        for updates in calls:
            state, report = run.advance(state, updates)
            assert int(report.updates[0]) == updates
            reports.append(report)
        episodes = [sum(float(r.episodes[i][0]) for r in reports) for i in range(3)]
        results.append((harness.numbers_of(state), episodes))
    for other in results[1:]:
        harness.assert_same(results[0], other)
    other = harness.numbers_of(run.advance(run.start(seed=1), 12)[0])
    first = jax.tree.leaves(results[0][0].learner.params)
    assert all(np.any(a != b) for a, b in zip(first, jax.tree.leaves(other.learner.params), strict=True))


def test_until_stops_at_the_first_update_beyond(run: Run) -> None:
    state, steps = run.start(), [0]
    for _ in range(6):
        state, report = run.advance(state, 1)
        steps.append(integer(report.env_steps))
    for target, updates in ((steps[3] - 1, 3), (steps[3], 3), (steps[3] + 1, 4), (1, 1), (0, 0)):
        state, report = run.advance(run.start(), 100, target)
        assert (integer(report.env_steps), int(report.updates[0])) == (steps[updates], updates)
        # Once there, another call does nothing.
        before = harness.numbers_of(state)
        state, report = run.advance(state, 100, target)
        assert int(report.updates[0]) == 0
        assert integer(report.env_steps) == steps[updates]
        assert all(float(x[0]) == 0.0 for x in (*report.metrics.values(), *report.episodes[:3]))
        assert bool(report.finite[0])
        harness.assert_same(harness.numbers_of(state), before)
    # And further on it goes as if it had never stopped.
    state, _ = run.advance(run.start(), 100, steps[2])
    state, report = run.advance(state, 100, steps[6])
    assert integer(report.env_steps) == steps[6]
    harness.assert_same(harness.numbers_of(state), harness.numbers_of(run.advance(run.start(), 6)[0]))


def test_env_steps_outgrow_int32(runs: dict[str, Run]) -> None:
    """And progress with them: beyond the total the learning rate is 0."""
    run = runs["vtrace"]
    begun = 2**31 - 3
    state = run.start()._replace(env_steps=jax.tree.map(lambda x: x[None], Counter.of(begun)))
    state, report = run.advance(state, 3, 2**40)
    assert integer(report.env_steps) == begun + int(report.metrics["transitions"][0]) > 2**31
    assert float(report.metrics["grad/learning_rate"][0]) == 0.0


def test_progress_drives_the_schedule(runs: dict[str, Run]) -> None:
    """The learning rate of update k is that of the transitions before it: 0 done at the first."""
    run = runs["vtrace"]
    state, done = run.start(), 0
    for _ in range(3):
        state, report = run.advance(state, 1)
        rate = run.agent.hyper["learning_rate"] * (1 - done / TOTAL_STEPS)
        np.testing.assert_allclose(report.metrics["grad/learning_rate"][0], rate, rtol=1e-5)
        done = integer(report.env_steps)


@pytest.mark.parametrize("name", tiers.slow("vtrace", "ppo"))
def test_population_members_are_single_runs(name: str, runs: dict[str, Run]) -> None:
    """Three members with different seeds and learning rates, 10 updates: each is the run of its seed and rate."""
    run, rates = runs[name], [3e-3, 1e-3, 1e-4]
    prog = harness.make_program(run.agent, COUNTING, num_envs=B, population=3)
    state = harness.initial(prog, run.agent, [5, 6, 7], {"learning_rate": rates})
    state, report = prog.step(state, prog.limits(FAR, TOTAL_STEPS, 10))
    assert report.updates.tolist() == [10, 10, 10]
    used = np.asarray(report.metrics["grad/learning_rate"]) / 10  # decayed by the few transitions until then
    np.testing.assert_allclose(used, rates, rtol=0.05)
    for i, rate in enumerate(rates):
        single, alone = run.advance(run.start(seed=5 + i, learning_rate=[rate]), 10)
        member = jax.tree.map(lambda x, i=i: x[i : i + 1], (program.Member.from_state(state), report))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
            harness.numbers_of((member[0].learner.params, member[0].learner.hyper, member[0].env_steps)),
            harness.numbers_of((single.learner.params, single.learner.hyper, single.env_steps)),
        )
        harness.assert_same(member[0].actors.lanes.env, single.actors.lanes.env)
        harness.assert_same(member[0].actors.key, single.actors.key)
        np.testing.assert_allclose(member[1].metrics["loss/total"], alone.metrics["loss/total"], rtol=1e-3, atol=1e-4)
        harness.assert_same(member[1].episodes, alone.episodes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vtrace", "ppo"])
def test_an_update_for_a_gpu_is_that_for_a_cpu(
    name: str, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that is alone on its device is not mapped there, and sums are one; numbers agree but for rounding."""
    run = runs[name]
    there, expected = run.advance(run.start(), 1)
    here = topology.compiling_for
    monkeypatch.setattr(topology, "compiling_for", lambda platform: here("gpu"))
    other = Run(run.agent, harness.make_program(run.agent, COUNTING, num_envs=B))
    state, report = other.advance(other.start(), 1)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, there)
    harness.assert_same(report.env_steps, expected.env_steps)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), report[:2], expected[:2])
    params = (state.learner.params, there.learner.params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *params)


def test_shards_hold_their_own_lanes(runs: dict[str, Run]) -> None:
    """Two shards of four: lanes are numbered over both, with a key each, and sums are over both."""
    run = runs["vtrace"]
    prog = harness.make_program(run.agent, COUNTING, num_envs=B, num_shards=2)
    state = harness.initial(prog, run.agent, [0])
    np.testing.assert_array_equal(state.actors.lane, np.arange(B).reshape(1, 2, B // 2))
    tags = np.asarray(state.actors.lanes.env.tag)
    assert len(set(tags.ravel().tolist())) > B // 2
    state, report = prog.step(state, prog.limits(FAR, TOTAL_STEPS, 4))
    keys = np.asarray(jax.random.key_data(state.actors.key))[0]
    assert np.any(keys[0] != keys[1])
    seen = {name: float(value[0]) for name, value in report.metrics.items()}
    assert seen["wrong"] == 0
    assert integer(report.env_steps) == seen["transitions"]
    sums = [float(x[0]) for x in report.episodes[:3]]
    np.testing.assert_allclose(sums, [seen["return"], seen["length"], seen["count"]], rtol=1e-6)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.learner.params))


def test_like_is_what_init_makes(run: Run) -> None:
    state, like = run.start(), run.program.like()
    assert jax.tree.structure(state) == jax.tree.structure(like)
    for made, expected in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
        assert made.sharding.is_equivalent_to(expected.sharding, made.ndim)


# What goes wrong.


@dataclasses.dataclass(frozen=True)
class Breaks:
    """Counts; the reward of one transition in the third rollout or so is not a number."""

    reward: float = np.nan
    spec: EnvSpec = COUNTING.spec

    def reset(self, key: jax.Array) -> Any:
        return jnp.int32(0)

    def step(self, state: Any, action: Any, key: jax.Array) -> tuple[Any, Transition]:
        state = state + 1
        reward = jnp.where(state == 2 * T + 3, jnp.float32(self.reward), jnp.float32(1))
        return state, Transition(reward, jnp.float32(1), jnp.asarray(False))

    def observe(self, state: Any) -> jax.Array:
        return jnp.stack([state, state, state]).astype(jnp.float32)


@pytest.mark.parametrize("name", ["vtrace", pytest.param("ppo", marks=pytest.mark.slow)])
def test_rewards_that_are_not_finite_are_reported(name: str) -> None:
    """In the update that they enter, after which the call stops."""
    fields = {"normalize_observations": False, "normalize_rewards": False} if name == "ppo" else {}
    agent = agent_of(name, **fields)
    environment = Breaks()
    run = Run(agent, harness.make_program(agent, environment, num_envs=2))
    state, report = run.advance(run.start(), 2)
    assert bool(report.finite[0])
    state, report = run.advance(state, 10)
    assert not bool(report.finite[0])
    assert int(report.updates[0]) == 1


def one_update(agent: Agent, reset_pool: int) -> Any:
    """An update of one shard, with no key in a batch: JAX's checker takes the transpose that makes for a use."""
    prog = harness.make_program(agent, COUNTING, num_envs=2, reset_pool=reset_pool)
    member = program.Member.from_state(harness.initial(prog, agent, [0]))
    state = jax.tree.map(lambda x: x[0], member.learner)
    actors, ring = jax.tree.map(lambda x: x[0, 0], (member.actors, member.ring))
    settings = rollout.RolloutSettings(T, reset_pool)
    observation = spaces.zeros(COUNTING.spec.observation_space)
    core = learner.make(agent, observation, lanes=2, groups=1, num_shards=1)

    @jax.jit
    def update(state: LearnerState, actors: rollout.Actors, ring: Any) -> Any:
        shard = loop.ShardUpdates(agent, COUNTING, settings, core)
        function = lambda _: shard.update(state, actors, ring, core.counts(), jnp.float32(0))  # noqa: E731
        return harness.over_axes(function)(jnp.zeros((1, 1)))

    with jax.debug_key_reuse(True):
        return update(state, actors, ring)


@pytest.mark.parametrize(
    ("name", "reset_pool"),
    [("vtrace", 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ppo", 2), ("pqn", 0)))],
)
def test_no_key_is_used_twice(name: str, reset_pool: int) -> None:
    """Under JAX's own checker."""
    _, (_, _, metrics, _, _) = one_update(agent_of(name, core_size=3), reset_pool)
    assert np.isfinite(metrics["loss/total"]).all()


def test_the_key_checker_finds_reuse() -> None:
    """Or the test above says nothing: the same update with an agent that draws twice from its key."""
    agent = agent_of("vtrace")

    def act(params: Any, state: Any, timestep: Any, key: jax.Array, evaluation: bool) -> Any:
        action, extras, state = agent.act(params, state, timestep, key, evaluation)
        return action, extras | {"noise": jax.random.normal(key, action.shape)}, state

    with pytest.raises(jax.errors.KeyReuseError):
        one_update(agent._replace(act=act), reset_pool=2)
