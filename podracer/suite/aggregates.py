"""Aggregates of scores on many games: one number with an interval (Agarwal et al. 2021, arXiv:2108.13264).

Scores are human-normalised, float [..., seeds, games]: 0 is random play and 1 a human. Games may have different numbers
of seeds; a seed that a game lacks is NaN, and every game has at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLINGS = 2_000
HUMAN_LEVEL = 0.75
"""The share of a human's score that Mnih et al. 2015 call human-level."""


class Estimate(NamedTuple):
    """An aggregate.

    Attributes:
      value: the aggregate of the scores.
      interval: the 2.5 and 97.5 percentiles over resamplings of the seeds; None if a game has one seed, because its
        variance is unknown.
    """

    value: float
    interval: tuple[float, float] | None


class Comparison(NamedTuple):
    """The number of games with a better, worse or equal mean over seeds."""

    better: int
    worse: int
    equal: int


def matrix(scores: Mapping[str, Sequence[float]]) -> np.ndarray:
    """Scores by game as float64 [seeds, games], with NaN for the seeds that a game lacks.

    Raises:
      ValueError: if there is no game, or one without scores or with one that is not finite.
    """
    if not scores:
        raise ValueError("there are no scores to aggregate.")
    for game, values in scores.items():
        if not len(values) or not np.all(np.isfinite(values)):
            raise ValueError(f"scores[{game!r}]={values!r}: expected at least one number, all of them finite.")
    filled = np.full((max(map(len, scores.values())), len(scores)), np.nan)
    for column, values in enumerate(scores.values()):
        filled[: len(values), column] = values
    return filled


def seed_means(scores: np.ndarray) -> np.ndarray:
    """The mean over seeds, [..., games]."""
    return np.nanmean(scores, axis=-2)


def mean(scores: np.ndarray) -> np.ndarray:
    """The mean over games of seed means, [...]."""
    return seed_means(scores).mean(-1)


def median(scores: np.ndarray) -> np.ndarray:
    """The median over games of seed means, [...]."""
    return np.median(seed_means(scores), axis=-1)


def capped_mean(scores: np.ndarray) -> np.ndarray:
    """The mean over games of seed means, each at most 1, [...]."""
    return np.minimum(seed_means(scores), 1.0).mean(-1)


def iqm(scores: np.ndarray) -> np.ndarray:
    """The interquartile mean: of all N runs but the floor(N/4) least and greatest, [...]."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)  # NaN last
    runs = np.count_nonzero(~np.isnan(flat), axis=-1)
    cut, rank = runs[..., None] // 4, np.arange(flat.shape[-1])
    inside = (rank >= cut) & (rank < runs[..., None] - cut)
    return np.where(inside, flat, 0.0).sum(-1) / inside.sum(-1)


def optimality_gap(scores: np.ndarray) -> np.ndarray:
    """The mean amount by which runs fall short of 1, [...]; runs above 1 count as 0."""
    return 1.0 - np.nanmean(np.minimum(scores, 1.0), axis=(-2, -1))


def human_level(scores: np.ndarray) -> np.ndarray:
    """The number of games with a seed mean of at least 75% of a human's score, [...]."""
    return np.count_nonzero(seed_means(scores) >= HUMAN_LEVEL, axis=-1)


AGGREGATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "median": median,
    "mean": mean,
    "capped_mean": capped_mean,
    "iqm": iqm,
    "optimality_gap": optimality_gap,
    "human_level": human_level,
}


def resamplings(scores: np.ndarray, count: int = RESAMPLINGS, seed: int = 0) -> np.ndarray | None:
    """Draws a stratified bootstrap: for each game as many seeds as it has, with replacement.

    Args:
      scores: [seeds, games].
      count: number of resamplings.
      seed: seed of the draws.

    Returns:
      [count, seeds, games], or None where a game has one seed.
    """
    generator, samples = np.random.default_rng(seed), np.full((count, *scores.shape), np.nan)
    for game, column in enumerate(scores.T):
        runs = column[~np.isnan(column)]
        if len(runs) < 2:
            return None
        samples[:, : len(runs), game] = generator.choice(runs, (count, len(runs)))
    return samples


def interval(statistic: Callable[[np.ndarray], np.ndarray], samples: np.ndarray | None) -> tuple[float, float] | None:
    """The 2.5 and 97.5 percentiles of a statistic over `resamplings`; None where there are none."""
    if samples is None:
        return None
    low, high = np.percentile(statistic(samples), [2.5, 97.5])
    return float(low), float(high)


def aggregate(scores: np.ndarray, seed: int = 0) -> dict[str, Estimate]:
    """All `AGGREGATES` of scores [seeds, games], by name."""
    samples = resamplings(scores, seed=seed)
    return {name: Estimate(float(of(scores)), interval(of, samples)) for name, of in AGGREGATES.items()}


def profile(scores: np.ndarray, tau: Sequence[float] | np.ndarray) -> np.ndarray:
    """The share of runs (seeds of games) above each tau, [..., tau]."""
    runs = np.count_nonzero(~np.isnan(scores), axis=(-2, -1))
    return np.stack([np.count_nonzero(scores > value, axis=(-2, -1)) / runs for value in tau], axis=-1)


def profile_band(scores: np.ndarray, tau: Sequence[float] | np.ndarray, seed: int = 0) -> np.ndarray | None:
    """The 2.5 and 97.5 percentiles of the profile [2, tau] over resamplings; None where a game has one seed."""
    samples = resamplings(scores, seed=seed)
    return None if samples is None else np.percentile(profile(samples, tau), [2.5, 97.5], axis=0)


def beats(scores: np.ndarray, others: np.ndarray) -> Comparison:
    """Compares the seed means of two arrays [seeds, games] of the same games, game by game.

    Raises:
      ValueError: if the numbers of games differ.
    """
    if scores.shape[-1] != others.shape[-1]:
        raise ValueError(f"{scores.shape[-1]} games against {others.shape[-1]}: compare scores on the same games.")
    ours, theirs = seed_means(scores), seed_means(others)
    return Comparison(int((ours > theirs).sum()), int((ours < theirs).sum()), int((ours == theirs).sum()))
