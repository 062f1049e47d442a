"""Small PPO agents, samples of another policy, and calls that record and learn with them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import agents, nets, spaces
from podracer.agents import PPOConfig
from podracer.agents.ppo import Samples
from podracer.types import EnvSpec, TimeStep, Trajectory
from tests.support import harness, oracles

T, B, A = 6, 8, 4
KEY = jax.random.key(0)
SPEC = EnvSpec("test", spaces.Box(-9.0, 9.0, (3,)), spaces.Discrete(A))
NUMBERS = {"clip_epsilon": 0.2, "value_cost": 0.7, "entropy_cost": 0.05}
ONCE = {"num_epochs": 1, "num_minibatches": 1}


def samples_of(seed: int = 0, shape: tuple[int, int] = (T, B)) -> tuple[np.ndarray, np.ndarray, Samples]:
    """The learner's logits and values [T, B], and samples of another policy, a third of them masked."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(0, A, shape, np.int32)
    logits = rng.normal(size=(*shape, A))
    old = oracles.categorical_log_prob(logits + 0.5 * rng.normal(size=(*shape, A)), actions)
    numbers = {name: rng.normal(size=shape) for name in ("value", "advantage", "target")}
    mask = rng.random(shape) > 0.33
    samples = Samples(
        inputs=nets.Inputs((), jnp.zeros(shape), jnp.zeros(shape, bool), ()),
        core=(),
        sample=jnp.asarray(actions),
        log_prob=jnp.asarray(old, jnp.float32),
        weight=jnp.asarray(mask, jnp.float32),
        **{name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()},
    )
    return logits, rng.normal(size=shape), samples


@functools.cache
def made(config: PPOConfig, spec: EnvSpec = SPEC) -> Any:
    """An agent, its state, and compiled `record(learner, rows)` and `learn(learner, trajectory, progress, key)`."""
    agent = agents.ppo.make(spec, config)
    learner = jax.jit(agent.init)(KEY, harness.hyper(agent))
    lanes = jnp.arange(B, dtype=jnp.int32)

    @jax.jit
    def record(learner: Any, rows: TimeStep, state: Any) -> Any:
        return harness.record(agent, agent.actor_params(learner, jnp.float32(0)), state, rows, KEY)

    def start(learner: Any, rows: TimeStep, state: Any = None) -> Any:
        return record(learner, rows, agent.start(lanes, B) if state is None else state)

    def learn(learner: Any, trajectory: Trajectory, progress: float = 0.0, key: jax.Array = KEY) -> Any:
        return harness.alone(agent.learn)(learner, trajectory, jnp.float32(progress), key)

    return agent, learner, start, learn


def small(**fields: Any) -> PPOConfig:
    common = {"hidden_sizes": (8,), "rollout_length": T, "num_epochs": 2, "num_minibatches": 4}
    return PPOConfig(**(common | {"normalize_rewards": False} | fields))
