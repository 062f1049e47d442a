"""Models of prefixes: the published size, gradients, consistency, and rewards that a search reads from prefixes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import spaces
from podracer.learning import augmentation
from podracer.nets.layers import BatchNorm
from podracer.search import prefix_models, search, world_models
from podracer.search.search import Root, SearchConfig, Step
from podracer.types import EnvSpec

VECTORS = EnvSpec("rows", spaces.Box(-5.0, 5.0, (3,)), spaces.Discrete(4))
IMAGES = EnvSpec("images", spaces.Box(0, 255, (16, 16, 1), np.uint8), spaces.Discrete(4))


@pytest.mark.parametrize("num_actions", [6, 18])
def test_the_network_for_atari_has_the_published_size(num_actions):
    """Ye et al. 2021, appendix A, with one bias vector of the LSTM, where PyTorch has two."""
    spec = EnvSpec("atari", spaces.Box(0, 255, (96, 96, 12), np.uint8), spaces.Discrete(num_actions))
    sizes = {"channels": 64, "head_size": 32, "lstm_size": 512, "projection_size": 1024, "forecast_size": 512}
    model = prefix_models.make(spec, prefix_models.Sizes(num_bins=601, norm="batch", **sizes))
    params, statistics = jax.eval_shape(
        lambda key: model.init(key, jnp.zeros((1, 96, 96, 12), jnp.uint8)), jax.random.key(0)
    )
    assert sum(x.size for x in jax.tree.leaves(params)) == 8_348_264 + 33 * (num_actions - 6)
    norms = [path for path, _ in jax.tree_util.tree_leaves_with_path(params) if "scale" in jax.tree_util.keystr(path)]
    assert len(jax.tree.leaves(statistics)) == 2 * len(norms)
    images = jnp.zeros((2, 96, 96, 12), jnp.uint8)
    state = jax.eval_shape(lambda *variables: model.call("represent", *variables, images), params, statistics)
    assert state.shape == (2, 6, 6, 64)


class Still(nn.Module):
    """A model whose state is a parameter that no action changes."""

    def setup(self):
        self.state = self.param("state", nn.initializers.ones, (4,))

    def __call__(self, observation, action, memory):
        return self.represent(observation)

    def represent(self, observation):
        return jnp.broadcast_to(self.state, (len(observation), 4))

    def advance(self, state, action):
        return state

    def prefix(self, state, memory):
        return state, memory

    def predict(self, state):
        return state, state

    def project(self, state):
        return state

    def forecast(self, projection):
        return projection


def test_gradients_are_halved_in_front_of_all_heads():
    """The losses of the policy, the value, the prefix and the forecast at state k move state 0 by 2^-k."""
    model = prefix_models.PrefixModel(Still(), 1)
    params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3)))
    K, B = 3, 2

    def gradient(k, head):
        def value(params):
            first, later = jnp.zeros((1, B, 3)), jnp.zeros((K, B, 3))
            said, _, _ = prefix_models.unroll(model, params, {}, first, later, jnp.zeros((K, B), jnp.int32), 5)
            return jnp.sum(getattr(said, head)[k - K - 1])  # the first state has neither prefix nor forecast

        return float(jnp.sum(jax.grad(value)(params)["params"]["state"]))

    for head in ("policy", "value", "prefix", "forecast"):
        whole = 4.0 * B
        assert [gradient(k, head) for k in range(1, K + 1)] == [whole / 2, whole / 4, whole / 8]
    assert gradient(0, "policy") == whole

    def seen(params):
        first, later = jnp.zeros((1, B, 3)), jnp.zeros((K, B, 3))
        return jnp.sum(prefix_models.unroll(model, params, {}, first, later, jnp.zeros((K, B), jnp.int32), 5)[1])

    assert not np.any(jax.grad(seen)(params)["params"]["state"])


class Summing(Still):
    """A model whose prefix is the sum of all states since the memory was empty."""

    def prefix(self, state, memory):
        total = memory.h + state
        return total, memory._replace(h=total)


def test_gradients_through_the_memory_are_not_scaled():
    """The loss of a prefix moves the states before it as a whole: 1/2 + 1/4 + 1/8 of state 0 at the third."""
    model = prefix_models.PrefixModel(Summing(), 4)
    params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3)))

    def last(params, horizon):
        first, later, actions = jnp.zeros((1, 1, 3)), jnp.zeros((3, 1, 3)), jnp.zeros((3, 1), jnp.int32)
        return jnp.sum(prefix_models.unroll(model, params, {}, first, later, actions, horizon)[0].prefix[-1])

    for horizon, expected in ((5, 1 / 2 + 1 / 4 + 1 / 8), (2, 1 / 8)):
        np.testing.assert_allclose(jax.grad(last)(params, horizon)["params"]["state"], expected)


def test_consistency():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 7)), jnp.float32)
    np.testing.assert_allclose(prefix_models.cosine_loss(x, 3.0 * x), 0.0, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda y: jnp.sum(prefix_models.cosine_loss(y, x)))(x), 0.0, atol=1e-6)
    other = jnp.eye(7)[:5]
    np.testing.assert_allclose(prefix_models.cosine_loss(other, jnp.roll(other, 1, 1)), 1.0)
    assert not np.any(jax.grad(lambda y: jnp.sum(prefix_models.cosine_loss(x, y)))(2.0 * other + 1.0))
    assert np.all(np.isfinite(jax.grad(lambda y: jnp.sum(prefix_models.cosine_loss(y, x)))(jnp.zeros_like(x))))
    assert float(prefix_models.projection_std(jnp.broadcast_to(x[:1], x.shape))) < 1e-6
    many = jnp.asarray(rng.normal(size=(2000, 7)), jnp.float32)
    assert float(prefix_models.projection_std(many)) == pytest.approx(1 / np.sqrt(7), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("horizon", [3, 1, 5])
def test_rewards_of_a_path_sum_to_prefixes(horizon):
    """At depths 1 to 12, of a network whose prefixes are anything."""
    model = prefix_models.make(VECTORS, prefix_models.Sizes(num_bins=11, hidden_sizes=(8,), state_size=6, lstm_size=5))
    params, statistics = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 3)))
    noise = np.random.default_rng(2)
    params = jax.tree.map(lambda x: x + jnp.asarray(0.3 * noise.normal(size=x.shape), x.dtype), params)
    expectation = lambda logits: logits[..., 0]  # noqa: E731
    searched = prefix_models.searched(model, expectation, VECTORS, horizon)
    variables, N = (params, statistics, jnp.float32(0.9)), 3
    node = searched.root(variables, jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)).embedding
    state, memory, sums = node.state, model.empty(N), np.zeros(N)
    rng = np.random.default_rng(1)
    step = jax.jit(searched.step)
    advance, read = (jax.jit(functools.partial(model.call, name, params, statistics)) for name in ("advance", "prefix"))
    for depth in range(1, 13):
        if (depth - 1) % horizon == 0:
            memory, sums = model.empty(N), np.zeros(N)
        action = jnp.asarray(rng.integers(0, 4, N), jnp.int32)
        found = step(variables, node, action)
        state = advance(state, action)
        prefix, memory = read(state, memory)
        sums = sums + np.asarray(found.reward)
        np.testing.assert_allclose(sums, expectation(prefix), rtol=1e-4, atol=1e-5)
        node = found.embedding
        np.testing.assert_array_equal(node.depth, depth)
        np.testing.assert_allclose(node.state, state, rtol=1e-5, atol=1e-6)


class Table(nn.Module):
    """Rewards of a table, said as sums since the memory was empty: its h is that sum, its c the reward to come."""

    def setup(self):
        rng = np.random.default_rng(0)
        self.next = jnp.asarray(rng.integers(0, 7, (7, 3)))
        self.reward = jnp.asarray(rng.normal(size=(7, 3)), jnp.float32)
        self.value = jnp.asarray(rng.normal(size=7), jnp.float32)
        self.logits = jnp.asarray(rng.normal(size=(7, 3)), jnp.float32)
        self.nothing = self.param("nothing", nn.initializers.zeros, ())

    def __call__(self, observation, action, memory):
        return self.nothing

    def represent(self, observation):
        return jnp.stack([observation.astype(jnp.float32), jnp.zeros(len(observation))], -1)

    def advance(self, state, action):
        at = state[:, 0].astype(jnp.int32)
        return jnp.stack([self.next[at, action].astype(jnp.float32), self.reward[at, action]], -1)

    def prefix(self, state, memory):
        total = memory.h[:, 0] + state[:, 1]
        return total[:, None], prefix_models.Memory(total[:, None], memory.c)

    def predict(self, state):
        at = state[:, 0].astype(jnp.int32)
        return self.logits[at], self.value[at][:, None]


class Ending(Table):
    """A table whose state 3 is an end, and whose others are ends with a probability of three quarters."""

    def termination(self, state):
        return jnp.where(state[:, 0] == 3, np.inf, np.log(3.0))


def test_nothing_counts_after_a_termination():
    """A search discounts by the probability that the episode goes on."""
    model = prefix_models.PrefixModel(Ending(), 1, terminations=True)
    params, statistics = model.init(jax.random.key(0), jnp.zeros(1, jnp.int32))
    spec = EnvSpec("table", spaces.Discrete(7), spaces.Discrete(3))
    searched = prefix_models.searched(model, lambda x: x[..., 0], spec, 5)
    variables = (params, statistics, jnp.float32(0.8))
    node = searched.root(variables, jnp.arange(7)).embedding
    found = searched.step(variables, node, jnp.zeros(7, jnp.int32))
    expected = np.where(found.embedding.state[:, 0] == 3, 0.0, 0.2)
    np.testing.assert_allclose(found.discount, expected, rtol=1e-6)
    assert len(set(expected)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("spec", [VECTORS, IMAGES], ids=["vectors", "images"])
def test_a_new_model_expects_episodes_to_go_on(spec):
    sizes = prefix_models.Sizes(num_bins=3, channels=4, hidden_sizes=(4,), state_size=4, lstm_size=4)
    model = prefix_models.make(spec, sizes, terminations=True)
    observation = jnp.ones((1, *spec.observation_space.shape))
    params, statistics = jax.jit(model.init)(jax.random.key(0), observation)
    logit = model.call("termination", params, statistics, model.call("represent", params, statistics, observation))
    np.testing.assert_allclose(logit, [world_models.INITIAL_TERMINATION_LOGIT])


@pytest.mark.parametrize("algorithm", [pytest.param("puct", marks=pytest.mark.slow), "gumbel"])
@pytest.mark.parametrize("horizon", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_a_search_with_prefixes_is_the_search_with_rewards(algorithm, horizon):
    """On a table of states, beyond the horizon too."""
    model = prefix_models.PrefixModel(Table(), 1)
    spec = EnvSpec("table", spaces.Box(0.0, 6.0, ()), spaces.Discrete(3))
    params, statistics = model.init(jax.random.key(0), jnp.zeros(1))
    first = lambda x: x[..., 0]  # noqa: E731
    prefixes = prefix_models.searched(model, first, spec, horizon)
    call = lambda name, *arguments: model.call(name, params, statistics, *arguments)  # noqa: E731

    def root(variables, observation):
        state = call("represent", observation)
        logits, value = call("predict", state)
        return Root(logits, first(value), state)

    def step(variables, state, action):
        state = call("advance", state, action)
        logits, value = call("predict", state)
        return Step(state[:, 1], jnp.full(len(action), 0.95), logits, first(value), state)

    observation = jnp.arange(7.0)
    config = SearchConfig(algorithm=algorithm, simulations=60)
    found = []
    for each, variables in ((prefixes, (params, statistics, jnp.float32(0.95))), (search.Model(root, step), ())):
        run = jax.jit(
            lambda key, each=each, variables=variables: search.search(
                each, variables, each.root(variables, observation), key, config
            )
        )
        found.append(run(jax.random.key(3)))
    assert float(found[0].depth.max()) > 5
    for name in ("policy", "value", "visits", "q"):
        np.testing.assert_allclose(getattr(found[0], name), getattr(found[1], name), rtol=1e-5, atol=1e-5)


def test_batch_norm_is_numpys():
    x = np.random.default_rng(0).normal(3.0, 2.0, (6, 5, 4)).astype(np.float32)
    layer = BatchNorm()
    variables = layer.init(jax.random.key(0), x)
    np.testing.assert_array_equal(variables["statistics"]["mean"], 0.0)
    np.testing.assert_array_equal(variables["statistics"]["variance"], 1.0)
    variables["params"]["scale"], variables["params"]["bias"] = jnp.full(4, 2.0), jnp.full(4, 0.5)
    y, changed = layer.apply(variables, x, mutable=["statistics"])
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    np.testing.assert_allclose(y, 2 * (x - mean) / np.sqrt(variance + 1e-5) + 0.5, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(changed["statistics"]["mean"], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(changed["statistics"]["variance"], 0.9 + 0.1 * variance, rtol=1e-5)
    running = {"mean": jnp.asarray(mean), "variance": jnp.asarray(variance)}
    alone = layer.apply(variables | {"statistics": running}, x[:1])
    np.testing.assert_allclose(alone, np.asarray(y)[:1], rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda x: jnp.sum(layer.apply(variables, x, mutable=["statistics"])[0] ** 3))(x)
    assert np.abs(np.sum(gradient, (0, 1))).max() < 1e-2, "what all rows have in common does not matter"


def test_augmentation_is_numpys():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 5, 90, 45, 3), np.uint8)
    changes = jax.tree.map(np.asarray, augmentation.draw(jax.random.key(0), 5, (90, 45)))
    found = augmentation.apply(jax.tree.map(jnp.asarray, changes), jnp.asarray(images))
    pad = augmentation.PAD
    for i in range(5):
        (row, column), gain = changes.shift[i], changes.gain[i]
        for r in range(2):
            padded = np.pad(images[r, i], ((pad, pad), (pad, pad), (0, 0)), mode="edge")
            cropped = padded[pad + row :, pad + column :][:90, :45].astype(np.float32)
            np.testing.assert_allclose(found[r, i], gain * cropped, rtol=1e-5)
    # Small images move by less: in one of 16 rows, a pixel may be all there is of a thing.
    for size, reach in (((84, 96), (4, 4)), ((63, 42), (3, 2)), ((16, 21), (0, 1))):
        many = jax.tree.map(np.asarray, augmentation.draw(jax.random.key(1), 20_000, size))
        rows, columns = (range(-n, n + 1) for n in reach)
        assert set(map(tuple, np.unique(many.shift, axis=0))) == {(i, j) for i in rows for j in columns}
    assert np.abs(many.gain - 1).max() <= 0.1 + 1e-6
    assert np.std(many.gain) == pytest.approx(0.05 * 0.9594, rel=0.02)
