"""The Gymnasium interface: its own checker, ends of episodes, seeds and spaces, of one environment and of vectors."""

import importlib
import sys
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.utils import performance
from gymnasium.utils.env_checker import check_env

import envs_jax
from envs_jax.gym import GymnasiumEnv, GymnasiumVectorEnv
from podracer import spaces
from podracer.types import EnvSpec, TimeStep, Trajectory, Transition
from tests.support.counting import CountingEnvironment, check_trajectory

QUICK = ("catch", "pendulum", "gridworld", "minatar_breakout", "minigrid_empty", "tic_tac_toe")
"""An environment of each kind of observation and action."""


# What the checker says of any environment that is not registered, of CartPole-v1 and of Pendulum-v1.
@pytest.mark.filterwarnings("ignore:.*Not able to test alternative render modes:UserWarning")
@pytest.mark.filterwarnings("ignore:.*A Box observation space (minimum|maximum) value is -?infinity:UserWarning")
@pytest.mark.filterwarnings("ignore:.*we recommend using a symmetric and normalized space:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow, pytest.mark.nightly])
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
    lanes = GymnasiumVectorEnv(envs_jax.make("pendulum"), 1)
    lanes.reset()
    for bad, message in (
        (np.zeros(2), r"shape \(2,\); it must be \(1,\)"),
        ([np.nan], r"is not finite"),
        ([1e39], r"is not finite"),
    ):
        with pytest.raises(ValueError, match=f"^action .*{message}"):
            env.step(bad)
        with pytest.raises(ValueError, match=r"^actions? .*(shape|not finite)"):
            lanes.step([bad])


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


# Vectors


def vector(environment, actions, seed=0):
    """The results of steps of all lanes after a reset, stacked: (observations, rewards, terminations, truncations)."""
    env = GymnasiumVectorEnv(environment, len(actions[0]), seed)
    first, infos = env.reset()
    assert infos == {}
    rows = [env.step(np.asarray(action))[:4] for action in actions]
    return env, first, [np.stack(x) for x in zip(*rows)]


def test_vector_has_gymnasiums_spaces_and_metadata():
    env = GymnasiumVectorEnv(envs_jax.make("cartpole"), 3)
    single = GymnasiumEnv(envs_jax.make("cartpole"))
    assert isinstance(env, gymnasium.vector.VectorEnv)
    assert env.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.NEXT_STEP
    assert (env.num_envs, env.render_mode) == (3, "rgb_array")
    assert env.single_observation_space == single.observation_space
    assert env.single_action_space == single.action_space
    for name in ("observation_space", "action_space"):
        batched = gymnasium.vector.utils.batch_space(getattr(single, name), 3)
        assert getattr(env, name) == batched
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space
    row = env.step(env.action_space.sample())
    assert row[0] in env.observation_space
    assert [(x.shape, x.dtype) for x in row[1:4]] == [((3,), np.float32), ((3,), np.bool_), ((3,), np.bool_)]
    assert all(x.flags.writeable for x in row[:4])
    frames = env.render()
    assert len(frames) == 3
    assert frames[0].shape == (144, 360, 3)
    assert frames[0].dtype == np.uint8


def test_vector_rows_are_those_of_the_contract():
    """Every lane counts: rows, ends and the row after an end by the tag that the counting environment shows."""
    actions = np.random.default_rng(0).integers(0, 5, (40, 4))
    _, first, (observations, rewards, terminated, truncated) = vector(CountingEnvironment(), actions)
    over = terminated | truncated
    pad = lambda x, value: np.concatenate([np.full((1, 4), value, x.dtype), x])  # noqa: E731
    over = terminated | truncated
    rows, last = np.concatenate([first[None], observations]), pad(over, False)
    discount, opens = np.where(terminated, np.float32(0), np.float32(1)), np.concatenate([~last[:1], last[:-1]])
    steps = TimeStep(rows, pad(rewards, 0), pad(discount, 1), opens, last)
    version, lane = np.zeros((40, 4), np.int32), np.arange(4, dtype=np.int32)
    check_trajectory(Trajectory(steps, actions.astype(np.int32), (), (), version, lane))
    assert 20 < over.sum() < 80
    assert 0 < terminated.sum() < over.sum()
    assert not np.any(terminated & truncated)


def test_vector_seeds():
    env = GymnasiumVectorEnv(CountingEnvironment(), 2, seed=3)

    def rows(seed):
        return np.stack([env.reset(seed=seed)[0], *(env.step(np.zeros(2, np.int32))[0] for _ in range(9))])

    found = [rows(seed) for seed in (None, 3, None, 4)]
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[1], found[2]), "without a seed it goes on from where the seed was"
    assert not np.array_equal(found[1], found[3])
    tags = np.unique(np.concatenate(found[1:])[..., 0])
    assert len(tags) > 12, "episodes are new ones"


def test_vector_infos_hold_the_metrics_of_each_transition():
    class Measured(CountingEnvironment):
        spec = CountingEnvironment().spec._replace(metrics=("twice",))

        def step(self, state, action, key):
            state, transition = super().step(state, action, key)
            return state, transition._replace(metrics={"twice": 2 * transition.reward})

    env = GymnasiumVectorEnv(Measured(), 3, seed=0)
    env.reset()
    for _ in range(9):
        _, rewards, _, _, infos = env.step(np.zeros(3, np.int32))
        np.testing.assert_array_equal(infos["twice"], 2 * rewards)
        assert infos["_twice"].all()


def test_gymnasiums_vector_wrappers_and_benchmark_accept_it():
    env = GymnasiumVectorEnv(envs_jax.make("catch", rows=4), 2, seed=0)
    env = gymnasium.wrappers.vector.RecordEpisodeStatistics(env)
    env.reset(seed=0)
    for step in range(1, 12):
        *_, infos = env.step(env.action_space.sample())
        ends = step % 4 == 3  # three steps, and the first row of the next episode
        assert ("episode" in infos) == ends
        if ends:
            assert infos["episode"]["l"].tolist() == [3, 3]
    env = gymnasium.wrappers.vector.DictInfoToList(env)
    env.reset()
    assert len(env.step(env.action_space.sample())[-1]) == 2
    env.close()
    if hasattr(performance, "benchmark_vector_step"):
        plain = GymnasiumVectorEnv(envs_jax.make("catch"), 2)
        assert performance.benchmark_vector_step(plain, target_duration=0, seed=0) >= 0


def test_vector_refuses():
    env = GymnasiumVectorEnv(envs_jax.make("catch"), 2)
    for call in (env.render, lambda: env.step([0, 0])):
        with pytest.raises(gymnasium.error.ResetNeeded, match=r"call reset\(\)"):
            call()
    env.reset()
    for actions, message in (
        ([0], r"actions have shape \(1,\); give one for each lane, \(2,\)"),
        ([0, 3], r"actions array\(\[0, 3\]\) are not in Discrete\(num_values=3\)"),
        ([0.0, 1.0], r"are not in Discrete"),
    ):
        with pytest.raises(ValueError, match=message):
            env.step(actions)
    with pytest.raises(ValueError, match="tic_tac_toe is a game for two, and Gymnasium cannot say whose turn it is"):
        GymnasiumVectorEnv(envs_jax.make("tic_tac_toe"), 2)
    with pytest.raises(ValueError, match="num_envs=0: must be at least 1"):
        GymnasiumVectorEnv(envs_jax.make("catch"), 0)
