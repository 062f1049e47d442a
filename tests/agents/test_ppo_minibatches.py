"""PPO's minibatches: units that stay whole, shuffles, and chunks of lanes for agents with a core."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets
from podracer.agents import PPOConfig
from podracer.agents.ppo import Samples
from podracer.learning import minibatches
from tests.support import harness, tiers
from tests.support.small_ppo import ONCE, SPEC, A, B, T, made, small

# Minibatches.


def labelled(shape: tuple[int, int]) -> Samples:
    """Every field holds the index of its unit (and the core too), so that tearing one apart shows."""
    t, n = np.indices(shape)
    x = jnp.asarray(100 * t + n, jnp.float32)
    inputs = nets.Inputs({"a": x[..., None], "b": x}, x, x > 0, ())
    return Samples(inputs, (jnp.arange(shape[1], dtype=jnp.int32),), *[x] * 6)


@pytest.mark.parametrize("shape", [(1, 24), (3, 8)])
def test_taking_units_tears_none_apart(shape: tuple[int, int]) -> None:
    units = np.array([5, 0, 7])
    taken = jax.jit(minibatches.take)(labelled(shape), jnp.asarray(units))
    np.testing.assert_array_equal(taken.core[0], units)
    expected = 100 * np.arange(shape[0])[:, None] + units
    for leaf in jax.tree.leaves(taken._replace(core=())):
        leaf = np.asarray(leaf)
        if leaf.dtype != bool:
            np.testing.assert_array_equal(leaf.reshape(expected.shape), expected)
    assert taken.inputs.observation["a"].shape == (shape[0], 3, 1)


def test_minibatches_must_divide() -> None:
    _, learner, record, learn = made(small(num_minibatches=7))
    trajectory, _ = record(learner, harness.timesteps(7, T, B))
    with pytest.raises(ValueError, match=f"num_minibatches=7 does not divide the {T * B} units"):
        learn(learner, trajectory)
    _, learner, record, learn = made(small(num_minibatches=3, core="lstm", core_size=2))
    trajectory, _ = record(learner, harness.timesteps(7, T, B))
    with pytest.raises(ValueError, match=f"num_minibatches=3 does not divide the {B} units .*recurrent .*chunk_length"):
        learn(learner, trajectory)


def test_epochs_and_keys_shuffle_differently() -> None:
    """Another key, other minibatches; with one minibatch the order does not matter."""
    _, learner, record, learn = made(small())
    trajectory, _ = record(learner, harness.timesteps(8, T, B))
    one, again, other = (learn(learner, trajectory, 0.0, jax.random.key(i))[0].params for i in (1, 1, 2))
    harness.assert_same(one, again)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))
    _, learner, _, learn = made(small(**ONCE))
    one, other = (learn(learner, trajectory, 0.0, jax.random.key(i))[0].params for i in (1, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), one, other)


# Chunks of lanes.


LONG = 24
CHUNKS = [(core, c) for core in ("lstm", "gru", "mingru", "lru", "gtrxl") for c in (LONG, LONG // 2, 8)]


def played(config: PPOConfig) -> tuple[Any, Any, Any]:
    """A learner whose outputs differ, its trajectory from the middle of episodes, and `learn`."""
    _, learner, record, learn = made(config)
    learner = harness.moved(learner, 1.0)
    _, state = record(learner, harness.timesteps(41, LONG, B))
    return learner, record(learner, harness.timesteps(42, LONG, B), state)[0], learn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("core", "chunk_length"),
    tiers.all_but([case for case in CHUNKS if case[1] == 8 and case[0] in ("lstm", "lru", "gtrxl")], CHUNKS),
)
def test_before_the_first_step_every_ratio_is_1(core: Any, chunk_length: int) -> None:
    """In every minibatch of all epochs, at a learning rate of 0: chunks begin with the state of acting."""
    config = small(rollout_length=LONG, core=core, core_size=4, core_memory=5, chunk_length=chunk_length)
    learner, trajectory, learn = played(config)
    numbers = {"learning_rate": jnp.float32(0.0), "clip_epsilon": jnp.float32(1e-5)}
    _, metrics = learn(learner._replace(hyper=learner.hyper | numbers), trajectory)
    assert metrics["policy/clip_fraction"] == 0.0
    assert abs(float(metrics["policy/kl"])) < 1e-9
    assert metrics["policy/entropy"] < 0.95 * np.log(A)


@pytest.mark.slow
def test_chunks_have_the_loss_of_lanes() -> None:
    """One step on all units; the gradient ends with a chunk."""
    common = {"rollout_length": LONG, "core": "mingru", "core_size": 4, "separate": False, **ONCE}
    # Without chunks, lanes are as long as they come.
    learner, trajectory, learn = played(small(**common | {"rollout_length": 7}))
    _, expected = learn(learner, trajectory)
    _, metrics = made(small(**common, chunk_length=8))[3](learner, trajectory)
    norm = metrics.pop("grad/norm")
    for name, value in metrics.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert abs(norm / expected["grad/norm"] - 1.0) > 1e-3


@pytest.mark.slow
def test_a_chunk_as_long_as_the_lane_is_the_lane() -> None:
    """Bit for bit."""
    common = {"rollout_length": LONG, "core": "lstm", "core_size": 4}
    learner, trajectory, learn = played(small(**common))
    same = made(small(**common, chunk_length=LONG))[3](learner, trajectory)
    harness.assert_same(same, learn(learner, trajectory))


def test_chunks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk_length=5 must divide rollout_length=64"):
        PPOConfig(chunk_length=5)
    with pytest.raises(ValueError, match="chunk_length=2: without a core, single transitions are shuffled"):
        agents.ppo.make(SPEC, small(chunk_length=2))
