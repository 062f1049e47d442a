"""Environments of other libraries: what is true of all adapters, and each library on a small task."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from envs_jax import adapters
from envs_jax.adapters import convert, navix
from envs_jax.testing import check_environment, validate_protocol
from podracer import environments, spaces
from podracer.environments import autoreset
from tests.support.foreign import NAME, Lock, Params, Walk


@functools.cache
def walk(**settings):
    return podracer.from_gymnax(Walk(), **settings)


def rollout(env, actions, spoil=None):
    """Steps `env` with a list of actions, the last one in a changed state if `spoil` is given.

    Returns the last state and all transitions, on the host.
    """
    step, keys = jax.jit(env.step), jax.random.split(jax.random.key(3), len(actions) + 1)
    state = jax.jit(env.reset)(keys[0])
    rows = []
    for i, (action, step_key) in enumerate(zip(actions, keys[1:], strict=True)):
        if spoil and i == len(actions) - 1:
            state = state._replace(inner=spoil(state.inner))
        state, row = step(state, jnp.asarray(action, env.spec.action_space.dtype), step_key)
        rows.append(jax.device_get(row))
    return state, rows


def test_a_papers_environment():
    """Spaces, no key in the state, dtypes that stay, a limit that truncates; an end on its step is a termination."""
    env = walk()
    assert env.spec.observation_space == spaces.Dict(
        {"far": spaces.Box(-9.0, 9.0, ()), "odd": spaces.Box(0, 1, (), np.uint8)}
    )
    assert env.spec.action_space == spaces.Discrete(3)
    assert (env.spec.name, env.spec.max_episode_steps, env.spec.metrics) == ("Walk", 6, ("not_finite",))
    validate_protocol(env)  # under strict promotion, which the environment would not pass
    shapes = jax.eval_shape(env.reset, jax.random.key(0))
    assert not [x for x in jax.tree.leaves(shapes) if x.dtype == jnp.uint32]
    _, rows = rollout(env, [0] * 6)
    assert [row.last for row in rows] == [False] * 5 + [True]
    assert [row.discount for row in rows] == [1.0] * 6  # its own `done` says that the task has ended
    _, rows = rollout(env, [0, 0, 0, 0, 2, 2])
    assert (rows[-1].last, rows[-1].discount, rows[-1].reward) == (True, 0.0, 1.0)
    env, play = podracer.from_gymnax(Walk(), Params(goal=9), max_steps=9), [0] * 9  # beyond its own limit, of 6
    assert [float(row.discount) for row in rollout(env, play)[1]] == [1.0] * 9
    env = podracer.from_gymnax(Walk(), Params(goal=9), max_steps=9, limit_in_step=False)
    assert [float(row.discount) for row in rollout(env, play)[1]] == [1.0] * 8 + [0.0]  # which it denied to be there


class Rolled(NamedTuple):
    """The state of `dice`: chance drawn at the reset, from the key inside and from that of the step, and a key."""

    first: jax.Array
    inner: jax.Array
    outer: jax.Array
    env_rngs: jax.Array


def dice(begin=0.0):
    """An environment whose states are draws."""
    rolled = jax.random.uniform

    def reset(key):
        return Rolled(rolled(key), jnp.asarray(begin), jnp.float32(0), jax.random.key_data(jax.random.split(key, 2)))

    def step(state, action, key):
        inner = rolled(jax.random.wrap_key_data(state.env_rngs[1]))
        return convert.Step(Rolled(state.first, inner, rolled(key), state.env_rngs + 1), 0.0, False)

    return convert.Adapted("dice", reset, step, lambda state: state.outer, spaces.Discrete(2))


def test_keys_reach_the_library():
    """Each key gives other draws, and the same one the same; keys inside are not the step's, which is not used up."""
    env = dice()

    @jax.jit
    @jax.vmap
    def play(first, then):
        return env.step(env.reset(jax.random.key(first)), jnp.int32(0), jax.random.key(then))[0].inner

    found = play(np.array([0, 0, 1, 0]), np.array([5, 5, 6, 6]))
    assert found.env_rngs is None
    draws = np.stack(found[:3], axis=1)
    np.testing.assert_array_equal(draws[0], draws[1])
    assert len(np.unique(draws[1:3])) == 6
    np.testing.assert_array_equal(draws[2, 1:], draws[3, 1:])  # chance is the step's alone
    assert not np.isin(jax.vmap(lambda seed: jax.random.uniform(jax.random.key(seed)))(np.array([5, 6])), draws).any()


def test_a_state_that_begins_with_a_whole_number():
    for begin in (0, False):
        with pytest.raises(
            ValueError, match=r"^dice: state\.inner is (int32|bool) from a reset and float32 .* as 0\.0\.$"
        ):
            dice(begin)


def test_nan_ends_an_episode():
    """The observation and the reward are 0, the episode is terminated and counted, and the next one is sound."""
    env = walk()
    state, rows = rollout(env, [2, 1])
    assert [float(row.metrics["not_finite"]) for row in rows] == [0.0, 1.0]
    assert (rows[-1].last, rows[-1].discount, rows[-1].reward) == (True, 0.0, 0.0)
    assert jax.tree.map(float, env.observe(state)) == {"far": 0.0, "odd": 0.0}
    lane = autoreset.reset(env, jax.random.key(0))._replace(env=state)
    lane = lane._replace(timestep=lane.timestep._replace(last=jnp.asarray(True)))
    after = autoreset.step(env, lane, jnp.int32(0), jax.random.key(2), env.reset(jax.random.key(3)))
    assert np.isfinite(after.timestep.observation["far"])
    assert after.timestep.first


def test_a_mask_of_combinations():
    """One choice of all of them; the mask is of one axis, and all 1 where the task has ended, but not at the limit."""
    env = podracer.from_jumanji(Lock())
    assert env.spec.action_space == spaces.Discrete(6)
    state, rows = rollout(env, [5] * 3)
    assert [(bool(row.last), float(row.discount)) for row in rows] == [(False, 1.0)] * 2 + [(True, 1.0)]
    assert env.observe(state)["action_mask"].tolist() == [0, 0, 0, 0, 0, 1]
    state, rows = rollout(env, [5, 4])
    assert (bool(rows[-1].last), float(rows[-1].discount)) == (True, 0.0)
    assert env.observe(state)["action_mask"].tolist() == [1] * 6
    hidden = podracer.from_jumanji(Lock(), mask=False)
    assert hidden.spec.action_space == spaces.MultiDiscrete((2, 3))
    assert dict(hidden.spec.observation_space.items).keys() == {"count"}
    vector = type("Pair", (Lock,), {"reward_spec": NAME(shape=(2,))})
    with pytest.raises(ValueError, match="^Pair gives a reward to each of 2 agents; wrap it to give one for all"):
        podracer.from_jumanji(vector())
    many = {
        "action_spec": NAME(num_values=np.full(2, 200)),
        "observation_spec": NAME(action_mask=NAME(shape=(200, 200))),
    }
    square = {"action_spec": NAME(num_values=np.full(2, 2)), "observation_spec": NAME(action_mask=NAME(shape=(2, 2)))}
    with pytest.raises(
        ValueError, match=r"^Square has an action_mask of shape \(2, 2\), which may be of the 4 pairs or"
    ):
        podracer.from_jumanji(type("Square", (Lock,), square)())
    with pytest.raises(ValueError, match="^Many masks 40,000 combinations of choices; only 10,000 become one choice"):
        podracer.from_jumanji(type("Many", (Lock,), many)())


@pytest.mark.parametrize(("version", "limit"), [(0, None), (4, "its own")])
def test_navix_keeps_the_limits_of_its_tasks(version, limit, monkeypatch):
    """`make` of navix 4 has no limit, and a None hides the task's; that of older ones has 100, which None turns off."""
    makes = {
        0: lambda name, max_steps=100, **settings: max_steps,
        4: lambda name, **settings: settings.get("max_steps", "its own"),
    }
    fake = NAME(registry=lambda: ["Room"], observations=NAME(symbolic=None), make=makes[version])
    monkeypatch.setitem(sys.modules, "navix", fake)
    monkeypatch.setattr(navix, "from_navix", lambda env, **settings: env)
    assert navix.make("Room", navix.NavixOptions()) == limit
    assert navix.make("Room", navix.NavixOptions(max_steps=7)) == 7


class Arm:
    """Playground's interface, and an end at its own limit; the reward is the limit that it knows."""

    action_size = 1

    def __init__(self):
        self._config = {"episode_length": 3}

    def reset(self, key):
        return self.state(jnp.float32(0))

    def step(self, state, action):
        return self.state(state.obs + 1)

    def state(self, time):
        limit = self._config["episode_length"]
        return ArmState(time, jnp.float32(limit), (time >= limit).astype(jnp.float32))


class Around:
    """A wrapper that changes nothing."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        if name == "__setstate__":
            raise AttributeError(name)
        return getattr(self.env, name)


class ArmState(NamedTuple):
    obs: jax.Array
    reward: jax.Array
    done: jax.Array


def test_the_limit_of_a_robot_comes_later():
    arm = Arm()
    for settings, env in (({}, arm), ({"max_steps": 5}, Around(arm))):
        T = settings.get("max_steps", 3)
        _, rows = rollout(podracer.from_playground(env, **settings), [[0.0]] * T)
        assert [(bool(row.last), float(row.discount)) for row in rows] == [(False, 1.0)] * (T - 1) + [(True, 1.0)]
        assert rows[0].reward == T + 1
    assert arm._config == {"episode_length": 3}


class Task(NamedTuple):
    """A small task of a library.

    Attributes:
      name: the environment's.
      actions: actions, one of which ends the episode.
      null: an action that does not, for some steps.
      spoil: changes the library's state so that the last of the actions ends the episode; None changes nothing.
    """

    name: str
    actions: Any
    null: Any
    spoil: Any = None


TASKS = {
    "brax": Task("inverted_pendulum", [[1.0]] * 30, [0.0]),
    "craftax": Task(
        "Craftax-Classic-Symbolic-v1", [0] * 3, 0, lambda x: (x[0].replace(player_health=jnp.int32(0)), x[1])
    ),
    "gymnax": Task("CartPole-v1", [1] * 12, 0),
    "jumanji": Task("Snake-v1", [1] * 13, 2),
    "navix": Task("Navix-Empty-5x5-v0", [2, 2, 1, 2, 2], 0),
    "playground": Task(
        "CartpoleBalance", [[0.0]] * 3, [0.0], lambda x: x.replace(data=x.data.replace(qvel=x.data.qvel + jnp.nan))
    ),
    "xminigrid": Task("MiniGrid-Empty-5x5", [0, 0, 1, 0, 0], 3),
}
LIMIT = 5


def make(prefix, **settings):
    library = adapters.LIBRARIES[prefix]
    pytest.importorskip(library.package)
    return environments.make(f"{prefix}:{TASKS[prefix].name}", **settings)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", TASKS)
def test_a_task_of_a_library(prefix):
    """It conforms; it is truncated at T, and the next row is a first one; an end on step T is a termination."""
    task = TASKS[prefix]
    env = make(prefix, max_steps=LIMIT)
    check_environment(env, episodes=2, steps=2 * LIMIT, plain=False)
    lane = jax.jit(lambda key: autoreset.reset(env, key))(jax.random.key(0))
    step = jax.jit(lambda lane, action, key: autoreset.step(env, lane, action, key, env.reset(key)))
    rows = []
    for key in jax.random.split(jax.random.key(1), LIMIT + 1):
        lane = step(lane, jnp.asarray(task.null, env.spec.action_space.dtype), key)
        rows.append(jax.device_get(lane.timestep))
    assert [bool(row.last) for row in rows] == [False] * (LIMIT - 1) + [True, False]
    assert [float(row.discount) for row in rows] == [1.0] * (LIMIT + 1)
    assert [bool(row.first) for row in rows] == [False] * LIMIT + [True]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", TASKS)
def test_an_end_on_the_step_of_the_limit(prefix):
    """The same play with the limit at its end, and the library's own step says that the task ends there."""
    task = TASKS[prefix]
    _, rows = rollout(make(prefix), task.actions, task.spoil)
    ended = [bool(row.discount == 0) for row in rows]
    assert any(ended), "the play has no end"
    T = ended.index(True) + 1
    _, rows = rollout(make(prefix, max_steps=T), task.actions[:T], task.spoil)
    assert [(bool(row.last), float(row.discount)) for row in rows] == [(False, 1.0)] * (T - 1) + [(True, 0.0)]


@pytest.mark.slow
def test_a_papers_environment_trains(tmp_path):
    """A file of one's own, which knows gymnax's interface and nothing of this library, in three lines."""
    (tmp_path / "paper.py").write_text(textwrap.dedent(PAPER))
    script = """
        import paper, podracer
        result = podracer.train("ppo", podracer.from_gymnax(paper.Corridor()), total_steps=20_000, progress=False)
        print(result.evaluate(episodes=50).mean)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert float(done.stdout.split()[-1]) > 0.8  # at random, one in five walks ends at the right


PAPER = '''
    """Walk to the right end of a corridor, whose start is random and whose left end is a trap."""

    import jax
    import jax.numpy as jnp
    from flax import struct


    @struct.dataclass
    class EnvState:
        place: int
        time: int


    @struct.dataclass
    class EnvParams:
        max_steps_in_episode: int = 40


    class Space:
        def __init__(self, n=None, low=None, high=None, shape=(), dtype=jnp.int32):
            self.low, self.high, self.shape, self.dtype = low, high, shape, dtype
            if n:
                self.n = n


    class Corridor:
        default_params = EnvParams()

        def reset_env(self, key, params):
            state = EnvState(place=jax.random.randint(key, (), 2, 5), time=0)
            return self.get_obs(state), state

        def step_env(self, key, state, action, params):
            slip = jax.random.bernoulli(key, 0.1)
            state = EnvState(state.place + jnp.where(slip, 0, 2 * action - 1), state.time + 1)
            reward = (state.place >= 9) * 1
            return self.get_obs(state), state, reward, self.is_terminal(state, params), {}

        def is_terminal(self, state, params):
            return (state.place <= 0) | (state.place >= 9) | (state.time >= params.max_steps_in_episode)

        def get_obs(self, state):
            return jax.nn.one_hot(state.place, 10)

        def action_space(self, params):
            return Space(n=2)

        def observation_space(self, params):
            return Space(low=0.0, high=1.0, shape=(10,), dtype=jnp.float32)
'''
