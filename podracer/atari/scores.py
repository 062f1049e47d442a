"""Human-normalised scores of Atari games, and capped scores of any tasks with two reference scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from podracer import configs
from podracer.atari import games


def capped_scores(returns: Any, low: Any, high: Any) -> Any:
    """Computes normalised scores that are at most 1: min(1, (R - low) / (high - low)), without a lower cap.

    Their mean over tasks is the mean capped human-normalised score (Espeholt et al. 2018, section 5.3), which a few
    superhuman tasks cannot carry.

    Args:
      returns: R, mean undiscounted returns of episodes; arrays of NumPy or JAX, [..., K].
      low: the scores that count 0, such as those of random play, [K].
      high: the scores that count 1, such as those of a human, [K].

    Returns:
      [..., K].
    """
    return ((returns - low) / (high - low)).clip(max=1.0)


def random_and_human(game: str, table: games.Table = "atari57") -> tuple[float, float]:
    """The scores of random play and of a human in a game; arguments and errors as in `human_normalised`."""
    if table not in games.TABLES:
        raise ValueError(f"table={table!r}: unknown; {configs.suggest(table, games.TABLES)}")
    name = games.name(game)
    if name not in games.TABLES[table]:
        raise ValueError(f"{name} is not among the {len(games.TABLES[table])} games of table={table!r}; use 'atari57'.")
    return games.TABLES[table][name]


def of_returns(returns: Mapping[str, Any]) -> dict[str, Any]:
    """Computes the scores of several tasks by the table "atari57"; {} where one is none of its games.

    Args:
      returns: mean undiscounted returns by task, such as "envpool:Pong-v5"; numbers or arrays.

    Returns:
      `capped_mean` (see `capped_scores`), `mean` and `median` of human-normalised scores, over tasks.
    """
    try:
        low, high = zip(*map(random_and_human, returns))
    except ValueError:
        return {}
    found = np.stack([(score - a) / (b - a) for score, a, b in zip(returns.values(), low, high)])
    capped = np.minimum(found, 1.0)
    return {"capped_mean": capped.mean(axis=0), "mean": found.mean(axis=0), "median": np.median(found, axis=0)}


def human_normalised(game: str, score: float, table: games.Table = "atari57") -> float:
    """The human-normalised score: 0 for random play and 1 for a human.

    The human matters: 16.7 points in Pong are 125% of Nature's and 106% of the other's. A score is comparable with a
    paper's only if it is normalised by the paper's table, a protocol's `table`.

    Args:
      game: such as "Pong", "Pong-v5" or "envpool:Pong-v5".
      score: mean unclipped return of whole games.
      table: "atari57", for papers on all games and on Atari 100k, or "nature", for Mnih et al. 2015 and comparisons
        with it.

    Raises:
      ValueError: for a game that is unknown or missing in the table, or an unknown table.
    """
    random, human = random_and_human(game, table)
    return (score - random) / (human - random)
