"""Does a discount that is learnt by gradients reach a reward that a fixed one does not see? (Xu et al. 2018)

    python benchmarks/meta_gradient.py [--seeds 3]

`examples/meta_gradient.py` on a chain of ten steps with noisy rewards, from a discount of 0.5, beside the same with
numbers that stay. The policies of the end play 4,096 lanes without the noise. Writes
`benchmarks/results/meta_gradient.json` and two pictures. The exit code says whether every seed that learns its discount
ends at 0.9 or more with a return of 0.95 or more, and every other one at a return of 0.5 or less.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
import time
from typing import Any

import jax

import envs_jax
from podracer import anakin
from podracer.bench import measure
from podracer.result import plots

RESULTS = pathlib.Path(__file__).parent / "results"
EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "meta_gradient.py"
STEPS, LANES = 2_000_000, 4096
ARMS = {"learnt discount": 1e-2, "fixed discount": 0.0}
"""The rate of the meta-optimiser."""
LEAST_DISCOUNT, LEAST_RETURN, MOST_FIXED = 0.9, 0.95, 0.5


def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("meta_gradient_example", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play(agent: Any, learner: Any, seed: int) -> float:
    """The mean return of a policy on the chain without noise, with the actions that it draws."""
    quiet = anakin.update(agent, envs_jax.make("gridworld", task="delayed_chain"), num_envs=LANES)
    rollout = jax.jit(lambda seed: quiet.rollout(quiet.init(seed)._replace(learner=learner), 1.0)[2])
    episodes = rollout(1000 + seed)
    return float(episodes.return_sum / episodes.count)


def train(rate: float, seed: int) -> dict[str, Any]:
    """Trains and plays one seed."""
    begin = time.perf_counter()
    agent, learner, rows = example().main(STEPS, meta_rate=rate, seed=seed)
    seconds = time.perf_counter() - begin
    return {
        "seed": seed,
        "discount": rows[-1][1],
        "return": play(agent, learner, seed),
        "seconds": seconds,
        "curve": rows,
    }


def main() -> int:
    """Trains both; the exit code says whether the gate is passed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    results = {arm: [train(rate, seed) for seed in range(seeds)] for arm, rate in ARMS.items()}
    for arm, runs in results.items():
        print(arm, ", ".join(f"gamma {run['discount']:.3f} return {run['return']:.3f}" for run in runs), flush=True)
    learnt, fixed = results.values()
    passed = all(run["discount"] >= LEAST_DISCOUNT and run["return"] >= LEAST_RETURN for run in learnt)
    passed &= all(run["return"] <= MOST_FIXED for run in fixed)
    names = ("discount", "episode/return")
    histories = {
        arm: [
            {"env_steps": row[0], "member": run["seed"], **dict(zip(names, (row[1], row[3])))}
            for run in runs
            for row in run["curve"]
        ]
        for arm, runs in results.items()
    }
    for name, file in zip(names, ("meta_gradient-discount.png", "meta_gradient-return.png")):
        title = f"V-trace on a chain with noisy rewards, {seeds} seeds"
        plots.learning_curve(histories, RESULTS / file, title=title, metric=name)
    measure.write(RESULTS / "meta_gradient.json", "python benchmarks/meta_gradient.py", {"seeds": seeds}, results)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
