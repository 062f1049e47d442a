"""Search against a plain tree, and against what must hold of any search."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from podracer.agents import MuZeroConfig
from podracer.search import action_selection, search, tree
from podracer.search.search import Root, SearchConfig
from tests.support.tables import ALTERNATING, GUMBEL, KEY, MDP, PUCT, A, M, run, table_model


@pytest.mark.parametrize(
    "config",
    [
        PUCT,
        GUMBEL,
        SearchConfig("puct", simulations=24, max_depth=3, bounds=(-2.0, 2.0)),
        pytest.param(
            SearchConfig("gumbel", simulations=24, max_depth=3, bounds=(-2, 2), value_scale=1.0), marks=pytest.mark.slow
        ),
    ],
    ids=lambda config: f"{config.algorithm}-{config.max_depth}",
)
def test_every_node_after_every_simulation(config):
    mdp, lanes = MDP(0), np.arange(8)
    noise = np.random.default_rng(1).gumbel(size=(len(lanes), A)) * (1 if config.algorithm == "gumbel" else 0.01)
    references = [mdp.reference(config, state, noise[state]) for state in lanes]
    tree_config, model = action_selection.tree_config(config), table_model()
    target_visits = np.array(
        [reference.halving(min(config.considered, reference.nodes[0].legal.sum()))[:24] for reference in references]
    )
    root = model.root(mdp.tables, jnp.asarray(lanes))
    inputs = action_selection.SelectionInputs(
        jnp.asarray(noise, jnp.float32), jnp.asarray(target_visits) if config.algorithm == "gumbel" else ()
    )
    roots = tree.RootInputs(tree_config.prior(root.logits, root.legal), root.value, root.embedding, inputs)
    state = jax.jit(functools.partial(tree.init, tree_config))(roots)
    advance = jax.jit(functools.partial(tree.simulate, model.step, tree_config, 2))
    for i in range(config.simulations):
        state = advance(mdp.tables, roots, jnp.int32(i), state)
        found = jax.tree.map(np.asarray, tree.as_tree(state))
        for reference in references:
            reference.simulate()
        expected = [np.array(x) for x in zip(*map(as_arrays, references))]
        for name, y in zip(("n", "W", "child", "v", "r", "d"), expected):
            x = getattr(found, name)[:, : i + 2]
            np.testing.assert_allclose(x, y, atol=1e-5, err_msg=f"{name} after simulation {i}")
        choices = np.array([[reference.choose(node) for node in reference.nodes] for reference in references])
        asked = slice(1 if i == config.simulations - 1 else 0, i + 2)  # nobody asks for the root's last choice
        np.testing.assert_array_equal(found.choice[:, asked], choices[:, asked], err_msg=f"after simulation {i}")
    assert min(reference.margin for reference in references) > 1e-6, "a tie would make the comparison arbitrary"


def as_arrays(reference):
    """n, W, child [nodes, A] and v, r, d [nodes] of a plain tree."""
    nodes, actions = reference.nodes, range(A)
    number = {id(node): i for i, node in enumerate(nodes)}
    return (
        [node.n for node in nodes],
        [[sum(x) for x in node.returns] for node in nodes],
        [[number[id(node.children[a])] if a in node.children else -1 for a in actions] for node in nodes],
        [node.value for node in nodes],
        [node.reward for node in nodes],
        [node.discount for node in nodes],
    )


@pytest.mark.parametrize("config", [PUCT, GUMBEL], ids=lambda config: config.algorithm)
def test_counts_add_up(config):
    """Simulations end up on the root's edges, a child was visited as often as its edge, and never an illegal action."""
    mdp = MDP(2)
    found = jax.tree.map(
        np.asarray, run(table_model(), mdp.tables, jnp.arange(M), KEY, config, explore=True, keep_tree=True)
    )
    kept = found.tree
    np.testing.assert_array_equal(found.visits.sum(-1), config.simulations)
    assert (found.visits[~mdp.legal] == 0).all()
    assert (found.policy[~mdp.legal] == 0).all()
    np.testing.assert_allclose(found.policy.sum(-1), 1, rtol=1e-6)
    assert mdp.legal[np.arange(M), found.action].all()
    lane, node, action = np.nonzero(kept.child >= 0)
    child = kept.child[lane, node, action].astype(int)
    np.testing.assert_array_equal(1 + kept.n[lane, child].sum(-1), kept.n[lane, node, action])
    assert mdp.legal[kept.embedding[lane, node], action].all()
    np.testing.assert_array_equal(kept.embedding[lane, child], mdp.next[kept.embedding[lane, node], action])
    np.testing.assert_allclose(
        found.value, (mdp.value[:M] + (found.q * found.visits).sum(-1)) / (1 + config.simulations), atol=1e-5
    )
    assert len(np.unique(child + 100 * lane)) == M * config.simulations, "every simulation adds a node"
    root, prior = jax.tree.map(lambda x: jnp.asarray(x[:, 0]), kept[:8]), scipy.special.softmax(mdp.logits[:M], axis=-1)
    weight = np.where(found.visits > 0, np.maximum(kept.P[:, 0], 0) if config.algorithm == "puct" else prior, 0)
    tried = (weight * found.q).sum(-1) / weight.sum(-1)
    expected = {
        "mean": found.value,
        "action": found.q[np.arange(M), found.action],
        "mixed": (mdp.value[:M] + config.simulations * tried) / (1 + config.simulations),
    }
    for name, value in expected.items():
        worth = functools.partial(search._root_value, dataclasses.replace(config, root_value=name))
        np.testing.assert_allclose(jax.jit(worth)(tree.Tree(*root), found.action), value, rtol=1e-4, atol=1e-5)
    if config.algorithm == "gumbel":
        return
    capped = dataclasses.replace(config, max_depth=1, bounds=(-0.01, 0.01))
    found = run(table_model(), mdp.tables, jnp.arange(M), KEY, capped)
    assert (np.asarray(found.visits)[~mdp.legal] == 0).all(), "however bad what is legal looks"
    np.testing.assert_array_equal(found.depth, 1.0)
    chosen = np.asarray(found.visits) > 0
    behind = mdp.reward + mdp.discount * mdp.value[mdp.next]
    np.testing.assert_allclose(np.asarray(found.q)[chosen], behind[chosen], atol=1e-5)


def test_what_gumbel_tries_first_does_not_lower_values():
    """A reward of 1 for action 0 for ever, which network and search know: V tells how often others were tried too."""
    gamma, logits = 0.99, jnp.float32([[4.0, 0.0, 0.0]])
    worth = jnp.float32([1 / (1 - gamma)])
    step = lambda _, state, action: search.Step(jnp.float32(action == 0), jnp.full(1, gamma), logits, worth, state)  # noqa: E731
    model, root = search.Model(lambda *_: root, step), Root(logits, worth, jnp.zeros((1, 1)))
    config = search.settings(MuZeroConfig(search="gumbel", simulations=8))
    found = jax.jit(lambda: search.search(model, (), root, KEY, config, explore=False))()
    np.testing.assert_allclose(found.value, worth, atol=0.1)
    assert np.sum(np.asarray(found.visits) * np.asarray(found.q)) / 8 < 99.6


@pytest.mark.parametrize("config", [PUCT, GUMBEL], ids=lambda config: config.algorithm)
def test_nothing_is_legal(config):
    mdp = MDP(2)
    mdp.legal[:] = False
    found = run(table_model(), mdp.tables, jnp.arange(M), KEY, config, explore=True, keep_tree=True)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(found))


def test_one_simulation():
    """PUCT takes the prior's argmax, Gumbel that of g + l, which is a draw from the policy."""
    mdp = MDP(0, masks=False)
    found = run(table_model(False), mdp.tables, jnp.arange(M), KEY, SearchConfig("puct", simulations=1))
    np.testing.assert_array_equal(found.action, mdp.logits.argmax(-1))
    np.testing.assert_array_equal(found.visits.argmax(-1), mdp.logits.argmax(-1))
    config, lanes = SearchConfig("gumbel", simulations=1), 1000
    root = Root(jnp.tile(mdp.logits[:1], (lanes, 1)), jnp.zeros(lanes), jnp.zeros(lanes, jnp.int32))
    searched = jax.jit(lambda key: search.search(table_model(False), mdp.tables, root, key, config).visits)
    drawn = np.asarray(searched(KEY)).sum(0)
    policy = scipy.special.softmax(mdp.logits[0].astype(float))
    assert scipy.stats.chisquare(drawn, policy * lanes).pvalue > 1e-3


def optimal(mdp, gamma=0.9):
    """V*, Q* of an MDP, whose discounts become +- gamma or 0, by value iteration (minimax where negative)."""
    mdp.discount = (gamma * np.sign(mdp.discount)).astype(np.float32)
    V = np.zeros(M)
    for _ in range(400):
        Q = mdp.reward + mdp.discount * V[mdp.next]
        V = Q.max(-1)
    return V, Q


@pytest.mark.parametrize(
    "config", [PUCT, pytest.param(GUMBEL, marks=pytest.mark.slow)], ids=lambda config: config.algorithm
)
def test_with_an_optimal_prior_values_stay_optimal(config):
    mdp = MDP(3, masks=False)
    V, Q = optimal(mdp)
    mdp.value, mdp.logits = V.astype(np.float32), np.where(Q.max(-1, keepdims=True) == Q, 0, -1e4).astype(np.float32)
    found = run(table_model(), mdp.tables, jnp.arange(M), KEY, config)
    visited = np.asarray(found.visits) > 0
    np.testing.assert_allclose(np.asarray(found.q)[visited], Q[visited], atol=2e-5)
    if config.algorithm == "puct":
        np.testing.assert_allclose(found.value, V, atol=2e-5)
    else:
        assert np.mean(found.value - V) < -0.01, "it tries others"
        found = run(table_model(), mdp.tables, jnp.arange(M), KEY, dataclasses.replace(config, root_value="action"))
        np.testing.assert_allclose(found.value, V, atol=2e-5)
    mdp.logits[:] = 0
    found = run(table_model(), mdp.tables, jnp.arange(M), KEY, config)
    assert np.mean(np.abs(found.value - V) > 1e-3) > 0.5, "a uniform prior tries others too"
    assert (found.value < V + 1e-4).mean() > 0.5


@pytest.mark.parametrize("algorithm", ["puct", pytest.param("gumbel", marks=pytest.mark.slow)])
def test_signs_by_hand(algorithm):
    """After the move that looks better the other player wins at once. Where the same player goes on, it is right."""
    going_on = ALTERNATING._replace(discount=jnp.abs(ALTERNATING.discount))
    config = SearchConfig(algorithm, simulations=200, bounds=(-1.0, 1.0), value_scale=1.0)
    other, alone = (
        run(table_model(), tables, jnp.zeros(1, jnp.int32), KEY, config) for tables in (ALTERNATING, going_on)
    )
    assert (other.action[0], alone.action[0]) == (1, 0)
    np.testing.assert_allclose(other.q[0], (-1, 0), atol=0.3)
    np.testing.assert_allclose(alone.q[0], (1, 0), atol=0.3)
    assert -0.6 < other.value[0] < 0.1 < 0.4 < alone.value[0] < 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"simulations": 0}, "simulations=0: must be at least 1"),
        ({"max_depth": 0}, "max_depth=0: must be at least 1"),
        ({"considered": 0}, "considered=0: must be at least 1"),
        ({"bounds": (1.0, 1.0)}, r"bounds=\(1.0, 1.0\): expected \(low, high\) with low below high"),
        ({"bounds": (1.0,)}, "expected .low, high."),
        ({"algorithm": "uct"}, "algorithm='uct': expected one of 'puct', 'gumbel'"),
        ({"dirichlet_fraction": 1.5}, "dirichlet_fraction=1.5: must be at most 1.0"),
        ({"embedding_dtype": "int8"}, "embedding_dtype='int8'"),
    ],
)
def test_bad_input(settings, message):
    with pytest.raises(ValueError, match=message):
        SearchConfig(**settings)


def test_sequential_halving_by_hand():
    assert action_selection.considered_visits(4, 16) == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    assert action_selection.considered_visits(3, 8) == (0, 0, 0, 1, 1, 2, 2, 3)
    assert action_selection.considered_visits(1, 3) == action_selection.considered_visits(0, 3) == (0, 1, 2)
