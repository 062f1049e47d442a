"""World models: what a search is told of them, and states of images."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import spaces
from podracer.search import prefix_models, search, world_models
from podracer.search.search import SearchConfig
from podracer.search.world_models import WorldModel
from podracer.types import EnvSpec

BOARD = spaces.Box(-5.0, 5.0, (2,))
MASK = spaces.Box(0, 1, (3,), np.uint8)


def counted(masked):
    """A model whose state is the number of moves: the mover's value is 5 - moves, each move's reward is 1."""

    def represent(params, observation):
        return (observation["board"] if masked else observation)[:, :1]

    def dynamics(params, state, action):
        return state + 1.0, jnp.ones((len(state), 1))

    def predict(params, state):
        return jnp.zeros((len(state), 3)), 5.0 - state

    return WorldModel(lambda key: (), represent, dynamics, predict)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_players", [1, 2])
def test_what_is_searched(num_players, masked):
    """In games for two, the value of the next state counts against the mover; masks hold at the root alone."""
    space = spaces.Dict({"board": BOARD, "action_mask": MASK}) if masked else BOARD
    spec = EnvSpec("moves", space, spaces.Discrete(3), num_players=num_players)
    model = world_models.searched(counted(masked), lambda x: x[..., 0], spec)
    board, mask = jnp.zeros((2, 2)), jnp.asarray([[1, 0, 1], [0, 1, 0]], jnp.uint8)
    root = model.root(((), jnp.float32(0.9)), {"board": board, "action_mask": mask} if masked else board)
    np.testing.assert_array_equal(root.value, [5.0, 5.0])
    if masked:
        assert root.legal is not None
        np.testing.assert_array_equal(root.legal, mask == 1)
    else:
        assert root.legal is None
    step = model.step(((), jnp.float32(0.9)), root.embedding, jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(step.discount, np.full(2, -0.9 if num_players == 2 else 0.9))
    np.testing.assert_array_equal(step.value, [4.0, 4.0])
    assert step.legal is None
    config = SearchConfig(simulations=3, max_depth=1)
    found = search.search(model, ((), jnp.float32(0.9)), root, jax.random.key(0), config, explore=False)
    visited = found.visits > 0
    assert not np.any(visited & (mask == 0)) or not masked
    sign = -1.0 if num_players == 2 else 1.0
    np.testing.assert_allclose(found.q, np.where(visited, 1.0 + sign * 0.9 * 4.0, 0.0), rtol=1e-6)


@pytest.mark.parametrize("num_players", [1, 2])
def test_nothing_counts_after_a_termination(num_players):
    """A search discounts by the probability that the episode goes on."""
    spec, logit = EnvSpec("moves", BOARD, spaces.Discrete(3), num_players=num_players), np.log(3.0)
    model = counted(False)._replace(termination=lambda params, state: jnp.where(state[:, 0] > 1, np.inf, logit))
    step = world_models.searched(model, lambda x: x[..., 0], spec).step
    found = step(((), jnp.float32(0.8)), jnp.asarray([[0.0], [1.0]]), jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(found.discount, [0.2 if num_players == 1 else -0.2, 0.0], rtol=1e-6)


@pytest.mark.parametrize("torso", ["mlp", "convolutions"])
def test_a_new_model_expects_episodes_to_go_on(torso):
    spec = IMAGES if torso == "convolutions" else EnvSpec("moves", BOARD, spaces.Discrete(3))
    sizes = world_models.Sizes(num_bins=3, channels=4, head_size=4, torso=torso)
    model = world_models.make(spec, sizes, terminations=True)
    example = jax.tree.map(lambda x: x[None], spaces.zeros(spec.observation_space))

    def logits(key):
        params = model.init(key)
        return model.termination(params, model.represent(params, example))

    np.testing.assert_allclose(jax.jit(logits)(jax.random.key(0)), [world_models.INITIAL_TERMINATION_LOGIT])
    assert world_models.make(spec, sizes).termination is None


IMAGES = EnvSpec("images", spaces.Box(0, 255, (16, 16, 1), np.uint8), spaces.Discrete(3))


def test_states_of_images():
    """Each one's least number is 0 and its largest 1, at every step, and actions tell them apart."""
    model = world_models.make(IMAGES, world_models.Sizes(num_bins=3, channels=4, head_size=4))

    def states(key):
        params = model.init(key)
        state = model.represent(params, jax.random.randint(key, (3, 16, 16, 1), 0, 256).astype(jnp.uint8))
        after = model.dynamics(params, state, jnp.arange(3, dtype=jnp.int32))[0]
        same = model.dynamics(params, jnp.broadcast_to(state[:1], state.shape), jnp.arange(3, dtype=jnp.int32))[0]
        return state, after, same

    state, after, same = jax.jit(states)(jax.random.key(0))
    for x in (state, after):
        assert x.shape[0] == 3
        assert max(x.shape[1:3]) <= 6
        np.testing.assert_array_equal(np.min(x, axis=(1, 2, 3)), np.zeros(3))
        np.testing.assert_allclose(np.max(x, axis=(1, 2, 3)), np.ones(3), rtol=1e-6)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(same[i] - same[j]).max() > 0.01
    assert np.isfinite(world_models._rescale(jnp.ones((1, 2, 2, 1)))).all(), "a state of one number"


MAKERS = [world_models.make, pytest.param(prefix_models.make, marks=pytest.mark.slow)]


def represented(make, spec, image, **sizes):
    """The states of images by a fresh model."""
    module = sys.modules[make.__module__]
    assert module in (world_models, prefix_models)
    model = make(spec, module.Sizes(num_bins=3, channels=4, head_size=4, **sizes))

    def represent(key):
        if make is world_models.make:
            return model.represent(model.init(key), image)
        return model.module.apply(model.init(key, image[:1])[0], image, method="represent")

    return jax.jit(represent)(jax.random.key(0))


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__module__)
@pytest.mark.parametrize(("torso", "shape"), [("convolutions", (10, 10, 4)), ("minatar", (8,))])
def test_states_of_small_images(make, torso, shape):
    """Planes keep their pixels, a vector has its size; pixels are shares of the largest value that there is."""
    states = []
    for largest in (1, 255):
        spec = EnvSpec("planes", spaces.Box(0, largest, (10, 10, 2), np.uint8), spaces.Discrete(3))
        planes = largest * jax.random.bernoulli(jax.random.key(1), 0.1, (3, 10, 10, 2)).astype(jnp.uint8)
        states.append(represented(make, spec, planes, torso=torso, state_size=8))
    assert states[0].shape == (3, *shape)
    np.testing.assert_allclose(*states, rtol=1e-5, atol=1e-6)
    assert np.abs(states[0][0] - states[0][1]).max() > 0.01


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__module__)
def test_actions_decide_about_the_next_state(make):
    """A fresh model's changes of a state differ by action: by a tenth of their mean square or more."""
    module = sys.modules[make.__module__]
    model = make(EnvSpec("moves", BOARD, spaces.Discrete(3)), module.Sizes(num_bins=3, head_size=4, state_size=128))

    def changes(key):
        observation, actions = jax.random.normal(key, (64, 2)), jnp.arange(3, dtype=jnp.int32)
        if make is world_models.make:
            params = model.init(key)
            state, step = model.represent(params, observation), lambda *x: model.dynamics(params, *x)[0]
        else:
            fresh = model.init(key, observation[:1])
            state, step = model.call("represent", *fresh, observation), lambda *x: model.call("advance", *fresh, *x)
        return jnp.stack([step(state, jnp.full(64, action)) - state for action in actions])

    change = np.asarray(jax.jit(changes)(jax.random.key(0)))
    by_action = change - change.mean(axis=0, keepdims=True)
    assert np.mean(by_action**2) > 0.1 * np.mean(change**2)


@pytest.mark.parametrize(
    ("torso", "space", "least"),
    [("convolutions", BOARD, "1x1"), ("minatar", BOARD, "3x3"), ("minatar", spaces.Box(0, 1, (2, 9), np.uint8), "3x3")],
)
def test_convolutions_need_images(torso, space, least):
    spec = EnvSpec("moves", space, spaces.Discrete(3))
    message = f"torso='{torso}' needs uint8 images .* of at least {least} pixels, but moves shows .*; use torso='mlp'"
    with pytest.raises(ValueError, match=message):
        world_models.make(spec, world_models.Sizes(torso=torso))


def test_the_torso_that_goes_by_the_environment():
    planes = [spaces.Box(0, 1, (side, side, 2), np.uint8) for side in (10, 16)]
    specs = [EnvSpec("planes", space, spaces.Discrete(3)) for space in planes]
    assert [world_models.chosen_torso(spec, "auto") for spec in specs] == ["mlp", "convolutions"]
    assert [world_models.chosen_torso(spec, "minatar") for spec in specs] == ["minatar", "minatar"]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__module__)
def test_images_of_one_channel_need_no_axis_for_it(make):
    """They are images, not vectors: the same planes with such an axis and without."""
    flat = IMAGES._replace(observation_space=spaces.Box(0, 255, (16, 16), np.uint8))
    states = []
    for spec in (IMAGES, flat):
        assert world_models.chosen_torso(spec, "auto") == "convolutions"
        image = jax.random.randint(jax.random.key(1), (3, 16, 16), 0, 256).astype(jnp.uint8)
        states.append(represented(make, spec, image.reshape(3, *spec.observation_space.shape)))
    assert states[0].shape[-1] == 4
    np.testing.assert_array_equal(*states)
