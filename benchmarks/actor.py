"""Times the actions of a trained policy: one observation at a time, in Gymnasium's CartPole, and in batches.

python benchmarks/actor.py       # a minute; rewrites benchmarks/results/actor.json
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import gymnasium
import numpy as np

import podracer
from podracer.bench import measure

RESULTS = pathlib.Path(__file__).parent / "results" / "actor.json"
BATCH = 256
REPEATS = 7


def played(result: podracer.Result) -> measure.Measured:
    """Steps of one environment that an actor plays."""
    environment, actor = gymnasium.make("CartPole-v1"), result.actor()

    def play(n: int) -> int:
        observation, _ = environment.reset(seed=0)
        actor.reset()
        for _ in range(n):
            observation, _, terminated, truncated, _ = environment.step(actor(observation))
            if terminated or truncated:
                observation, _ = environment.reset()
                actor.reset()
        return n

    return play


def called(actor: Callable, observation: np.ndarray, rows: int) -> measure.Measured:
    """Calls with one observation."""

    def call(n: int) -> int:
        for _ in range(n):
            actor(observation)
        return n * rows

    return call


def main() -> None:
    result = podracer.train("ppo", "cartpole", total_steps=60_000, progress=False)
    one, many = np.zeros(4, np.float32), np.zeros((BATCH, 4), np.float32)
    measured = {
        "one, with CartPole's steps": played(result),
        "one": called(result.actor(), one, 1),
        f"batch of {BATCH}": called(result.actor(BATCH), many, BATCH),
        f"batch of {BATCH}, sampled": called(result.actor(BATCH, greedy=False), many, BATCH),
    }
    rates = measure.in_turns(measured, REPEATS, seconds=0.5)
    for name, values in rates.items():
        print(f"{name:<28} {np.median(values):>12,.0f} actions/s ({min(values):,.0f} to {max(values):,.0f})")
    report = {
        "network": "PPO's default on CartPole: 64-64",
        "actions_per_second": rates,
        "machine": measure.describe_machine(),
        "versions": measure.versions(),
        "commit": measure.commit(),
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
