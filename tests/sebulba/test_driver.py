"""Sebulba end to end with the counting environment: alignment, contiguity, memory, versions, order and resuming."""

import copy
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import agents, distributions, nets, replay, topology
from podracer.agents import PPOConfig, VTraceConfig
from podracer.environments.from_jax import SteppedEnvironments
from podracer.run.config import RunConfig
from podracer.run.driver import RunHooks
from podracer.sebulba import learner_loop
from podracer.sebulba.driver import Sebulba
from podracer.topology import collectives
from podracer.trajectories import by_lane
from tests.support import counting, harness, tiers

T, B = 5, 8
COUNTING = counting.CountingEnvironment()


@functools.cache
def agent_of(name, core_size=0, normalize=True):
    common = {
        "rollout_length": T,
        "hidden_sizes": (8,),
        "core_size": core_size or 1,
        "core": "lstm" if core_size else "none",
    }
    if name == "vtrace":
        return agents.vtrace.make(COUNTING.spec, VTraceConfig(**common))
    if name == "vtrace with replay":
        return agents.vtrace.make(COUNTING.spec, VTraceConfig(**common, replay_fraction=0.5, replay_capacity=40 * T))
    if name == "r2d2":
        replayed = {"batch_size": 4, "replay_capacity": 100 * T, "replay_min_size": 10 * T, "replay_ratio": 9 / T}
        config = agents.R2D2Config(**common, **replayed, burn_in=3, trace_length=9, head_size=8)
        return agents.r2d2.make(COUNTING.spec, config)
    if name == "dqn":
        replayed = {"batch_size": 4, "replay_capacity": 400, "replay_min_size": 100, "replay_ratio": 0.2}
        config = agents.DQNConfig(
            rollout_length=T, hidden_sizes=(8,), **replayed, target_interval=3, n_step=3, frame_stack=2
        )
        return agents.dqn.make(COUNTING.spec, config)
    if name == "muzero":
        replayed = {"batch_size": 4, "replay_capacity": 400, "replay_min_size": 100, "replay_ratio": 0.2}
        sizes = {"hidden_sizes": (8,), "state_size": 6, "head_size": 8, "num_bins": 11}
        config = agents.MuZeroConfig(
            rollout_length=T, **replayed, **sizes, simulations=2, unroll_length=2, n_step=2, frame_stack=2
        )
        return agents.muzero.make(COUNTING.spec, config)
    if name == "efficientzero":
        replayed = {"batch_size": 4, "replay_capacity": 400, "replay_min_size": 100, "replay_ratio": 0.2}
        sizes = {"hidden_sizes": (8,), "state_size": 6, "head_size": 8, "num_bins": 11, "lstm_size": 4}
        groups = {"reanalyse_group": 2, "target_interval": 4, "refresh_interval": 4}
        config = agents.EfficientZeroConfig(
            **{"rollout_length": T, "simulations": 2, "unroll_length": 2, "n_step": 2, "frame_stack": 2},
            **replayed,
            **sizes,
            **groups,
        )
        return agents.efficientzero.make(COUNTING.spec, config)
    if name == "pqn":
        config = agents.PQNConfig(rollout_length=T, hidden_sizes=(8,), num_minibatches=2)
        return agents.pqn.make(COUNTING.spec, config)
    return agents.ppo.make(
        COUNTING.spec, PPOConfig(**common, num_epochs=1, num_minibatches=2, normalize_observations=normalize)
    )


_drivers = {}


def driver_of(
    agent,
    threads=1,
    mode="async",
    seed=0,
    hyper=None,
    num_shards=1,
    updates_per_batch=1,
    replay_memory="device",
    replicas=1,
):
    """A driver of its own. It shares its compiled programs, which neither order nor seed nor numbers are part of."""
    key = (id(agent), threads, num_shards, updates_per_batch, replay_memory, replicas)
    if key not in _drivers:
        layout = topology.make_host(
            num_envs=B * threads * replicas,
            envs_per_actor=B,
            actor_threads=threads,
            replicas=replicas,
            devices=jax.local_devices()[:1],
            num_shards=num_shards,
            updates_per_batch=updates_per_batch,
        )
        _drivers[key] = Sebulba(
            agent,
            SteppedEnvironments(COUNTING),
            layout,
            RunConfig(updates_per_batch=updates_per_batch, replay_memory=replay_memory),
            agent.hyper,
        )
    driver = copy.copy(_drivers[key])
    driver.actors = copy.copy(driver.actors)
    driver._run = driver.actors._run = dataclasses.replace(driver._run, mode=mode, seed=seed)
    driver._hyper = agent.hyper | (hyper or {})
    driver.shared = _drivers[key]
    return driver


def run(driver, total_steps=600, state=None, milestone=None):
    """Trains; returns the final state, what was passed to the learner by its first lane, progress, and milestones."""
    captured, progress, states = {}, [], []
    spread = driver.learning.spread

    def capture(trajectory, replica=0):
        numbers = harness.numbers_of(trajectory)
        captured.setdefault(int(numbers.lane[0]), []).append(numbers)
        return spread(trajectory, replica)

    driver.learning = driver.learning._replace(spread=capture)
    state = driver.init() if state is None else state
    if not driver.shared._actor_programs.act:
        driver.shared.compile(state)
    driver._actor_programs, driver._programs = driver.shared._actor_programs, driver.shared._programs
    final, complete = driver.run(
        state,
        RunHooks(
            next_milestone=lambda steps: total_steps if milestone is None or steps >= milestone else milestone,
            on_progress=progress.append,
            on_milestone=lambda state, steps: states.append(jax.tree.map(jnp.copy, state)),
            should_stop=lambda: False,
        ),
        total_steps=total_steps,
    )
    assert complete
    return final, captured, progress, states


def joining(join, joined):
    """`join`, keeping what it returns."""

    def kept(rollouts):
        trajectory = join(rollouts)
        joined.append(harness.numbers_of(trajectory))
        return trajectory

    return kept


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_shards"), [("dqn", 2), ("r2d2", 1), *tiers.nightly(("muzero", 2), ("r2d2", 2))])
def test_replayed_sequences_keep_the_contract(name, num_shards):
    """Two actors fill a ring in whatever order they come: every sequence is a stretch of one lane's stream."""
    agent = agent_of(name, core_size=4)
    driver = driver_of(agent, threads=2, num_shards=num_shards)
    final, _, progress, _ = run(driver, total_steps=3000)
    counts, rings, _ = final.replay_state
    assert int(counts.batches) * T * B >= 3000
    assert np.min(counts.rollouts) > 3
    assert int(final.learner.num_updates[0]) == progress[-1].updates > 10
    lanes = B // num_shards
    spec = agent.replay._replace(observation_rows=None)  # whatever a window brings, all of its rows are stored
    observation = jnp.zeros(rings.rows.observation.shape[3:])
    buffer = replay.make(spec, observation, rollout_length=T, lanes=lanes, groups=2, num_shards=num_shards)
    seen = []
    for shard in range(num_shards):
        ring = jax.tree.map(lambda x, s=shard: x[s], rings)
        own = [actor * B + shard * lanes + i for actor in range(2) for i in range(lanes)]
        np.testing.assert_array_equal(ring.lane, own)
        index = jnp.flatnonzero(ring.priority > 0).astype(jnp.int32)
        generation, newest = buffer.generation_of(index, counts.rollouts)
        at = replay.Sample(index, generation, jnp.ones(index.shape), newest - generation)
        sequences = harness.numbers_of(buffer.gather(ring, at))
        seen.append(sequences.timesteps.observation[0, :, :2])
        memory = sequences.actor_state
        for i in range(len(index)):
            one = by_lane(lambda axis, x, i=i: np.take(x, [i], axis), sequences)
            counting.check_trajectory(one._replace(actor_state=(), extras=()))
        if name == "r2d2":
            assert np.any(np.abs(memory.core[0]) > 0)
        else:
            assert not np.any(sequences.timesteps.first[1]), "masked transitions are not there"
            before, after = memory.frames[:, 0], sequences.timesteps.observation[0]
            goes_on = after[:, 1] > 0
            np.testing.assert_array_equal(before[goes_on, :2], after[goes_on, :2] - [0, 1])
    rows = np.concatenate(seen)
    assert len(np.unique(rows, axis=0)) == len(rows) >= 100
    if name in ("dqn", "muzero"):  # an update for 20 rows since there are 100
        assert abs(progress[-1].updates - (int(counts.batches) * T * B - 100) / 20) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_shards"),
    [
        *[("r2d2", 2), ("dqn", 2), ("vtrace with replay", 2)],
        *tiers.nightly(("r2d2", 1), ("muzero", 2), ("vtrace with replay", 1)),
    ],
)
def test_a_replay_in_the_hosts_memory_is_one_on_the_device(name, num_shards, monkeypatch):
    monkeypatch.setattr(learner_loop, "SECONDS_PER_REPORT", 0.0)  # of every rollout, with updates and without
    ends, reports = [], []
    for memory in ("device", "host"):
        driver = driver_of(agent_of(name, core_size=4), 2, "lockstep", num_shards=num_shards, replay_memory=memory)
        final, _, progress, _ = run(driver, total_steps=2000)
        ends.append(harness.numbers_of((final.learner, final.replay_state)))
        reports.append([p.metrics for p in progress])
    device, host = ends
    assert device[0].num_updates > 10
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), device, host)
    assert len(reports[0]) == len(reports[1]) > 20
    for expected, found in zip(*reports):
        assert found.keys() == expected.keys()
        for key in found.keys() - {key for key in found if key.endswith(("_share", "_depth"))}:
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-4, atol=1e-5, err_msg=key)


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
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **_: compiled.append(event))
    driver.states.make(driver.learner(state).learner, (), 3, state.replay_state)
    driver.states.make(learner, (), 5, state.replay_state)
    assert not [event for event in compiled if "backend_compile" in event]


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
@pytest.mark.parametrize("name", ["vtrace", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pqn", "ppo"))])
@pytest.mark.parametrize("num_shards", [2, pytest.param(1, marks=pytest.mark.slow)])
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
    """Two updates a batch: with plain gradients of a sum over lanes and no learning, each sees one half."""
    seen = []
    agent = agent_of("vtrace")

    def learn(learner, trajectory, progress, key):
        tags = jnp.sum(trajectory.timesteps.observation[0, :, 0])
        lanes = jnp.sum(2.0 ** trajectory.lane.astype(jnp.float32))
        new, metrics = agent.learn(learner, trajectory, progress, key)
        return new, metrics | {"lanes": collectives.global_sum(lanes), "tags": collectives.global_sum(tags)}

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
