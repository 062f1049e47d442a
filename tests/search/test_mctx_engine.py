"""Searches by mctx beside our own: the same results without noise, the same distributions with it, and refusals."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer.agents import AlphaZeroConfig, MuZeroConfig
from podracer.result import explainer
from podracer.search import mctx_engine, search
from podracer.search.search import SearchConfig
from tests.support.tables import ALTERNATING, GUMBEL, KEY, MDP, PUCT, run, table_model

NAMES = {"policy", "value", "visits", "q", "depth"}


def with_mctx(config):
    """The same settings with the other engine."""
    return dataclasses.replace(config, engine="mctx")


def clear_lanes(mdp, config, lanes):
    """Marks roots, [lanes], where no two scores of a plain search are too close to call."""
    references = [mdp.reference(config, lane) for lane in range(lanes)]
    for reference in references:
        for _ in range(config.simulations):
            reference.simulate()
    return np.array([reference.margin > 1e-5 for reference in references])


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(GUMBEL, root_value="mixed"),
        *(
            pytest.param(config, marks=pytest.mark.slow)
            for config in (
                GUMBEL,
                dataclasses.replace(GUMBEL, max_depth=4),
                dataclasses.replace(GUMBEL, bounds=(-3.0, 5.0), value_scale=1.0, visit_offset=20.0),
                PUCT,
                dataclasses.replace(PUCT, root_value="action", epsilon=0.5),
                dataclasses.replace(PUCT, max_depth=5, simulations=50, root_value="mixed"),
                dataclasses.replace(PUCT, bounds=(-3.0, 3.0), c_init=2.0, c_base=100.0),
            )
        ),
    ],
    ids=lambda config: f"{config.algorithm}-{config.max_depth}-{config.bounds}-{config.root_value}",
)
def test_both_engines_find_the_same_without_noise(config):
    mdp, lanes = MDP(7), 24
    clear = clear_lanes(mdp, config, lanes)
    assert clear.mean() > 0.6
    find = lambda config: run(table_model(), mdp.tables, jnp.arange(lanes), KEY, config, keep_tree=True)  # noqa: E731
    ours, theirs = (jax.tree.map(lambda x: np.asarray(x)[clear], find(each)) for each in (config, with_mctx(config)))
    assert (theirs.tree.choice == -1).all(), "mctx keeps no choices: this is its tree"
    for name in NAMES | {"action"} if config.algorithm == "gumbel" else NAMES:  # of most visited ones PUCT draws
        np.testing.assert_allclose(getattr(theirs, name), getattr(ours, name), atol=1e-5, err_msg=name)
    assert (np.take_along_axis(theirs.visits, theirs.action[:, None], 1)[:, 0] == theirs.visits.max(1)).all()
    # At the cap an edge is evaluated again: ours makes a node for that, mctx takes the one that there is.
    if config.max_depth is None:
        for name in ("P", "n", "W", "child", "v", "r", "d", "embedding"):
            x, y = getattr(theirs.tree, name), getattr(ours.tree, name)
            np.testing.assert_allclose(x, y, atol=2e-5, err_msg=name)


def frequencies(config, root):
    """Mean fractions of visits, the variances of these and frequencies of actions, of many searches from a root."""
    mdp, lanes, rounds = MDP(3), 256, 8
    found = [
        run(table_model(), mdp.tables, jnp.full(lanes, root), key, config, explore=True, temperature=0.5)
        for key in jax.random.split(KEY, rounds)
    ]
    visits = np.concatenate([np.asarray(each.visits) for each in found]) / config.simulations
    actions = np.concatenate([np.asarray(each.action) for each in found])
    return visits.mean(0), visits.var(0), np.bincount(actions, minlength=visits.shape[1]) / len(actions)


@pytest.mark.slow
@pytest.mark.parametrize("root", [0, 7])
@pytest.mark.parametrize("config", [dataclasses.replace(PUCT, dirichlet_alpha=1.0), GUMBEL], ids=["puct", "gumbel"])
def test_both_engines_explore_alike(config, root):
    """Compares roots whose actions are all legal, for mctx draws Dirichlet noise for illegal ones, too."""
    if not MDP(3).legal[root].all():
        root = 1
    for ours, theirs in zip(frequencies(config, root), frequencies(with_mctx(config), root)):
        np.testing.assert_allclose(theirs, ours, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["puct", "gumbel"])
def test_signs_by_hand(algorithm):
    """The other player wins at once after the move that looks better; alone it is the right one."""
    config = SearchConfig(algorithm, simulations=100, bounds=(-1.0, 1.0), value_scale=1.0, engine="mctx")
    state = jnp.zeros(1, jnp.int32)
    other = run(table_model(), ALTERNATING, state, KEY, config)
    alone = run(table_model(), ALTERNATING._replace(discount=jnp.abs(ALTERNATING.discount)), state, KEY, config)
    assert (other.action[0], alone.action[0]) == (1, 0)
    assert other.value[0] < 0.1 < 0.4 < alone.value[0]
    assert other.q[0, 0] < -0.5 < 0.5 < alone.q[0, 0]


@pytest.mark.slow
def test_a_search_by_mctx_is_explained():
    mdp, config = MDP(7), with_mctx(dataclasses.replace(GUMBEL, simulations=8))
    found = run(table_model(), mdp.tables, jnp.arange(4), KEY, config, keep_tree=True)
    explanation = explainer.from_search(found, config, lane=3)  # with one legal action
    assert explanation.actions.tolist() == [2]
    assert explanation.visits.tolist() == [8]
    assert explanation.variation[0] == 2
    ours = run(
        table_model(), mdp.tables, jnp.arange(4), KEY, dataclasses.replace(config, engine="podracer"), keep_tree=True
    )
    assert explanation.variation == explainer.from_search(ours, config, lane=3).variation
    assert len(explanation.variation) > 1


@pytest.mark.slow
def test_temperatures_are_of_lanes():
    mdp, config, lanes = MDP(7), with_mctx(dataclasses.replace(PUCT, dirichlet_alpha=0.3)), 64
    temperature = jnp.where(jnp.arange(lanes) < lanes // 2, 0.0, 1e4)
    state = jnp.zeros(lanes, jnp.int32)
    found = run(table_model(), mdp.tables, state, KEY, config, explore=True, temperature=temperature)
    visits = np.asarray(found.visits)
    most = visits[np.arange(lanes), found.action] == visits.max(1)
    assert most[: lanes // 2].all()
    assert not most[lanes // 2 :].all()


def test_settings_that_mctx_lacks_are_refused():
    with pytest.raises(ValueError, match=r"^embedding_dtype='bfloat16': mctx stores .* engine='mctx'\.$"):
        SearchConfig(engine="mctx", embedding_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"^dirichlet_alpha=None: mctx draws .* engine='mctx'\."):
        run(table_model(), MDP(0).tables, jnp.arange(2), KEY, SearchConfig(engine="mctx"), explore=True)
    with pytest.raises(ValueError, match="engine='other': expected one of 'podracer', 'mctx'"):
        SearchConfig(engine="other")


def test_without_mctx_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"\(the extra 'search'\), not installed here: pip install mctx"):
        search.settings(MuZeroConfig(engine="mctx"))
    assert search.settings(MuZeroConfig()).engine == "podracer"


SMALL = {
    "hidden_sizes": (8,),
    "simulations": 2,
    "rollout_length": 4,
    "batch_size": 4,
    "replay_capacity": 64,
    "replay_min_size": 16,
    "replay_ratio": 0.5,
}


@pytest.fixture
def searches(monkeypatch):
    """Records the searches that the engine is asked for."""
    found, search_by_mctx = [], mctx_engine.search
    monkeypatch.setattr(mctx_engine, "search", lambda *a, **k: found.append(1) or search_by_mctx(*a, **k))
    return found


@pytest.mark.slow
@pytest.mark.nightly
def test_muzero_trains_with_it(searches):
    model = {"unroll_length": 1, "n_step": 1, "num_bins": 3, "state_size": 4, "head_size": 4}
    result = podracer.train(
        "muzero",
        "catch",
        config=SMALL | model | {"engine": "mctx"},
        total_steps=64,
        num_envs=4,
        eval_episodes=1,
        progress=False,
    )
    assert searches
    assert result.summary["updates"] > 2
    assert np.isfinite([row["loss/total"] for row in result.history if "loss/total" in row]).all()
    assert result.description["agent_config"]["engine"] == "mctx"


@pytest.mark.slow
def test_alphazero_trains_with_it(searches):
    """Games for two, whose states have masks behind the root, with several shards under `vmap`."""
    result = podracer.train(
        "alphazero",
        "tic_tac_toe",
        config=AlphaZeroConfig(**SMALL, engine="mctx"),
        total_steps=128,
        num_envs=4,
        num_shards=2,
        eval_episodes=1,
        progress=False,
    )
    assert searches
    assert result.summary["updates"] > 2
    assert np.isfinite([row["loss/total"] for row in result.history if "loss/total" in row]).all()
