"""Tables of docs/results/scaling.md: measured layouts, and a model of larger ones."""

from __future__ import annotations

import interconnects

from pages import origin, read


def scaling() -> list[str]:
    """The same work, or as much on each device, in several layouts."""
    lines = [
        "| agent and task | layout | lanes | an update | time of 1 x 1 | devices apart | all-reduces | those alone "
        "| waiting | jitter |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in read("scaling")["results"]:
        layout = f"{row['processes']} x {row['devices'] // row['processes']}"
        low, high = row["time_ratio_range"]
        apart, alone = (
            f"{1e3 * row[n]:.1f} ms" if row.get(n) else "-" for n in ("apart_seconds", "all_reduce_seconds")
        )
        number = f"{row['all_reduces']}, {row['bytes'] / 1e3:.0f} kB" if row.get("all_reduces") else "-"
        waiting = "-" if row.get("wait_share") is None else f"{row['wait_share']:.0%}"
        lines.append(
            f"| {SCALED[row['preset']]} | {layout} | {row['lanes']} | {1e3 * row['update_seconds']:.1f} ms "
            f"| {row['time_ratio']:.2f} ({low:.2f} to {high:.2f}) | {apart} | {number} | {alone} | {waiting} "
            f"| {row['jitter']:.0%} |"
        )
    return lines


SCALED = {
    "vtrace": "V-trace on catch",
    "ppo": "PPO on cartpole",
    "sebulba": "V-trace on EnvPool's CartPole, Sebulba",
    "sebulba-pong": "V-trace on EnvPool's Pong, Sebulba",
}
"""Measured by `python benchmarks/scaling.py`, by preset."""


TABLES = {
    "scaling": scaling,
    "all-reduces": interconnects.all_reduce_table,
    "efficiency": interconnects.efficiency_table,
}
VALUES = {"origin": lambda: origin("scaling")}
