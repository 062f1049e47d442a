"""Random decision processes as tables, and searches of them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.search import search
from podracer.search.search import Model, Root, SearchConfig, Step
from tests.support.search_reference import Reference

M, A = 40, 5
"""States and actions."""


class Tables(NamedTuple):
    """The tables of an MDP's model."""

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
GUMBEL = SearchConfig("gumbel", simulations=24, considered=4, root_value="mean")


ALTERNATING = Tables(
    next=jnp.array([[1, 2], [3, 3], [3, 3], [3, 3]]),
    reward=jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, -1.0], [9.0, 9.0]]),
    discount=jnp.array([[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]),
    logits=jnp.zeros((4, 2)),
    value=jnp.array([0.0, -0.9, 0.9, 7.0]),
    legal=jnp.ones((4, 2), bool),
)
"""Two moves: after the one that looks better the other player wins at once. With discounts of 1 it is the right one."""
