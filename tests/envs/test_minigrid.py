"""The tasks of MiniGrid against the package `minigrid`: every step, every kind of cell, starts, ways to the goal."""

import numpy as np
import pytest

import envs_jax
from tests.support import minigrid_oracles

pytest.importorskip("minigrid")

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


@pytest.mark.parametrize(("name", "options"), CASES)
def test_steps_equal_the_package(name, options):
    found = minigrid_oracles.compare(name, options, num_lanes=8, num_steps=100, seed=0)
    print(name, found)


def anything(state, rng):
    """Random cells of all kinds within the walls, an agent on a free one, with anything in its hands or nothing."""
    kinds = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], state.cells.shape, p=[0.45, 0.1, *[0.05] * 9])
    cells = kinds | rng.choice([0, 4], kinds.shape) << 4
    cells = np.where(kinds == 1, 1, np.where(kinds == 8, 8 | 1 << 4, np.where(kinds == 9, 9, cells)))
    cells[[0, -1]] = cells[:, [0, -1]] = 2 | 5 << 4
    free = np.argwhere((cells[1:-1, 1:-1] == 1))
    y, x = free[rng.integers(len(free))] + 1
    return state._replace(
        cells=cells.astype(np.uint8),
        x=np.int32(x),
        y=np.int32(y),
        direction=np.int32(rng.integers(4)),
        carried=np.uint8(rng.choice([1, 5, 5 | 4 << 4, 6 | 4 << 4, 7])),
    )


def test_all_kinds_of_cells_equal_the_package():
    found = minigrid_oracles.compare("doorkey", {"size": 8}, num_lanes=32, num_steps=60, seed=1, change=anything)
    print(found)
    assert min(found.values()) > 0
