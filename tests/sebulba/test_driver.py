"""Sebulba end to end with the counting environment: alignment, contiguity, memory, versions, order and resuming."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import distributions, nets, topology
from podracer.environments.from_jax import SteppedEnvironments
from podracer.run.config import RunConfig
from podracer.run.driver import RunHooks
from podracer.sebulba.driver import Sebulba
from podracer.topology import collectives
from tests.support import counting, harness, tiers
from tests.support.compilations import compilations
from tests.support.small_sebulba import COUNTING, B, T, agent_of, driver_of, joining, run


@pytest.mark.parametrize(
    ("name", "threads", "mode", "replicas"),
    [
        ("vtrace", 1, "async", 1),
        pytest.param("vtrace", 2, "lockstep", 1, marks=pytest.mark.slow),
        pytest.param("vtrace", 2, "async", 3, marks=pytest.mark.slow),
        pytest.param("pqn", 1, "lockstep", 1, marks=pytest.mark.slow),
        pytest.param("ppo", 2, "async", 1, marks=pytest.mark.slow),
        *tiers.nightly(("efficientzero", 2, "lockstep", 1)),
    ],
)
def test_trajectories_keep_the_contract(name, threads, mode, replicas):
    driver = driver_of(agent_of(name), threads, mode, num_shards=replicas, replicas=replicas)
    joined = []
    driver.learning = driver.learning._replace(join=joining(driver.learning.join, joined))
    final, captured, progress, _ = run(driver)
    assert joined
    for k, trajectory in enumerate(joined):
        actors = [replica * threads + k % threads for replica in range(replicas)]
        if mode == "lockstep" or replicas > 1:
            np.testing.assert_array_equal(trajectory.lane, np.ravel(B * np.asarray(actors)[:, None] + np.arange(B)))
        counting.check_trajectory(trajectory)
    threads *= replicas
    assert sorted(captured) == [B * i for i in range(threads)], "a lane belongs to one actor"
    for first_lane, trajectories in captured.items():
        for trajectory in trajectories:
            counting.check_trajectory(trajectory)
            np.testing.assert_array_equal(trajectory.lane, first_lane + np.arange(B))
        for previous, following in itertools.pairwise(trajectories):
            counting.check_contiguous(previous, following)
    tags = {tuple(t.timesteps.observation[0, :, 0]) for ts in captured.values() for t in ts[:1]}
    assert len(tags) == threads, "actors share a stream"
    learnt = sum(p.transitions for p in progress)
    assert learnt == int(final.env_steps.low[0]) >= 600
    assert progress[-1].updates == int(final.learner.num_updates[0])


def test_every_step_has_a_key_of_its_own():
    """Over steps, rollouts and actors."""
    agent = agent_of("vtrace")

    def act(params, state, timestep, key, evaluation):
        action, extras, state = agent.act(params, state, timestep, key, evaluation)
        data = jax.random.key_data(key)
        return action, extras | {"key": jnp.broadcast_to(data, (*timestep.reward.shape, *data.shape))}, state

    _, captured, _, _ = run(driver_of(agent._replace(act=act), threads=2))
    keys = [tuple(row[0]) for trajectories in captured.values() for t in trajectories for row in t.extras["key"]]
    assert len(keys) > 50
    assert len(set(keys)) == len(keys)


def test_episode_sums_are_those_of_the_rows():
    driver = driver_of(agent_of("vtrace"))
    _, captured, progress, _ = run(driver)
    learnt = captured[0][: progress[-1].updates]
    rows = [np.concatenate([x[1:] for x in column]) for column in zip(*(t.timesteps for t in learnt))]
    reward, last = rows[1], rows[4]
    count = sum(p.metrics["episode/count"][0] for p in progress)
    total = sum(
        p.metrics["episode/return"][0] * p.metrics["episode/count"][0]
        for p in progress
        if p.metrics["episode/count"][0]
    )
    length = sum(
        p.metrics["episode/length"][0] * p.metrics["episode/count"][0]
        for p in progress
        if p.metrics["episode/count"][0]
    )
    assert count == last.sum()
    lengths = reward[last]  # the reward of row k is k
    np.testing.assert_allclose(length, lengths.sum(), rtol=1e-5)
    np.testing.assert_allclose(total, (lengths * (lengths + 1) / 2).sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vtrace", pytest.param("ppo", marks=pytest.mark.slow)])
def test_memory_and_what_was_recorded_belong_to_their_rows(name):
    """With a learning rate of 0, unrolling the network from `actor_state` gives the recorded log-probabilities."""
    agent = agent_of(name, core_size=4, normalize=False)
    driver = driver_of(agent, hyper={"learning_rate": 0.0})
    final, captured, _, _ = run(driver, total_steps=300)
    params = jax.tree.map(lambda x: x[0], final.learner.params)
    config = agent.config
    separate = {"separate": config.separate} if name == "ppo" else {}
    network = nets.make(
        COUNTING.spec,
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        core=config.core_settings,
        **separate,
    )
    distribution = distributions.for_space(COUNTING.spec.action_space)
    for trajectory in captured[0][:6]:
        if name == "ppo":
            trajectory = trajectory._replace(actor_state=trajectory.actor_state.network)
        trajectory = jax.tree.map(jnp.asarray, trajectory)
        outputs, _ = nets.unroll(network, params, trajectory)
        log_prob = distribution.log_prob(outputs[:-1], trajectory.actions)
        np.testing.assert_allclose(log_prob, trajectory.extras["log_prob"], rtol=1e-4, atol=1e-5)
    assert any(
        np.abs(t.actor_state[0][0] if name == "vtrace" else t.actor_state.network[0][0]).max() > 0
        for t in captured[0][1:]
    )


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_lockstep_has_a_fixed_lag_and_repeats(threads):
    runs = [run(driver_of(agent_of("vtrace"), threads, mode="lockstep")) for _ in range(2)]
    final, captured, progress, _ = runs[0]
    for first_lane, trajectories in captured.items():
        index = first_lane // B
        for i, trajectory in enumerate(trajectories):
            number = i * threads + index
            assert np.all(trajectory.policy_version == max(0, number - threads))
    assert progress[-1].metrics["sebulba/policy_lag_max"][0] == threads
    harness.assert_same(final.learner, runs[1][0].learner)
    other = run(driver_of(agent_of("vtrace"), threads, mode="lockstep", seed=1))[0]
    first = jax.tree.leaves(final.learner.params)
    assert all(np.any(a != b) for a, b in zip(first, jax.tree.leaves(other.learner.params)) if a.size > 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "environment", "mode"),
    [*tiers.nightly(("muzero", "envpool:CartPole-v1", "async")), ("alphazero", "tic_tac_toe", "lockstep")],
)
def test_agents_that_search_learn_on_the_host(name, environment, mode):
    """As many updates as are due, and in lockstep the same ones again."""
    config = {"rollout_length": T, "hidden_sizes": (8,), "simulations": 2, "n_step": 2, "batch_size": 10}
    config |= {"replay_ratio": 0.5, "replay_capacity": 400, "replay_min_size": 100}
    run = {"arch": "sebulba", "mode": mode, "num_envs": B, "total_steps": 600, "eval_episodes": 2, "eval_every": 600}
    with harness.shared_programs():
        results = [
            podracer.train(name, environment, config=config, progress=False, **run)
            for _ in range(1 + (mode != "async"))
        ]
    summary = results[0].summary
    assert summary["complete"]
    assert (summary["env_steps"] - 100) / 20 - 3 <= summary["updates"] <= (summary["env_steps"] * 1.3 - 100) / 20 + 3
    for result in results[1:]:
        harness.assert_same(result.learner, results[0].learner)


@pytest.mark.parametrize(
    ("threads", "milestone"),
    tiers.slow((2, 50), (1, 90), (1, 300), (2, 330)),
)
def test_lockstep_resumes_bit_for_bit(threads, milestone):
    """From a state in the middle, in a new driver, as if nothing had happened."""
    agent = agent_of("ppo", core_size=3)
    whole, _, _, states = run(driver_of(agent, threads, mode="lockstep"), milestone=milestone)
    middle = states[0]
    assert int(middle.env_steps.low[0]) < 500
    resumed, captured, *_ = run(driver_of(agent, threads, mode="lockstep"), state=middle)
    harness.assert_same(resumed.learner, whole.learner)
    harness.assert_same(resumed.env_steps, whole.env_steps)
    for trajectories in captured.values():
        for trajectory in trajectories:
            counting.check_trajectory(trajectory)


def test_a_state_is_like_what_like_says():
    for name, mode, memory in (("ppo", "async", "device"), ("ppo", "lockstep", "device"), ("r2d2", "async", "host")):
        driver = driver_of(agent_of(name, core_size=3), 2, mode, replay_memory=memory)
        state, like = driver.init(), driver.like()
        assert jax.tree.structure(state) == jax.tree.structure(like)

        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            # P("process") and P("process", None) are the same, and JAX 0.12 writes either.
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_snapshots_compile_nothing_new():
    driver = driver_of(agent_of("ppo"))
    state = driver.init()
    learner = driver.learner(state).learner
    with compilations() as compiled:
        driver.states.make(driver.learner(state).learner, (), 3, state.replay_state)
        driver.states.make(learner, (), 5, state.replay_state)
    assert not compiled


def test_environments_hear_how_many_share_the_machine():
    heard = []

    class Sharing(SteppedEnvironments):
        def shared_by(self, actors):
            heard.append(actors)
            return self

    layout = topology.make_host(num_envs=2 * B, envs_per_actor=B, actor_threads=2, devices=jax.local_devices()[:1])
    agent = agent_of("vtrace")
    Sebulba(agent, Sharing(COUNTING), layout, RunConfig(), agent.hyper)
    assert heard == [2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vtrace", "pqn", "ppo"])
@pytest.mark.parametrize("num_shards", [2, 1])
def test_the_learner_is_anakins(name, num_shards):
    """A trajectory through Sebulba's update gives the LearnerState of `agent.learn` under Anakin's axes."""
    agent = agent_of(name)
    driver = driver_of(agent, num_shards=num_shards)
    key, progress = jax.random.key(3), jnp.float32(0.25)
    learner = driver.learning.init(jax.random.key(1), harness.hyper(agent))
    lanes = np.arange(B, dtype=np.int32)
    carry = jax.jit(driver.acting.start)(lanes, jax.random.key(2))
    environment = SteppedEnvironments(COUNTING).make(B, 5)
    buffer = jax.jit(driver.acting.begin)(carry)
    act, finish = jax.jit(driver.acting.act), jax.jit(driver.acting.finish)
    params = driver.learning.publish(learner, 0.25)
    _, step = environment.recv()
    for _ in range(T):
        buffer, actions = act(buffer, params, carry.keys, step)
        environment.send(lanes, np.asarray(actions))
        _, step = environment.recv()
    trajectory, *_ = finish(buffer, carry, lanes, np.zeros(T, np.int32), step)

    def cut(axis, x):
        return jnp.moveaxis(x.reshape(*x.shape[:axis], num_shards, B // num_shards, *x.shape[axis + 1 :]), axis, 0)

    whole = jax.tree.map(functools.partial(cut, 1), trajectory._replace(actor_state=(), lane=()))
    whole = whole._replace(
        actor_state=jax.tree.map(functools.partial(cut, 0), trajectory.actor_state), lane=cut(0, trajectory.lane)
    )
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, 0), i))(jnp.arange(num_shards))
    expected, metrics = harness.over_shards(
        lambda state, trajectory, key: agent.learn(state, trajectory, progress, key), learner, whole, keys
    )
    expected = harness.numbers_of(jax.tree.map(lambda x: x[0], expected))
    driver.compile(driver.init())
    actual, _, found = driver._programs.learn(
        learner, driver.learning.replay_state(), driver.learning.spread(trajectory), jnp.int32(0), progress, key
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), harness.numbers_of(actual), expected
    )
    np.testing.assert_allclose(found["loss/total"], metrics["loss/total"].ravel()[0], rtol=1e-5)


def test_updates_per_batch_take_every_lane_once():
    """Two updates a batch: each sees one half of the lanes."""
    seen = []
    agent = agent_of("vtrace")

    def learn(learner, trajectory, progress, key):
        lanes = jnp.sum(2.0 ** trajectory.lane.astype(jnp.float32))
        new, metrics = agent.learn(learner, trajectory, progress, key)
        return new, metrics | {"lanes": collectives.global_sum(lanes)}

    driver = driver_of(agent._replace(learn=learn), updates_per_batch=2)

    def observed(learner, replay_state, trajectory, part, progress, key):
        new, replay_state, metrics = update(learner, replay_state, trajectory, part, progress, key)
        seen.append((int(part), float(metrics["lanes"])))
        return new, replay_state, metrics

    driver.compile(driver.init())
    update = driver._programs.learn
    driver._programs = driver._programs._replace(learn=observed)
    final, _ = driver.run(
        driver.init(),
        RunHooks(
            next_milestone=lambda steps: 100,
            on_progress=lambda progress: None,
            on_milestone=lambda state, steps: None,
            should_stop=lambda: False,
        ),
        total_steps=100,
    )
    assert set(seen) == {(0, 15.0), (1, 240.0)}
    assert len(seen) == int(final.learner.num_updates[0])
