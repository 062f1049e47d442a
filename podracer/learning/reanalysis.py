"""Samples as newer parameters would have acted (Schrittwieser et al. 2021, MuZero Reanalyze)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from podracer import nets, search
from podracer.learning import trajectories
from podracer.types import ActorParams, Batch


def renewed(
    plan: search.Planner,
    observer: nets.Network,
    actor: ActorParams,
    batch: Batch,
    key: jax.Array,
    *,
    part: float,
    policies: int,
    values: int,
) -> Batch:
    """A batch whose extras `policy` come from a search, and `value` from the network, by the parameters of an actor.

    Args:
      plan: how to search.
      observer: the network that stacks frames.
      actor: parameters.
      batch: B sequences with the observations of their first `values` rows.
      key: of the searches, which have noise at their roots as in acting: without, a policy that is searched for again
        and again settles on one action too soon.
      part: of the sequences, the nearest number that is at least one, at an even stride, for they are drawn in the
        order of the ring; the others stay.
      policies: rows of a sequence, the first ones, that are searched from.
      values: rows, the first ones, whose value is renewed; at least as many. Where all are searched from, their values
        come from the search too.
    """
    B = len(batch.weight)
    n = max(1, round(part * B))
    at = jnp.arange(n, dtype=jnp.int32) * B // n
    some = trajectories.by_lane(lambda axis, x: jnp.take(x, at, axis=axis), batch.trajectory)
    rows = jax.tree.map(lambda x: x[:values], some.timesteps)
    seen = nets.inputs(observer, some._replace(timesteps=rows)).observation
    variables = plan.variables(actor)
    root = plan.model.root(variables, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen))
    begin = jax.tree.map(lambda x: x[: policies * n], root)
    found = search.search(plan.model, variables, begin, key, plan.config)
    old = batch.trajectory.extras
    extras = {
        "policy": old["policy"].at[:policies, at].set(found.policy.reshape(policies, n, -1)),
        "value": old["value"].at[:values, at].set((root if policies < values else found).value.reshape(values, n)),
    }
    return batch._replace(trajectory=batch.trajectory._replace(extras=extras))
