"""Ratings of players from the games they won, by Bradley and Terry's model (1952)."""

from __future__ import annotations

import numpy as np


def connected(games: np.ndarray) -> np.ndarray:
    """The players bool [n] that games [n, n] connect with the first one."""
    reached = np.arange(len(games)) == 0
    for _ in games:
        reached |= (games[reached] > 0).any(axis=0)
    return reached


def bradley_terry(wins: np.ndarray) -> np.ndarray:
    """Elo of maximum likelihood, [n], the first player's being 0.

    Newton's method, with steps as short as the logistic function's derivatives ask for, so that it converges from
    anywhere (Sun and Tran-Dinh 2019, on generalized self-concordant functions).

    Args:
      wins: [n, n]; points that player i made against player j, more than 0 on both sides where they played; games must
        connect all players.
    """
    games, strength = wins + wins.T, np.zeros(len(wins))
    for _ in range(1000):
        chance = 1.0 / (1.0 + np.exp(strength[None] - strength[:, None]))
        gradient = np.sum(wins - games * chance, axis=1)
        weight = games * chance * (1.0 - chance)
        curvature = np.diag(weight.sum(axis=1)) - weight
        step = np.zeros(len(wins))
        step[1:] = np.linalg.solve(curvature[1:, 1:], gradient[1:])
        farthest = np.max(np.abs(step[:, None] - step[None]) * (games > 0))
        if farthest < 1e-9:
            break
        strength += step * np.log1p(farthest) / farthest
    return 400.0 / np.log(10.0) * strength
