"""Pendulum against Gymnasium's Pendulum-v1, transition by transition."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.pendulum import Pendulum, PendulumOptions, PendulumState


def transitions(states, actions, num_steps, **options):
    """Ours from `states` [N, 2] with `actions` [N, 1] and `num_steps` [N]: observations [N, 3] and Transition [N]."""
    environment = Pendulum(PendulumOptions(**options))

    def step(state, action, num_steps):
        state, transition = environment.step(PendulumState(*state, num_steps), action, jax.random.key(0))
        return environment.observe(state), transition, state.num_steps

    states, actions, num_steps = np.float32(states), np.float32(actions), np.int32(num_steps)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(step))(states, actions, num_steps))


def test_equals_gymnasium_from_any_state():
    rng = np.random.default_rng(0)
    count = 4000
    # Angles of several turns, speeds up to their limit, and torques beyond theirs.
    states = np.float32(rng.uniform(-1, 1, (count, 2)) * [20.0, 8.0])
    states[:400, 0] = rng.choice([-3, -1, 0, 1, 3], 400) * np.pi + rng.normal(0, 1e-3, 400)
    states[400:800, 1] = rng.choice([-8, 8], 400) + rng.uniform(-0.3, 0.3, 400)
    states[:, 1] = np.clip(states[:, 1], -8, 8)
    actions = np.float32(rng.uniform(-3, 3, (count, 1)))
    actions[:100] = [2.0]
    env = gymnasium.make("Pendulum-v1").unwrapped
    env.reset(seed=0)
    rows = []
    for state, action in zip(states, actions):
        env.state = np.float64(state)
        rows.append(env.step(np.float64(action))[:4])
    expected, rewards, terminated, truncated = map(np.stack, zip(*rows))
    observations, ours, num_steps = transitions(states, actions, np.zeros(count))

    np.testing.assert_allclose(observations, expected, rtol=1e-6, atol=5e-6)
    np.testing.assert_allclose(ours.reward, rewards, rtol=1e-6, atol=3e-5)
    assert not np.any(terminated | truncated | ours.last)
    np.testing.assert_array_equal(ours.discount, 1.0)
    np.testing.assert_array_equal(num_steps, 1)
    assert np.sum(np.abs(expected[:, 2]) == 8) > 100


def test_equals_gymnasium_up_to_the_time_limit():
    rng = np.random.default_rng(0)
    env = gymnasium.make("Pendulum-v1")
    rows = []
    for seed in range(5):
        env.reset(seed=seed)
        for num_steps in range(200):
            state, action = env.unwrapped.state, np.float32(rng.uniform(-2, 2, 1))
            rows.append((state, action, num_steps, *env.step(action)[:4]))
        assert rows[-1][-1]
    states, actions, num_steps, expected, rewards, terminated, truncated = map(np.stack, zip(*rows))
    observations, ours, _ = transitions(states, actions, num_steps)
    np.testing.assert_allclose(observations, expected, rtol=1e-6, atol=5e-6)
    np.testing.assert_allclose(ours.reward, rewards, rtol=1e-5, atol=3e-5)
    assert not np.any(terminated)
    np.testing.assert_array_equal(ours.discount, 1.0)
    np.testing.assert_array_equal(ours.last, truncated)


def test_equals_gymnasium_over_whole_short_episodes():
    length, count = 50, 20
    rng = np.random.default_rng(0)
    actions = np.float32(rng.uniform(-2, 2, (count, length, 1)))
    env = gymnasium.make("Pendulum-v1", max_episode_steps=length)
    starts, expected, truncated = [], [], []
    for lane in range(count):
        env.reset(seed=lane)
        starts.append(env.unwrapped.state)
        rows = [env.step(action) for action in actions[lane]]
        expected.append([row[0] for row in rows])
        truncated.append([row[3] for row in rows])
    environment = Pendulum(PendulumOptions(max_steps=length))

    def episode(start, actions):
        def body(state, action):
            state, transition = environment.step(state, action, jax.random.key(0))
            return state, (environment.observe(state), transition)

        return jax.lax.scan(body, PendulumState(*start, jnp.int32(0)), actions)[1]

    observations, ours = jax.jit(jax.vmap(episode))(np.float32(starts), actions)
    np.testing.assert_allclose(observations, expected, atol=1e-3)  # rounding grows with time
    np.testing.assert_array_equal(ours.last, truncated)


def test_reset_is_uniform():
    states = jax.vmap(Pendulum().reset)(jax.random.split(jax.random.key(0), 2000))
    numbers, bounds = np.stack(states[:2]), np.array([[np.pi], [1.0]])
    assert np.all(np.abs(numbers) <= bounds + 1e-6)
    np.testing.assert_allclose(np.mean(numbers, axis=1), 0.0, atol=0.2)
    np.testing.assert_allclose(np.std(numbers / bounds, axis=1), 1 / np.sqrt(3), rtol=0.05)
    assert abs(np.corrcoef(numbers)[0, 1]) < 0.12
    assert np.all(states.num_steps == 0)


def test_spec_and_options():
    environment = Pendulum(PendulumOptions(max_steps=7))
    assert environment.spec.observation_space.contains(environment.observe(environment.reset(jax.random.key(0))))
    assert environment.spec.max_episode_steps == 7
    original = gymnasium.make("Pendulum-v1")
    action_space = Pendulum().spec.action_space
    assert (action_space.low, action_space.high, action_space.shape) == (-2.0, 2.0, original.action_space.shape)
    assert Pendulum().spec.max_episode_steps == gymnasium.spec("Pendulum-v1").max_episode_steps


@pytest.mark.parametrize("max_steps", [0, -1, 10.0, True, None])
def test_refuses_bad_options(max_steps):
    with pytest.raises(ValueError, match=r"PendulumOptions\(max_steps=.*use an integer of at least 1"):
        PendulumOptions(max_steps=max_steps)


@pytest.mark.parametrize(("theta", "side"), [(0.0, "up"), (np.pi / 2, "left"), (np.pi, "down"), (-np.pi / 2, "right")])
def test_render_points_where_the_pendulum_does(theta, side):
    state = PendulumState(jnp.float32(theta), jnp.float32(0), jnp.int32(0))
    image = np.asarray(jax.jit(Pendulum().render)(state))
    assert image.dtype == np.uint8
    assert image.shape == (160, 160, 3)
    y, x = np.argwhere(np.all(image == np.array((239, 108, 96)), axis=-1)).mean(axis=0) - 79.5
    assert {"up": -y, "down": y, "left": -x, "right": x}[side] > 20
    assert min(abs(x), abs(y)) < 1
