"""Trees of many roots: lanes, mapped axes, memory and embeddings."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from podracer.search import search, tree
from podracer.search.search import Model, Root, SearchConfig, Step
from tests.support.tables import GUMBEL, KEY, MDP, PUCT, A, M, run, table_model

BATCH = jnp.arange(M) * 7 % M


def alike(x, y):
    """The same, but for how a softmax rounds in an array of another shape."""
    chex.assert_trees_all_equal(x._replace(policy=()), y._replace(policy=()))
    np.testing.assert_allclose(x.policy, y.policy, atol=1e-6)


@pytest.mark.parametrize(
    "config", [PUCT, pytest.param(GUMBEL, marks=pytest.mark.slow)], ids=lambda config: config.algorithm
)
def test_lanes_do_not_see_each_other(config, monkeypatch):
    """Bit for bit: again, in another order, under `vmap` and with other blocks."""
    mdp, model = MDP(5), table_model()
    find = functools.partial(run, model, mdp.tables, key=KEY, config=config)
    expected = find(state=BATCH)
    chex.assert_trees_all_equal(find(state=BATCH), expected)
    chex.assert_trees_all_equal(find(state=BATCH[::-1]), jax.tree.map(lambda x: x[::-1], expected))
    split = jax.vmap(lambda state: find(state=state))(BATCH.reshape(2, -1))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x.reshape(M, *x.shape[2:]), split), expected)
    monkeypatch.setattr(tree, "levels_per_iteration", lambda: 1)
    run.clear_cache()
    chex.assert_trees_all_equal(find(state=BATCH), expected)
    run.clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize("config", [PUCT, GUMBEL], ids=lambda config: config.algorithm)
def test_lanes_do_not_see_each_other_at_length(config, monkeypatch):
    """Alone, with a cap out of reach, however they are mapped, with every block."""
    mdp, model = MDP(5), table_model()
    find = functools.partial(run, model, mdp.tables, key=KEY, config=config)
    expected = find(state=BATCH)
    chex.assert_trees_all_equal(
        find(state=BATCH, config=dataclasses.replace(config, max_depth=config.simulations)), expected
    )
    alike(find(state=BATCH[:1]), jax.tree.map(lambda x: x[:1], expected))
    for size in (1, 8):
        split = jax.vmap(lambda state: find(state=state))(BATCH.reshape(size, -1))
        alike(jax.tree.map(lambda x: x.reshape(M, *x.shape[2:]), split), expected)
    assert tree.levels_per_iteration() == 2, "what was expected"
    for levels in (1, 4, 8):
        monkeypatch.setattr(tree, "levels_per_iteration", lambda levels=levels: levels)
        run.clear_cache()
        chex.assert_trees_all_equal(find(state=BATCH), expected)
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


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
def test_sets_of_variables_and_joined_axes(mapped):
    """Several sets of variables under `vmap`, with shards of lanes inside: each as if it were alone."""
    first, second = MDP(5), MDP(6)
    both = jax.tree.map(lambda *x: jnp.stack(x), first.tables, second.tables)
    if not mapped:
        both = jax.tree.map(lambda x: x[:1], both)
    shards = lambda tables: jax.vmap(lambda state: run(table_model(), tables, state, KEY, PUCT))(BATCH.reshape(2, -1))  # noqa: E731
    found = jax.vmap(shards)(both)
    for i, mdp in enumerate((first, second) if mapped else (first,)):
        expected = run(table_model(), mdp.tables, BATCH, KEY, PUCT)
        chex.assert_trees_all_equal(jax.tree.map(lambda x, i=i: x[i].reshape(M, *x.shape[3:]), found), expected)


def test_nothing_is_drawn_in_a_loop_and_a_mapped_axis_is_joined():
    mdp, config = MDP(5), SearchConfig("puct", simulations=3)

    def find(state):
        return search.search(table_model(), mdp.tables, table_model().root(mdp.tables, state), KEY, config)

    mapped = jax.make_jaxpr(jax.vmap(find))(BATCH[:8].reshape(2, 4))
    names = set(loops(mapped.jaxpr))
    assert "scatter" in names
    assert not {"random_bits", "threefry2x32", "random_fold_in", "random_split"} & names
    assert "f32[8,4,24]" in str(mapped), "rows of 8 lanes"
    assert "f32[2,4,4,24]" not in str(mapped)


def test_embeddings_are_stored_small():
    """Embeddings with more than a number a root are; models see the dtypes that they gave."""
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
    compiled = jax.jit(find).lower(root, jnp.float32(1)).compile()
    formula = lanes * (simulations + 1) * (16 * A + 20 + 4 * width)
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.3 * formula + 20_000
    tables = [f"f32[{lanes},{simulations + 1},{R}]" for R in (4 * A + 4, width)]
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if " copy(" in line and any(x in line.split("=")[1] for x in tables)
    ]
    assert copies == []


@pytest.mark.slow
def test_inside_of_a_driver():
    """A scan of mapped shards under `shard_map`, as Anakin has them, finds the same."""
    mdp, mesh = MDP(5), jax.make_mesh((1,), ("devices",), (jax.sharding.AxisType.Auto,))
    expected = run(table_model(), mdp.tables, BATCH, KEY, PUCT)

    def driver(tables, state):
        def turn(carry, _):
            return carry, jax.vmap(lambda state: run(table_model(), tables, state, KEY, PUCT))(state)

        return jax.lax.scan(turn, 0, None, length=2)[1]

    spec = jax.sharding.PartitionSpec()
    found = jax.jit(jax.shard_map(driver, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(
        mdp.tables, BATCH.reshape(2, -1)
    )
    for i in range(2):
        chex.assert_trees_all_equal(jax.tree.map(lambda x, i=i: x[i].reshape(M, *x.shape[3:]), found), expected)


@pytest.mark.parametrize(
    "wrong",
    [
        {"discount": jnp.ones(1)},
        {"value": jnp.zeros((3, 1))},
        {"logits": jnp.zeros((1, A))},
        {"embedding": jnp.zeros((3, 5))},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_steps_of_another_shape_are_refused(wrong):
    """A discount of one number would be taken for that of all lanes."""
    right = Step(jnp.zeros(3), jnp.ones(3), jnp.zeros((3, A)), jnp.zeros(3), jnp.zeros((3, 4)))
    find = lambda step: search.search(  # noqa: E731
        Model(None, lambda variables, embedding, action: step), (), root, KEY, SearchConfig(simulations=2)
    )
    root = Root(jnp.zeros((3, A)), jnp.zeros(3), jnp.zeros((3, 4)))
    jax.eval_shape(find, right)
    with pytest.raises(AssertionError, match="shape"):
        jax.eval_shape(find, right._replace(**wrong))
