"""Does a discount that is learnt by gradients reach a reward that a fixed one does not see? (Xu et al. 2018)

    python benchmarks/meta_gradient.py [--seeds 8]

`examples/meta_gradient.py` on a chain of ten steps with noisy rewards, from a discount of 0.5, beside the same with
numbers that stay. All seeds of both are in one program. The policies of the end play 4,096 lanes without the noise.
Writes `benchmarks/results/meta_gradient.json` and two pictures. The exit code says whether every seed that learns its
discount ends at 0.9 or more with a return of 0.95 or more, and every other one at a return of 0.5 or less.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

import envs_jax
from podracer import anakin
from podracer.bench import measure
from podracer.result import plots

RESULTS = pathlib.Path(__file__).parent / "results"
EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "meta_gradient.py"
STEPS, LANES = 2_000_000, 4096
RATES = {"learnt discount": 0.03, "fixed discount": 0.0}
"""The rates of the meta-optimiser, by arm."""
LEAST_DISCOUNT, LEAST_RETURN, MOST_FIXED = 0.9, 0.95, 0.5


def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("meta_gradient_example", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def returns(agent: Any, learners: Any, seeds: jax.Array) -> list[float]:
    """The mean return of each policy on the chain without noise, by the actions that it draws."""
    quiet = anakin.update(agent, envs_jax.make("gridworld", task="delayed_chain"), num_envs=LANES)

    @jax.jit
    @jax.vmap
    def play(learner: Any, seed: jax.Array) -> jax.Array:
        _, _, episodes = quiet.rollout(quiet.init(seed)._replace(learner=learner), 1.0)
        return episodes.return_sum / episodes.count

    return play(learners, 1000 + seeds).tolist()


def train(num_seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Trains all seeds of both arms, and plays."""
    module = example()
    agent, begin, advance, steps = module.make()
    seeds = jnp.tile(jnp.arange(num_seeds), len(RATES))
    rates = jnp.repeat(jnp.array(list(RATES.values()), jnp.float32), num_seeds)
    run, advance, rows = jax.jit(jax.vmap(begin))(seeds), jax.jit(jax.vmap(advance)), []
    for number in range(1, STEPS // steps + 1):
        run, means = advance(run, rates)
        numbers = module.numbers_of(run[0])
        rows.append((number * steps, numbers["discount"].tolist(), numbers["trace_lambda"].tolist(), means.tolist()))
    ends = returns(agent, run[2].learner, seeds)

    def result(i: int) -> dict[str, Any]:
        curve = [(env_steps, *(values[i] for values in columns)) for env_steps, *columns in rows]
        return {"seed": int(seeds[i]), "discount": curve[-1][1], "return": ends[i], "curve": curve}

    return {arm: [result(j * num_seeds + i) for i in range(num_seeds)] for j, arm in enumerate(RATES)}


def draw(results: dict[str, list[dict[str, Any]]]) -> None:
    """Draws the discount and the return over training."""
    for column, name in ((1, "discount"), (3, "episode/return")):
        rows_of = lambda run: [{"env_steps": row[0], "member": run["seed"], name: row[column]} for row in run["curve"]]  # noqa: B023, E731
        histories = {arm: [row for run in runs for row in rows_of(run)] for arm, runs in results.items()}
        title = f"V-trace on a chain with noisy rewards, {len(results['learnt discount'])} seeds: mean, least and most"
        file = RESULTS / f"meta_gradient-{name.rpartition('/')[2]}.png"
        plots.learning_curve(histories, file, title=title, metric=name)


def main() -> int:
    """Trains both; the exit code says whether the gate is passed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    seeds = parser.parse_args().seeds
    results = train(seeds)
    for arm, runs in results.items():
        print(arm, ", ".join(f"gamma {run['discount']:.3f} return {run['return']:+.3f}" for run in runs), flush=True)
    draw(results)
    settings = {"seeds": seeds, "total_steps": STEPS}
    measure.write(RESULTS / "meta_gradient.json", "python benchmarks/meta_gradient.py", settings, results)
    learnt, fixed = results.values()
    passed = all(run["discount"] >= LEAST_DISCOUNT and run["return"] >= LEAST_RETURN for run in learnt)
    return 0 if passed and all(run["return"] <= MOST_FIXED for run in fixed) else 1


if __name__ == "__main__":
    sys.exit(main())
