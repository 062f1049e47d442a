"""README's tables, from the files of results: `python benchmarks/readme.py` writes them between their markers.

`<!-- table: anakin -->` opens one and `<!-- end -->` closes it; nothing between them is written by hand.
"""

from __future__ import annotations

import json
import pathlib
import re

import learn

README = pathlib.Path(__file__).parent.parent / "README.md"
RESULTS = pathlib.Path(__file__).parent / "results"

NETWORKS = {"cartpole": "CartPole, 64-64 MLP", "pong": "Pong, shallow network", "pong-resnet": "Pong, deep ResNet"}
"""What `podracer bench sebulba` measures, by preset: IMPALA's networks."""


def anakin() -> list[str]:
    """Rows a second of Anakin beside the plain loops."""
    lines = [
        "| | environment | acting | training | plain loop | training / plain | cold compile |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in json.loads((RESULTS / "anakin.json").read_text())["results"]:
        speeds = " | ".join(_short(row[name]) for name in ("environment", "acting", "training", "yardstick"))
        low, high = row["ratio_range"]
        lines.append(
            f"| {row['agent']} on {row['env']}, {row['num_envs']} x {row['rollout_length']} | {speeds} "
            f"| **{row['ratio']:.2f}** ({low:.2f} to {high:.2f}) | {row['compile_seconds']:.1f} s |"
        )
    return lines


def sebulba() -> list[str]:
    """Rows a second of Sebulba beside the environments alone and the plain acting loop."""
    lines = [
        "| Sebulba, V-trace, T=20 | devices | environments alone | plain acting loop | acting | training |",
        "|---|---|---|---|---|---|",
    ]
    for row in json.loads((RESULTS / "sebulba.json").read_text())["results"]:
        split = re.search(r"(\d+) actor and (\d+) learner", row["layout"])
        devices = f"{split[1]} + {split[2]}" if split else row["devices"]
        names = ("environment", "plain_acting", "acting", "training")
        speeds = " | ".join(f"{row[name]:,.0f}" if row[name] else "-" for name in names)
        lines.append(f"| {NETWORKS[row['preset']]}, {row['num_envs']} lanes | {devices} | {speeds} |")
    return lines


def _short(number: float) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"


TABLES = {"learning": learn.table, "anakin": anakin, "sebulba": sebulba}


def filled(text: str) -> str:
    """A text with the tables between its markers as they are measured.

    Raises:
      KeyError: for a table that there is not.
    """

    def table(found: re.Match[str]) -> str:
        return "\n".join([found[1], *TABLES[found[2]](), "<!-- end -->"])

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
