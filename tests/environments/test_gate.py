"""The conversion between an agent's spaces and an environment's: observations one way, actions the other."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from podracer import distributions, environments, spaces
from podracer.environments import gate, gymnasium_spaces
from podracer.result import export, policy
from podracer.types import EnvSpec, HostStep

VECTOR = Box(-1.0, 1.0, (2,), np.float32)
NOTHING = (np.zeros(2, np.float32),)


class Shown(gymnasium.Env):
    """Shows and pays what it is told, step by step, and notes what it is given, which its space must hold."""

    def __init__(self, space=VECTOR, actions=None, shows=NOTHING, rewards=(1.0,), ends=(False,)):
        self.observation_space, self.action_space = space, actions or Discrete(2)
        self.shows, self.rewards, self.ends, self.given = shows, rewards, ends, []

    def _at(self, values):
        return values[min(self.t, len(values) - 1)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._at(self.shows), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.given.append(np.array(action))
        self.t += 1
        return self._at(self.shows), self._at(self.rewards), self._at(self.ends), False, {}


def play(environment, actions, lanes=2):
    """The source, and rows of lanes that are given the same actions."""
    source = environments.adopt(lambda: Shown(**environment))
    running = source.make(lanes, 0)
    rows = [running.recv()[1]]
    for action in actions:
        running.send(None, np.stack([action] * lanes))
        rows.append(running.recv()[1])
    return source, running, rows


ACTIONS = {
    "discrete": (Discrete(3, start=1), spaces.Discrete(3, 1), [0, 2], [1, 3]),
    "heads": (
        MultiDiscrete([2, 11], start=[0, 25]),
        spaces.MultiDiscrete((2, 11), (0, 25)),
        [[0, 0], [1, 10]],
        [[0, 25], [1, 35]],
    ),
    "bytes": (MultiDiscrete([2, 3], np.uint8), spaces.MultiDiscrete((2, 3)), [[1, 2]], [[1, 2]]),
    "bits": (MultiBinary(2), spaces.MultiDiscrete((2, 2)), [[0, 1]], [[0, 1]]),
    "whole numbers": (Box(-3, 3, (2,), np.int16), spaces.MultiDiscrete((7, 7), (-3, -3)), [[0, 6]], [[-3, 3]]),
    "floats": (Box(-0.35, 0.85, (1,)), None, [[-0.35], [0.85]], [[-0.35], [0.85]]),
    "doubles": (Box(-0.35, 0.85, (1,), np.float64), None, [[-0.35], [0.85]], [[-0.35], [0.85]]),
    "number": (Box(-2.0, 2.0, (), np.float64), spaces.Box(-2.0, 2.0, ()), [1.5], [1.5]),
}


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
def test_actions_are_the_environments_own(kind):
    """Actions that agents count from 0 reach it counted from its start, in its dtype, within its bounds."""
    space, ours, chosen, expected = ACTIONS[kind]
    converted = gymnasium_spaces.action_space(space, "x")
    assert ours is None or converted == ours
    assert spaces.from_json(spaces.to_json(converted)) == converted
    chosen = np.asarray(chosen, converted.dtype)
    source, running, _ = play({"actions": space}, chosen)
    lane = running._running._vector.envs[1].unwrapped
    np.testing.assert_allclose(lane.given, expected, rtol=1e-6)
    # And so it leaves a policy.
    fixed = policy.Policy(source.spec, lambda b: (), lambda memory, *row: (jnp.asarray(chosen[-1:]), memory), False)
    action = policy.Actor(fixed)(np.zeros(2))
    assert type(action) is int or space.shape == np.shape(action)
    np.testing.assert_allclose(action, expected[-1], rtol=1e-6)


def test_choices_that_there_are_not():
    for space in (Discrete(3, start=1), MultiDiscrete([2, 3])):
        give = gymnasium_spaces.actions_for(space, gymnasium_spaces.action_space(space, "x"))
        for wrong in (3, -1):
            with pytest.raises(ValueError, match=r"actions .* are not in (Multi)?Discrete\(num_values="):
                give(np.full((2, *space.shape), wrong))


@pytest.mark.parametrize(
    "space",
    [MultiDiscrete([[2, 3], [2, 2]]), Box(0, 3, (2, 2), np.int32), Box(0, 10**6, (1,), np.int64), MultiBinary([2, 2])],
)
def test_actions_that_are_refused(space):
    with pytest.raises(ValueError, match="not supported; Discrete, bounded Box of floats and, of one axis, MultiDisc"):
        gymnasium_spaces.action_space(space, "x")


def test_no_action_lies_beyond_its_bounds():
    """A rounding missed a third of all bounds of two decimals."""
    rng = np.random.default_rng(0)
    low, high = np.sort(np.round(rng.uniform(-5, 5, (2, 1000)), 2), axis=0)
    for dtype in (np.float16, np.float32, np.float64):
        own = Box(low, high, dtype=dtype)
        box = gymnasium_spaces.action_space(own, "x")
        act = jax.jit(distributions.for_space(box).to_action)
        for x in (-1.5, -1.0, 0.3, 1.0, 1.5):
            assert own.contains(np.asarray(act(jnp.full(1000, x))))
    for low, high in ((-0.35, 0.85), (0.1, 0.7)):
        space = spaces.Box(low, high, ())
        ends = [float(distributions.for_space(space).to_action(jnp.full(1, x))) for x in (-1.5, 1.5)]
        assert low <= ends[0] < ends[1] <= high
        np.testing.assert_allclose(ends, (low, high), rtol=1e-6)


IMAGE = np.arange(3 * 5 * 6, dtype=np.uint8).reshape(3, 5, 6)
OBSERVATIONS = {
    "discrete": (Discrete(3, start=5), spaces.Discrete(3, 5), 7, 2),
    "heads": (MultiDiscrete([3, 4], start=[-1, 2]), spaces.MultiDiscrete((3, 4), (-1, 2)), [1, 2], [2, 0]),
    "channels": (Box(0, 255, (3, 5, 6), np.uint8), None, IMAGE, np.moveaxis(IMAGE, 0, -1)),
    "grey": (Box(0, 255, (1, 5, 6), np.uint8), None, IMAGE[:1], IMAGE[0]),
    "doubles": (
        Box(-np.inf, 1e308, (2,), np.float64), spaces.Box(-np.inf, np.inf, (2,)), np.array([0.5, 2.0]), [0.5, 2.0]
    ),
    "truth": (Box(0, 1, (2,), np.bool_), spaces.Box(0, 1, (2,), np.int8), np.array([True, False]), [1, 0]),
    "bits": (MultiBinary(2), spaces.Box(0, 1, (2,), np.int8), np.array([1, 0], np.int8), [1, 0]),
    "short": (Box(-9, 9, (2,), np.int16), None, np.array([-9, 9], np.int16), [-9, 9]),
    "unsigned": (Box(0, 2**32 - 1, (1,), np.uint32), None, np.array([2**32 - 1], np.uint32), [2**32 - 1]),
    "long": (Box(-9, 9, (1,), np.int64), spaces.Box(-9, 9, (1,), np.int32), np.array([-9]), [-9]),
    "endless": (
        Box(0, np.inf, (1,), np.int64), spaces.Box(0, 2**31 - 1, (1,), np.int32), np.array([2**31 - 1]), [2**31 - 1]
    ),
    "number": (Box(0.0, 1.0, (), np.float64), spaces.Box(0.0, 1.0, ()), 0.5, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_observations_are_what_agents_see(kind):
    """In rows and where a policy is shown them; also inside of a Dict in a Dict."""
    space, ours, value, expected = OBSERVATIONS[kind]
    converted = gymnasium_spaces.observation_space(space, "x")
    assert ours is None or converted == ours
    nested = {"space": Dict({"a": Dict({"b": space})}), "shows": ({"a": {"b": value}},)}
    _, _, rows = play(nested, [0])
    for row in rows:
        seen = row.observation["a"]["b"][1]
        assert (seen.dtype, seen.shape) == (converted.dtype, converted.shape)
        np.testing.assert_array_equal(seen, expected)
    for lanes in (None, 2):
        shown = value if lanes is None else np.stack([value] * lanes)
        np.testing.assert_array_equal(policy.fit(converted, shown, lanes)[-1], expected)


def test_exports_are_checked_with_what_environments_show():
    space = spaces.Dict({"a": spaces.Discrete(3, 5), "b": spaces.MultiDiscrete((2, 2), (0, 9))})
    spec = EnvSpec("mine", space, spaces.Discrete(3, -1))
    echo = policy.Policy(spec, lambda b: (), lambda memory, row, *_: (row["a"], memory), False)
    rows = export._rows(spec)
    assert set(rows["observation.a"]) == {5, 6, 7}
    np.testing.assert_array_equal(export._play(policy.Actor(echo), rows), rows["observation.a"] - 6)


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (Discrete(3), 3, r"observation 3, which is outside Discrete\(3\); widen the observation_space, or clip"),
        (Discrete(3, start=1), 0, "observation 0, which is outside"),
        (MultiDiscrete([2, 2]), np.array([0, 2]), r"observation\[1\] 2, which is outside"),
        (MultiBinary(2), np.array([0, 2]), r"observation\[1\] 2"),
        (Box(0, 9, (2,), np.uint8), np.array([9, 10], np.uint8), r"observation\[1\] 10, which is outside"),
        (VECTOR, np.array([0.0, 1.1]), r"observation\[1\] 1\.1, which is outside"),
        (VECTOR, np.array([np.nan, 0]), r"observation\[0\] nan"),
        (Box(-np.inf, np.inf, (1,)), np.array([np.inf]), r"observation\[0\] inf"),
        (Dict({"a": Discrete(2)}), {"a": 2}, r"observation\['a'\] 2, which is outside"),
    ],
)
def test_observations_outside_their_space(space, value, message):
    """At the first reset, at a step of the look before training, and at the first reset of the lanes."""
    inside = jax.tree.map(lambda x: x * 0, space.sample()) if not isinstance(space, Discrete) else int(space.start)
    for shows, method in (((value,), "reset"), ((inside, inside, value), "step")):
        with pytest.raises(TypeError, match=rf"Shown\.{method} returned {message}"):
            environments.adopt(lambda shows=shows: Shown(space, shows=shows))
    source = environments.adopt(lambda: Shown(space, shows=(inside,)))
    source._source = lambda: Shown(space, shows=(value,))
    with pytest.raises(ValueError, match=rf"Shown\.reset returned {message}"):
        source.make(2, 0).recv()


def test_a_rounding_beyond_a_bound_is_none():
    environments.adopt(lambda: Shown(shows=(np.array([1.0 + 1e-6, 0.0]),)))


def test_numbers_of_64_bits():
    """Never cut off: they fit, or are refused with what to do."""
    for wide in (Box(0, 2**33, (1,), np.int64), Box(0, 2**33, (1,), np.uint64), Box(-(2**40), 0, (1,), np.int64)):
        with pytest.raises(ValueError, match=r"x shows observations in Box.*need 64 bits.* scale them .* float32 in"):
            gymnasium_spaces.observation_space(wide, "x")
    clock = {"space": Box(0, np.inf, (1,), np.int64), "shows": [np.array([0])] * 5 + [np.array([2**32])]}
    with pytest.raises(ValueError, match="the observation is 4294967296, too large for int32; widen"):
        play(clock, [0] * 5)
    own = EnvSpec("mine", spaces.Dict({"a": spaces.Box(0, 1, (1,), np.int64)}), spaces.Discrete(2))
    with pytest.raises(ValueError, match=r"mine: the observation\['a'\] is Box.*JAX has no int64; use float32 or int3"):
        gate.check_dtypes(own)


def test_choices_outside_later_on():
    """A network would see none of them."""
    late = {"space": Discrete(3), "shows": [0] * 5 + [3]}
    with pytest.raises(ValueError, match=r"the observation is 3, counted from 0, not in Discrete\(num_values=3\)"):
        play(late, [0] * 5)
    rows = HostStep.zeros(EnvSpec("mine", spaces.Dict({"a": spaces.Discrete(2)}), spaces.Discrete(2)), 3)
    rows.observation["a"][1] = 2
    with pytest.raises(ValueError, match=r"the observation\['a'\] is 2, counted from 0, not in Discrete"):
        gate.check_choices(rows.observation, spaces.Dict({"a": spaces.Discrete(2)}))


@pytest.mark.parametrize("reward", [np.array([1.5]), np.array([[1.5]]), [1.5], np.float32(1.5), np.array(1.5)])
def test_one_number_in_an_array_is_a_number(reward):
    _, _, rows = play({"rewards": (0.0, reward), "ends": (False, np.array([False]), np.array([True]))}, [0, 0])
    np.testing.assert_array_equal([row.timestep.reward[1] for row in rows], [0, 1.5, 1.5])
    np.testing.assert_array_equal([row.timestep.last[1] for row in rows], [False, False, True])


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ({"shows": [np.zeros(2)] * 5 + [np.zeros(3)]}, r"step returned observation float64 \[3\]; expected float32"),
        ({"rewards": [0.0] * 5 + [np.zeros(2)]}, r"step returned reward float64 \[2\]; expected a number"),
    ],
)
def test_what_changes_its_shape_is_named(late, message):
    with pytest.raises(TypeError, match=rf"Shown\.{message}"):
        play(late, [0] * 5)


class Worded(Shown):
    """Its own space is none that is supported."""

    def __init__(self):
        super().__init__(Tuple((Discrete(5), Text(9))), shows=((3, "north"),))


def test_what_is_inside_of_wrappers_may_be_anything():
    def flat():
        return gymnasium.wrappers.TransformObservation(
            Worded(), lambda value: np.float32([value[0] / 5, len(value[1]) / 9]), Box(0, 1, (2,))
        )

    source = environments.adopt(flat)
    assert source.spec.observation_space == spaces.Box(0, 1, (2,))
    np.testing.assert_allclose(source.make(1, 0).recv()[1].observation, [[0.6, 5 / 9]])
    with pytest.raises(ValueError, match="Worded shows observations in Tuple.*not supported"):
        environments.adopt(Worded)
