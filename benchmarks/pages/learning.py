"""Tables of docs/results/learning.md: small tasks, memory, and controls."""

from __future__ import annotations

import statistics

import learn
from masks import MOST_COST

from pages import commit, read, short_commit, table, to


def memory() -> list[str]:
    """Returns of each core on the tasks that need one, the worst and the best of the seeds."""
    rows = read("memory_tasks")["results"]["rows"]
    tasks = dict.fromkeys(name.rpartition("-")[0] for name in rows)
    labels = sorted({name.rpartition("-")[2] for name in rows}, key=lambda label: (label not in FIRST, label))
    lines = []
    for task in tasks:
        found = {label: rows[f"{task}-{label}"] for label in labels if f"{task}-{label}" in rows}
        bounds = [row["bound"] for label, row in found.items() if label != "none" and row["bound"] is not None]
        required = [f">= {bound}" for bound in bounds[:1]]
        required += [f"none <= {found['none']['bound']}"] if "none" in found else []
        returns = [_range(found.get(label)) for label in labels]
        commits = dict.fromkeys(short_commit(row["commit"]) for row in found.values())
        lines.append((f"`{task}`", ", ".join(required), *returns, ", ".join(commits)))
    return table(("task", "required", *(label.replace("_", " ") for label in labels), "commit"), lines)


FIRST = ("none", "4_frames")
"""Networks without a core, which have the first columns."""


def _range(row: dict | None) -> str:
    """The least and the most of a row's seeds, one number where they are alike; bold where they miss the bound."""
    if row is None:
        return ""
    digits = lambda value: f"{value:.0f}" if abs(value) >= 100 else f"{round(value, 3) + 0.0:.3g}"  # noqa: E731
    least, most = digits(min(row["returns"])), digits(max(row["returns"]))
    returns = least if least == most else f"{least} to {most}"
    returns = returns if row["holds"] else f"**{returns}**"
    return returns if row["bound"] is not None else f"({returns})"


def masks() -> list[str]:
    """Every agent on a task that only its mask explains, with the mask and without."""
    rows = []
    for agent, cases in sorted(read("masks")["results"].items()):
        if agent == "holds":
            continue
        masked = [*cases["anakin"]["returns"], *cases["sebulba"]["returns"]]
        illegal = max(cases["anakin"]["illegal"], cases["sebulba"]["illegal"])
        hidden = to(cases["hidden"]["returns"], ".2f")
        rows.append((f"`{agent}`", to(masked), f"{illegal:g}", hidden, short_commit(cases["commit"])))
    return table(("agent", "with the mask", "illegal actions", "mask hidden", "commit"), rows)


def game_2048() -> list[str]:
    """PPO's scores in pgx's 2048."""
    found, rows = read("masks-2048"), []
    for case in ("with the mask", "without"):
        result = found["results"][case]
        rows.append((case, " / ".join(f"{x:,.0f}" for x in result["returns"]), commit(found)))
    return table(("2048", "score, by seed", "commit"), rows)


def mask_cost(agent: str) -> str:
    """The share of time that a mask takes of training, the median of pairs and its quartiles."""
    cost = read("masks-speed")["results"]["cost"][agent]
    return f"{cost['median']:+.1%} ({cost['low']:+.1%} to {cost['high']:+.1%})"


def mask_bound() -> str:
    """The bound of the median, and the agents that are above it."""
    cost = read("masks-speed")["results"]["cost"]
    above = [f"`{agent}`" for agent in cost if cost[agent]["median"] > MOST_COST]
    return f"{MOST_COST:.0%}, which {' and '.join(above)} exceeded" if above else f"{MOST_COST:.0%}, which both keep"


def over_training() -> list[str]:
    """Mean returns over training, of five seeds or ten, with and without one thing."""
    rows = []
    for env in ("catch", "cartpole"):
        arms = [f"{env}, {arm}" for arm in ("half replayed", "without replay")]
        rows.append((f"V-trace on {env}: half of each batch replayed", "no replay", "vtrace_replay", arms))
    rows.append(("DQN on catch: acting lags a target period", "no lag", "fast_dqn", ("lockstep", "serial")))
    normal = ("with layer normalisation", "without")
    rows.append(("PQN on cartpole at 4 times the learning rate: layer norm", "none", "pqn_control", normal))
    lines = []
    for about, beside, name, arms in rows:
        found = read(name)
        values = [_areas(found["results"], arm) for arm in arms]
        means = [f"{statistics.fmean(each):.3g} ({to(each)})" for each in values]
        lines.append((about, means[0], f"{beside}: {means[1]}", len(values[0]), commit(found)))
    return table(("what", "with", "beside", "seeds", "commit"), lines)


def populations() -> list[str]:
    """Returns of populations at the end, with and without population based training, by seed."""
    found, lines = read("pbt"), []
    for env, arms in found["results"].items():
        for arm, seeds in arms.items():
            of = lambda key, seeds=seeds: " / ".join(f"{round(seed[key], 2) + 0.0:.3g}" for seed in seeds)  # noqa: E731
            name = arm if arm == "fixed" else f"`{arm}`"
            lines.append((env, name, of("mean"), of("worst_quarter"), of("best"), commit(found)))
    return table(("task", "rule", "mean of the members, by seed", "worst quarter", "best", "commit"), lines)


def sweeps() -> list[str]:
    """The learning rate that each sweep on catch chose, and its return where it was chosen and on fresh seeds."""
    found, lines = read("sweep"), []
    for name, swept in found["results"].items():
        best, rates = swept["best"], [row["hyper"]["learning_rate"] for row in swept["rows"]]
        solved = sum(row["mean"] is not None and row["mean"] >= 0.95 for row in swept["rows"])
        scores = (f"{best[part]['mean']:.3f}" for part in ("sweep", "fresh"))
        chosen, span = f"{best['hyper']['learning_rate']:.2g}", f"{min(rates):.2g} to {max(rates):.2g}"
        lines.append((name.removeprefix("seed "), span, f"{solved} of {len(rates)}", chosen, *scores, commit(found)))
    head = ("sweep", "rates drawn", "reach 0.95", "chosen", "return in the sweep", "on fresh seeds", "commit")
    return table(head, lines)


def threads() -> list[str]:
    """Returns of V-trace on EnvPool's CartPole by actor threads, lanes and the age of the acting policy."""
    found = read("cartpole_lag")
    rows = []
    for arm, seeds in sorted(found["results"].items(), key=lambda item: -_mean(item[1], "over_training")):
        areas = [seed["over_training"] for seed in seeds]
        ends = " / ".join(f"{seed['return']:.0f}" for seed in seeds)
        old = f"{_mean(seeds, 'policy_lag'):.1f}"
        rows.append((arm, old, f"{statistics.fmean(areas):.0f} ({to(areas, '.0f')})", ends, commit(found)))
    return table(("acting", "updates old", "mean return over training", "at the end, by seed", "commit"), rows)


def _mean(seeds: list[dict], key: str) -> float:
    return statistics.fmean(seed[key] for seed in seeds)


def _areas(results: dict, arm: str) -> list[float]:
    """Mean returns over training of an arm's seeds."""
    areas = results.get("mean_return_over_training", {})
    return areas[arm] if arm in areas else results[arm]["mean_return_over_training"]


def several() -> list[str]:
    """Returns of one policy of V-trace in each of two tasks."""
    rows = []
    for name, row in read("tasks")["results"].items():
        returns = [f"{to_seeds(row, task, '.4g')} on {task}" for task in row["returns"][0]]
        rows.append((name, *returns, row["bound"], short_commit(row["commit"])))
    return table(("tasks", "one, by seed", "the other, by seed", "required", "commit"), rows)


def to_seeds(row: dict, task: str, form: str) -> str:
    """The returns of a task, by seed."""
    return " / ".join(f"{seed[task]:{form}}" for seed in row["returns"])


def scales() -> list[str]:
    """Returns of V-trace on two tasks of different scales, with PopArt and without."""
    rows = []
    for name, row in read("popart")["results"].items():
        returns = to_seeds(row, "large", ",.0f"), to_seeds(row, "small", ".3g")
        rows.append((name, *returns, row["bound"], short_commit(row["commit"])))
    return table(("tasks", "large, by seed", "small, by seed", "required", "commit"), rows)


def network_resets() -> list[str]:
    """Returns of DQN at two replay ratios, with resets of its network and without."""
    found, rows = read("network_resets")["results"], []
    for name, row in found["rows"].items():
        mean, seeds = statistics.fmean(row["returns"]), " / ".join(f"{value:.3g}" for value in row["returns"])
        low, high = found["difference_intervals"].get(name, (None, None))
        less = "" if low is None else f"{low:.1f} to {high:.1f}"
        rows.append((name, f"{mean:.3g}", seeds, less, short_commit(row["commit"])))
    return table(("DQN on minatar_breakout", "return", "by seed", "less that without, 95% interval", "commit"), rows)


def meta_gradient() -> list[str]:
    """Discounts that are learnt by gradients, and one that is not."""
    found, rows = read("meta_gradient"), []
    for arm, runs in found["results"].items():
        values = (to([run[name] for run in runs]) for name in ("discount", "return"))
        rows.append((arm, *values, len(runs), commit(found)))
    return table(("V-trace on a chain", "discount", "return", "seeds", "commit"), rows)


TABLES = {
    "learning": learn.table,
    "memory": memory,
    "masks": masks,
    "masks-2048": game_2048,
    "over-training": over_training,
    "populations": populations,
    "scales": scales,
    "several": several,
    "sweeps": sweeps,
    "threads": threads,
    "meta-gradient": meta_gradient,
    "network-resets": network_resets,
}
VALUES = {
    "masks-speed-bound": mask_bound,
    "masks-speed-ppo": lambda: mask_cost("ppo"),
    "masks-speed-dqn": lambda: mask_cost("dqn"),
    "masks-speed-commit": lambda: commit(read("masks-speed")),
}
