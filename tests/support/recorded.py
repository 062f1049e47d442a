"""An agent whose steps and updates are recorded, and an environment in which every row can be told from all others."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.types import ActorParams, Agent, Batch, EnvSpec, LearnerState, TimeStep, Transition


@dataclasses.dataclass(frozen=True)
class Walk:
    """A random walk that actions push about; one of 8 steps is the last, of which half terminate.

    No two rows show the same, so that an observation says which row it is.
    """

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec("walk", spaces.Box(-50.0, 50.0, (3,)), spaces.Discrete(4))

    def reset(self, key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (3,))

    def step(self, state: jax.Array, action: jax.Array, key: jax.Array) -> tuple[jax.Array, Transition]:
        push_key, end_key = jax.random.split(key)
        pushed = 0.5 * jnp.cos(action.astype(jnp.float32) + jnp.arange(3, dtype=jnp.float32))
        state = 0.9 * state + pushed + 0.3 * jax.random.normal(push_key, (3,))
        end = jax.random.uniform(end_key)
        return state, Transition(2.0 * state[0], jnp.where(end < 1 / 16, 0.0, 1.0), end < 1 / 8)

    def observe(self, state: jax.Array) -> jax.Array:
        return state


class Acted(NamedTuple):
    """A step of all lanes, [W]."""

    params: ActorParams
    row: TimeStep
    action: np.ndarray


class Learnt(NamedTuple):
    """An update: the target network, and the observations [B, 3] that open what was drawn."""

    target: Any
    observation: np.ndarray


class Record:
    """A record of an agent's calls in a run."""

    def __init__(self) -> None:
        self.acted: list[Acted] = []
        self.learnt: dict[int, Learnt] = {}

    def clear(self) -> None:
        self.acted.clear()
        self.learnt.clear()

    def act(self, *what: Any) -> None:
        self.acted.append(Acted(*jax.tree.map(np.array, what)))

    def learn(self, number: Any, *what: Any) -> None:
        assert int(number) not in self.learnt, "an update was done twice"
        self.learnt[int(number)] = Learnt(*jax.tree.map(np.array, what))

    def of(self, agent: Agent) -> Agent:
        """The agent, recorded."""

        def act(params: ActorParams, memory: Any, row: TimeStep, *rest: Any) -> Any:
            action, extras, memory = agent.act(params, memory, row, *rest)
            jax.debug.callback(self.act, params, row, action)
            return action, extras, memory

        def learn(learner: LearnerState, batch: Batch, *rest: Any) -> Any:
            opening = batch.trajectory.timesteps.observation[0]
            jax.debug.callback(self.learn, learner.num_updates, learner.aux, opening)
            return agent.learn(learner, batch, *rest)

        return agent._replace(act=act, learn=learn)
