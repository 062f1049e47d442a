"""A gradient taken a few lanes at a time is the gradient."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import nets, topology, trajectories
from podracer.learning import gradients
from podracer.types import Trajectory
from tests.support import harness


def trajectory_of(T, B, observation=None):
    rows = harness.timesteps(0, T, B)
    if observation is not None:
        rows = rows._replace(observation=jnp.zeros((T + 1, B, *observation), jnp.uint8))
    actions = jnp.arange(T * B, dtype=jnp.int32).reshape(T, B)
    state = {"memory": jnp.arange(B, dtype=jnp.float32)}
    lane = jnp.arange(B, dtype=jnp.int32)
    return Trajectory(rows, actions, {"x": actions.astype(jnp.float32)}, state, actions, lane)


def loss(params, trajectory):
    lanes = trajectory.actor_state["memory"] * params["a"] + trajectory.lane.astype(jnp.float32)
    each = jnp.sin(trajectory.extras["x"] * params["b"]) * lanes[None] + jnp.sum(trajectory.timesteps.reward, 0)[None]
    return jnp.sum(jnp.square(each)), ({"sum": jnp.sum(each)}, jnp.sum(each, axis=0))


@pytest.mark.parametrize("groups", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 12])
def test_groups_make_the_whole(groups):
    params, trajectory = {"a": jnp.float32(0.3), "b": jnp.float32(0.7)}, trajectory_of(5, 12)
    split = trajectories.split_lanes(trajectory, groups)
    found = jax.jit(lambda p, t: gradients.accumulate(loss, p, t))(params, split)
    grads, (metrics, each) = jax.grad(loss, has_aux=True)(params, trajectory)
    expected = (grads, metrics), each.reshape(groups, -1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, expected)


def test_what_is_summed_is_packed_and_metrics_may_be_missing():
    params, split = {"a": jnp.float32(0.3), "b": jnp.float32(0.7)}, trajectories.split_lanes(trajectory_of(5, 12), 12)
    without_metrics = lambda p, t: (loss(p, t)[0], ({}, ()))  # noqa: E731
    pack = lambda grads, metrics: (jnp.stack([grads["b"], grads["a"]]), metrics)  # noqa: E731
    (packed, metrics), _ = gradients.accumulate(without_metrics, params, split, pack)
    grads = jax.grad(lambda p: without_metrics(p, trajectory_of(5, 12))[0])(params)
    np.testing.assert_allclose(packed, [grads["b"], grads["a"]], rtol=1e-4)
    assert metrics == {}


def test_lanes_are_split_in_blocks():
    parts = trajectories.split_lanes(trajectory_of(5, 12), 3)
    np.testing.assert_array_equal(parts.lane, np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(parts.actor_state["memory"], parts.lane)
    np.testing.assert_array_equal(parts.actions[1, 2], 2 * 12 + np.arange(4, 8))
    assert parts.timesteps.observation.shape == (3, 6, 4, 3)


def test_a_group_is_the_one_of_the_split_batch():
    batch = trajectory_of(5, 12), {"weight": np.arange(12.0)}
    of_split = jax.tree.map(lambda x: x[1], trajectories.split_batch(batch, 3))
    group = trajectories.group_of_batch(batch, jnp.int32(1), 3)
    jax.tree.map(np.testing.assert_array_equal, group, of_split)


def test_narrow_networks_take_few_rows_but_not_too_few():
    rows = jnp.zeros((1, 1, 4))
    found = [gradients.at_a_time(rows, 1, units, narrow=True) for units in (2400, 600, 601, 2 * 673, 2 * 1361)]
    assert found == [600, 600, 601, 2 * 673, 1361]
    assert [gradients.at_a_time(rows, 20, lanes, narrow=True) for lanes in (1024, 31)] == [16, 31]
    sizes = {8192: True, 8193: False}
    assert all(gradients.is_narrow({"w": jnp.zeros(n)}) is expected for n, expected in sizes.items())
    assert gradients.is_narrow({})


@pytest.mark.parametrize(
    ("T", "B", "observation", "expected"),
    [
        (20, 16, (84, 84), 2),
        (20, 15, (84, 84), 1),
        (100, 4, (84, 84), 1),
        (20, 16, (42, 42), 8),  # a quarter of the pixels
        (20, 256, (10, 10), 8),  # more small ones would not fit, either
        (1, 1028, (10, 10), 1028),  # 257 is prime: groups of 4 are worse than what does not fit
        (21, 37, (10, 10), 37),
        (20, 1024, None, 128),
        (20, 32, None, 32),
    ],
)
def test_a_divisor_that_fits_the_cache(T, B, observation, expected):
    observation = trajectory_of(T, B, observation).timesteps.observation
    assert gradients.at_a_time(observation, T, B) == expected
    if expected == 2:  # of states that follow an image, four times as many
        assert gradients.at_a_time(observation, T, B, unrolled=True) == 8
    if expected == 128 and B == 1024:  # fewer where no core goes from row to row, and layers are small
        assert gradients.at_a_time(observation, T, B, narrow=True) == 16
    for platform in ("gpu", "tpu"):
        with topology.compiling_for(platform):
            assert gradients.at_a_time(observation, T, B) == B


@pytest.mark.parametrize(
    ("platform", "T", "B", "observation", "expected"),
    [
        ("tpu", 20, 512, (84, 84), 128),  # 204 lanes of 20 frames are 4,096
        ("gpu", 20, 512, (84, 84), 256),
        ("gpu", 20, 512, (84, 84, 4), 256),  # channels are not what activations grow with
        ("gpu", 120, 64, (84, 84), 64),  # R2D2's batch
        ("tpu", 120, 64, (84, 84), 32),
        ("tpu", 20, 512, (42, 42), 512),
        ("gpu", 20, 100_000, None, 100_000),
        ("rocm", 20, 512, (84, 84), 128),
    ],
)
def test_a_divisor_that_fits_the_memory(platform, T, B, observation, expected):
    shape = (T + 1, B, *observation) if observation else (T + 1, B, 4)
    x = jax.ShapeDtypeStruct(shape, jnp.uint8 if observation else jnp.float32)
    with topology.compiling_for(platform):
        assert gradients.at_a_time(x, T, B) == expected


@pytest.mark.parametrize(("shape", "lanes"), [((10, 10), 4), (None, 12)])
def test_rows_pass_forward_a_few_lanes_at_a_time(shape, lanes):
    """Images in groups, vectors together, with equal results."""
    timesteps = trajectory_of(9, 12, shape).timesteps
    observation = timesteps.observation
    if shape:
        observation = jax.random.bits(jax.random.key(0), observation.shape, jnp.uint8)
    seen = []

    def apply(inputs):
        observation, reward = inputs.observation, inputs.reward
        seen.append(observation.shape[:2])
        return reward + observation.astype(jnp.float32).sum(axis=tuple(range(2, observation.ndim))), reward

    inputs = nets.Inputs(observation, timesteps.reward, timesteps.first, ())
    with mock.patch.dict(gradients.ROWS_IN_CACHE, {"small_images": 40}):
        found = gradients.forward(apply, inputs)
    assert seen == [(10, lanes)]
    for one, expected in zip(found, apply(inputs), strict=True):
        np.testing.assert_array_equal(one, expected)
