"""Anakin's loop over updates on one device, over the members and shards there.

The host decides with `Limits` when a call stops, and reads a `Report` of what was done.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from podracer.anakin.call import Limits, Report
from podracer.anakin.rollout import Actors, RolloutSettings, rollout
from podracer.learning import learner
from podracer.learning.counter import Counter
from podracer.learning.learner import ReplayState
from podracer.learning.replay_steps import Counts, add_metrics
from podracer.run.driver import RunState
from podracer.topology import DATA_AXIS, POPULATION_AXIS, collectives
from podracer.types import Agent, ArrayTree, Environment, EpisodeStats, LearnerState, Metrics, Trajectory


class Member(NamedTuple):
    """A member's part of a `RunState`: all but the counts, which all members share."""

    learner: LearnerState
    actors: Actors
    env_steps: Counter
    ring: ArrayTree

    @classmethod
    def from_state(cls, state: RunState) -> Member:
        """Takes the members [P] out of a state."""
        return cls(state.learner, state.actors, state.env_steps, state.replay_state.ring)

    def to_state(self, counts: Counts) -> RunState:
        """Puts members [P] and their counts into a state."""
        return RunState(self.learner, self.actors, self.env_steps, ReplayState(counts, self.ring))


ShardResults = tuple[
    tuple[Actors, ArrayTree, Trajectory | tuple[()]], tuple[LearnerState, Counts, Metrics, EpisodeStats, jax.Array]
]
"""The results of an `UpdateShardFn`."""


class UpdateShardFn(Protocol):
    """Does an iteration of the loop for one shard."""

    def __call__(
        self, state: LearnerState, actors: Actors, ring: ArrayTree, counts: Counts, progress: jax.Array, /
    ) -> ShardResults:
        """Returns the actors, the ring and the trajectory (or ()) of this shard, and results that all shards share.

        The latter are the learner's state, counts, metrics, episodes and the number of transitions.
        """
        ...


class UnfinishedFn(Protocol):
    """Decides which members need another update."""

    def __call__(self, report: Report, counts: Counts, limits: Limits, /) -> jax.Array:
        """Returns True, bool [P / devices], for a member that needs another update."""
        ...


class UpdateFn(Protocol):
    """Does an iteration of the loop on one device."""

    def __call__(self, state: RunState, /) -> tuple[RunState, Metrics, EpisodeStats]:
        """Returns the state, metrics and episodes of all members."""
        ...


def run(
    update_shard: UpdateShardFn, unfinished: UnfinishedFn, state: RunState, limits: Limits
) -> tuple[RunState, Report]:
    """Runs the loop over updates on one device: state [P / devices, ...], actors [P / devices, S / devices, ...].

    Args:
      update_shard: one iteration for one shard, such as `ShardUpdates.update`.
      unfinished: tells which members need another update.
      state: consumed.
      limits: limits of the call.
    """
    update = jax.jit(_update_members(update_shard, limits))  # traced once, for the metrics' shapes and for the loop

    def body(carry: Any) -> Any:
        state, report, _ = carry
        evolution = state.evolution
        state, metrics, episodes = update(state)
        if evolution:
            state = state._replace(evolution=evolution.add(episodes))
        # Sums over updates; the host divides them.
        finite = report.finite & jnp.all(jnp.stack([jnp.isfinite(x) for x in metrics.values()]), axis=0)
        add = lambda a, b: jax.tree.map(jnp.add, a, b)  # noqa: E731
        report = Report(
            add_metrics(report.metrics, metrics),
            add(report.episodes, episodes),
            report.updates + 1,
            state.learner.num_updates,
            state.env_steps,
            finite,
            report.max_updates,
        )
        return state, report, goes_on(report, state.replay_state.counts)

    def goes_on(report: Report, counts: Counts) -> jax.Array:
        # A member that has diverged needs no more updates.
        members = unfinished(report, counts, limits) & report.finite
        # Every device must decide alike, because the loop holds collectives; the devices of a member agree already.
        any_member = lax.pmax(jnp.any(members).astype(jnp.int32), POPULATION_AXIS) > 0
        return any_member & (jnp.max(report.updates) < report.max_updates[0])

    _, metrics, episodes = jax.eval_shape(update, state)
    report = _empty_report(state, metrics, episodes, limits)
    state, report, _ = lax.while_loop(
        lambda carry: carry[2], body, (state, report, goes_on(report, state.replay_state.counts))
    )
    return state, lax.all_gather(report, POPULATION_AXIS, tiled=True)


def _empty_report(state: RunState, metrics: Metrics, episodes: EpisodeStats, limits: Limits) -> Report:
    """Makes the report of no update, from the shapes of metrics and episodes."""
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)  # noqa: E731
    members = state.env_steps.low.shape
    # The votes of all devices; the least one counts.
    return Report(
        zeros(metrics),
        zeros(episodes),
        jnp.zeros(members, jnp.int32),
        state.learner.num_updates,
        state.env_steps,
        jnp.ones(members, bool),
        jnp.full(members, lax.pmin(limits.max_updates[0, 0], (POPULATION_AXIS, DATA_AXIS))),
    )


def update_member(
    update_shard: UpdateShardFn, member: Member, counts: Counts, progress: jax.Array
) -> tuple[Member, Counts, Metrics, EpisodeStats, Trajectory | tuple[()]]:
    """Does one iteration for the shards of a member on one device, actors [S / devices, ...].

    Returns:
      The member and the counts after it, metrics, episodes, and the trajectories [S / devices, T, B, ...].
    """

    def update(actors: Actors, ring: ArrayTree) -> ShardResults:
        return update_shard(member.learner, actors, ring, counts, progress)

    (actors, ring, trajectory), shared = collectives.over_shards(update, member.actors, member.ring)
    state, counts, metrics, episodes, transitions = shared
    return Member(state, actors, member.env_steps.add(transitions), ring), counts, metrics, episodes, trajectory


def _update_members(update_shard: UpdateShardFn, limits: Limits) -> UpdateFn:
    """Makes one iteration for all members and shards of a device."""

    def update_one(member: Member, counts: Counts) -> tuple[Member, Counts, Metrics, EpisodeStats]:
        # The share of the run that is done, for schedules.
        progress = jnp.minimum(member.env_steps.to_float() / limits.total_steps.to_float(), 1.0)
        return update_member(update_shard, member, counts, progress)[:-1]

    def update(state: RunState) -> tuple[RunState, Metrics, EpisodeStats]:
        member, counts = Member.from_state(state), state.replay_state.counts
        if jax.tree.leaves(state.env_steps)[0].shape[0] == 1:
            # A batch dimension of one costs a transposed layout here and there; a single run does without.
            member, counts, *numbers = update_one(jax.tree.map(lambda x: x[0], member), counts)
            member, numbers = jax.tree.map(lambda x: x[None], (member, numbers))
        else:
            # All members have the same counts, so all take the same branches.
            member, counts, *numbers = jax.vmap(update_one, in_axes=(0, None), out_axes=(0, None, 0, 0))(member, counts)
        return member.to_state(counts), *numbers  # type: ignore[return-value]

    return update


class ShardUpdates(NamedTuple):
    """The two iterations of the loop, each an `UpdateShardFn`.

    Attributes:
      agent: the agent.
      environment: the environment.
      settings: of rollouts.
      learning: the agent's learner.
    """

    agent: Agent
    environment: Environment
    settings: RolloutSettings
    learning: learner.Learner

    def act(
        self, state: LearnerState, actors: Actors, progress: jax.Array
    ) -> tuple[Actors, Trajectory, EpisodeStats, jax.Array, jax.Array]:
        """Acts for T steps.

        Returns:
          The actors with a new key, the trajectory, the episodes and the number of transitions of this shard, and a key
          to learn with.
        """
        # All keys of an update at once: on CPU every split is a loop of its own, whatever its size.
        keys = jax.random.split(actors.key, 4 + self.settings.rollout_length)
        key, learn_key, rollout_keys = keys[0], keys[1], keys[2:]
        actors, trajectory, episodes = rollout(
            self.agent, self.environment, self.settings, state, actors, progress, rollout_keys
        )
        # A transition into a `first` row is a reset, not a step.
        transitions = jnp.sum((~trajectory.timesteps.first[1:]).astype(jnp.int32))
        return actors._replace(key=key), trajectory, episodes, transitions, learn_key

    def update(
        self, state: LearnerState, actors: Actors, ring: ArrayTree, counts: Counts, progress: jax.Array
    ) -> ShardResults:
        """Acts for T steps and learns."""
        # Act: T steps of every lane.
        actors, trajectory, episodes, transitions, learn_key = self.act(state, actors, progress)
        if self.settings.lockstep:
            # As where actors and learners run side by side: learning from earlier rollouts, then adding the newest.
            state, counts, ring, metrics = self._run_pending(
                state, counts, ring, counts.pending_updates, progress, learn_key
            )
            assert self.learning.steps is not None
            counts, ring, rollout_metrics = self.learning.steps.add(counts, ring, trajectory, 0)
            metrics |= rollout_metrics
        else:
            # Learn from the rollout at once, or add it to the replay and do the updates that are due.
            state, counts, ring, metrics = self.learning.learn(state, counts, ring, trajectory, 0, progress, learn_key)
        sums = collectives.global_sum((episodes, transitions))
        return (actors, ring, trajectory), (state, counts, metrics, *sums)

    def finish(
        self, state: LearnerState, actors: Actors, ring: ArrayTree, counts: Counts, progress: jax.Array
    ) -> ShardResults:
        """Does one draw of pending updates without acting."""
        keys = jax.random.split(actors.key, 2 + self.settings.rollout_length)
        # No episodes, in the shapes that a rollout gives.
        act = lambda: rollout(self.agent, self.environment, self.settings, state, actors, progress, keys)[2]  # noqa: E731
        episodes = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(act))
        key = jax.random.fold_in(actors.key, 0)  # updates fold their own number into it
        state, counts, ring, metrics = self._run_pending(state, counts, ring, 1, progress, key)
        return (actors, ring, ()), (state, counts, metrics, episodes, jnp.int32(0))

    def _run_pending(self, *arguments: Any) -> tuple[LearnerState, Counts, ArrayTree, Metrics]:
        assert self.learning.steps is not None
        assert self.learning.steps.run_pending_updates is not None
        return self.learning.steps.run_pending_updates(*arguments)
