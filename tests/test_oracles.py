"""Tests of the test tools: oracles by identities, by hand and against rlax and optax; probes; the counting checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from podracer.types import Environment, Trajectory
from tests.support import counting, oracles, probes

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


# Probes.


@pytest.mark.parametrize("probe", probes.ALL, ids=lambda probe: probe.spec.name.removeprefix("probe:"))
def test_probe_values(probe: probes.Probe) -> None:
    """The tables agree with what the best policy (any policy, if none is best) earns, and rows obey the contract."""
    assert isinstance(probe, Environment)
    spec = probe.spec
    reset, step, observe = jax.jit(probe.reset), jax.jit(probe.step), jax.jit(probe.observe)
    values = {observation.tobytes(): value for observation, value in probe.values(GAMMA)}
    best = None if probe.optimal_actions is None else {x.tobytes(): a for x, a in probe.optimal_actions}
    if best is not None:
        assert set(best) == set(values)
    seen = set()
    for episode in range(8):
        key = jax.random.key(episode)
        state = reset(key)
        observations, rewards, transition = [np.asarray(observe(state))], [], None
        while transition is None or not transition.last:
            action = spec.action_space.sample(key) if best is None else best[observations[-1].tobytes()]
            assert spec.action_space.contains(action)
            state, transition = step(state, jnp.asarray(action), key)
            assert [x.dtype for x in transition[:3]] == [jnp.float32, jnp.float32, jnp.bool_]
            assert [x.shape for x in transition[:3]] == [(), (), ()]
            observations.append(np.asarray(observe(state)))
            rewards.append(float(transition.reward))
            assert len(rewards) <= (spec.max_episode_steps or 0)
            assert bool(transition.last) or transition.discount == 1
        assert all(spec.observation_space.contains(observation) for observation in observations)
        # A truncated episode goes on: its last row has a value, a terminated one's has not.
        total = values[observations[-1].tobytes()] if transition.discount else 0.0
        for observation, reward in zip(observations[-2::-1], rewards[::-1], strict=True):
            total = reward + GAMMA * total
            np.testing.assert_allclose(total, values[observation.tobytes()], rtol=1e-6)
            seen.add(observation.tobytes())
    assert seen == set(values)


def test_probes_traps_are_far_from_the_truth() -> None:
    """The best policy beats every other action, and treating truncation as a death shows."""
    for probe in probes.ALL:
        for observation, best in probe.optimal_actions or ():
            state = probes.State(jnp.asarray(observation), jnp.int32(0))
            choices = [np.int32(0), np.int32(1)] if best.ndim == 0 else [best, best + np.float32(0.1)]
            if probe.spec.action_space == probes.ConstantReward().spec.action_space:
                continue
            rewards = [float(probe.step(state, jnp.asarray(a), jax.random.key(0))[1].reward) for a in choices]
            assert np.array_equal(choices[int(np.argmax(rewards))], best)
            assert rewards[0] != rewards[1]
    truncated = probes.TruncatedReward(4)
    assert truncated.finite_sum(GAMMA) < 0.4 * truncated.values(GAMMA)[0][1]
    # Monte Carlo and TD(0) are below the bound.
    mean = np.mean([(1 - GAMMA**k) / (1 - GAMMA) for k in range(1, 5)])
    assert max(mean, 1 / (1 - GAMMA * (1 - 1 / 4))) < truncated.finite_sum(GAMMA)


# Counting.


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    return list(itertools.islice(counting.collect(counting.CountingEnvironment(), 20, 4), 3))


def changed(trajectory: Trajectory, **rows: np.ndarray) -> Trajectory:
    """Replaces fields of a trajectory or of its time steps, by name."""
    steps = {name: array for name, array in rows.items() if name in trajectory.timesteps._fields}
    timesteps = trajectory.timesteps._replace(**steps)
    return trajectory._replace(timesteps=timesteps, **{name: rows[name] for name in rows if name not in steps})


def select_rows(trajectory: Trajectory, rows: list[int]) -> Trajectory:
    """Keeps these rows (the last one without its action), as a stream that lost the others would show."""
    return trajectory._replace(
        timesteps=jax.tree.map(lambda x: x[np.array(rows)], trajectory.timesteps),
        actions=trajectory.actions[np.array(rows[:-1])],
        policy_version=trajectory.policy_version[np.array(rows[:-1])],
    )


def one_lane(trajectory: Trajectory, lane: int = 0) -> Trajectory:
    """One lane, [T+1, 1]."""
    cut = jax.tree.map(lambda x: x[:, lane : lane + 1], trajectory._replace(lane=(), actor_state=()))
    return cut._replace(lane=trajectory.lane[lane : lane + 1])


def where(mask: np.ndarray) -> int:
    """The first row inside 1..T-1 of column 0 where `mask` holds."""
    return 1 + int(np.flatnonzero(np.asarray(mask)[1:-1, 0])[0])


def test_correct_trajectories_pass(trajectories: list[Trajectory]) -> None:
    assert isinstance(counting.CountingEnvironment(), Environment)
    for trajectory in trajectories:
        counting.check_trajectory(trajectory)
        counting.check_trajectory(jax.tree.map(jnp.asarray, trajectory))
    for previous, following in itertools.pairwise(trajectories):
        counting.check_contiguous(previous, following)
    # Both kinds of end occur, or the checks above say little.
    ends = np.concatenate([t.timesteps.discount[t.timesteps.last] for t in trajectories])
    assert {0.0, 1.0} <= set(ends.tolist())


def test_counting_observations_are_in_the_space(trajectories: list[Trajectory]) -> None:
    environment = counting.CountingEnvironment()
    observation = np.asarray(trajectories[0].timesteps.observation)
    assert all(environment.spec.observation_space.contains(x) for x in observation.reshape(-1, 3))
    with pytest.raises(ValueError, match="max_length"):
        counting.CountingEnvironment(max_length=32)


def test_episode_stats(trajectories: list[Trajectory]) -> None:
    """Summed over contiguous trajectories, they are what adding up the rewards in order gives."""
    count, length_sum, return_sum = 0, 0, 0.0
    rewards = np.concatenate([t.timesteps.reward[1:] for t in trajectories])
    lasts = np.concatenate([t.timesteps.last[1:] for t in trajectories])
    firsts = np.concatenate([t.timesteps.first[1:] for t in trajectories])
    for lane in range(rewards.shape[1]):
        total, length = 0.0, 0
        for reward, first, last in zip(rewards[:, lane], firsts[:, lane], lasts[:, lane], strict=True):
            total, length = total + reward, length + (not first)
            if last:
                count, length_sum, return_sum = count + 1, length_sum + length, return_sum + total
                total, length = 0.0, 0
    stats = [counting.episode_stats(trajectory)[:3] for trajectory in trajectories]
    np.testing.assert_allclose(np.sum(stats, axis=0), [return_sum, length_sum, count])


def corruptions() -> dict[str, tuple[str, Callable[[Trajectory], Trajectory]]]:
    """Name -> (what the error must say, how a buggy driver would spoil a one-lane trajectory)."""

    def roll(name: str) -> Callable[[Trajectory], Trajectory]:
        def spoil(t: Trajectory) -> Trajectory:
            array = t.actions if name == "actions" else getattr(t.timesteps, name)
            return changed(t, **{name: np.roll(array, 1, axis=0)})

        return spoil

    def drop(row_of: Callable[[Trajectory], int]) -> Callable[[Trajectory], Trajectory]:
        def spoil(t: Trajectory) -> Trajectory:
            gone = row_of(t)
            return select_rows(t, [row for row in range(len(t.timesteps.reward)) if row != gone])

        return spoil

    def middle(t: Trajectory) -> np.ndarray:
        return ~t.timesteps.first & ~t.timesteps.last

    def repeat(t: Trajectory) -> Trajectory:
        row = where(middle(t))
        return select_rows(t, [*range(row + 1), *range(row, len(t.timesteps.reward))])

    def add(row_of: Callable[[Trajectory], int], *amounts: float) -> Callable[[Trajectory], Trajectory]:
        """Adds to the tag, the step and the previous action of one row's observation."""

        def spoil(t: Trajectory) -> Trajectory:
            observation = np.array(t.timesteps.observation)
            observation[row_of(t)] += np.array(amounts, np.float32)
            return changed(t, observation=observation)

        return spoil

    def impossible_action(t: Trajectory) -> Trajectory:
        """An impossible action at a row where the environment ignores it, so that nothing else can tell."""
        actions = np.array(t.actions)
        actions[where(t.timesteps.last)] = -1
        return changed(t, actions=actions)

    def same_step(t: Trajectory) -> Trajectory:
        """SAME_STEP auto-reset: the final row is overwritten by the first row of the next episode."""
        t = drop(lambda t: where(t.timesteps.last))(t)
        rows = np.flatnonzero(t.timesteps.first[1:, 0] & ~t.timesteps.last[:-1, 0])
        last, reward = t.timesteps.last.copy(), t.timesteps.reward.copy()
        last[rows + 1], reward[rows + 1] = True, 3.0
        return changed(t, last=last, reward=reward)

    def same_key(t: Trajectory) -> Trajectory:
        """Every episode draws the same tag: only the first rows' tags tell, so lengths are made equal, too."""
        environment = counting.CountingEnvironment(max_length=1)
        t = one_lane(next(counting.collect(environment, 8, 1)))
        observation = t.timesteps.observation.copy()
        observation[..., 0] = observation[0, 0, 0]
        number = int(observation[0, 0, 0])
        discount = np.where(t.timesteps.last & (number % 2 == 1), np.float32(0), np.float32(1))
        return changed(t, observation=observation, discount=discount)

    return {
        "actions shifted": ("recorded action", roll("actions")),
        "rewards shifted": ("reward of another row", roll("reward")),
        "discounts shifted": ("wrong discount", roll("discount")),
        "firsts shifted": ("`first` is not", roll("first")),
        "lasts shifted": ("`last` is not", roll("last")),
        "observations shifted": ("`first` is not", roll("observation")),
        "reset row dropped": ("followed by a first row", drop(lambda t: where(t.timesteps.first))),
        "final row dropped": ("without a last row", drop(lambda t: where(t.timesteps.last))),
        "middle row dropped": ("rows lost", drop(lambda t: where(middle(t)))),
        "row repeated": ("rows lost", repeat),
        "same-step reset": ("`last` is not", same_step),
        "key reused": ("opened again", same_key),
        "truncation as termination": (
            "wrong discount",
            lambda t: changed(t, discount=np.where(t.timesteps.last, np.float32(0), t.timesteps.discount)),
        ),
        "reward on a first row": (
            "reward of another row",
            lambda t: changed(t, reward=t.timesteps.reward + t.timesteps.first),
        ),
        "clipped rewards": ("reward of another row", lambda t: changed(t, reward=np.clip(t.timesteps.reward, 0, 1))),
        "bootstrap row missing": ("actions must be", lambda t: t._replace(timesteps=select_rows(t, [0, 1]).timesteps)),
        "float actions": ("actions must be", lambda t: changed(t, actions=t.actions.astype(np.float32))),
        "integer flags": ("first must be", lambda t: changed(t, first=t.timesteps.first.astype(np.int32))),
        "observations lost": ("not a tag", lambda t: changed(t, observation=np.zeros_like(t.timesteps.observation))),
        "NaN": ("not a tag", lambda t: changed(t, observation=np.full_like(t.timesteps.observation, np.nan))),
        "another tag": ("another episode without", add(lambda t: where(middle(t)), 64, 0, 0)),
        "half a step": ("leaves its episode", add(lambda t: where(middle(t)), 0, 0.5, 0)),
        "episode too long": ("leaves its episode", add(lambda t: where(t.timesteps.last), 0, 1, 0)),
        "action before a first row": ("no previous action", add(lambda t: where(t.timesteps.first), 0, 0, 3)),
        "impossible action": ("impossible action", impossible_action),
        "older parameters": (
            "version decreased",
            lambda t: changed(t, policy_version=np.arange(len(t.actions), 0, -1, np.int32)[:, None]),
        ),
    }


@pytest.mark.parametrize("name", corruptions())
def test_corrupted_trajectories_fail(name: str, trajectories: list[Trajectory]) -> None:
    message, spoil = corruptions()[name]
    lane = one_lane(trajectories[0])
    counting.check_trajectory(lane)
    spoiled = spoil(lane)
    with pytest.raises(AssertionError, match=message):
        counting.check_trajectory(spoiled)


def test_batch_major_fails(trajectories: list[Trajectory]) -> None:
    t = trajectories[0]
    swapped = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), t._replace(lane=()))._replace(lane=t.lane)
    with pytest.raises(AssertionError, match="actions must be"):
        counting.check_trajectory(swapped)


def test_lanes_that_share_a_stream_fail(trajectories: list[Trajectory]) -> None:
    t = trajectories[0]
    copied = jax.tree.map(lambda x: np.repeat(x[:, :1], 4, axis=1), t._replace(lane=()))._replace(lane=t.lane)
    with pytest.raises(AssertionError, match="share a key"):
        counting.check_trajectory(copied)
    with pytest.raises(AssertionError, match="lanes must differ"):
        counting.check_trajectory(t._replace(lane=np.zeros_like(t.lane)))


def test_lanes_mixed_up_fail(trajectories: list[Trajectory]) -> None:
    """Actions sent back to the wrong lanes, and observations that change lanes half-way."""
    t = trajectories[0]
    with pytest.raises(AssertionError, match="recorded action"):
        counting.check_trajectory(t._replace(actions=t.actions[:, ::-1]))
    mixed = jax.tree.map(lambda x: np.concatenate([x[:10], x[10:, ::-1]]), t.timesteps)
    with pytest.raises(AssertionError):
        counting.check_trajectory(t._replace(timesteps=mixed))


def test_breaks(trajectories: list[Trajectory]) -> None:
    """A first row without a last row before it passes only where breaks are allowed; nothing else becomes allowed."""
    lane = one_lane(trajectories[0])
    broken = select_rows(lane, [r for r in range(21) if r != where(lane.timesteps.last)])
    counting.check_trajectory(broken, allow_breaks=True)
    with pytest.raises(AssertionError, match="without a last row"):
        counting.check_trajectory(broken)
    unsteady = select_rows(lane, [r for r in range(21) if r != where(~lane.timesteps.first & ~lane.timesteps.last)])
    with pytest.raises(AssertionError, match="rows lost"):
        counting.check_trajectory(unsteady, allow_breaks=True)


def test_not_contiguous(trajectories: list[Trajectory]) -> None:
    first, second, third = trajectories
    with pytest.raises(AssertionError, match="row T before it"):
        counting.check_contiguous(first, third)
    with pytest.raises(AssertionError, match="row T before it"):
        counting.check_contiguous(first, select_rows(second, list(range(1, 21))))
    with pytest.raises(AssertionError, match="other lanes"):
        counting.check_contiguous(first, second._replace(lane=second.lane[::-1]))
    with pytest.raises(AssertionError, match="version decreased"):
        counting.check_contiguous(first._replace(policy_version=first.policy_version + 5), second)
    for field in ("reward", "discount", "first", "last"):
        array = getattr(second.timesteps, field)
        opposite = (1 - array[:1].astype(np.float32)).astype(array.dtype)
        spoiled = changed(second, **{field: np.concatenate([opposite, array[1:]])})
        with pytest.raises(AssertionError, match=field):
            counting.check_contiguous(first, spoiled)


def test_contiguity_across_a_break(trajectories: list[Trajectory]) -> None:
    """A restart: every lane begins anew, which only `allow_breaks` accepts."""
    restarted = next(counting.collect(counting.CountingEnvironment(), 20, 4, seed=1))
    last = trajectories[-1]
    restarted = restarted._replace(policy_version=restarted.policy_version + 9)
    counting.check_contiguous(last, restarted, allow_breaks=True)
    with pytest.raises(AssertionError, match="observation of row 0"):
        counting.check_contiguous(last, restarted)
