"""Human-normalised scores of Atari games."""

from __future__ import annotations

from podracer import configs
from podracer.atari import games


def human_normalised(game: str, score: float, table: games.Table = "atari57") -> float:
    """0 for random play and 1 for a human.

    Which human is no detail: 16.7 points in Pong are 125% of Nature's and 106% of the other's. Figures are comparable
    with those of a paper only if they are normalised by its table, which is a protocol's `table`.

    Args:
      game: such as "Pong", "Pong-v5" or "envpool:Pong-v5".
      score: mean unclipped return of whole games.
      table: "atari57", of papers on all games and on Atari 100k, or "nature", of Mnih et al. 2015 and of what compares
        itself with it.

    Raises:
      ValueError: for a game that is unknown or not in the table, or an unknown table.
    """
    if table not in games.TABLES:
        raise ValueError(f"table={table!r}: unknown; {configs.suggest(table, games.TABLES)}")
    name = games.name(game)
    if name not in games.TABLES[table]:
        raise ValueError(f"{name} is not among the {len(games.TABLES[table])} games of table={table!r}; use 'atari57'.")
    random, human = games.TABLES[table][name]
    return (score - random) / (human - random)
