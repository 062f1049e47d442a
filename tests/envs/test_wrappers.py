"""Wrappers against episodes computed by hand, and against Gymnasium's own flattening."""

import pickle
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
from envs_jax import gym, testing, wrapped, wrappers
from podracer import spaces
from podracer.environments import wrapping
from podracer.nets import action_masks
from podracer.types import EnvSpec, Transition


class State(NamedTuple):
    """State of `Adder`."""

    total: jax.Array
    noise: jax.Array
    steps: jax.Array


class Adder:
    """Adds up actions from 0; terminates at a total of `end`. Reward: the action. Metric: the noise drawn."""

    def __init__(self, end=10, step=1):
        self.end, self.size = end, step
        self.spec = EnvSpec(
            "adder",
            spaces.Dict(
                {
                    "total": spaces.Box([0.0, -9.0], [999.0, 9.0]),
                    "clock": spaces.Discrete(30),
                    "pair": spaces.MultiDiscrete((2, 3)),
                    "image": spaces.Box(0, 255, (2, 2), np.uint8),
                }
            ),
            spaces.Discrete(4),
            max_episode_steps=25,
            metrics=("noise",),
        )

    def reset(self, key):
        return State(jnp.float32(0), jax.random.uniform(key), jnp.int32(0))

    def step(self, state, action, key):
        total = state.total + self.size * action.astype(jnp.float32)
        state = State(total, jax.random.uniform(key), state.steps + 1)
        over = total == self.end
        last = over | (state.steps >= 25)
        return state, Transition(
            action.astype(jnp.float32), 1.0 - over.astype(jnp.float32), last, {"noise": state.noise}
        )

    def observe(self, state):
        return {
            "total": jnp.stack([state.total, state.noise]),
            "clock": state.steps,
            "pair": jnp.stack([state.steps % 2, state.steps % 3]),
            "image": (state.steps + jnp.arange(4).reshape(2, 2)).astype(jnp.uint8),
        }

    def render(self, state):
        return jnp.broadcast_to(state.steps.astype(jnp.uint8), (2, 2, 3))


def play(environment, actions):
    """The rows of actions from a reset: (reward, discount, last) each, and all states."""

    @jax.jit
    def run(actions):
        def step(state, now):
            state, transition = environment.step(state, *now)
            return state, (transition, state)

        keys = jax.random.split(jax.random.key(1), len(actions))
        return jax.lax.scan(step, environment.reset(jax.random.key(0)), (actions, keys))[1]

    transitions, states = run(jnp.asarray(actions, jnp.int32))
    rows = zip(*(np.asarray(x).tolist() for x in transitions[:3]))
    return list(rows), transitions, states


def test_time_limit():
    """Truncated with discount 1; where the episode terminates on that very step, that counts."""
    rows, _, states = play(wrappers.time_limit(3)(Adder()), [1, 2, 3])
    assert rows == [(1.0, 1.0, False), (2.0, 1.0, False), (3.0, 1.0, True)]
    assert states.num_steps.tolist() == [1, 2, 3]
    rows, *_ = play(wrappers.time_limit(3)(Adder(end=6)), [1, 2, 3])
    assert rows[-1] == (3.0, 0.0, True)
    rows, *_ = play(wrappers.time_limit(3)(Adder(end=3)), [1, 2])
    assert rows[-1] == (2.0, 0.0, True), "before the limit"
    limits = [wrappers.time_limit(n)(Adder()).spec.max_episode_steps for n in (np.int64(3), 99)]
    assert limits == [3, 25]
    assert type(limits[0]) is int


def test_rewards():
    rows, *_ = play(wrappers.scale_reward(np.float32(0.5))(Adder()), [1, 3])
    assert [row[0] for row in rows] == [0.5, 1.5]
    rows, *_ = play(wrappers.clip_reward(1, 2)(Adder()), [0, 1, 3])
    assert [row[0] for row in rows] == [1.0, 1.0, 2.0]
    rows, *_ = play(wrappers.clip_reward(-float("inf"), 2)(Adder()), [0, 3])
    assert [row[0] for row in rows] == [0.0, 2.0]
    # The order in which they are applied, the first one innermost.
    rows, *_ = play(wrappers.clip_reward(0, 1)(wrappers.scale_reward(0.5)(Adder())), [1, 3])
    assert [row[0] for row in rows] == [0.5, 1.0]


def test_sticky_actions():
    actions = np.random.default_rng(0).integers(0, 4, 4000)
    far = Adder(end=1e9)
    _, transitions, states = play(wrappers.sticky_actions(0.25)(far), actions)
    executed = np.asarray(states.action)
    np.testing.assert_array_equal(executed, transitions.reward)  # what was executed is what the environment saw
    assert executed[0] == actions[0]
    own, repeated = executed[1:] == actions[1:], executed[1:] == executed[:-1]
    assert np.all(own | repeated)
    told_apart = actions[1:] != executed[:-1]
    share = repeated[told_apart].mean()
    assert abs(share - 0.25) < 4 * np.sqrt(0.25 * 0.75 / told_apart.sum())
    for p, expected in ((0.0, actions), (1.0, np.full(4000, actions[0]))):
        np.testing.assert_array_equal(play(wrappers.sticky_actions(p)(far), actions)[1].reward, expected)
    first = [play(wrappers.sticky_actions(1.0)(far), [action])[1].reward.tolist() for action in range(4)]
    assert first == [[0.0], [1.0], [2.0], [3.0]], "the first action is the agent's"


def test_action_repeat():
    """Three steps an action: 9 after one of 3, over at 10, where the two steps that are left are not taken."""
    environment = wrappers.action_repeat(3)(Adder())
    rows, transitions, states = play(environment, [3, 1])
    assert rows == [(9.0, 1.0, False), (1.0, 0.0, True)]
    assert states.total.tolist() == [9.0, 10.0]
    assert states.steps.tolist() == [3, 4]
    # Every step has a key of its own, and metrics are summed over those that are taken.
    keys = [jax.random.split(key, 3) for key in jax.random.split(jax.random.key(1), 2)]
    noise = [[float(jax.random.uniform(key)) for key in three] for three in keys]
    np.testing.assert_allclose(transitions.metrics["noise"], [sum(noise[0]), noise[1][0]], rtol=1e-6)
    assert environment.spec.max_episode_steps == 9  # of 25


def test_flatten_is_gymnasiums():
    environment = wrappers.flatten()(Adder())
    space = gym._convert(Adder().spec.observation_space)
    flat = gymnasium.spaces.flatten_space(space)
    assert environment.spec.observation_space == spaces.Box(flat.low, flat.high)
    for state in (Adder().reset(jax.random.key(0)), State(jnp.float32(7), jnp.float32(0.5), jnp.int32(5))):
        expected = gymnasium.spaces.flatten(space, jax.device_get(Adder().observe(state)))
        found = environment.observe(state)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


def test_pick_and_hide():
    state = State(jnp.float32(7), jnp.float32(0.5), jnp.int32(5))
    picked = wrappers.pick("total")(Adder())
    assert picked.spec.observation_space == spaces.Box([0.0, -9.0], [999.0, 9.0])
    np.testing.assert_array_equal(picked.observe(state), [7.0, 0.5])
    hidden = wrappers.hide(np.array([0]))(picked)
    assert hidden.spec.observation_space == spaces.Box([-9.0], [9.0])
    np.testing.assert_array_equal(hidden.observe(state), [0.5])
    cartpole = wrappers.hide([1, 3])(envs_jax.make("cartpole"))
    state = cartpole.reset(jax.random.key(0))
    np.testing.assert_array_equal(cartpole.observe(state), [state.x, state.theta])


def test_randomise():
    """Each episode has one size of steps from its first to its last, drawn from the key of its reset."""
    sizes = wrappers.randomise(
        lambda key: {"step": jax.random.uniform(key, minval=1.0, maxval=3.0)},
        lambda environment, drawn: Adder(environment.end, drawn["step"]),
    )(Adder(end=1e9))
    _, _, states = play(sizes, [1, 2, 0, 3])
    size = jax.random.uniform(jax.random.split(jax.random.key(0))[0], minval=1.0, maxval=3.0)
    np.testing.assert_array_equal(states.parameters["step"], np.full(4, size))
    np.testing.assert_allclose(states.inner.total, float(size) * np.array([1, 3, 3, 6]), rtol=1e-6)
    drawn = jax.vmap(sizes.reset)(jax.random.split(jax.random.key(2), 64)).parameters["step"]
    assert len(set(drawn.tolist())) == 64
    assert 1 <= drawn.min() < 1.5
    assert 2.5 < drawn.max() < 3

    class Scaled(Adder):
        """Begins with its size, and shows it."""

        def reset(self, key):
            return State(jnp.float32(0) + self.size, jnp.float32(0), jnp.int32(0))

        def observe(self, state):
            return super().observe(state) | {"total": jnp.stack([state.total, jnp.float32(0) + self.size])}

    scaled = wrappers.randomise(lambda key: jnp.float32(7), lambda environment, step: Scaled(step=step))(Scaled())
    state = scaled.reset(jax.random.key(0))
    assert (state.inner.total, scaled.observe(state)["total"].tolist()) == (7.0, [7.0, 7.0])


ALL = {
    "time_limit": wrappers.time_limit(7),
    "rewards": lambda environment: wrappers.clip_reward(0, 1)(wrappers.scale_reward(0.5)(environment)),
    "sticky_actions": wrappers.sticky_actions(0.5),
    "action_repeat": wrappers.action_repeat(3),
    "flatten": wrappers.flatten(),
    "pick and hide": lambda environment: wrappers.hide([1])(wrappers.pick("total")(environment)),
    "randomise": wrappers.randomise(
        lambda key: jax.random.uniform(key, minval=1.0, maxval=3.0),
        lambda environment, step: type(environment)(step=step),
    ),
}


def nested(environment):
    for wrap in reversed(ALL.values()):  # `randomise` makes what is innermost
        if wrap is not ALL["flatten"]:
            environment = wrap(environment)
    return environment


EACH = pytest.mark.parametrize("wrap", [nested, *ALL.values()], ids=["nested", *ALL])


@EACH
def test_each_keeps_the_protocol_and_renders(wrap):
    environment = wrap(Adder())
    testing.validate_protocol(environment)
    render = jax.eval_shape(environment.render, jax.eval_shape(environment.reset, jax.random.key(0)))
    assert (render.shape, render.dtype) == ((2, 2, 3), np.uint8)


@pytest.mark.slow
@EACH
def test_each_conforms(wrap):
    environment = wrap(Adder())
    testing.check_environment(environment, episodes=3, steps=12)
    with jax.debug_key_reuse(True):
        state = jax.jit(environment.reset)(jax.random.key(0))
        state, _ = jax.jit(environment.step)(state, jnp.int32(1), jax.random.key(1))
    steps = 3 if wrap in (ALL["action_repeat"], nested) else 1
    np.testing.assert_array_equal(environment.render(state), np.full((2, 2, 3), steps))


def test_only_an_environment_that_renders_does():
    bare = type("Bare", (), {name: getattr(Adder, name) for name in ("__init__", "reset", "step", "observe")})
    costly = type("Costly", (Adder,), {"costly_reset": True})
    for wrap in ALL.values():
        assert hasattr(wrap(Adder()), "render")
        assert wrap(costly()).costly_reset is True
        assert not hasattr(wrap(bare()), "render")
    wrapped = pickle.loads(pickle.dumps(nested_without_functions(envs_jax.make("catch"))))
    assert wrapped.spec.max_episode_steps == 5
    assert wrapped.costly_reset is False


def nested_without_functions(environment):
    return wrappers.sticky_actions(0.5)(wrappers.time_limit(5)(environment))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wrappers.time_limit(0), r"time_limit\(n=0\): must be an integer of at least 1"),
        (lambda: wrappers.action_repeat(2.5), r"action_repeat\(n=2.5\): must be an integer"),
        (lambda: wrappers.scale_reward(float("inf")), r"scale_reward\(x=inf\): must be finite"),
        (lambda: wrappers.clip_reward(1, -1), r"clip_reward\(low=1, high=-1\): low must not exceed high"),
        (lambda: wrappers.clip_reward(None, 1), r"clip_reward\(low=None, high=1\): must be a number"),
        (lambda: wrappers.sticky_actions(1.5), r"sticky_actions\(p=1.5\): must be between 0 and 1"),
        (lambda: wrappers.pick("totl")(Adder()), r"pick\('totl'\): adder does not show it; did you mean 'total'"),
        (lambda: wrappers.pick("x")(envs_jax.make("catch")), r"pick\('x'\): .* not a Dict"),
        (lambda: wrappers.hide([4])(envs_jax.make("cartpole")), r"hide\(\[4\]\): .* have 4 elements, from 0"),
        (lambda: wrappers.hide([0, 1, 2, 3])(envs_jax.make("cartpole")), "hide some of them"),
        (lambda: wrappers.hide([0])(envs_jax.make("catch")), r"hide\(\[0\]\): .* not a Box \[n\]; flatten\(\) makes"),
        (lambda: wrappers.hide([]), r"hide\(\[\]\): give the indices as a sequence"),
        (lambda: wrappers.hide([-1]), r"hide\(\[-1\]\): indices must be integers of at least 0"),
        (lambda: wrappers.time_limit(5)(envs_jax.make("othello")), "othello is a game for two, whose rules a wrapper"),
        (
            lambda: wrappers.time_limit(5)(type(envs_jax.make("catch"))),
            "^Catch is a class; wrap an environment that it",
        ),
        (lambda: wrappers.time_limit(np.bool_(True)), "must be an integer of at least 1"),
        (
            lambda: wrappers.scale_reward(1e39),
            r"scale_reward\(x=1e\+39\): must be within 3.4e\+38, the largest number of",
        ),
        (lambda: wrappers.clip_reward(10**400, np.inf), "must be within 3.4e"),
        (lambda: wrappers.clip_reward(-np.inf, -np.inf), "no finite reward is between them"),
        (lambda: wrappers.time_limit(5)(gymnasium.make("CartPole-v1")), "no environment in pure JAX, which wrappers"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Masked(Adder):
    """An adder whose mask forbids the action `steps % 4`."""

    def __init__(self, end=1e9, step=1):
        super().__init__(end, step)
        members = dict(self.spec.observation_space.items) | {"action_mask": spaces.Box(0, 1, (4,), np.uint8)}
        self.spec = self.spec._replace(observation_space=spaces.Dict(members))

    def observe(self, state):
        return super().observe(state) | {"action_mask": (jnp.arange(4) != state.steps % 4).astype(jnp.uint8)}


def test_masks():
    """No wrapper executes a forbidden action; the mask stays at the top of what is shown, or the wrapper is refused."""
    masked = Masked()
    _, transitions, _ = play(wrappers.sticky_actions(1.0)(masked), [2, 3, 0, 1, 1])
    assert transitions.reward.tolist() == [2, 2, 0, 0, 1]
    state = State(jnp.float32(0), jnp.float32(0), jnp.int32(0))
    pairs = type("Pairs", (), {"spec": masked.spec._replace(action_space=spaces.MultiDiscrete((2, 3)))})()
    pairs.observe = lambda state: {"action_mask": jnp.array([1, 0, 0, 1, 1], jnp.uint8)}
    legal = [bool(wrapped._is_legal(pairs, state, jnp.int32([i, j]))) for i in range(2) for j in range(3)]
    assert legal == [False, True, True, False, False, False]
    picked = wrappers.pick("total")(masked)
    assert dict(picked.spec.observation_space.items).keys() == picked.observe(state).keys() == {"total", "action_mask"}
    for wrap in (ALL["time_limit"], ALL["rewards"], ALL["randomise"], ALL["sticky_actions"], wrappers.pick("total")):
        assert action_masks.present(wrap(masked).spec)
    testing.validate_protocol(picked)
    for wrap, message in (
        (wrappers.flatten(), "adder: flatten would make its action_mask numbers to see"),
        (wrappers.action_repeat(2), "adder: action_repeat would execute actions that its action_mask forbids by then"),
        (lambda environment: wrappers.hide([0])(wrappers.pick("total")(environment)), r"not a Box \[n\]"),
    ):
        with pytest.raises(ValueError, match=message):
            wrap(masked)


# By name


def test_texts_are_written_in_one_way():
    given = {"sticky_actions": 0.25, "time_limit": 500, "clip_reward": (-1, 1), "hide": [1, 3], "flatten": ()}
    texts = ["sticky_actions=0.25", "time_limit=500", "clip_reward=-1.0,1.0", "hide=1,3", "flatten"]
    assert wrapping.texts(given) == texts
    assert wrapping.texts(["sticky_actions=.25", "time_limit=5e2", "clip_reward=-1,1", "hide=1,3", "flatten"]) == texts
    assert wrapping.texts(texts) == texts
    assert wrapping.texts("pick=a=b,c") == ["pick=a=b,c"]


def test_by_name_the_first_is_innermost():
    rows, *_ = play(wrapping.wrapped(Adder(), ["scale_reward=0.5", "clip_reward=0,1"]), [1, 3])
    assert [row[0] for row in rows] == [0.5, 1.0]
    rows, *_ = play(wrapping.wrapped(Adder(), ["clip_reward=0,1", "scale_reward=0.5"]), [1, 3])
    assert [row[0] for row in rows] == [0.5, 0.5]
    every = ["action_repeat=2", "sticky_actions=0.5", "pick=total", "hide=0", "flatten", "time_limit=3"]
    assert wrapping.wrapped(Adder(), every).spec == EnvSpec(
        "adder", spaces.Box([-9.0], [9.0]), spaces.Discrete(4), 3, ("noise",)
    )


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (["time_limt=3"], "unknown wrapper 'time_limt'; did you mean 'time_limit'"),
        (["time_limit"], "wrap='time_limit': write it as in time_limit=500"),
        (["time_limit=x"], "wrap='time_limit=x': write it as in time_limit=500"),
        (["time_limit=inf"], "wrap='time_limit=inf': write it as in time_limit=500"),
        (["clip_reward=1"], "wrap='clip_reward=1': write it as in clip_reward=-1,1"),
        (["flatten=1"], "wrap='flatten=1': write it as in flatten"),
        (["hide="], "wrap='hide=': write it as in hide=1,3"),
        (["pick"], "wrap='pick': write it as in pick=image"),
        (["sticky_actions=2"], "must be between 0 and 1"),
        ({"randomise": 1}, "wrap='randomise=1': it takes functions; wrap the environment with envs_jax.wrappers"),
    ],
)
def test_by_name_refuses(wrap, message):
    with pytest.raises(ValueError, match=message):
        wrapping.texts(wrap)
