"""Does V-trace learn from fewer steps when half of every batch is replayed (IMPALA, section 5.2.2)?

    python benchmarks/vtrace_replay.py [--seeds 5]

Five seeds side by side, on catch and on cartpole, with and without. Writes curves and the mean return over the whole of
training (the area under the curve) to `benchmarks/results/vtrace_replay-<environment>.png` and `vtrace_replay.json`.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np

import podracer
from podracer.bench import measure
from podracer.result import plots

RESULTS = pathlib.Path(__file__).parent / "results"
STEPS = {"catch": 150_000, "cartpole": 500_000}
FRACTIONS = {"without replay": 0.0, "half replayed": 0.5}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    results = {}
    for env, steps in STEPS.items():
        histories = {}
        for label, fraction in FRACTIONS.items():
            result = podracer.train(
                "vtrace",
                env,
                config={"replay_fraction": fraction},
                total_steps=steps,
                population=seeds,
                eval_every=steps // 25,
                progress=False,
            )
            histories[label] = result.history
            areas = [measure.over_training(result.history, member) for member in range(seeds)]
            results[f"{env}, {label}"] = {
                "mean_return_over_training": areas,
                "final": [member["eval_return_mean"] for member in result.summary.get("members", [result.summary])],
            }
            print(f"{env}, {label}: {np.mean(areas):.3f} ({min(areas):.3f} to {max(areas):.3f})", flush=True)
        title = f"V-trace on {env}, {seeds} seeds: mean, least and most"
        plots.learning_curve(histories, RESULTS / f"vtrace_replay-{env}.png", title=title, metric="eval/return_mean")
    measure.write(RESULTS / "vtrace_replay.json", "python benchmarks/vtrace_replay.py", {"seeds": seeds}, results)


if __name__ == "__main__":
    main()
