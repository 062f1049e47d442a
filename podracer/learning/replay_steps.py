"""Learning from a replay in steps: rollouts are added; samples are prepared, learnt from, and get new priorities.

`mixed` are those of agents that learn from every rollout once, next to replayed ones; `sampled` those of agents that
learn from samples alone, as often as the replay ratio says. A driver makes one program of them
(`podracer.learning.learner`), or runs some elsewhere (`podracer.sebulba.replay_devices`).
"""

from __future__ import annotations

import fractions
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import replay, topology, trajectories
from podracer.replay import priority_refresh
from podracer.topology import collectives
from podracer.types import Agent, ArrayTree, Batch, LearnerState, Metrics, Replay, Trajectory


class Counts(NamedTuple):
    """Counts of batches, rollouts and updates, the same on all shards, devices and members of a population.

    Attributes:
      batches: int32 []; rollouts that were learnt from or added since the run began.
      rollouts: int32 [groups]; rollouts of each group since the replay was empty, or () without replay.
      owed: int32 []; numerator of the fraction of a group of updates that is owed, or (). Its denominator is that of
        the groups due for a rollout, `ratio * starts / (batch_size * group)` in lowest terms.
      pending: int32 []; groups of updates (`Replay.group`) that are due, or () where updates are on the newest rollout.
      put_off: int32 []; groups that were due when the replay was lost, and are again once it is filled, or ().
      updates: int32 []; groups of updates on samples since the run began, or (); their keys are made from it.
      filled: int32 []; 1 once the replay has enough to learn from, or ().
    """

    batches: jax.Array
    rollouts: Any = ()
    owed: Any = ()
    pending: Any = ()
    put_off: Any = ()
    updates: Any = ()
    filled: Any = ()

    def emptied(self) -> Counts:
        """The counts once the replay was lost. No update is: what counts them, as target networks do, stays in step."""
        lost = {"rollouts": self.rollouts, "pending": self.pending, "filled": self.filled}
        put_off = jax.tree.map(jnp.add, self.put_off, self.pending)
        return self._replace(**jax.tree.map(jnp.zeros_like, lost), put_off=put_off)


class Elders(NamedTuple):
    """Parameters of earlier updates that samples are prepared by, ActorParams, or () for not doing that.

    Attributes:
      target: what `Agent.reanalyse` acts by.
      sweep: what `Agent.refresh` makes priorities by.
      number: int32 []; updates before these samples are drawn, of an agent that has either.
    """

    target: Any = ()
    sweep: Any = ()
    number: Any = ()


class Prepared(NamedTuple):
    """Samples for a group of updates.

    Attributes:
      batch: what `Agent.learn` takes, for all updates of the group.
      key: uint32; data of the key that they consume, for keys are no arrays on their way between devices.
      version: int32 []; the update that the target is of by which it is reanalysed; () where it is not, or not yet.
      drawn: int32 []; updates before it was drawn, or ().
    """

    batch: Any
    key: jax.Array
    version: Any = ()
    drawn: Any = ()


class PrepareFn(Protocol):
    """Prepares a group of updates."""

    def __call__(
        self,
        elders: Elders,
        counts: Counts,
        ring: replay.Ring,
        newest: Any,
        progress: jax.Array,
        key: jax.Array,
        later: Any = 0,
        /,
    ) -> tuple[replay.Ring, replay.Sample, Prepared, Metrics]:
        """Draws, does a part of a sweep and reanalyses; of the ring it changes priorities only.

        Args:
          elders: target and refresh parameters.
          counts: of the replay.
          ring: of the shard.
          newest: the rollout to learn from next to replayed ones, or ().
          progress: of the run.
          key: consumed.
          later: int32 []; 0 for the next group, else for one that is so many later.
        """
        ...


class DrainFn(Protocol):
    """Does pending updates."""

    def __call__(
        self,
        state: LearnerState,
        counts: Counts,
        ring: replay.Ring,
        number: Any,
        progress: jax.Array,
        key: jax.Array,
        /,
    ) -> tuple[LearnerState, Counts, replay.Ring, Metrics]:
        """Prepares, learns and writes, `number` times: a Python integer, or int32 []."""
        ...


class Steps(NamedTuple):
    """The steps of learning with a replay (see `Learner`).

    Attributes:
      add: `(counts, ring, rollout, group)`; raises `Counts.pending` by what is due.
      elders: `(state, progress)`; target and refresh parameters.
      prepare: prepares a group of updates.
      learn: `(state, prepared, progress)`; reanalyses what is not yet, and returns priorities [n] or () too.
      write: `(counts, ring, sample, priorities)`; changes priorities only.
      drain: does pending updates. None where there is one update for every rollout, on that rollout next to replayed
        ones.
    """

    add: Callable[[Counts, replay.Ring, Trajectory, jax.Array | int], tuple[Counts, replay.Ring, Metrics]]
    elders: Callable[[LearnerState, jax.Array], Elders]
    prepare: PrepareFn
    learn: Callable[[LearnerState, Prepared, jax.Array], tuple[LearnerState, Metrics, Any]]
    write: Callable[[Counts, replay.Ring, replay.Sample, Any], tuple[replay.Ring, Metrics]]
    drain: DrainFn | None = None


LARGEST = ("reanalyse/staleness_max", "replay/priority_staleness_max", "refresh/age_max")
"""Metrics that are the largest of all updates, and no mean."""


def added(sums: Metrics, metrics: Metrics) -> Metrics:
    """Metrics of some updates and of further ones, as those of all: sums, and of `LARGEST` the larger one."""
    both = {name: jnp.maximum if name in LARGEST else jnp.add for name in sums}
    return {name: join(sums[name], metrics[name]) for name, join in both.items()}


def update_keys(key: jax.Array, number: Any) -> tuple[jax.Array, jax.Array]:
    """The keys of drawing and learning for an update by its number since the run began."""
    sample_key, learn_key = jax.random.split(jax.random.fold_in(key, number))
    return sample_key, learn_key


def _added(
    spec: Replay, plan: replay.Layout, ring: replay.Ring, counts: Counts, trajectory: Trajectory, group: Any
) -> tuple[replay.Ring, Counts]:
    """The ring and the counts with one more rollout."""
    number = counts.rollouts[group]
    add = lambda _, ring: replay.add(plan, spec, ring, trajectory, group, number)  # noqa: E731
    # On CPU, a loop of one turn whose length XLA does not know. Left to itself, XLA:CPU writes the rollout twice, for
    # what this call samples and for what it returns, and copies the whole ring to do so. On GPU it would stop the host.
    ring = lax.fori_loop(0, 1 + jnp.minimum(counts.batches, 0), add, ring) if topology.on_cpu() else add(0, ring)
    rollouts = counts.rollouts.at[group].add(1)
    return ring, counts._replace(rollouts=rollouts, batches=counts.batches + 1)


def mixed(agent: Agent, spec: Replay, plan: replay.Layout, num_shards: int, observation: ArrayTree) -> Steps:
    """One update for every rollout, on that rollout next to replayed ones."""
    lanes = plan.lanes
    n = round(lanes * spec.fraction / (1.0 - spec.fraction))
    if not 0 < n <= lanes or not np.isclose(n / (n + lanes), spec.fraction):
        raise ValueError(
            f"replay_fraction={spec.fraction} of a batch cannot join {lanes} new lanes per shard: use 0.5, or "
            f"n / (n + {lanes}) with n up to {lanes}."
        )

    def size_of(counts: Counts) -> jax.Array:
        return num_shards * replay.num_sequences(plan, counts.rollouts)

    def add(counts: Counts, ring: replay.Ring, trajectory: Trajectory, group: jax.Array | int) -> Any:
        ring, counts = _added(spec, plan, ring, counts, trajectory, group)
        return counts, ring, {"replay/size": size_of(counts).astype(jnp.float32)}

    def prepare(
        elders: Elders,
        counts: Counts,
        ring: Any,
        trajectory: Trajectory,
        progress: jax.Array,
        key: Any,
        later: Any = 0,  # always 0: there is one update at a time
    ) -> Any:
        sample_key, learn_key = update_keys(key, 0)
        there = size_of(counts) > 0
        at = replay.sample(plan, ring, counts.rollouts, sample_key, n, _beta(spec, progress))
        # Before there is anything to replay, the newest rollout is seen twice.
        drawn = replay.gather(plan, spec, ring, at, trajectory.timesteps.observation)
        new = trajectories.by_lane(lambda axis, x: lax.slice_in_dim(x, 0, n, axis=axis), trajectory)
        old = jax.tree.map(lambda x, y: jnp.where(there, x, y), drawn, new)
        both = trajectories.by_lane(lambda axis, *x: jnp.concatenate(x, axis), trajectory, old)
        age = jnp.where(there, at.age, 0).astype(jnp.float32)
        metrics = {"replay/age": collectives.global_mean(age, jnp.ones(n))}
        return ring, at, Prepared(both, jax.random.key_data(learn_key)), metrics

    def learn(state: LearnerState, prepared: Prepared, progress: jax.Array) -> Any:
        return *agent.learn(state, prepared.batch, progress, jax.random.wrap_key_data(prepared.key)), ()

    return Steps(add, lambda state, progress: Elders(), prepare, learn, lambda counts, ring, at, priorities: (ring, {}))


def _beta(spec: Replay, progress: jax.Array) -> jax.Array:
    """The exponent of importance weights."""
    beta = spec.importance_exponent
    return beta(progress) if callable(beta) else jnp.float32(beta)


def _reanalysed(agent: Agent, prepared: Prepared, target: Any) -> Prepared:
    """Reanalyses samples by target parameters, if the agent does that and they are not reanalysed yet."""
    if agent.reanalyse is None or jax.tree.leaves(prepared.version) or not jax.tree.leaves(target):
        return prepared
    key, reanalyse_key = jax.random.split(jax.random.wrap_key_data(prepared.key))
    batch = agent.reanalyse(target, prepared.batch, reanalyse_key)
    return prepared._replace(batch=batch, key=jax.random.key_data(key), version=target.version)


def _learning(agent: Agent, group: int, target_interval: int = 0) -> Callable[..., Any]:
    """`Agent.learn` from a group of samples in turn; metrics are sums over the updates of the group."""

    def since(state: LearnerState, number: jax.Array) -> jax.Array:
        return collectives.global_max((state.num_updates - number).astype(jnp.float32))

    def in_sum(age: jax.Array) -> jax.Array:
        return group * (age + (group - 1) / 2)  # the updates of a group are learnt one later each

    def learn(state: LearnerState, prepared: Prepared, progress: jax.Array) -> Any:
        more: Metrics = {}
        if agent.target_params is not None:
            prepared = _reanalysed(agent, prepared, agent.target_params(state, progress))
        batch, key = prepared.batch, jax.random.wrap_key_data(prepared.key)
        if agent.reanalyse is not None:
            age = since(state, prepared.version)
            more = {"reanalyse/staleness": in_sum(age), "reanalyse/staleness_max": age + (group - 1)}
            if target_interval:
                more["reanalyse/staleness_ratio"] = in_sum(age) / (target_interval / 2)
        if jax.tree.leaves(prepared.drawn):
            age = since(state, prepared.drawn)
            more |= {"replay/priority_staleness": in_sum(age), "replay/priority_staleness_max": age + (group - 1)}
        if group == 1:
            state, metrics, priorities = agent.learn(state, batch, progress, key)
            return state, metrics | more, priorities

        def update(state: LearnerState, of_update: Any) -> Any:
            number, batch = of_update
            state, *said = agent.learn(state, batch, progress, jax.random.fold_in(key, number))
            return state, said

        numbered = jnp.arange(group, dtype=jnp.int32), trajectories.split_batch(batch, group)
        state, (metrics, priorities) = lax.scan(update, state, numbered)
        metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics)
        return state, metrics | more, priorities.reshape(-1)

    return learn


def sampled(agent: Agent, spec: Replay, plan: replay.Layout, num_shards: int, observation: ArrayTree) -> Steps:
    """Updates on samples alone, as often as the replay ratio says."""
    if spec.batch_size % num_shards:
        raise ValueError(f"batch_size={spec.batch_size} is not divisible by the {num_shards} shards.")
    group, n, lanes = spec.group, spec.batch_size // num_shards, plan.lanes * num_shards
    starts = lanes * plan.starts_per_rollout  # sequences that a rollout adds
    ratio = fractions.Fraction(spec.ratio).limit_denominator(10_000)
    if ratio <= 0:
        raise ValueError(
            f"{agent.name} would never learn: it samples {spec.ratio:g} sequences per sequence added; use 0.0001 or "
            "more."
        )
    per_call = ratio * starts / (spec.batch_size * group)
    observations = jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.zeros((1, 1, *x.shape), x.dtype), observation))
    if spec.refresh_interval % group:
        raise ValueError(
            f"refresh_interval={spec.refresh_interval} is not a multiple of the {group} updates that are drawn at once."
        )
    mean = lambda x: collectives.global_mean(x, jnp.ones(group * n))  # noqa: E731
    learn = _learning(agent, group, spec.target_interval)

    def add(counts: Counts, ring: replay.Ring, trajectory: Trajectory, group: jax.Array | int) -> Any:
        ring, counts = _added(spec, plan, ring, counts, trajectory, group)
        size = num_shards * replay.num_sequences(plan, counts.rollouts)
        ready = size >= spec.min_size
        if spec.starts == "rows":
            enough = -(-spec.min_size // starts)  # rollouts
            ready = (size > 0) & (jnp.sum(jnp.minimum(counts.rollouts, enough)) >= enough)
        whole, part = divmod(per_call.numerator, per_call.denominator)
        owed = counts.owed + part
        more = owed >= per_call.denominator
        owed = jnp.where(ready, jnp.where(more, owed - per_call.denominator, owed), counts.owed)
        due = jnp.where(ready, counts.put_off + whole + more.astype(jnp.int32), 0)
        put_off = jnp.where(ready, 0, counts.put_off)
        call = {"replay/size": size.astype(jnp.float32)}
        counts = counts._replace(owed=owed, pending=counts.pending + due, put_off=put_off)
        return counts._replace(filled=ready.astype(jnp.int32)), ring, call

    def elders(state: LearnerState, progress: jax.Array) -> Elders:
        target, sweep = (
            params(state, progress) if params else () for params in (agent.target_params, agent.refresh_params)
        )
        return Elders(target, sweep, state.num_updates if agent.reanalyse or agent.refresh else ())

    def draw(counts: Counts, ring: replay.Ring, progress: jax.Array, key: jax.Array) -> Any:
        at = replay.sample(plan, ring, counts.rollouts, key, group * n, _beta(spec, progress))
        if group > 1:  # an update has samples from all of the ring, in the order of which they are drawn
            at = jax.tree.map(lambda x: x.reshape(n, group).T, at)
            largest = collectives.global_max(at.weight, axis=1)
            at = at._replace(weight=at.weight / largest[:, None])
            at = jax.tree.map(lambda x: x.reshape(-1), at)
        metrics = {"replay/age": group * mean(at.age.astype(jnp.float32)), "replay/weight": group * mean(at.weight)}
        age = replay.transitions_since(plan, at, num_shards)
        return at, Batch(replay.gather(plan, spec, ring, at, observations), at.weight, age), metrics

    def sweep(elders: Elders, counts: Counts, ring: replay.Ring) -> Any:
        """A part of the sweep that renews priorities."""
        if agent.refresh is None:
            return ring, {}
        renew = functools.partial(agent.refresh, elders.sweep)
        part = counts.updates % (spec.refresh_interval // group), spec.refresh_interval // group
        age = collectives.global_max((elders.number - ring.version[0]).astype(jnp.float32))
        refreshed = priority_refresh.refresh(
            plan, spec, ring, counts.rollouts, renew, elders.sweep.version, part, observations, num_shards
        )
        return refreshed, {"refresh/age": group * age, "refresh/age_max": age}

    def prepare(
        elders: Elders, counts: Counts, ring: replay.Ring, newest: Any, progress: jax.Array, key: Any, later: Any = 0
    ) -> Any:
        sample_key, learn_key = update_keys(key, counts.updates + later)
        at, batch, drawn = draw(counts, ring, progress, sample_key)
        ring, swept = sweep(elders, counts, ring)
        prepared = Prepared(batch, jax.random.key_data(learn_key), drawn=elders.number)
        prepared = _reanalysed(agent, prepared, elders.target)
        return ring, at, prepared, drawn | swept

    def write(counts: Counts, ring: replay.Ring, at: replay.Sample, priorities: jax.Array) -> Any:
        overwritten = jnp.float32(0)
        if not spec.refresh_interval:
            ring, overwritten = replay.update(plan, spec, ring, counts.rollouts, at, priorities)
        average = mean(priorities)
        return ring, {
            "replay/priority": group * average,
            "replay/priority_std": group * jnp.sqrt(mean(jnp.square(priorities - average))),
            "replay/priority_max": group * collectives.global_max(priorities),
            "replay/overwritten": collectives.global_sum(overwritten),
            "replay/updates": jnp.float32(group),
            "replay/ratio": jnp.float32(group * spec.batch_size / starts),
        }

    def drain(
        state: LearnerState, counts: Counts, ring: replay.Ring, number: Any, progress: jax.Array, key: jax.Array
    ) -> Any:
        @jax.jit  # traced once, for its shapes and in the loop, whose counter has to be of the same type
        def update(i: Any, state: LearnerState, changes: Any) -> tuple[LearnerState, Any, Metrics]:
            # Of the ring, an update changes nothing but the priorities.
            now = replay.changed(ring, changes)
            then = counts._replace(updates=counts.updates + i)
            now, at, prepared, seen = prepare(elders(state, progress), then, now, (), progress, key)
            state, metrics, priorities = learn(state, prepared, progress)
            now, written = write(counts, now, at, priorities)
            return state, replay.changes(now), metrics | seen | written

        def body(i: jax.Array, carry: Any) -> Any:
            state, changes, sums = carry
            state, changes, metrics = update(i, state, changes)
            return state, changes, added(sums, metrics)

        changes = replay.changes(ring)
        if isinstance(number, int) and number == 1:  # no loop, in which XLA:CPU is slow at convolutions
            state, changes, metrics = update(0, state, changes)
        else:
            shapes = jax.eval_shape(update, jnp.int32(0), state, changes)[2]
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            state, changes, metrics = lax.fori_loop(jnp.int32(0), number, body, (state, changes, nothing))
        counts = counts._replace(pending=counts.pending - number, updates=counts.updates + number)
        return state, counts, replay.changed(ring, changes), metrics

    return Steps(add, elders, prepare, learn, write, drain)
