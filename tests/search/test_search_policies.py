"""The quality of searches: policies that improve, games that are solved; and their noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from podracer import distributions
from podracer.search import search
from podracer.search.search import Model, Root, SearchConfig, Step
from tests.support import tiers
from tests.support.tables import KEY, MDP, A, run, table_model


def bandit(lanes, actions=8):
    """Random priors and Q, the value that of the prior; every action ends it."""
    rng = np.random.default_rng(0)
    logits, Q = rng.normal(0, 1.5, (lanes, actions)), rng.normal(0, 1, (lanes, actions))
    prior = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    zero = jnp.zeros(lanes)

    def step(Q, lane, action):
        return Step(Q[lane, action], zero, jnp.zeros((lanes, actions)), zero + 7, lane)

    value = (prior * Q).sum(-1)
    root = Root(jnp.asarray(logits, jnp.float32), jnp.asarray(value, jnp.float32), jnp.arange(lanes))
    return Model(None, step), root, Q, value


MORE = [pytest.param(simulations, marks=pytest.mark.slow) for simulations in (4, 16, 50)]


def improvement(algorithm, simulations):
    """The improvement of the searched policy on every bandit."""
    model, root, Q, before = bandit(4096)
    config = SearchConfig(algorithm, simulations=simulations)
    find = functools.partial(search.search, model, config=config, explore=algorithm == "gumbel")
    policy = jax.jit(lambda Q, root: find(Q, root, KEY).policy)(jnp.asarray(Q, jnp.float32), root)
    return (np.asarray(policy) * Q).sum(-1) - before


@pytest.mark.parametrize("simulations", [2, *MORE])
def test_gumbel_improves_the_policy_always(simulations):
    """E_policy[Q] >= E_prior[Q] on every bandit (Danihelka et al. 2022, appendix C)."""
    better = improvement("gumbel", simulations)
    assert better.min() > -1e-5
    assert better.mean() > 0.1


@pytest.mark.slow
def test_fractions_of_visits_do_not_improve_it_always():
    """The reason for Gumbel with few simulations."""
    assert 0.02 < np.mean(improvement("puct", 2) < -1e-5) < 0.6


def endings():
    """Every state of tic_tac_toe that is not over: boards int32 [n, 9], 1 the mover's, and their minimax Q [n, 9]."""
    lines = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
    values = {}

    def visit(board):
        if board in values:
            return values[board][0]
        Q = np.full(9, -np.inf)
        for a in (a for a in range(9) if board[a] == 0):
            after = (*board[:a], 1, *board[a + 1 :])
            won = any(after[i] == after[j] == after[k] == 1 for i, j, k in lines)
            Q[a] = 1 if won else 0 if 0 not in after else -visit(tuple(-x for x in after))
        values[board] = Q.max(), Q
        return Q.max()

    visit((0,) * 9)
    return np.array(list(values)), np.array([Q for _, Q in values.values()]), np.array(lines)


def rollout_free(boards, lines):
    """A model of tic_tac_toe that knows the rules, with a uniform prior and value 0; what is over stays as it is."""

    def step(lines, state, action):
        board, over = state
        after = board.at[jnp.arange(len(board)), action].set(1)
        won = (after[:, lines] == 1).all(-1).any(-1) & ~over
        end = over | won | (after != 0).all(-1)
        after = jnp.where(over[:, None], board, -after)
        legal = (after == 0) | end[:, None]
        zero = jnp.zeros(len(board))
        return Step(
            won.astype(jnp.float32), jnp.where(end, 0.0, -1.0), jnp.zeros((len(board), 9)), zero, (after, end), legal
        )

    zero = jnp.zeros(len(boards))
    root = Root(jnp.zeros((len(boards), 9)), zero, (boards, zero > 0), boards == 0)
    return Model(None, step), root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SearchConfig("puct", simulations=50, bounds=(-1, 1)), 0.958),
        (SearchConfig("gumbel", simulations=50, bounds=(-1, 1), value_scale=1.0), 0.941),
        (SearchConfig("gumbel", simulations=2000, bounds=(-1, 1), value_scale=1.0), 1.0),
        *tiers.nightly(
            (SearchConfig("gumbel", simulations=200, bounds=(-1, 1), value_scale=1.0), 1.0),
            (SearchConfig("puct", simulations=2000, bounds=(-1, 1)), 1.0),
        ),
    ],
    ids=lambda x: f"{x.algorithm}-{x.simulations}" if isinstance(x, SearchConfig) else "",
)
def test_tic_tac_toe_converges(config, expected):
    """With a uniform prior and no values: minimax moves in so many states; in all endings, where those are examined."""
    boards, Q, lines = endings()
    assert len(boards) == 4520
    empty = (boards == 0).sum(-1)
    some = {200: empty <= 3, 2000: np.flatnonzero(empty <= 5)[::60]}
    at = some.get(config.simulations, slice(None))
    boards, Q = boards[at], Q[at]
    assert config.simulations != 200 or len(boards) == 222 + 696 + 1372
    model, root = rollout_free(jnp.asarray(boards), lines)
    find = jax.jit(lambda root: search.search(model, jnp.asarray(lines), root, KEY, config, explore=False).action)
    action = np.asarray(find(root))
    right = Q[np.arange(len(Q)), action] == Q.max(-1)
    assert right.mean() == pytest.approx(expected, abs=0.01 if expected < 1 else 1e-9)


def test_dirichlet_is_over_legal_actions():
    """Moments, and marginals, which are beta distributions."""
    lanes, alpha = 20_000, 0.3
    legal = jnp.broadcast_to(jnp.arange(6) < 4, (lanes, 6))
    drawn = np.asarray(jax.jit(distributions.dirichlet)(KEY, jnp.full((lanes, 6), alpha), legal))
    assert (drawn[:, 4:] == 0).all()
    np.testing.assert_allclose(drawn.sum(-1), 1, rtol=1e-5)
    for marginal in drawn[:, :4].T:
        assert scipy.stats.kstest(marginal, scipy.stats.beta(alpha, 3 * alpha).cdf).pvalue > 1e-3
    np.testing.assert_allclose(np.cov(drawn[:, :4].T)[0, 1], -1 / 16 / (4 * alpha + 1), rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.03, 0.15, 1.0, 2.5])
def test_dirichlet_of_any_alpha(alpha):
    legal = jnp.arange(12) < 7
    drawn = distributions.dirichlet(KEY, jnp.full((20_000, 12), alpha), jnp.broadcast_to(legal, (20_000, 12)))
    for marginal in np.sort(np.asarray(drawn, float)[:, :7], 0).T:
        distance = np.abs(np.arange(1, 20_001) / 20_000 - scipy.stats.beta(alpha, 6 * alpha).cdf(marginal))
        assert distance[marginal > 1e-25].max() < 1.95 / 20_000**0.5, "a Kolmogorov-Smirnov test, but for underflow"


def test_noise_at_the_root():
    """P <- (1 - f) P + f eta, with alpha by the number of legal actions; f = 0 and evaluation leave the prior."""
    lanes, number = 1000, np.array([1, 2, 5])
    mask = jnp.asarray(np.arange(A) < np.repeat(number, lanes)[:, None])
    root = Root(jnp.zeros((3 * lanes, A)), jnp.zeros(3 * lanes), jnp.zeros(3 * lanes, jnp.int32), mask)
    tables = MDP(0).tables

    config = SearchConfig(simulations=1, dirichlet_fraction=0.5)
    find = functools.partial(search.search, table_model(), tables, root, config=config, keep_tree=True)
    prior = np.asarray(jax.jit(lambda key: find(key=key).tree.P[:, 0])(KEY)).reshape(3, lanes, A)
    for P, n in zip(prior, number):
        assert (P[:, n:] == -1).all()
        eta = P[:, :n] / 0.5 - 1 / n
        np.testing.assert_allclose(eta.sum(-1), 1, atol=1e-5)
        alpha = min(1, 10 / n)
        np.testing.assert_allclose(eta.var(), (1 / n) * (1 - 1 / n) / (n * alpha + 1), rtol=0.1, atol=1e-9)


def test_temperature_and_noise_of_actions():
    tables = MDP(5).tables
    state = jnp.zeros(600, jnp.int32)
    config = SearchConfig(simulations=24, dirichlet_fraction=0.0)
    found = run(
        table_model(),
        tables,
        state,
        KEY,
        config,
        explore=True,
        temperature=jnp.where(jnp.arange(600) < 300, 1.0, 0.5),
    )
    n = np.asarray(found.visits[0])
    for actions, weights in ((found.action[:300], n), (found.action[300:], n**2)):
        expected = weights / weights.sum() * 300
        counts = np.bincount(actions, minlength=A)
        assert scipy.stats.chisquare(counts[n > 0], expected[n > 0]).pvalue > 1e-3
        assert counts[n == 0].sum() == 0
    np.testing.assert_array_equal(found.visits, np.tile(n, (600, 1)), "no noise without a fraction")
    greedy = run(table_model(), tables, state, KEY, config, explore=True, temperature=jnp.zeros(600))
    assert (greedy.action == n.argmax()).all()
