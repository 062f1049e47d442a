"""Acting for whichever lanes are ready: what is handed over is as if all had been waited for."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import agents, distributions, nets, topology
from podracer.environments.from_jax import SteppedEnvironments
from podracer.errors import Closed
from podracer.nets import actor_state
from podracer.run.config import RunConfig
from podracer.run.driver import RunHooks
from podracer.sebulba.driver import Sebulba
from podracer.sebulba.ready_lanes import LaneCursors, PartialActor
from podracer.types import HostStep
from tests.support import counting, harness

T, B = 5, 6
COUNTING = counting.CountingEnvironment()


class Unequal(SteppedEnvironments):
    """Lanes that answer in random order, `at_once` at a time at most; lane 0 does so rarely."""

    saved = False

    def __init__(self, environment, at_once, seed=0):
        super().__init__(environment)
        self._at_once, self._rng = at_once, np.random.default_rng(seed)

    def lanes_at_once(self, num_lanes):
        return self._at_once

    def make(self, num_lanes, seed, *, evaluation=False):
        lanes = [super(Unequal, self).make(1, seed + i) for i in range(num_lanes)]
        return UnequalLanes(self.spec, lanes, self._at_once, self._rng)


class UnequalLanes:
    def __init__(self, spec, lanes, at_once, rng):
        self.spec, self._lanes, self._at_once, self._rng = spec, lanes, at_once, rng
        self._ready, self.ahead, self._rows = set(range(len(lanes))), 0, np.zeros(len(lanes), int)

    def recv(self):
        ready = sorted(self._ready - ({0} if len(self._ready) > 1 and self._rng.random() < 0.8 else set()))
        number = self._rng.integers(1, min(self._at_once, len(ready)) + 1)
        chosen = self._rng.permutation(ready)[:number].astype(np.int32)
        self._ready -= set(chosen.tolist())
        rows = [self._lanes[lane].recv()[1] for lane in chosen]
        observation = np.concatenate([row.observation for row in rows])
        return chosen, HostStep(observation, np.concatenate([row.scalars for row in rows], axis=1))

    def send(self, lanes, actions):
        for lane, action in zip(lanes, actions, strict=True):
            self._lanes[lane].send(np.zeros(1, np.int32), np.asarray(action)[None])
            self._rows[lane] += 1
        self._ready |= set(lanes.tolist())
        self.ahead = int(self._rows.max() - self._rows.min())
        assert self.ahead <= 2 * T

    def close(self):
        for lane in self._lanes:
            lane.close()


def trained(agent, environments, total_steps, hyper):
    """The rollouts handed over, the learner at the end, and progress."""
    layout = topology.make_host(num_envs=B, envs_per_actor=B, devices=jax.local_devices()[:1])
    driver = Sebulba(agent, environments, layout, RunConfig(), agent.hyper | hyper)
    handed, progress = [], []
    spread = driver.learning.spread

    def keep(trajectory, replica):
        handed.append(harness.numbers_of(trajectory))
        return spread(trajectory, replica)

    driver.learning = driver.learning._replace(spread=keep)
    state = driver.init()
    driver.compile(state)
    final, complete = driver.run(
        state,
        RunHooks(
            next_milestone=lambda steps: total_steps,
            on_progress=progress.append,
            on_milestone=lambda state, steps: None,
            should_stop=lambda: False,
        ),
        total_steps=total_steps,
    )
    assert complete
    return handed, final, progress


@pytest.fixture(scope="module")
def recorded():
    """V-trace with a memory, which learns nothing."""
    config = agents.VTraceConfig(rollout_length=T, hidden_sizes=(8,), core="lstm", core_size=4)
    agent = agents.vtrace.make(COUNTING.spec, config)
    return agent, *trained(agent, Unequal(COUNTING, 3), 300, {"learning_rate": 0.0})


@pytest.mark.slow
def test_trajectories_keep_the_contract(recorded):
    _, handed, _, progress = recorded
    assert len(handed) >= 10
    for trajectory in handed:
        counting.check_trajectory(trajectory)
        np.testing.assert_array_equal(trajectory.lane, np.arange(B))
    for previous, following in itertools.pairwise(handed):
        counting.check_contiguous(previous, following)
    learnt = handed[: progress[-1].updates]
    counts = [counting.episode_stats(trajectory) for trajectory in learnt]
    said = [{name: values[0] for name, values in p.metrics.items()} for p in progress]
    assert sum(row["episode/count"] for row in said) == sum(x.count for x in counts) > 0
    total = sum(row["episode/return"] * row["episode/count"] for row in said if row["episode/count"])
    np.testing.assert_allclose(total, sum(x.return_sum for x in counts), rtol=1e-5)
    played = sum(int((~trajectory.timesteps.first[1:]).sum()) for trajectory in learnt)
    assert progress[-1].env_steps == played


def test_memory_and_what_was_recorded_belong_to_their_rows(recorded):
    """Unrolling the network from `actor_state` gives the recorded log-probabilities, and the next `actor_state`."""
    agent, handed, final, _ = recorded
    params = jax.tree.map(lambda x: x[0], final.learner.params)
    config = agent.config
    network = nets.make(
        COUNTING.spec, hidden_sizes=config.hidden_sizes, activation=config.activation, core=config.core_settings
    )
    distribution = distributions.for_space(COUNTING.spec.action_space)

    @jax.jit
    def unroll(trajectory):
        inputs = jax.tree.map(lambda x: x[:-1], actor_state.inputs(network, trajectory))
        outputs, _, core = network.apply(params, inputs, trajectory.actor_state.core)
        return distribution.log_prob(outputs, trajectory.actions), core

    for trajectory, following in itertools.pairwise(handed[:6]):
        log_prob, core = unroll(jax.tree.map(jnp.asarray, trajectory))
        np.testing.assert_allclose(log_prob, trajectory.extras["log_prob"], rtol=1e-4, atol=1e-5)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), core, following.actor_state.core
        )
        np.testing.assert_array_equal(following.actor_state.previous_action, trajectory.actions[-1])
        assert np.ptp(core[0]) > 0.01


def test_every_step_has_the_version_of_the_parameters_that_acted(recorded):
    _, handed, _, _ = recorded
    versions = np.concatenate([trajectory.policy_version for trajectory in handed])
    assert np.all(np.diff(versions, axis=0) >= 0)
    numbers = np.arange(len(versions))[:, None] // T
    assert np.all(versions <= numbers), "acted by parameters that there were not yet"
    assert versions[-1].min() >= len(handed) - 4


@pytest.mark.slow
def test_every_lane_has_the_rows_that_it_has_where_all_are_waited_for():
    """With parameters that do not change, and actions that are not drawn."""
    replayed = {"batch_size": 4, "replay_capacity": 100 * T, "replay_min_size": 10 * T, "replay_ratio": 0.1 * 4 / T}
    config = agents.R2D2Config(
        rollout_length=T, hidden_sizes=(8,), core="lstm", core_size=4, head_size=8, burn_in=1, trace_length=4, epsilon_base=0.0, **replayed
    )  # fmt: skip
    agent = agents.r2d2.make(COUNTING.spec, config)
    run = lambda environments: trained(agent, environments, 200, {"learning_rate": 0.0})[0][:5]  # noqa: E731
    for all_at_once, some in zip(run(SteppedEnvironments(COUNTING)), run(Unequal(COUNTING, 2)), strict=True):
        unversioned = [x._replace(policy_version=0) for x in (all_at_once, some)]
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), *unversioned)


@pytest.mark.parametrize(
    ("action", "fault"),
    [(0.0, "the environment's observation is not finite in row 0 of a rollout, lane 1 of its actor"), (np.nan, "")],
)
def test_what_is_not_finite_is_named_unless_actions_were_not(action, fault):
    """Lane 1 is a row behind lane 0, and its first observation is no number."""
    rows = lambda *numbers: HostStep(np.float32(numbers)[:, None], np.zeros((4, len(numbers)), np.float32))  # noqa: E731
    told = [([0], rows(0)), ([0, 1], rows(0, np.nan)), ([0, 1], rows(0, 0)), ([1], rows(0))]
    environment = mock.Mock(recv=mock.Mock(side_effect=[*((np.int32(lanes), row) for lanes, row in told), Closed]))
    context = mock.MagicMock(rollout_length=2, num_actors=1)
    context.act["cpu"].return_value = (None, np.full((2, 1), action, np.float32))
    context.finish["cpu"].return_value = (None, None, None)
    actor = PartialActor(0, 0, "cpu", None, np.arange(2), mock.MagicMock(), 0, context, at_once=2)
    with pytest.raises(Closed):
        actor._act(environment)
    (handed,) = (call.args[1] for call in context.channel.put.call_args_list)
    assert handed.fault == fault


@pytest.mark.parametrize("mode", ["lockstep", "serial"])
def test_rows_of_some_lanes_come_in_no_fixed_order(mode):
    with pytest.raises(ValueError, match=f"mode='{mode}' keeps a fixed order, and counting .*use mode='async'"):
        podracer.train("ppo", Unequal(COUNTING, 3), mode=mode, total_steps=60, num_envs=B, check=False)


def test_lanes_are_a_rollout_apart_at_most():
    rng = np.random.default_rng(0)
    clocks, rows = LaneCursors(3, T, 3), np.zeros(3, int)  # of the model: rows of each lane
    handed = 0
    for _ in range(2000):
        lanes = np.flatnonzero(rng.random(3) < 0.5).astype(np.int32)
        may = clocks.may_go_on(lanes)
        # With row r T a lane enters rollout r, in the half of rollout r - 2, which must have been handed over.
        np.testing.assert_array_equal(may, rows[lanes] // T - 2 < handed)
        lanes = lanes[may]
        if not len(lanes):
            continue
        where = clocks.advance(lanes, np.zeros(len(lanes), bool))
        np.testing.assert_array_equal(where.lanes, [*lanes, *[3] * (3 - len(lanes))])
        np.testing.assert_array_equal(where.t[: len(lanes)], rows[lanes] % T)
        np.testing.assert_array_equal(where.half[: len(lanes)], rows[lanes] // T % 2)
        ended = (rows[lanes] % T == 0) & (rows[lanes] > 0)
        np.testing.assert_array_equal(where.ended[: len(lanes)], np.where(ended, lanes, 3))
        rows[lanes] += 1
        assert clocks.full == (rows.min() > T * (handed + 1))
        if clocks.full:
            # Row 0 of all is no transition; all others are of the rollout that they end.
            assert clocks.hand_over() == 3 * T + (3 if handed == 0 else 0)
            handed += 1
    assert handed > 100
