"""Explanations and pictures of searches: what is said and drawn is what the search found."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from podracer import agents, environments, nets
from podracer.result import explainer
from podracer.result.explanation import search_bars, search_tree
from podracer.result.result import Result
from podracer.run.config import RunConfig
from podracer.search import search
from podracer.training import resolve
from podracer.types import TimeStep

CONFIG = {"hidden_sizes": (8,), "simulations": 12}


@functools.cache
def result(agent="alphazero", environment="tic_tac_toe", own=False, **config):
    """As a run leaves it that learnt nothing."""
    run = RunConfig(num_envs=4)
    network = None
    if own:  # of other shapes than the config's
        params = jnp.asarray(np.random.default_rng(0).normal(size=(18, 10)), jnp.float32)
        say = lambda params, seen: seen["board"].reshape(-1, 18).astype(jnp.float32) @ params  # noqa: E731
        network = nets.feed_forward(
            lambda key: params, lambda params, seen: (say(params, seen)[:, :9], jnp.tanh(say(params, seen)[:, 9]))
        )
    parts = resolve.resolve(agent, environment, run, config=CONFIG | config, network=network)
    hyper = {name: jnp.asarray(value) for name, value in parts.hyper.items()}
    learner = jax.jit(jax.vmap(parts.agent.init))(jax.random.split(jax.random.key(1), 1), hyper)
    return Result(parts, learner, [], None)


@functools.cache
def position(*moves):
    game = result(own=True).environment

    @jax.jit
    def observe(moves):
        step = lambda state, move: (game.step(state, move, jax.random.key(0))[0], ())  # noqa: E731
        return game.observe(jax.lax.scan(step, game.start(), moves)[0])

    return jax.device_get(observe(jnp.array(moves, jnp.int32)))


@functools.cache
def explained(algorithm="puct", moves=(4, 1, 8)):
    return result(own=True).explain(position(*moves), search=algorithm)


def texts(axes):
    return [text.get_text() for text in axes.texts]


LEGAL = [0, 2, 3, 5, 6, 7]


def test_the_numbers_are_what_the_agent_acts_by():
    """They are of the run's own network, without noise, and of legal actions alone."""
    seen, run, found = position(4, 1, 8), result(own=True), explained("gumbel")
    row = jax.tree.map(lambda x: jnp.asarray(x)[None], TimeStep(seen, np.float32(0), np.float32(1), True, False))
    memory, act = run.agent.start(jnp.zeros(1, jnp.int32), 1), jax.jit(run.agent.act, static_argnums=4)
    action, extras, _ = act(run.actor_params(), memory, row, jax.random.key(9), True)
    assert found.algorithm == run.agent.config.search
    assert found.actions.tolist() == LEGAL
    assert (found.action, found.value) == (int(action[0]), float(extras["value"][0]))
    np.testing.assert_allclose(found.policy, extras["policy"][0, np.array(LEGAL)], rtol=1e-6)
    assert found.visits.sum() == found.simulations == 12
    again = run.explain(row._replace(observation=seen))
    np.testing.assert_array_equal(again.visits, found.visits)


@pytest.mark.parametrize("algorithm", ["puct", "gumbel"])
def test_the_numbers_are_the_trees(algorithm):
    seen, run, found = position(4, 1, 8), result(own=True), explained(algorithm)
    said = seen["board"].reshape(18).astype(np.float64) @ np.asarray(run.actor_params().params, np.float64)
    prior = np.exp(said[LEGAL])
    np.testing.assert_allclose(found.prior, prior / prior.sum(), rtol=1e-5)
    assert found.network_value == pytest.approx(np.tanh(said[9]), rel=1e-5)
    edges = {node.actions[0]: node for node in found.nodes(1, 100) if node.actions}
    assert sum(node.visits for node in edges.values()) == 12
    returns = found.network_value
    for i, action in enumerate(LEGAL):
        assert found.visits[i] == (edges[action].visits if action in edges else 0)
        assert np.isnan(found.q[i]) == (action not in edges)
        if action in edges:
            assert edges[action].q == pytest.approx(float(found.q[i]))
            assert edges[action].q == pytest.approx(-edges[action].value, abs=1e-6), "the other one moves there"
            assert edges[action].prior == pytest.approx(float(found.prior[i]))
            returns += found.visits[i] * found.q[i]
    tried, value = found.visits > 0, returns / 13
    if algorithm == "gumbel":
        value = (found.network_value + 12 * np.average(found.q[tried], weights=found.prior[tried])) / 13
    assert found.value == pytest.approx(value, rel=1e-5)
    assert found.policy.sum() == pytest.approx(1)
    if algorithm == "puct":
        np.testing.assert_allclose(found.policy, found.visits / 12, rtol=1e-6)


def test_the_table_has_the_numbers():
    found = explained()
    title, facts, head, *lines = str(found).splitlines()
    assert title == "alphazero on tic_tac_toe"
    assert facts.startswith("12 simulations (puct), ")
    assert head.split() == ["action", "prior", "visits", "policy", "Q"]
    assert len(lines) == 6
    assert lines[0].startswith(f"{found.action:>9}")
    assert lines[0].endswith("plays")
    for line in lines:
        action, prior, visits, policy, *q = line.removesuffix("<- plays").split()
        (i,) = np.flatnonzero(found.actions == int(action))
        assert (float(prior), int(visits)) == (pytest.approx(found.prior[i], abs=5e-4), found.visits[i])
        assert float(policy) == pytest.approx(found.policy[i], abs=5e-4)
        assert len(q) == (found.visits[i] > 0)
    html = found._repr_html_()
    assert html.count("<tr>") == 9
    assert "data:image/png" in html


def test_bars_are_the_numbers():
    found = explained()
    drawn = search_bars(found)
    top, bottom, board = drawn.axes
    columns = {bars.get_label(): [bar.get_height() for bar in bars] for bars in top.containers}
    expected = {"prior": found.prior, "visits": found.visits / 12, "policy": found.policy}
    assert set(columns) == set(expected)
    for name, numbers in expected.items():
        np.testing.assert_allclose(columns[name], numbers, rtol=1e-6)
    np.testing.assert_allclose([bar.get_height() for bar in bottom.containers[0]], np.nan_to_num(found.q), rtol=1e-6)
    names = ["0", "2", "3", "5", "6", "7"]
    assert [label.get_text() for label in bottom.get_xticklabels()] == names
    assert texts(board) == names, "what is illegal has no number"
    np.testing.assert_array_equal(board.images[0].get_array(), found.look(()))


def test_a_tree_has_the_most_visited_nodes(tmp_path):
    found = explained()
    nodes = found.nodes(2, 7)
    assert [node.actions for node in nodes if not node.actions] == [()]
    assert len(nodes) == 7
    assert max(len(node.actions) for node in nodes) == 2
    visits = {node.actions: node.visits for node in nodes}
    everything = {node.actions: node for node in found.nodes(12, 10_000)}
    left_out = [node.visits for actions, node in everything.items() if actions not in visits and len(actions) <= 2]
    assert max(left_out, default=0) <= min(visits.values())
    for actions, node in everything.items():
        assert set(actions).isdisjoint({4, 1, 8}), "illegal"
        below = [other.visits for way, other in everything.items() if way[:-1] == actions and way]
        if below and actions:
            assert sum(below) == node.visits - 1
    (axes,) = search_tree(found, 2, 7).axes
    boxes = axes.child_axes
    assert len(boxes) == 7
    assert all(len(box.images) == 1 for box in boxes)
    numbers = [re.fullmatch(r"n (\d+)   Q ([+-][\d.]+)\nP ([\d.]+)", text) for text in texts(axes)]
    drawn = sorted((int(m[1]), float(m[2]), float(m[3])) for m in numbers if m)
    assert drawn == sorted((n.visits, round(n.q, 2), round(n.prior, 2)) for n in nodes if n.actions)
    with Image.open(found.tree(tmp_path / "new" / "tree.png")) as picture:
        assert min(picture.size) > 200
    assert found.bars(tmp_path / "bars.png")._repr_png_()


def test_the_line_follows_the_most_visited_to_the_end():
    found = explained("puct", (0, 3, 1, 4))  # 2 wins
    nodes = {node.actions: node for node in found.nodes(12, 10_000)}
    assert nodes[2,].ended
    assert nodes[2,].q == 1
    assert not any(len(actions) > 1 and actions[0] == 2 for actions in nodes), "nothing comes behind the end"
    assert found.variation == (2,)
    for moves in ((4, 1, 8), (1, 2, 8), (1, 6, 2)):  # the last two: not the likeliest
        found = explained("puct", moves)
        nodes, line = {node.actions: node for node in found.nodes(12, 10_000)}, ()
        for action in found.variation:
            siblings = [node.visits for way, node in nodes.items() if way and way[:-1] == line]
            line = (*line, action)
            assert nodes[line].visits == max(siblings)
        assert len(line) > 1
        assert nodes[line].ended or not any(way[:-1] == line for way in nodes)


def test_boards_behind_moves():
    look = explained().look
    assert look((4,)) is None, "somebody's stone is there"
    assert look((0, 0, 2)) is None
    board = look((0,))
    assert (board != look(())).any(axis=(1, 2)).sum() > 0
    assert (board[24:] == look(())[24:]).all(), "a stone in the first row"


@pytest.mark.slow
def test_a_game_is_animated_move_by_move(tmp_path):
    """Both sides' moves, a stone a frame, slowly enough to be followed."""
    with Image.open(result(own=True).animate(tmp_path / "game.gif")) as picture:
        frames = []
        for i in range(picture.n_frames):
            picture.seek(i)
            assert picture.info["duration"] > 500
            cells = np.asarray(picture.convert("RGB"))[12::24, 12::24]
            frames.append(cells)
    assert 6 <= len(frames) <= 10
    changed = [np.argwhere((a != b).any(axis=-1)) for a, b in itertools.pairwise(frames)]
    assert [len(cells) for cells in changed] == [1] * (len(frames) - 1)
    colours = [tuple(after[tuple(cell[0])]) for after, cell in zip(frames[1:], changed)]
    assert len(set(colours)) == 2
    assert all(colour == colours[i % 2] for i, colour in enumerate(colours)), "in turns"


@pytest.mark.slow
def test_a_learned_model_without_boards(tmp_path):
    """MuZero on what is no game, frames stacked, its depth limited."""
    run = result("muzero", "catch", frame_stack=2, max_depth=2, hidden_sizes=(4,), state_size=4, head_size=4)
    shape = run.environment.spec.observation_space.shape
    with pytest.raises(ValueError, match="the environment shows"):
        run.explain(np.zeros(shape))
    seen = np.zeros((*shape, 2), run.environment.spec.observation_space.dtype)
    found = run.explain(seen)
    assert found.visits.sum() == 12
    assert found.look is None
    assert len(found.variation) <= 2
    (axes,) = search_tree(found).axes
    assert texts(axes.child_axes[0]) == [f"{found.value:+.2f}"]
    assert {len(node.actions) for node in found.nodes(3, 100)} == {0, 1, 2}
    assert len(search_bars(found).axes) == 2


def test_many_actions():
    """The table has the actions that fit, and the number of the rest."""
    found = explained()
    many = 40
    numbers = {name: np.linspace(0, 1, many) for name in ("prior", "policy", "q")}
    found = dataclasses.replace(found, actions=np.arange(many), visits=np.arange(many), action=1, look=None, **numbers)
    _, bottom = search_bars(found).axes
    assert [int(label.get_text()) for label in bottom.get_xticklabels()] == [1, *range(17, 40)]
    assert bottom.get_xlabel() == "action (and 16 more)"
    assert str(found).endswith("and 16 more")


def test_what_cannot_be_explained():
    catch = environments.make("catch")
    spec, zeros = catch.spec, np.zeros(catch.spec.observation_space.shape)
    parts = resolve.resolve("ppo", catch, RunConfig(num_envs=4))
    with pytest.raises(ValueError, match="ppo does not search; alphazero, efficientzero and muzero do"):
        Result(parts, (), [], None).explain(zeros)
    parts = resolve.resolve(agents.muzero.make(spec), catch, RunConfig(num_envs=4))
    with pytest.raises(ValueError, match="given to train\\(\\) by its name"):
        Result(parts, (), [], None).explain(zeros)
    with pytest.raises(ValueError, match="simulations=0 needs an agent that is given to train\\(\\) by its name"):
        Result(parts, (), [], None).player(simulations=0)
    run, seen = result(own=True), position(4, 1, 8)
    with pytest.raises(ValueError, match="the observation is .*; the environment shows"):
        run.explain({"board": seen["board"]})
    with pytest.raises(ValueError, match="simulations"):
        run.explain(seen, simulations=0)
    with pytest.raises(ValueError, match="algorithm"):
        run.explain(seen, search="alpha-beta")
    with pytest.raises(ValueError, match="keep_tree=True"):
        explainer.from_search(search.SearchResult(*[np.zeros((1, 2))] * 6), search.SearchConfig())
