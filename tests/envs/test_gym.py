"""The Gymnasium interface: its own checker, ends of episodes, seeds and spaces."""

import importlib
import sys
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envs_jax
from envs_jax.gym import GymnasiumEnv
from podracer import spaces
from podracer.types import EnvSpec, Transition


# What the checker says of any environment that is not registered, of CartPole-v1 and of Pendulum-v1.
@pytest.mark.filterwarnings("ignore:.*Not able to test alternative render modes:UserWarning")
@pytest.mark.filterwarnings("ignore:.*A Box observation space (minimum|maximum) value is -?infinity:UserWarning")
@pytest.mark.filterwarnings("ignore:.*we recommend using a symmetric and normalized space:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        # The tasks of MiniGrid have one interface.
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith("minigrid") and name != "minigrid_empty" else [])
        for name in envs_jax.names()
    ],
)
def test_passes_gymnasiums_checker(name):
    environment = envs_jax.make(name)
    if environment.spec.num_players == 2:
        with pytest.raises(
            ValueError, match=rf"^{name} is a game for two, and Gymnasium cannot say whose turn it is; use "
        ):
            GymnasiumEnv(environment)
    else:
        check_env(GymnasiumEnv(environment))


class ProbeState(NamedTuple):
    """State of `Probe`."""

    noise: jax.Array
    count: jax.Array


class Probe:
    """Shows the keys it was given and the actions it got, in the spaces that our environments do not use."""

    spec = EnvSpec(
        name="probe",
        observation_space=spaces.Dict(
            {"noise": spaces.Box(0.0, 1.0, (2,)), "count": spaces.Discrete(100), "pair": spaces.MultiDiscrete((100, 3))}
        ),
        action_space=spaces.MultiDiscrete((2, 3)),
    )

    def reset(self, key):
        return ProbeState(jax.random.uniform(key, (2,)), jnp.int32(0))

    def step(self, state, action, key):
        state = ProbeState(jax.random.uniform(key, (2,)), state.count + action[0] + action[1])
        return state, Transition(jnp.float32(0.5), jnp.float32(1), jnp.asarray(False))

    def observe(self, state):
        return {"noise": state.noise, "count": state.count, "pair": jnp.stack([state.count, state.count % 3])}


def noise(env, seed):
    """The noise drawn from the keys of one reset, three steps and one more reset, [5, 2]."""
    rows = [env.reset(seed=seed)[0], *(env.step((0, 0))[0] for _ in range(3)), env.reset()[0]]
    return np.stack([row["noise"] for row in rows])


def test_seeds():
    env = GymnasiumEnv(Probe())
    first = noise(env, seed=3)
    assert len(np.unique(first)) == first.size  # no key is used twice
    np.testing.assert_array_equal(noise(env, seed=3), first)
    np.testing.assert_array_equal(noise(GymnasiumEnv(Probe(), seed=3), seed=None), first)
    assert not np.any(noise(env, seed=4) == first)
    assert not np.any(noise(GymnasiumEnv(Probe()), seed=None) == first)


def test_converts_spaces_and_values():
    env = GymnasiumEnv(Probe())
    assert env.action_space == gymnasium.spaces.MultiDiscrete([2, 3], dtype=np.int32)
    assert env.observation_space == gymnasium.spaces.Dict(
        noise=gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32),
        count=gymnasium.spaces.Discrete(100),
        pair=gymnasium.spaces.MultiDiscrete([100, 3], dtype=np.int32),
    )
    assert env.reset()[0] in env.observation_space
    observation, reward, terminated, truncated, info = env.step(np.array([1, 2]))
    assert observation in env.observation_space
    assert observation["count"] == 3
    assert type(observation["count"]) is np.int64
    assert (reward, terminated, truncated, info) == (0.5, False, False, {})
    assert [type(x) for x in (reward, terminated, truncated)] == [float, bool, bool]
    observation["noise"][:] = 0  # a copy, not a read-only view

    env = GymnasiumEnv(envs_jax.make("pixel_catch"))
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
    assert env.action_space == gymnasium.spaces.Discrete(3)


def ends(env, action):
    """(length, terminated, truncated) of an episode of one repeated action."""
    env.reset(seed=0)
    for length in range(1, 1000):
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            return length, terminated, truncated
    raise AssertionError("the episode does not end")


def test_termination_and_truncation():
    assert ends(GymnasiumEnv(envs_jax.make("catch")), 1) == (9, True, False)
    assert ends(GymnasiumEnv(envs_jax.make("pendulum", max_steps=6)), np.zeros(1, np.float32)) == (6, False, True)
    assert ends(GymnasiumEnv(envs_jax.make("cartpole", max_steps=5)), 1) == (5, False, True)
    falls = ends(GymnasiumEnv(envs_jax.make("cartpole")), 1)
    assert falls[0] < 15
    assert falls[1:] == (True, False)
    # On the time limit, falling counts as termination.
    assert ends(GymnasiumEnv(envs_jax.make("cartpole", max_steps=falls[0])), 1) == falls


def test_steps_equal_the_environments():
    environment = envs_jax.make("catch")
    env = GymnasiumEnv(environment)
    observation, _ = env.reset(seed=0)
    state = environment.reset(jax.random.key(0))._replace(ball_column=jnp.int32(np.argmax(observation[0])))
    np.testing.assert_array_equal(observation, environment.observe(state))
    for action in [0, 2, 1, 0, 0, 2, 2, 2, 2]:
        observation, reward, *_ = env.step(action)
        state, transition = environment.step(state, jnp.int32(action), jax.random.key(0))
        np.testing.assert_array_equal(observation, environment.observe(state))
        assert reward == transition.reward
        np.testing.assert_array_equal(env.render(), environment.render(state))


def test_needs_a_reset_first_and_after_the_end():
    env = GymnasiumEnv(envs_jax.make("catch", rows=2))
    for call in (env.render, lambda: env.step(0)):
        with pytest.raises(gymnasium.error.ResetNeeded, match=r"call reset\(\)"):
            call()
    env.reset()
    env.step(0)
    env.render()
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"call reset\(\)"):
        env.step(0)


def test_refuses_discrete_actions_outside_the_space_and_leaves_continuous_ones():
    env = GymnasiumEnv(envs_jax.make("catch"))
    env.reset()
    with pytest.raises(ValueError, match=r"action 3 is not in Discrete\(num_values=3\)"):
        env.step(3)
    env = GymnasiumEnv(envs_jax.make("pendulum"))
    env.reset()
    env.step(np.array([5.0]))


def test_render_mode():
    env = GymnasiumEnv(envs_jax.make("catch"))
    assert env.render_mode == "rgb_array"
    env.reset()
    assert env.render().dtype == np.uint8
    env = GymnasiumEnv(Probe())
    assert env.render_mode is None
    assert env.metadata["render_modes"] == []
    assert env.render() is None


def test_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "envs_jax.gym")
    with pytest.raises(ImportError, match=r"pip install gymnasium"):
        importlib.import_module("envs_jax.gym")
