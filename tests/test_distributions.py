"""Log-probabilities and entropies against the oracles, samples against their probabilities, actions against bounds."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import distributions, spaces, topology
from tests.support import oracles

KEY = jax.random.key(0)


def chi_square(samples: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic of integer samples; its mean is the number of possible values less 1."""
    counts = np.bincount(samples.ravel(), minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    possible = probabilities > 0
    expected = samples.size * probabilities[possible]
    return float(((counts[possible] - expected) ** 2 / expected).sum())


def draws(distribution: distributions.Distribution, outputs: np.ndarray, number: int, seed: int = 0) -> np.ndarray:
    """`number` samples for the same outputs [P], drawn as one batch, as acting does."""
    batch = jnp.broadcast_to(jnp.asarray(outputs, jnp.float32), (number, len(outputs)))
    return np.asarray(jax.jit(distribution.sample)(batch, jax.random.key(seed)))


# One choice.


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def _platform(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choices among a few are made column by column off CPU."""
    with topology.compiling_for(request.param):
        yield


def test_categorical_is_the_oracle() -> None:
    rng = np.random.default_rng(0)
    logits, actions = 5 * rng.normal(size=(6, 4, 5)), rng.integers(0, 5, (6, 4), np.int32)
    distribution = distributions.for_space(spaces.Discrete(5))
    assert distribution.num_outputs == 5
    assert not distribution.state_independent_scale
    x = jnp.asarray(logits, jnp.float32)
    expected = oracles.categorical_log_prob(logits, actions)
    np.testing.assert_allclose(distribution.log_prob(x, jnp.asarray(actions)), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(distribution.entropy(x), oracles.categorical_entropy(logits), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(distribution.mode(x), logits.argmax(-1))
    assert distribution.mode(x).dtype == jnp.int32


@pytest.mark.parametrize(
    "logits",
    [[0.0, 0.0, 0.0], [2.0, -1.0, 0.5, 0.0, -3.0], [-np.inf, 1.0, -np.inf, 0.0, 2.0, -np.inf], [700.0, 699.0], [3.0]],
)
def test_categorical_sampling_frequencies(logits: list[float]) -> None:
    samples = draws(distributions.categorical(len(logits)), np.array(logits), 100_000)
    assert samples.dtype == np.int32
    assert samples.shape == (100_000,)
    # Of at most 4 degrees of freedom: 23.5 is exceeded with probability 1e-4.
    assert chi_square(samples, oracles.categorical_probs(logits)) < 23.5


def test_categorical_rows_are_independent() -> None:
    """Each row takes its own logits and its own random number; another key, other numbers."""
    distribution = distributions.categorical(4)
    certain = jnp.asarray(np.where(np.eye(4), 0.0, -np.inf), jnp.float32)
    np.testing.assert_array_equal(distribution.sample(certain, KEY), np.arange(4))
    samples = draws(distribution, np.zeros(4), 20_000)
    assert chi_square(4 * samples[:-1] + samples[1:], np.full(16, 1 / 16)) < 44.3  # 15 degrees of freedom, 1e-4
    assert not np.array_equal(samples, draws(distribution, np.zeros(4), 20_000, seed=1))


@pytest.mark.parametrize("num_values", [3, 18, pytest.param(362, marks=pytest.mark.slow)])
def test_impossible_actions_are_never_drawn(num_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by the random numbers at the edges between actions, where the cumulated probabilities are rounded."""
    rng = np.random.default_rng(num_values)
    logits = np.where(rng.random((20, num_values)) < 0.5, -np.inf, rng.normal(size=(20, num_values)))
    logits[:, num_values // 2] = 0.0
    logits = np.repeat(logits.astype(np.float32), num_values, axis=0)
    cumulated = np.asarray(jax.jit(lambda x: jnp.cumsum(jax.nn.softmax(x), axis=-1))(jnp.asarray(logits)))
    action = np.tile(np.arange(num_values), 20)
    edge = (cumulated[np.arange(len(action)), action] / cumulated[:, -1]).astype(np.float32)
    for numbers in (edge, np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(1)), 0 * edge):
        numbers = np.clip(numbers, 0, np.float32(1 - 2**-23))
        monkeypatch.setattr(jax.random, "uniform", lambda key, shape=(), *_, x=numbers: jnp.asarray(x).reshape(shape))
        samples = np.asarray(distributions.categorical(num_values).sample(jnp.asarray(logits), KEY))
        assert np.isfinite(logits[np.arange(len(action)), samples]).all()


def test_a_few_choices_are_elementwise_off_cpu() -> None:
    """No reduction, which would be a kernel of its own: neither in acting nor in learning."""
    distribution = distributions.categorical(3)

    def everything(logits: jax.Array) -> tuple[jax.Array, ...]:
        action = distribution.sample(logits, KEY)
        return action, distribution.log_prob(logits, action), distribution.entropy(logits)

    found = {
        name
        for name in ("reduce_sum", "reduce_max", "argmax", "cumsum")
        if name in str(jax.make_jaxpr(everything)(jnp.zeros((4, 3))))
    }
    assert bool(found) == topology.on_cpu()


def test_impossible_actions_keep_numbers_finite() -> None:
    logits = jnp.asarray([[-np.inf, 1.0, 0.0], [0.0, -np.inf, -np.inf]], jnp.float32)
    distribution = distributions.categorical(3)
    np.testing.assert_allclose(distribution.entropy(logits), oracles.categorical_entropy(logits), rtol=1e-6, atol=1e-7)
    for function in (lambda x: distribution.log_prob(x, jnp.asarray([1, 0])), distribution.entropy):
        gradient = jax.grad(lambda x, f=function: jnp.sum(f(x)))(logits)
        assert np.isfinite(gradient).all()
    assert distribution.log_prob(logits, jnp.asarray([0, 2])).tolist() == [-np.inf, -np.inf]


def test_categorical_gradients() -> None:
    """d log p(a) / d logits = onehot(a) - p, and d H / d logits = -p (log p + H)."""
    logits = np.random.default_rng(1).normal(size=(4, 5))
    actions = np.array([0, 4, 2, 2])
    distribution, x = distributions.categorical(5), jnp.asarray(logits, jnp.float32)
    p = oracles.categorical_probs(logits)
    gradient = jax.grad(lambda x: jnp.sum(distribution.log_prob(x, jnp.asarray(actions))))(x)
    np.testing.assert_allclose(gradient, np.eye(5)[actions] - p, atol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(distribution.entropy(x)))(x)
    entropy = oracles.categorical_entropy(logits)[:, None]
    np.testing.assert_allclose(gradient, -p * (np.log(p) + entropy), atol=1e-6)


# Several choices.


@pytest.mark.slow
def test_multi_categorical() -> None:
    sizes = (3, 2, 4)
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(5, 2, 9))
    heads = np.split(logits, [3, 5], axis=-1)
    actions = np.stack([rng.integers(0, n, (5, 2), np.int32) for n in sizes], axis=-1)
    distribution = distributions.for_space(spaces.MultiDiscrete(sizes))
    assert distribution.num_outputs == 9
    x = jnp.asarray(logits, jnp.float32)
    expected = sum(oracles.categorical_log_prob(head, actions[..., i]) for i, head in enumerate(heads))
    np.testing.assert_allclose(distribution.log_prob(x, jnp.asarray(actions)), expected, rtol=1e-5)
    expected = sum(oracles.categorical_entropy(head) for head in heads)
    np.testing.assert_allclose(distribution.entropy(x), expected, rtol=1e-5)
    np.testing.assert_array_equal(distribution.mode(x), np.stack([head.argmax(-1) for head in heads], -1))

    samples = draws(distribution, logits[0, 0], 50_000)
    assert samples.shape == (50_000, 3)
    assert samples.dtype == np.int32
    for i, head in enumerate(heads):
        assert chi_square(samples[:, i], oracles.categorical_probs(head[0, 0])) < 21.1  # 3 degrees of freedom, 1e-4
    # Heads draw from different keys: the joint frequencies are the products.
    joint = np.multiply.outer(*(oracles.categorical_probs(heads[i][0, 0]) for i in (0, 1))).ravel()
    assert chi_square(2 * samples[:, 0] + samples[:, 1], joint) < 25.7  # 5 degrees of freedom, 1e-4
    assert spaces.MultiDiscrete(sizes).contains(np.asarray(distribution.to_action(jnp.asarray(samples[0]))))


# Gaussians.


def test_gaussian_is_the_oracle() -> None:
    rng = np.random.default_rng(3)
    mean, log_std, value = rng.normal(size=(3, 4, 2, 6))
    distribution = distributions.for_space(spaces.Box(2.0, 6.0, (2, 3)))
    assert distribution.num_outputs == 12
    assert distribution.state_independent_scale
    outputs = jnp.asarray(np.concatenate([mean, log_std], -1), jnp.float32)
    expected = oracles.gaussian_log_prob(mean, np.exp(log_std), value)
    np.testing.assert_allclose(distribution.log_prob(outputs, jnp.asarray(value, jnp.float32)), expected, rtol=1e-4)
    np.testing.assert_allclose(distribution.entropy(outputs), oracles.gaussian_entropy(np.exp(log_std)), rtol=1e-5)
    np.testing.assert_allclose(distribution.mode(outputs), mean, rtol=1e-6)


def test_gaussian_samples_are_not_clipped() -> None:
    distribution = distributions.for_space(spaces.Box(2.0, 6.0, (2,)))
    samples = draws(distribution, np.array([0.5, -2.0, np.log(2.0), np.log(0.1)]), 100_000)
    assert samples.shape == (100_000, 2)
    np.testing.assert_allclose(samples.mean(0), [0.5, -2.0], atol=0.03)
    np.testing.assert_allclose(samples.std(0), [2.0, 0.1], rtol=0.02)
    assert abs(np.corrcoef(samples.T)[0, 1]) < 0.02
    inside = np.abs(samples[:, 0]) <= 1.0
    assert 0.3 < inside.mean() < 0.45  # of a normal with mean 0.5 and deviation 2: 0.372


def test_gaussian_actions_lie_in_the_box() -> None:
    """-1, 0, 1 are the low end, the centre and the high end; what is beyond is clipped, not squashed."""
    space = spaces.Box(2.0, 6.0, (2, 3))
    distribution = distributions.for_space(space)
    values = np.array([[-1.0, -0.5, 0.0, 0.25, 1.0, 0.9], [-7.0, 7.0, -1.01, 1.01, 0.0, 1e6]], np.float32)
    actions = np.asarray(distribution.to_action(jnp.asarray(values)))
    expected = np.array([[2.0, 3.0, 4.0, 4.5, 6.0, 5.8], [2.0, 6.0, 2.0, 6.0, 4.0, 6.0]]).reshape(2, 2, 3)
    np.testing.assert_allclose(actions, expected, rtol=1e-6)
    assert all(space.contains(action) for action in actions)

    one = distributions.for_space(spaces.Box(-0.3, 0.1, ()))
    many = np.asarray(one.to_action(one.sample(jnp.zeros((1000, 2)), KEY)))
    assert many.shape == (1000,)
    assert many.min() >= np.float32(-0.3)
    assert many.max() <= np.float32(0.1)


# What cannot be.


@pytest.mark.parametrize("bounds", [(-np.inf, np.inf), (0.0, np.inf), (-np.inf, 0.0)])
def test_unbounded_boxes_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no finite bounds"):
        distributions.for_space(spaces.Box(*bounds, (2,)))


def test_a_dict_is_no_action_space() -> None:
    with pytest.raises(ValueError, match="use Discrete, MultiDiscrete or Box"):
        distributions.for_space(spaces.Dict({"a": spaces.Discrete(2)}))
