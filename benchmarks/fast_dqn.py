"""Does DQN learn as much from equal steps where acting lags behind learning (Daley and Amato 2021, section 3)?

    python benchmarks/fast_dqn.py [--seeds 5]

Five seeds side by side on catch, with equal updates and target copies: rollouts of the rows between two copies, acted
by the target network and learnt from afterwards (lockstep), and rollouts of the rows of an update, acted by the newest
parameters (serial).
Writes curves and the mean return over the whole of training (the area under the curve) to
`benchmarks/results/fast_dqn-catch.png` and `fast_dqn.json`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import numpy as np

import podracer
from podracer.bench import measure
from podracer.result import plots

RESULTS = pathlib.Path(__file__).parent / "results"
STEPS, LANES, BATCH, PERIOD, TARGET_PERIOD, BOUND = 20_000, 8, 64, 8, 1000, 0.9
RANDOM = -0.6
"""The mean return of random play: the paddle is under the ball in one game of five."""

ORDERS = {"serial": ("serial", PERIOD // LANES), "lockstep": ("lockstep", TARGET_PERIOD // LANES)}


def main() -> int:
    """Trains both; the exit code says whether the bound holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    histories, areas = {}, {}
    for label, (mode, rollout_length) in ORDERS.items():
        result = podracer.train(
            "dqn",
            "catch",
            config={
                "batch_size": BATCH,
                "replay_ratio": BATCH / PERIOD,
                "target_interval": TARGET_PERIOD // PERIOD,
                "rollout_length": rollout_length,
            },
            mode=mode,
            num_envs=LANES,
            total_steps=STEPS,
            population=seeds,
            eval_every=STEPS // 25,
            progress=False,
        )
        histories[label] = result.history
        areas[label] = [measure.over_training(result.history, member) for member in range(seeds)]
        print(f"{label}: {np.mean(areas[label]):.3f} ({min(areas[label]):.3f} to {max(areas[label]):.3f})", flush=True)
    means = {label: float(np.mean(values)) for label, values in areas.items()}
    # Returns may be negative, and a ratio of such says nothing: random play is 0 here.
    ratio = (means["lockstep"] - RANDOM) / (means["serial"] - RANDOM)
    plain = means["lockstep"] / means["serial"]
    print(f"lockstep over serial: {ratio:.3f} where random play is 0 (required: {BOUND}), {plain:.3f} of returns alone")
    title = f"DQN on catch, {seeds} seeds: mean, least and most"
    plots.learning_curve(histories, RESULTS / "fast_dqn-catch.png", title=title, metric="eval/return_mean")
    results = {
        "mean_return_over_training": areas,
        "random_play": RANDOM,
        "above_random_ratio": ratio,
        "plain_ratio": plain,
        "bound": BOUND,
    }
    measure.write(RESULTS / "fast_dqn.json", "python benchmarks/fast_dqn.py", {"seeds": seeds}, results)
    return 0 if ratio >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
