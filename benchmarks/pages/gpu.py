"""Tables of docs/results/gpu.md: one H100."""

from __future__ import annotations

import json
from typing import Any

from pages import NETWORKS, RESULTS, short


def _of_gpu(part: str) -> dict[str, Any]:
    """The results of one part of `benchmarks/accelerator.py`."""
    return json.loads((RESULTS / "accelerator.json").read_text())["results"][part]


def learning() -> list[str]:
    """Returns of agents that learnt there."""
    lines = [
        "| command | required | return, seed 0 | seconds of training, of compiling | commit |",
        "|---|---|---|---|---|",
    ]
    for one in _of_gpu("learning").values():
        said = f"| `{one['command'].removeprefix('podracer ')}` | {one['bound']:g} "
        if one["code"]:
            lines.append(said + f"| did not end in 5 minutes | | {one['commit']} |")
        else:
            seconds = f"{one['train_seconds']:.0f}, {one['compile_seconds']:.0f}"
            lines.append(said + f"| {one['eval_return_mean']:.3g} | {seconds} | {one['commit']} |")
    return lines


def anakin() -> list[str]:
    """Rows a second of Anakin there."""
    lines = [
        "| agent and task | lanes x rows | training | plain loop | training / plain | compile | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in _of_gpu("anakin").values():
        for row in one["results"]:
            rows = {"ppo": 32, "vtrace": 20}[row["agent"]]
            plain = f"{short(row['yardstick'])} | **{row['ratio']:.2f}**" if row["yardstick"] else "- | -"
            env = row["env"].replace("_random_goals", ", random goals")
            lines.append(
                f"| {row['agent']} on {env} | {row['num_envs']:,} x {rows} | {short(row['training'])} | {plain} "
                f"| {row['compile_seconds']:.0f} s | {one['commit']} |"
            )
    return lines


def sebulba() -> list[str]:
    """Rows a second of Sebulba there, and shares of its actors' and its learner's time."""
    lines = ["| Pong, 256 lanes, V-trace | acting | training | environments | inference | learning | commit |"]
    lines.append("|---|---|---|---|---|---|---|")
    for one in _of_gpu("sebulba").values():
        for row in one["results"]:
            shares = " | ".join(
                f"{row['stages'][f'sebulba/{stage}_share']:.0%}" for stage in ("environment", "inference", "learn")
            )
            network = NETWORKS[row["preset"]].removeprefix("Pong, ")
            lines.append(f"| {network} | {row['acting']:,.0f} | {row['training']:,.0f} | {shares} | {one['commit']} |")
    return lines


def dqn() -> list[str]:
    """Table 1 of fast DQN's paper there."""
    kinds = ("standard", "concurrent", "synchronised", "both")
    lines = [f"| DQN on Pong, rows/s | {' | '.join(kinds)} | commit |", "|---" * 6 + "|"]
    cells = _of_gpu("dqn")["pong"]["results"]["cells"]
    for lanes in sorted({cell["lanes"] for cell in cells}):
        of = {cell["kind"]: cell for cell in cells if cell["lanes"] == lanes}
        texts = (f"{of[k]['rows_per_second']:,.0f} ({of[k]['speed_up']:.2f} x)" if k in of else "-" for k in kinds)
        lines.append(
            f"| {lanes} lane{'s' if lanes > 1 else ''} | {' | '.join(texts)} | {_of_gpu('dqn')['pong']['commit']} |"
        )
    return lines


def search() -> list[str]:
    """Simulations a second there."""
    lines = ["| roots, actions, network | program | simulations/s | of the network alone | of mctx's | commit |"]
    lines.append("|---|---|---|---|---|---|")
    for one in _of_gpu("search").values():
        network = one["settings"]["network"]
        for row in one["results"]:
            for ours, other in (("puct", "muzero_policy"), ("gumbel", "gumbel_muzero_policy")):
                alone, mctx = (row["ratios"][f"{ours} / {name}"][1] for name in ("network alone", other))
                lines.append(
                    f"| {row['N']:,}, {row['A']}, {network} | {ours} | {short(row['programs'][ours]['rate'])} "
                    f"| {alone:.2f} | {mctx:.2f} of `{other}` | {one['commit']} |"
                )
    return lines


def launches() -> list[str]:
    """Kernels of an update, compiled for an H200."""
    lines = ["| agent and task | kernels before | now | in the rollout | turns of its loop | commits |"]
    lines.append("|---|---|---|---|---|---|")
    tasks = {"vtrace": "catch, 1,024 x 20", "ppo": "cartpole, 1,024 x 32"}
    for name, of in json.loads((RESULTS / "launches.json").read_text())["results"].items():
        before, after = of["before"], of["after"]
        loops = [one["parts"]["rollout"] for one in (before, after)]
        turns = " to ".join(str(loop["turns"]) for loop in loops)
        rollout = " to ".join(str(sum(loop.values()) - loop["turns"]) for loop in loops)
        lines.append(
            f"| {name} on {tasks[name]} | {before['kernels']:,} | {after['kernels']:,} | {rollout} "
            f"| {turns} | {before['commit']}, {after['commit']} |"
        )
    return lines


TABLES = {
    "learning": learning,
    "anakin": anakin,
    "launches": launches,
    "sebulba": sebulba,
    "dqn": dqn,
    "search": search,
}
VALUES = {}
