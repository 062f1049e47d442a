"""One update against its parts written out: the step, the count, the target network, and metrics of minibatches."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.learning import gradients, minibatches, optimizer, update
from podracer.types import LearnerState
from tests.support import harness

SGD = optimizer.make("sgd")
B = 12
KEY = jax.random.key(0)


def learner_of(aux: Any = ()) -> LearnerState:
    hyper = {"learning_rate": jnp.float32(0.5), "max_grad_norm": jnp.float32(jnp.inf)}
    return update.init({"a": jnp.float32(1.0), "b": jnp.ones(2)}, SGD, hyper, aux)


def loss(params: Any, batch: jax.Array) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
    """The gradient is the sum of a batch [n, 2], halves of it for `b`."""
    outputs = batch[:, 0] * params["a"] + 0.5 * jnp.sum(batch * params["b"][None], axis=1)
    total = jnp.sum(outputs)
    return total, ({"loss/total": total, "count": jnp.float32(len(batch))}, 2.0 * outputs)


def batch() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, B, 2)).astype(np.float32)


def on_shards(function: Any, *arguments: Any) -> Any:
    """The results [2, ...] of two shards."""
    return jax.jit(jax.vmap(jax.vmap(function, axis_name="shard"), axis_name="data"))(
        *jax.tree.map(lambda x: x[None], arguments)
    )


@pytest.mark.parametrize("rows_in_cache", [2700, 3])
def test_an_update_is_a_step_along_the_sum_over_all_shards(rows_in_cache: int) -> None:
    """However many samples go through the network at a time; outputs are those of every sample, in order."""
    x, learner = batch(), jax.tree.map(lambda x: jnp.stack([x, x]), learner_of())

    def apply(learner: LearnerState, x: jax.Array) -> Any:
        return update.apply(loss, learner, x, optimizer=SGD, learning_rate=learner.hyper["learning_rate"])

    with mock.patch.dict(gradients.ROWS_IN_CACHE, {"vectors": rows_in_cache}):
        new, metrics, outputs = jax.tree.map(lambda x: np.asarray(x[0]), on_shards(apply, learner, jnp.asarray(x)))
    gradient = np.array([x[..., 0].sum(), *0.5 * x.sum(axis=(0, 1))])
    for i in range(2):
        np.testing.assert_allclose(new.params["a"][i], 1.0 - 0.5 * gradient[0], rtol=1e-5)
        np.testing.assert_allclose(new.params["b"][i], 1.0 - 0.5 * gradient[1:], rtol=1e-5)
        np.testing.assert_allclose(outputs[i], 2.0 * (x[i, :, 0] + 0.5 * x[i].sum(axis=1)), rtol=1e-5)
    np.testing.assert_array_equal(new.num_updates, 1)
    np.testing.assert_array_equal(metrics["count"], 2 * B)
    np.testing.assert_allclose(metrics["grad/norm"], np.linalg.norm(gradient), rtol=1e-5)


def test_a_loss_that_has_to_see_all_samples_does() -> None:
    sizes = []

    def noting(params: Any, batch: jax.Array) -> Any:
        sizes.append(len(batch))
        return loss(params, batch)

    def apply(learner: LearnerState, x: jax.Array, together: bool) -> Any:
        return update.apply(noting, learner, x, optimizer=SGD, learning_rate=jnp.float32(1.0), together=together)

    with mock.patch.dict(gradients.ROWS_IN_CACHE, {"vectors": 3}):
        for together, size in ((True, B), (False, 3)):
            sizes.clear()
            harness.over_axes(lambda *x, together=together: apply(*x, together))(
                *jax.tree.map(lambda x: jnp.asarray(x)[None, None], (learner_of(), batch()[0]))
            )
            assert set(sizes) == {size}


def test_the_target_network_is_the_network_every_few_updates() -> None:
    learner, targets, params = learner_of(aux={"a": jnp.float32(7.0), "b": jnp.zeros(2)}), [], []
    step = harness.alone(
        lambda learner, x: update.apply(loss, learner, x, optimizer=SGD, learning_rate=jnp.float32(0.1), copy_every=3)[
            0
        ]
    )
    for _ in range(7):
        learner = step(learner, batch()[0])
        targets.append(float(learner.aux["a"]))
        params.append(float(learner.params["a"]))
    assert targets == [7.0, 7.0, params[2], params[2], params[2], params[5], params[5]]


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0.0, [0.5, 0.5, 0.5, 0.5, 0.5]),
        ("linear", 0.0, [0.5, 0.375, 0.25, 0.125, 0.0]),
        ("cosine", 0.0, [0.5, 0.25 + 0.5**2.5, 0.25, 0.25 - 0.5**2.5, 0.0]),
        ("constant", 0.5, [0.0, 0.25, 0.5, 0.5, 0.5]),
        ("linear", 0.5, [0.0, 0.25, 0.5, 0.25, 0.0]),
        ("cosine", 0.5, [0.0, 0.25, 0.5, 0.25, 0.0]),
        ("linear", 1.0, [0.0, 0.125, 0.25, 0.375, 0.5]),
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule: Any, warmup: float, expected: list[float]) -> None:
    """After the warm-up, the schedule takes what is left of the run."""
    rates = [update.learning_rate(learner_of(), jnp.float32(x), schedule, warmup) for x in np.linspace(0, 1, 5)]
    np.testing.assert_allclose(rates, expected, atol=1e-7)


def test_an_optimiser_with_a_rate_of_its_own_has_none_of_the_agent() -> None:
    without = learner_of()._replace(hyper={})
    assert update.learning_rate(without, jnp.float32(0.5), "constant") is None
    assert update.rate_metric(None) == {}


class Units(NamedTuple):
    """Units of one row each."""

    x: jax.Array
    weight: jax.Array
    core: tuple[()] = ()


@pytest.mark.parametrize("rows_in_cache", [2700, 2])
def test_minibatches_are_steps_one_after_the_other(rows_in_cache: int) -> None:
    """Against the same steps written out; metrics are means over minibatches, whatever the order of their names."""
    x = batch()[0]
    order = minibatches.minibatches(KEY, B, 2, 3)
    weights = jnp.arange(6, dtype=jnp.float32)

    def weighted(params: Any, minibatch: Units) -> Any:
        x, weight, _ = minibatch
        square = jnp.sum(weight[..., None] * jnp.square(x - params["b"][None, None]))
        return square, ({"z": square, "a": jnp.sum(weight)}, ())

    def run(learner: LearnerState, x: jax.Array) -> Any:
        take = lambda units, weight: Units(x[None, units], jnp.broadcast_to(weight, (1, *units.shape)))  # noqa: E731
        how = {"optimizer": SGD, "learning_rate": jnp.float32(0.01), "observation": x[None]}
        return minibatches.run(weighted, learner, take, order, weights, **how)

    with mock.patch.dict(gradients.ROWS_IN_CACHE, {"narrow": rows_in_cache}):
        new, metrics = harness.over_axes(run)(*jax.tree.map(lambda x: jnp.asarray(x)[None, None], (learner_of(), x)))
    b, squares, norms = np.ones(2), [], []
    for units, weight in zip(np.asarray(order), range(6)):
        squares.append(weight * np.sum((x[units] - b) ** 2))
        gradient = -2 * weight * np.sum(x[units] - b, axis=0)
        norms.append(np.linalg.norm(gradient))
        b = b - 0.01 * gradient
    np.testing.assert_allclose(new.params["b"][0, 0], b, rtol=1e-5)
    np.testing.assert_array_equal(new.num_updates, 1)
    np.testing.assert_allclose(metrics["z"], np.mean(squares), rtol=1e-5)
    np.testing.assert_allclose(metrics["a"], 4 * np.mean(range(6)), rtol=1e-6)
    np.testing.assert_allclose(metrics["grad/norm"], np.mean(norms), rtol=1e-5)
