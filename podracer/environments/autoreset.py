"""One lane of an environment under the NEXT_STEP reset rule (docs/adr/0001-next-step-reset.md)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer.types import ArrayTree, Environment, EpisodeStats, Metrics, TimeStep


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
    """Returns the statistics of the episode that the newest row closes, or zeros."""
    over = lane.timestep.last.astype(jnp.float32)
    metrics = {name: total * over for name, total in lane.metrics.items()}
    return EpisodeStats(lane.episode_return * over, lane.episode_length * over, over, metrics)
