"""Looks for a learning rate by which V-trace learns catch, among rates over three decades, without knowing any.

    python benchmarks/sweep.py [--seeds 0 1 2]

A sweep for each of its seeds: 16 rates from [1e-5, 1e-2], each trained from two seeds, and the best one again from two
others. Writes the tables to `benchmarks/results/sweep.json`. The exit code says whether the rate that each sweep chose
reaches a return of 0.95 on seeds that had no part in the choice.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile

import podracer
from podracer.bench import measure

RESULTS = pathlib.Path(__file__).parent / "results"
STEPS = 200_000
WANTED = 0.95


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    results = {}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as directory:
            swept = podracer.sweep(
                "vtrace",
                "catch",
                hyper={"learning_rate": podracer.log_uniform(1e-5, 1e-2)},
                members=16,
                seeds=2,
                seed=100 * seed,
                out=directory,
                progress=False,
                total_steps=STEPS,
                eval_every=STEPS,
            )
        print(swept, flush=True)
        found = swept.to_json()
        results[f"seed {seed}"] = {name: found[name] for name in ("request", "at_once", "best", "rows")}
    fresh = [found["best"]["fresh"]["mean"] for found in results.values()]
    measure.write(RESULTS / "sweep.json", "python benchmarks/sweep.py", vars(arguments), results)
    print(f"the chosen rates on fresh seeds: {', '.join(f'{mean:.3f}' for mean in fresh)}; wanted: {WANTED}")
    return 0 if min(fresh) >= WANTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
