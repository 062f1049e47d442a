"""Frames of observations: stacks against a loop, channel by channel, and their bounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import nets, spaces
from podracer.nets import actor_state as actor_states
from podracer.types import EnvSpec

T, B = 9, 4


def spec_of(observation: spaces.Space) -> EnvSpec:
    return EnvSpec("test", observation, spaces.Discrete(4))


def test_images_are_stacked_channel_by_channel() -> None:
    """[H, W] becomes [H, W, n], [H, W, C] becomes [H, W, n C]: oldest frame first."""
    for shape, stacked in (((6, 5), (6, 5, 3)), ((6, 5, 2), (6, 5, 6)), ((4,), (4, 3))):
        spec = spec_of(observation=spaces.Box(0, 255, shape, np.uint8))
        seen = nets.stacked_spec(spec, 3).observation_space
        assert isinstance(seen, spaces.Box)
        assert seen.shape == stacked
        memory = nets.ActorState((), (), jnp.zeros((B, 2, *shape), jnp.uint8))
        rows = jnp.asarray(np.random.default_rng(0).integers(0, 255, (T, B, *shape)), jnp.uint8)
        observation, frames = actor_states._stack(memory, rows, jnp.zeros((T, B), bool))
        assert observation.shape == (T, B, *stacked)
        for back in range(3):
            channels = observation.reshape(T, B, *shape[:2], 3, -1)[..., 2 - back, :] if len(shape) == 3 else None
            part = observation[..., 2 - back] if channels is None else channels
            np.testing.assert_array_equal(part[2], rows[2 - back])
        np.testing.assert_array_equal(frames, jnp.moveaxis(rows[-2:], 0, 1))


@pytest.mark.parametrize("shape", [(2,), (3, 2), (3, 2, 4)])
def test_bounds_that_differ_by_number_are_stacked_as_observations_are(shape: tuple[int, ...]) -> None:
    low = np.random.default_rng(0).uniform(-2.0, -1.0, shape).astype(np.float32)
    seen = nets.stacked_spec(spec_of(observation=spaces.Box(low, 1.0)), 3).observation_space
    assert isinstance(seen, spaces.Box)
    memory = nets.ActorState((), (), jnp.broadcast_to(low, (1, 2, *shape)))
    observation, _ = actor_states._stack(memory, jnp.asarray(low)[None, None], jnp.zeros((1, 1), bool))
    np.testing.assert_array_equal(observation[0, 0], np.asarray(seen.low, np.float32))
    assert seen.high == 1.0


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])  # four bytes are stacked in a way of their own
@pytest.mark.parametrize(("n", "T", "seed"), [(2, 6, 0), (4, 9, 1), (4, 1, 2), (5, 3, 3)])
def test_frames_are_those_of_the_episode(n, T, seed, dtype):
    """Against a loop that keeps the frames of the current episode, in two parts that follow each other."""
    rng, B = np.random.default_rng(seed), 3
    rows = rng.uniform(0, 256, size=(2 * T, B, 2)).astype(dtype)
    first = rng.random((2 * T, B)) < 0.3
    before = rng.uniform(0, 256, size=(B, n - 1, 2)).astype(dtype)
    stack = jax.jit(nets.stack_frames)
    one, frames = stack(jnp.asarray(before), jnp.asarray(rows[:T]), jnp.asarray(first[:T]))
    two, frames = stack(frames, jnp.asarray(rows[T:]), jnp.asarray(first[T:]))
    found = np.concatenate([one, two])
    for lane in range(B):
        memory = list(before[lane])
        for t in range(2 * T):
            if first[t, lane]:
                memory = [np.zeros(2, dtype)] * (n - 1)
            window = [*memory, rows[t, lane]]
            np.testing.assert_array_equal(found[t, lane], np.stack(window, -1))
            memory = window[1:]
        np.testing.assert_array_equal(frames[lane], np.stack(memory))
