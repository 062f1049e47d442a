"""The order, parameters and priorities with which groups of updates are prepared: steps that write down their
numbers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from podracer import topology
from podracer.learning.learner import ReplayState
from podracer.learning.replay_steps import Counts, Prepared, Steps, TargetParams
from podracer.sebulba.replay_devices import SplitReplay
from podracer.topology import collectives
from podracer.types import LearnerState

GROUPS = 5
HYPER: dict[str, jax.Array] = {}


class Ring(NamedTuple):
    """The last group whose priorities were written is the priority."""

    priority: jax.Array
    largest: jax.Array
    next_priority: jax.Array
    version: Any = ()


def prepare(target, counts, ring, rollout, progress, key, draws_ahead):
    number = counts.draws + draws_ahead
    numbers = jnp.stack([number, target.reanalyse, ring.priority])
    metrics = {"prepared": number.astype(jnp.float32)}
    return ring, number, Prepared(numbers, jax.random.key_data(key), target.reanalyse), metrics


def learn(state, prepared, progress):
    learnt = state.params.at[state.num_updates].set(lax.pmax(prepared.batch, collectives.DATA_AXES))
    return state._replace(params=learnt, num_updates=state.num_updates + 1), {}, prepared.batch[0]


def write(counts, ring, at, priorities):
    return ring._replace(priority=jnp.where(at == priorities, priorities, 100)), {}


def never(*arguments: Any) -> Any:
    raise AssertionError("the steps are taken one by one")


STEPS = Steps(
    never, lambda state, progress: TargetParams(state.num_updates), prepare, learn, write, run_pending_updates=never
)


@pytest.mark.parametrize("prefetch", [False, True])
def test_groups_are_prepared_in_order(prefetch):
    device = jax.devices("cpu")[0]
    layout = topology.make_host(num_envs=1, envs_per_actor=1, devices=[device])
    mesh = Mesh(np.asarray([device]), (topology.DATA_AXIS,), axis_types=(AxisType.Auto,))
    place = SplitReplay(STEPS, layout, mesh, reanalyses=True, prefetch=prefetch)
    state = LearnerState(jnp.zeros((GROUPS, 3), jnp.int32), (), HYPER, jnp.int32(0))
    counts = Counts(jnp.int32(0), jnp.zeros(1, jnp.int32), pending_updates=jnp.int32(GROUPS), draws=jnp.int32(0))
    ring = Ring(*(jnp.full(1, -1, jnp.int32) for _ in range(3)))
    replay_state = ReplayState(counts, ring, place.empty_prefetched(state, counts, ring))
    for number in (2, 1, 2):  # in several calls, as due
        state, replay_state, _ = place._run_pending(
            place._jitted,
            state,
            replay_state,
            ({}, {"prepared": jnp.float32(0)}),
            number,
            jnp.float32(0),
            jax.random.key(0),
        )
    number = np.arange(GROUPS)
    # By parameters, and with priorities, of the update before; prefetched, of one earlier than that but for the first two.
    version = np.maximum(number - 1, 0) if prefetch else number
    np.testing.assert_array_equal(state.params, np.stack([number, version, version - 1], axis=1))
    assert (replay_state.counts.pending_updates, replay_state.counts.draws) == (0, GROUPS)
    if prefetch:
        np.testing.assert_array_equal(replay_state.prefetched.prepared.batch, [[GROUPS, GROUPS - 1, GROUPS - 2]])
