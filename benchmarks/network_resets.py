"""The worth of resets of a network at low and high replay ratios (docs/optimizers.md): DQN on MinAtar's Breakout.

    python benchmarks/network_resets.py                 # all rows, about three hours of a core
    python benchmarks/network_resets.py --only 8 none   # only rows whose names have all of these words

100,000 rows with one and with eight updates a row, each of a batch of 32, with and without a reset every 40,000
updates: the number of rows and the interval are those of D'Oro et al. (2023) on Atari. A longer interval is tried, too:
with eight updates a row, and with one in a run of as many updates. A row is written when it ends, to
`benchmarks/results/network_resets.json`, with a picture. The exit code says whether resets are no worse with one update
a row and better with eight, each at one of the intervals (95% intervals of differences of the return at the end).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any, NamedTuple

import numpy as np

import podracer
from podracer.bench import measure
from podracer.result import plots

FILE = pathlib.Path(__file__).parent / "results" / "network_resets.json"
COMMAND = "python benchmarks/network_resets.py"
STEPS = 100_000
BATCH = 32


class Setting(NamedTuple):
    """Updates a row, updates from one reset to the next (0 for none), rows, and seeds."""

    updates: int
    interval: int
    steps: int = STEPS
    seeds: int = 5

    @property
    def name(self) -> str:
        """The name of its row."""
        resets = f"reset every {self.interval:,}" if self.interval else "none"
        rows = "" if self.steps == STEPS else f", {self.steps:,} rows"
        return f"{self.updates} update{'s' if self.updates > 1 else ''} a row, {resets}{rows}"


NETWORK = {"torso": "mlp", "hidden_sizes": (128, 128)}
"""An MLP, which learns several times faster on CPU than the convolution of the preset."""

LONG = 800_000
"""As many rows as updates of a run with eight a row."""
SETTINGS = (
    *(Setting(1, interval) for interval in (0, 40_000)),
    *(Setting(1, interval, LONG, 3) for interval in (0, 200_000)),
    *(Setting(8, interval) for interval in (0, 40_000, 200_000)),
)
ROWS = {setting.name: setting for setting in SETTINGS}


def measured(setting: Setting) -> dict[str, Any]:
    """Trains the seeds of a row, one after the other."""
    start, ends, curves = time.perf_counter(), [], []
    for seed in range(setting.seeds):
        result = podracer.train(
            "dqn",
            "minatar_breakout",
            preset="minatar",
            config=NETWORK | {"replay_ratio": float(BATCH * setting.updates), "reset_interval": setting.interval},
            total_steps=setting.steps,
            seed=seed,
            eval_every=setting.steps // 10,
            eval_episodes=300,
            progress=False,
        )
        ends.append(round(result.summary["eval_return_mean"], 3))
        found = [row for row in result.history if "eval/return_mean" in row]
        curves += [[seed, row["env_steps"], round(row["eval/return_mean"], 3)] for row in found]
    seconds = round(time.perf_counter() - start, 1)
    return {"returns": ends, "seconds": seconds, "commit": measure.commit(), "curves": curves}


def stored() -> dict[str, Any]:
    """The rows that are there, in order."""
    found = json.loads(FILE.read_text())["results"]["rows"] if FILE.exists() else {}
    return {name: found[name] for name in ROWS if name in found}


def difference(rows: dict[str, Any], setting: Setting) -> list[float] | None:
    """The 95% interval of the mean return with resets less that without, by bootstrap; None before both are there."""
    pair = [rows.get(each.name) for each in (setting, setting._replace(interval=0))]
    if None in pair:
        return None
    rng, ends = np.random.default_rng(0), [np.asarray(row["returns"]) for row in pair]
    means = [rng.choice(each, (10_000, len(each))).mean(-1) for each in ends]
    return np.quantile(means[0] - means[1], (0.025, 0.975)).round(3).tolist()


def differences(rows: dict[str, Any]) -> dict[str, list[float]]:
    """The differences of all rows with resets, by name."""
    found = {name: difference(rows, setting) for name, setting in ROWS.items() if setting.interval}
    return {name: interval for name, interval in found.items() if interval}


def write(rows: dict[str, Any]) -> None:
    """Writes the rows, the differences and the picture."""
    settings = {"batch_size": BATCH}
    measure.write(FILE, COMMAND, settings, {"rows": rows, "difference_intervals": differences(rows)})
    columns = ("member", "env_steps", "eval/return_mean")
    shown = {name: row for name, row in rows.items() if ROWS[name].steps == STEPS}
    histories = {name: [dict(zip(columns, point)) for point in row["curves"]] for name, row in shown.items()}
    title = "DQN on MinAtar's Breakout: mean, least and most of the seeds"
    plots.learning_curve(histories, FILE.with_suffix(".png"), title=title, metric="eval/return_mean")


def main() -> int:
    """Runs the rows that are asked for; the exit code says whether resets do as they should in all that are there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    words = parser.parse_args().only
    for name in [name for name in ROWS if all(word in name for word in words)]:
        row = measured(ROWS[name])
        write(stored() | {name: row})
        print(f"{name}: {', '.join(f'{x:.2f}' for x in row['returns'])}  ({row['seconds']:.0f} s)", flush=True)
    write(stored())
    found = differences(stored())
    for name, interval in found.items():
        print(f"{name}: return less that without resets, 95% interval: {interval}")
    no_worse = [interval[1] >= 0 for name, interval in found.items() if ROWS[name].updates == 1]
    better = [interval[0] > 0 for name, interval in found.items() if ROWS[name].updates > 1]
    return 0 if any(no_worse) and any(better) else 1


if __name__ == "__main__":
    sys.exit(main())
