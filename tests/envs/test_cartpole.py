"""Cart pole against Gymnasium's CartPole-v1, transition by transition."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.cartpole import CartPole, CartPoleOptions, CartPoleState

X_LIMIT, THETA_LIMIT = 2.4, 12 * 2 * np.pi / 360
ROUNDING = 1e-6  # of a float32 near the limits


def transitions(states, actions, num_steps, **options):
    """Ours from `states` [N, 4] with `actions` [N] and `num_steps` [N]: observations [N, 4] and Transition [N]."""
    environment = CartPole(CartPoleOptions(**options))

    def step(state, action, num_steps):
        state, transition = environment.step(CartPoleState(*state, num_steps), action, jax.random.key(0))
        return environment.observe(state), transition, state.num_steps

    states, actions, num_steps = np.float32(states), np.int32(actions), np.int32(num_steps)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(step))(states, actions, num_steps))


def gymnasium_transitions(env, states, actions):
    """Theirs: float64 next states [N, 4], observations [N, 4], rewards [N], terminated [N], truncated [N]."""
    rows = []
    env.reset(seed=0)
    for state, action in zip(states, actions):
        env.reset()
        env.unwrapped.state = np.float64(state)
        observation, reward, terminated, truncated, _ = env.step(int(action))
        rows.append((env.unwrapped.state, observation, reward, terminated, truncated))
    return tuple(map(np.stack, zip(*rows)))


def sample_states(rng, count):
    """States of all kinds, float32 [count, 4]; half of them are next to a limit after the step."""
    states = rng.uniform(-1, 1, (count, 4)) * [2.5, 3.0, 0.22, 3.0]
    distance = 10.0 ** rng.uniform(-5.5, -1.5, count) * rng.choice([-1, 1], count)
    side = rng.choice([-1, 1], count)
    which = np.arange(count) % 4
    states[which == 0, 0] = (side * (X_LIMIT + distance) - 0.02 * states[:, 1])[which == 0]
    states[which == 1, 2] = (side * (THETA_LIMIT + distance) - 0.02 * states[:, 3])[which == 1]
    return np.float32(states)


def decidable(next_states):
    """True for next states [N, 4] that are not within rounding of a limit, [N]."""
    margins = np.abs(np.abs(next_states[:, [0, 2]]) - [X_LIMIT, THETA_LIMIT])
    return np.all(margins > ROUNDING, axis=1)


def test_equals_gymnasium_from_any_state():
    rng = np.random.default_rng(0)
    states, actions = sample_states(rng, 4000), rng.integers(0, 2, 4000)
    env = gymnasium.make("CartPole-v1").unwrapped
    next_states, expected, rewards, terminated, _ = gymnasium_transitions(env, states, actions)
    observations, ours, num_steps = transitions(states, actions, np.zeros(4000))

    np.testing.assert_allclose(observations, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(ours.reward, rewards)
    clear = decidable(next_states)
    assert np.mean(clear) > 0.95
    np.testing.assert_array_equal(ours.discount[clear], 1.0 - terminated[clear])
    np.testing.assert_array_equal(ours.last[clear], terminated[clear])
    np.testing.assert_array_equal(num_steps, 1)

    margins = np.abs(np.abs(next_states[:, [0, 2]]) - [X_LIMIT, THETA_LIMIT])
    close = np.any(margins < 1e-4, axis=1) & clear
    assert min(np.sum(close & terminated), np.sum(close & ~terminated)) > 50


def test_termination_at_the_time_limit_is_termination():
    rng = np.random.default_rng(1)
    states, actions = sample_states(rng, 400), rng.integers(0, 2, 400)
    env = gymnasium.make("CartPole-v1", max_episode_steps=1)
    next_states, _, _, terminated, truncated = gymnasium_transitions(env, states, actions)
    clear = decidable(next_states)
    assert np.all(truncated)
    assert 0 < np.sum(terminated[clear]) < np.sum(clear)
    for options, num_steps in (({"max_steps": 1}, 0), ({}, 499)):
        _, ours, _ = transitions(states, actions, np.full(400, num_steps), **options)
        assert np.all(ours.last)
        np.testing.assert_array_equal(ours.discount[clear], 1.0 - terminated[clear])
    _, ours, _ = transitions(states, actions, np.full(400, 498))
    np.testing.assert_array_equal(ours.last[clear], terminated[clear])


def play_gymnasium(policy, seed):
    """One episode: float64 states [T+1, 4], actions [T], terminated [T], truncated [T]."""
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=seed)
    states, rows, over = [env.unwrapped.state], [], False
    while not over:
        action = int(policy(states[-1]))
        _, _, terminated, truncated, _ = env.step(action)
        states.append(env.unwrapped.state)
        rows.append((action, terminated, truncated))
        over = terminated or truncated
    return np.stack(states), *map(np.array, zip(*rows))


def test_equals_gymnasium_up_to_the_time_limit():
    def balance(state):
        return state @ [0.2, 0.5, 5.0, 1.0] > 0

    episodes = [play_gymnasium(balance, seed) for seed in range(3)]
    assert all(len(actions) == 500 and truncated[-1] for _, actions, _, truncated in episodes)
    states, actions, terminated, truncated = map(np.concatenate, zip(*((s[:-1], *rest) for s, *rest in episodes)))
    next_states = np.concatenate([states[1:] for states, *_ in episodes])
    observations, ours, _ = transitions(states, actions, np.tile(np.arange(500), 3))
    np.testing.assert_allclose(observations, next_states, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(ours.last, terminated | truncated)
    np.testing.assert_array_equal(ours.discount, 1.0 - terminated)


def test_equals_gymnasium_over_whole_random_episodes():
    rng = np.random.default_rng(0)
    episodes = [play_gymnasium(lambda state: rng.integers(2), seed) for seed in range(50)]
    longest = max(len(actions) for _, actions, *_ in episodes)
    actions = np.stack([np.pad(actions, (0, longest - len(actions))) for _, actions, *_ in episodes]).astype(np.int32)
    starts = np.stack([states[0] for states, *_ in episodes]).astype(np.float32)
    environment = CartPole()

    def episode(start, actions):
        def body(state, action):
            state, transition = environment.step(state, action, jax.random.key(0))
            return state, (environment.observe(state), transition)

        return jax.lax.scan(body, CartPoleState(*start, jnp.int32(0)), actions)[1]

    observations, ours = jax.tree.map(np.asarray, jax.jit(jax.vmap(episode))(starts, actions))
    for lane, (states, taken, terminated, _) in enumerate(episodes):
        # Rounding grows with time: the pole is unstable and the actions are fixed.
        np.testing.assert_allclose(observations[lane, : len(taken)], states[1:], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(ours.last[lane, : len(taken)], terminated)
        np.testing.assert_array_equal(ours.discount[lane, : len(taken)], 1.0 - terminated)


def test_reset_is_uniform_around_the_middle():
    states = jax.vmap(CartPole().reset)(jax.random.split(jax.random.key(0), 2000))
    numbers = np.stack(states[:4])
    assert np.all(np.abs(numbers) <= 0.05)
    np.testing.assert_allclose(np.mean(numbers, axis=1), 0.0, atol=0.004)
    np.testing.assert_allclose(np.std(numbers, axis=1), 0.05 / np.sqrt(3), rtol=0.05)
    np.testing.assert_allclose(np.corrcoef(numbers), np.eye(4), atol=0.12)
    assert np.all(states.num_steps == 0)


def test_spec_and_options():
    environment = CartPole(CartPoleOptions(max_steps=7))
    assert environment.spec.observation_space.contains(environment.observe(environment.reset(jax.random.key(0))))
    assert environment.spec.action_space.num_values == 2
    assert environment.spec.max_episode_steps == 7
    assert CartPole().spec.max_episode_steps == gymnasium.spec("CartPole-v1").max_episode_steps


@pytest.mark.parametrize("max_steps", [0, -1, 10.0, True, None])
def test_refuses_bad_options(max_steps):
    with pytest.raises(ValueError, match=r"CartPoleOptions\(max_steps=.*use an integer of at least 1"):
        CartPoleOptions(max_steps=max_steps)


def test_render_follows_cart_and_pole():
    render = jax.jit(CartPole().render)
    zero = jnp.float32(0)

    def draw(x, theta):
        image = np.asarray(render(CartPoleState(jnp.float32(x), zero, jnp.float32(theta), zero, jnp.int32(0))))
        assert image.dtype == np.uint8
        assert image.shape == (144, 360, 3)
        return image

    def centre(image, color):
        return np.argwhere(np.all(image == np.array(color), axis=-1)).mean(axis=0)

    cart, pole = (96, 165, 250), (255, 183, 94)
    middle = draw(0.0, 0.0)
    assert centre(draw(1.0, 0.0), cart)[1] - centre(middle, cart)[1] == pytest.approx(60, abs=1)
    assert centre(draw(0.0, 0.2), pole)[1] > centre(middle, pole)[1] + 3
