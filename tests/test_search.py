"""Search against a plain tree, against mctx, and against what must hold of any search."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from jax.extend import core
from search_reference import Reference

from podracer import distributions, search, tree
from podracer.search import Model, Root, SearchConfig, Step

M, A = 40, 5


class Tables(NamedTuple):
    """What an MDP's model knows."""

    next: jax.Array
    reward: jax.Array
    discount: jax.Array
    logits: jax.Array
    value: jax.Array
    legal: jax.Array


@functools.cache
def table_model(masked=True):
    """The model: variables are tables, an embedding is a state."""

    def step(tables, state, action):
        reward, discount = tables.reward[state, action], tables.discount[state, action]
        return Step(reward, discount, *root(tables, tables.next[state, action]))

    def root(tables, state):
        return Root(tables.logits[state], tables.value[state], state, tables.legal[state] if masked else None)

    return Model(root, step)


class MDP:
    """M states with random rewards, signed discounts, logits, values and masks, as tables; the first 8 differ in kind."""

    def __init__(self, seed, masks=True):
        rng = np.random.default_rng(seed)
        self.next = rng.integers(0, M, (M, A))
        self.reward = rng.normal(0, 0.3, (M, A)).astype(np.float32)
        self.discount = rng.choice(np.float32([0.97, -1, 0, 1, -0.9]), (M, A), p=[0.3, 0.3, 0.1, 0.2, 0.1])
        self.logits = rng.normal(0, 1, (M, A)).astype(np.float32)
        self.value = rng.normal(0, 0.5, M).astype(np.float32)
        self.legal = rng.random((M, A)) < 0.7
        self.legal[np.arange(M), rng.integers(0, A, M)] = True
        self.legal[:3], self.legal[3] = True, np.arange(A) == 2
        if not masks:
            self.legal[:] = True

    @property
    def tables(self):
        arrays = (self.next.astype(np.int32), self.reward, self.discount, self.logits, self.value, self.legal)
        return Tables(*map(jnp.asarray, arrays))

    def reference(self, config, state, noise=0.0):
        step = lambda s, a: (self.next[s, a], float(self.reward[s, a]), float(self.discount[s, a]))  # noqa: E731
        evaluate = lambda s: (float(self.value[s]), self.logits[s].astype(float), self.legal[s])  # noqa: E731
        return Reference(config, step, evaluate, state, noise)


@functools.partial(jax.jit, static_argnames=("model", "config", "explore", "keep_tree"))
def run(model, tables, state, key, config, explore=False, keep_tree=False, temperature=1.0):
    root = model.root(tables, state)
    return search.search(
        model, tables, root, key, config, explore=explore, keep_tree=keep_tree, temperature=temperature
    )


KEY = jax.random.key(0)
PUCT = SearchConfig("puct", simulations=24)
GUMBEL = SearchConfig("gumbel", simulations=24, considered=4)


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
    rule, model = search.rule(config), table_model()
    wanted = np.array(
        [reference.halving(min(config.considered, reference.nodes[0].legal.sum()))[:24] for reference in references]
    )
    root = model.root(mdp.tables, jnp.asarray(lanes))
    aid = search.Aid(jnp.asarray(noise, jnp.float32), jnp.asarray(wanted) if config.algorithm == "gumbel" else ())
    seed = tree.Seed(rule.prior(root.logits, root.legal), root.value, root.embedding, aid)
    state = jax.jit(functools.partial(tree.begin, rule))(seed)
    advance = jax.jit(functools.partial(tree.simulate, model.step, rule, 2))
    for i in range(config.simulations):
        state = advance(mdp.tables, seed, jnp.int32(i), state)
        found = jax.tree.map(np.asarray, tree.kept(state))
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


def without_masks(config, lanes=8, seed=0, **settings):
    """A search of an MDP without masks: the MDP and what was found."""
    mdp = MDP(seed, masks=False)
    return mdp, run(table_model(False), mdp.tables, jnp.arange(lanes), KEY, config, **settings)


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
    if config.algorithm == "gumbel":
        return
    capped = dataclasses.replace(config, max_depth=1)
    found = run(table_model(), mdp.tables, jnp.arange(M), KEY, capped)
    np.testing.assert_array_equal(found.depth, 1.0)
    chosen = np.asarray(found.visits) > 0
    behind = mdp.reward + mdp.discount * mdp.value[mdp.next]
    np.testing.assert_allclose(np.asarray(found.q)[chosen], behind[chosen], atol=1e-5)


@pytest.mark.parametrize("config", [PUCT, GUMBEL], ids=lambda config: config.algorithm)
def test_nothing_is_legal(config):
    mdp = MDP(2)
    mdp.legal[:] = False
    found = run(table_model(), mdp.tables, jnp.arange(M), KEY, config, explore=True, keep_tree=True)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(found))


def test_one_simulation():
    """PUCT takes the prior's argmax, Gumbel that of g + l, which is a draw from the policy."""
    mdp, found = without_masks(SearchConfig("puct", simulations=1), lanes=M)
    np.testing.assert_array_equal(found.action, mdp.logits.argmax(-1))
    np.testing.assert_array_equal(found.visits.argmax(-1), mdp.logits.argmax(-1))
    config, lanes = SearchConfig("gumbel", simulations=1), 4000
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


@pytest.mark.parametrize("config", [PUCT, GUMBEL], ids=lambda config: config.algorithm)
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
    mdp.logits[:] = 0
    found = run(table_model(), mdp.tables, jnp.arange(M), KEY, config)
    assert np.mean(np.abs(found.value - V) > 1e-3) > 0.5, "a uniform prior tries others too"
    assert (found.value < V + 1e-4).mean() > 0.5


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
    """How much better the searched policy is on every bandit."""
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
@pytest.mark.parametrize("simulations", [2, 50])
def test_fractions_of_visits_do_not_improve_it_always(simulations):
    """Why Gumbel, where simulations are few."""
    assert 0.02 < np.mean(improvement("puct", simulations) < -1e-5) < 0.6


@pytest.mark.parametrize("algorithm", ["puct", pytest.param("gumbel", marks=pytest.mark.slow)])
def test_signs_by_hand(algorithm):
    """Behind the move that looks better the other player wins at once; where the same player goes on, it is the right one."""
    alternating = Tables(
        next=jnp.array([[1, 2], [3, 3], [3, 3], [3, 3]]),
        reward=jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, -1.0], [9.0, 9.0]]),
        discount=jnp.array([[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]),
        logits=jnp.zeros((4, 2)),
        value=jnp.array([0.0, -0.9, 0.9, 7.0]),
        legal=jnp.ones((4, 2), bool),
    )
    going_on = alternating._replace(discount=jnp.abs(alternating.discount))
    config = SearchConfig(algorithm, simulations=200, bounds=(-1.0, 1.0), value_scale=1.0)
    other, alone = (
        run(table_model(), tables, jnp.zeros(1, jnp.int32), KEY, config) for tables in (alternating, going_on)
    )
    assert (other.action[0], alone.action[0]) == (1, 0)
    np.testing.assert_allclose(other.q[0], (-1, 0), atol=0.3)
    np.testing.assert_allclose(alone.q[0], (1, 0), atol=0.3)
    assert -0.3 < other.value[0] < 0.1
    assert 0.7 < alone.value[0] < 1


BATCH = jnp.array([5, 17, 3, 30, 8, 11, 2, 25])


def same(x, y):
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "config", [PUCT, pytest.param(GUMBEL, marks=pytest.mark.slow)], ids=lambda config: config.algorithm
)
def test_lanes_do_not_see_each_other(config, monkeypatch):
    """Bit for bit: again, in another order, under `vmap` and with other blocks."""
    mdp, model = MDP(5), table_model()
    find = functools.partial(run, model, mdp.tables, key=KEY, config=config)
    expected = find(state=BATCH)
    same(find(state=BATCH), expected)
    same(find(state=BATCH[::-1]), jax.tree.map(lambda x: x[::-1], expected))
    split = jax.vmap(lambda state: find(state=state))(BATCH.reshape(2, 4))
    same(jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), split), expected)
    monkeypatch.setattr(tree, "block", lambda: 1)
    run.clear_cache()
    same(find(state=BATCH), expected)
    run.clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize("config", [PUCT, GUMBEL], ids=lambda config: config.algorithm)
def test_lanes_do_not_see_each_other_at_length(config, monkeypatch):
    """Alone, with a cap that is out of reach, with every way to map them and every block."""
    mdp, model = MDP(5), table_model()
    find = functools.partial(run, model, mdp.tables, key=KEY, config=config)
    expected = find(state=BATCH)
    same(find(state=BATCH, config=dataclasses.replace(config, max_depth=config.simulations)), expected)
    same(find(state=BATCH[:1]), jax.tree.map(lambda x: x[:1], expected))
    for size in (1, 8):
        split = jax.vmap(lambda state: find(state=state))(BATCH.reshape(size, -1))
        same(jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), split), expected)
    for levels in (2, 8):
        monkeypatch.setattr(tree, "block", lambda levels=levels: levels)
        run.clear_cache()
        same(find(state=BATCH), expected)
    run.clear_cache()


def loops(jaxpr, inside=False):
    """Primitives inside of loops."""
    for equation in jaxpr.eqns:
        loop = inside or equation.primitive.name in ("while", "scan")
        if loop:
            yield equation.primitive.name
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr),
        ):
            if isinstance(inner, core.ClosedJaxpr):
                inner = inner.jaxpr
            if isinstance(inner, core.Jaxpr):
                yield from loops(inner, loop)


@pytest.mark.parametrize("mapped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sets_of_variables_and_joined_axes(mapped):
    """Several sets of variables under `vmap`, with shards of lanes inside: each as if it were alone."""
    first, second = MDP(5), MDP(6)
    both = jax.tree.map(lambda *x: jnp.stack(x), first.tables, second.tables)
    if not mapped:
        both = jax.tree.map(lambda x: x[:1], both)
    shards = lambda tables: jax.vmap(lambda state: run(table_model(), tables, state, KEY, PUCT))(BATCH.reshape(2, 4))  # noqa: E731
    found = jax.vmap(shards)(both)
    for i, mdp in enumerate((first, second) if mapped else (first,)):
        expected = run(table_model(), mdp.tables, BATCH, KEY, PUCT)
        same(jax.tree.map(lambda x, i=i: x[i].reshape(8, *x.shape[3:]), found), expected)


def test_nothing_is_drawn_in_a_loop_and_a_mapped_axis_is_joined():
    mdp, config = MDP(5), SearchConfig("puct", simulations=3)

    def find(state):
        return search.search(table_model(), mdp.tables, table_model().root(mdp.tables, state), KEY, config)

    mapped = jax.make_jaxpr(jax.vmap(find))(BATCH.reshape(2, 4))
    names = set(loops(mapped.jaxpr))
    assert "scatter" in names
    assert not {"random_bits", "threefry2x32", "random_fold_in", "random_split"} & names
    assert "f32[8,4,24]" in str(mapped), "rows of 8 lanes"
    assert "f32[2,4,4,24]" not in str(mapped)


def test_embeddings_are_stored_small():
    """What has more than a number a root; models see the dtypes that they gave."""
    seen = []

    def step(variables, embedding, action):
        seen.append({name: x.dtype for name, x in embedding.items()})
        return Step(jnp.zeros(3), jnp.ones(3), jnp.zeros((3, A)), jnp.zeros(3), embedding)

    embedding = {
        "state": jnp.zeros((3, 4)),
        "prefix": jnp.zeros(3),
        "depth": jnp.zeros(3, jnp.int32),
        "board": jnp.zeros((3, 2), jnp.int8),
    }
    config = SearchConfig(simulations=2, embedding_dtype="bfloat16")
    find = lambda root: search.search(Model(None, step), (), root, KEY, config, keep_tree=True).tree  # noqa: E731
    kept = jax.eval_shape(find, Root(jnp.zeros((3, A)), jnp.zeros(3), embedding))
    assert all(given == {name: x.dtype for name, x in embedding.items()} for given in seen)
    stored = {name: (x.dtype.name, x.shape) for name, x in kept.embedding.items()}
    assert stored == {
        "state": ("bfloat16", (3, 3, 4)),
        "prefix": ("float32", (3, 3)),
        "depth": ("int32", (3, 3)),
        "board": ("int8", (3, 3, 2)),
    }


@pytest.mark.parametrize(
    "simulations", [50, pytest.param(200, marks=pytest.mark.slow), pytest.param(800, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("algorithm", ["puct", pytest.param("gumbel", marks=pytest.mark.slow)])
def test_memory_is_the_trees(algorithm, simulations):
    """(S + 1) (16 A + 20 + bytes of an embedding) a root, and no copy of the tables in the loop."""
    lanes, width, config = 16, 64, SearchConfig(algorithm, simulations=simulations)
    zero = jnp.zeros(lanes)

    def step(variables, embedding, action):
        return Step(
            zero + embedding[:, 0], zero + 0.9, embedding[:, :A], embedding[:, 1], jnp.sin(embedding) * variables
        )

    find = lambda root, x: search.search(Model(None, step), x, root, KEY, config)  # noqa: E731
    root = Root(jnp.zeros((lanes, A)), zero, jnp.zeros((lanes, width)))
    compiled = jax.jit(find).lower(root, jnp.float32(1)).compile(compiler_options={"xla_backend_optimization_level": 1})
    formula = lanes * (simulations + 1) * (16 * A + 20 + 4 * width)
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.3 * formula + 20_000
    tables = [f"f32[{lanes},{simulations + 1},{R}]" for R in (4 * A + 4, width)]
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if " copy(" in line and any(x in line.split("=")[1] for x in tables)
    ]
    assert copies == []


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
    for marginal in np.asarray(drawn)[:, :7].T:
        marginal = np.maximum(marginal, 1e-30)
        assert scipy.stats.kstest(marginal, scipy.stats.beta(alpha, 6 * alpha).cdf).pvalue > 1e-3


def test_noise_at_the_root():
    """P <- (1 - f) P + f eta, with alpha by the number of legal actions; f = 0 and evaluation leave the prior."""
    lanes, number = 2000, np.array([1, 2, 5])
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
    state = jnp.zeros(3000, jnp.int32)
    config = SearchConfig(simulations=24, dirichlet_fraction=0.0)
    found = run(
        table_model(),
        tables,
        state,
        KEY,
        config,
        explore=True,
        temperature=jnp.where(jnp.arange(3000) < 1500, 1.0, 0.5),
    )
    n = np.asarray(found.visits[0])
    for actions, weights in ((found.action[:1500], n), (found.action[1500:], n**2)):
        expected = weights / weights.sum() * 1500
        counts = np.bincount(actions, minlength=A)
        assert scipy.stats.chisquare(counts[n > 0], expected[n > 0]).pvalue > 1e-3
        assert counts[n == 0].sum() == 0
    np.testing.assert_array_equal(found.visits, np.tile(n, (3000, 1)), "no noise without a fraction")
    greedy = run(table_model(), tables, state, KEY, config, explore=True, temperature=jnp.zeros(3000))
    assert (greedy.action == n.argmax()).all()


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
    assert search.considered_visits(4, 16) == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    assert search.considered_visits(3, 8) == (0, 0, 0, 1, 1, 2, 2, 3)
    assert search.considered_visits(1, 3) == search.considered_visits(0, 3) == (0, 1, 2)


@pytest.mark.parametrize(
    "config",
    [
        GUMBEL,
        pytest.param(dataclasses.replace(GUMBEL, max_depth=4), marks=pytest.mark.slow),
        pytest.param(PUCT, marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(PUCT, max_depth=5, simulations=50), marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(PUCT, bounds=(-3.0, 3.0)), marks=pytest.mark.slow),
    ],
    ids=lambda config: f"{config.algorithm}-{config.max_depth}-{config.bounds}",
)
def test_mctx_finds_the_same(config):
    """Visits, actions, policies and values, wherever no two scores are too close to call."""
    import mctx

    mdp, lanes = MDP(7), 24
    masked = np.where(mdp.legal, mdp.logits, -1e9).astype(np.float32)  # mctx has no masks but at the root
    tables, model = mdp.tables._replace(logits=jnp.asarray(masked)), table_model(False)

    def step(tables, key, action, state):
        reward, discount, logits, value, state, _ = model.step(tables, state, action)
        return mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value), state

    noise = {"dirichlet_fraction": 0.0, "temperature": 0.0} if config.algorithm == "puct" else {"gumbel_scale": 0.0}
    if config.algorithm == "gumbel":
        noise["max_num_considered_actions"] = config.considered
    if config.bounds:
        low, high = config.bounds
        noise["qtransform"] = functools.partial(mctx.qtransform_by_min_max, min_value=low, max_value=high)
    policy = mctx.muzero_policy if config.algorithm == "puct" else mctx.gumbel_muzero_policy

    @jax.jit
    def theirs(tables, state):
        root = model.root(tables, state)
        out = policy(
            tables, KEY, mctx.RootFnOutput(prior_logits=root.logits, value=root.value, embedding=state), step,
            config.simulations, ~tables.legal[state], config.max_depth, **noise,
        )  # fmt: skip
        summary = out.search_tree.summary()
        return out.action, out.action_weights, summary.visit_counts, summary.value

    state = jnp.arange(lanes)
    ours = run(table_model(), tables, state, KEY, config)
    references = [mdp.reference(config, lane) for lane in range(lanes)]
    for reference in references:
        for _ in range(config.simulations):
            reference.simulate()
    clear = np.array([reference.margin > 1e-5 for reference in references])
    assert clear.mean() > 0.6
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        action, weights, visits, value = theirs(tables, state)
    np.testing.assert_array_equal(ours.visits[clear], visits[clear])
    if config.algorithm == "gumbel":  # of several that are visited most mctx draws one
        np.testing.assert_array_equal(ours.action[clear], action[clear])
    np.testing.assert_allclose(ours.policy[clear], weights[clear], atol=1e-5)
    np.testing.assert_allclose(ours.value[clear], value[clear], atol=1e-5)


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
        (SearchConfig("puct", simulations=100, bounds=(-1, 1)), 0.979),
        (SearchConfig("puct", simulations=400, bounds=(-1, 1)), 0.994),
        (SearchConfig("gumbel", simulations=50, bounds=(-1, 1), value_scale=1.0), 0.941),
        (SearchConfig("puct", simulations=2000, bounds=(-1, 1)), 1.0),
        (SearchConfig("gumbel", simulations=2000, bounds=(-1, 1), value_scale=1.0), 1.0),
    ],
    ids=lambda x: f"{x.algorithm}-{x.simulations}" if isinstance(x, SearchConfig) else "",
)
def test_tic_tac_toe_converges(config, expected):
    """With a uniform prior and no values: minimax moves in so many states; with 2,000 simulations in all endings."""
    boards, Q, lines = endings()
    assert len(boards) == 4520
    if config.simulations >= 400:  # some of them
        few = np.flatnonzero((boards == 0).sum(-1) <= (5 if config.simulations == 2000 else 9))[::15]
        boards, Q = boards[few], Q[few]
    model, root = rollout_free(jnp.asarray(boards), lines)
    find = jax.jit(lambda root: search.search(model, jnp.asarray(lines), root, KEY, config, explore=False).action)
    action = np.asarray(find(root))
    right = Q[np.arange(len(Q)), action] == Q.max(-1)
    assert right.mean() == pytest.approx(expected, abs=0.01 if expected < 1 else 1e-9)
