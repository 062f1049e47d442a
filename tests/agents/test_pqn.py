"""PQN: targets against a loop over episodes, whole updates against hand-written ones, exploration and shards."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer import agents, nets, spaces
from podracer.agents import PQNConfig
from podracer.learning import minibatches
from podracer.types import ActorParams, Agent, EnvSpec, TimeStep, Trajectory
from tests.support import harness

T, B, A, F = 9, 6, 3, 4
KEY = jax.random.key(0)
ROWS = (T + 1) * B
SPEC = EnvSpec("rows", spaces.Box(-9.0, 9.0, (F,)), spaces.Discrete(A))
TABLE = EnvSpec("table", spaces.Box(0.0, 1.0, (ROWS,)), spaces.Discrete(A))


def linear(inputs: int) -> nets.Network:
    """Q(x) = x W."""

    def apply(params: Any, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = observation @ params
        return q, jnp.max(q, -1)

    return nets.feed_forward(lambda key: jax.random.normal(key, (inputs, A)), apply)


def trajectory_of(agent: Agent, rows: TimeStep, lanes: slice = slice(None)) -> Trajectory:
    """Rows with random actions."""
    actions = np.random.default_rng(1).integers(0, A, (T, B), np.int32)[:, lanes]
    rows = jax.tree.map(lambda x: jnp.asarray(x)[:, lanes], rows)
    n = actions.shape[1]
    numbers = jnp.arange(n, dtype=jnp.int32)
    return Trajectory(rows, jnp.asarray(actions), {}, agent.start(numbers, n), jnp.zeros((T, n), jnp.int32), numbers)


def learnt(agent: Agent, trajectory: Trajectory, progress: float = 0.0, learner: Any = None) -> Any:
    """The learner before and after an update, and the metrics."""
    learner = learner or jax.jit(agent.init)(KEY, harness.hyper(agent))
    return learner, *harness.alone(agent.learn)(learner, trajectory, jnp.float32(progress), KEY)


# Targets


def by_episodes(values: np.ndarray, rows: TimeStep, discount: float, lambda_: float) -> np.ndarray:
    """Peng's Q(lambda) [T, B], episode by episode, from its last row backwards; NaN where there is no transition."""
    found = np.full((T, B), np.nan)
    for lane in range(B):
        opens = [0, *(t for t in range(1, T + 1) if rows.first[t, lane]), T + 1]
        for start, end in itertools.pairwise(opens):
            target = values[end - 1, lane]
            for t in reversed(range(start, end - 1)):
                mixed = lambda_ * target + (1 - lambda_) * values[t + 1, lane]
                target = rows.reward[t + 1, lane] + discount * rows.discount[t + 1, lane] * mixed
                found[t, lane] = target
    return found


@functools.cache
def table(**fields: Any) -> Agent:
    """An agent whose value of every row and action is a parameter, and whose optimiser leaves gradients as they are."""
    settings: dict[str, Any] = {"num_epochs": 1, "num_minibatches": 1, "learning_rate": 1.0, "max_grad_norm": np.inf}
    return agents.pqn.make(TABLE, PQNConfig(**(settings | {"optimizer": "sgd"} | fields)), linear(ROWS))


def table_rows(seed: int = 3) -> TimeStep:
    rows = harness.timesteps(seed, T, B)
    return rows._replace(observation=jnp.eye(ROWS).reshape(T + 1, B, ROWS))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("lambda_", [0.65, pytest.param(0.0, marks=pytest.mark.slow)])
def test_targets_are_those_of_a_loop_over_episodes(clip: bool, lambda_: float) -> None:
    """A gradient step of a table moves each value by its error over the number of transitions, and no other value."""
    rows = jax.tree.map(np.asarray, table_rows())
    ends = rows.last[1:-1] & (rows.discount[1:-1] == 0), rows.last[1:-1] & (rows.discount[1:-1] == 1)
    assert all(np.any(end) for end in (*ends, rows.first[1:] & ~rows.last[:-1])), "terminations, truncations, breaks"
    agent = table(clip_rewards=clip, trace_lambda=lambda_, discount=0.9)
    trajectory = trajectory_of(agent, table_rows())
    before, after, metrics = learnt(agent, trajectory)
    values = np.asarray(before.params).reshape(T + 1, B, A)
    moves = np.asarray(after.params).reshape(T + 1, B, A) - values
    reward = np.clip(rows.reward, -1, 1) if clip else rows.reward
    assert np.any(np.abs(rows.reward) > 1)
    wanted = by_episodes(values.max(-1), rows._replace(reward=reward), 0.9, lambda_)
    valid = ~np.isnan(wanted)
    taken = np.take_along_axis(values[:-1], np.asarray(trajectory.actions)[..., None], -1)[..., 0]
    expected = np.zeros_like(moves)
    errors = np.where(valid, wanted - taken, 0.0)
    np.put_along_axis(expected[:-1], np.asarray(trajectory.actions)[..., None], errors[..., None] / valid.sum(), -1)
    np.testing.assert_allclose(moves, expected, atol=1e-6)
    assert float(metrics["loss/total"]) == pytest.approx(0.5 * np.sum(errors**2) / valid.sum(), rel=1e-4)
    assert float(metrics["value/td_error"]) == pytest.approx(np.sum(np.abs(errors)) / valid.sum(), rel=1e-4)
    assert float(metrics["value/mean"]) == pytest.approx(np.mean(taken[valid]), rel=1e-4)


def test_shards_make_one_mean() -> None:
    """Two halves with unequal numbers of transitions learn what the whole learns."""
    agent = table()
    rows = table_rows()
    learner, whole, metrics = learnt(agent, trajectory_of(agent, rows))
    halves = [trajectory_of(agent, rows, slice(i * B // 2, (i + 1) * B // 2)) for i in range(2)]
    counts = [int(np.sum(~np.asarray(half.timesteps.first[1:]))) for half in halves]
    assert counts[0] != counts[1]
    learn = lambda learner, t: agent.learn(learner, t, jnp.float32(0), KEY)  # noqa: E731
    found, terms = harness.over_shards(learn, learner, jax.tree.map(lambda *x: jnp.stack(x), *halves))
    for half in range(2):
        np.testing.assert_allclose(found.params[half], whole.params, atol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[half], b, rtol=1e-4), terms, metrics)  # noqa: B023


# Updates


def test_an_update_is_the_hand_written_one() -> None:
    """Two epochs of three minibatches, twice: targets of the rollout's parameters, means over what is valid, clipping
    by the global norm, RAdam with a learning rate that falls."""
    config = PQNConfig(
        discount=0.9, num_epochs=2, num_minibatches=3, max_grad_norm=0.5, learning_rate=0.1, trace_lambda=0.8
    )
    agent = agents.pqn.make(SPEC, config, linear(F))
    rows = harness.timesteps(5, T, B, (F,))
    trajectory = trajectory_of(agent, rows)
    radam = optax.chain(optax.clip_by_global_norm(0.5), optax.radam(0.1 * 0.75))
    x, actions = np.asarray(rows.observation, np.float64)[:-1].reshape(-1, F), np.asarray(trajectory.actions).ravel()
    learner, state = None, None
    for _ in range(2):
        before, learner, metrics = learnt(agent, trajectory, 0.25, learner)
        params = np.asarray(before.params, np.float64)
        values = (np.asarray(rows.observation) @ params).max(-1)
        wanted = by_episodes(values, jax.tree.map(np.asarray, rows), 0.9, 0.8).ravel()
        state = state or radam.init(jnp.asarray(params, jnp.float32))
        norms = []
        for units in np.asarray(minibatches.minibatches(KEY, T * B, 2, 3)):
            units = units[~np.isnan(wanted[units])]
            gradient = np.zeros((F, A))
            for i in units:
                gradient[:, actions[i]] += (x[i] @ params[:, actions[i]] - wanted[i]) * x[i] / len(units)
            norms.append(np.linalg.norm(gradient))
            with jax.numpy_dtype_promotion("standard"):
                moves, state = radam.update(jnp.asarray(gradient, jnp.float32), state)
            params = params + np.asarray(moves, np.float64)
        assert max(norms) > 0.5
        assert len({*map(int, np.sum(np.isnan(wanted[np.asarray(minibatches.minibatches(KEY, T * B, 2, 3))]), 1))}) > 1
        np.testing.assert_allclose(learner.params, params, atol=1e-4)
        assert float(metrics["grad/norm"]) == pytest.approx(np.mean(norms), rel=1e-3)
    assert int(learner.num_updates) == 2
    assert float(metrics["grad/learning_rate"]) == pytest.approx(0.075)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("core", ["mingru", pytest.param("gtrxl", marks=pytest.mark.slow)])
def test_recurrent_networks_learn_from_whole_lanes(core: nets.CoreName) -> None:
    """Two steps on three lanes each, from the state that acting had: the gradients of a loss written out here."""
    settings: dict[str, Any] = {"num_epochs": 1, "num_minibatches": 2, "learning_rate": 0.1, "max_grad_norm": np.inf}
    sizes: dict[str, Any] = {"hidden_sizes": (4,), "core": core, "core_size": 4, "core_memory": 3}
    config = PQNConfig(**settings, **sizes, optimizer="sgd", discount=0.9, trace_lambda=0.8)
    agent = agents.pqn.make(SPEC, config)
    rows, actor = harness.timesteps(5, T, B, (F,)), jnp.float32(0)
    before = jax.jit(agent.init)(KEY, harness.hyper(agent))
    start = agent.start(jnp.arange(B, dtype=jnp.int32), B)
    record = jax.jit(
        lambda state: harness.record(agent, ActorParams(before.params, jnp.int32(0), actor), state, rows, KEY)
    )
    trajectory, memory = record(record(start)[1])
    np.testing.assert_array_equal(memory.previous_action, trajectory.actions[-1])
    _, after, metrics = learnt(agent, trajectory, learner=before)

    network = nets.make_q(
        SPEC, hidden_sizes=(4,), core=config.core_settings, head_size=0, dueling=False, layer_norm=True, init="he"
    )
    unroll = jax.jit(lambda params: nets.unroll(network, params, trajectory)[0])
    q = np.asarray(unroll(before.params))
    np.testing.assert_array_equal(trajectory.actions, q[:-1].argmax(-1))
    values = q.max(-1)
    wanted = by_episodes(values, jax.tree.map(np.asarray, rows), 0.9, 0.8)
    valid, order = jnp.asarray(~np.isnan(wanted)), np.asarray(minibatches.minibatches(KEY, B, 1, 2))

    def loss(params: Any, lanes: jax.Array) -> jax.Array:
        taken = jnp.take_along_axis(unroll(params)[:-1], trajectory.actions[..., None], -1)[..., 0]
        errors = jnp.where(valid, jnp.nan_to_num(jnp.asarray(wanted, jnp.float32)) - taken, 0.0)[:, lanes]
        return 0.5 * jnp.sum(jnp.square(errors)) / jnp.sum(valid[:, lanes].astype(jnp.float32))

    params, gradient = before.params, jax.jit(jax.grad(loss))
    for lanes in order:
        moves = gradient(params, jnp.asarray(lanes))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, moves)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), after.params, params)
    assert float(metrics["grad/norm"]) > 0.01


def test_frames_are_stacked_by_the_agent() -> None:
    """The agent learns the same as an agent of stacked observations."""
    settings: dict[str, Any] = {"num_epochs": 1, "num_minibatches": 2, "hidden_sizes": (8,), "learning_rate": 0.1}
    stacking = agents.pqn.make(SPEC, PQNConfig(**settings, frame_stack=3))
    plain = agents.pqn.make(nets.stacked_spec(SPEC, 3), PQNConfig(**settings))
    rows = harness.timesteps(5, T, B, (F,))
    frames = jnp.zeros((B, 2, F))
    stacked = rows._replace(observation=jax.jit(nets.stack_frames)(frames, rows.observation, rows.first)[0])
    learner, found, _ = learnt(stacking, trajectory_of(stacking, rows))
    _, expected, _ = learnt(plain, trajectory_of(plain, stacked), learner=learner)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found.params, expected.params)
    actor = stacking.actor_params(found, jnp.float32(1))._replace(aux=jnp.float32(0))
    row = jax.tree.map(lambda x: x[0], rows)._replace(first=jnp.ones(B, bool))
    start = stacking.start(jnp.arange(B, dtype=jnp.int32), B)
    action, _, memory = jax.jit(functools.partial(stacking.act, evaluation=False))(actor, start, row, KEY)
    as_one = row._replace(observation=jnp.concatenate([jnp.zeros((B, F, 2)), row.observation[..., None]], -1))
    act = jax.jit(functools.partial(plain.act, evaluation=True))
    np.testing.assert_array_equal(action, act(actor, nets.ActorState((), ()), as_one, KEY)[0])
    np.testing.assert_array_equal(memory.frames[:, 1], row.observation)


# Acting


def test_exploration_falls_with_progress() -> None:
    config = PQNConfig(epsilon_start=0.9, epsilon_final=0.1, epsilon_decay=0.4, evaluation_epsilon=0.0)
    agent = agents.pqn.make(SPEC, config, linear(F))
    learner = jax.jit(agent.init)(KEY, harness.hyper(agent))
    epsilon = lambda progress, made=agent: float(made.actor_params(learner, jnp.float32(progress)).aux)  # noqa: E731
    found = [epsilon(progress) for progress in (0.0, 0.1, 0.4, 1.0)]
    np.testing.assert_allclose(found, [0.9, 0.7, 0.1, 0.1], rtol=1e-5)
    at_once = agents.pqn.make(SPEC, PQNConfig(epsilon_decay=0.0, epsilon_final=0.1), linear(F))
    np.testing.assert_allclose([epsilon(0.0, at_once), epsilon(1e-6, at_once)], [1.0, 0.1], rtol=1e-5)

    many = 4000
    row = jax.tree.map(lambda x: jnp.broadcast_to(x[0, :1], (many, *x.shape[2:])), harness.timesteps(0, 1, 1, (F,)))
    start = agent.start(jnp.arange(many, dtype=jnp.int32), many)
    best = int(np.argmax(np.asarray(row.observation[0] @ learner.params)))
    for progress, evaluation, chance in ((0.1, False, 0.7), (1.0, False, 0.1), (0.1, True, 0.0)):
        params = agent.actor_params(learner, jnp.float32(progress))
        action, extras, _ = jax.jit(functools.partial(agent.act, evaluation=evaluation))(params, start, row, KEY)
        assert action.dtype == jnp.int32
        assert extras == {}
        counts = np.bincount(np.asarray(action), minlength=A) / many
        expected = np.full(A, chance / A) + (1 - chance) * (np.arange(A) == best)
        np.testing.assert_allclose(counts, expected, atol=4 * np.sqrt(chance / many))


# Settings


def test_the_papers_settings() -> None:
    paper = PQNConfig.atari()
    assert paper.envs_per_device * paper.rollout_length // paper.num_minibatches == 128
    assert (paper.trace_lambda, paper.learning_rate, paper.epsilon_final) == (0.65, 2.5e-4, 0.001)
    assert PQNConfig.atari(torso="shallow").torso == "shallow"


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"epsilon_final=0\.5 must be at most epsilon_start=0\.2: .* use 0\.2\."):
        PQNConfig(epsilon_start=0.2, epsilon_final=0.5)
    with pytest.raises(ValueError, match="action values need Discrete ones"):
        agents.pqn.make(SPEC._replace(action_space=spaces.Box(-1.0, 1.0, (2,))))
    agent = agents.pqn.make(SPEC, PQNConfig(num_minibatches=5), linear(F))
    with pytest.raises(ValueError, match="num_minibatches=5 does not divide the 54 units of a shard"):
        learnt(agent, trajectory_of(agent, harness.timesteps(5, T, B, (F,))))
    lanes = agents.pqn.make(SPEC, PQNConfig(num_minibatches=4, core="gru", core_size=4))
    with pytest.raises(ValueError, match="num_minibatches=4 does not divide the 6 units of a shard"):
        learnt(lanes, trajectory_of(lanes, harness.timesteps(5, T, B, (F,))))
