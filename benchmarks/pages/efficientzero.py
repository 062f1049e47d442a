"""Tables of docs/results/efficientzero.md: steps, time, and short runs on Pong."""

from __future__ import annotations

import statistics
from typing import Any

from pages import commit, origin, read, short_commit, table

ARMS = {
    "muzero": "MuZero",
    "efficientzero": "EfficientZero",
    "plain": "with none of the parts below",
    "+ reanalysis": "and reanalysis",
    "+ consistency": "and consistency",
    "+ prefix": "and prefixes of rewards",
    "+ correction": "and corrections, which is all of it",
    "+ refresh": "and refreshed priorities",
    "large batch, sgd": "all of it, batches of 512 and SGD",
    "large batch, clipped lars": "the same with Clipped LARS",
    "without augmentation": "all of it, images as they are",
    "shuffled policies": "control: policies of other samples' searches",
    "frozen dynamics": "control: dynamics that stay as they began",
    "blind dynamics": "control: dynamics that see no action",
    "nothing learnt": "control: nothing learnt",
}
TASKS = ("catch", "cartpole", "pixel_catch")


def steps() -> list[str]:
    """Steps until three evaluations in a row pass, by arm and task."""
    summary = read("sample_efficiency")["results"]["summary"]
    rows = []
    for arm, about in ARMS.items():
        found = [summary.get(f"{task}, {arm}") for task in TASKS]
        commits = dict.fromkeys(name for cell in found if cell for name in cell["commits"])
        rows.append((about, *map(_steps, found), ", ".join(map(short_commit, commits))))
    return table(("agent", *TASKS, "commits"), rows)


def _steps(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    passed, seeds = [value for value in cell["steps"] if value is not None], len(cell["seeds"])
    if not passed:
        return f"not in {cell['most']:,} ({seeds} seeds)"
    spread = f"{statistics.median(passed):,.0f} ({min(passed):,} to {max(passed):,}; {seeds} seeds)"
    missed = seeds - len(passed)
    return f"{spread}, {missed} did not pass" if missed else spread


def beside_muzero() -> str:
    """MuZero's steps as times of EfficientZero's."""
    beside = read("sample_efficiency")["results"]["beside MuZero"]
    times = [f"{text.split(' ')[2]} times as many on {task}" for task, text in beside.items()]
    return f"{', '.join(times[:-1])} and {times[-1]}"


COSTS = (
    ("all samples are reanalysed", "none is", "reanalyse", "reanalysing / learning", 3.6),
    ("8 updates searched for at once", "a batch of 8 times the samples", "reanalyse", "groups / large batch", 1.25),
    ("priorities refreshed every 10 updates", "reanalysis", "reanalyse", "refreshing / reanalysing", None),
    ("as many rows a sample as in 100,000 steps", "reanalysis", "reanalyse-refresh", "refreshing / reanalysing", 1.15),
    ("as in 300,000 steps", "reanalysis", "reanalyse-refresh-300k", "refreshing / reanalysing", 1.40),
    ("Clipped LARS", "SGD with momentum", "reanalyse", "clipped lars / sgd", 1.03),
    ("batch norm", "layer norm", "reanalyse", "batch norm / layer norm", 1.02),
)
"""A change, the thing beside it, the file, its ratio, and the ratio that was wanted."""


def costs() -> list[str]:
    """Time and operations for a sample, as times that of what it is compared with."""
    rows = []
    for about, beside, name, pair, wanted in COSTS:
        found = read(name)
        low, middle, high, operations = found["results"]["ratios"][pair]
        time = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        rows.append((about, beside, time, f"{operations:.2f}", wanted or "-", commit(found)))
    return table(("what", "beside", "time", "operations", "time wanted", "commit"), rows)


def search() -> str:
    """The speed of a search with the model of the preset for Atari, beside that model alone."""
    ratios = read("search-efficientzero")["results"][0]["ratios"]
    low, middle, high = ratios["puct / network alone"]
    return f"{middle:.2f} times ({low:.2f} to {high:.2f}; Gumbel {ratios['gumbel / network alone'][1]:.2f})"


def pong() -> list[str]:
    """Short runs on Pong, stopped on the way and resumed."""
    rows = []
    for name in ("muzero", "efficientzero", "speedyzero"):
        found = read(f"atari/pong-{name}")
        done = found["results"]["complete"]
        seconds = f"{found['results']['wall_seconds']:,.0f}"
        rows.append((name, f"{done['env_steps']:,}", done["updates"], seconds, commit(found)))
    return table(("run", "steps", "updates", "seconds in all", "commit"), rows)


def update() -> str:
    """The parts of an update on Pong, and the time of its operations."""
    seconds = read("atari/pong-efficientzero")["results"]["seconds"]
    return (
        f"{seconds['update']:.2f} s, {seconds['learning']:.2f} of it learning and {seconds['reanalysis']:.2f} "
        f"reanalysis, and {seconds['update of a group of 8']:.2f} s in groups of 8. That is "
        f"{seconds['update'] / seconds['floor of an update']:.1f} times the time of its operations at the speed of a "
        "product of matrices"
    )


TABLES = {"steps": steps, "costs": costs, "pong": pong}
VALUES = {
    "beside-muzero": beside_muzero,
    "costs-origin": lambda: origin("reanalyse", "reanalyse-refresh-300k"),
    "search": search,
    "search-commit": lambda: commit(read("search-efficientzero")),
    "update": update,
}
