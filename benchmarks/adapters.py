"""A smoke run of every adapter: PPO on one small task of each library, beside random actions.

    python benchmarks/adapters.py [--names gymnax brax]    # those whose libraries are installed, or some of them
    python benchmarks/adapters.py --names craftax-lstm     # Craftax with an LSTM, whose training takes ten minutes

Writes `benchmarks/results/adapters.json`: the mean return of random legal actions, of the episodes that were the first
to end (short ones), of the trained policy, and of the last ten rows of training, where actions are sampled, with
seconds and versions. A line says whether PPO gained enough.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import podracer
from envs_jax import adapters
from podracer import environments
from podracer.bench import measure
from podracer.environments import autoreset
from podracer.nets import action_masks

RESULTS = pathlib.Path(__file__).parent / "results" / "adapters.json"
LANES = 64
MOST_STEPS = 1000
"""Steps of random play; what an episode has gained by then counts."""


class Task(NamedTuple):
    """A run.

    Attributes:
      env: the environment.
      gain: the least difference of mean returns between the trained policy and random actions.
      sampled: True compares the policy as it is trained, whose actions are drawn. In Craftax the most probable action
        often does nothing, in the dark or against a wall, for good.
      options: of the environment.
      config: of PPO.
      settings: further arguments of `podracer.train`.
    """

    env: str
    gain: float
    options: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    sampled: bool = False


CRAFTAX = "craftax:Craftax-Classic-Symbolic-v1"
TASKS = {
    "brax": Task("brax:inverted_pendulum", 20.0, {"max_steps": 250}),
    "craftax": Task(CRAFTAX, 0.5, {"max_steps": 1000}, {"discount": 0.99}, {"reset_pool": 16}, sampled=True),
    "gymnax": Task("gymnax:CartPole-v1", 100.0),
    "jumanji": Task("jumanji:Game2048-v1", 200.0),
    "navix": Task("navix:Navix-Empty-5x5-v0", 0.3),
    "playground": Task("playground:CartpoleBalance", 10.0, {"max_steps": 250}),
    "xminigrid": Task("xminigrid:MiniGrid-EmptyRandom-5x5", 0.2),
    # A short horizon, for achievements come early and one by one. Early episodes have 150 steps, so that 64 lanes
    # begin some 30 in a rollout, and a pool of 16 states is no great repetition.
    "craftax-lstm": Task(
        CRAFTAX,
        2.0,
        {},
        {
            "core": "lstm",
            "core_size": 128,
            "hidden_sizes": (128,),
            "separate": False,
            "discount": 0.925,
            "gae_lambda": 0.625,
            "learning_rate": 5e-4,
            "num_minibatches": 8,
        },
        {"reset_pool": 16, "total_steps": 1_500_000},
        sampled=True,
    ),
}


def random_return(env: Any, seed: int) -> float:
    """The mean return of a first episode of random legal actions in each of some lanes."""

    def lane(key: jax.Array) -> jax.Array:
        def step(carry: Any, key: jax.Array) -> Any:
            lane, over, total = carry
            action_key, step_key = jax.random.split(key)
            action = env.spec.action_space.sample(action_key)
            legal = action_masks.legal(env.spec, lane.timestep.observation)
            if legal is not None:
                action = jax.random.categorical(action_key, jnp.where(legal, 0.0, -jnp.inf)).astype(jnp.int32)
            lane = autoreset.step(env, lane, action, step_key, lane.env)
            total = total + jnp.where(over, 0.0, lane.timestep.reward)
            return (lane, over | lane.timestep.last, total), ()

        key, first = jax.random.split(key)
        start = autoreset.reset(env, first), jnp.asarray(False), jnp.float32(0)
        steps = min(env.spec.max_episode_steps or MOST_STEPS, MOST_STEPS)
        return jax.lax.scan(step, start, jax.random.split(key, steps))[0][2]

    return float(np.mean(jax.jit(jax.vmap(lane))(jax.random.split(jax.random.key(seed), LANES))))


def run(name: str, task: Task, total_steps: int, seed: int) -> dict[str, Any]:
    start = time.perf_counter()
    at_random = random_return(environments.make(task.env, **task.options), seed)
    print(f"{task.env}: random {at_random:.3f}", flush=True)
    result = podracer.train(
        "ppo",
        task.env,
        env_options=dict(task.options),
        config=dict(task.config),
        seed=seed,
        eval_episodes=LANES,
        progress=False,
        **{"total_steps": total_steps, **task.settings},
    )
    before = next(row["episode/return"] for row in result.history if "episode/return" in row)
    after = result.summary["eval_return_mean"]
    last = [row["episode/return"] for row in result.history if "episode/return" in row][-10:]
    sampled = float(np.mean(last))
    gained = (sampled if task.sampled else after) - at_random >= task.gain
    verdict = "as it should" if gained else "TOO LITTLE"
    print(f"{task.env}: {before:.3f} before, {after:.3f} after, {sampled:.3f} of samples: {verdict}", flush=True)
    library = adapters.LIBRARIES[task.env.partition(":")[0]]
    distribution = library.requirements[0].partition(">=")[0]
    return {
        "environment": task.env,
        "options": dict(task.options),
        "steps": result.summary["env_steps"],
        "random": at_random,
        "before": before,
        "after": after,
        "sampled": sampled,
        "least_gain": task.gain,
        "gained": gained,
        "seconds": time.perf_counter() - start,
        "train_seconds": result.summary["train_seconds"],
        distribution: importlib.metadata.version(distribution),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", nargs="+", choices=TASKS, default=list(adapters.LIBRARIES))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    for name in arguments.names:
        try:
            adapters.check(TASKS[name].env.partition(":")[0])
        except ValueError as error:
            print(error)
            continue
        results[name] = run(name, TASKS[name], arguments.steps, arguments.seed)
        measure.write(RESULTS, "python benchmarks/adapters.py", vars(arguments), dict(sorted(results.items())))
    return 0 if all(result["gained"] for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
