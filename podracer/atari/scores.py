"""Human-normalised scores of Atari games."""

from __future__ import annotations

from podracer import configs
from podracer.atari import games


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
    if table not in games.TABLES:
        raise ValueError(f"table={table!r}: unknown; {configs.suggest(table, games.TABLES)}")
    name = games.name(game)
    if name not in games.TABLES[table]:
        raise ValueError(f"{name} is not among the {len(games.TABLES[table])} games of table={table!r}; use 'atari57'.")
    random, human = games.TABLES[table][name]
    return (score - random) / (human - random)
