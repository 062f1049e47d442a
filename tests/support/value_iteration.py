"""The exact optimum of the `Gridworld` tasks, by finite-horizon value iteration in NumPy.

Written from the documented rules of `envs_jax.gridworld` and sharing no code with it: an independent model of the
same decision processes. It reads the options (plain numbers) only.

A grid is solved for every placement of its objects at once. `values[w, p, c]` is the expected return to come in world
(placement) w when the agent is in cell c (row-major) and the set of objects present is the bit mask p. Policies may
depend on the time left, so the optimum is an upper bound on what any agent that does not see the clock can reach.

With the default options an optimal policy returns 1 in each of the three tasks; a uniformly random one returns -0.27
("tabular", whose trap is nearer than its goal), 0 ("random_goals") and 0 ("delayed_chain").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

Backup = Callable[[np.ndarray], np.ndarray]
"""Combines action values along the last axis: a maximum, or a mean for the random policy."""


def optimal_return(options) -> float:
    """The largest expected undiscounted return of an episode that any policy reaches, from the start distribution."""
    return _expected_return(options, lambda action_values: action_values.max(-1))


def random_return(options) -> float:
    """The expected undiscounted return of an episode under uniformly random actions."""
    return _expected_return(options, lambda action_values: action_values.mean(-1))


def _expected_return(options, backup: Backup) -> float:
    if options.task == "delayed_chain":
        return chain_return(options, backup)
    values = grid_values(options, placements(options), backup)
    return float(np.mean(values[start_states(options)]))


def placements(options) -> np.ndarray:
    """Every equally likely placement of the objects: int [W, N], the cell of each object."""
    cells = options.height * options.width
    if options.task == "tabular":
        return np.array([[row * options.width + column for row, column in options.object_cells]])
    return np.array(list(itertools.permutations(range(cells), len(options.objects))))


def start_states(options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices (w, p, c) of every equally likely first state: all objects present, the agent on a free cell."""
    worlds = placements(options)
    free = np.ones((len(worlds), options.height * options.width), bool)
    np.put_along_axis(free, worlds, False, axis=1)
    world, cell = np.nonzero(free)
    return world, np.full_like(world, 2 ** len(options.objects) - 1), cell


def neighbours(options) -> np.ndarray:
    """The cell that each action leads to: int [C, 9], actions in the documented order."""
    moves = [(0, 0), (-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1)]
    table = np.zeros((options.height * options.width, len(moves)), int)
    for row, column, action in itertools.product(range(options.height), range(options.width), range(len(moves))):
        new_row = min(max(row + moves[action][0], 0), options.height - 1)
        new_column = min(max(column + moves[action][1], 0), options.width - 1)
        table[row * options.width + column, action] = new_row * options.width + new_column
    return table


def respawn_matrix(options) -> np.ndarray:
    """P(the set of objects becomes q | it was p once the agent had collected): float [2^N, 2^N]."""
    sets = range(2 ** len(options.objects))
    matrix = np.ones((len(sets), len(sets)))
    for p, q in itertools.product(sets, sets):
        for i, thing in enumerate(options.objects):
            before, after = p >> i & 1, q >> i & 1
            appears = 1.0 if before else thing.respawn_probability
            matrix[p, q] *= appears if after else 1.0 - appears
    return matrix


def arrivals(options, worlds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The effects of entering a cell: (reward, probability of termination, set after collecting), each [W, 2^N, C]."""
    cells, sets = options.height * options.width, 2 ** len(options.objects)
    reward = np.zeros((len(worlds), sets, cells))
    termination = np.zeros_like(reward)
    collected = np.broadcast_to(np.arange(sets)[:, None], reward.shape).copy()
    world = np.arange(len(worlds))
    for i, thing in enumerate(options.objects):
        for p in range(sets):
            if p >> i & 1:
                reward[world, p, worlds[:, i]] = thing.reward
                termination[world, p, worlds[:, i]] = thing.termination_probability
                collected[world, p, worlds[:, i]] = p ^ (1 << i)
    return reward, termination, collected


def grid_values(options, worlds: np.ndarray, backup: Backup) -> np.ndarray:
    """The value of every state with all `max_steps` steps to go: float [W, 2^N, C]."""
    reward, termination, collected = arrivals(options, worlds)
    respawn, targets = respawn_matrix(options), neighbours(options)
    values = np.zeros_like(reward)
    for _ in range(options.max_steps):
        before_respawn = np.einsum("pq,wqc->wpc", respawn, values)
        after = np.take_along_axis(before_respawn, collected, axis=1)
        arriving = reward + (1.0 - termination) * after
        values = backup(arriving[:, :, targets])
    return values


def chain_return(options, backup: Backup) -> float:
    """Steps backwards along both branches of the chain; noise in the rewards has mean zero and drops out."""
    right, wrong = 1.0, -1.0
    for _ in range(options.chain_length - 1):
        right, wrong = backup(np.array([right, right])), backup(np.array([wrong, wrong]))
    return float(backup(np.array([right, wrong])))
