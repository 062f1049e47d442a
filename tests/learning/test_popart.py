"""PopArt: rlax's for one target, single steps for many, shards, and values that stay."""

import jax
import jax.numpy as jnp
import numpy as np

from podracer.learning import popart
from tests.support import harness

T, B, K, F = 6, 8, 3, 5
STEP_SIZE = 3e-2
RNG = np.random.default_rng(0)
TASK = jnp.asarray([0, 1, 2, 0, 1, 0, 1, 2])
SEEN = popart.Statistics(jnp.asarray([3.0, -200.0, 0.5]), jnp.asarray([4.0, 1e4, 1e-12]))


def update(seen, targets, mask, task):
    return popart.update(seen, targets, mask, task, STEP_SIZE)


ALONE = harness.alone(update)


def one_by_one(seen, targets, task):
    """Targets [N] in turn, in float64 and by the paper's equations 5 and 6 (mu and nu by beta)."""
    mean, second = np.array(seen.mean, np.float64), np.array(seen.variance, np.float64)
    second += mean**2
    for target, k in zip(np.asarray(targets, np.float64), task):
        mean[k] += STEP_SIZE * (target - mean[k])
        second[k] += STEP_SIZE * (target**2 - second[k])
    return mean, second - mean**2


def test_one_target_is_rlaxs() -> None:
    """Statistics and weights after one target, of each task in turn."""
    import rlax  # here, because it pulls in distrax and tfp, whose warnings pytest filters only while a test runs

    start, step = rlax.popart(K, STEP_SIZE, popart.LOWEST, popart.HIGHEST)
    theirs, seen = start(), popart.initial(K)
    head = {"kernel": jnp.asarray(RNG.normal(size=(F, K)), jnp.float32), "bias": jnp.asarray([0.1, -2.0, 0.0])}
    linear = {"w": head["kernel"], "b": head["bias"]}
    for target, k in ((50.0, 1), (-0.3, 2), (50.0, 1), (7.0, 0), (900.0, 1)):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            linear, theirs = step(linear, theirs, jnp.asarray([target]), jnp.asarray([k]))
        before = seen
        # A lane for each task, of which only one has a target.
        targets, mask = jnp.full((1, K), target), jnp.asarray(np.eye(K, dtype=np.float32)[None, k])
        seen = ALONE(before, targets, mask, jnp.arange(K))
        head = popart.preserve(head, before, seen)
    np.testing.assert_allclose(seen.mean, theirs.shift, rtol=1e-5)
    np.testing.assert_allclose(seen.scale, theirs.scale, rtol=1e-4)
    np.testing.assert_allclose(head["kernel"], linear["w"], rtol=1e-4)
    np.testing.assert_allclose(head["bias"], linear["b"], rtol=1e-4, atol=1e-5)


def test_equal_targets_are_as_many_single_steps() -> None:
    """However many each task has; a task without one keeps its statistics."""
    of_task = jnp.asarray([20.0, -150.0, 99.0])
    targets = jnp.broadcast_to(of_task[TASK][None], (T, B))
    mask = jnp.asarray((RNG.random((T, B)) > 0.3) & (np.asarray(TASK) != 2), jnp.float32)
    after = ALONE(SEEN, targets, mask, TASK)
    row, lane = np.nonzero(np.asarray(mask))
    mean, variance = one_by_one(SEEN, np.asarray(targets)[row, lane], np.asarray(TASK)[lane])
    np.testing.assert_allclose(after.mean[:2], mean[:2], rtol=1e-5)
    np.testing.assert_allclose(after.variance[:2], variance[:2], rtol=1e-4)
    harness.assert_same(jax.tree.map(lambda x: x[2], after), jax.tree.map(lambda x: x[2], SEEN))


def test_statistics_are_of_all_shards() -> None:
    targets = jnp.asarray(RNG.normal(size=(T, B)) * 30.0 + 1e4, jnp.float32)
    mask = jnp.asarray(RNG.random((T, B)) > 0.3, jnp.float32)
    whole = ALONE(SEEN, targets, mask, TASK)
    np.testing.assert_array_less(SEEN.mean, whole.mean)
    for num_shards in (2, 8):
        split = lambda x, n=num_shards: jnp.stack(jnp.split(x, n, axis=-1))  # noqa: E731
        shards = harness.over_shards(update, SEEN, split(targets), split(mask), split(TASK))
        for x in shards:
            np.testing.assert_array_equal(x, x[:1].repeat(num_shards, 0))
        np.testing.assert_allclose(shards.mean[0], whole.mean, rtol=1e-5)
        np.testing.assert_allclose(shards.variance[0], whole.variance, rtol=1e-4)


def test_values_stay_where_statistics_move() -> None:
    """In all directions, through far smaller and far larger scales, and beyond their limits."""
    features = jnp.asarray(RNG.normal(size=(T, B, F)), jnp.float32)
    head = {"kernel": jnp.asarray(RNG.normal(size=(F, K)), jnp.float32), "bias": jnp.asarray([0.1, -2.0, 0.0])}
    outputs = lambda head: popart.select(features @ head["kernel"] + head["bias"][None, None], TASK)  # noqa: E731
    before = popart.unnormalize(outputs(head), SEEN, TASK)
    for after in (
        popart.Statistics(jnp.asarray([0.0, 100.0, 5e-5]), jnp.asarray([1e-2, 1.0, 1e-7])),
        popart.Statistics(jnp.asarray([-9.0, -200.5, 1.0]), jnp.asarray([1e4, 1e16, 1.0])),
        popart.initial(K),
    ):
        values = popart.unnormalize(outputs(popart.preserve(head, SEEN, after)), after, TASK)
        scale = jnp.maximum(jnp.maximum(SEEN.scale, after.scale), jnp.abs(after.mean - SEEN.mean))[TASK]
        np.testing.assert_allclose((values - before) / scale[None], 0.0, atol=1e-5)
    np.testing.assert_allclose(popart.Statistics(jnp.zeros(2), jnp.asarray([-1.0, 1e30])).scale, [1e-4, 1e6])
    # Statistics that stay leave the head bit by bit.
    harness.assert_same(popart.preserve(head, SEEN, SEEN), head)


def test_a_scale_is_kept_beside_a_large_mean() -> None:
    """float32's second moment of 1e6 would have no place for a variance of 1."""
    seen = popart.initial(1)
    targets = jnp.asarray(1e6 + RNG.normal(size=(T, B)), jnp.float32)
    for _ in range(40):
        seen = ALONE(seen, targets, jnp.ones((T, B)), jnp.zeros(B, jnp.int32))
    np.testing.assert_allclose(seen.scale, np.std(np.asarray(targets, np.float64)), rtol=0.05)
