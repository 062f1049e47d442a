"""The tasks of MiniGrid against the package `minigrid`: every step, every kind of cell, starts, ways to the goal."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import envs_jax
from envs_jax import chance
from envs_jax.minigrid.crossings import CrossingsOptions
from envs_jax.minigrid.empty import EmptyOptions
from envs_jax.minigrid.grid import BALL, BLUE, CLOSED, EMPTY, GOAL, KEY, LAVA, LOCKED, OPEN, WALL, visible
from envs_jax.minigrid.memory import MemoryOptions
from tests.support import minigrid_oracles
from tests.support.playing import play

VARIANTS = {
    "empty": [{"size": 5}, {"size": 6, "random_start": True}],
    "doorkey": [{"size": 5}, {"size": 8}],
    "memory": [{}, {"size": 13, "random_length": True}],
    "unlock": [{}],
    "four_rooms": [{}],
    "lava_gap": [{"size": 5}, {"size": 7, "obstacle": "wall"}],
    "crossings": [{"size": 9, "num_crossings": 2}, {"size": 11, "num_crossings": 5, "obstacle": "wall"}],
    "multi_room": [{"num_rooms": 2, "max_room_size": 4}, {"num_rooms": 6, "max_room_size": 10}],
    "key_corridor": [{"room_size": 3, "num_rows": 1}, {"room_size": 4, "num_rows": 3}],
    "dynamic_obstacles": [{"size": 5, "num_obstacles": 2}, {"size": 8, "num_obstacles": 4, "random_start": True}],
}
CASES = [(name, options) for name, found in VARIANTS.items() for options in found]
QUICK = ("doorkey", {"size": 5}), ("memory", {})
NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]
SLOW = [(name, found[-1]) for name, found in VARIANTS.items() if name not in ("empty", "four_rooms", "lava_gap")]
"""One of each kind of layout; the other cases are nightly."""


def tier(case):
    return [] if case in QUICK else [pytest.mark.slow] if case in SLOW else NIGHTLY


SOME = [pytest.param(*case, marks=tier(case)) for case in CASES]


def make(name, **options):
    return envs_jax.make(f"minigrid_{name}", **options)


def starts(name, options, number, seed=0):
    """First states [number]."""
    environment = make(name, **options)
    words = np.random.default_rng(seed).integers(0, 2**32, (number, environment.start_words), np.uint32)
    return jax.tree.map(np.array, jax.jit(jax.vmap(environment.start))(words))


# Steps


def nearer(state, rng):
    """A start, or one in which the agent looks at a door or what it seeks, perhaps with the key in its hands."""
    kinds = state.cells & 15
    aim = rng.choice(np.intersect1d(kinds, (GOAL, CLOSED, LOCKED, BALL)))
    if rng.random() < 0.3:
        return state
    aims = np.argwhere(kinds == aim)
    y, x = aims[rng.integers(len(aims))]
    direction = rng.permutation(4)
    places = [(x - dx, y - dy, d) for d, (dx, dy) in enumerate([(1, 0), (0, 1), (-1, 0), (0, -1)])]
    for d in direction:
        if kinds[places[d][1], places[d][0]] in (EMPTY, LOCKED if aim == BALL else EMPTY):
            x, y, d = places[d]
            state.cells[y, x] += (OPEN - LOCKED) * (kinds[y, x] == LOCKED)
            state = state._replace(x=np.int32(x), y=np.int32(y), direction=np.int32(d))
            break
    keys = np.argwhere(kinds == KEY)
    if len(keys) == 1 and aim != BALL and rng.random() < 0.7:
        (at,) = map(tuple, keys)
        state = state._replace(carried=state.cells[at])
        state.cells[at] = EMPTY
    return state


@pytest.mark.parametrize(("name", "options"), SOME)
def test_steps_equal_the_package(name, options):
    pytest.importorskip("minigrid")
    change = (lambda state, rng: state) if name == "memory" else nearer
    lanes, steps = (32, 20) if name == "key_corridor" else (8, 50)
    found = minigrid_oracles.compare(name, options, num_lanes=lanes, num_steps=steps, seed=0, change=change)
    assert found["rewards"] > 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("nearly", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_200_steps_of_100_starts_equal_the_package(name, options, nearly):
    pytest.importorskip("minigrid")
    change = nearer if nearly and name != "memory" else lambda state, rng: state
    minigrid_oracles.compare(name, options, num_lanes=100, num_steps=200, seed=1 + nearly, change=change)


def anything(state, rng):
    """Random cells of all kinds within the walls, an agent on a free one, with anything in its hands or nothing."""
    kinds = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], state.cells.shape, p=[0.45, 0.1, *[0.05] * 9])
    cells = kinds | rng.choice([0, 4], kinds.shape) << 4
    cells = np.where(
        kinds == EMPTY, EMPTY, np.where(kinds == GOAL, GOAL | 1 << 4, np.where(kinds == LAVA, LAVA, cells))
    )
    cells[[0, -1]] = cells[:, [0, -1]] = WALL | 5 << 4
    free = np.argwhere(cells[1:-1, 1:-1] == EMPTY)
    y, x = free[rng.integers(len(free))] + 1
    return state._replace(
        cells=cells.astype(np.uint8),
        x=np.int32(x),
        y=np.int32(y),
        direction=np.int32(rng.integers(4)),
        carried=np.uint8(rng.choice([EMPTY, KEY, KEY | 4 << 4, BALL | 4 << 4, 7])),
    )


def test_all_kinds_of_cells_equal_the_package():
    pytest.importorskip("minigrid")
    found = minigrid_oracles.compare("doorkey", {"size": 8}, num_lanes=24, num_steps=40, seed=1, change=anything)
    assert min(found.values()) > 0


def test_visible_cells_of_random_rooms():
    """Against the rule, cell by cell."""
    rng = np.random.default_rng(0)
    clear = rng.random((300, 7, 7)) < rng.choice([0.3, 0.6, 0.8, 0.95], (300, 1, 1))
    clear[:, 3, 6] = True
    found = np.asarray(jax.jit(jax.vmap(visible))(clear))
    for sees, expected in zip(clear, found):
        seen = np.zeros((8, 8), bool)  # the last of each axis is beyond
        seen[3, 6] = True
        for y in range(6, -1, -1):
            for xs, step in ((range(6), 1), (range(6, 0, -1), -1)):
                for x in xs:
                    if seen[x, y] and sees[x, y]:
                        seen[x + step, y] = seen[x, y - 1] = seen[x + step, y - 1] = True
        np.testing.assert_array_equal(expected[:, 1:], seen[:7, 1:7])
        np.testing.assert_array_equal(expected[:, 0], seen[:7, 0])


# Starts


def reached(cells, x, y, balls_move=False):
    """The cells that an agent can come to, bool [H, W], and what it can take or open from there: two sets of codes."""
    kinds, opened = cells & 15, set()
    passable = np.isin(kinds, (EMPTY, GOAL, CLOSED)) | (cells == (BALL | BLUE << 4) if balls_move else False)
    while True:
        seen, edge, touched = np.zeros(cells.shape, bool), [(y, x)], set()
        seen[y, x] = True
        while edge:
            y0, x0 = edge.pop()
            for at in ((y0, x0 + 1), (y0 + 1, x0), (y0, x0 - 1), (y0 - 1, x0)):
                touched.add(int(cells[at]))
                if passable[at] and not seen[at]:
                    seen[at] = True
                    edge.append(at)
        keys = {code for code in touched if code & 15 == KEY}
        if keys == opened:
            return seen, touched
        opened = keys
        passable = passable | np.isin(cells, list(keys)) | np.isin(cells, [code - KEY + LOCKED for code in keys])


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(*case, marks=[pytest.mark.slow] * case[0].startswith(("multi", "key", "dynamic"))) for case in CASES],
)
def test_every_start_can_be_solved(name, options):
    states = starts(name, options, 30 if name == "multi_room" else 60)
    for cells, x, y, goal in zip(states.cells, states.x, states.y, states.task if name == "memory" else states.x):
        assert cells[y, x] == EMPTY
        seen, touched = reached(cells, x, y, balls_move=name == "dynamic_obstacles")
        kinds = {code & 15 for code in touched}
        if name == "unlock":
            assert {KEY, LOCKED} <= kinds
        elif name == "key_corridor":
            assert BALL in kinds
        elif name == "memory":
            end = np.flatnonzero(np.isin(cells[len(cells) // 2 - 2], (KEY | 16, BALL | 16)))
            assert seen[goal, end].all()
        else:
            assert seen[cells & 15 == GOAL].all()


def features(states):
    """Numbers of a start that the package must draw alike: each cell, and where the things are to each other."""
    cells, (N, _, width) = states["cells"].astype(int), states["cells"].shape
    kinds, flat = cells & 15, cells.reshape(N, -1)
    places = {"agent": states["y"] * width + states["x"]}
    for kind in (KEY, BALL, GOAL, CLOSED, LOCKED, LAVA):
        there = (kinds == kind).reshape(N, -1)
        if there.any():
            places[kind] = np.where(there.any(1), there.argmax(1), 10**6)
            yield f"number of kind {kind}", there.sum(1)
    yield (
        "colour of a key, a ball and a locked door",
        sum(256**i * np.where(kinds == kind, cells, 0).max((1, 2)) for i, kind in enumerate((KEY, BALL, LOCKED))),
    )
    yield "agent", places["agent"] * 4 + states["direction"]
    yield "direction", states["direction"]
    dx, dy = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])[states["direction"]].T
    yield "kind ahead", kinds[np.arange(N), states["y"] + dy, states["x"] + dx]
    yield "number of walls", (kinds == WALL).sum((1, 2))
    for i, (one, place) in enumerate(places.items()):
        yield f"place of {one}", place
        yield f"column of {one}", place % width
        for other, place_of_other in list(places.items())[:i]:
            yield f"{one} to {other}", place - place_of_other
            yield f"{one} to {other}, by direction", (place - place_of_other) * 4 + states["direction"]
    for i in range(flat.shape[1]):
        yield f"cell {i}", flat[:, i]


def check_alike(states, theirs):
    """Chi-square of two samples: of all features, the least likely one is not too unlikely."""
    for (feature, ours), (_, other) in zip(features(states), features(theirs), strict=True):
        _, index = np.unique(np.concatenate([ours, other]), return_inverse=True)
        table = np.stack([np.bincount(part, minlength=index.max() + 1) for part in np.split(index, [len(ours)])])
        few = table.sum(0) < 20
        table = np.concatenate([table[:, ~few], table[:, few].sum(1, keepdims=True)], axis=1)
        table = table[:, table.sum(0) > 0]
        if table.shape[1] > 1:
            expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
            likely = scipy.stats.chi2.sf(np.sum((table - expected) ** 2 / expected), table.shape[1] - 1)
            assert likely > 1e-6, (feature, likely, table)


def check_starts(name, options, number):
    pytest.importorskip("minigrid")
    env = minigrid_oracles.original(name, **options)
    env.reset(seed=0)
    env.gen_obs = lambda: None
    theirs = [(env.reset(), minigrid_oracles.layout(env))[1] for _ in range(number)]
    theirs = {field: np.stack([state[field] for state in theirs]) for field in theirs[0]}
    ours = starts(name, options, number)._asdict()
    check_alike({field: ours[field] for field in theirs}, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(*case, marks=[] if case in SLOW else NIGHTLY) for case in CASES]
)
def test_starts_are_drawn_as_the_package_draws_them(name, options):
    check_starts(name, options, 2_000 if name == "unlock" else 500)  # what is never seen is rare


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES)
def test_5_000_starts_are_drawn_as_the_package_draws_them(name, options):
    check_starts(name, options, 5_000)


@pytest.mark.slow
@pytest.mark.parametrize(("num_rooms", "size"), [(2, 4), (4, 5), (6, 10)])
def test_all_rooms_are_there_in_all_but_few_starts(num_rooms, size):
    states = starts("multi_room", {"num_rooms": num_rooms, "max_room_size": size}, 10_000)
    doors = np.sum(states.cells & 15 == CLOSED, axis=(1, 2))
    assert np.mean(doors < num_rooms - 1) < 1e-3


# Draws


def test_choices_are_uniform():
    words = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32)
    allowed = np.array([0, 1, 1, 0, 0, 1, 0, 1, 0], bool)
    counts = np.bincount(jax.jit(jax.vmap(chance.choose, (0, None)))(words, allowed), minlength=9)
    assert not counts[~allowed].any()
    assert scipy.stats.chisquare(counts[allowed]).pvalue > 1e-4
    assert chance.choose(words[0], jnp.zeros(9, bool)) == 9
    table = np.zeros((3, 7, 8))
    np.add.at(table, tuple(chance.digits(words, 3, 7, 8)), 1)
    assert scipy.stats.chisquare(table.reshape(-1)).pvalue > 1e-4
    np.testing.assert_array_equal(chance.ranks(np.array([7, 3, 7, 0], np.uint32)), [2, 1, 3, 0])


# Golden traces, specs, options


GOLDEN = {
    "empty": 0x0A7CFAA1,
    "doorkey": 0xA74D2EC9,
    "memory": 0x5195E88F,
    "unlock": 0xD906E551,
    "four_rooms": 0xF90918BA,
    "lava_gap": 0xBC4DBD98,
    "crossings": 0x5E93AE97,
    "multi_room": 0x66A00000,
    "key_corridor": 0xF68D0D76,
    "dynamic_obstacles": 0x13F83DFE,
}


@pytest.mark.parametrize("name", ["doorkey", *[pytest.param(n, marks=NIGHTLY) for n in VARIANTS if n != "doorkey"]])
def test_50_steps_are_as_they_were(name):
    environment = make(name, **VARIANTS[name][-1])

    @jax.jit
    def run(key, actions):
        def body(state, now):
            state, transition = environment.step(state, *now)
            return state, (environment.observe(state), transition.reward, transition.last)

        return jax.lax.scan(body, environment.reset(key), (actions, jax.random.split(key, 50)))[1]

    actions = np.random.default_rng(0).integers(0, environment.spec.action_space.num_values, 50).astype(np.int32)
    record = jax.tree.leaves(jax.device_get(run(jax.random.key(0), actions)))
    assert zlib.crc32(b"".join(np.asarray(x).tobytes() for x in record)) == GOLDEN[name]


def test_specs():
    limits = {"empty": 256, "doorkey": 640, "memory": 245, "unlock": 288, "four_rooms": 100, "lava_gap": 196}
    limits |= {"crossings": 324, "multi_room": 80, "key_corridor": 1080, "dynamic_obstacles": 256}
    for name, limit in limits.items():
        spec = make(name).spec
        assert spec.name == f"minigrid_{name}"
        assert spec.max_episode_steps == limit
        assert make(name, max_steps=7).spec.max_episode_steps == 7
        assert spec.action_space.num_values == (3 if name == "dynamic_obstacles" else 7)
        assert dict(spec.observation_space.items)["image"].shape == (7, 7, 3)


def test_a_known_way_has_a_known_reward():
    """Straight on, a turn, straight on: 2 * 5 + 1 steps of at most 256."""
    environment = make("empty")
    _, transitions = play(environment, starts("empty", {}, 1), np.array([[2] * 5 + [1] + [2] * 5]))
    np.testing.assert_array_equal(transitions.reward[0, :-1], 0)
    assert transitions.reward[0, -1] == np.float32(1 - 0.9 * 11 / 256)
    assert (transitions.discount[0, -1], transitions.last[0, -1]) == (0, True)


@pytest.mark.parametrize(
    ("options", "field", "value", "remedy"),
    [
        (EmptyOptions, "size", 3, "an integer of at least 4"),
        (EmptyOptions, "random_start", 1, "True or False"),
        (EmptyOptions, "max_steps", 0, "None or an integer >= 1"),
        (MemoryOptions, "size", 8, "an odd integer of at least 7"),
        (CrossingsOptions, "num_crossings", 7, r"an integer in \[1, 6\]"),
        (CrossingsOptions, "obstacle", "water", "'lava' or 'wall'"),
    ],
)
def test_bad_options_name_field_value_and_remedy(options, field, value, remedy):
    with pytest.raises(ValueError, match=rf"^{options.__name__}\({field}={value!r}\): use {remedy}\.$"):
        options(**{field: value})


@pytest.mark.slow
@pytest.mark.nightly
def test_pictures_show_the_agent():
    state = jax.tree.map(lambda x: x[0], starts("doorkey", {"size": 5}, 1))
    environment = make("doorkey", size=5)
    image, turned = environment.render(state), environment.render(state._replace(direction=(state.direction + 1) % 4))
    differs = np.argwhere(np.any(image != turned, axis=-1)) // 16
    assert image.shape == (80, 80, 3)
    np.testing.assert_array_equal(np.unique(differs, axis=0), [[state.y, state.x]])
