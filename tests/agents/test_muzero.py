"""MuZero: targets against a loop, what gradients reach, and what is learnt behind the end of an episode."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, returns, spaces
from podracer.agents import MuZeroConfig, muzero
from podracer.learning.bins import Bins
from podracer.search import windows, world_models
from podracer.types import Agent, Batch, EnvSpec, TimeStep
from tests.support import harness, tiers

SPEC = EnvSpec("rows", spaces.Box(-5.0, 5.0, (3,)), spaces.Discrete(4), None)
A, GAMMA = 4, 0.9


def value_behind(x: dict[str, np.ndarray], k: int, i: int, n: int) -> tuple[float, int]:
    """z of row k of lane i, from at most n rewards, and the row that it bootstraps from."""
    z, scale, row = 0.0, 1.0, k
    while row < k + n and not x["first"][row + 1, i]:
        z += scale * x["reward"][row + 1, i]
        scale *= GAMMA * x["discount"][row + 1, i]
        row += 1
    return z + scale * x["value"][row, i] * (row > k or x["discount"][row, i]), row


@pytest.mark.parametrize(
    ("K", "n"), [(5, 3), pytest.param(2, 10, marks=pytest.mark.slow), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_targets_are_the_loops(K: int, n: int) -> None:
    x = harness.windows(K + n + 1, A)
    after = returns.Transitions(x["reward"][1:], GAMMA * x["discount"][1:], 1.0 - x["first"][1:].astype(np.float32))
    arrays: Any = jax.tree.map(jnp.asarray, (after, x["discount"], x["policy"], x["value"]))
    found = windows.targets(*arrays, unroll_length=K, n_step=n)
    kinds = set()
    for i in range(x["reward"].shape[1]):
        reached = True
        for k in range(K + 1):
            last = bool(x["first"][k + 1, i])
            assert float(found.valid[k, i]) == reached
            assert float(found.acted[k, i]) == (reached and not last)
            assert float(found.ended[k, i]) == (reached and x["discount"][k, i] == 0)
            if reached:
                z, row = value_behind(x, k, i, n)
                assert float(found.value[k, i]) == pytest.approx(z, abs=1e-5)
                if k:
                    assert float(found.reward[k, i]) == x["reward"][k, i]
                kinds.add((last, bool(x["discount"][k, i]), row - k))
            reached = reached and not last
    assert {(True, False, 0), (True, True, 0), (False, True, n)} <= kinds, "ends of both kinds, and none"
    np.testing.assert_array_equal(found.policy, x["policy"][: K + 1])


def test_terminations_absorb_and_truncations_do_not() -> None:
    K, n = 5, 3
    x = harness.windows(K + n + 1, A)
    after = returns.Transitions(x["reward"][1:], GAMMA * x["discount"][1:], 1.0 - x["first"][1:].astype(np.float32))
    arrays: Any = jax.tree.map(jnp.asarray, (after, x["discount"], x["policy"], x["value"]))
    masked, found = (
        jax.tree.map(np.asarray, windows.targets(*arrays, unroll_length=K, n_step=n, absorbing=absorbing))
        for absorbing in (False, True)
    )
    np.testing.assert_array_equal(found.acted, masked.acted)
    behind = 0
    for i in range(x["reward"].shape[1]):
        ends = np.flatnonzero(x["first"][1 : K + 2, i])  # last rows of episodes
        end = ends[0] if len(ends) else K
        absorbs = x["discount"][end, i] == 0
        for k in range(K + 1):
            if k <= end:
                for name in ("reward", "value", "valid"):
                    assert getattr(found, name)[k, i] == getattr(masked, name)[k, i]
            else:
                assert found.valid[k, i] == found.ended[k, i] == absorbs
                assert not absorbs or (found.reward[k, i], found.value[k, i]) == (0, 0)
                behind += absorbs
    assert behind > 0
    assert np.any(found.valid == 0), "behind truncations"


SMALL: dict[str, Any] = {"hidden_sizes": (8,), "state_size": 6, "head_size": 8, "num_bins": 11, "n_step": 3}


@functools.cache
def made(**overrides: Any) -> Agent:
    return agents.muzero.make(SPEC, MuZeroConfig(**(SMALL | overrides)))


def batch_of(agent: Agent, least: int = 0) -> Batch:
    """All windows of some rows that reach at least row `least`."""
    return harness.batch_of(agent, A, least)


taken = harness.taken


learner_of = harness.learner_of


def losing(**overrides: Any) -> tuple[Agent, Batch]:
    """An agent that does not absorb, and some windows: tests share the program of its update."""
    agent = made(unroll_length=2, absorbing=False, max_reward=0.02, **overrides)
    batch = batch_of(agent)
    return agent, taken(batch, np.arange(0, len(batch.weight), len(batch.weight) // 24))


def searching(**overrides: Any) -> tuple[Agent, Any]:
    """An agent that reanalyses, and a learner of the kind."""
    learner = learner_of(made(unroll_length=2, reanalyse=0.5, target_interval=3))
    return made(unroll_length=2, **({"reanalyse": 0.5, "target_interval": 3} | overrides)), learner


def learn(agent: Agent, batch: Batch, learner: Any = None) -> Any:
    learner = learner_of(agent) if learner is None else learner
    return harness.alone(agent.learn)(learner, batch, jnp.float32(0), jax.random.key(0))


@pytest.mark.parametrize("cost", [0.0, 3.0])
def test_the_loss_is_the_loops(cost: float) -> None:
    """Sample by sample, step by step, with the model called one state at a time."""
    agent, batch = losing(**({"termination_cost": cost} if cost else {}))
    learner = learner_of(agent)
    config, hyper = agent.config, harness.hyper(agent)
    sizes = world_models.Sizes(num_bins=11, hidden_sizes=(8,), state_size=6, head_size=8)
    model = world_models.make(SPEC, sizes, terminations=cost > 0)
    bins = Bins(11, config.max_reward / (1 - config.discount))
    target = jax.tree.map(np.asarray, muzero._targets(hyper["discount"], batch.trajectory, config))
    hot = {name: np.asarray(bins.two_hot(jnp.asarray(x))) for name, x in target._asdict().items() if name != "policy"}
    represent, dynamics, predict = map(jax.jit, (model.represent, model.dynamics, model.predict))
    at = np.arange(len(batch.weight))
    total, errors = 0.0, []
    for i in at:
        state = represent(learner.params, batch.trajectory.timesteps.observation[0, i : i + 1])
        reward, each = np.zeros(11), 0.0
        for k in range(3):
            policy, value = (np.asarray(x[0]) for x in predict(learner.params, state))
            part = config.value_cost * cross_entropy(hot["value"][k, i], value) * target.valid[k, i]
            part += cross_entropy(target.policy[k, i], policy) * target.acted[k, i]
            if k:
                part += cross_entropy(hot["reward"][k, i], reward) * target.valid[k, i]
                if model.termination:
                    ended, logit = target.ended[k, i], float(model.termination(learner.params, state)[0])
                    part += cost * np.logaddexp(0.0, -logit if ended else logit) * target.valid[k, i]
            else:
                errors.append(abs(float(bins.expectation(jnp.asarray(value))) - target.value[0, i]))
            each += part / (2 if k else 1)
            state, said = dynamics(learner.params, state, batch.trajectory.actions[k, i : i + 1])
            reward = np.asarray(said[0])
        total += each * float(batch.weight[i])
    _, metrics, priorities = learn(agent, batch, learner)
    assert float(metrics["loss/total"]) == pytest.approx(total / len(at), rel=1e-4)
    np.testing.assert_allclose(priorities, errors, rtol=1e-3, atol=1e-4)
    outside = [
        np.mean([max(abs(target.value[k, i]), abs(target.reward[k, i])) > 2.0 for k in range(3) if target.valid[k, i]])
        for i in at
    ]
    assert 0 < float(metrics["value/outside"]) < 1
    np.testing.assert_allclose(metrics["value/outside"], np.mean(outside), rtol=1e-5)


def cross_entropy(weights: np.ndarray, logits: np.ndarray) -> float:
    return float(-np.sum(weights * (logits - np.log(np.sum(np.exp(logits))))))


def test_what_comes_k_steps_later_weighs_half_as_much_each() -> None:
    """The gradient of a loss on state k, with respect to state 0 of a model that does not change it, is 2^-k of the
    gradient on state 0."""

    def init(key: jax.Array) -> Any:
        return {"state": jnp.ones(4)}

    def represent(params: Any, observation: jax.Array) -> jax.Array:
        return jnp.broadcast_to(params["state"], (len(observation), 4))

    def predict(params: Any, state: jax.Array) -> Any:
        return state, jnp.zeros((len(state), 11))

    model = world_models.WorldModel(
        init, represent, lambda params, state, action: (state, jnp.zeros((len(state), 11))), predict
    )
    norms = []
    for at in range(4):

        def only(said: Any, *rest: Any, at: int = at) -> Any:
            total = jnp.sum(said[at][1] ** 2)
            return total, {"loss/total": total}

        agent = agents.muzero.make(SPEC, MuZeroConfig(**SMALL, unroll_length=3), model, only)
        learner = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent))
        norms.append(float(learn(agent, batch_of(agent, least=3), learner)[1]["grad/norm"]))
    np.testing.assert_allclose(np.array(norms[1:]) / norms[0], [0.5, 0.25, 0.125], rtol=1e-5)


@pytest.mark.parametrize("absorbing", [False, True])
def test_nothing_is_learnt_of_what_is_behind_the_end_of_an_episode(absorbing: bool) -> None:
    """Records after the end, and the policy of its last row, change no bit of the update."""
    agent, batch = losing()
    agent = made(unroll_length=2, max_reward=0.02, absorbing=True) if absorbing else agent
    first = np.asarray(batch.trajectory.timesteps.first)
    over = np.cumsum(first[1:], axis=0) > 0  # transitions [.., B] that are masked or lie behind one
    assert over.any()
    assert not over.all(axis=1).any()
    rng = np.random.default_rng(7)
    extras, rows = batch.trajectory.extras, batch.trajectory.timesteps
    noise = jnp.asarray(rng.dirichlet(np.ones(A), over.shape), jnp.float32)
    policy = jnp.where(over[..., None], noise, extras["policy"])
    behind = np.concatenate([np.zeros_like(over[:1]), over[:-1]]) & over
    value = jnp.where(behind, 5.0, extras["value"])
    reward = jnp.where(np.concatenate([np.zeros_like(over[:1]), over]), 7.0, rows.reward)
    actions = jnp.where(over, 0, batch.trajectory.actions)
    changed = batch.trajectory._replace(
        extras={"policy": policy, "value": value}, timesteps=rows._replace(reward=reward), actions=actions
    )
    expected, found = learn(agent, batch), learn(agent, batch._replace(trajectory=changed))
    # A value behind a truncation counts: only rows behind the last one were changed.
    jax.tree.map(np.testing.assert_array_equal, found[0].params, expected[0].params)
    reached = jnp.where(over, extras["value"], extras["value"] + 1.0)
    other = batch.trajectory._replace(extras={"policy": policy, "value": reached})
    moved = learn(agent, batch._replace(trajectory=other))[0].params
    assert any(np.any(x != y) for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(expected[0].params)))


@pytest.mark.slow
def test_reanalysis_is_what_acting_would_find_today() -> None:
    """For an exact part of the samples, evenly spread: the policies of a search, the network's values."""
    noisy, learner = searching()
    agent, _ = searching(dirichlet_fraction=0.0)
    K, n = 2, agent.config.n_step
    batch = taken(batch_of(agent), np.arange(10))
    learner = learner._replace(aux=jax.tree.map(lambda x: 1.5 * np.asarray(x), learner.params))
    actor = agent.target_params(learner, jnp.float32(0))  # type: ignore[misc]
    renewed = jax.jit(agent.reanalyse)(actor, batch, jax.random.key(0)).trajectory  # type: ignore[arg-type]
    np.testing.assert_array_equal(renewed.timesteps.observation, batch.trajectory.timesteps.observation[:1])
    extras = renewed.extras
    before, some = batch.trajectory.extras, np.array([0, 2, 4, 6, 8])
    others = np.setdiff1d(np.arange(10), some)
    for name in ("policy", "value"):
        np.testing.assert_array_equal(extras[name][:, others], before[name][:, others])
    np.testing.assert_array_equal(extras["policy"][K + 1 :], before["policy"][K + 1 :])
    observation = batch.trajectory.timesteps.observation[: K + n + 1, some].reshape(-1, 3)
    zeros = jnp.zeros(len(observation))
    row = TimeStep(observation, zeros, zeros + 1.0, zeros == 0, zeros > 0)
    memory = agent.start(jnp.arange(len(observation), dtype=jnp.int32), len(observation))
    found = jax.jit(agent.act, static_argnums=4)(actor, memory, row, jax.random.key(1), True)[1]
    policy = np.asarray(found["policy"]).reshape(K + n + 1, len(some), A)
    np.testing.assert_allclose(extras["policy"][: K + 1, some], policy[: K + 1], atol=1e-6)
    other = jax.jit(noisy.reanalyse)(actor, batch, jax.random.key(0)).trajectory.extras["policy"]  # type: ignore[arg-type]
    moved = np.abs(other[: K + 1, some] - policy[: K + 1]).max()
    assert moved > 0.99 / agent.config.simulations, "noise at the root moves a visit or more"
    model = world_models.make(SPEC, world_models.Sizes(num_bins=11, hidden_sizes=(8,), state_size=6, head_size=8))
    value = jax.jit(lambda params: model.predict(params, model.represent(params, observation))[1])(learner.aux)
    value = Bins(11, agent.config.max_reward / (1 - agent.config.discount)).expectation(value)
    np.testing.assert_allclose(extras["value"][: K + n + 1, some].ravel(), value, rtol=1e-4, atol=1e-5)


def test_first_priorities_are_the_errors_of_recorded_values() -> None:
    """|nu - z| of consecutive rows, for as many as sequences of the replay begin at.

    Of the discount that acting recorded, as a member of a population has its own.
    """
    agent, m = made(priority_exponent=1.0), 4
    assert agent.replay is not None
    assert agent.replay.priority is not None
    n, length = agent.config.n_step, agent.replay.length
    x = harness.windows(m + length - 1, A)
    rows: Any = TimeStep((), x["reward"], x["discount"], x["first"], np.zeros(x["first"].shape, bool))
    extras = {"value": jnp.asarray(x["value"]), "discount": jnp.full(x["value"].shape, GAMMA)}
    found = jax.jit(agent.replay.priority)(jax.tree.map(jnp.asarray, rows), extras)
    lanes = range(x["reward"].shape[1])
    wanted = [[abs(x["value"][k, i] - value_behind(x, k, i, n)[0]) for i in lanes] for k in range(m)]
    assert found.shape == (m, len(lanes))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.nightly
def test_targets_are_copied_every_so_many_updates() -> None:
    agent, learner = searching()
    assert agent.target_params is not None
    batch = taken(batch_of(agent), np.arange(4))
    update = jax.jit(lambda learner: learn(agent, batch, learner)[0])
    copied, version = learner.aux, 0
    for number in range(1, 8):
        learner = update(learner)
        if number % 3 == 0:
            copied, version = learner.params, number
        target = agent.target_params(learner, jnp.float32(0))
        assert int(target.version) == version
        jax.tree.map(np.testing.assert_array_equal, target.params, copied)
        assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (copied, learner.params)))) == (number % 3 > 0)


@pytest.mark.slow
@pytest.mark.nightly
def test_actions_are_drawn_by_visits_at_temperatures_that_fall() -> None:
    agent, B = made(dirichlet_fraction=0.5, dirichlet_alpha=1.0, simulations=12), 4000
    learner = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent))
    rows = TimeStep(
        np.tile(np.float32([1.0, 2.0, 3.0]), (B, 1)), np.zeros(B), np.ones(B), np.ones(B, bool), np.zeros(B, bool)
    )
    act = jax.jit(agent.act, static_argnums=4)
    memory = agent.start(jnp.arange(B, dtype=jnp.int32), B)
    for progress, temperature in ((0.0, 1.0), (0.49, 1.0), (0.5, 0.5), (0.74, 0.5), (0.75, 0.25), (1.0, 0.25)):
        params = agent.actor_params(learner, jnp.float32(progress))
        action, extras, _ = act(params, memory, rows, jax.random.key(1), False)
        visits = np.asarray(extras["policy"], np.float64)
        most = visits.argmax(axis=1)
        drawn = np.mean(np.asarray(action) == most)
        for other in (1.0, 0.5, 0.25):
            weights = visits ** (1 / other)
            expected = np.mean(weights[np.arange(B), most] / weights.sum(axis=1))
            assert (abs(drawn - expected) < 0.025) == (other == temperature), (progress, other, drawn, expected)


IMAGES = EnvSpec("images", spaces.Box(0, 255, (16, 16, 1), np.uint8), spaces.Discrete(4), None)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, *tiers.nightly(IMAGES)], ids=lambda spec: spec.name)
def test_one_batch_is_learnt_by_heart(spec: EnvSpec) -> None:
    """A learner that sees nothing else says its rewards, values, policies and terminations."""
    sizes: Any = {"hidden_sizes": (64,), "state_size": 32, "channels": 8, "head_size": 32, "num_bins": 11}
    torso = "convolutions" if spec is IMAGES else "mlp"
    config = MuZeroConfig(unroll_length=2, n_step=3, learning_rate=5e-3, torso=torso, termination_cost=1.0, **sizes)
    agent = agents.muzero.make(spec, config)
    batch = harness.batch_of(agent, A, shape=(16, 16, 1) if spec is IMAGES else (3,))
    small = taken(batch, np.arange(8))._replace(weight=jnp.ones(8))
    update = jax.jit(lambda learner: harness.alone(agent.learn)(learner, small, jnp.float32(0), jax.random.key(0)))
    learner, seen = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent)), []
    for _ in range(401):
        learner, metrics, _ = update(learner)
        seen.append(metrics)
    before, after = ({name: float(x) for name, x in seen[i].items()} for i in (0, -1))
    assert after["loss/reward"] < 0.5 * before["loss/reward"]
    assert after["value/error"] < 0.1 * before["value/error"]
    assert after["loss/policy"] < 2.2 * after["policy/target_entropy"]
    assert after["loss/termination"] < 0.1 * before["loss/termination"]


def test_bad_settings_are_one_sentence() -> None:
    wrong: Any = {"num_bins": (40, "must be odd"), "simulations": (0, "at least 1"), "unroll_length": (0, "at least 1")}
    for name, (value, words) in wrong.items():
        with pytest.raises(ValueError, match=words):
            MuZeroConfig(**{name: value})
    model = world_models.make(SPEC, world_models.Sizes(), terminations=True)
    for cost, own, words in ((0.0, model, "use 1"), (0.5, model._replace(termination=None), "use 0")):
        with pytest.raises(ValueError, match=rf"termination_cost={cost:g}: network= predicts .*terminations; {words}"):
            agents.muzero.make(SPEC, MuZeroConfig(termination_cost=cost), own)
    with pytest.raises(ValueError, match="Discrete ones: use ppo"):
        agents.muzero.make(SPEC._replace(action_space=spaces.Box(-1.0, 1.0, (2,))))


def test_a_small_part_is_one_sample_of_each_shard() -> None:
    agent, learner = searching(reanalyse=0.1)
    batch = taken(batch_of(agent), np.arange(4))
    learner = learner._replace(aux=learner.params)
    actor = agent.target_params(learner, jnp.float32(0))  # type: ignore[misc]
    policy = jax.jit(agent.reanalyse)(actor, batch, jax.random.key(0)).trajectory.extras["policy"]  # type: ignore[arg-type]
    renewed = np.any(np.asarray(policy != batch.trajectory.extras["policy"]), axis=(0, 2))
    np.testing.assert_array_equal(renewed, [True, False, False, False])


def test_values_of_games_for_two_are_no_larger_than_rewards() -> None:
    config = MuZeroConfig(discount=0.99, max_reward=2.0)
    assert muzero._bins(SPEC, config).largest == pytest.approx(200.0)
    assert muzero._bins(SPEC._replace(num_players=2), config).largest == 2.0
