"""Acrobot against Gymnasium's Acrobot-v1, transition by transition."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.acrobot import Acrobot, AcrobotOptions, AcrobotState
from tests.support.playing import play

SPEEDS = np.array([4 * np.pi, 9 * np.pi])


def sample_states(rng, count):
    """States of all kinds, float32 [count, 4]; a third has the tip near the line, and a tenth is at the speed limits."""
    angles, speeds = rng.uniform(-np.pi, np.pi, (count, 2)), rng.uniform(-0.5, 0.5, (count, 2)) * SPEEDS
    kind = np.arange(count) % 3
    speeds[kind == 1] *= 0.1
    fast = fastest(count)
    speeds[fast] = (np.sign(speeds) * SPEEDS * rng.uniform(0.9, 1, (count, 2)))[fast]
    level = (kind == 2) & ~fast  # at rest, at the height of the line: cos(theta_1 + theta_2) = -1 - cos(theta_1)
    first = rng.uniform(np.pi / 2, 1.5 * np.pi, count)
    both = np.arccos(np.clip(-1 - np.cos(first), -1, 1)) + rng.normal(0, 0.03, count)
    angles[level] = ((np.stack([first, both - first], axis=1) + np.pi) % (2 * np.pi) - np.pi)[level]
    speeds[level] *= 0.003
    return np.float32(np.concatenate([angles, speeds], axis=1))


def fastest(count):
    """True for the states at the speed limits, [count]. There a step multiplies rounding by up to 10,000."""
    return np.arange(count) % 10 == 0


def gymnasium_transitions(states, actions):
    """Theirs: next states and observations [N, 4 and 6], rewards [N], terminated [N]."""
    env = gymnasium.make("Acrobot-v1").unwrapped
    env.reset(seed=0)
    rows = []
    for state, action in zip(states, actions):
        env.state = np.float64(state)
        observation, reward, terminated, *_ = env.step(int(action))
        rows.append((env.state, observation, reward, terminated))
    return tuple(map(np.stack, zip(*rows)))


@pytest.mark.parametrize("count", [1_000, pytest.param(11_200, marks=pytest.mark.slow)])
def test_equals_gymnasium_from_any_state(count):
    rng = np.random.default_rng(count)
    states, actions = sample_states(rng, count), rng.integers(0, 3, count, np.int32)
    next_states, expected, rewards, terminated = gymnasium_transitions(states, actions)
    environment = Acrobot()

    def step(state, action):
        state, transition = environment.step(AcrobotState(*state, jnp.int32(3)), action, jax.random.key(0))
        return jnp.stack(state[:4]), environment.observe(state), transition, state.num_steps

    reached, observations, ours, num_steps = jax.device_get(jax.jit(jax.vmap(step))(states, actions))
    # The two ends of the range of an angle are the same place.
    at_end = np.abs(np.abs(next_states) - [np.pi, np.pi, 100, 100]) < 1e-2
    errors = np.concatenate([np.abs(observations - expected), np.abs(reached - next_states) * ~at_end], axis=1)
    assert np.max(errors[~fastest(count)]) < 1e-5
    assert np.max(errors[fastest(count)]) < 1e-2
    height = -np.cos(next_states[:, 0]) - np.cos(next_states[:, 0] + next_states[:, 1])
    clear = np.abs(height - 1) > np.where(fastest(count), 1e-3, 1e-6)
    assert np.mean(clear) > 0.99
    np.testing.assert_array_equal(ours.reward[clear], rewards[clear])
    np.testing.assert_array_equal(ours.discount[clear], 1.0 - terminated[clear])
    np.testing.assert_array_equal(ours.last[clear], terminated[clear])
    np.testing.assert_array_equal(num_steps, 4)

    close = (np.abs(height - 1) < 0.1) & clear
    assert min(np.sum(close & terminated), np.sum(close & ~terminated)) > count / 100
    turned = np.abs(states[:, :2] - next_states[:, :2]) > np.pi
    assert np.sum(turned, axis=0).min() > count / 20
    assert np.sum(np.abs(next_states[:, 2:]) > SPEEDS - 1e-6, axis=0).min() > count / 100


def test_the_time_limit_is_gymnasiums_and_the_line_goes_before_it():
    environment = Acrobot()
    assert environment.spec.max_episode_steps == gymnasium.spec("Acrobot-v1").max_episode_steps == 500
    assert Acrobot(AcrobotOptions(max_steps=7)).spec.max_episode_steps == 7
    zero = jnp.float32(0)
    for angle, num_steps, discount, last in ((0.0, 498, 1, False), (0.0, 499, 1, True), (np.pi, 499, 0, True)):
        state = AcrobotState(jnp.float32(angle), zero, zero, zero, jnp.int32(num_steps))
        _, transition = environment.step(state, jnp.int32(1), jax.random.key(0))
        assert (float(transition.discount), bool(transition.last)) == (discount, last)
        assert float(transition.reward) == -discount


def test_reset_is_uniform_around_hanging():
    states = jax.jit(jax.vmap(Acrobot().reset))(jax.random.split(jax.random.key(0), 20_000))
    numbers = np.stack(states[:4])
    assert np.all((numbers >= -0.1) & (numbers < 0.1))
    for values in numbers:
        counts, _ = np.histogram(values, np.linspace(-0.1, 0.1, 11))
        assert np.sum((counts - 2000.0) ** 2 / 2000) < 33.7  # chi-square, passed once in 10,000 times
    np.testing.assert_allclose(np.corrcoef(numbers), np.eye(4), atol=0.04)
    assert not np.any(states.num_steps)


def test_pushing_with_the_lower_rod_reaches_the_line():
    """A torque along the lower rod's motion adds energy; doing nothing keeps what there is."""
    environment = Acrobot()

    def episode(key, pump):
        def body(state, _):
            action = jnp.where(pump, jnp.where(state.theta_2_dot >= 0, 2, 0), 1)
            state, transition = environment.step(state, action, jax.random.key(0))
            return state, transition

        return jax.lax.scan(body, environment.reset(key), None, length=500)[1]

    keys = jax.random.split(jax.random.key(0), 8)
    played = jax.device_get(jax.jit(jax.vmap(jax.vmap(episode, (0, None)), (None, 0)))(keys, np.array([True, False])))
    lengths = 1 + np.argmax(played.last, axis=2)
    assert np.all(lengths[0] < 200)
    assert np.all(played.discount[0, np.arange(8), lengths[0] - 1] == 0)
    returns = np.array([np.sum(rewards[:length]) for rewards, length in zip(played.reward[0], lengths[0])])
    np.testing.assert_array_equal(returns, 1 - lengths[0])
    np.testing.assert_array_equal(lengths[1], 500)
    assert np.all(played.discount[1] == 1)
    np.testing.assert_array_equal(np.sum(played.reward[1], axis=1), -500)


def test_50_steps_are_as_they_were():
    environment = Acrobot()
    actions = np.repeat(np.random.default_rng(7).integers(0, 3, 10, np.int32), 5)
    start = jax.tree.map(lambda x: x[None], environment.reset(jax.random.key(0)))
    observations, transitions = play(environment, start, actions[None])
    np.testing.assert_allclose(observations[0, [25, 50]], GOLDEN, atol=1e-4)
    assert np.sum(transitions.reward) == -50


GOLDEN = (
    [0.99829, 0.05844, 0.94483, -0.32757, -0.94122, 0.88330],
    [0.99847, 0.05524, 0.98737, 0.15843, -0.31784, 1.78078],
)
"""Observations after 25 and 50 steps."""


@pytest.mark.parametrize("max_steps", [0, -1, 10.0, True, None])
def test_refuses_bad_options(max_steps):
    with pytest.raises(ValueError, match=r"^AcrobotOptions\(max_steps=.*use an integer of at least 1"):
        AcrobotOptions(max_steps=max_steps)


def test_render_points_where_the_rods_do():
    render, zero = jax.jit(Acrobot().render), jnp.float32(0)

    def centre(theta_1, theta_2, color):
        state = AcrobotState(jnp.float32(theta_1), jnp.float32(theta_2), zero, zero, jnp.int32(0))
        image = np.asarray(render(state))
        assert image.dtype == np.uint8
        assert image.shape == (160, 160, 3)
        y, x = np.argwhere(np.all(image == np.array(color), axis=-1)).mean(axis=0) - 79.5
        return x, -y

    upper, lower = (96, 165, 250), (239, 108, 96)
    assert centre(0.0, 0.0, upper) == pytest.approx((0, -18), abs=2)
    assert centre(0.0, 0.0, lower) == pytest.approx((0, -54), abs=2)
    assert centre(np.pi / 2, 0.0, lower) == pytest.approx((54, 0), abs=2), "counter-clockwise"
    assert centre(np.pi / 2, np.pi / 2, lower) == pytest.approx((36, 18), abs=2), "relative to the upper rod"
