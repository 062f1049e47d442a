"""The acting program of Sebulba: one jitted, donated call per step selects actions and appends to a trajectory.

The trajectory is built on the actor's device, row by row, so observations cross to it once, and nothing is stacked or
copied afterwards. `finish` hands it over and begins the next with row T as row 0.

A step of a small environment takes as long as the call itself, whose price is in its arguments: what a step does not
change is kept apart from what it does.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from podracer import topology
from podracer.environments import tasks
from podracer.types import ActorParams, Agent, ArrayTree, EnvSpec, EpisodeStats, HostStep, TimeStep, Trajectory


class EpisodeCounters(NamedTuple):
    """The game each lane is in, [B].

    Attributes:
      episode_return: float32; its raw return so far; of its first mover where two play.
      episode_length: float32; its length so far.
      over: bool; whether it is over.
      last: bool; whether its last row was the last of an episode.
      sign: float32; the product of its discounts where two play, else ().
    """

    episode_return: jax.Array
    episode_length: jax.Array
    over: jax.Array
    last: jax.Array
    sign: Any = ()


class ActorCarry(NamedTuple):
    """State that passes from one trajectory to the next.

    Attributes:
      memory: the agent's state before row 0.
      keys: [T+1]; the key of each step of this trajectory, and the one that makes the next one's.
      games: at row 0.
    """

    memory: ArrayTree
    keys: jax.Array
    games: EpisodeCounters


class Buffer(NamedTuple):
    """A trajectory in the making, of which t steps are written.

    Attributes:
      t: int32 [].
      rows: [T+1, B, ...], [T+1, 4 or 6, B] and, if there are metrics, [T+1, M, B].
      actions: tree of [T, B, ...].
      extras: tree of [T, B, ...].
      memory: the agent's state now.
    """

    t: jax.Array
    rows: HostStep
    actions: ArrayTree
    extras: ArrayTree
    memory: ArrayTree


class StartFn(Protocol):
    """Makes the first carry of lanes."""

    def __call__(self, lanes: jax.Array, key: jax.Array, /) -> ActorCarry:
        """Makes it for lanes int32 [B] that have not started."""
        ...


class BeginFn(Protocol):
    """Makes an empty trajectory."""

    def __call__(self, carry: ActorCarry, /) -> Buffer:
        """Makes one that shares no array with the carry."""
        ...


class StepFn(Protocol):
    """Acts for a row of all lanes."""

    def __call__(
        self, buffer: Buffer, params: ActorParams, keys: jax.Array, row: HostStep, /
    ) -> tuple[Buffer, ArrayTree]:
        """Writes a row, and returns the buffer and the actions [B].

        Args:
          buffer: consumed; donate it.
          params: what the learner has published.
          keys: [T+1]; the carry's.
          row: [B]; the newest rows.
        """
        ...


class FinishFn(Protocol):
    """Hands a trajectory over."""

    def __call__(
        self, buffer: Buffer, carry: ActorCarry, lanes: jax.Array, versions: jax.Array, row: HostStep, /
    ) -> tuple[Trajectory, EpisodeStats, Buffer, ActorCarry]:
        """Writes row T, and returns the trajectory, its episodes, and the buffer and carry that begin with that row.

        Args:
          buffer: consumed; donate it.
          carry: consumed; donate it.
          lanes: int32 [B].
          versions: int32 [T]; the policy version of each step.
          row: [B]; row T.
        """
        ...


class Acting(NamedTuple):
    """The functions of an actor, to be jitted.

    Attributes:
      start: makes the first carry of lanes.
      begin: makes an empty trajectory.
      act: acts for a row of all lanes.
      finish: hands a trajectory over.
    """

    start: StartFn
    begin: BeginFn
    act: StepFn
    finish: FinishFn


def make(agent: Agent, spec: EnvSpec, rollout_length: int, num_lanes: int) -> Acting:
    """The acting functions.

    Args:
      agent: the agent.
      spec: of the environments, which says what their rows are.
      rollout_length: T.
      num_lanes: over all actor threads.
    """
    T = rollout_length

    def start(lanes: jax.Array, key: jax.Array) -> ActorCarry:
        zeros = jnp.zeros(lanes.shape)
        return ActorCarry(
            agent.start(lanes, num_lanes),
            jax.random.split(key, T + 1),
            EpisodeCounters(zeros, zeros, zeros > 0, zeros > 0, zeros + 1.0 if spec.num_players == 2 else ()),
        )

    def begin(carry: ActorCarry) -> Buffer:
        (B,) = carry.games.over.shape
        row = jax.tree.map(jnp.asarray, HostStep.zeros(spec, B))
        action, extras = act_once(agent, row.timestep, carry)
        many = lambda n, tree: jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), tree)  # noqa: E731
        memory = jax.tree.map(jnp.copy, carry.memory)
        return Buffer(jnp.int32(0), many(T + 1, row), many(T, action), many(T, extras), memory)

    def act(buffer: Buffer, params: ActorParams, keys: jax.Array, row: HostStep) -> tuple[Buffer, ArrayTree]:
        # As it is below T, the remainder changes nothing, but with it XLA:CPU finds fewer operations ready at once and
        # hands none of these small ones to other threads: 70 us instead of 130 us for a 64-64 MLP.
        t = buffer.t % T
        action, extras, memory = agent.act(params, buffer.memory, row.timestep, keys[t], False)
        put = lambda x, y: lax.dynamic_update_index_in_dim(x, y, t, 0)  # noqa: E731
        write = lambda rows, row: jax.tree.map(put, rows, row)  # noqa: E731
        written = (write(buffer.rows, row), write(buffer.actions, action), write(buffer.extras, extras))
        return Buffer(buffer.t + 1, *written, memory), action

    def finish(
        buffer: Buffer, carry: ActorCarry, lanes: jax.Array, versions: jax.Array, row: HostStep
    ) -> tuple[Trajectory, EpisodeStats, Buffer, ActorCarry]:
        rows = jax.tree.map(lambda x, y: x.at[T].set(y), buffer.rows, row)
        trajectory = Trajectory(
            timesteps=timesteps(rows),
            actions=buffer.actions,
            extras=buffer.extras,
            actor_state=carry.memory,
            policy_version=jnp.broadcast_to(versions[:, None], (T, *lanes.shape)),
            lane=lanes,
        )
        games, episodes = count(spec, carry.games, rows)
        carry = ActorCarry(buffer.memory, jax.random.split(carry.keys[T], T + 1), games)
        return trajectory, episodes, begin(carry), carry

    return Acting(start, begin, act, finish)


def timesteps(rows: HostStep) -> TimeStep:
    """Rows [T+1, B] as the agent sees them."""
    reward, discount, first, last, *_ = jnp.moveaxis(rows.scalars, 1, 0)
    return TimeStep(rows.observation, reward, discount, first > 0, last > 0)


def count(spec: EnvSpec, games: EpisodeCounters, rows: HostStep) -> tuple[EpisodeCounters, EpisodeStats]:
    """The games after rows [T+1, B], of which the first was counted before, and the sums over those that ended,
    by task where there are several."""
    reward, discount, first, last, *raw = jnp.moveaxis(rows.scalars, 1, 0)
    score, over = raw or (reward, last)
    played = (score[1:], over[1:] > 0, first[1:] > 0, last[1:] > 0, discount[1:] if spec.num_players == 2 else ())
    K = len(spec.tasks)
    games, episodes = _count(games, K, *played)
    # They are sums already: an episode's are those of the row that ends it.
    ended = {name: jnp.where(over[1:] > 0, rows.metrics[1:, i], 0.0) for i, name in enumerate(spec.metrics)}
    return games, episodes._replace(metrics=tasks.summed(ended, K))


def act_once(agent: Agent, timestep: TimeStep, carry: ActorCarry) -> tuple[ArrayTree, ArrayTree]:
    """Shapes of actions and extras."""

    def act(carry: ActorCarry) -> tuple[ArrayTree, ArrayTree]:
        hyper = {name: jnp.float32(value) for name, value in agent.hyper.items()}
        params = agent.actor_params(agent.init(carry.keys[0], hyper), jnp.float32(0))
        return agent.act(params, carry.memory, timestep, carry.keys[0], False)[:2]

    return jax.eval_shape(act, carry)


def _count(
    games: EpisodeCounters,
    num_tasks: int,
    score: jax.Array,
    over: jax.Array,
    first: jax.Array,
    last: jax.Array,
    discount: Any,
) -> tuple[EpisodeCounters, EpisodeStats]:
    """The games after rows [T, B], and the sums over those that ended.

    A new game opens after one that is over, and after a break: a `first` row that no `last` one precedes. `discount` is
    () where one plays.
    """

    def row(carry: tuple[EpisodeCounters, EpisodeStats], now: tuple[Any, ...]) -> tuple[Any, None]:
        games, episodes = carry
        score, over, first, last, discount = now
        opens = games.over | (first & ~games.last)
        sign: Any = ()
        if jax.tree.leaves(games.sign):
            sign = jnp.where(opens, 1.0, games.sign)
            score, sign = sign * score, sign * discount
        episode_return = jnp.where(opens, 0.0, games.episode_return) + score
        episode_length = jnp.where(opens, 0.0, games.episode_length) + (~first).astype(jnp.float32)
        ended = over.astype(jnp.float32)
        sums = tasks.summed(EpisodeStats(episode_return * ended, episode_length * ended, ended), num_tasks)
        return (
            EpisodeCounters(episode_return, episode_length, over, last, sign),
            jax.tree.map(jnp.add, episodes, sums),
        ), None

    zeros = jnp.zeros(num_tasks if num_tasks > 1 else (), jnp.float32)
    nothing = EpisodeStats(zeros, zeros, zeros)
    unroll = topology.unroll(score.shape[0])
    return lax.scan(row, (games, nothing), (score, over, first, last, discount), unroll=unroll)[0]
