"""Lanes of an environment under the NEXT_STEP reset rule (docs/adr/0001-next-step-reset.md).

Of several tasks (`podracer.environments.tasks`), lanes k::K belong to the k-th environment, and `Lane.env` is a tuple
of the states of each task.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import topology
from podracer.environments import tasks
from podracer.types import ArrayTree, Environment, EpisodeStats, Metrics, TimeStep, Transition

LARGE_STATE_BYTES = 4096
"""The size of an environment's state from which on only lanes that are over are reset: making and choosing between two
states in every lane at every step would take longer than the step."""

RESETS_AT_ONCE, RESETS_AT_ONCE_ON_CPU = 32, 4
"""Lanes that are reset side by side, where only those are that are over. An accelerator makes many states in the time
of one; a CPU makes one after the other, those that fill up a group too."""


class Lane(NamedTuple):
    """One environment lane (unbatched).

    Attributes:
      env: the environment's state.
      timestep: the newest row.
      episode_return: float32; undiscounted raw rewards of this episode so far; with two players, the first mover's.
      episode_length: float32; transitions of this episode so far.
      metrics: float32; the environment's own numbers by name, summed over this episode so far.
      sign: float32; with two players, 1 if the player to move is the episode's first mover, else -1: the product of its
        discounts. () with one player.
    """

    env: Any
    timestep: TimeStep
    episode_return: jax.Array
    episode_length: jax.Array
    metrics: Metrics
    sign: Any = ()


def reset(environment: Environment, key: jax.Array) -> Lane:
    """Makes a lane at the first row of its first episode."""
    state = environment.reset(key)
    zero = jnp.float32(0.0)
    row = TimeStep(environment.observe(state), zero, jnp.float32(1.0), jnp.asarray(True), jnp.asarray(False))
    metrics = {name: jnp.float32(0.0) for name in environment.spec.metrics}
    return Lane(state, row, zero, zero, metrics, jnp.float32(1.0) if environment.spec.num_players == 2 else ())


def reset_lanes(environment: Environment | tasks.Tasks, keys: jax.Array) -> Lane:
    """Makes lanes [B] at the first rows of their first episodes, from keys [B]."""
    parts = tasks.parts(environment)
    return joined(
        [jax.vmap(functools.partial(reset, one))(tasks.of_task(keys, k, len(parts))) for k, one in enumerate(parts)]
    )


def lanes_of_task(lanes: Lane, k: int, num_tasks: int) -> Lane:
    """The lanes k::K."""
    if num_tasks == 1:
        return lanes
    return tasks.of_task(lanes._replace(env=()), k, num_tasks)._replace(env=lanes.env[k])


def joined(parts: Sequence[Lane]) -> Lane:
    """Puts the lanes of K tasks together, those of the k-th as k::K."""
    if len(parts) == 1:
        return parts[0]
    lanes = tasks.interleaved([part._replace(env=()) for part in parts])
    return lanes._replace(env=tuple(part.env for part in parts))


def step(environment: Environment, lane: Lane, action: ArrayTree, key: jax.Array, fresh: Any) -> Lane:
    """Advances a lane by one row: a transition, or after a `last` row the `first` row of the next episode.

    Args:
      environment: the environment.
      lane: the lane.
      action: ignored after a `last` row.
      key: consumed.
      fresh: the environment state that opens the next episode; ignored except after a `last` row.
    """
    over = lane.timestep.last
    stepped, transition = environment.step(lane.env, action, key)
    # The observation is of the selected state, so that it is computed once.
    state = jax.tree.map(lambda new, old: jnp.where(over, new, old), fresh, stepped)
    return _advanced(environment, lane, state, transition)


def step_lanes(
    environment: Environment | tasks.Tasks, lanes: Lane, actions: ArrayTree, keys: jax.Array, reset_keys: jax.Array
) -> Lane:
    """Advances lanes [B] by one row each; those of costly resets (see `resets_are_costly`) only where they are over.

    Args:
      environment: the environment.
      lanes: lanes [B].
      actions: tree of [B, ...]; ignored after `last` rows.
      keys: [B]; consumed.
      reset_keys: [B]; consumed; each makes the state of the next episode, and the same one in either way.
    """
    parts = tasks.parts(environment)
    if len(parts) == 1:
        return _step_lanes(parts[0], lanes, actions, keys, reset_keys)
    of_task = functools.partial(tasks.of_task, num_tasks=len(parts))
    return joined(
        [
            _step_lanes(
                one, lanes_of_task(lanes, k, len(parts)), of_task(actions, k), of_task(keys, k), of_task(reset_keys, k)
            )
            for k, one in enumerate(parts)
        ]
    )


def _step_lanes(
    environment: Environment, lanes: Lane, actions: ArrayTree, keys: jax.Array, reset_keys: jax.Array
) -> Lane:
    if not resets_are_costly(environment):
        fresh = jax.vmap(environment.reset)(reset_keys)
        return jax.vmap(functools.partial(step, environment))(lanes, actions, keys, fresh)
    stepped, transitions = jax.vmap(environment.step)(lanes.env, actions, keys)
    states = _reset_where(environment, lanes.timestep.last, reset_keys, stepped)
    return jax.vmap(functools.partial(_advanced, environment))(lanes, states, transitions)


def resets_are_costly(environment: Environment) -> bool:
    """Returns True if only lanes that are over should be reset: states are large, or the environment says so."""
    if getattr(environment, "costly_reset", False):
        return True
    return state_bytes(state_shapes(environment)) > LARGE_STATE_BYTES


def state_shapes(environment: Environment) -> Any:
    """The shapes and dtypes of an environment state."""
    return jax.eval_shape(environment.reset, jax.eval_shape(lambda: jax.random.key(0)))


def state_bytes(state: Any) -> int:
    """The size of an environment state in bytes, or of its shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def _reset_where(environment: Environment, over: jax.Array, keys: jax.Array, states: Any) -> Any:
    """Replaces the states of the lanes that are over by fresh ones, a group at a time.

    Args:
      environment: the environment.
      over: bool [B].
      keys: [B]; consumed.
      states: tree of [B, ...].
    """
    implementation = jax.random.key_impl(keys)

    @jax.custom_batching.custom_vmap
    def reset(over: jax.Array, data: jax.Array, states: Any) -> Any:
        B = over.shape[0]
        size = min(B, RESETS_AT_ONCE_ON_CPU if topology.on_cpu() else RESETS_AT_ONCE)

        def body(carry: Any) -> Any:
            states, left = carry
            # Lane B, which there is not, fills up: what is gathered for it is dropped.
            (lanes,) = jnp.nonzero(left, size=size, fill_value=B)
            keys = jax.random.wrap_key_data(data.at[lanes].get(mode="clip"), impl=implementation)
            fresh = jax.vmap(environment.reset)(keys)
            states = jax.tree.map(lambda x, new: x.at[lanes].set(new, mode="drop"), states, fresh)
            return states, left.at[lanes].set(False, mode="drop")

        return lax.while_loop(lambda carry: jnp.any(carry[1]), body, (states, over))[0]

    @reset.def_vmap
    def reset_batch(axis_size: int, in_batched: Any, *arguments: Any) -> Any:
        # One loop for the lanes of all shards and members: under vmap it would copy all states each time round.
        def joined(x: jax.Array, batched: bool) -> jax.Array:
            x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(axis_size * x.shape[1], *x.shape[2:])

        states = reset(*jax.tree.map(joined, arguments, tuple(in_batched)))
        split = jax.tree.map(lambda x: x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]), states)
        return split, jax.tree.map(lambda _: True, split)

    return reset(over, jax.random.key_data(keys), states)


def _advanced(environment: Environment, lane: Lane, state: Any, transition: Transition) -> Lane:
    """Makes the next row of a lane.

    Args:
      environment: the environment.
      lane: the lane.
      state: of the environment: stepped, or a fresh one after a `last` row.
      transition: ignored after a `last` row.
    """
    over = lane.timestep.last
    reward = jnp.where(over, 0.0, transition.reward)
    row = TimeStep(
        observation=environment.observe(state),
        reward=reward,
        discount=jnp.where(over, 1.0, transition.discount),
        first=over,
        last=transition.last & ~over,
    )
    two = environment.spec.num_players == 2
    gained = lane.sign * reward if two else reward
    return Lane(
        env=state,
        timestep=row,
        episode_return=jnp.where(over, 0.0, lane.episode_return + gained),
        episode_length=jnp.where(over, 0.0, lane.episode_length + 1.0),
        metrics={name: jnp.where(over, 0.0, total + transition.metrics[name]) for name, total in lane.metrics.items()},
        sign=jnp.where(over, 1.0, lane.sign * transition.discount) if two else (),
    )


def finished(lane: Lane) -> EpisodeStats:
    """Returns the statistics of the episode that the newest row closes, or zeros; of lanes [B], those of each."""
    over = lane.timestep.last.astype(jnp.float32)
    metrics = {name: total * over for name, total in lane.metrics.items()}
    return EpisodeStats(lane.episode_return * over, lane.episode_length * over, over, metrics)
