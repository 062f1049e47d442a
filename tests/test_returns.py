"""Returns against the oracles, rlax and finite differences."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import returns, topology
from tests.support import counting, harness, oracles

GAMMA = 0.9
T = 7
PARAMETERS = ("lambda_", "rho_bar", "c_bar", "rho_bar_pg")
SETTINGS = [
    (1.0, 1.0, 1.0, 1.0),
    (0.9, 1.0, 1.0, 1.0),
    (0.7, 1.5, 0.8, 2.0),
    (0.95, 0.6, 1.3, 0.9),
    (1.0, np.inf, np.inf, np.inf),
    (0.0, 1.0, 1.0, 1.0),
    (1.0, 0.0, 1.0, 1.0),
]


def lanes(seed: int = 0) -> dict[str, np.ndarray]:
    """One lane for each kind of end at each row, every pair of them in a row, and random ones; oracle's arguments."""
    kinds = ("termination", "truncation", "break", "termination then break")
    B = len(kinds) * (T + 1) + 16
    first, last, discount = harness.ends(seed, T, B)
    for column in range(len(kinds) * (T + 1)):
        kind, row = kinds[column % len(kinds)], column // len(kinds)
        first[:, column], last[:, column], discount[:, column] = False, False, 1.0
        if kind == "break":
            first[row, column] = True
            continue
        discount[row, column] = 1.0 if kind == "truncation" else 0.0
        first[row + 1 : row + 2, column] = True
        first[row + 2 : row + 3, column] = kind == "termination then break"
    rng = np.random.default_rng(seed)
    return {
        "values": rng.normal(size=(T + 1, B)),
        "rewards": rng.normal(size=(T, B)),
        "discounts": GAMMA * discount[1:],
        "rho": np.exp(rng.normal(size=(T, B))),
        "first": first,
    }


def step_of(inputs: dict[str, Any]) -> returns.Transitions:
    mask = 1.0 - np.asarray(inputs["first"][1:], np.float32)
    return returns.Transitions(*(jnp.asarray(x, jnp.float32) for x in (inputs["rewards"], inputs["discounts"], mask)))


@jax.jit
def vtrace(values: jax.Array, step: returns.Transitions, rho: jax.Array, numbers: jax.Array) -> returns.VTraceReturns:
    return returns.vtrace(values, step, rho, **dict(zip(PARAMETERS, numbers)))


gae = jax.jit(returns.gae)


def ours(inputs: dict[str, Any], numbers: tuple[float, ...]) -> returns.VTraceReturns:
    values, rho = (jnp.asarray(inputs[name], jnp.float32) for name in ("values", "rho"))
    return vtrace(values, step_of(inputs), rho, jnp.asarray(numbers, jnp.float32))


def in_masked_rows(inputs: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """The same with garbage in everything that a masked transition holds."""
    rng = np.random.default_rng(seed)
    masked = inputs["first"][1:]
    garbage = {
        "rewards": 1e3 * rng.normal(size=masked.shape),
        "discounts": rng.random(masked.shape),
        "rho": 1e3 * rng.random(masked.shape),
    }
    return inputs | {name: np.where(masked, garbage[name], inputs[name]) for name in garbage}


# V-trace.


@pytest.mark.parametrize("numbers", SETTINGS)
def test_vtrace_is_the_oracle(numbers: tuple[float, ...]) -> None:
    inputs = lanes()
    targets, advantages = oracles.vtrace(**inputs, **dict(zip(PARAMETERS, numbers)))
    returns = ours(inputs, numbers)
    np.testing.assert_allclose(returns.targets, targets, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(returns.advantages, advantages, rtol=1e-4, atol=1e-4)
    masked = inputs["first"][1:]
    np.testing.assert_array_equal(np.asarray(returns.targets)[masked], inputs["values"][:-1].astype(np.float32)[masked])
    assert not np.asarray(returns.advantages)[masked].any()


def test_vtrace_without_a_mask_is_rlax() -> None:
    """rlax knows neither c_bar nor masks; its advantages differ from the paper's unless lambda is 1."""
    import rlax  # here, because it pulls in distrax and tfp, whose warnings pytest filters only while a test runs

    inputs = lanes()
    inputs["first"] = np.zeros_like(inputs["first"])
    v, r, g, rho = (jnp.asarray(inputs[n], jnp.float32) for n in ("values", "rewards", "discounts", "rho"))
    for numbers in ((1.0, 1.0, 1.0, 1.0), (1.0, 1.5, 1.0, 0.7), (0.8, 1.2, 1.0, 1.0)):
        lambda_, rho_bar, _, rho_bar_pg = numbers
        function = functools.partial(
            rlax.vtrace_td_error_and_advantage,
            lambda_=lambda_,
            clip_rho_threshold=rho_bar,
            clip_pg_rho_threshold=rho_bar_pg,
        )
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            theirs = jax.vmap(function, in_axes=1, out_axes=1)(v[:-1], v[1:], r, g, rho)
        returns = ours(inputs, numbers)
        np.testing.assert_allclose(returns.targets - v[:-1], theirs.errors, rtol=1e-4, atol=1e-5)
        if lambda_ == 1.0:
            np.testing.assert_allclose(returns.advantages, theirs.pg_advantage, rtol=1e-4, atol=1e-5)


def test_vtrace_on_policy_is_the_n_step_return() -> None:
    inputs = lanes(1)
    inputs["rho"] = np.ones_like(inputs["rho"])
    returns = ours(inputs, (1.0, 1.0, 1.0, 1.0))
    expected = oracles.n_step_return(**{name: value for name, value in inputs.items() if name != "rho"})
    np.testing.assert_allclose(returns.targets, expected, rtol=1e-4, atol=1e-5)


def test_nothing_in_a_masked_transition_matters() -> None:
    inputs = lanes(2)
    spoiled = in_masked_rows(inputs, 3)
    assert not np.array_equal(inputs["rewards"], spoiled["rewards"])
    harness.assert_same(ours(inputs, SETTINGS[2]), ours(spoiled, SETTINGS[2]))
    values = jnp.asarray(inputs["values"], jnp.float32)
    harness.assert_same(gae(values, step_of(inputs), 0.9), gae(values, step_of(spoiled), 0.9))


@pytest.mark.parametrize("weights_of", ["targets", "advantages"])
def test_gradients_reach_every_hyperparameter(weights_of: str) -> None:
    """The derivative by gamma, lambda and the three clips is the oracle's finite difference, and is not 0."""
    inputs = lanes(4)
    alive = inputs["discounts"] / GAMMA
    weights = np.random.default_rng(5).normal(size=inputs["rewards"].shape)
    at = np.array([GAMMA, 0.8, 1.1, 0.9, 1.3])

    def oracle(numbers: np.ndarray) -> float:
        gamma, *others = numbers
        results = oracles.vtrace(**(inputs | {"discounts": gamma * alive}), **dict(zip(PARAMETERS, others)))
        return float((weights * results[weights_of == "advantages"]).sum())

    def total(numbers: jax.Array) -> jax.Array:
        step = step_of(inputs)._replace(discount=numbers[0] * jnp.asarray(alive, jnp.float32))
        values, rho = (jnp.asarray(inputs[name], jnp.float32) for name in ("values", "rho"))
        results = returns.vtrace(values, step, rho, **dict(zip(PARAMETERS, numbers[1:])))
        return jnp.sum(jnp.asarray(weights, jnp.float32) * getattr(results, weights_of))

    gradient = np.asarray(jax.jit(jax.grad(total))(jnp.asarray(at, jnp.float32)))
    width = 1e-4
    expected = [(oracle(at + width * e) - oracle(at - width * e)) / (2 * width) for e in np.eye(5)]
    np.testing.assert_allclose(gradient, expected, rtol=1e-2, atol=1e-2)
    needed = 5 if weights_of == "advantages" else 4  # the targets do not know rho_bar_pg
    assert (np.abs(gradient[:needed]) > 1e-2).all()


# Generalised advantages.


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 0.95, 1.0])
def test_gae_is_the_oracle(lambda_: float) -> None:
    inputs = lanes(6)
    expected = oracles.gae(**{name: value for name, value in inputs.items() if name != "rho"}, lambda_=lambda_)
    result = np.asarray(gae(jnp.asarray(inputs["values"], jnp.float32), step_of(inputs), lambda_))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    assert not result[inputs["first"][1:]].any()


def test_gae_without_a_mask_is_rlax() -> None:
    import rlax

    inputs = lanes(7)
    inputs["first"] = np.zeros_like(inputs["first"])
    v, r, g = (jnp.asarray(inputs[name], jnp.float32) for name in ("values", "rewards", "discounts"))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        estimate = jax.vmap(rlax.truncated_generalized_advantage_estimation, in_axes=(1, 1, None, 1), out_axes=1)
        theirs = estimate(r, g, 0.8, v)
    np.testing.assert_allclose(gae(v, step_of(inputs), 0.8), theirs, rtol=1e-4, atol=1e-5)


def test_gae_gradient_by_gamma_and_lambda() -> None:
    inputs = lanes(8)
    alive = inputs["discounts"] / GAMMA
    others = {name: inputs[name] for name in ("values", "rewards", "first")}

    def oracle(gamma: float, lambda_: float) -> float:
        return float(oracles.gae(**others, discounts=gamma * alive, lambda_=lambda_).sum())

    def total(gamma: jax.Array, lambda_: jax.Array) -> jax.Array:
        step = step_of(inputs)._replace(discount=gamma * jnp.asarray(alive, jnp.float32))
        return jnp.sum(returns.gae(jnp.asarray(inputs["values"], jnp.float32), step, lambda_))

    gradient = jax.jit(jax.grad(total, (0, 1)))(jnp.float32(GAMMA), jnp.float32(0.8))
    width = 1e-4
    expected = [
        (oracle(GAMMA + width, 0.8) - oracle(GAMMA - width, 0.8)) / (2 * width),
        (oracle(GAMMA, 0.8 + width) - oracle(GAMMA, 0.8 - width)) / (2 * width),
    ]
    np.testing.assert_allclose(gradient, expected, rtol=1e-2)
    assert np.abs(gradient).min() > 0.1


# Two players.


def test_signed_discounts_are_self_play() -> None:
    """Every return is the one that player 0 sees, who counts the other's rewards and values times -1."""
    inputs, n, numbers = lanes(11), 3, SETTINGS[2]
    # Who moves is random, so that turns are kept, too.
    sign = np.random.default_rng(12).choice([-1.0, 1.0], inputs["first"].shape)
    signed = inputs | {"discounts": inputs["discounts"] * sign[:-1] * sign[1:]}
    seen = inputs | {"values": inputs["values"] * sign, "rewards": inputs["rewards"] * sign[:-1]}
    step, values = step_of(signed), jnp.asarray(signed["values"], jnp.float32)
    targets, advantages = oracles.vtrace(**seen, **dict(zip(PARAMETERS, numbers)))
    del seen["rho"]
    found = ours(signed, numbers)
    pairs = [
        (found.targets, targets),
        (found.advantages, advantages),
        (gae(values, step, 0.9), oracles.gae(**seen, lambda_=0.9)),
        (
            jax.jit(lambda values, step: returns.n_step(values, step, n))(values, step),
            oracles.n_step_return(**seen, n=n),
        ),
    ]
    for result, expected in pairs:
        np.testing.assert_allclose(result, sign[:-1] * expected, rtol=1e-4, atol=1e-4)


# Transitions of n steps.


def n_step_by_loop(step: returns.Transitions, n: int, start: int, lane: int) -> tuple[float, float, int]:
    """R, G and m of the sequence that begins at a row of a lane."""
    reward, discount, mask = (np.asarray(x, np.float64)[start:, lane] for x in step)
    m = next((i for i in range(1, n) if not mask[i]), n)
    total, product = 0.0, 1.0
    for i in range(m):
        total += product * reward[i]
        product *= discount[i]
    return total, product, m


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_transitions_of_n_steps(n: int) -> None:
    """Ends of all kinds at every offset: as a loop says, and R + G V(row m) is `n_step`'s return from row 0."""
    inputs = lanes()
    step = step_of(inputs)
    values = jnp.asarray(inputs["values"], jnp.float32)
    whole = jax.jit(lambda step: returns.n_step_transition(step, n))
    horizon = jax.jit(lambda values, step: returns.n_step(values, step, n)[0])
    lengths = set()
    for start in range(T - n + 1):
        rows = slice(start, start + n)
        part = jax.tree.map(lambda x, rows=rows: x[rows], step)
        real = np.asarray(part.mask[0]) > 0
        found = jax.tree.map(np.asarray, whole(part))
        assert [x.dtype for x in found] == [np.float32, np.float32, np.int32]
        for lane in np.flatnonzero(real):
            expected = n_step_by_loop(step, n, start, int(lane))
            np.testing.assert_allclose([x[lane] for x in found], expected, rtol=1e-5, atol=1e-6)
        behind = values[start : start + n + 1]
        bootstrap = np.take_along_axis(np.asarray(behind), found.length[None], 0)[0]
        returned = np.asarray(horizon(behind, part))
        np.testing.assert_allclose(
            (found.reward + found.discount * bootstrap)[real], returned[real], rtol=1e-5, atol=1e-6
        )
        lengths |= set(found.length[real].tolist())
    assert lengths == set(range(1, n + 1))


def test_longer_rows_change_nothing_of_n_steps() -> None:
    step = step_of(lanes(3))
    one = returns.n_step_transition(step, 3)
    harness.assert_same(one, returns.n_step_transition(jax.tree.map(lambda x: x[:3], step), 3))


# Alignment.


def test_transitions_are_aligned() -> None:
    """Row t+1 of the counting environment says what action t led to."""
    trajectory = next(counting.collect(counting.CountingEnvironment(), 12, 3))
    step = returns.transitions(jax.tree.map(jnp.asarray, trajectory))
    rows = np.asarray(trajectory.timesteps.observation)[..., 1]
    assert [x.dtype for x in step] == [jnp.float32] * 3
    np.testing.assert_array_equal(step.reward, rows[1:])
    np.testing.assert_array_equal(step.mask, rows[1:] == rows[:-1] + 1)
    np.testing.assert_array_equal(step.discount, trajectory.timesteps.discount[1:])


def test_discounted_sum() -> None:
    rng = np.random.default_rng(9)
    x, decay = rng.normal(size=(5, 2)), rng.random((5, 2))
    expected = [sum(np.prod(decay[s:t], axis=0) * x[t] for t in range(s, 5)) for s in range(5)]
    result = jax.jit(returns.discounted_sum)(jnp.asarray(x, jnp.float32), jnp.asarray(decay, jnp.float32))
    np.testing.assert_allclose(result, np.array(expected), rtol=1e-5)


@pytest.mark.parametrize("T", [1, 20, 64, 65, 128])
def test_unrolled_off_cpu_the_sums_stay(T: int) -> None:
    """The same operations in the same order, but for products and sums that a compiler joins into one rounding."""
    x, decay = jax.random.uniform(jax.random.key(0), (2, T, 5))
    expected = jax.jit(returns.discounted_sum)(x, decay)
    with topology.compiling_for("gpu"):
        unrolled = jax.jit(lambda *x: returns.discounted_sum(*x))
        text = str(jax.make_jaxpr(lambda *x: returns.discounted_sum(*x))(x, decay))
        np.testing.assert_allclose(unrolled(x, decay), expected, rtol=1e-6, atol=1e-6)
    assert f"unroll={T if T <= 64 else 16}" in text


@pytest.mark.parametrize("wrong", ["values", "discount", "ratios", "dtype"])
def test_rows_that_do_not_fit_are_refused(wrong: str) -> None:
    """Ratios of one lane would be taken for those of all, and rows beyond the last bootstrap for the value there."""
    values, ratios, x = jnp.zeros((T + 1, 3)), jnp.ones((T, 3)), jnp.ones((T, 3))
    step = returns.Transitions(x, x, x)
    jax.eval_shape(returns.vtrace, values, step, ratios)
    values = {"values": jnp.zeros((T, 3)), "dtype": values.astype(jnp.int32)}.get(wrong, values)
    ratios = ratios[:, :1] if wrong == "ratios" else ratios
    step = step._replace(discount=x[:1]) if wrong == "discount" else step
    with pytest.raises(AssertionError):
        jax.eval_shape(returns.vtrace, values, step, ratios)
    if wrong != "ratios":
        with pytest.raises(AssertionError):
            jax.eval_shape(lambda values, step: returns.n_step(values, step, 2), values, step)
        with pytest.raises(AssertionError):
            jax.eval_shape(lambda values, step: returns.gae(values, step, 0.9), values, step)
