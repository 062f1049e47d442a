"""Masks of actions in every agent: what is taken, what is bootstrapped from, and what has a gradient.

A mask is used in several places of an agent. Each of the tests below fails if one of them forgets it.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer import nets, returns, spaces
from podracer.agents.registry import AGENTS
from podracer.learning import value_distributions
from podracer.types import Agent, Batch, EnvSpec, TimeStep, Trajectory
from tests.support import benchmarks, harness, tiers

masks = benchmarks.load("masks")

A, K, T, B = 5, 3, 5, 6
MASK = np.array([0, 1, 1, 0, 1], np.int8)
"""The legal actions where all rows have the same."""

PLAIN = EnvSpec("table", spaces.Dict({"q": spaces.Box(-9.0, 9.0, (A,))}), spaces.Discrete(A))
SPEC = PLAIN._replace(
    observation_space=spaces.Dict({"q": spaces.Box(-9.0, 9.0, (A,)), "action_mask": spaces.Box(0, 1, (A,), np.int8)})
)


def table(num_bins: int) -> nets.Network:
    """A network whose outputs are w times what is seen; where an action has K numbers, their mean rises with it."""
    spread = 1.0 + 0.5 * (jnp.arange(num_bins, dtype=jnp.float32) - num_bins // 2)

    def apply(params: Any, inputs: nets.Inputs, state: Any) -> Any:
        q = params["w"] * inputs.observation["q"]  # type: ignore[index]
        outputs = (q[..., None] * spread.reshape((1,) * q.ndim + (-1,))).reshape(*q.shape[:-1], -1)
        return outputs, params["w"] * inputs.observation["q"][..., 0], state  # type: ignore[index]

    return nets.Network(lambda key: {"w": jnp.float32(1.0)}, apply, lambda num_lanes: ())


def rows_of(mask: Any = None, seed: int = 0) -> TimeStep:
    """Rows [T+1, B] with ends of all kinds, the first transition real; without a mask in observations if it is None."""
    rows = harness.timesteps(seed, T, B, (A,))
    rows = rows._replace(first=rows.first.at[1].set(False))
    observation = {"q": 3.0 * rows.observation}  # type: ignore[operator]
    return rows._replace(
        observation=observation if mask is None else observation | {"action_mask": jnp.asarray(mask, jnp.int8)}
    )


@functools.cache
def drawn(seed: int = 0) -> np.ndarray:
    """A mask int8 [T+1, B, A] in which what looks best and what looks worst is illegal; nothing is legal at the end."""
    rows = rows_of(seed=seed)
    q, rng = np.asarray(rows.observation["q"]), np.random.default_rng(seed)  # type: ignore[index]
    mask = rng.random(q.shape) < 0.6
    order = np.argsort(q, axis=-1)
    np.put_along_axis(mask, order[..., [0, -1]], False, axis=-1)
    np.put_along_axis(mask, order[..., 2:3], True, axis=-1)
    mask[np.asarray(rows.last)] = False
    return mask.astype(np.int8)


def made(name: str, spec: EnvSpec = SPEC, network: Any = None, **fields: Any) -> Agent:
    cls, make = AGENTS[name]
    return make(spec, cls(**fields), network)


# Acting


TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {}),
    "vtrace": ("vtrace", {}),
    "pqn": ("pqn", {"epsilon_start": 0.5, "epsilon_final": 0.5}),
    "r2d2": ("r2d2", {"epsilon_base": 0.9, "epsilon_alpha": 0.0}),
    "dqn": ("dqn", {"epsilon_start": 0.5}),
    "categorical": ("dqn", {"epsilon_start": 0.5, "values": "categorical", "num_bins": K, "max_value": 5.0}),
    "quantile": ("dqn", {"epsilon_start": 0.5, "values": "quantile", "num_bins": K}),
}


@pytest.mark.parametrize("case", TABLES)
def test_no_illegal_action_is_taken_and_the_best_is_the_best_legal_one(case: str) -> None:
    name, fields = TABLES[case]
    if name in ("dqn", "r2d2"):
        fields = fields | {"evaluation_epsilon": 0.0}
    agent = made(name, SPEC, table(K if "num_bins" in fields else 1), **fields)
    flat = lambda x: jnp.tile(x.reshape(-1, *x.shape[2:]), (10, *(1,) * (x.ndim - 2)))  # noqa: E731
    row = jax.tree.map(flat, rows_of(drawn()))
    N = row.reward.shape[0]
    mask, q = np.asarray(row.observation["action_mask"]), np.asarray(row.observation["q"])
    legal = (mask > 0) | ~mask.any(-1, keepdims=True)
    best = np.where(legal, q, -np.inf).argmax(-1)

    @jax.jit
    def play(row: TimeStep) -> Any:
        learner = agent.init(jax.random.key(0), harness.hyper(agent))
        params, state = agent.actor_params(learner, jnp.float32(0)), agent.start(jnp.arange(N, dtype=jnp.int32), N)
        acted = [agent.act(params, state, row, jax.random.key(1), evaluation)[:2] for evaluation in (False, True)]
        return acted, agent.best(params, state, row)[0] if agent.best else acted[1][0]

    ((explored, extras), (evaluated, _)), greedy = jax.device_get(play(row))
    assert np.all(legal[np.arange(N), explored])
    assert np.any(explored != best)
    np.testing.assert_array_equal(evaluated, best)
    np.testing.assert_array_equal(greedy, best)
    if name == "r2d2":  # first priorities are made of these
        np.testing.assert_array_equal(extras["q_max"], q[np.arange(N), best])
        np.testing.assert_array_equal(extras["q_taken"], q[np.arange(N), explored])


# Targets


TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "double": ("dqn", {"n_step": 3}),
    "one step": ("dqn", {"n_step": 1}),
    "plain": ("dqn", {"n_step": 3, "double": False}),
    "categorical": ("dqn", {"n_step": 3, "values": "categorical", "num_bins": K, "max_value": 5.0}),
    "quantile": ("dqn", {"n_step": 3, "values": "quantile", "num_bins": K, "double": False}),
    "r2d2": ("r2d2", {"burn_in": 1, "trace_length": T - 1, "n_step": 2, "value_rescaling": False}),
    "pqn": ("pqn", {"num_epochs": 1, "num_minibatches": 1}),
}


def by_hand(agent: Agent, trajectory: Trajectory, legal: np.ndarray, target: float) -> float:
    """The mean temporal difference of the transitions learnt from, with these legal actions [T+1, B, A]."""
    config, rows = agent.config, jax.tree.map(np.asarray, trajectory.timesteps)
    step = returns.transitions(trajectory)
    step = step._replace(discount=config.discount * step.discount)
    outputs = np.asarray(
        table(K if getattr(config, "values", "mean") != "mean" else 1).apply(
            {"w": jnp.float32(1.0)}, nets.Inputs(trajectory.timesteps.observation, step.reward, step.mask > 0, ()), ()
        )[0]
    )
    worth = lambda x: np.asarray(x)  # noqa: E731
    if agent.name == "dqn":
        kind = value_distributions.make(config.values, max_error=1.0, num_bins=K, max_value=config.max_value or 1.0)
        worth = lambda x: np.asarray(kind.mean(jnp.asarray(x.reshape(*rows.reward.shape, A, -1))))  # noqa: E731
    q, q_target = worth(outputs), worth(target * outputs)
    # What the learner thinks best among legal actions, or the target network.
    chooser = q if agent.name == "r2d2" or getattr(config, "double", False) else q_target
    best = np.where(legal, chooser, -np.inf).argmax(-1)
    values = jnp.asarray(np.take_along_axis(q_target, best[..., None], -1)[..., 0])
    taken = np.take_along_axis(q[:-1], np.asarray(trajectory.actions)[..., None], -1)[..., 0]
    if agent.name == "dqn":
        R, G, m = (np.asarray(x) for x in returns.n_step_transition(step, config.n_step))
        return float(np.mean(np.abs(R + G * np.asarray(values)[m, np.arange(B)] - taken[0])))
    if agent.name == "pqn":
        errors = returns.gae(values, step, config.trace_lambda) + values[:-1] - taken
    else:
        step = jax.tree.map(lambda x: x[config.burn_in :], step)
        errors = returns.n_step(values[config.burn_in :], step, config.n_step) - taken[config.burn_in :]
    return float(np.sum(step.mask * np.abs(errors)) / np.sum(step.mask))


@pytest.mark.parametrize("case", TARGETS)
def test_targets_are_those_of_legal_actions(case: str) -> None:
    """Numbers of the actions that look best and worst would be others, and so are those of the row before."""
    name, fields = TARGETS[case]
    agent = made(name, network=table(K if "num_bins" in fields else 1), **fields)
    length = fields.get("n_step", T) if name == "dqn" else T
    rows = jax.tree.map(lambda x: x[: length + 1], rows_of(drawn()))
    mask = drawn()[: length + 1]
    legal = (mask > 0) | ~mask.any(-1, keepdims=True)
    actions = jnp.asarray(legal[:-1].argmax(-1), jnp.int32)
    start = agent.start(jnp.arange(B, dtype=jnp.int32), B)
    start = start.net if name == "r2d2" else start
    trajectory = Trajectory(rows, actions, {}, start, jnp.zeros((length, B), jnp.int32), jnp.arange(B, dtype=jnp.int32))
    target = 1.0 if name == "pqn" else -1.0
    learner = agent.init(jax.random.key(0), harness.hyper(agent))
    learner = learner._replace(aux=learner.aux if name == "pqn" else {"w": jnp.float32(target)})
    experience: Any = trajectory if name == "pqn" else Batch(trajectory, jnp.ones(B), jnp.ones(B, jnp.int32))
    metrics = harness.alone(agent.learn)(learner, experience, jnp.float32(0), jax.random.key(0))[1]
    right = by_hand(agent, trajectory, legal, target)
    np.testing.assert_allclose(metrics["value/td_error"], right, rtol=1e-5)
    for wrong in (np.ones_like(legal), np.roll(legal, 1, axis=0)):
        assert abs(by_hand(agent, trajectory, wrong, target) - right) > 1e-2


# Learning


LEARNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"num_epochs": 1, "num_minibatches": 1, "core": "lstm", "core_size": 3}),
    "vtrace": ("vtrace", {}),
    "pqn": ("pqn", {"num_epochs": 1, "num_minibatches": 1}),
    "r2d2": ("r2d2", {"burn_in": 1, "trace_length": T - 1, "core": "lstm", "core_size": 3, "head_size": 4}),
    "dueling": ("dqn", {"n_step": T, "dueling": True, "noise": 0.5}),
    "categorical": ("dqn", {"n_step": T, "dueling": True, "values": "categorical", "num_bins": K, "max_value": 5.0}),
    "quantile": ("dqn", {"n_step": T, "values": "quantile", "num_bins": K}),
}


class Learner:
    """An agent with small networks, and what it learns from rows that it acts on."""

    def __init__(self, case: str, spec: EnvSpec):
        name, fields = LEARNERS[case]
        self.agent = agent = made(name, spec, hidden_sizes=(4,), **fields)
        self.init = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent))

        def learn(rows: TimeStep) -> Any:
            start = agent.start(jnp.arange(B, dtype=jnp.int32), B)
            params = agent.actor_params(self.init, jnp.float32(0))
            trajectory, _ = harness.record(agent, params, start, rows, jax.random.key(1))
            if name == "r2d2":
                trajectory = trajectory._replace(actor_state=start.net)
            replayed = agent.replay is not None
            experience = Batch(trajectory, jnp.ones(B), jnp.ones(B, jnp.int32)) if replayed else trajectory
            learner, metrics, *_ = agent.learn(self.init, experience, jnp.float32(0), jax.random.key(2))
            return trajectory.actions, learner, metrics

        self.learn = harness.alone(learn)


QUICK = ("ppo",)


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in LEARNERS if case not in QUICK)]
)
def test_illegal_outputs_have_no_gradient_and_a_mask_of_ones_changes_no_bit(case: str) -> None:
    plain, masked = Learner(case, PLAIN), Learner(case, SPEC)
    harness.assert_same(plain.init, masked.init)
    expected = plain.learn(rows_of())
    for value in (1, 0):  # nothing legal counts as all legal
        actions, learner, metrics = masked.learn(rows_of(np.full((T + 1, B, A), value)))
        shares = {name: float(metrics.pop(name)) for name in ("mask/legal", "mask/none_legal")}
        assert shares == {"mask/legal": value, "mask/none_legal": 1 - value}
        # XLA sums the gradient of this one's heads in another order.
        rtol = 1e-5 if case == "dueling" else 0.0
        chex.assert_trees_all_close(expected, (actions, learner, metrics), rtol=rtol, atol=1e-3 * rtol)

    actions, learner, metrics = masked.learn(rows_of(np.broadcast_to(MASK, (T + 1, B, A))))
    assert set(np.unique(actions)) <= set(np.flatnonzero(MASK))
    np.testing.assert_allclose(metrics["mask/legal"], MASK.mean(), rtol=1e-6)
    head = next(name for name in ("policy", "advantage", "q") if name in learner.params["params"])
    changes = jax.tree.map(lambda x, y: np.asarray(x != y), masked.init.params, learner.params)["params"][head]
    for name, changed in changes.items():
        by_action = changed.reshape(-1, A, changed.shape[-1] // A).any((0, 2))
        assert not by_action[MASK == 0].any(), name
        assert by_action[MASK == 1].any(), name
    if case == "ppo":
        assert abs(float(metrics["policy/kl"])) < 1e-6
    if case == "vtrace":
        np.testing.assert_allclose(metrics["policy/importance_ratio"], 1.0, rtol=1e-5)


# The probe


PROBED = ("ppo", "vtrace", "pqn", "dqn", "r2d2")
SLOW = (("ppo", "anakin"), ("vtrace", "sebulba"), ("pqn", "sebulba"), ("dqn", "anakin"))
"""Cases that do not wait for the night: each agent but R2D2, which is DQN here, and both drivers."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), tiers.all_but(SLOW, [*itertools.product(PROBED, ("anakin", "sebulba"))]))
def test_the_masked_probe_is_learnt_without_an_illegal_action(name: str, arch: str, tmp_path: pathlib.Path) -> None:
    """And an export takes the best legal action."""
    run = masks.probed(name, arch=arch)
    assert run.illegal == 0.0
    assert run.result.summary["eval_return_mean"] >= 0.99
    if arch == "sebulba":
        return
    run.result.export(tmp_path / "policy", episodes=0)
    actor, rng = podracer.load_policy(tmp_path / "policy"), np.random.default_rng(0)
    for _ in range(50):
        mask = np.append(rng.random(7) < 0.3, True)
        rng.shuffle(mask)
        seen = {"seen": np.zeros(1, np.float32), "action_mask": mask.astype(np.int8)}
        assert actor(seen) == np.flatnonzero(mask)[-1]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", PROBED)
def test_the_probe_needs_its_mask(name: str) -> None:
    run = masks.probed(name, mask=False)
    assert run.illegal > 0.0
    assert run.result.summary["eval_return_mean"] < masks.MOST_HIDDEN
