"""Samples as newer parameters would have acted (Schrittwieser et al. 2021, MuZero Reanalyze)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from podracer import nets, trajectories
from podracer.learning import gradients
from podracer.search import search
from podracer.types import ActorParams, Batch


def reanalyse(
    plan: search.Planner,
    actor: ActorParams,
    batch: Batch,
    key: jax.Array,
    *,
    part: float,
    policy_rows: int,
    value_rows: int,
    observation_rows: int,
) -> Batch:
    """Replaces the extras `policy` of a batch by those of a new search, and `value` by the network's.

    Sequences are searched from a few at a time (`gradients.at_a_time`), for images and trees of all may fill a device.

    Args:
      plan: the search.
      actor: the parameters of the network.
      batch: B sequences with the observations of their first `value_rows` rows.
      key: of the searches, which have noise at their roots as in acting: without, a policy that is searched for again
        and again settles on one action too soon. Each sequence has its own of it.
      part: of the sequences, the nearest number that is at least one, at an even stride, for they are drawn in the
        order of the ring; the others stay.
      policy_rows: number of first rows of a sequence that are searched from.
      value_rows: number of first rows whose value is renewed; at least as many. Where all are searched from, their
        values come from the search too.
      observation_rows: number of first rows whose observations learning sees; the others are left out, for what is
        prepared ahead is kept.
    """
    B = len(batch.weight)
    n = max(1, round(part * B))
    m = min(n, gradients.at_a_time(batch.trajectory.timesteps.observation, value_rows, B))
    number = jnp.minimum(jnp.arange(-(-n // m) * m, dtype=jnp.int32), n - 1)  # the last one again fills the last part
    # A key of each sequence, so that what it draws does not depend on how many are searched from together.
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(number)
    at = number * B // n
    variables = plan.variables(actor)

    # A new search from the first rows of each sequence, and values of the rows it may bootstrap from.
    def search_from(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at, keys = chunk
        chosen = trajectories.by_lane(lambda axis, x: jnp.take(x, at, axis=axis), batch.trajectory)
        timesteps = jax.tree.map(lambda x: x[:value_rows], chosen.timesteps)
        stacked = nets.inputs(nets.FRAME_STACKER, chosen._replace(timesteps=timesteps)).observation
        root = plan.model.root(variables, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked))
        roots = jax.tree.map(lambda x: x.reshape(value_rows, -1, *x.shape[1:])[:policy_rows], root)
        run = lambda root, key: search.search(plan.model, variables, root, key, plan.config)  # noqa: E731
        result = jax.vmap(run, in_axes=(1, 0), out_axes=1)(roots, keys)
        return result.policy, root.value.reshape(value_rows, -1) if policy_rows < value_rows else result.value

    policy, value = lax.map(search_from, (at.reshape(-1, m), keys.reshape(-1, m)))
    old = batch.trajectory.extras
    extras = old | {
        "policy": old["policy"].at[:policy_rows, at].set(jnp.moveaxis(policy, 0, 1).reshape(policy_rows, at.size, -1)),
        "value": old["value"].at[:value_rows, at].set(jnp.moveaxis(value, 0, 1).reshape(value_rows, at.size)),
    }
    timesteps = batch.trajectory.timesteps
    observation = jax.tree.map(lambda x: x[:observation_rows], timesteps.observation)
    trajectory = batch.trajectory._replace(extras=extras, timesteps=timesteps._replace(observation=observation))
    return batch._replace(trajectory=trajectory)
