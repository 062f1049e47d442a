"""Ratings of players from the games they won, by Bradley and Terry's model (1952)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from podracer.evaluation.matches import Match


def connected(games: np.ndarray) -> np.ndarray:
    """The players that games [n, n] connect with the first one, bool [n]."""
    reached = np.arange(len(games)) == 0
    for _ in games:
        reached |= (games[reached] > 0).any(axis=0)
    return reached


def bradley_terry(wins: np.ndarray) -> np.ndarray:
    """Maximum-likelihood Elo, [n]; the first player's is 0.

    Newton's method, damped by the logistic function's derivatives, so that it converges from anywhere (Sun and
    Tran-Dinh 2019, on generalized self-concordant functions).

    Args:
      wins: [n, n]; points of player i against player j, more than 0 on both sides if they played. Games must connect
        all players.
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


class Rating(NamedTuple):
    """A player's Elo, relative to the first player's, and the 95% interval."""

    name: str
    elo: float
    interval: tuple[float, float]


def elo(matches: Sequence[Match], anchor: str = "random") -> list[Rating]:
    """Maximum-likelihood ratings in Bradley and Terry's model, the best first; a draw is half a win.

    Args:
      matches: matches that connect all players.
      anchor: name of the player whose rating is 0.

    Raises:
      ValueError: if no player is called `anchor`, or matches leave players unconnected.
    """
    names = list(dict.fromkeys(name for match in matches for name in match.players))
    if anchor not in names:
        raise ValueError(f"nobody is called {anchor!r}; there are {', '.join(names)}.")
    points = _points(names, matches, [match.scores for match in matches])
    if not (reached := connected(points)).all():
        others = ", ".join(name for name, is_reached in zip(names, reached) if not is_reached)
        raise ValueError(f"no matches connect {others} with {names[0]}, so nothing says how they compare; add one.")
    rng = np.random.default_rng(0)
    best = bradley_terry(points)
    samples = []
    for _ in range(200):
        resampled = [match.scores[rng.integers(len(match.scores), size=len(match.scores))] for match in matches]
        samples.append(bradley_terry(_points(names, matches, resampled)))
    zero = names.index(anchor)
    spread = np.stack(samples) - np.stack(samples)[:, zero : zero + 1]
    low, high = np.quantile(spread, (0.025, 0.975), axis=0)
    found = [Rating(name, float(best[i] - best[zero]), (float(low[i]), float(high[i]))) for i, name in enumerate(names)]
    return sorted(found, key=lambda rating: -rating.elo)


def _points(names: list[str], matches: Sequence[Match], scores: Sequence[np.ndarray]) -> np.ndarray:
    """Points [n, n] of each player against each other. Every match gets one more drawn game, so that a player without a
    loss has a finite rating."""
    points = np.zeros((len(names), len(names)))
    for match, score in zip(matches, scores):
        a, b = (names.index(name) for name in match.players)
        points[a, b] += score.sum() + 0.5
        points[b, a] += score.size - score.sum() + 0.5
    return points
