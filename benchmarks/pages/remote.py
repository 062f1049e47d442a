"""Tables of docs/results/remote.md: the cost of environments on other machines."""

from __future__ import annotations

import functools
import math
from typing import Any

import remote_plan

from pages import origin, read


def remote() -> list[str]:
    """The same environments here and at a worker on the same machine."""
    header = [
        "rows/s",
        "here",
        "at a worker",
        "ratio",
        "learner's us a row",
        "its loop busy",
        "bytes a row, up and down",
    ]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    known = lambda value: f"{value:.2f}" if math.isfinite(value) else "-"  # noqa: E731
    for name, row in _remote().items():
        if "ratio" in row:
            low, high = row["ratio_range"]
            ratio = f"**{row['ratio']:.2f}** ({low:.2f} to {high:.2f})"
            more = [known(row.get(key, math.nan)) for key in ("learner_cpu_us_per_row", "loop_busy")]
            cells = [name, *(f"{row[key]:,.0f}" for key in ("local", "remote")), ratio, *more]
            lines.append(f"| {' | '.join(cells)} | {row['bytes_up']:,.1f}, {row['bytes_down']:,.1f} |")
    return lines


def remote_targets() -> list[str]:
    """Measurements beside their targets, misses first."""
    lines = ["| quantity | measured | target | met |", "|---|---|---|---|"]
    return lines + ["| " + " | ".join(line) + " |" for line in remote_plan.beside_targets(_remote())]


def remote_wire() -> list[str]:
    """Rates of the wire itself, and the parts of a round trip."""
    lines = ["| quantity | values |", "|---|---|"]
    for name, words in WIRE.items():
        values = _remote().get(name, {})
        if values:
            # The parts of a round trip overlap, so the rest of the whole is negative and says nothing.
            figures = ", ".join(f"{key}: {_figure(value)}" for key, value in values.items() if value >= 0)
            lines.append(f"| {words} | {figures} |")
    return lines


def _remote_plan(name: str) -> list[str]:
    """A table of the needs of larger runs."""
    rows = remote_plan.arithmetic(_remote()).get(name, [])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [*lines[:1], "|" + "---|" * len(rows[0]), *lines[1:]] if rows else []


def remote_floor() -> str:
    """The cost of a round trip, and the number that two cores can do."""
    where, messages = _remote()["where"], _remote()["messages"]
    cpu = sum(where[who] for who in ("learner's loop", "learner's actor and gRPC's threads", "worker"))
    most = 2e6 / cpu
    share = f"of which 8 streams have {messages['8 streams'] / most:.0%}"
    return (
        f"{cpu:,.0f} microseconds of CPU on both sides together, so two cores do {most:,.0f} a second at most, {share}"
    )


def _remote() -> dict[str, Any]:
    return read("remote")["results"]


WIRE = {
    "latency": "ms from actions to rows, 64 lanes",
    "messages": "messages/s there and back, of one lane",
    "blocks": "rows/s of one stream, by lanes of a message",
    "ways": "rows/s, 64 lanes a message",
    "ratios of ways": "rows/s over those with TCP",
    "where": "microseconds of a round trip of 64 lanes, on average",
}
"""Measured of the wire, with an environment that does nothing."""


def _figure(number: float) -> str:
    return f"{number:.2f}" if number < 100 else f"{number:,.0f}"


TABLES = {
    "targets": remote_targets,
    "remote": remote,
    "wire": remote_wire,
    "arithmetic": functools.partial(_remote_plan, "demand"),
    "networks": functools.partial(_remote_plan, "networks"),
    "h200": functools.partial(_remote_plan, "H200"),
    "reported": functools.partial(_remote_plan, "reported"),
}
VALUES = {"floor": remote_floor, "origin": lambda: origin("remote")}
