"""Masks of actions: what they say, the distributions that they leave against enumeration, and what does not fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import distributions, nets, spaces, topology
from podracer.environments import host_masks
from podracer.nets import action_masks
from podracer.result import policy
from podracer.types import EnvSpec

A = 6
SETS = np.array([s for s in itertools.product((0, 1), repeat=A) if any(s)], np.int8)
"""All 63 legal sets of six actions."""


SIX = spaces.Discrete(A)


def spec_of(actions: Any = SIX, mask: Any = None, **others: Any) -> EnvSpec:
    size = int(np.sum(actions.num_values)) if mask is None else 0
    members = {"seen": spaces.Box(-1.0, 1.0, (3,)), "action_mask": mask or spaces.Box(0, 1, (size,), np.int8)}
    return EnvSpec("shop", spaces.Dict(members | others), actions)


def shown(mask: Any) -> dict[str, jax.Array]:
    mask = jnp.asarray(mask)
    return {"seen": jnp.zeros((*mask.shape[:-1], 3)), "action_mask": mask}


@pytest.fixture(params=["cpu", "gpu"])
def platform(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choices among a few are made column by column off CPU."""
    with topology.compiling_for(request.param):
        yield


# What a mask says.


def test_the_member_has_one_name() -> None:
    assert policy.MASK == host_masks.NAME == action_masks.NAME


def test_a_choice_without_a_legal_value_may_take_any() -> None:
    legal = lambda spec, mask: np.asarray(action_masks.legal(spec, shown(mask))).astype(int).tolist()  # noqa: E731
    assert legal(spec_of(), np.array([[0, 1, 0, 0, 1, 0], [0] * 6], np.int8)) == [[0, 1, 0, 0, 1, 0], [1] * 6]
    heads = spec_of(spaces.MultiDiscrete((2, 3, 1)))
    assert legal(heads, np.array([0, 0, 0, 1, 1, 0], np.int8)) == [1, 1, 0, 1, 1, 1]
    assert legal(spec_of(spaces.Discrete(2), spaces.Box(0, 1, (2,), np.bool_)), np.array([True, False])) == [1, 0]
    plain = EnvSpec("shop", spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(A))
    assert action_masks.legal(plain, jnp.zeros(3)) is None
    assert action_masks.lower(jnp.ones(3), None).tolist() == [1.0] * 3


@pytest.mark.parametrize(("actions", "stuck"), [(SIX, 1.0), (spaces.MultiDiscrete((2, 4)), 2.0)])
def test_shares_are_those_of_the_weighted_rows(actions: Any, stuck: float) -> None:
    """In the first row, the second of two choices has no legal action."""
    rows = shown(np.array([[1, 1, 0, 0, 0, 0], [0] * 6, [1] * 6], np.int8))
    found = action_masks.shares(spec_of(actions), rows, jnp.array([1.0, 1.0, 0.0]))
    expected = {"mask/legal": 1 / 3, "mask/none_legal": stuck}
    assert {name: float(x) for name, x in found.items()} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            spec_of(spaces.Discrete(729), spaces.Box(0, 1, (9, 9, 9), np.uint8)),
            r"shop: action_mask is uint8 \[9, 9, 9\], and Discrete\(num_values=729\) needs whole numbers or truth "
            r"values \[729\]\.",
        ),
        (spec_of(mask=spaces.Box(0.0, 1.0, (A,))), r"action_mask is float32 \[6\]"),
        (spec_of(mask=spaces.Dict({"x": spaces.Discrete(2)})), "action_mask is a Dict"),
        (
            spec_of(spaces.Box(-1.0, 1.0, (2,)), spaces.Box(0, 1, (2,), np.int8)),
            "shop shows action_mask with Box.*: only choices can be masked",
        ),
        (
            EnvSpec("shop", spaces.Dict({"action_mask": spaces.Box(0, 1, (A,), np.int8)}), spaces.Discrete(A)),
            "shop shows nothing but action_mask",
        ),
    ],
)
def test_masks_that_do_not_fit_are_refused(spec: EnvSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nets.NetworkConfig().actor_critic("ppo", spec, None)


def test_networks_do_not_see_the_mask_but_a_member_of_a_member() -> None:
    inner = {"action_mask": spaces.Box(0, 1, (2,), np.int8)}
    space = spec_of(inner=spaces.Dict(inner)).observation_space
    value = shown(np.array([5] * A, np.int8)) | {"inner": {"action_mask": jnp.int8([7, 7])}}
    assert nets.encode(value, space, leading=0).tolist() == [7.0, 7.0, 0.0, 0.0, 0.0]


# Distributions.


@pytest.mark.usefixtures("platform")
def test_probabilities_entropy_and_divergence_are_those_of_the_legal_actions() -> None:
    rng = np.random.default_rng(0)
    logits, others = 4 * rng.normal(size=(2, len(SETS), A))
    distribution = distributions.categorical(A)
    low, low_others = (action_masks.lower(jnp.asarray(x, jnp.float32), jnp.asarray(SETS > 0)) for x in (logits, others))
    actions = jnp.broadcast_to(jnp.arange(A, dtype=jnp.int32)[:, None], (A, len(SETS)))
    log_prob = lambda x: distribution.log_prob(jnp.broadcast_to(x, (A, *x.shape)), actions)  # noqa: E731
    found, found_others = (np.asarray(log_prob(x)).T for x in (low, low_others))
    entropy, mode = np.asarray(distribution.entropy(low)), np.asarray(distribution.mode(low))
    divergence = np.sum(np.where(SETS, np.exp(found) * (found - found_others), 0.0), axis=1)
    for i, allowed in enumerate(SETS):
        some = np.flatnonzero(allowed)
        exact = [np.log(np.exp(x[i, some]) / np.exp(x[i, some]).sum()) for x in (logits, others)]
        np.testing.assert_allclose(found[i, some], exact[0], rtol=1e-5, atol=1e-6)
        assert np.all(np.exp(found[i, allowed == 0]) == 0.0)
        np.testing.assert_allclose(entropy[i], -np.sum(np.exp(exact[0]) * exact[0]), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            divergence[i], np.sum(np.exp(exact[0]) * (exact[0] - exact[1])), rtol=1e-4, atol=1e-5
        )
        assert mode[i] == some[logits[i, some].argmax()]


@pytest.mark.usefixtures("platform")
def test_illegal_logits_have_no_gradient_and_legal_ones_that_of_the_legal_actions() -> None:
    distribution = distributions.categorical(A)
    action = jnp.asarray(SETS.argmax(1), jnp.int32)

    def total(logits: jax.Array, allowed: jax.Array) -> jax.Array:
        low = action_masks.lower(logits, allowed > 0)
        return jnp.sum(distribution.log_prob(low, action) + 2.0 * distribution.entropy(low))

    # An entropy that weighs more than 1, for 2 times the least float32 is infinite.
    logits = np.random.default_rng(1).normal(size=SETS.shape).astype(np.float32)
    found = np.asarray(jax.jit(jax.grad(total))(jnp.asarray(logits), jnp.asarray(SETS)))
    assert np.all(found[SETS == 0] == 0.0)
    # Of log p_a + 2 H by enumeration: 1_a - p - 2 p (log p + H).
    p = np.exp(logits) * SETS / np.sum(np.exp(logits) * SETS, axis=1, keepdims=True)
    log_p = np.log(np.where(SETS, p, 1.0))
    entropy = -np.sum(p * log_p, axis=1, keepdims=True)
    exact = np.eye(A)[np.asarray(action)] - p - 2 * p * (log_p + entropy)
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5)


def _chi_square(draws: np.ndarray, probabilities: np.ndarray) -> float:
    counts = np.bincount(draws, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    expected = len(draws) * probabilities[probabilities > 0]
    return float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())


@pytest.mark.usefixtures("platform")
def test_a_million_draws_are_legal_and_as_likely_as_they_should_be() -> None:
    """Chi-square is above 25.7 of 4 degrees of freedom with probability 4e-5."""
    allowed, logits = np.array([1, 0, 1, 1, 0, 1, 1, 0]), np.array([0.5, 9.0, -1.0, 0.0, 50.0, 1.0, -3.0, 2.0])
    N = 500_000

    @jax.jit
    def draws(logits: jax.Array, legal: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        policy_key, epsilon_key = jax.random.split(key)
        legal = jnp.broadcast_to(legal, (N, 8))
        low = action_masks.lower(jnp.broadcast_to(logits, (N, 8)), legal)
        at_random = distributions.epsilon_greedy(low, 1.0, epsilon_key, legal)
        return distributions.categorical(8).sample(low, policy_key), at_random

    by_policy, at_random = (
        np.asarray(x) for x in draws(jnp.asarray(logits, jnp.float32), jnp.asarray(allowed > 0), jax.random.key(0))
    )
    p = np.exp(logits) * allowed / np.sum(np.exp(logits) * allowed)
    assert _chi_square(by_policy, p) < 25.7
    assert _chi_square(at_random, allowed / allowed.sum()) < 25.7


def test_epsilon_greedy_keeps_to_what_is_legal_of_every_lane() -> None:
    key, q = jax.random.key(3), np.random.default_rng(0).normal(size=SETS.shape).astype(np.float32)
    low = action_masks.lower(jnp.asarray(q), jnp.asarray(SETS > 0))
    lanes = np.arange(len(SETS))
    drawn = {int(e * 10): distributions.epsilon_greedy(low, e, key, jnp.asarray(SETS > 0)) for e in (0.0, 0.5, 1.0)}
    assert all(np.all(SETS[lanes, np.asarray(x)]) for x in drawn.values())
    np.testing.assert_array_equal(drawn[0], np.where(SETS, q, -np.inf).argmax(1))
    assert np.any(np.asarray(drawn[5]) != drawn[0])
    assert np.any(np.asarray(drawn[5]) != drawn[10])
    # All legal: what it draws without a mask.
    ones = jnp.ones(SETS.shape, bool)
    for epsilon in (0.5, 1.0):
        plain = distributions.epsilon_greedy(jnp.asarray(q), epsilon, key)
        np.testing.assert_array_equal(distributions.epsilon_greedy(jnp.asarray(q), epsilon, key, ones), plain)


@pytest.mark.slow
def test_thousands_of_actions_and_one_that_is_legal() -> None:
    num, only = 4_672, np.array([0, 17, 4_671])
    legal = jnp.asarray(np.eye(num, dtype=bool)[only])
    outputs = action_masks.lower(jnp.asarray(np.random.default_rng(0).normal(size=legal.shape), jnp.float32), legal)
    distribution = distributions.categorical(num)
    sample = distribution.sample(outputs, jax.random.key(0))
    np.testing.assert_array_equal(sample, only)
    np.testing.assert_array_equal(distribution.log_prob(outputs, sample), 0.0)
    np.testing.assert_array_equal(distribution.entropy(outputs), 0.0)
    np.testing.assert_array_equal(distributions.epsilon_greedy(outputs, 1.0, jax.random.key(1), legal), only)


# Networks.


def test_heads_of_unequal_sizes_are_lowered_each() -> None:
    spec = spec_of(spaces.MultiDiscrete((2, 3)))
    network = action_masks.masked(nets.make(spec, hidden_sizes=(4,)), spec)
    mask = jnp.broadcast_to(jnp.int8([0, 1, 1, 0, 1]), (1, 400, 5))
    rows = nets.Inputs(shown(mask), jnp.zeros((1, 400)), jnp.ones((1, 400), bool), ())
    sample = distributions.for_space(spec.action_space).sample

    @jax.jit
    def draws(rows: nets.Inputs) -> jax.Array:
        return sample(network.apply(network.init(jax.random.key(0)), rows, ())[0][0], jax.random.key(1))

    drawn = np.asarray(draws(rows))
    assert {tuple(x) for x in drawn.tolist()} == {(1, 0), (1, 2)}


@pytest.mark.parametrize("num_bins", [1, 3])
def test_the_mean_of_advantages_is_over_legal_actions(num_bins: int) -> None:
    """Q - V of legal actions has mean 0 (Wang et al. 2016, equation 9), whatever the illegal ones are."""
    spec = spec_of()
    network = nets.make_q(spec, hidden_sizes=(4,), head_size=0, num_bins=num_bins)
    params, apply = jax.jit(network.init)(jax.random.key(0)), jax.jit(network.apply)
    rows = nets.Inputs(shown(SETS[None]), jnp.zeros((1, len(SETS))), jnp.ones((1, len(SETS)), bool), ())
    head = params["params"]["value"]

    def rest(params: Any) -> np.ndarray:
        """The mean over legal actions, less V, which is the value head's bias: features are 0."""
        outputs = np.asarray(apply(params, rows, ())[0][0]).reshape(len(SETS), A, num_bins)
        legal = SETS[..., None].astype(np.float64)
        return np.sum(outputs * legal, axis=1) / legal.sum(1) - np.asarray(head["bias"])

    bias = params["params"]["advantage"]["bias"] + jnp.arange(A * num_bins, dtype=jnp.float32) ** 2
    changed = {"params": params["params"] | {"advantage": params["params"]["advantage"] | {"bias": bias}}}
    np.testing.assert_allclose(rest(changed), 0.0, atol=1e-4)
