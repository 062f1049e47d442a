"""SimbaV2's torso against NumPy, and its weights on the unit sphere."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets, spaces
from podracer.agents import SACConfig
from podracer.nets import simba
from podracer.types import Batch, EnvSpec, Trajectory
from tests.support import harness

SPEC = EnvSpec("box", spaces.Box(-9.0, 9.0, (3,)), spaces.Box(-1.0, 1.0, (2,)))
SETTINGS: dict[str, Any] = {"torso": "simba_v2", "hidden_sizes": (8,), "value_hidden_sizes": (6, 6), "batch_size": 16}


def norms(params: Any) -> np.ndarray:
    """The norm of the weights into each unit of all layers."""
    leaves = jax.tree.leaves_with_path(params)
    kernels = [np.asarray(x, np.float64) for path, x in leaves if path[-1].key == "kernel"]
    assert kernels
    return np.concatenate([np.linalg.norm(x, axis=-2).ravel() for x in kernels])


def norm(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_the_torso_is_numpys() -> None:
    """Two blocks and a head (section 4), with scales that have left their beginning."""
    D, x = 6, np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)

    class Both(nets.critics.nn.Module):
        @nets.critics.nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return simba.Head(4, name="head")(simba.Torso(D, 2, name="torso")(x))

    params = jax.jit(Both().init)(jax.random.key(0), x)
    scales = [p for path, p in jax.tree.leaves_with_path(params) if path[-1].key == "scale"]
    root = np.sqrt(2 / D)
    assert sorted({round(float(p[0]), 5) for p in scales}) == sorted(
        {round(float(v), 5) for v in (root, root / 2, 1 / np.sqrt(D), 1.0)}
    )
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda p: p if p.ndim > 1 else p * rng.uniform(0.5, 2.0, p.shape), params)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)["params"]
    kernel = lambda i: p["torso"][f"UnitDense_{i}"]["kernel"]  # noqa: E731
    scale = lambda i, ratio=1.0: p["torso"][f"Scaler_{i}"]["scale"] * ratio  # noqa: E731
    h = norm(norm(np.hstack([x, np.full((5, 1), 3.0)])) @ kernel(0) * scale(0))
    for i in range(2):
        f = np.maximum(h @ kernel(1 + 2 * i) * scale(1 + 2 * i), 0) + 1e-8
        h = norm(h + (norm(f @ kernel(2 + 2 * i)) - h) * scale(2 + 2 * i, np.sqrt(D) / 3))
    head = p["head"]
    y = h @ head["UnitDense_0"]["kernel"] * head["Scaler_0"]["scale"] @ head["UnitDense_1"]["kernel"] + head["bias"]
    np.testing.assert_allclose(jax.jit(Both().apply)(params, x), y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norms(params), 1.0, rtol=1e-5)


@functools.cache
def after_ten_updates(projected: bool) -> Any:
    config = SACConfig(**SETTINGS, learning_rate=1e-2)
    network = config.actor_critic("sac", SPEC, None, 2)
    agent = agents.sac.make(SPEC, config, network if projected else network._replace(project=None))
    learner, B = jax.jit(agent.init)(jax.random.key(0), harness.hyper(agent)), 16
    rows = harness.timesteps(0, 1, 3 * B)
    kept = np.flatnonzero(~np.asarray(rows.first[1]))[:B]
    version: Any = np.zeros((1, B), np.int32)
    actions = np.random.default_rng(0).uniform(-1, 1, (1, B, 2)).astype(np.float32)
    rows = jax.tree.map(lambda x: x[:, kept], rows)
    trajectory = Trajectory(rows, actions, {}, nets.ActorState((), (), ()), version, version[0])
    batch: Any = Batch(trajectory, np.ones(B, np.float32), np.ones(B, np.int32))  # type: ignore[arg-type]
    learn = harness.alone(agent.learn)
    np.testing.assert_allclose(norms(learner.params["critic"]), 1.0, rtol=1e-5)
    for key in jax.random.split(jax.random.key(0), 10):
        learner, *_ = learn(learner, batch, jnp.float32(0), key)
    return learner.params


@pytest.mark.slow
def test_weights_stay_on_the_unit_sphere() -> None:
    """Without the projection they leave it in ten steps."""
    for name in ("policy", "critic"):
        np.testing.assert_allclose(norms(after_ten_updates(True)[name]), 1.0, rtol=1e-5)
        assert np.max(np.abs(norms(after_ten_updates(False)[name]) - 1.0)) > 0.01
