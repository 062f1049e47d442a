"""R2D2: targets, burn-in, priorities and exploration against identities and oracles of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets, replay, returns, spaces
from podracer.agents import R2D2Config
from podracer.agents.r2d2 import sequence_priority
from podracer.types import Batch, EnvSpec, Trajectory
from tests.support import harness

SPEC = EnvSpec("rows", spaces.Box(-5.0, 5.0, (3,)), spaces.Discrete(4), None)
T, B = 6, 5
SMALL = {
    "rollout_length": T,
    "burn_in": 4,
    "trace_length": 9,
    "n_step": 3,
    "hidden_sizes": (8,),
    "core": "lstm",
    "core_size": 6,
    "head_size": 8,
    "batch_size": B,
    "replay_capacity": 40 * T,
    "replay_min_size": 1,
}


@functools.cache
def made(**overrides):
    return agents.r2d2.make(SPEC, R2D2Config(**(SMALL | overrides)))


def replayed(agent, seed=0, rollouts=7, **hyper):
    """A learner, a ring filled by acting on random rows with ends of all kinds, and all its sequences."""
    learner = jax.jit(agent.init)(jax.random.key(seed), harness.hyper(agent, **hyper))
    buffer = replay.make(agent.replay, jnp.zeros(3), rollout_length=T, lanes=B, groups=1, num_shards=1)
    rows = jax.tree.map(np.asarray, harness.timesteps(seed, T * rollouts, B))
    state = jax.jit(lambda: agent.start(jnp.arange(B, dtype=jnp.int32), B))()
    params = jax.jit(agent.actor_params)(learner, jnp.float32(0))
    record = jax.jit(functools.partial(harness.record, agent))
    add = jax.jit(buffer.add)
    ring = None
    for i in range(rollouts):
        window = jax.tree.map(lambda x, i=i: x[i * T : (i + 1) * T + 1], rows)
        trajectory, state = record(params, state, window, jax.random.key(100 + i))
        if ring is None:
            ring = jax.jit(buffer.init)(trajectory)
        ring = add(ring, trajectory, np.int32(0), np.int32(i))
    index = jnp.asarray(np.flatnonzero(np.asarray(ring.priority) > 0).astype(np.int32))
    generation = jax.jit(buffer.generation_of)(index, np.array([rollouts], np.int32))[0]
    at = replay.Sample(index, generation, jnp.ones(index.shape), jnp.zeros(index.shape, jnp.int32))
    sequences = jax.jit(buffer.gather)(ring, at)
    return learner, ring, at, Batch(sequences, at.weight, at.age)


def learn(agent, learner, batch):
    return harness.alone(agent.learn)(learner, batch, jnp.float32(0), jax.random.key(0))


# Acting and replay


@pytest.mark.parametrize(
    ("core", "frame_stack"),
    [
        ("lstm", 3),
        *(pytest.param(core, 1, marks=pytest.mark.slow) for core in ("none", "lstm", "gru", "mingru", "lru")),
        pytest.param("none", 3, marks=pytest.mark.slow),
    ],
)
def test_unrolling_from_the_stored_state_gives_the_actors_values(core, frame_stack):
    agent = made(core=core, frame_stack=frame_stack)
    learner, _, _, batch = replayed(agent)
    trajectory = batch.trajectory
    assert np.any(trajectory.timesteps.first[1:-1]), "episodes end within sequences"
    network = nets.make_q(
        nets.stacked_spec(SPEC, frame_stack), hidden_sizes=(8,), core=agent.config.core_settings, head_size=8
    )
    q = jax.jit(functools.partial(nets.unroll, network))(learner.params, trajectory)[0]
    np.testing.assert_allclose(jnp.max(q[:-1], -1), trajectory.extras["q_max"], atol=1e-5)
    taken = jnp.take_along_axis(q[:-1], trajectory.actions[..., None], -1)[..., 0]
    np.testing.assert_allclose(taken, trajectory.extras["q_taken"], atol=1e-5)


@pytest.mark.slow
def test_the_window_of_gtrxl_is_rebuilt_by_burning_in():
    """Replay stores none of it; after L M rows of an empty state, values are the actor's, and a row before are not."""
    agent = made(core="gtrxl", core_layers=2, core_memory=2)
    learner, ring, _, batch = replayed(agent)
    assert ring.actor_state.core == ()
    trajectory, n = batch.trajectory, agent.config.burn_in
    network = nets.make_q(SPEC, hidden_sizes=(8,), core=agent.config.core_settings, head_size=8)
    q = jax.jit(functools.partial(nets.unroll, network))(learner.params, trajectory)[0]
    errors = np.abs(np.max(q[:-1], -1) - trajectory.extras["q_max"])
    assert n == 4
    assert np.max(errors[n:]) < 1e-5
    assert np.max(errors[n - 1]) > 1e-4
    with pytest.raises(ValueError, match=r"burn_in=4: .* the state of gtrxl, .* use 6 or more, or lower core_memory"):
        R2D2Config(**(SMALL | {"core": "gtrxl", "core_layers": 2, "core_memory": 3}))


@pytest.mark.parametrize("rescaling", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_first_priorities_are_the_learners(rescaling):
    """With the actor's parameters as both networks, learning finds the priorities that acting had foreseen.

    With a discount that is not the config's too, as a member of a population has.
    """
    agent = made(value_rescaling=rescaling)
    learner, ring, at, batch = replayed(agent, discount=0.5)
    _, _, priorities = learn(agent, learner, batch)
    first = ring.priority[at.index] ** (1 / agent.config.priority_exponent)
    assert np.ptp(np.asarray(first)) > 0.1
    np.testing.assert_allclose(first, priorities, rtol=1e-4)
    assert "discount" not in ring.extras, "equal in all rows, so none stores it"


def test_priorities_mix_the_largest_and_the_mean():
    errors = jnp.array([[1.0, -4.0], [-3.0, 9.0], [2.0, 100.0]])
    mask = jnp.array([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    found = sequence_priority(errors, mask, R2D2Config())
    np.testing.assert_allclose(found, [0.9 * 3 + 0.1 * 2, 0.9 * 9 + 0.1 * 6.5], rtol=1e-6)


def test_lanes_explore_as_the_ladder_says():
    agent = made()
    N = 8
    lanes = jnp.array([0, 3, 7], jnp.int32)
    epsilon = agent.start(lanes, N).epsilon
    np.testing.assert_allclose(epsilon, 0.4 ** (1 + 7 * np.array([0, 3, 7]) / 7), rtol=1e-5)
    # The first of the ladder would act at random for two steps of five, for ever.
    assert float(agent.start(jnp.array([0], jnp.int32), 1).epsilon[0]) == pytest.approx(0.4**4.5)

    learner = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent))
    params = agent.actor_params(learner, jnp.float32(0))
    many = 4000
    state = agent.start(jnp.zeros(many, jnp.int32), N)
    row = jax.tree.map(lambda x: jnp.broadcast_to(x[0, :1], (many, *x.shape[2:])), harness.timesteps(0, 1, 1))
    for evaluation, expected in ((False, 0.4), (True, 1e-3)):
        action, extras, _ = agent.act(params, state, row, jax.random.key(1), evaluation)
        greedy = np.asarray(extras["q_taken"] == extras["q_max"])
        # A quarter of the random actions are the greedy one.
        assert 1 - greedy.mean() == pytest.approx(0.75 * expected, abs=4 * np.sqrt(expected / many))
        assert action.dtype == jnp.int32
        others = np.bincount(np.asarray(action)[~greedy], minlength=4)
        assert evaluation or np.sort(others)[1:].min() > 300, "all other actions are tried alike"


# Learning


@pytest.mark.slow
def test_burning_in_only_makes_a_state():
    """Learning with a burn-in is learning from the rows behind it, with the state that the burn-in ends in."""
    agent, without = made(learning_rate=0.1), made(learning_rate=0.1, burn_in=0)
    learner, _, _, batch = replayed(agent)
    network = nets.make_q(SPEC, hidden_sizes=(8,), core=nets.CoreSettings("lstm", 6), head_size=8)
    n = agent.config.burn_in
    trajectory = batch.trajectory
    inputs = nets.inputs(network, trajectory)
    opening = jax.tree.map(lambda x: x[:n], inputs)
    core = network.apply(learner.params, opening, trajectory.actor_state.core)[2]
    behind = Trajectory(
        timesteps=jax.tree.map(lambda x: x[n:], trajectory.timesteps),
        actions=trajectory.actions[n:],
        extras=jax.tree.map(lambda x: x[n:], trajectory.extras),
        actor_state=nets.ActorState(core, trajectory.actions[n - 1]),
        policy_version=trajectory.policy_version[n:],
        lane=trajectory.lane,
    )
    found, expected = learn(agent, learner, batch), learn(without, learner, batch._replace(trajectory=behind))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
    assert float(found[1]["grad/norm"]) > 0.01


def test_masked_transitions_change_nothing():
    agent = made(learning_rate=0.1, core="none")
    learner, _, _, batch = replayed(agent)
    steps = batch.trajectory.timesteps
    joins = steps.first[1:]
    assert np.any(joins)
    spoilt = batch.trajectory._replace(
        actions=jnp.where(joins, (batch.trajectory.actions + 1) % 4, batch.trajectory.actions),
        timesteps=steps._replace(
            reward=jnp.where(steps.first, 1e3, steps.reward), discount=jnp.where(steps.first, 0.3, steps.discount)
        ),
    )
    harness.assert_same(learn(agent, learner, batch), learn(agent, learner, batch._replace(trajectory=spoilt)))


def test_the_loss_is_the_oracles():
    """Row by row in NumPy: double-Q targets of n steps in rescaled values, half squares, importance weights.

    Each network burns its own state in, which is unrolling it from the first row.
    """
    agent = made(burn_in=2, learning_rate=0.1)
    config = agent.config
    learner, _, _, batch = replayed(agent)
    other = jax.jit(agent.init)(jax.random.key(9), harness.hyper(agent)).params
    learner = learner._replace(aux=other)
    weight = jnp.asarray(np.random.default_rng(0).random(batch.weight.shape), jnp.float32)
    network = nets.make_q(SPEC, hidden_sizes=(8,), core=nets.CoreSettings("lstm", 6), head_size=8)
    unroll = jax.jit(functools.partial(nets.unroll, network))
    online = np.asarray(unroll(learner.params, batch.trajectory)[0], np.float64)
    target = np.asarray(unroll(other, batch.trajectory)[0], np.float64)
    _, reward, discount, first, _ = (np.asarray(x, np.float64) for x in batch.trajectory.timesteps)
    actions = np.asarray(batch.trajectory.actions)

    def h(x):
        return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x

    def inverse(y):
        low, high = -1e4, 1e4
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if h(middle) < y else (low, middle)
        return middle

    total, priorities = 0.0, []
    L = config.burn_in + config.trace_length
    for i in range(actions.shape[1]):
        squares, errors = 0.0, []
        for t in range(config.burn_in, L):
            if first[t + 1, i]:
                continue
            back, scale, j = 0.0, 1.0, t
            while j < L and j < t + config.n_step and not first[j + 1, i]:
                back += scale * reward[j + 1, i]
                scale *= config.discount * discount[j + 1, i]
                j += 1
            back += scale * inverse(target[j, i, np.argmax(online[j, i])])
            errors.append(abs(h(back) - online[t, i, actions[t, i]]))
            squares += 0.5 * errors[-1] ** 2
        total += float(weight[i]) * squares / actions.shape[1]
        priorities.append(0.9 * max(errors) + 0.1 * np.mean(errors))
    _, metrics, found = learn(agent, learner, batch._replace(weight=weight))
    np.testing.assert_allclose(metrics["loss/total"], total, rtol=1e-4)
    np.testing.assert_allclose(found, priorities, rtol=1e-4)


@pytest.mark.slow
def test_shards_learn_as_one():
    agent = made(learning_rate=0.1)
    learner, _, _, batch = replayed(agent)
    n = batch.weight.shape[0] // 2 * 2
    batch = batch._replace(weight=jnp.linspace(0.1, 1.0, batch.weight.shape[0]))
    part = lambda s: harness.taken(batch, np.arange(s.start, s.stop))  # noqa: E731
    whole = learn(agent, learner, part(slice(0, n)))
    halves = jax.tree.map(lambda *x: jnp.stack(x), part(slice(0, n // 2)), part(slice(n // 2, n)))
    split = harness.over_shards(
        lambda state, b: agent.learn(state, b, jnp.float32(0), jax.random.key(0)), learner, halves
    )
    for shard in range(2):
        mine = jax.tree.map(lambda x, s=shard: x[s], split[:2])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5), mine, whole[:2])
    np.testing.assert_allclose(jnp.concatenate(split[2]), whole[2], rtol=1e-4)


def test_the_target_network_is_copied_now_and_then():
    agent = made(target_interval=3)
    learner, _, _, batch = replayed(agent)
    step = harness.alone(agent.learn)
    kept = learner.params
    for i in range(1, 8):
        learner, *_ = step(learner, batch, jnp.float32(0), jax.random.key(0))
        kept = learner.params if i % 3 == 0 else kept
        harness.assert_same(learner.aux, kept)
        assert int(learner.num_updates) == i


def test_paper_settings_are_the_tables():
    config = R2D2Config.atari()
    table_8 = {
        "replay_ratio": 0.75,
        "burn_in": 40,
        "trace_length": 80,
        "rollout_length": 80,
        "replay_capacity": 8_000_000,
        "replay_min_size": 400_000,
        "priority_exponent": 0.9,
        "importance_exponent": 0.6,
        "discount": 0.997,
        "batch_size": 64,
        "learning_rate": 1e-4,
        "optimizer_eps": 1e-3,
        "target_interval": 2500,
        "max_grad_norm": 80.0,
        "n_step": 5,
        "epsilon_base": 0.4,
        "epsilon_alpha": 7.0,
        "evaluation_epsilon": 1e-3,
        "priority_max_weight": 0.9,
        "value_rescaling": True,
        "frame_stack": 4,
        "torso": "nature",
        "core": "lstm",
        "core_size": 512,
        "head_size": 512,
    }
    assert {name: getattr(config, name) for name in table_8} == table_8
    # Section 4.3: 260K frames and 9.5 updates a second. Every row is in the trace of one sequence, 0.75 times.
    rows = config.trace_length * config.batch_size / config.replay_ratio
    assert rows == pytest.approx(260_000 / 4 / 9.5, rel=0.01)
    assert R2D2Config.atari(core="none") == dataclasses.replace(config, core="none")


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match="action values need Discrete"):
        agents.r2d2.make(SPEC._replace(action_space=spaces.Box(-1.0, 1.0, (2,))))


# Returns


def test_returns_of_n_steps_by_hand():
    """Three steps of gamma 1/2 over rewards 1, 2, 4, ... from values 100 t, with one end at every offset in turn."""
    T, n = 6, 3
    rewards, values = 2.0 ** np.arange(T), 100.0 * np.arange(T + 1)
    for kind in ("termination", "truncation", "break"):
        for end in range(1, T):
            discount, mask = np.full(T, 0.5), np.ones(T)
            if kind == "termination":
                discount[end - 1] = 0.0
            mask[end] = 0.0  # the transition from row `end` joins two episodes
            expected = []
            for t in range(T):
                if t == end:
                    expected.append(values[t])
                    continue
                stop = min([t + n, T] + ([end] if t < end else []))
                value = 0.0 if kind == "termination" and t < end == stop else values[stop]
                expected.append(sum(0.5**k * rewards[t + k] for k in range(stop - t)) + 0.5 ** (stop - t) * value)
            step = returns.Transitions(*(jnp.asarray(x, jnp.float32)[:, None] for x in (rewards, discount, mask)))
            found = returns.n_step(jnp.asarray(values, jnp.float32)[:, None], step, n)[:, 0]
            np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_rescaling_is_undone():
    x = jnp.concatenate([jnp.array([0.0]), jnp.geomspace(1e-6, 1e5, 400)])
    for sign in (1.0, -1.0):
        np.testing.assert_allclose(returns.unrescale(returns.rescale(sign * x)), sign * x, rtol=1e-6)
    np.testing.assert_allclose(returns.rescale(jnp.array([3.0, -8.0])), [1.003, -2.008], rtol=1e-6)
