"""The steps of an agent that learns from samples of its replay alone, as often as the replay ratio says."""

from __future__ import annotations

import dataclasses
import fractions
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podracer import replay, trajectories
from podracer.learning.replay_steps import (
    Counts,
    Prepared,
    Steps,
    TargetParams,
    UpdateFn,
    add_metrics,
    add_rollout,
    importance_exponent,
    update_keys,
)
from podracer.replay import Buffer, PriorityState, Ring, Sample
from podracer.topology import collectives
from podracer.types import Agent, Batch, LearnerState, Metrics, Trajectory


def make(agent: Agent, buffer: Buffer) -> Steps:
    """Makes the steps of updates on samples alone.

    Raises:
      ValueError: where the agent's replay settings do not fit the shards, or each other.
    """
    spec, G = buffer.spec, buffer.spec.updates_per_draw
    if spec.batch_size % buffer.num_shards:
        above = -(-spec.batch_size // buffer.num_shards) * buffer.num_shards
        raise ValueError(
            f"batch_size={spec.batch_size} is not divisible by the {buffer.num_shards} shards; use {above}, or another "
            "multiple, or fewer shards."
        )
    if spec.refresh_interval % G:
        raise ValueError(
            f"refresh_interval={spec.refresh_interval} is not a multiple of the {G} updates that are drawn at once."
        )
    starts = buffer.shape.lanes * buffer.num_shards * buffer.shape.starts_per_rollout
    ratio = fractions.Fraction(spec.ratio).limit_denominator(10_000)
    if ratio <= 0:
        named = getattr(agent.config, "replay_ratio", 0.0)
        # R2D2's setting is of rows, and the replay's number of sequences.
        per_sequence = named / spec.ratio if named and spec.ratio else 0.0
        where = f"replay_ratio={named:g}" if per_sequence else f"ReplaySpec.ratio={spec.ratio:g}"
        raise ValueError(
            f"{where}: {agent.name} would never learn, with {spec.ratio:g} sequences sampled per sequence added; use "
            f"{0.0001 * (per_sequence or 1.0):g} or more."
        )
    steps = _SampleSteps(
        agent,
        buffer,
        n=spec.batch_size // buffer.num_shards,
        sequences_per_rollout=starts,
        draws_per_rollout=ratio * starts / (spec.batch_size * G),
    )
    learn = _learn_in_turn(agent, G, spec.target_interval)
    run_pending_updates = functools.partial(_run_pending_updates, steps, learn)
    return Steps(steps.add, steps.target_params, steps.prepare, learn, steps.write, run_pending_updates)


@dataclasses.dataclass(frozen=True, eq=False)
class _SampleSteps:
    """The steps around learning; each is as `Steps` says.

    Attributes:
      agent: the agent.
      buffer: its replay.
      n: samples of an update on this shard.
      sequences_per_rollout: sequences that a rollout adds on all shards.
      draws_per_rollout: draws that are due for a rollout.
    """

    agent: Agent
    buffer: Buffer
    n: int
    sequences_per_rollout: int
    draws_per_rollout: fractions.Fraction

    def add(
        self, counts: Counts, ring: Ring, trajectory: Trajectory, actor_index: jax.Array | int
    ) -> tuple[Counts, Ring, Metrics]:
        ring, counts = add_rollout(self.buffer, ring, counts, trajectory, actor_index)
        size = self.buffer.num_shards * self.buffer.num_sequences(counts.rollouts)
        counts = self._count_due_updates(counts, self._is_filled(counts, size))
        return counts, ring, {"replay/size": size.astype(jnp.float32)}

    def _is_filled(self, counts: Counts, size: jax.Array) -> jax.Array:
        """Returns True, bool [], once the replay has enough to learn from."""
        spec = self.buffer.spec
        # Rows are counted by rollouts, for a ring that is full has no more of them.
        if spec.starts == "rows":
            enough = -(-spec.min_size // self.sequences_per_rollout)  # rollouts
            return (size > 0) & (jnp.sum(jnp.minimum(counts.rollouts, enough)) >= enough)
        return size >= spec.min_size

    def _count_due_updates(self, counts: Counts, filled: jax.Array) -> Counts:
        """Adds the draws that are due for a rollout, and carries a fraction over to the next rollout."""
        denominator = self.draws_per_rollout.denominator
        # The replay ratio is kept exactly, by counting in fractions.
        whole, remainder = divmod(self.draws_per_rollout.numerator, denominator)
        fraction = counts.fractional_updates + remainder
        carry = fraction >= denominator
        fraction = jnp.where(carry, fraction - denominator, fraction)
        due = jnp.where(filled, counts.deferred_updates + whole + carry.astype(jnp.int32), 0)
        return counts._replace(
            fractional_updates=jnp.where(filled, fraction, counts.fractional_updates),
            pending_updates=counts.pending_updates + due,
            deferred_updates=jnp.where(filled, 0, counts.deferred_updates),
            filled=filled.astype(jnp.int32),
        )

    def target_params(self, state: LearnerState, progress: jax.Array) -> TargetParams:
        agent = self.agent
        reanalyse, refresh = (
            params(state, progress) if params else () for params in (agent.target_params, agent.refresh_params)
        )
        return TargetParams(reanalyse, refresh, state.num_updates if agent.reanalyse or agent.refresh else ())

    def prepare(
        self,
        target: TargetParams,
        counts: Counts,
        ring: Ring,
        rollout: Any,
        progress: jax.Array,
        key: jax.Array,
        draws_ahead: Any = 0,
    ) -> tuple[Ring, Sample, Prepared, Metrics]:
        # Prioritised samples (Schaul et al. 2016, algorithm 1, lines 9 and 10).
        sample_key, learn_key = update_keys(key, counts.draws + draws_ahead)
        samples, batch, metrics = self._draw(counts, ring, progress, sample_key)
        # A part of the sweep that refreshes priorities (Mei et al. 2023, section 4.3).
        ring, refresh_metrics = self._refresh(target, counts, ring)
        # Reanalysis with older parameters (Schrittwieser et al. 2020, appendix H).
        prepared = Prepared(batch, jax.random.key_data(learn_key), drawn_at=target.num_updates)
        prepared = _reanalyse(self.agent, prepared, target.reanalyse)
        return ring, samples, prepared, metrics | refresh_metrics

    def _draw(self, counts: Counts, ring: Ring, progress: jax.Array, key: jax.Array) -> tuple[Sample, Batch, Metrics]:
        buffer, G = self.buffer, self.buffer.spec.updates_per_draw
        beta = importance_exponent(buffer.spec, progress)
        samples = buffer.sample(ring, counts.rollouts, key, G * self.n, beta)
        if G > 1:
            # Samples are drawn in the ring's order: in turns, so that each update has some from all of the ring.
            samples = jax.tree.map(lambda x: x.reshape(self.n, G).T, samples)
            largest = collectives.global_max(samples.weight, axis=1)
            samples = samples._replace(weight=samples.weight / largest[:, None])
            samples = jax.tree.map(lambda x: x.reshape(-1), samples)
        age = samples.age.astype(jnp.float32)
        metrics = {"replay/age": G * self._mean(age), "replay/weight": G * self._mean(samples.weight)}
        transitions = buffer.transitions_since(samples)
        return samples, Batch(buffer.gather(ring, samples), samples.weight, transitions), metrics

    def _refresh(self, target: TargetParams, counts: Counts, ring: Ring) -> tuple[Ring, Metrics]:
        """Does a part of the sweep that recomputes priorities."""
        if self.agent.refresh is None:
            return ring, {}
        G = self.buffer.spec.updates_per_draw
        new_priorities = functools.partial(self.agent.refresh, target.refresh)
        num_parts = self.buffer.spec.refresh_interval // G
        part = counts.draws % num_parts, num_parts
        age = collectives.global_max((target.num_updates - ring.version[0]).astype(jnp.float32))
        ring = self.buffer.refresh(ring, counts.rollouts, new_priorities, target.refresh.version, part)
        return ring, {"refresh/age": G * age, "refresh/age_max": age}

    def write(self, counts: Counts, ring: Ring, samples: Sample, priorities: jax.Array) -> tuple[Ring, Metrics]:
        spec, G, overwritten = self.buffer.spec, self.buffer.spec.updates_per_draw, jnp.float32(0)
        # New priorities of what was learnt from (Schaul et al. 2016, algorithm 1, line 12), unless sweeps write them.
        if not spec.refresh_interval:
            ring, overwritten = self.buffer.write(ring, counts.rollouts, samples, priorities)
        average = self._mean(priorities)
        return ring, {
            "replay/priority": G * average,
            "replay/priority_std": G * jnp.sqrt(self._mean(jnp.square(priorities - average))),
            "replay/priority_max": G * collectives.global_max(priorities),
            "replay/overwritten": collectives.global_sum(overwritten),
            "replay/updates": jnp.float32(G),
            "replay/ratio": jnp.float32(G * spec.batch_size / self.sequences_per_rollout),
        }

    def _mean(self, x: jax.Array) -> jax.Array:
        """Averages over the samples of a draw on all shards."""
        return collectives.global_mean(x, jnp.ones(self.buffer.spec.updates_per_draw * self.n))


def _reanalyse(agent: Agent, prepared: Prepared, target: Any) -> Prepared:
    """Reanalyses samples with target parameters, if the agent does that and they are not reanalysed yet."""
    if agent.reanalyse is None or jax.tree.leaves(prepared.target_version) or not jax.tree.leaves(target):
        return prepared
    key, reanalyse_key = jax.random.split(jax.random.wrap_key_data(prepared.key))
    batch = agent.reanalyse(target, prepared.batch, reanalyse_key)
    return prepared._replace(batch=batch, key=jax.random.key_data(key), target_version=target.version)


def _learn_in_turn(agent: Agent, G: int, target_interval: int) -> UpdateFn:
    """Makes a function that learns from the G updates of a draw in turn; metrics are sums over them."""

    def learn(state: LearnerState, prepared: Prepared, progress: jax.Array) -> tuple[LearnerState, Metrics, Any]:
        if agent.target_params is not None:
            prepared = _reanalyse(agent, prepared, agent.target_params(state, progress))
        staleness = _staleness(agent, state, prepared, G, target_interval)
        batch, key = prepared.batch, jax.random.wrap_key_data(prepared.key)
        if G == 1 or (agent.replay and agent.replay.whole_draws):
            state, metrics, priorities = agent.learn(state, batch, progress, key)
            return state, metrics | staleness, priorities

        def update(state: LearnerState, numbered_batch: Any) -> tuple[LearnerState, Any]:
            number, batch = numbered_batch
            state, *results = agent.learn(state, batch, progress, jax.random.fold_in(key, number))
            return state, results

        # One update after the other, each from its share of the draw.
        batches = jnp.arange(G, dtype=jnp.int32), trajectories.split_batch(batch, G)
        state, (metrics, priorities) = lax.scan(update, state, batches)
        metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics)
        return state, metrics | staleness, priorities.reshape(-1)

    return learn


def _staleness(agent: Agent, state: LearnerState, prepared: Prepared, G: int, target_interval: int) -> Metrics:
    """Computes metrics of the updates since samples were reanalysed and drawn, before the first update of a draw."""

    def updates_since(number: jax.Array) -> jax.Array:
        return collectives.global_max((state.num_updates - number).astype(jnp.float32))

    def sum_over_draw(age: jax.Array) -> jax.Array:
        return G * (age + (G - 1) / 2)  # each update of a draw is one later than the update before

    metrics: Metrics = {}
    if agent.reanalyse is not None:
        age = updates_since(prepared.target_version)
        metrics = {"reanalyse/staleness": sum_over_draw(age), "reanalyse/staleness_max": age + (G - 1)}
        if target_interval:
            metrics["reanalyse/staleness_ratio"] = sum_over_draw(age) / (target_interval / 2)
    if jax.tree.leaves(prepared.drawn_at):
        age = updates_since(prepared.drawn_at)
        metrics |= {"replay/priority_staleness": sum_over_draw(age), "replay/priority_staleness_max": age + (G - 1)}
    return metrics


def _run_pending_updates(
    steps: _SampleSteps,
    learn: UpdateFn,
    state: LearnerState,
    counts: Counts,
    ring: Ring,
    num_draws: Any,
    progress: jax.Array,
    key: jax.Array,
) -> tuple[LearnerState, Counts, Ring, Metrics]:
    """Does pending updates, as `Steps.run_pending_updates` says."""

    @jax.jit  # traced once, for its shapes and in the loop, whose counter has to be of the same type
    def update(i: Any, state: LearnerState, priorities: PriorityState) -> tuple[LearnerState, PriorityState, Metrics]:
        # Of the ring, an update changes nothing but the priorities.
        new_ring = replay.with_priority_state(ring, priorities)
        # Draw, learn, write priorities: each draw sees the priorities of the one before.
        new_counts = counts._replace(draws=counts.draws + i)
        target = steps.target_params(state, progress)
        new_ring, samples, prepared, prepare_metrics = steps.prepare(target, new_counts, new_ring, (), progress, key)
        state, metrics, sample_priorities = learn(state, prepared, progress)
        new_ring, write_metrics = steps.write(counts, new_ring, samples, sample_priorities)
        return state, replay.priority_state(new_ring), metrics | prepare_metrics | write_metrics

    def body(i: jax.Array, carry: Any) -> Any:
        state, priorities, sums = carry
        state, priorities, metrics = update(i, state, priorities)
        return state, priorities, add_metrics(sums, metrics)

    priorities = replay.priority_state(ring)
    if isinstance(num_draws, int) and num_draws == 1:  # no loop, in which XLA:CPU is slow at convolutions
        state, priorities, metrics = update(0, state, priorities)
    else:
        shapes = jax.eval_shape(update, jnp.int32(0), state, priorities)[2]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        state, priorities, metrics = lax.fori_loop(jnp.int32(0), num_draws, body, (state, priorities, zeros))
    counts = counts._replace(pending_updates=counts.pending_updates - num_draws, draws=counts.draws + num_draws)
    return state, counts, replay.with_priority_state(ring, priorities), metrics
