"""The acting program of Sebulba: one jitted, donated call per step selects actions and appends to a trajectory.

The trajectory is built on the actor's device, row by row, so observations cross to it once, and nothing is stacked or
copied afterwards. `finish` hands it over and begins the next with row T as row 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer.types import ActorParams, Agent, ArrayTree, EpisodeStats, HostStep, TimeStep, Trajectory


class Games(NamedTuple):
    """The game each lane is in, [B]: its raw return and length so far (float32), and whether it is over."""

    game_return: jax.Array
    game_length: jax.Array
    over: jax.Array


class Carry(NamedTuple):
    """What passes from one trajectory to the next.

    Attributes:
      memory: the agent's state.
      keys: [T+1]; the key of each step of this trajectory, and the one that makes the next one's.
      games: at row 0.
    """

    memory: ArrayTree
    keys: jax.Array
    games: Games


class Buffer(NamedTuple):
    """A trajectory in the making, of which t steps are written; few arrays, for each costs every step a write.

    Attributes:
      t: int32 [].
      observation: tree of [T+1, B, ...].
      row: float32 [T+1, B, 4 or 6]; reward, discount, first, last, and score and game over where they differ.
      actions: tree of [T, B, ...].
      extras: tree of [T, B, ...].
      versions: int32 [T].
      before: the agent's state before row 0.
      lane: int32 [B].
      carry: what the next trajectory begins with, and the agent's state now.
    """

    t: jax.Array
    observation: ArrayTree
    row: jax.Array
    actions: ArrayTree
    extras: ArrayTree
    versions: jax.Array
    before: ArrayTree
    lane: jax.Array
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


def make(agent: Agent, example: HostStep, rollout_length: int, num_lanes: int) -> Acting:
    """The acting functions.

    Args:
      agent: the agent.
      example: rows of one lane, for their structure, shapes and dtypes.
      rollout_length: T.
      num_lanes: over all actor threads.
    """
    T = rollout_length

    def start(lanes: jax.Array, key: jax.Array) -> Carry:
        zeros = jnp.zeros(lanes.shape)
        games = Games(zeros, zeros, jnp.zeros(lanes.shape, bool))
        return Carry(agent.start(lanes, num_lanes), jax.random.split(key, T + 1), games)

    def begin(lanes: jax.Array, carry: Carry) -> Buffer:
        row = jax.tree.map(lambda x: jnp.zeros((*lanes.shape, *x.shape[1:]), x.dtype), example)
        action, extras = jax.eval_shape(lambda carry: _act_once(agent, row.timestep, carry), carry)
        many = lambda n, tree: jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), tree)  # noqa: E731
        return Buffer(
            t=jnp.int32(0),
            observation=many(T + 1, row.timestep.observation),
            row=many(T + 1, _pack(row)),
            actions=many(T, action),
            extras=many(T, extras),
            versions=jnp.zeros(T, jnp.int32),
            # Copied: the buffer will be donated, and an array must not be donated twice.
            before=jax.tree.map(jnp.copy, carry.memory),
            lane=jnp.copy(lanes),
            carry=carry,
        )

    def act(buffer: Buffer, params: ActorParams, step: HostStep) -> tuple[Buffer, ArrayTree]:
        t, (memory, keys, games) = buffer.t, buffer.carry
        timestep = jax.tree.map(jnp.asarray, step.timestep)
        action, extras, memory = agent.act(params, memory, timestep, keys[t], False)
        write = lambda where, what: jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, t, 0), where, what)  # noqa: E731
        buffer = buffer._replace(
            t=t + 1,
            observation=write(buffer.observation, timestep.observation),
            row=write(buffer.row, _pack(step)),
            actions=write(buffer.actions, action),
            extras=write(buffer.extras, extras),
            versions=write(buffer.versions, params.version),
            carry=Carry(memory, keys, games),
        )
        return buffer, action

    def finish(buffer: Buffer, step: HostStep) -> tuple[Trajectory, EpisodeStats, Buffer]:
        rows = buffer.row.at[T].set(_pack(step))
        reward, discount, first, last, *raw = (rows[..., i] for i in range(rows.shape[-1]))
        observation = jax.tree.map(lambda x, y: x.at[T].set(y), buffer.observation, step.timestep.observation)
        trajectory = Trajectory(
            timesteps=TimeStep(observation, reward, discount, first > 0, last > 0),
            actions=buffer.actions,
            extras=buffer.extras,
            actor_state=buffer.before,
            policy_version=jnp.broadcast_to(buffer.versions[:, None], (T, buffer.lane.shape[0])),
            lane=buffer.lane,
        )
        memory, keys, games = buffer.carry
        score, over = raw or (reward, last)
        games, episodes = _count(games, score[1:], over[1:] > 0, first[1:] > 0, follows_first=not raw)
        carry = Carry(memory, jax.random.split(keys[T], T + 1), games)
        return trajectory, episodes, begin(buffer.lane, carry)

    return Acting(start, begin, act, finish)


def _act_once(agent: Agent, timestep: TimeStep, carry: Carry) -> tuple[ArrayTree, ArrayTree]:
    """Acting with parameters that were never trained: for the shapes."""
    hyper = {name: jnp.float32(value) for name, value in agent.hyper.items()}
    params = agent.actor_params(agent.init(carry.keys[0], hyper), jnp.float32(0))
    return agent.act(params, carry.memory, timestep, carry.keys[0], False)[:2]


def _pack(step: HostStep) -> jax.Array:
    """What a row holds beside the observation: float32 [B, 4], or [B, 6] with raw score and game over."""
    _, *row = step.timestep
    raw = () if isinstance(step.score, tuple) else (step.score, step.over)
    return jnp.stack([jnp.asarray(x).astype(jnp.float32) for x in (*row, *raw)], axis=-1)


def _count(
    games: Games, score: jax.Array, over: jax.Array, first: jax.Array, *, follows_first: bool
) -> tuple[Games, EpisodeStats]:
    """The games after rows [T, B], and the sums over those that ended.

    A new game opens after one that is over; where nothing tells games from episodes (`follows_first`), so does a break.
    """

    def row(carry: tuple[Games, EpisodeStats], now: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, None]:
        games, episodes = carry
        score, over, first = now
        opens = games.over | first if follows_first else games.over
        game_return = jnp.where(opens, 0.0, games.game_return) + score
        game_length = jnp.where(opens, 0.0, games.game_length) + (~first).astype(jnp.float32)
        ended = over.astype(jnp.float32)
        sums = EpisodeStats(jnp.sum(game_return * ended), jnp.sum(game_length * ended), jnp.sum(ended))
        return (Games(game_return, game_length, over), jax.tree.map(jnp.add, episodes, sums)), None

    nothing = EpisodeStats(*(jnp.float32(0) for _ in EpisodeStats._fields))
    return lax.scan(row, (games, nothing), (score, over, first))[0]
