"""Oracles by identities, by hand, and against rlax and optax."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import oracles

GAMMA = 0.9


def random_inputs(seed: int, T: int = 7, B: int = 4, terminate: float = 0.3) -> dict[str, np.ndarray]:
    """Random values [T+1, B], rewards, discounts, rho [T, B], and `first` [T+1, B] without a masked transition."""
    rng = np.random.default_rng(seed)
    return {
        "values": rng.normal(size=(T + 1, B)),
        "rewards": rng.normal(size=(T, B)),
        "discounts": GAMMA * (rng.random((T, B)) > terminate),
        "rho": np.exp(rng.normal(size=(T, B))),
        "first": np.zeros((T + 1, B), bool),
    }


def without(inputs: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in inputs.items() if name not in names}


def over_lanes(function: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """`function([T] ...)` for every lane of [T, B] arrays in float32; rlax itself promotes bool to float32."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        batched = jax.jit(jax.vmap(function, in_axes=1, out_axes=1))
        return jax.tree.map(np.asarray, batched(*(jnp.asarray(array, jnp.float32) for array in arrays)))


@pytest.fixture(scope="module")
def rlax() -> Any:
    import rlax  # here, because it pulls in distrax and tfp, whose warnings pytest filters only while a test runs

    return rlax


# Return oracles: identities.


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ([0, 0, 0, 0], [(0, 3)]),
        ([1, 0, 0, 0], [(0, 3)]),
        ([1, 1, 0, 1], [(0, 0), (1, 2), (3, 3)]),
        ([0, 0, 1, 0], [(0, 1), (2, 3)]),
        ([1], [(0, 0)]),
    ],
)
def test_segments(first: list[int], expected: list[tuple[int, int]]) -> None:
    assert oracles.segments(np.array(first)) == expected


def test_vtrace_on_policy_is_the_n_step_return() -> None:
    inputs = random_inputs(0)
    inputs["rho"] = np.ones_like(inputs["rho"])
    inputs["first"][3] = [True, False, True, False]
    targets, advantages = oracles.vtrace(**inputs)
    np.testing.assert_allclose(targets, oracles.n_step_return(**without(inputs, "rho")), atol=1e-12)
    np.testing.assert_allclose(advantages, targets - inputs["values"][:-1], atol=1e-12)


def test_vtrace_does_nothing_without_ratios() -> None:
    inputs = random_inputs(1)
    targets, advantages = oracles.vtrace(**inputs, rho_bar=0.0)
    np.testing.assert_array_equal(targets, inputs["values"][:-1])
    one_step = inputs["rewards"] + inputs["discounts"] * inputs["values"][1:] - inputs["values"][:-1]
    np.testing.assert_allclose(advantages, np.minimum(1.0, inputs["rho"]) * one_step, atol=1e-12)
    np.testing.assert_array_equal(oracles.vtrace(**inputs, rho_bar_pg=0.0)[1], 0.0)


def test_vtrace_without_traces_is_one_step() -> None:
    inputs = random_inputs(2)
    one_step = inputs["rewards"] + inputs["discounts"] * inputs["values"][1:] - inputs["values"][:-1]
    expected = inputs["values"][:-1] + np.minimum(2.0, inputs["rho"]) * one_step
    for options in ({"lambda_": 0.0}, {"c_bar": 0.0}):
        np.testing.assert_allclose(oracles.vtrace(**inputs, rho_bar=2.0, **options)[0], expected, atol=1e-12)


@pytest.mark.parametrize("lambda_", [0.0, 0.4, 1.0])
def test_on_policy_vtrace_is_gae(lambda_: float) -> None:
    inputs = random_inputs(3)
    inputs["rho"] = np.ones_like(inputs["rho"])
    inputs["first"][5, :2] = True
    gae = oracles.gae(**without(inputs, "rho"), lambda_=lambda_)
    targets, _ = oracles.vtrace(**inputs, lambda_=lambda_)
    _, mixed = oracles.vtrace(**inputs, lambda_=lambda_, mix_lambda_in_pg=True)
    np.testing.assert_allclose(targets - inputs["values"][:-1], gae, atol=1e-12)
    np.testing.assert_allclose(mixed, gae, atol=1e-12)


def test_gae_extremes() -> None:
    inputs = without(random_inputs(4), "rho")
    inputs["first"][2, 1:] = True
    values = inputs["values"][:-1]
    np.testing.assert_allclose(oracles.gae(**inputs, lambda_=1.0), oracles.n_step_return(**inputs) - values, atol=1e-12)
    np.testing.assert_allclose(
        oracles.gae(**inputs, lambda_=0.0), oracles.n_step_return(**inputs, n=1) - values, atol=1e-12
    )


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1e-3, 1e-3), (0.5, 0.3), (1.0, 1.0), (2.0, 1.0), (1e3, 1e3)])
def test_vtrace_fixed_point(rho_bar: float, c_bar: float) -> None:
    """E_mu[v_0] = V, if V is the value of pi_rho_bar(a) ~ min(rho_bar mu(a), pi(a)) (equation 3).

    That is V^pi without clipping, and V^mu in the limit rho_bar -> 0.
    """
    rng = np.random.default_rng(5)
    X, A, T = 3, 2, 4
    pi, mu = rng.dirichlet(np.ones(A), X), rng.dirichlet(np.ones(A), X)
    following, reward = rng.integers(0, X, (X, A)), rng.normal(size=(X, A))
    policy = np.minimum(rho_bar * mu, pi)
    policy /= policy.sum(axis=1, keepdims=True)
    if rho_bar < 0.01:
        np.testing.assert_allclose(policy, mu)
    if rho_bar > 100:
        np.testing.assert_allclose(policy, pi)
    transition = np.zeros((X, X))
    np.add.at(transition, (np.arange(X)[:, None], following), policy)
    value = np.linalg.solve(np.eye(X) - GAMMA * transition, (policy * reward).sum(axis=1))

    sequences = np.array(list(itertools.product(range(A), repeat=T))).T  # [T, A^T]
    for start in range(X):
        states = [np.full(A**T, start)]
        for actions in sequences:
            states.append(following[states[-1], actions])
        states = np.array(states)
        taken = (states[:-1], sequences)
        targets, _ = oracles.vtrace(
            value[states],
            reward[taken],
            np.full((T, A**T), GAMMA),
            pi[taken] / mu[taken],
            np.zeros((T + 1, A**T), bool),
            rho_bar=rho_bar,
            c_bar=c_bar,
        )
        np.testing.assert_allclose((np.prod(mu[taken], axis=0) * targets[0]).sum(), value[start], atol=1e-12)


# Return oracles: by hand.


def test_vtrace_by_hand() -> None:
    """gamma 1/2, rho = (2, 1/2, 3), rho_bar 2, c_bar 1, rho_bar_pg 1."""
    column = np.array([1.0, 2.0, 4.0, 8.0])[:, None]
    targets, advantages = oracles.vtrace(
        column,
        np.ones((3, 1)),
        np.full((3, 1), 0.5),
        np.array([2.0, 0.5, 3.0])[:, None],
        np.zeros((4, 1), bool),
        rho_bar=2.0,
    )
    # deltas: 2 (1 + 1 - 1) = 2;  0.5 (1 + 2 - 2) = 0.5;  2 (1 + 4 - 4) = 2.  gamma c: 0.5, 0.25.
    np.testing.assert_allclose(targets[:, 0], [1 + 2 + 0.5 * 0.5 + 0.125 * 2, 2 + 0.5 + 0.25 * 2, 4 + 2])
    # r + gamma v_{s+1} - V: 1 + 1.5 - 1;  1 + 3 - 2;  1 + 4 - 4.
    np.testing.assert_allclose(advantages[:, 0], [1 * 1.5, 0.5 * 2, 1 * 1])


@pytest.mark.parametrize(
    ("discount", "returns", "gae"),
    [
        # Rows: x0 x1 | y0 y1; transition 1 is masked. V = (1, 2 | 4, 8), r = (10, - , 20), gamma = 1/2, lambda = 1/2.
        (0.5, [10 + 0.5 * 2, 2, 20 + 0.5 * 8], [10 + 1 - 1, 0, 20 + 4 - 4]),
        (0.0, [10, 2, 20 + 0.5 * 8], [10 - 1, 0, 20 + 4 - 4]),
    ],
)
def test_one_masked_transition_by_hand(discount: float, returns: list[float], gae: list[float]) -> None:
    """The end of an episode of one transition, truncated or terminated; then another episode."""
    values = np.array([[1.0], [2.0], [4.0], [8.0]])
    rewards, discounts = np.array([[10.0], [0.0], [20.0]]), np.array([[discount], [0.5], [0.5]])
    first = np.array([[True], [False], [True], [False]])
    np.testing.assert_allclose(oracles.n_step_return(values, rewards, discounts, first)[:, 0], returns)
    np.testing.assert_allclose(oracles.gae(values, rewards, discounts, first, 0.5)[:, 0], gae)
    targets, advantages = oracles.vtrace(values, rewards, discounts, np.ones((3, 1)), first)
    np.testing.assert_allclose(targets[:, 0], returns)
    np.testing.assert_allclose(advantages[:, 0], gae)


def test_n_step_return_by_hand() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0])[:, None]
    arguments = (values, np.ones((3, 1)), np.full((3, 1), 0.5), np.zeros((4, 1), bool))
    np.testing.assert_allclose(oracles.n_step_return(*arguments, n=1)[:, 0], [2, 3, 5])
    np.testing.assert_allclose(oracles.n_step_return(*arguments, n=2)[:, 0], [1.5 + 1, 1.5 + 2, 5])
    np.testing.assert_allclose(oracles.n_step_return(*arguments)[:, 0], [1.75 + 1, 1.5 + 2, 5])


def reference_cut(inputs: dict[str, np.ndarray], k: int, function: Callable[..., Any], fill: np.ndarray) -> np.ndarray:
    """One lane of T transitions of which k is masked: `function` of what is before, `fill[k]`, and what is after."""
    before = {name: array[: k + (name in ("values", "first"))] for name, array in inputs.items()}
    after = {name: array[k + 1 :] for name, array in inputs.items()}
    return np.concatenate([function(**before), fill[k : k + 1], function(**after)])


@pytest.mark.parametrize("terminated", [False, True])
def test_every_offset_of_one_cut(terminated: bool) -> None:
    """Cutting at transition k equals computing the two sides apart; what is in the masked transition has no effect."""
    inputs = random_inputs(6, T=6, B=1, terminate=0.0)
    blank = np.zeros((6, 1))
    for k in range(6):
        cut = {name: array.copy() for name, array in inputs.items()}
        if terminated and k > 0:
            cut["discounts"][k - 1] = 0.0
        whole = {**cut, "first": cut["first"].copy()}
        whole["first"][k + 1] = True
        for name in ("rewards", "discounts", "rho"):
            whole[name][k] = np.nan
        for part, fill in ((0, inputs["values"]), (1, blank)):

            def vtrace(part: int = part, **pieces: np.ndarray) -> np.ndarray:
                return oracles.vtrace(**pieces, lambda_=0.9, rho_bar=1.5, c_bar=0.8, rho_bar_pg=1.2)[part]

            np.testing.assert_allclose(vtrace(**whole), reference_cut(cut, k, vtrace, fill), atol=1e-12)
        whole.pop("rho")
        cut.pop("rho")

        def gae(**pieces: np.ndarray) -> np.ndarray:
            return oracles.gae(**pieces, lambda_=0.7)

        def two_step(**pieces: np.ndarray) -> np.ndarray:
            return oracles.n_step_return(**pieces, n=2)

        np.testing.assert_allclose(gae(**whole), reference_cut(cut, k, gae, blank), atol=1e-12)
        np.testing.assert_allclose(two_step(**whole), reference_cut(cut, k, two_step, inputs["values"]), atol=1e-12)


# Return oracles: against rlax, where nothing is masked.


@pytest.mark.parametrize("rho_bar", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
def test_vtrace_agrees_with_rlax(rlax: Any, lambda_: float, rho_bar: float) -> None:
    inputs = random_inputs(7)

    def reference(v_tm1, v_t, r_t, discount_t, rho_tm1):
        return rlax.vtrace_td_error_and_advantage(
            v_tm1, v_t, r_t, discount_t, rho_tm1, lambda_, rho_bar, clip_pg_rho_threshold=1.3
        )

    values = inputs["values"]
    output = over_lanes(reference, values[:-1], values[1:], inputs["rewards"], inputs["discounts"], inputs["rho"])
    options = {"lambda_": lambda_, "rho_bar": rho_bar, "rho_bar_pg": 1.3}
    targets, advantages = oracles.vtrace(**inputs, **options, mix_lambda_in_pg=True)
    np.testing.assert_allclose(output.errors + values[:-1], targets, atol=1e-5)
    np.testing.assert_allclose(output.pg_advantage, advantages, atol=1e-5)
    paper = oracles.vtrace(**inputs, **options)[1]
    assert np.allclose(paper, advantages, atol=1e-5) == (lambda_ == 1.0)


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
def test_gae_agrees_with_rlax(rlax: Any, lambda_: float) -> None:
    inputs = without(random_inputs(8), "rho")

    def reference(r_t, discount_t, v_tm1, v_last):
        values = jnp.concatenate([v_tm1, v_last[-1:]])
        return rlax.truncated_generalized_advantage_estimation(r_t, discount_t, lambda_, values)

    values = inputs["values"]
    output = over_lanes(reference, inputs["rewards"], inputs["discounts"], values[:-1], values[1:])
    np.testing.assert_allclose(output, oracles.gae(**inputs, lambda_=lambda_), atol=1e-5)


@pytest.mark.parametrize("n", [1, 3, 7, 9])
def test_n_step_return_agrees_with_rlax(rlax: Any, n: int) -> None:
    inputs = without(random_inputs(9), "rho")

    def reference(r_t, discount_t, v_t):
        return rlax.n_step_bootstrapped_returns(r_t, discount_t, v_t, min(n, 7))

    output = over_lanes(reference, inputs["rewards"], inputs["discounts"], inputs["values"][1:])
    np.testing.assert_allclose(output, oracles.n_step_return(**inputs, n=n), atol=1e-5)


# Losses and distributions.


def test_ppo_clip_loss_by_hand() -> None:
    ratio = np.array([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = np.array([1.0, -1.0, 1.0, -1.0, 2.0])
    # A pessimistic bound: clipping only ever takes an improvement away.
    terms = np.array([1.2, -1.5, 0.5, -0.8, 2.2])
    old = np.full(5, -0.3)
    np.testing.assert_allclose(oracles.ppo_clip_loss(np.log(ratio) + old, old, advantages, 0.2), -terms.mean())
    mask = np.array([True, False, True, True, False])
    loss = oracles.ppo_clip_loss(np.log(ratio) + old, old, advantages, 0.2, mask)
    np.testing.assert_allclose(loss, -terms[mask].mean())


def test_categorical() -> None:
    logits = np.random.default_rng(10).normal(size=(3, 5, 4)) * 5
    log_probs = np.stack([oracles.categorical_log_prob(logits, np.full((3, 5), a)) for a in range(4)], axis=-1)
    np.testing.assert_allclose(log_probs, np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))), atol=1e-5)
    np.testing.assert_allclose(np.exp(log_probs), oracles.categorical_probs(logits), atol=1e-12)
    np.testing.assert_allclose(oracles.categorical_entropy(logits), -(np.exp(log_probs) * log_probs).sum(-1))
    np.testing.assert_allclose(oracles.categorical_entropy(np.zeros(4)), np.log(4))
    np.testing.assert_allclose(oracles.categorical_entropy(np.array([0.0, -np.inf, 0.0, -1e9])), np.log(2))
    np.testing.assert_allclose(oracles.categorical_log_prob(np.array([1e4, 0.0]), np.int32(1)), -1e4)


def test_gaussian() -> None:
    mean, scale = np.array([0.3, -1.0]), np.array([0.5, 2.0])
    grid = [np.linspace(m - 12 * s, m + 12 * s, 601) for m, s in zip(mean, scale, strict=True)]
    points = np.stack(np.meshgrid(*grid, indexing="ij"), axis=-1)
    cell = float(np.prod([line[1] - line[0] for line in grid]))
    log_prob = oracles.gaussian_log_prob(mean, scale, points)
    np.testing.assert_allclose(np.exp(log_prob).sum() * cell, 1.0, atol=1e-9)
    np.testing.assert_allclose(-(np.exp(log_prob) * log_prob).sum() * cell, oracles.gaussian_entropy(scale), atol=1e-9)
    average = (np.exp(log_prob)[..., None] * points).sum((0, 1)) * cell
    np.testing.assert_allclose(average, mean, atol=1e-9)


# Optimisers.


def optax_updates(optimiser: optax.GradientTransformation, gradients: np.ndarray) -> np.ndarray:
    params = jnp.zeros(gradients.shape[1:], jnp.float32)
    state, updates, update = optimiser.init(params), [], jax.jit(optimiser.update)
    # optax's schedules promote their integer count themselves.
    with jax.numpy_dtype_promotion("standard"):
        for gradient in jnp.asarray(gradients, jnp.float32):
            change, state = update(gradient, state)
            updates.append(np.asarray(change))
    return np.array(updates)


def test_rmsprop_tf1_by_hand() -> None:
    """Two steps of gradients 3 and 1 with decay 0.5: nu = 5, 3; without gradient history the first step is not lr."""
    updates = oracles.rmsprop_tf1([3.0, 1.0], 0.1, decay=0.5, epsilon=1.0)
    np.testing.assert_allclose(updates, [-0.3 / np.sqrt(6), -0.1 / np.sqrt(4)])
    updates = oracles.rmsprop_tf1([3.0, 1.0], [0.1, 0.2], decay=0.5, epsilon=1.0, momentum=0.9)
    np.testing.assert_allclose(updates, [-0.3 / np.sqrt(6), -0.27 / np.sqrt(6) - 0.1])


def test_optimisers_agree_with_optax() -> None:
    gradients = np.random.default_rng(11).normal(size=(6, 2, 3))
    rmsprop = optax.rmsprop(6e-4, decay=0.99, eps=0.01, initial_scale=1.0, eps_in_sqrt=True)
    np.testing.assert_allclose(optax_updates(rmsprop, gradients), oracles.rmsprop_tf1(gradients, 6e-4), rtol=1e-4)
    schedule = optax.linear_schedule(1e-3, 0.0, 6)
    adam = optax.adam(schedule, b1=0.8, b2=0.95, eps=1e-5)
    rates = [1e-3 * (1 - k / 6) for k in range(6)]
    np.testing.assert_allclose(
        optax_updates(adam, gradients), oracles.adam(gradients, rates, 0.8, 0.95, 1e-5), rtol=1e-4
    )


def test_clip_by_global_norm() -> None:
    tree = [np.array([3.0]), np.array([[0.0, 4.0]])]
    for max_norm, factor in ((10.0, 1.0), (5.0, 1.0), (1.0, 0.2)):
        clipped = oracles.clip_by_global_norm(tree, max_norm)
        expected, _ = optax.clip_by_global_norm(max_norm).update([jnp.asarray(x, jnp.float32) for x in tree], None)
        for ours, array, theirs in zip(clipped, tree, expected, strict=True):
            np.testing.assert_allclose(ours, factor * array)
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
