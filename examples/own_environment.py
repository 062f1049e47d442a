"""An environment and a network of your own: `python examples/own_environment.py`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import podracer
from podracer import nets, spaces
from podracer.types import EnvSpec, Transition


class State(NamedTuple):
    target: jax.Array
    steps: jax.Array


class Echo:
    """Say what you see, ten times; reward 1 for every right answer. Ends by a time limit.

    `train` plays it for a second before; `envs_jax.testing.check_environment(Echo())` checks more.
    """

    spec = EnvSpec("echo", spaces.Box(0.0, 1.0, (4,)), spaces.Discrete(4), max_episode_steps=10)

    def reset(self, key):
        return State(jax.random.randint(key, (), 0, 4), jnp.int32(0))

    def step(self, state, action, key):
        reward = (action == state.target).astype(jnp.float32)
        state = State(jax.random.randint(key, (), 0, 4), state.steps + 1)
        return state, Transition(reward, jnp.float32(1.0), state.steps >= 10)

    def observe(self, state):
        return jax.nn.one_hot(state.target, 4)


def init(key):
    return {"policy": 0.1 * jax.random.normal(key, (4, 4)), "value": jnp.zeros((4, 1))}


def apply(params, observation):
    return observation @ params["policy"], (observation @ params["value"])[:, 0]


network = nets.feed_forward(init, apply)
result = podracer.train("vtrace", Echo(), network=network, total_steps=50_000, config={"learning_rate": 0.02})
print(result.evaluate())
