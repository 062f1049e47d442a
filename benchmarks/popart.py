"""The worth of PopArt where two tasks have rewards of different scales (docs/tasks.md). Three seeds a row.

    python benchmarks/popart.py                  # all rows, minutes
    python benchmarks/popart.py --only without   # only rows whose names have all of these words

Rows are written to `benchmarks/results/popart.json`, as those of `benchmarks/tasks.py` are.

One policy plays catch and the same with its rewards negated, and sees which of both it plays. One of them has rewards
1,000 times as large. What is best in one is worst in the other, so nothing that is learnt for the large one serves the
small one. Without aim four of five balls are missed: about 0.6 of the best return where misses are rewarded, else -0.6.

`control` is EnvPool's CartPole and Acrobot where acting and learning take turns: runs then repeat, and no policy is
old.
"""

from __future__ import annotations

import sys

import tasks

import envs_jax
from envs_jax import wrappers
from podracer.environments.tasks import Tasks

LARGE = 1000.0
STEPS = 1_000_000
POPART = {"config": {"popart": True}}


def both(large: float) -> Tasks:
    """Catch with its rewards times a number, and the other of catch and negated catch."""
    catch = envs_jax.make("catch")
    small = wrappers.scale_reward(-1.0)(catch) if large > 0 else catch
    return Tasks({"large": wrappers.scale_reward(large)(catch), "small": small}, task_input=True)


def solved(returns: tasks.Returns) -> bool:
    return returns["large"] >= 0.9 * LARGE and returns["small"] >= 0.9


def small_is_missed(returns: tasks.Returns) -> bool:
    return returns["small"] <= 0.3


def large_is_missed(returns: tasks.Returns) -> bool:
    return returns["large"] <= 0.3 * LARGE


def control() -> tasks.Row:
    """CartPole and Acrobot by Sebulba, in turns."""
    settings = {"env_options": {"union": "pad"}, "num_envs": 64, "eval_episodes": 32, "mode": "serial"} | POPART
    return tasks.Row(tasks.CONTROL, 3_000_000, tasks.controlled, "at least 475 and -100", settings, population=False)


SOLVED, MISSED = "at least 0.9 of the best in both", "at most 0.3 of the best in the {} one"
ROWS = {
    "large catch, with PopArt": tasks.Row(lambda: both(LARGE), STEPS, solved, SOLVED, POPART),
    "large catch, without": tasks.Row(lambda: both(LARGE), STEPS, large_is_missed, MISSED.format("large")),
    "large negated catch, with PopArt": tasks.Row(lambda: both(-LARGE), STEPS, solved, SOLVED, POPART),
    "large negated catch, without": tasks.Row(lambda: both(-LARGE), STEPS, small_is_missed, MISSED.format("small")),
    "control, with PopArt": control(),
}

if __name__ == "__main__":
    sys.exit(tasks.main("popart", ROWS, pictures=False))  # one axis has no place for both scales
