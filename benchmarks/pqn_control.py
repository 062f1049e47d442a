"""Does PQN need layer normalisation? A control: without it, at four times the learning rate, CartPole is learnt worse.

    python benchmarks/pqn_control.py [--seeds 10]

Seeds side by side in one program, with and without normalisation, at four times the default learning rate and
otherwise with defaults. Writes mean returns over the whole of training and at its end to
`benchmarks/results/pqn_control.json` and curves to `pqn_control.png`. The exit code says whether the mean over training
is worse without (95% interval of the difference).
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import numpy as np

import podracer
from podracer.agents import PQNConfig
from podracer.bench import measure
from podracer.result import plots

RESULTS = pathlib.Path(__file__).parent / "results"
TIMES = 4
"""The default learning rate."""


def main() -> int:
    """Trains both; the exit code says whether the control fails as it should."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    steps, rate = 500_000, TIMES * PQNConfig().learning_rate
    histories, over_training, ends = {}, {}, {}
    for label, norm in {"with layer normalisation": True, "without": False}.items():
        result = podracer.train(
            "pqn",
            "cartpole",
            config={"layer_norm": norm, "learning_rate": rate},
            total_steps=steps,
            population=seeds,
            eval_every=steps // 20,
            eval_episodes=100,
            progress=False,
        )
        histories[label] = result.history
        over_training[label] = [measure.over_training(result.history, member) for member in range(seeds)]
        last = [row for row in result.history if "eval/return_mean" in row][-seeds:]
        ends[label] = [row["eval/return_mean"] for row in last]
        print(
            f"{label}: {np.mean(over_training[label]):.0f} over training ({min(over_training[label]):.0f} to "
            f"{max(over_training[label]):.0f}), at the end {np.mean(ends[label]):.0f} (least {min(ends[label]):.0f})",
            flush=True,
        )
    norm, none = (np.asarray(values) for values in over_training.values())
    resampled = np.random.default_rng(0).integers(seeds, size=(2, 10_000, seeds))
    low, high = np.quantile(norm[resampled[0]].mean(-1) - none[resampled[1]].mean(-1), (0.025, 0.975)).tolist()
    print(f"with less without: {norm.mean() - none.mean():.0f} over training (95% interval {low:.0f} to {high:.0f})")
    title = f"PQN on CartPole at {TIMES} times the learning rate, {seeds} seeds: mean, least and most"
    plots.learning_curve(histories, RESULTS / "pqn_control.png", title=title, metric="eval/return_mean")
    results = {"mean_return_over_training": over_training, "final_return": ends, "difference_interval": [low, high]}
    settings = {"seeds": seeds, "learning_rate": rate, "total_steps": steps}
    measure.write(RESULTS / "pqn_control.json", "python benchmarks/pqn_control.py", settings, results)
    return 0 if low > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
