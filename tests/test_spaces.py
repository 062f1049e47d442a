"""Boxes whose numbers have bounds of their own: the same everywhere as those of one bound for all."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs_jax import gym, testing
from podracer import distributions, nets, spaces
from podracer.environments import gymnasium_spaces
from podracer.types import EnvSpec, Transition

LOW, HIGH = np.array([-1.0, -0.5]), np.array([1.0, 2.0])
CAR = spaces.Box(LOW, HIGH)  # steering, throttle


def test_bounds_are_kept_as_they_differ():
    assert spaces.Box((-1, -0.5), [1.0, 2.0], (2,), np.float32) == CAR
    assert hash(CAR) == hash(spaces.Box(LOW, HIGH, (2,)))
    assert (CAR.low, CAR.high, CAR.shape, CAR.bounded) == ((-1.0, -0.5), (1.0, 2.0), (2,), True)
    same = spaces.Box([-2, -2, -2], np.full(3, 2.0))
    assert same == spaces.Box(-2.0, 2.0, (3,))
    assert (same.low, same.high) == (-2, 2.0)
    nested = spaces.Box(0.0, [[1.0, 2.0], [3.0, 4.0]])
    assert (nested.low, nested.high, nested.shape) == (0.0, ((1.0, 2.0), (3.0, 4.0)), (2, 2))
    assert not spaces.Box(0.0, [1.0, np.inf]).bounded
    assert spaces.Box(0, 255, (4,), np.uint8) == spaces.Box(0, 255, [4], "uint8")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((1.0, 0.0, ()), "low must not exceed high"),
        (([0.0, 3.0], [1.0, 2.0]), "low must not exceed high"),
        ((np.nan, 1.0, (2,)), "low must not exceed high"),
        (([0.0, 0.0], 1.0, (3,)), r"its bounds have shapes \(2,\) and \(\); use numbers, or \(3,\)"),
    ],
)
def test_bounds_that_do_not_fit(args, message):
    with pytest.raises(ValueError, match=message):
        spaces.Box(*args)


def test_a_dict_of_nothing():
    with pytest.raises(ValueError, match=r"Dict\(\{\}\): give at least one named space"):
        spaces.Dict({})


def test_samples_and_membership():
    samples = np.asarray(jax.vmap(CAR.sample)(jax.random.split(jax.random.key(0), 2000)))
    assert samples.dtype == np.float32
    np.testing.assert_allclose([samples.min(0), samples.max(0)], [LOW, HIGH], atol=0.01)
    assert all(CAR.contains(x) for x in samples[:20])
    assert not CAR.contains(np.array([0.0, -0.6], np.float32))
    digits = spaces.Box([0, 5], [3, 6], dtype=np.int8)
    samples = np.asarray(jax.vmap(digits.sample)(jax.random.split(jax.random.key(0), 200)))
    np.testing.assert_array_equal([samples.min(0), samples.max(0)], [[0, 5], [3, 6]])
    for dtype in (np.int32, np.uint32):
        whole = spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, (100,), dtype)
        sample = np.asarray(whole.sample(jax.random.key(0)))
        assert whole.contains(sample)
        assert np.ptp(sample.astype(np.int64)) > 2**31
    wide = spaces.Box(-3e38, 3e38, (100,))
    assert wide.contains(wide.sample(jax.random.key(0))), "its width is beyond float32"
    half = spaces.Box([0.0, -np.inf], [1.0, np.inf])
    samples = np.asarray(jax.vmap(half.sample)(jax.random.split(jax.random.key(0), 200)))
    assert (samples[:, 0].min(), samples[:, 0].max()) == (0.0, 1.0)
    assert samples[:, 1].min() < -1.5


def test_actions_cover_their_ranges():
    """The environment receives exactly the ends, in each dimension, of a policy that wants all there is."""
    distribution = distributions.for_space(CAR)
    outputs = jnp.broadcast_to(jnp.array([0.0, 0.0, 1.0, 1.0]), (500, 3, 4))
    actions = distribution.to_action(distribution.sample(outputs, jax.random.key(0)))
    assert (actions.shape, actions.dtype) == ((500, 3, 2), np.float32)
    np.testing.assert_array_equal(actions.min((0, 1)), LOW)
    np.testing.assert_array_equal(actions.max((0, 1)), HIGH)
    np.testing.assert_array_equal(distribution.to_action(jnp.zeros(2)), [0.0, 0.75])
    field = spaces.Box(0.0, [[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(distributions.for_space(field).to_action(jnp.ones(4)), field.high)


def test_equal_bounds_give_the_same_program():
    """Numbers in it, and no arrays."""
    distribution = distributions.for_space(spaces.Box([-3.0, -3.0], [5.0, 5.0]))
    jaxpr = jax.make_jaxpr(distribution.to_action)(jnp.zeros((4, 2)))
    assert jaxpr.consts == []
    assert str(jaxpr) == str(
        jax.make_jaxpr(lambda x: jnp.clip((1.0 + 4.0 * jnp.clip(x, -1.0, 1.0)).reshape(4, 2), -3.0, 5.0))(
            jnp.zeros((4, 2))
        )
    )


class Car:
    """Drives as it is told: the observation is the place, and what was done."""

    spec = EnvSpec("car", spaces.Box([-10.0, -1.0, -0.5], [40.0, 1.0, 2.0]), CAR, 20)

    def reset(self, key):
        return {"row": jnp.zeros(3), "time": jnp.int32(0)}

    def step(self, state, action, key):
        place = state["row"][:1] + action[1:]
        state = {"row": jnp.concatenate([place, action]), "time": state["time"] + 1}
        return state, Transition(action[1], jnp.float32(1), state["time"] >= 20)

    def observe(self, state):
        return state["row"]


def test_environments_with_bounds_of_their_own():
    testing.check_environment(Car(), episodes=2)
    narrow = Car()
    narrow.spec = Car.spec._replace(observation_space=spaces.Box([-10.0, -1.0, -0.4], [40.0, 1.0, 2.0]))
    with pytest.raises(testing.ConformanceError, match="Car.observe returned observation with extremes"):
        testing.check_environment(narrow, episodes=2)
    wrapped = gym.GymnasiumEnv(Car(), seed=0)
    assert wrapped.action_space == gymnasium.spaces.Box(LOW.astype(np.float32), HIGH.astype(np.float32))
    assert gymnasium_spaces.action_space(wrapped.action_space, "car") == CAR


def test_codes_with_bounds_of_their_own():
    codes = spaces.Box(0, [2, 4], dtype=np.uint8)
    features = nets.encode(jnp.array([[1, 4]], jnp.uint8), codes, 1)
    np.testing.assert_array_equal(features, [[0, 1, 0, 0, 0, 0, 0, 0, 0, 1]])
