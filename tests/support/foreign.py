"""Environments with the interfaces of other libraries, which need none of them."""

from __future__ import annotations

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

NAME = types.SimpleNamespace


@struct.dataclass
class Params:
    max_steps_in_episode: int = 6
    goal: int = 4


@struct.dataclass
class WalkState:
    place: jax.Array
    time: int
    rng: jax.Array


class Walk:
    """An environment as papers ship them: gymnax's interface, a key in the state, and a limit that is a termination."""

    default_params = Params()

    def reset_env(self, key, params):
        state = WalkState(place=jax.random.randint(key, (), 0, 1), time=0, rng=jax.random.key_data(key))
        return self.observe(state), state

    def step_env(self, key, state, action, params):
        chance = jax.random.uniform(jax.random.wrap_key_data(state.rng)) + jax.random.uniform(key)
        state = WalkState(place=state.place + action, time=state.time + 1, rng=state.rng + 1)
        there = state.place >= params.goal
        done = there | (state.time >= params.max_steps_in_episode)
        return self.observe(state), state, there * 1 + 0.0 * chance, done, {}

    def observe(self, state):
        return {"far": jnp.where(state.place == 3, jnp.nan, state.place), "odd": state.place % 2 == 1}

    def action_space(self, params):
        return NAME(n=3)

    def observation_space(self, params):
        return NAME(spaces={"far": NAME(low=-9.0, high=9.0)})


class LockState(NamedTuple):
    key: jax.Array
    count: jax.Array


class LockSeen(NamedTuple):
    count: jax.Array
    action_mask: jax.Array


class Lock:
    """Jumanji's interface: only the pair (1, 2) is legal, any other one ends the episode, and so does the time limit."""

    time_limit = 3
    observation_spec = NAME(action_mask=NAME(shape=(2, 3)))
    action_spec = NAME(num_values=np.array([2, 3]))
    reward_spec = NAME(shape=())

    def reset(self, key):
        return LockState(key, jnp.int32(0)), self.timestep(jnp.int32(0), jnp.asarray(False))

    def step(self, state, action):
        count = state.count + 1
        wrong = (action[0] != 1) | (action[1] != 2)
        return LockState(state.key, count), self.timestep(count, wrong | (count >= self.time_limit))

    def timestep(self, count, over):
        mask = jnp.zeros((2, 3), bool).at[1, 2].set(True)
        return NAME(observation=LockSeen(count, mask), reward=1.0, discount=1 - over, last=lambda: over)
