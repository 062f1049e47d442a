"""Memory Maze against its rules written down a second time, and against all spanning trees."""

import itertools

import jax
import numpy as np
import pytest

from envs_jax.memory_maze import MemoryMaze, MemoryMazeOptions
from envs_jax.testing import check_environment, validate_protocol
from tests.support.playing import play

MOVES = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])
OPTIONS = [MemoryMazeOptions(), MemoryMazeOptions(5), MemoryMazeOptions(9, num_goals=4, view=3, max_steps=100)]


def starts(options, num_episodes, seed=0):
    keys = jax.random.split(jax.random.key(seed), num_episodes)
    return jax.device_get(jax.jit(jax.vmap(MemoryMaze(options).reset))(keys))


def oracle(options, walls, goals, cue, actions):
    """(observation, reward, discount, last) of every row of an episode, the first one included."""
    view, num_goals = options.view, options.num_goals
    planes = np.zeros((1 + num_goals, *(np.array(walls.shape) + 2 * view)), np.float32)
    planes[0] = np.pad(walls, view, constant_values=True)
    for i, (row, column) in enumerate(goals):
        planes[1 + i, row + view, column + view] = 1
    centre = 2 * (options.size // 2 // 2) + 1
    place, rows = np.array([centre, centre]), []
    colour = {tuple(goal): i for i, goal in enumerate(goals.tolist())}
    for t in range(len(actions) + 1):
        if t > 1 and not walls[tuple(place + MOVES[actions[t - 1]])]:
            place = place + MOVES[actions[t - 1]]
        y, x = place
        window = planes[:, y : y + 2 * view + 1, x : x + 2 * view + 1]
        shown = np.eye(num_goals)[cue] * (t == 0)
        entered = colour.get((y, x))
        reward = 0 if entered is None else 1 if entered == cue else -1
        last = entered is not None or t == (options.max_steps or 8 * options.num_rooms)
        rows.append((np.concatenate([window.transpose(1, 2, 0).reshape(-1), shown]), reward, entered is None, last))
        if last:
            break
    return rows


@pytest.mark.parametrize("options", [*OPTIONS[:2], pytest.param(OPTIONS[2], marks=pytest.mark.slow)])
def test_every_row_follows_the_rules(options):
    limit = MemoryMaze(options).spec.max_episode_steps
    states = starts(options, 200)
    actions = np.random.default_rng(0).integers(0, 4, (200, limit))
    observations, transitions = play(MemoryMaze(options), states, actions)
    ends = set()
    for i in range(200):
        rows = oracle(options, states.walls[i], states.goals[i], states.cue[i], actions[i])
        for t, (observation, reward, discount, last) in enumerate(rows):
            np.testing.assert_array_equal(observations[i, t], observation)
            if t > 0:
                assert [x[i, t - 1] for x in transitions[:3]] == [reward, discount, last]
        assert rows[-1][3]
        ends.add(rows[-1][1])
    assert ends == {-1, 0, 1}  # wrong, too late and right all happened


def search(options, step, state, wanted):
    """Depth-first search that sees what an agent sees, for the object of colour `wanted`: return and steps."""
    side, num_goals = 2 * options.view + 1, options.num_goals
    state, observation, transition = step(state, np.int32(0))
    place, way, seen, num_steps = np.zeros(2, int), [], {(0, 0)}, 1
    while not transition.last:
        window = np.asarray(observation)[:-num_goals].reshape(side, side, 1 + num_goals)
        around = window[tuple((side // 2 + MOVES).T)]  # [4, 1 + num_goals]
        avoided = np.delete(around, 1 + wanted, axis=1).any(1)  # walls and the other objects
        new = [a for a in range(4) if not avoided[a] and tuple(place + MOVES[a]) not in seen]
        way, action = ([*way, new[0]], new[0]) if new else (way[:-1], (way[-1] + 2) % 4)
        place = place + MOVES[action]
        seen.add(tuple(place))
        state, observation, transition = step(state, np.int32(action))
        num_steps += 1
    return float(transition.reward), num_steps


@pytest.mark.parametrize(
    ("options", "num_episodes"),
    [(OPTIONS[0], 60), (OPTIONS[1], 20), pytest.param(OPTIONS[2], 10, marks=pytest.mark.slow)],
)
def test_the_optimum_takes_the_cue_and_nothing_else_will_do(options, num_episodes):
    environment, states = MemoryMaze(options), starts(options, num_episodes, seed=1)

    @jax.jit
    def step(state, action):
        state, transition = environment.step(state, action, jax.random.key(0))
        return state, environment.observe(state), transition

    longest = 0
    for i, wanted in itertools.product(range(num_episodes), range(options.num_goals)):
        for cue in range(options.num_goals):
            state = jax.tree.map(lambda x, i=i: x[i], states)._replace(cue=np.int32(cue))
            total, num_steps = search(options, step, state, wanted)
            assert total == (1 if wanted == cue else -1)
            longest = max(longest, num_steps)
    assert longest <= 4 * (options.num_rooms - 1) + 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2]])
def test_nothing_but_the_first_observation_and_the_last_reward_depends_on_the_cue(options):
    """An agent without memory earns at most 0 for this reason: only one of the cues makes its entries right."""
    states, rng, num_goals = starts(options, 300, seed=2), np.random.default_rng(2), options.num_goals
    limit = MemoryMaze(options).spec.max_episode_steps
    actions = rng.integers(0, 4, (300, limit))
    played = []
    for cue in range(num_goals):
        actions[:, 0] = rng.integers(0, 4, 300)
        played.append(play(MemoryMaze(options), states._replace(cue=np.full(300, cue, np.int32)), actions))
    observations, transitions = played[0]
    until = np.arange(limit) <= np.argmax(transitions.last, axis=1)[:, None]
    for others, their in played[1:]:
        np.testing.assert_array_equal(observations[:, 1:][until], others[:, 1:][until])
        np.testing.assert_array_equal(observations[:, 0, :-num_goals], others[:, 0, :-num_goals])
        np.testing.assert_array_equal(transitions.discount[until], their.discount[until])
    np.testing.assert_array_equal(observations[:, 1:, -num_goals:][until], 0)
    np.testing.assert_array_equal([x[0, 0, -num_goals:] for x, _ in played], np.eye(num_goals))
    totals = np.sum([np.sum(x.reward * until, axis=1) for _, x in played], axis=0)
    entered = np.min(np.where(until, transitions.discount, 1), axis=1) == 0
    assert 0 < entered.mean() < 1
    np.testing.assert_array_equal(totals, np.where(entered, 2 - num_goals, 0))


def reached(walls, start):
    """bool [B, size, size]: the cells that the start is joined with."""
    found = np.zeros_like(walls)
    found[:, start, start] = True
    for _ in range(walls.shape[1] ** 2):
        near = found.copy()
        near[:, 1:] |= found[:, :-1]
        near[:, :-1] |= found[:, 1:]
        near[:, :, 1:] |= found[:, :, :-1]
        near[:, :, :-1] |= found[:, :, 1:]
        if (near & ~walls == found).all():
            break
        found = near & ~walls
    return found


def num_ways(walls):
    """int [B, size // 2, size // 2]: how many sides of each room are open."""
    ways = ~walls
    around = [ways[:, :-2:2, 1::2], ways[:, 2::2, 1::2], ways[:, 1::2, :-2:2], ways[:, 1::2, 2::2]]
    return np.sum(np.stack(around).astype(int), axis=0)


@pytest.mark.parametrize("options", [*OPTIONS, MemoryMazeOptions(11, num_goals=3), MemoryMazeOptions(7, num_goals=4)])
def test_mazes_are_trees_with_objects_in_dead_ends(options):
    states = starts(options, 2000, seed=3)
    middle = options.size // 2 // 2
    walls, goals = states.walls, states.goals
    assert not walls[:, 1::2, 1::2].any()
    assert walls[:, ::2, ::2].all()
    assert walls[:, [0, -1]].all()
    assert walls[:, :, [0, -1]].all()
    np.testing.assert_array_equal(reached(walls, 2 * middle + 1), ~walls)
    np.testing.assert_array_equal(np.sum(~walls, axis=(1, 2)), 2 * options.num_rooms - 1)
    ways = num_ways(walls)
    assert (ways[:, middle, middle] >= options.num_goals).all()
    np.testing.assert_array_equal(states.agent, 2 * middle + 1)
    assert (goals % 2 == 1).all()
    assert (ways[np.arange(2000)[:, None], *(goals // 2).transpose(2, 0, 1)] == 1).all()
    cells = goals @ [options.size, 1]
    assert not (cells == (2 * middle + 1) * (options.size + 1)).any()
    assert all(len(set(row)) == options.num_goals for row in cells)
    assert not np.any(states.num_steps)


def test_every_tree_and_every_placement_and_every_cue_comes_up():
    states = starts(MemoryMazeOptions(), 20_000, seed=4)
    between = [(y, x) for y, x in itertools.product(range(1, 6), range(1, 6)) if (y + x) % 2]
    grids = np.ones((495, 7, 7), bool)  # every way to open 8 of the 12 passages
    grids[:, 1::2, 1::2] = False
    for grid, opened in zip(grids, itertools.combinations(between, 8), strict=True):
        grid[tuple(np.transpose(opened))] = False
    trees = grids[(reached(grids, 3) == ~grids).all((1, 2))]
    assert len(trees) == 192  # the spanning trees of a 3 x 3 lattice
    trees = trees[num_ways(trees)[:, 1, 1] >= 2]
    assert {x.tobytes() for x in states.walls} == {x.tobytes() for x in trees}

    ends = (num_ways(states.walls) == 1).reshape(-1, 9)
    four = ends.sum(1) == 4  # the start is none, with two ways at least
    rank = np.cumsum(ends, axis=1) - 1
    places = np.take_along_axis(rank, states.goals // 2 @ [3, 1], axis=1)[four]
    counts = np.histogram2d(*places.T, bins=4, range=[(0, 4)] * 2)[0]
    expected = four.sum() / 12 * (1 - np.eye(4))
    np.testing.assert_allclose(counts, expected, atol=5 * np.sqrt(four.sum() / 12))
    assert not counts.diagonal().any()
    np.testing.assert_allclose(np.bincount(states.cue, minlength=2), 10_000, atol=360)  # 5 standard deviations
    cue_and_place = np.histogram2d(states.cue[four], places[:, 0], bins=(2, 4))[0]
    np.testing.assert_allclose(cue_and_place, four.sum() / 8, atol=5 * np.sqrt(four.sum() / 8))


def test_the_time_limit_truncates_and_an_object_at_the_limit_terminates():
    environment = MemoryMaze(MemoryMazeOptions(max_steps=40))
    state = environment.reset(jax.random.key(0))
    walls = np.ones((7, 7), bool)
    walls[3, 1:4] = False
    state = state._replace(walls=walls, goals=np.array([[3, 1], [5, 5]], np.int32), cue=np.int32(1))

    def transition(column, num_steps, action):
        now = state._replace(agent=np.array([3, column], np.int32), num_steps=np.int32(num_steps))
        return [float(x) for x in environment.step(now, np.int32(action), jax.random.key(0))[1][:3]]

    assert transition(3, 38, 0) == [0, 1, False]
    assert transition(3, 39, 0) == [0, 1, True]
    assert transition(2, 39, 3) == [-1, 0, True]
    assert MemoryMaze().spec.max_episode_steps == 72


@pytest.mark.slow  # others of its options are quick: tests/envs/test_conformance.py
def test_conforms():
    validate_protocol(MemoryMaze(OPTIONS[2]))
    check_environment(MemoryMaze(OPTIONS[2]), episodes=3)


def test_the_picture_shows_walls_objects_agent_and_cue():
    environment = MemoryMaze(MemoryMazeOptions(size=7, num_goals=3))
    state = environment.reset(jax.random.key(5))
    render = jax.jit(environment.render)

    def cells(state):
        picture = np.asarray(render(state))
        assert picture.dtype == np.uint8
        scale = picture.shape[0] // 7
        assert picture.shape == (7 * scale, 7 * scale, 3)
        return picture.reshape(7, scale, 7, scale, 3)[:, scale // 2, :, scale // 2]

    first = cells(state._replace(cue=np.int32(0)))
    inside = first[1:-1, 1:-1]
    kinds = np.unique(inside.reshape(-1, 3), axis=0)
    assert len(kinds) == 6  # wall, floor, agent, three objects
    np.testing.assert_array_equal(first[0, 0], first[tuple(np.asarray(state.goals[0]))])
    wall = inside[1, 1]
    np.testing.assert_array_equal((inside == wall).all(-1), np.asarray(state.walls)[1:-1, 1:-1])
    assert ((inside == inside[2, 2]).all(-1)).sum() == 1  # the agent
    later = cells(state._replace(cue=np.int32(0), num_steps=np.int32(1)))
    assert (later[0, 0] < first[0, 0]).any()
    np.testing.assert_array_equal(later[1:-1, 1:-1], inside)


BAD = [
    *[("size", 6), ("size", 13), ("size", 7.0), ("num_goals", 1), ("num_goals", 5), ("num_goals", True)],
    *[("view", 0), ("view", 1.0), ("max_steps", 32), ("max_steps", 40.0)],
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_options_name_field_value_and_remedy(field, value):
    with pytest.raises(ValueError, match=rf"^MemoryMazeOptions\({field}={value!r}\): use "):
        MemoryMazeOptions(**{field: value})


def test_a_small_maze_has_room_for_two_objects():
    with pytest.raises(ValueError, match=r"^MemoryMazeOptions\(num_goals=3\): use an integer in \[2, 2\]"):
        MemoryMazeOptions(size=5, num_goals=3)
