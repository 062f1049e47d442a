"""Gradients through Anakin's update, against central differences."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from podracer import agents, anakin
from podracer.types import Agent

T, B = 4, 8
CHAIN = envs_jax.make("gridworld", task="delayed_chain", chain_length=4, noisy_rewards=True)
USED = ("discount", "trace_lambda", "learning_rate", "entropy_cost")
UNUSED = ("max_grad_norm", "rho_bar", "c_bar", "rho_bar_pg")
"""Clips that are never reached."""


def vtrace(**fields: Any) -> Agent:
    """V-trace with a step so large that rounding of the parameters is small beside it."""
    limits: dict[str, Any] = {"max_grad_norm": 1e3, "rho_bar": 10.0, "c_bar": 10.0, "rho_bar_pg": 10.0}
    rule = {"optimizer": "sgd", "learning_rate": 30.0, "learning_rate_schedule": "constant"}
    config = {"rollout_length": T, "hidden_sizes": (8,), "entropy_cost": 0.3} | limits | rule | fields
    return agents.vtrace.make(CHAIN.spec, agents.VTraceConfig(**config))


def begin(update: anakin.Update, seed: int = 0, scale: float = 0.3) -> anakin.Member:
    """A member whose parameters are all somewhere: heads that begin at 0 hide what gradients pass."""
    member, rng = jax.jit(update.init)(seed), np.random.default_rng(1)
    moved = lambda x: x + jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32)  # noqa: E731
    return member._replace(learner=member.learner._replace(params=jax.tree.map(moved, member.learner.params)))


def flat(tree: Any) -> jax.Array:
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])


def after_one(update: anakin.Update, member: anakin.Member) -> Callable[[dict[str, jax.Array]], jax.Array]:
    """The parameters after an update with some numbers, as a vector less those before."""
    return lambda hyper: flat(update.step(member, 0.0, hyper)[0].learner.params) - flat(member.learner.params)


def gradients(update: anakin.Update, names: tuple[str, ...]) -> tuple[Any, np.ndarray, dict[str, jax.Array], Any]:
    """A function of some numbers, a random direction, the numbers, and the gradient of its product with the direction."""
    member = begin(update)
    moves, hyper = after_one(update, member), {name: member.learner.hyper[name] for name in names}
    direction = np.random.default_rng(0).normal(size=flat(member.learner.params).shape).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda hyper: jnp.dot(moves(hyper), direction)))(hyper)
    return jax.jit(moves), direction, hyper, jax.device_get(gradient)


def differences(moves: Any, direction: np.ndarray, hyper: dict[str, jax.Array], name: str, step: float) -> float:
    """The derivative by one number, by Richardson's extrapolation of central differences."""

    def central(step: float) -> float:
        high, low = (np.float32(hyper[name] * (1 + sign * step)) for sign in (1, -1))
        change = np.asarray(moves(hyper | {name: jnp.float32(high)}), np.float64) - moves(
            hyper | {name: jnp.float32(low)}
        )
        return float(change @ direction) / (float(high) - float(low))

    return (4.0 * central(step) - central(2.0 * step)) / 3.0


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_an_updates_gradient_is_that_of_differences(num_shards: int) -> None:
    """By every number that V-trace uses; by others it is 0."""
    update = anakin.update(vtrace(), CHAIN, num_envs=B, num_shards=num_shards)
    moves, direction, hyper, gradient = gradients(update, USED + UNUSED)
    for name in USED:
        assert gradient[name] == pytest.approx(differences(moves, direction, hyper, name, 0.02), rel=1e-3), name
    assert [gradient[name] for name in UNUSED] == [0.0] * len(UNUSED)


def through(update: anakin.Update, updates: int) -> Callable[[Any, anakin.Member], jax.Array]:
    """The sum of squared parameters after some updates, of numbers and a member."""

    def function(hyper: dict[str, jax.Array], member: anakin.Member) -> jax.Array:
        step = lambda member, _: (update.step(member, 0.0, hyper)[0], None)  # noqa: E731
        member, _ = jax.lax.scan(step, member, length=updates)
        return jnp.sum(jnp.square(flat(member.learner.params)))

    return function


@pytest.mark.nightly
@pytest.mark.slow
def test_remat_changes_no_number_and_needs_less_memory() -> None:
    agent, found, sizes = vtrace(learning_rate=0.1), [], []
    for remat in (False, True):
        update = anakin.update(agent, CHAIN, num_envs=B, remat=remat)
        member = begin(update)
        hyper = {name: member.learner.hyper[name] for name in USED}
        compiled = jax.jit(jax.grad(through(update, 8))).lower(hyper, member).compile()
        found.append(jax.device_get(compiled(hyper, member)))
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert found[0] == found[1]
    assert found[0]["discount"] != 0.0
    assert sizes[1] < 0.7 * sizes[0], sizes


@pytest.mark.nightly
@pytest.mark.slow
def test_adams_gradients_are_finite_with_eps_root() -> None:
    """A network with dead units has second moments of 0, where gradients are not finite without it."""

    def gradient(eps_root: float) -> dict[str, jax.Array]:
        fields: dict[str, Any] = {"optimizer": "adam", "learning_rate": 1e-3, "optimizer_eps_root": eps_root}
        update = anakin.update(vtrace(**fields), CHAIN, num_envs=B)
        member = begin(update)
        dead = lambda x: x.at[:4].set(-1e3) if x.shape == (8,) else x  # noqa: E731
        params = jax.tree.map(dead, member.learner.params)
        member = member._replace(learner=member.learner._replace(params=params))
        hyper = {name: member.learner.hyper[name] for name in USED}
        return jax.device_get(jax.jit(jax.grad(through(update, 2)))(hyper, member))

    found = gradient(1e-12)
    assert all(np.isfinite(x) and x != 0.0 for x in found.values()), found
    assert not np.isfinite(gradient(0.0)["discount"])


@pytest.mark.nightly
@pytest.mark.slow
def test_a_gradient_passes_the_environment() -> None:
    """The sum of Pendulum's rewards, by the parameters of PPO's Gaussian policy: samples move with them."""
    pendulum = envs_jax.make("pendulum")
    config = agents.PPOConfig(rollout_length=16, hidden_sizes=(8,), normalize_rewards=False)
    update = anakin.update(agents.ppo.make(pendulum.spec, config), pendulum, num_envs=4)
    member = begin(update, scale=0.1)
    params, rng = member.learner.params, np.random.default_rng(2)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)

    def rewards(length: jax.Array) -> jax.Array:
        moved = jax.tree.map(lambda x, v: x + length * v, params, direction)
        _, trajectory, _ = update.rollout(member._replace(learner=member.learner._replace(params=moved)), 0.0)
        return trajectory.timesteps.reward[1:]

    gradient = jax.jit(jax.grad(lambda length: jnp.sum(rewards(length))))(jnp.float32(0))
    step, evaluate = np.float32(1e-3), jax.jit(rewards)  # so short that no more actions reach their bounds
    high, low = (np.asarray(evaluate(jnp.float32(x)), np.float64).sum() for x in (step, -step))
    assert gradient == pytest.approx((high - low) / (2.0 * float(step)), rel=1e-3)
    assert abs(gradient) > 1.0


SCRIPT = """\
import json, sys
import jax
from tests.anakin import test_meta_gradients as tests
from podracer import anakin
update = anakin.update(tests.vtrace(), tests.CHAIN, num_envs=tests.B, num_shards=2, devices=jax.devices())
found = tests.gradients(update, tests.USED)[3]
print(json.dumps({name: float(x) for name, x in found.items()}))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_two_devices_have_the_gradients_of_two_shards() -> None:
    """Differentiated from outside of the mesh; simulated devices need a process of their own."""
    update = anakin.update(vtrace(), CHAIN, num_envs=B, num_shards=2)
    here = gradients(update, USED)[3]
    root = pathlib.Path(__file__).parents[2]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "NPROC": "32", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=root, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    there = json.loads(done.stdout.strip().splitlines()[-1])
    for name in USED:
        assert there[name] == pytest.approx(float(here[name]), rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", pytest.param("vtrace", marks=pytest.mark.nightly)])
def test_the_loss_of_a_trajectory_has_the_gradient_that_learning_takes(name: str) -> None:
    """A step of plain gradient descent on it is the update, of PPO with a single minibatch."""
    agent = vtrace(learning_rate=1.0)
    if name == "ppo":
        rule: dict[str, Any] = {
            "optimizer": "sgd",
            "learning_rate": 1.0,
            "learning_rate_schedule": "constant",
            "max_grad_norm": 1e3,
        }
        config = agents.PPOConfig(rollout_length=T, hidden_sizes=(8,), num_epochs=1, num_minibatches=1, **rule)
        agent = agents.ppo.make(CHAIN.spec, config)
    update = anakin.update(agent, CHAIN, num_envs=B, num_shards=2)
    member = begin(update)
    after, trajectory, report = jax.jit(update.step)(member, 0.0)
    assert agent.loss is not None
    gradient, metrics = jax.jit(jax.grad(agent.loss, has_aux=True))(
        member.learner.params, member.learner, trajectory, jnp.float32(0)
    )
    step = jax.tree.map(jnp.subtract, member.learner.params, gradient)
    np.testing.assert_allclose(flat(step), flat(after.learner.params), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["loss/total"], report.metrics["loss/total"], rtol=1e-4)
