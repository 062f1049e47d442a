"""Small EfficientZero agents, of rows and of images, and calls that learn with them."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from podracer import agents, spaces
from podracer.agents import EfficientZeroConfig, efficientzero
from podracer.search import windows
from podracer.types import Agent, Batch, EnvSpec
from tests.support import harness

SPEC = EnvSpec("rows", spaces.Box(-5.0, 5.0, (3,)), spaces.Discrete(4), None)
IMAGES = EnvSpec("images", spaces.Box(0, 255, (16, 16, 1), np.uint8), spaces.Discrete(4), None)
A = 4
SIZES: dict[str, Any] = {"hidden_sizes": (8,), "state_size": 6, "head_size": 8, "num_bins": 11, "lstm_size": 5}
SIZES |= {"projection_size": 7, "forecast_size": 6}
SMALL: dict[str, Any] = SIZES | {"n_step": 3, "correction_interval": 30_000}
BATCH: dict[str, Any] = {"norm": "batch", "channels": 4, "unroll_length": 1, "n_step": 1, "augment": False}


@functools.cache
def made(spec: EnvSpec = SPEC, **overrides: Any) -> Agent:
    return agents.efficientzero.make(spec, EfficientZeroConfig(**(SMALL | overrides)))


def learning() -> Agent:
    """An agent whose update has all that tests of it look at: they share its program."""
    schedule = {"warmup_updates": 4, "final_scale": 0.1, "max_grad_norm": np.inf}
    return made(unroll_length=2, refresh_interval=10, optimizer="sgd", **schedule)


def learn(agent: Agent, batch: Batch, learner: Any = None, key: int = 0) -> Any:
    learner = harness.learner_of(agent) if learner is None else learner
    return harness.alone(agent.learn)(learner, batch, jnp.float32(0), jax.random.key(key))


def targets_of(agent: Agent, batch: Batch) -> windows.Targets:
    found = jax.jit(lambda discount, batch: efficientzero._targets(discount, batch, agent.config))
    return jax.tree.map(np.asarray, found(jnp.float32(agent.hyper["discount"]), batch))


class Table(nn.Module):
    """Observations are cells of a board of 7, and all that is said of one stands in tables."""

    def setup(self) -> None:
        table = lambda name, size: self.param(name, nn.initializers.normal(1.0), (7, size))  # noqa: E731
        sizes = {"policy": A, "value": 11, "prefixes": 11, "projection": 5, "forecasts": 5}
        self.said = {name: table(name, size) for name, size in sizes.items()}

    def __call__(self, observation: Any, action: Any, memory: Any) -> Any:
        return self.represent(observation)

    def represent(self, observation: jax.Array) -> jax.Array:
        return jax.nn.one_hot(jnp.floor(7 * jax.nn.sigmoid(observation[:, 0])).astype(jnp.int32), 7)

    def advance(self, state: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.take_along_axis(state, (jnp.arange(7)[None] + action[:, None]) % 7, axis=1)

    def prefix(self, state: jax.Array, memory: Any) -> Any:
        return state @ self.said["prefixes"], memory

    def predict(self, state: jax.Array) -> Any:
        return state @ self.said["policy"], state @ self.said["value"]

    def project(self, state: jax.Array) -> jax.Array:
        return state @ self.said["projection"]

    def forecast(self, projection: jax.Array) -> jax.Array:
        return projection @ self.said["forecasts"][:5]
