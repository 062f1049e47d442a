"""Tables of README.md and pages of docs, from results: `python benchmarks/readme.py` writes them between their markers.

`<!-- table: anakin -->` opens one and `<!-- end -->` closes it; nothing between them is written by hand. Within a line,
`<!-- value: cartpole-seconds -->` does the same for a figure.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import re
from typing import Any

import interconnects
import learn

from podracer.bench import remote_plan

ROOT = pathlib.Path(__file__).parent.parent
README, SCALE = ROOT / "README.md", ROOT / "docs" / "scale.md"
REMOTE, PODS = ROOT / "docs" / "remote.md", ROOT / "docs" / "pods.md"
ACCELERATORS = ROOT / "docs" / "accelerators.md"
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


def scaling() -> list[str]:
    """The same work, or as much on each device, in several layouts."""
    lines = [
        "| | layout | lanes | an update | time of 1 x 1 | devices apart | all-reduces | those alone | waiting "
        "| jitter |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in json.loads((RESULTS / "scaling.json").read_text())["results"]:
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
"""What `podracer bench scaling` measures, by preset."""


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
    """What was measured beside what it should be, misses first."""
    lines = ["| | measured | target | met |", "|---|---|---|---|"]
    return lines + ["| " + " | ".join(line) + " |" for line in remote_plan.beside_targets(_remote())]


def remote_wire() -> list[str]:
    """What the wire itself does, and where the time of a round trip goes."""
    lines = ["| | |", "|---|---|"]
    for name, words in WIRE.items():
        values = _remote().get(name, {})
        if values:
            figures = ", ".join(f"{key}: {_figure(value)}" for key, value in values.items())
            lines.append(f"| {words} | {figures} |")
    return lines


def _remote_plan(name: str) -> list[str]:
    """A table of what larger runs need."""
    rows = remote_plan.arithmetic(_remote()).get(name, [])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [*lines[:1], "|" + "---|" * len(rows[0]), *lines[1:]] if rows else []


def cartpole_seconds() -> str:
    """How long the three seeds of README's first command train."""
    seeds = json.loads((RESULTS / "learning" / "cartpole-ppo.json").read_text())["seeds"]
    seconds = [seed["train_seconds"] for seed in seeds]
    return f"{min(seconds):.1f} to {max(seconds):.1f} seconds"


def _remote() -> dict[str, Any]:
    path = RESULTS / "remote.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


WIRE = {
    "latency": "ms from actions to rows, 64 lanes",
    "messages": "messages/s there and back, of one lane",
    "blocks": "rows/s of one stream, by lanes of a message",
    "ways": "rows/s, 64 lanes a message",
    "ratios of ways": "rows/s over those with TCP",
    "where": "microseconds of a round trip of 64 lanes, on average",
}


def _of_gpu(part: str) -> dict[str, Any]:
    """What one part of `benchmarks/accelerator.py` found."""
    return json.loads((RESULTS / "accelerator.json").read_text())["results"][part]


def gpu_learning() -> list[str]:
    """Returns of agents that learnt there."""
    lines = ["| command | required | return, seed 0 | seconds of training, of compiling |", "|---|---|---|---|"]
    for one in _of_gpu("learning").values():
        said = f"| `{one['command'].removeprefix('podracer ')}` | {one['bound']:g} "
        if one["code"]:
            lines.append(said + "| did not end in 5 minutes | |")
        else:
            seconds = f"{one['train_seconds']:.0f}, {one['compile_seconds']:.0f}"
            lines.append(said + f"| {one['eval_return_mean']:.3g} | {seconds} |")
    return lines


def gpu_anakin() -> list[str]:
    """Rows a second of Anakin there."""
    lines = ["| | lanes x rows | training | plain loop | training / plain | compile |", "|---|---|---|---|---|---|"]
    for one in _of_gpu("anakin").values():
        for row in one["results"]:
            rows = {"ppo": 32, "vtrace": 20}[row["agent"]]
            plain = f"{_short(row['yardstick'])} | **{row['ratio']:.2f}**" if row["yardstick"] else "- | -"
            env = row["env"].replace("_random_goals", ", random goals")
            lines.append(
                f"| {row['agent']} on {env} | {row['num_envs']:,} x {rows} | {_short(row['training'])} | {plain} "
                f"| {row['compile_seconds']:.0f} s |"
            )
    return lines


def gpu_sebulba() -> list[str]:
    """Rows a second of Sebulba there, and what its actors and its learner wait for."""
    lines = ["| Pong, 256 lanes, V-trace | acting | training | environments | inference | learning |"]
    lines.append("|---|---|---|---|---|---|")
    for one in _of_gpu("sebulba").values():
        for row in one["results"]:
            shares = " | ".join(
                f"{row['stages'][f'sebulba/{stage}_share']:.0%}" for stage in ("environment", "inference", "learn")
            )
            network = NETWORKS[row["preset"]].removeprefix("Pong, ")
            lines.append(f"| {network} | {row['acting']:,.0f} | {row['training']:,.0f} | {shares} |")
    return lines


def gpu_dqn() -> list[str]:
    """The paper's table 1 there."""
    kinds = ("standard", "concurrent", "synchronised", "both")
    lines = [f"| DQN on Pong, rows/s | {' | '.join(kinds)} |", "|---" * 5 + "|"]
    cells = _of_gpu("dqn")["pong"]["results"]["cells"]
    for lanes in sorted({cell["lanes"] for cell in cells}):
        of = {cell["kind"]: cell for cell in cells if cell["lanes"] == lanes}
        texts = (f"{of[k]['rows_per_second']:,.0f} ({of[k]['speed_up']:.2f} x)" if k in of else "-" for k in kinds)
        lines.append(f"| {lanes} lane{'s' if lanes > 1 else ''} | {' | '.join(texts)} |")
    return lines


def gpu_search() -> list[str]:
    """Simulations a second there."""
    lines = ["| roots, actions, network | program | simulations/s | of the network alone | of mctx's |"]
    lines.append("|---|---|---|---|---|")
    for one in _of_gpu("search").values():
        network = one["settings"]["network"]
        for row in one["results"]:
            for ours, other in (("puct", "muzero_policy"), ("gumbel", "gumbel_muzero_policy")):
                alone, mctx = (row["ratios"][f"{ours} / {name}"][1] for name in ("network alone", other))
                lines.append(
                    f"| {row['N']:,}, {row['A']}, {network} | {ours} | {_short(row['programs'][ours]['rate'])} "
                    f"| {alone:.2f} | {mctx:.2f} of `{other}` |"
                )
    return lines


"""What `podracer bench remote` measures of the wire, with an environment that does nothing."""


def _figure(number: float) -> str:
    return f"{number:.2f}" if number < 100 else f"{number:,.0f}"


def _short(number: float) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"


TABLES = {
    README: {"learning": learn.table, "anakin": anakin, "sebulba": sebulba},
    SCALE: {
        "scaling": scaling,
        "all-reduces": interconnects.all_reduce_table,
        "efficiency": interconnects.efficiency_table,
    },
    REMOTE: {
        "remote-targets": remote_targets,
        "remote": remote,
        "remote-wire": remote_wire,
        "remote-arithmetic": functools.partial(_remote_plan, "demand"),
        "remote-networks": functools.partial(_remote_plan, "networks"),
        "remote-h200": functools.partial(_remote_plan, "H200"),
        "remote-reported": functools.partial(_remote_plan, "reported"),
    },
    ACCELERATORS: {
        "learning": gpu_learning,
        "anakin": gpu_anakin,
        "sebulba": gpu_sebulba,
        "dqn": gpu_dqn,
        "search": gpu_search,
    },
}
"""What fills the markers of each page."""


def remote_churn() -> str:
    """What ten minutes of workers that come and die left behind."""
    found = json.loads((RESULTS / "remote_churn.json").read_text())["results"]
    most = 100 * (max(found["growth"].values()) - 1)
    killed = f"{found['kills']} worker processes and {found['replacements']} times a supervisor with both of its own"
    return f"{killed} were killed, and " + (f"they grew by up to {most:.1f} %" if most > 0.05 else "nothing of it grew")


def remote_floor() -> str:
    """What round trips cost, and so how many there can be."""
    where, messages = _remote()["where"], _remote()["messages"]
    cpu = sum(where[who] for who in ("learner's loop", "learner's actor and gRPC's threads", "worker"))
    most = 2e6 / cpu
    share = f"of which 8 streams have {messages['8 streams'] / most:.0%}"
    return (
        f"{cpu:,.0f} microseconds of CPU on both sides together, so two cores do {most:,.0f} a second at most, {share}"
    )


def pod_churn() -> str:
    """What became of a run of two processes that was hit again and again."""
    found = json.loads((RESULTS / "pod_churn.json").read_text())["results"]
    good, starts = sum(start["good"] for start in found["starts"]), len(found["starts"])
    slowest = max(start["seconds_to_the_end"] for start in found["starts"])
    went = f"{good} of {starts} starts went on from the newest checkpoint"
    return f"{went}, and ended within {slowest:.1f} s of the signal"


VALUES = {
    README: {"cartpole-seconds": cartpole_seconds},
    REMOTE: {"churn": remote_churn, "floor": remote_floor},
    PODS: {"churn": pod_churn},
}
"""What fills the markers within lines."""


def filled(page: pathlib.Path) -> str:
    """The text of a page with the tables and figures between its markers as they are measured.

    Raises:
      KeyError: for one that there is not.
    """

    def table(found: re.Match[str]) -> str:
        return "\n".join([found[1], *TABLES[page][found[2]](), "<!-- end -->"])

    def value(found: re.Match[str]) -> str:
        return f"{found[1]}{VALUES[page][found[2]]()}<!-- end -->"

    text = re.sub(r"(<!-- table: ([\w-]+) -->)\n.*?<!-- end -->", table, page.read_text(), flags=re.DOTALL)
    return re.sub(r"(<!-- value: ([\w-]+) -->)[^\n]*?<!-- end -->", value, text)


if __name__ == "__main__":
    for page in dict.fromkeys([*TABLES, *VALUES]):
        page.write_text(filled(page))
