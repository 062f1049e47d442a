"""Tables of docs/results/speed.md: rates on a CPU beside plain loops."""

from __future__ import annotations

import re
import statistics

from pages import NETWORKS, commit, origin, read, short, spread, table


def anakin() -> list[str]:
    """Rows a second of Anakin beside the plain loops."""
    found = read("anakin")
    rows = []
    for row in found["results"]:
        speeds = [short(row[name]) for name in ("environment", "acting", "training", "yardstick")]
        low, high = row["ratio_range"]
        rows.append(
            (
                f"{row['agent']} on {row['env']}, {row['num_envs']} x {row['rollout_length']}",
                row["devices"],
                *speeds,
                f"**{row['ratio']:.2f}** ({low:.2f} to {high:.2f})",
                f"{row['compile_seconds']:.1f} s",
                commit(found),
            )
        )
    names = ("environment", "acting", "training", "plain loop", "training / plain", "cold compile", "commit")
    return table(("agent, lanes x rows", "CPU devices", *names), rows)


def sebulba() -> list[str]:
    """Rows a second of Sebulba beside the environments alone and the plain acting loop."""
    found = read("sebulba")
    rows = []
    for row in found["results"]:
        split = re.search(r"(\d+) actor and (\d+) learner", row["layout"])
        devices = f"{split[1]} + {split[2]}" if split else row["devices"]
        names = ("environment", "plain_acting", "acting", "training")
        speeds = [f"{row[name]:,.0f}" if row[name] else "-" for name in names]
        rows.append((f"{NETWORKS[row['preset']]}, {row['num_envs']} lanes", devices, *speeds, commit(found)))
    names = ("devices", "environments alone", "plain acting loop", "acting", "training", "commit")
    return table(("V-trace, T=20", *names), rows)


def acting() -> list[str]:
    """Actions a second of a trained policy."""
    found = read("actor")
    rows = [
        (name, short(statistics.median(rates)), commit(found)) for name, rates in found["actions_per_second"].items()
    ]
    return table(("observations at a time", "actions a second", "commit"), rows)


def dqn() -> list[str]:
    """The table 1 of fast DQN's paper: how many times as fast as the standard order with one lane."""
    rows = []
    for name, about in (("dqn", "environments that wait"), ("dqn-pong", "Pong itself")):
        found = read(name)
        for lanes in (1, 8):
            cells = {cell["kind"]: cell for cell in found["results"]["cells"] if cell["lanes"] == lanes}
            speeds = [_speed_up(cells.get(kind)) for kind in KINDS]
            rows.append((about, lanes, *speeds, commit(found)))
    return table(("setting", "lanes", *KINDS, "commit"), rows)


KINDS = ("standard", "concurrent", "synchronised", "both")


def _speed_up(cell: dict | None) -> str:
    if cell is None:
        return "-"
    low, high = cell["speed_up_range"]
    return f"{cell['speed_up']:.2f} ({low:.2f} to {high:.2f})"


def dqn_model() -> str:
    """The range of the cells as shares of what a model of acting and learning alone predicts."""
    shares = [cell["measured_over_predicted"] for cell in read("dqn")["results"]["cells"]]
    return f"{min(shares):.2f} to {max(shares):.2f}"


def continuous() -> list[str]:
    """Updates a second of SAC beside others, and the part of an update's time that its products take."""
    found = read("continuous")
    rates, ratios = found["results"]["updates_per_second"], found["results"]["ratios"]
    rows = [("ours", f"{statistics.median(rates['sac']):.0f}", "", commit(found))]
    for name, each in ratios.items():
        _, low, *_, high, _ = sorted(each)
        cell = f"**{statistics.median(each):.2f}** ({low:.2f} to {high:.2f})"
        rows.append((name, f"{statistics.median(rates[name]):.0f}", cell, commit(found)))
    return table(("SAC, batches of 256, two layers of 256", "updates a second", "ours / this", "commit"), rows)


SEARCHES = ("puct / muzero_policy", "puct / mctx without draws", "gumbel / gumbel_muzero_policy")
"""Our searches beside those of mctx."""


def search_ratios() -> dict[str, str]:
    """Times as fast as mctx, from the least median of the sizes to the greatest."""
    pairs = {"puct": SEARCHES[0], "gumbel": SEARCHES[2]}
    medians = {name: [row["ratios"][pair][1] for row in read("search")["results"]] for name, pair in pairs.items()}
    return {name: f"{min(values):.1f} to {max(values):.1f}" for name, values in medians.items()}


def search() -> list[str]:
    """Times as fast as mctx, by the number of roots and actions."""
    found = read("search")
    rows = []
    for row in found["results"]:
        ratios = [spread(row["ratios"][pair], ".1f") for pair in SEARCHES]
        rows.append((row["N"], row["A"], *ratios, commit(found)))
    names = ("PUCT / `muzero_policy`", "PUCT / the same without draws", "Gumbel / `gumbel_muzero_policy`")
    return table(("roots", "actions", *names, "commit"), rows)


def search_with_a_large_model() -> str:
    """The ratios of `search` with EfficientZero's model, in the same order."""
    found = read("search-efficientzero")
    ratios = [f"{found['results'][0]['ratios'][pair][1]:.2f}" for pair in SEARCHES]
    return f"{', '.join(ratios)} (commit {commit(found)})"


def resident() -> str:
    """The resident set, and its growth over ten minutes of training."""
    found = read("memory")
    size = statistics.median(row["rss_mib"] for row in found["rows"])
    return f"{size:.0f} MiB grew by {found['growth']['rss_mib']:.0f} MiB"


def environments() -> list[str]:
    """Steps a second of environments beside other libraries' of the same task."""
    found = read("environments")
    rows = []
    for row in found["results"]:
        peers = {name: rate for name, rate in row["steps_per_second"].items() if name != "ours"}
        others = ", ".join(f"{name} {short(rate)}" for name, rate in peers.items())
        low, high = row["ratio_range"]
        ratio = f"**{row['ratio']:.1f}** ({low:.1f} to {high:.1f})"
        rows.append((f"`{row['environment']}`", short(row["steps_per_second"]["ours"]), others, ratio, commit(found)))
    return table(("environment", "ours", "others", "ours / the better of them", "commit"), rows)


def cores() -> list[str]:
    """Times of each core and its gradient."""
    found = read("scans")
    sizes = found["results"]["cores"]
    names = list(next(iter(sizes.values())))
    rows = [(f"`{name}`", *(f"{size[name]['us'] / 1e3:.1f} ms" for size in sizes.values())) for name in names]
    return table(("core", *sizes, "commit"), [(*row, commit(found)) for row in rows])


def agents_with_cores() -> list[str]:
    """Rows a second of whole agents with each core, and their shares of the same agent's with an LSTM."""
    found = read("anakin-cores")
    agents = {row["agent"]: row for row in found["results"]}
    rates = {(row["agent"], row["core"]): row["training"] for row in found["results"]}
    names = [f"{row['agent']} on {row['env']}, {row['num_envs']} x {row['rollout_length']}" for row in agents.values()]
    rows = []
    for core in dict.fromkeys(core for _, core in rates):
        cells = [f"{short(rates[agent, core])} ({rates[agent, core] / rates[agent, 'lstm']:.1f})" for agent in agents]
        rows.append((f"`{core}`", *cells, commit(found)))
    return table(("core", *names, "commit"), rows)


def recurrences() -> list[str]:
    """Times of a linear recurrence and its gradient, by the way that computes it."""
    found = read("scans")
    rows = []
    for size, ways in found["results"]["recurrences"].items():
        times = {way: ways[way]["us"] if way in ways else None for way in ("sequential", "associative", "unrolled")}
        rows.append((size, *(f"{us / 1e3:.2f} ms" if us else "-" for us in times.values()), commit(found)))
    return table(("rows and units", "sequential", "associative", "unrolled", "commit"), rows)


def resets() -> list[str]:
    """Rows a second by the way in which episodes open, for large states and expensive resets."""
    found = read("resets")
    rows = []
    for row in found["results"]:
        rates = [short(row["rows_per_second"][way]) for way in ("fresh", "pool", "costly")]
        ratios = [f"{row['costly_over'][way]:.1f}" for way in ("fresh", "pool")]
        rows.append((f"{row['kilobytes']} KB", row["length"], *rates, *ratios, commit(found)))
    names = ("fresh for every lane", "from a pool", "only lanes that are over", "over fresh", "over a pool", "commit")
    return table(("a state", "steps of an episode", *names), rows)


TABLES = {
    **{"anakin": anakin, "sebulba": sebulba, "acting": acting, "dqn": dqn, "search": search},
    **{"environments": environments, "cores": cores, "agents-with-cores": agents_with_cores},
    **{"recurrences": recurrences, "resets": resets, "continuous": continuous},
}
VALUES = {
    "anakin-origin": lambda: origin("anakin"),
    "sebulba-origin": lambda: origin("sebulba"),
    "environments-origin": lambda: origin("environments"),
    "cores-origin": lambda: origin("scans"),
    "agents-with-cores-origin": lambda: origin("anakin-cores"),
    "resets-origin": lambda: origin("resets"),
    "continuous-origin": lambda: f"{origin('continuous')}.",
    "dqn-model": dqn_model,
    "search-efficientzero": search_with_a_large_model,
    "memory": resident,
    "memory-commit": lambda: commit(read("memory")),
}
