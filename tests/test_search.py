"""Search against a plain tree, against mctx, and against what must hold of any search."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from search_reference import Reference

from podracer import search, tree
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

    def model(self, masked=True):
        """The model: variables are the tables, an embedding is a state."""

        def step(tables, state, action):
            reward, discount = tables.reward[state, action], tables.discount[state, action]
            state = tables.next[state, action]
            legal = tables.legal[state] if masked else None
            return Step(reward, discount, tables.logits[state], tables.value[state], state, legal)

        def root(tables, state):
            return Root(tables.logits[state], tables.value[state], state, tables.legal[state] if masked else None)

        return Model(root, step)

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


@pytest.mark.parametrize(
    "config",
    [
        SearchConfig("puct", simulations=24),
        SearchConfig("gumbel", simulations=24, considered=4),
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
    rule, model = search.rule(config), mdp.model()
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
