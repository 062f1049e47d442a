"""Does the age of the acting policy, or the number of lanes, slow V-trace down on EnvPool's CartPole?

    python benchmarks/cartpole_lag.py [--seeds 5] [--only NAME ...]

Two actor threads have twice the lanes, and act with older parameters: in "async" while the learner is at the rollout of
the other thread. Here threads and modes stand beside one thread of 32 or 64 lanes in serial mode, where nothing is old
but by as many updates as asked for. The last policy of each seed plays 1,000 fresh episodes. Writes
`benchmarks/results/cartpole_lag.json`, after each arm; arms that are there already stay.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np
from corrections import lagged

import podracer
from podracer import agents, environments
from podracer.agents import VTraceConfig
from podracer.bench import measure
from podracer.run.config import Mode

RESULT = pathlib.Path(__file__).parent / "results" / "cartpole_lag.json"
ENV, EPISODES, EVALUATIONS = "envpool:CartPole-v1", 1000, 20


class Arm(NamedTuple):
    """Settings of a run.

    Attributes:
      threads: actor threads, of 32 lanes each unless `lanes` says otherwise.
      mode: order of acting and learning.
      lag: updates by which the acting parameters are older than the mode makes them.
      lanes: of all threads; as many as the defaults have if None.
      rollout_length: rows of a lane in an update.
      learning_rate: of Adam, at the begin.
      steps: rows to train for.
    """

    threads: int
    mode: Mode
    lag: int = 0
    lanes: int | None = None
    rollout_length: int = 20
    learning_rate: float = 2e-3
    steps: int = 1_000_000


ARMS = {
    "1 thread, serial": Arm(1, "serial"),
    "1 thread, async": Arm(1, "async"),
    "2 threads, serial": Arm(2, "serial"),
    "2 threads, async": Arm(2, "async"),
    "2 threads, async, again": Arm(2, "async"),  # with threads that race, equal seeds are other runs
    "2 threads, lockstep": Arm(2, "lockstep"),
    "1 thread, serial, 1 update old": Arm(1, "serial", 1),
    "1 thread, serial, 2 updates old": Arm(1, "serial", 2),
    "1 thread, serial, 4 updates old": Arm(1, "serial", 4),
    "1 thread, serial, 8 updates old": Arm(1, "serial", 8),
    "1 thread, serial, 64 lanes of 10 rows": Arm(1, "serial", lanes=64, rollout_length=10),
    "2 threads, async, half the learning rate": Arm(2, "async", learning_rate=1e-3),
    "2 threads, async, twice the steps": Arm(2, "async", steps=2_000_000),
}


def train(arm: Arm, seed: int) -> dict[str, Any]:
    """Trains and evaluates one seed."""
    env = environments.make(ENV)
    config = VTraceConfig(rollout_length=arm.rollout_length, learning_rate=arm.learning_rate)
    result = podracer.train(
        lagged(agents.vtrace.make(env.spec, config), arm.lag),
        env,
        total_steps=arm.steps,
        num_envs=arm.lanes,
        actor_threads=arm.threads,
        mode=arm.mode,
        seed=seed,
        eval_every=arm.steps // EVALUATIONS,
        eval_episodes=100,
        progress=False,
    )
    rows = [row for row in result.history if "sebulba/policy_lag" in row]
    return {
        "seed": seed,
        "return": result.evaluate(EPISODES, seed=1000 + seed).mean,
        "over_training": measure.over_training(result.history, 0),
        "policy_lag": arm.lag or float(np.mean([row["sebulba/policy_lag"] for row in rows])),
        "updates": result.summary["updates"],
        "curve": [(row["env_steps"], row["eval/return_mean"]) for row in result.history if "eval/return_mean" in row],
    }


def main() -> None:
    """Runs the arms that are not there yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="NAME")
    arguments = parser.parse_args()
    results = json.loads(RESULT.read_text())["results"] if RESULT.exists() else {}
    for name in [name for name in arguments.only if name not in results]:
        results[name] = [train(ARMS[name], seed) for seed in range(arguments.seeds)]
        ends = ", ".join(f"{seed['return']:.0f}" for seed in results[name])
        lag, area = (np.mean([seed[key] for seed in results[name]]) for key in ("policy_lag", "over_training"))
        print(f"{name}: {ends}; over training {area:.0f}, {lag:.2f} updates old", flush=True)
        measure.write(RESULT, "python benchmarks/cartpole_lag.py", {"seeds": arguments.seeds}, results)


if __name__ == "__main__":
    main()
