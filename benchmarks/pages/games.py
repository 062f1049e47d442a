"""Tables of docs/results/games.md: board games."""

from __future__ import annotations

from pages import commit, read, table


def kept(player: str) -> str:
    """The share of connect-four positions whose value a player keeps."""
    return f"{read('connect_four')['results']['kept'][player][-1]:.0%}"


def tic_tac_toe() -> list[str]:
    """Shares of all positions whose value the move keeps, a row for each run."""
    rows = []
    for name, agent in (("tic_tac_toe", "AlphaZero"), ("tic_tac_toe-muzero", "MuZero")):
        found = read(name)
        for run in found["results"]["runs"]:
            players = [f"{run['players'][player]['value_kept']:.1%}" for player in ("network", "puct 50", "gumbel 16")]
            lost = sum(player["lost_games"] for player in run["players"].values())
            openings = f"up to {run['opening_plies']} moves" if run["opening_plies"] else "none (control)"
            cells = (f"{found['settings']['steps']:,}", openings, run["seed"], *players, lost)
            rows.append((agent, *cells, f"{run['seconds']:.0f}", commit(found)))
    players = ("network alone", "PUCT, 50", "Gumbel, 16")
    return table(
        ("agent", "moves", "random opening", "seed", *players, "lost games", "seconds", "commit"),
        rows,
    )


def connect_four() -> list[str]:
    """Shares of 600 solved positions whose value the move keeps, over training."""
    found = read("connect_four")
    of = found["results"]["kept"]
    last = len(of["steps"]) - 1
    rows = [
        (f"{of['steps'][i]:,}", f"{of['train_seconds'][i] / 60:.0f}", *(f"{of[name][i]:.0%}" for name in PLAYERS))
        for i in (0, last // 2, last)
    ]
    return table(("moves", "minutes", "network alone", "Gumbel, 50", "PUCT, 50"), rows)


PLAYERS = ("network", "gumbel 50", "puct 50")


def won() -> list[str]:
    """Games of connect four, from both seats."""
    found = read("connect_four")["results"]["won"]
    rows = []
    for name, seats in found.items():
        won, drawn, lost = (seats["first"][i] + seats["second"][i] for i in range(3))
        rows.append((name, won, drawn, lost))
    return table(("opponent", "won", "drawn", "lost"), rows)


TABLES = {"tic-tac-toe": tic_tac_toe, "connect-four": connect_four, "connect-four-matches": won}
VALUES = {"connect-four-commit": lambda: commit(read("connect_four"))}
