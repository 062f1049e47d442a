"""The acting program of Sebulba: one jitted, donated call per step selects actions and appends to a trajectory.

The trajectory is built on the actor's device, row by row, so observations cross to it once, and nothing is stacked or
copied afterwards. `finish` hands it over and begins the next with row T as row 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import spaces
from podracer.types import (
    ActorParams,
    Agent,
    ArrayTree,
    EnvSpec,
    EpisodeStats,
    HostStep,
    TimeStep,
    Trajectory,
)


class Scores(NamedTuple):
    """Raw return and length of the game each lane is in, float32 [B], and the sums over the games that ended."""

    game_return: jax.Array
    game_length: jax.Array
    over: jax.Array
    episodes: EpisodeStats


class Carry(NamedTuple):
    """What passes from one trajectory to the next.

    Attributes:
      memory: the agent's state.
      keys: [T+1]; the key of each step of this trajectory, and the one that makes the next one's.
      scores: of all games so far, and sums since this trajectory began.
    """

    memory: ArrayTree
    keys: jax.Array
    scores: Scores


class Buffer(NamedTuple):
    """A trajectory in the making: its first t rows are written; `trajectory.actor_state` is that before row 0."""

    t: jax.Array
    trajectory: Trajectory
    carry: Carry


class Acting(NamedTuple):
    """The functions of an actor, to be jitted.

    Attributes:
      start: `(lanes int32 [B], key) -> Carry`; of lanes that have not started.
      begin: `(lanes, Carry) -> Buffer`; an empty trajectory.
      act: `(Buffer, ActorParams, HostStep) -> (Buffer, actions [B])`; donate the buffer.
      finish: `(Buffer, HostStep) -> (Trajectory, EpisodeStats, Buffer)`; row T is written, and the new buffer begins
        with it; donate the buffer.
    """

    start: Callable[[jax.Array, jax.Array], Carry]
    begin: Callable[[jax.Array, Carry], Buffer]
    act: Callable[[Buffer, ActorParams, HostStep], tuple[Buffer, ArrayTree]]
    finish: Callable[[Buffer, HostStep], tuple[Trajectory, EpisodeStats, Buffer]]


def make(agent: Agent, spec: EnvSpec, rollout_length: int, num_lanes: int) -> Acting:
    """The acting functions for T = `rollout_length` and `num_lanes` lanes over all threads."""
    T = rollout_length

    def start(lanes: jax.Array, key: jax.Array) -> Carry:
        zeros = jnp.zeros(lanes.shape)
        scores = Scores(zeros, zeros, jnp.zeros(lanes.shape, bool), _no_episodes())
        return Carry(agent.start(lanes, num_lanes), jax.random.split(key, T + 1), scores)

    def begin(lanes: jax.Array, carry: Carry) -> Buffer:
        row, action, extras = _example(agent, spec, lanes, carry)
        many = lambda n, tree: jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), tree)  # noqa: E731
        # Copied: the buffer will be donated, and an array must not be donated twice.
        memory, lanes = jax.tree.map(jnp.copy, (carry.memory, lanes))
        versions = jnp.zeros((T, lanes.shape[0]), jnp.int32)
        trajectory = Trajectory(many(T + 1, row), many(T, action), many(T, extras), memory, versions, lanes)
        return Buffer(jnp.int32(0), trajectory, carry)

    def act(buffer: Buffer, params: ActorParams, step: HostStep) -> tuple[Buffer, ArrayTree]:
        t, trajectory, (memory, keys, scores) = buffer
        row = jax.tree.map(jnp.asarray, step.timestep)
        action, extras, memory = agent.act(params, memory, row, keys[t], False)
        write = lambda where, what: jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, t, 0), where, what)  # noqa: E731
        trajectory = trajectory._replace(
            timesteps=write(trajectory.timesteps, row),
            actions=write(trajectory.actions, action),
            extras=write(trajectory.extras, extras),
            policy_version=write(trajectory.policy_version, jnp.broadcast_to(params.version, row.first.shape)),
        )
        return Buffer(t + 1, trajectory, Carry(memory, keys, _count(scores, step))), action

    def finish(buffer: Buffer, step: HostStep) -> tuple[Trajectory, EpisodeStats, Buffer]:
        _, trajectory, (memory, keys, scores) = buffer
        rows = jax.tree.map(lambda x, y: x.at[T].set(y), trajectory.timesteps, step.timestep)
        carry = Carry(memory, jax.random.split(keys[T], T + 1), scores._replace(episodes=_no_episodes()))
        return trajectory._replace(timesteps=rows), scores.episodes, begin(trajectory.lane, carry)

    return Acting(start, begin, act, finish)


def _example(agent: Agent, spec: EnvSpec, lanes: jax.Array, carry: Carry) -> tuple[TimeStep, ArrayTree, ArrayTree]:
    """A row [B], and the shapes of the actions and extras that acting on it gives."""
    B = lanes.shape[0]
    no, zeros = jnp.zeros(B, bool), jnp.zeros(B)
    observation = jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape)), spaces.zeros(spec.observation_space))
    row = TimeStep(observation, zeros, zeros, no, no)
    hyper = {name: jnp.float32(value) for name, value in agent.hyper.items()}

    def act(key: jax.Array, memory: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
        params = agent.actor_params(agent.init(key, hyper), jnp.float32(0))
        return agent.act(params, memory, row, key, False)[:2]

    action, extras = jax.eval_shape(act, carry.keys[0], carry.memory)
    return row, action, extras


def _no_episodes() -> EpisodeStats:
    return EpisodeStats(*(jnp.float32(0) for _ in EpisodeStats._fields))


def _count(scores: Scores, step: HostStep) -> Scores:
    """The games after one more row: every row is counted once, when it is acted upon."""
    score, over = step.raw_reward, step.game_over
    opens = scores.over | (step.timestep.first if isinstance(step.over, tuple) else False)
    played = 1.0 - step.timestep.first.astype(jnp.float32)
    game_return = jnp.where(opens, 0.0, scores.game_return) + score
    game_length = jnp.where(opens, 0.0, scores.game_length) + played
    ended = jnp.asarray(over, jnp.float32)
    sums = EpisodeStats(jnp.sum(game_return * ended), jnp.sum(game_length * ended), jnp.sum(ended))
    return Scores(game_return, game_length, jnp.asarray(over), jax.tree.map(jnp.add, scores.episodes, sums))
