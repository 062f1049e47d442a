"""Does R2D2 remember? With its LSTM and without, five seeds side by side, where only memory helps.

    python benchmarks/memory_tasks.py [--seeds 5] [--episodes 1000]

Writes `benchmarks/results/memory_tasks.json` and a picture per task. Without memory the best return is 0 on average.
"""

from __future__ import annotations

import argparse
import pathlib
import time

import podracer
from podracer.bench import measure
from podracer.result import plots

RESULTS = pathlib.Path(__file__).parent / "results"
SMALL = {"core": "lstm", "core_size": 32, "hidden_sizes": (32,), "head_size": 32}
TASKS = {
    "memory_chain": {
        "env_options": {"length": 20},
        "total_steps": 150_000,
        # Episodes have 22 rows with the reset: a sequence is two of them.
        "config": SMALL | {"rollout_length": 21, "burn_in": 0, "trace_length": 42, "replay_ratio": 8.0},
    },
    "t_maze": {
        "env_options": {"min_length": 3, "max_length": 7},
        "total_steps": 250_000,
        # At the junction, turning is worth nothing until the cue is remembered: exploring must go on until then.
        "config": {
            "discount": 0.9,
            "epsilon_base": 0.6,
            "epsilon_alpha": 2.0,
            "burn_in": 0,
            "trace_length": 20,
            "replay_ratio": 16.0,
            "target_interval": 100,
        },
    },
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=1000)
    arguments = parser.parse_args()
    results = {}
    for env, task in TASKS.items():
        histories = {}
        for label, change in (("LSTM", {}), ("feed-forward", {"core": "none"})):
            start = time.perf_counter()
            result = podracer.train(
                "r2d2",
                env,
                **(task | {"config": task["config"] | change}),
                population=arguments.seeds,
                eval_episodes=arguments.episodes,
                progress=False,
            )
            seconds = time.perf_counter() - start
            histories[label] = result.history
            returns = [member["eval_return_mean"] for member in result.summary.get("members", [result.summary])]
            results[f"{env}, {label}"] = {"returns": returns, "seconds": seconds, "updates": result.summary["updates"]}
            print(f"{env}, {label}: {', '.join(f'{x:.3f}' for x in returns)}  ({seconds:.0f} s)", flush=True)
        title = f"R2D2 on {env}, {arguments.seeds} seeds: mean, least and most"
        plots.learning_curve(histories, RESULTS / f"memory_tasks-{env}.png", title=title, metric="eval/return_mean")
    measure.write(RESULTS / "memory_tasks.json", "python benchmarks/memory_tasks.py", vars(arguments), results)


if __name__ == "__main__":
    main()
