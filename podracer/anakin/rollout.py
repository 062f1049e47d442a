"""Anakin's rollout: T steps of every lane of one shard, acting and stepping in one scan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import topology
from podracer.environments import autoreset, tasks
from podracer.trajectories import flat, shaped
from podracer.types import Agent, ArrayTree, Environment, EpisodeStats, LearnerState, TimeStep, Trajectory

SMALL_STATE_BYTES = 256
"""The largest environment state of which a rollout makes all initial states ahead, one for each lane and step."""

STEPS_AT_ONCE = {"cpu": 1, "gpu": 4}
"""The most steps in an iteration of a rollout's loop, and 2 on other platforms. An iteration costs launches of its own:
it counts, copies what it passes on, and writes to each buffer. More steps take longer to compile (docs/adr/0043)."""


class Actors(NamedTuple):
    """The acting side of one shard; in a `RunState` with leading dims [P, S].

    Attributes:
      lanes: [B]; environment states and their newest rows.
      agent: tree of [B, ...]; the agent's memory of each lane.
      lane: int32 [B]; global indices of the lanes.
      key: random key.
    """

    lanes: autoreset.Lane
    agent: ArrayTree
    lane: jax.Array
    key: jax.Array


class RolloutSettings(NamedTuple):
    """Static settings of the program.

    Attributes:
      rollout_length: T.
      reset_pool: initial environment states per shard and task to open episodes with. 0 makes a new state for every
        lane and step; None does so too, but resets only lanes that are over where resets are costly, with equal
        results.
      lockstep: True learns from a rollout only after the next one is acted, as drivers do that act and learn side by
        side.
      evolves: True adds up the episodes of each member for population based training.
    """

    rollout_length: int
    reset_pool: int | None = None
    lockstep: bool = False
    evolves: bool = False


def rollout(
    agent: Agent,
    environment: Environment,
    settings: RolloutSettings,
    learner: LearnerState,
    actors: Actors,
    progress: jax.Array,
    keys: jax.Array,
) -> tuple[Actors, Trajectory, EpisodeStats]:
    """Acts for T steps in every lane of one shard.

    Args:
      agent: the agent.
      environment: the environment.
      settings: static.
      learner: the learner's state, to act with.
      actors: consumed, but for their key.
      progress: float32 []; the share of the run that is done.
      keys: [2 + T]; consumed.

    Returns:
      The actors after T steps (with the same key), the trajectory [T, B], and sums over the episodes that ended, of
      several tasks by task.
    """
    T, B = settings.rollout_length, actors.lane.shape[0]
    params = agent.actor_params(learner, progress)
    env_key, reset_key, act_keys = keys[0], keys[1], keys[2:]
    reset_inputs, advance = _resets(environment, settings, reset_key, B)

    # Observations are flat within the loop, for the tiles of TPUs (see `flat`).
    example = actors.lanes.timestep.observation

    def flat_lanes(lanes: autoreset.Lane) -> autoreset.Lane:
        return lanes._replace(timestep=lanes.timestep._replace(observation=flat(lanes.timestep.observation, 1)))

    def shaped_lanes(lanes: autoreset.Lane) -> autoreset.Lane:
        observation = shaped(lanes.timestep.observation, 1, like=example)
        return lanes._replace(timestep=lanes.timestep._replace(observation=observation))

    def step(carry: Any, inputs: Any) -> tuple[Any, Any]:
        lanes, memory, episodes = carry
        act_key, env_keys, reset_input = inputs
        # Act at row t, step every lane to row t + 1, and record it.
        lanes = shaped_lanes(lanes)
        action, extras, memory = agent.act(params, memory, lanes.timestep, act_key, False)
        lanes = advance(lanes, action, env_keys, reset_input)
        episodes = jax.tree.map(jnp.add, episodes, autoreset.finished(lanes))
        lanes = flat_lanes(lanes)
        return (lanes, memory, episodes), (_packed(lanes.timestep), (action, extras))

    # Sums per lane in the loop, and over lanes once after it: a reduction is a kernel of its own.
    no_episodes = jax.tree.map(jnp.zeros_like, jax.eval_shape(autoreset.finished, actors.lanes))
    lanes = flat_lanes(actors.lanes)
    carry, row = (lanes, actors.agent, no_episodes), _packed(lanes.timestep)
    inputs = act_keys, jax.random.split(env_key, (T, B)), reset_inputs
    carry, packed, (actions, extras) = _scan_steps(step, carry, row, inputs, T, _steps_at_once(agent, T))
    lanes, memory, episodes = carry
    lanes, rows = shaped_lanes(lanes), _unpacked(packed)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((T + 1, *x.shape), x.dtype), example)
    rows = rows._replace(observation=shaped(rows.observation, 2, like=like))
    # All actions of a rollout come from one version of the parameters.
    version = jnp.broadcast_to(params.version, (T, B))
    trajectory = Trajectory(rows, actions, extras, actors.agent, version, actors.lane)
    sums = tasks.summed(episodes, len(tasks.parts(environment)))
    return Actors(lanes, memory, actors.lane, actors.key), trajectory, sums


def _scan_steps(
    step: Callable[[Any, Any], tuple[Any, tuple[Any, Any]]], carry: Any, row: Any, inputs: Any, length: int, n: int
) -> tuple[Any, Any, Any]:
    """Scans over the steps of a rollout, n in an iteration, and records the rows.

    Args:
      step: `(carry, inputs of a step) -> (carry, (row t + 1, other outputs))`.
      carry: of the first step.
      row: row 0, a tree of [B, ...].
      inputs: a tree of [T, ...].
      length: T.
      n: steps of an iteration; those that remain follow the loop.

    Returns:
      The carry after T steps, rows [T+1, B, ...], and other outputs [T, ...].
    """

    def several_steps(state: Any, now: Any) -> tuple[Any, Any]:
        (carry, rows), (t, inputs) = state, now
        carry, (newest, others) = lax.scan(step, carry, inputs, unroll=True)
        # Rows go straight into a buffer of T+1: stacking T rows and then prepending row 0 would copy all observations.
        put = lambda buffer, x: lax.dynamic_update_slice_in_dim(buffer, x, t + 1, 0)  # noqa: E731
        return (carry, jax.tree.map(put, rows, newest)), others

    def buffer_with(x: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(jnp.zeros((length + 1, *x.shape), x.dtype), x, 0, 0)

    whole = length - length % n
    groups = jax.tree.map(lambda x: x[:whole].reshape(whole // n, n, *x.shape[1:]), inputs)
    starts = jnp.arange(0, whole, n, dtype=jnp.int32)
    state, others = lax.scan(several_steps, (carry, jax.tree.map(buffer_with, row)), (starts, groups))
    others = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), others)
    if whole < length:
        state, last = several_steps(state, (jnp.int32(whole), jax.tree.map(lambda x: x[whole:], inputs)))
        others = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), others, last)
    return *state, others


def _steps_at_once(agent: Agent, length: int) -> int:
    """Returns the number of steps in an iteration of a rollout's loop; those that remain follow it."""
    most = STEPS_AT_ONCE.get(topology.platform(), 2)
    # A search's own loops take longer than launches of a step, and are long to compile.
    return min(length, most, 2 if hasattr(agent.config, "simulations") else most)


def _packed(row: TimeStep) -> tuple[ArrayTree, jax.Array]:
    """The observation of a row [B], and its four numbers as one array [4, B]: writing each would be a launch."""
    return row.observation, jnp.stack([x.astype(jnp.float32) for x in row[1:]])


def _unpacked(rows: tuple[ArrayTree, jax.Array]) -> TimeStep:
    """Rows [T+1, B] from observations and numbers [T+1, 4, B]."""
    observation, numbers = rows
    reward, discount, first, last = jnp.moveaxis(numbers, 1, 0)
    return TimeStep(observation, reward, discount, first > 0, last > 0)


def _resets(
    environment: Environment, settings: RolloutSettings, key: jax.Array, num_lanes: int
) -> tuple[ArrayTree, Callable[[autoreset.Lane, ArrayTree, jax.Array, ArrayTree], autoreset.Lane]]:
    """Prepares the initial environment states of new episodes.

    Returns:
      A tree of [T, B, ...] to scan over, and a function that advances lanes [B] by one row:
      `(lanes, actions, keys, a row of the tree) -> lanes`.
    """
    shape, parts = (settings.rollout_length, num_lanes), tasks.parts(environment)
    K = len(parts)
    if settings.reset_pool:
        # A pool of initial states, drawn from with replacement: for environments whose reset is slow.
        pool_key, index_key = jax.random.split(key)
        keys = jax.random.split(pool_key, settings.reset_pool * K)
        index = jax.random.randint(index_key, shape, 0, settings.reset_pool)
        pools = [jax.vmap(one.reset)(tasks.of_task(keys, k, K)) for k, one in enumerate(parts)]
        prepared = [
            (tasks.of_task(index, k, K, axis=1), _with_states(one, functools.partial(_taken, pool)))
            for k, (one, pool) in enumerate(zip(parts, pools))
        ]
    else:
        keys = jax.random.split(key, shape)
        prepared = [_made(one, settings, tasks.of_task(keys, k, K, axis=1)) for k, one in enumerate(parts)]
    if K == 1:
        return prepared[0]

    def advance(lanes: autoreset.Lane, actions: ArrayTree, keys: jax.Array, rows: ArrayTree) -> autoreset.Lane:
        advanced = []
        for k, (_, of_one) in enumerate(prepared):
            own = autoreset.lanes_of_task(lanes, k, K), tasks.of_task(actions, k, K), tasks.of_task(keys, k, K)
            advanced.append(of_one(*own, rows[k]))
        return autoreset.joined(advanced)

    return tuple(inputs for inputs, _ in prepared), advance


def _with_states(
    environment: Environment, make: Callable[[ArrayTree], Any]
) -> Callable[[autoreset.Lane, ArrayTree, jax.Array, ArrayTree], autoreset.Lane]:
    """Advances lanes where `make(row)` gives a state to each of them."""
    step = jax.vmap(functools.partial(autoreset.step, environment))
    return lambda lanes, actions, keys, row: step(lanes, actions, keys, make(row))


def _taken(pool: ArrayTree, index: jax.Array) -> ArrayTree:
    return jax.tree.map(lambda x: x[index], pool)


def _made(
    environment: Environment, settings: RolloutSettings, keys: jax.Array
) -> tuple[ArrayTree, Callable[[autoreset.Lane, ArrayTree, jax.Array, ArrayTree], autoreset.Lane]]:
    """Prepares a new initial state for every lane and step, from keys [T, B]."""
    if settings.reset_pool is None and autoreset.resets_are_costly(environment):
        return keys, functools.partial(autoreset.step_lanes, environment)
    if autoreset.state_bytes(autoreset.state_shapes(environment)) <= SMALL_STATE_BYTES:
        # Small states are made ahead, in one large operation instead of T small ones.
        return jax.vmap(jax.vmap(environment.reset))(keys), _with_states(environment, lambda state: state)
    return keys, _with_states(environment, jax.vmap(environment.reset))
