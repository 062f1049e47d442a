"""Both mountain cars against Gymnasium's MountainCar-v0 and MountainCarContinuous-v0, transition by transition."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax.mountain_car import MountainCar, MountainCarOptions, MountainCarState
from envs_jax.mountain_car_continuous import MountainCarContinuous, MountainCarContinuousOptions

BOTH = pytest.mark.parametrize("environment", [MountainCar(), MountainCarContinuous()], ids=lambda x: x.spec.name)
IDS = {"mountain_car": "MountainCar-v0", "mountain_car_continuous": "MountainCarContinuous-v0"}
GOALS = {"mountain_car": 0.5, "mountain_car_continuous": 0.45}


def sample_states(rng, count, goal):
    """States of all kinds, float32 [count, 2]; most of them are next to a wall, the goal or a limit after the step."""
    position, velocity = rng.uniform(-1.2, 0.6, count), rng.uniform(-0.07, 0.07, count)
    distance = 10.0 ** rng.uniform(-5.5, -2, count) * rng.choice([-1, 1], count)
    kind = np.arange(count) % 5
    velocity = np.where(kind == 0, rng.choice([-0.069, 0.069], count), velocity)
    after = velocity - 0.0025 * np.cos(3 * position)
    for i, place in ((1, -1.2), (2, goal), (3, 0.6)):
        position = np.where(kind == i, place + distance - after, position)
    position = np.where(kind == 4, rng.choice([-1.2, goal, goal + 0.01, 0.6], count), position)
    velocity = np.where(kind == 4, 0.0025 * np.cos(3 * position) + distance / 10, velocity)
    velocity[:50], position[:50] = -0.01, -1.2
    return np.float32(np.stack([position.clip(-1.2, 0.6), velocity.clip(-0.07, 0.07)], axis=1))


def sample_actions(rng, environment, count):
    """Choices, or pushes beyond the bounds too."""
    if environment.spec.name == "mountain_car":
        return rng.integers(0, 3, count, np.int32)
    return np.float32(rng.uniform(-1.5, 1.5, (count, 1)))


@BOTH
def test_equals_gymnasium_from_any_state(environment):
    name, count = environment.spec.name, 10_000
    rng = np.random.default_rng(0)
    states, actions = sample_states(rng, count, GOALS[name]), sample_actions(rng, environment, count)
    theirs = gymnasium.make(IDS[name]).unwrapped
    theirs.reset(seed=0)
    rows = []
    for state, action in zip(states, actions):
        theirs.state = np.float64(state)
        rows.append((*theirs.step(action if action.shape else int(action))[:3], *theirs.state))
    expected, rewards, terminated, position, velocity = map(np.stack, zip(*rows))

    def step(state, action):
        state, transition = environment.step(MountainCarState(*state, jnp.int32(3)), action, jax.random.key(0))
        return environment.observe(state), transition, state.num_steps

    observations, ours, num_steps = jax.device_get(jax.jit(jax.vmap(step))(states, actions))
    to_goal, beyond = np.abs(position - GOALS[name]), position >= GOALS[name]
    clear = (to_goal > 1e-6) & (~beyond | (np.abs(velocity) > 1e-6))
    assert np.mean(clear) > 0.9
    np.testing.assert_allclose(observations, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours.reward[clear], rewards[clear], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(ours.discount[clear], 1.0 - terminated[clear])
    np.testing.assert_array_equal(ours.last[clear], terminated[clear])
    np.testing.assert_array_equal(num_steps, 4)

    for close in (to_goal < 1e-3, beyond & (np.abs(velocity) < 1e-3)):
        assert min(np.sum(close & clear & terminated), np.sum(close & clear & ~terminated)) > 50
    at_wall = np.float32(position) == np.float32(-1.2)
    assert min(np.sum(at_wall), np.sum(position > 0.5999), np.sum(np.abs(velocity) > 0.0699)) > 50
    assert not np.any(observations[at_wall, 1])


@BOTH
def test_the_time_limit_is_gymnasiums_and_the_goal_goes_before_it(environment):
    limit = environment.spec.max_episode_steps
    assert limit == gymnasium.spec(IDS[environment.spec.name]).max_episode_steps
    action = environment.spec.action_space.sample(jax.random.key(0))
    for position, num_steps, discount, last in ((-0.5, 2, 1, False), (-0.5, 1, 1, True), (0.55, 1, 0, True)):
        state = MountainCarState(jnp.float32(position), jnp.float32(0.05), jnp.int32(limit - num_steps))
        _, transition = environment.step(state, action, jax.random.key(0))
        assert (float(transition.discount), bool(transition.last)) == (discount, last)


@BOTH
def test_reset_is_uniform_and_at_rest(environment):
    states = jax.jit(jax.vmap(environment.reset))(jax.random.split(jax.random.key(0), 20_000))
    assert np.all((states.position >= -0.6) & (states.position < -0.4))
    counts, _ = np.histogram(states.position, np.linspace(-0.6, -0.4, 11))
    assert np.sum((counts - 2000.0) ** 2 / 2000) < 33.7  # chi-square, passed once in 10,000 times
    assert not np.any(states.velocity)
    assert not np.any(states.num_steps)


@BOTH
def test_pushing_along_the_way_it_rolls_reaches_the_goal(environment):
    """Every push adds energy, so that a few swings are enough: Gymnasium's, played alike, gives the same returns."""
    discrete, name = environment.spec.name == "mountain_car", environment.spec.name
    starts = np.linspace(-0.6, -0.41, 8, dtype=np.float32)

    def episode(position):
        def body(state, _):
            right = state.velocity >= 0
            action = jnp.where(right, 2, 0) if discrete else jnp.where(right, 1.0, -1.0)[None]
            state, transition = environment.step(state, action, jax.random.key(0))
            return state, transition

        start = MountainCarState(position, jnp.float32(0), jnp.int32(0))
        return jax.lax.scan(body, start, None, length=200)[1]

    played = jax.device_get(jax.jit(jax.vmap(episode))(starts))
    lengths = 1 + np.argmax(played.last, axis=1)
    ours = [np.sum(rewards[:length]) for rewards, length in zip(played.reward, lengths)]
    assert np.all(played.discount[np.arange(8), lengths - 1] == 0)
    theirs = []
    for position in starts:
        env = gymnasium.make(IDS[name])
        env.reset(seed=0)
        env.unwrapped.state, total, over = np.array([position, 0.0]), 0.0, False
        while not over:
            right = env.unwrapped.state[1] >= 0
            _, reward, *ends, _ = env.step((2 if right else 0) if discrete else np.float32([1 if right else -1]))
            total, over = total + reward, any(ends)
        theirs.append(total)
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    assert min(ours) >= (-160 if discrete else 85)


GOLDEN = {
    "mountain_car": ([-0.478595, -0.003151], [-0.581359, 0.002555], -50.0),
    "mountain_car_continuous": ([-0.528798, -0.016033], [-0.773579, 0.005187], -2.161032),
}
"""Observations after 25 and 50 steps, and the return."""


@BOTH
def test_50_steps_are_as_they_were(environment):
    actions = sample_actions(np.random.default_rng(7), environment, 50)
    actions = np.repeat(actions[::5], 5, axis=0)

    def body(state, action):
        state, transition = environment.step(state, action, jax.random.key(0))
        return state, (environment.observe(state), transition)

    observations, transitions = jax.lax.scan(body, environment.reset(jax.random.key(0)), actions)[1]
    middle, end, total = GOLDEN[environment.spec.name]
    np.testing.assert_allclose(observations[np.array([24, 49])], [middle, end], atol=1e-5)
    assert np.sum(transitions.reward) == pytest.approx(total, abs=1e-4)
    assert not transitions.last.any()


@pytest.mark.parametrize("options", [MountainCarOptions, MountainCarContinuousOptions])
@pytest.mark.parametrize("max_steps", [0, -1, 10.0, True, None])
def test_refuses_bad_options(options, max_steps):
    with pytest.raises(ValueError, match=rf"^{options.__name__}\(max_steps=.*use an integer of at least 1"):
        options(max_steps=max_steps)


@BOTH
def test_render_follows_the_car(environment):
    render = jax.jit(environment.render)

    def centre(position):
        image = np.asarray(render(MountainCarState(jnp.float32(position), jnp.float32(0), jnp.int32(0))))
        assert image.dtype == np.uint8
        assert image.shape == (144, 216, 3)
        return np.argwhere(np.all(image == np.array((96, 165, 250)), axis=-1)).mean(axis=0)

    bottom, right = centre(-0.52), centre(0.48)
    assert right[1] - bottom[1] == pytest.approx(120, abs=1)
    assert bottom[0] - right[0] == pytest.approx(120 * 0.45 * (np.sin(1.44) - np.sin(-1.56)), abs=1)
