"""Anakin's one program: act, step, learn, fused (Hessel et al. 2021, "Online learning with Anakin").

    shard_map over devices                      a mesh of (population, data)
      while updates are wanted                  one loop, whatever the number of calls
        vmap over the population members of a device
          vmap over the logical shards of a device
            scan over T steps: act, then step every lane
            learn: gradients reduced over shards and devices

The state is donated. `Limits` says when a call stops. Splitting a run into other calls changes neither the result nor
the compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from podracer import spaces, topology
from podracer.anakin.call import Limits, Report
from podracer.anakin.rollout import Actors, Settings, rollout
from podracer.environments import autoreset
from podracer.learning import learner
from podracer.learning.counter import Counter
from podracer.learning.learner import ReplayState
from podracer.learning.replay_steps import Counts, add_metrics
from podracer.run.driver import RunState, run_keys
from podracer.topology import DATA_AXIS, POPULATION_AXIS, Topology, collectives
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


class StepFn(Protocol):
    """Does updates until a limit, and donates the state; jitted, and compiled ahead of time."""

    def __call__(self, state: RunState, limits: Limits, /) -> tuple[RunState, Report]: ...

    def lower(self, state: RunState, limits: Limits, /) -> jax.stages.Lowered: ...


class Program(NamedTuple):
    """The compiled functions of a run.

    Attributes:
      init: `(seeds int32 [P], hyper {name: [P]}) -> RunState`, placed on the mesh.
      like: the shapes, dtypes and shardings of a `RunState`, for restoring one without making one.
      step: does updates. The report is whole on every device.
      finish: the same, of pending updates alone (see `Counts.pending_updates`), until there are none or `max_updates`
        draws are done; None where there cannot be any.
      limits: `(until, total_steps, max_updates) -> Limits` of ints; the votes are those of this process's devices.
      like_limits: the shapes, dtypes and shardings of `Limits`, for compiling.
    """

    init: Callable[[jax.Array, dict[str, jax.Array]], RunState]
    like: Callable[[], RunState]
    step: StepFn
    finish: StepFn | None
    limits: Callable[[int, int, int], Limits]
    like_limits: Callable[[], Limits]


def make(agent: Agent, environment: Environment, layout: Topology, settings: Settings) -> Program:
    """Builds the program of a run; nothing is compiled before the first call."""
    population, shards = layout.population, layout.num_shards
    observation = spaces.zeros(environment.spec.observation_space)
    learning = learner.make(agent, observation, lanes=layout.envs_per_shard, groups=1, num_shards=shards)
    if settings.lockstep and not learning.defers_updates:
        raise ValueError(f"mode='lockstep': {agent.name} has no updates that could wait in Anakin; use mode='async'.")
    state_specs = _by_part(PartitionSpec)

    def init_member(seed: jax.Array, hyper: dict[str, jax.Array], own: jax.Array) -> Member:
        learner_key, actor_key, _ = run_keys(seed)
        state = agent.init(learner_key, hyper)
        actors = jax.vmap(lambda shard: _init_actors(agent, environment, layout, actor_key, shard))(own)
        return Member(state, actors, Counter.of(0), ())

    def rings(member: Member) -> ArrayTree:
        """Computes the shapes of all members' rings, from those of one member."""
        trajectory = lambda m: _trajectory(agent, environment, settings, m.learner, m.actors)  # noqa: E731
        ring = jax.eval_shape(lambda m: learning.ring(trajectory(m)), member)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((population, shards, *x.shape), x.dtype), ring)

    def members(seeds: jax.Array, hyper: dict[str, jax.Array], own: jax.Array) -> RunState:
        """Makes the state of some members and shards, without the ring."""
        if seeds.shape[0] == 1:
            member = init_member(seeds[0], {name: value[0] for name, value in hyper.items()}, own)
            return jax.tree.map(lambda x: x[None], member).to_state(learning.counts())
        return jax.vmap(lambda seed, hyper: init_member(seed, hyper, own))(seeds, hyper).to_state(learning.counts())

    @topology.compiling_for(layout.platform)
    def init(seeds: jax.Array, hyper: dict[str, jax.Array]) -> RunState:
        """Makes the state on its devices: each makes its own shards, and all make the same learner."""
        own = shards // layout.mesh.shape[DATA_AXIS]
        first = own * lax.axis_index(DATA_AXIS)
        return members(seeds, hyper, first + jnp.arange(own, dtype=jnp.int32))

    @topology.compiling_for(layout.platform)
    def step(state: RunState, limits: Limits) -> tuple[RunState, Report]:
        def unfinished(report: Report, counts: Counts) -> jax.Array:
            return report.env_steps.less_than(jax.tree.map(lambda x: x[None], limits.until))

        return _run(functools.partial(_update_shard, agent, environment, settings, learning), unfinished, state, limits)

    @topology.compiling_for(layout.platform)
    def finish(state: RunState, limits: Limits) -> tuple[RunState, Report]:
        def unfinished(report: Report, counts: Counts) -> jax.Array:
            return jnp.broadcast_to(counts.pending_updates > 0, report.finite.shape)

        return _run(functools.partial(_finish_shard, agent, environment, settings, learning), unfinished, state, limits)

    replicated: Any = PartitionSpec()
    votes_spec: Any = PartitionSpec(POPULATION_AXIS, DATA_AXIS)
    limits_specs = Limits(replicated, replicated, votes_spec)

    def mapped(function: Callable[..., Any]) -> Any:
        return jax.shard_map(
            function,
            mesh=layout.mesh,
            in_specs=(state_specs, limits_specs),
            out_specs=(state_specs, replicated),
            # Gradients are reduced by hand (collectives); with the check on, JAX would add a second reduction.
            check_vma=False,
        )

    by_member = PartitionSpec(POPULATION_AXIS)
    mapped_init = jax.shard_map(
        init,
        mesh=layout.mesh,
        in_specs=(by_member, by_member),
        out_specs=state_specs._replace(replay_state=ReplayState(replicated, ())),
        check_vma=False,
    )
    init_jit = jax.jit(mapped_init, compiler_options=topology.quick_to_compile(layout.platform))

    def start(seeds: jax.Array, hyper: dict[str, jax.Array]) -> RunState:
        state, ring = init_jit(seeds, hyper), like().replay_state.ring
        empty = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), ring)  # noqa: E731
        # Made with its sharding: a single device might not hold all of it.
        make_ring = jax.jit(empty, out_shardings=layout.sharding(POPULATION_AXIS, DATA_AXIS))
        return state._replace(replay_state=state.replay_state._replace(ring=make_ring()))

    @functools.cache  # because it traces a rollout
    def like() -> RunState:
        hyper = {name: jnp.zeros(population) for name in agent.hyper}
        state = jax.eval_shape(init_jit, jnp.zeros(population, jnp.int32), hyper)
        one = jax.eval_shape(lambda state: jax.tree.map(lambda x: x[0], Member.from_state(state)), state)
        state = state._replace(replay_state=state.replay_state._replace(ring=rings(one)))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            state,
            _broadcast(_shardings(layout), state),
        )

    votes = layout.sharding(POPULATION_AXIS, DATA_AXIS)

    def limits(until: int, total_steps: int, max_updates: int) -> Limits:
        vote = np.full(layout.mesh.devices.shape, max_updates, np.int32)
        local_votes = jax.make_array_from_callback(vote.shape, votes, vote.__getitem__)
        return Limits(Counter.of(until), Counter.of(total_steps), local_votes)

    def like_limits() -> Limits:
        counter = jax.eval_shape(lambda: Counter.of(0))
        like_votes: Any = jax.ShapeDtypeStruct(layout.mesh.devices.shape, jnp.int32, sharding=votes)
        return Limits(counter, counter, like_votes)

    options = topology.compiler_options(layout.platform)
    jitted = lambda function: jax.jit(mapped(function), donate_argnums=0, compiler_options=options)  # noqa: E731
    return Program(start, like, jitted(step), jitted(finish) if learning.defers_updates else None, limits, like_limits)


def _by_part(place: Callable[..., Any]) -> RunState:
    """Calls `place(*axes)` with the mesh axes of every part of a state."""
    by_member, by_shard = place(POPULATION_AXIS), place(POPULATION_AXIS, DATA_AXIS)
    return RunState(by_member, by_shard, by_member, ReplayState(place(), by_shard))


def _shardings(layout: Topology) -> RunState:
    return _by_part(layout.sharding)


def _broadcast(prefix: RunState, state: RunState) -> RunState:
    """Broadcasts a tree prefix of shardings to one sharding per leaf of `state`."""
    broadcast = lambda s, part: jax.tree.map(lambda _: s, part)  # noqa: E731
    counts, ring = (broadcast(s, part) for s, part in zip(prefix.replay_state[:2], state.replay_state))
    learner, actors, env_steps = (broadcast(s, part) for s, part in zip(prefix[:3], state[:3]))
    return RunState(learner, actors, env_steps, ReplayState(counts, ring))


def _init_actors(agent: Agent, environment: Environment, layout: Topology, key: jax.Array, shard: jax.Array) -> Actors:
    # Keys and lane ids belong to a shard, so that results do not depend on the number of devices.
    B = layout.envs_per_shard
    reset_key, key = jax.random.split(jax.random.fold_in(key, shard))
    lane = shard * B + jnp.arange(B, dtype=jnp.int32)
    lanes = jax.vmap(lambda k: autoreset.reset(environment, k))(jax.random.split(reset_key, B))
    return Actors(lanes, agent.start(lane, layout.num_envs), lane, key)


def _run(
    update_shard: Callable[..., Any],
    unfinished: Callable[[Report, Counts], jax.Array],
    state: RunState,
    limits: Limits,
) -> tuple[RunState, Report]:
    """Runs the loop over updates on one device: state [P / devices, ...], actors [P / devices, S / devices, ...].

    Args:
      update_shard: one iteration for one shard, such as `_update_shard`.
      unfinished: `(Report, Counts) -> bool [P / devices]`; True for a member that needs another update.
      state: consumed.
      limits: limits of the call.
    """

    def update_member(member: Member, counts: Counts) -> tuple[Member, Counts, Metrics, EpisodeStats]:
        # The share of the run that is done, for schedules.
        progress = jnp.minimum(member.env_steps.to_float() / limits.total_steps.to_float(), 1.0)

        def update(actors: Actors, ring: ArrayTree) -> Any:
            return update_shard(member.learner, actors, ring, counts, progress)

        # Learning reduces its results over shards, so they have no shard axis: out_axes=None refuses anything else.
        (actors, ring), (state, new_counts, metrics, episodes, transitions) = jax.vmap(
            update, axis_name="shard", out_axes=(0, None)
        )(member.actors, member.ring)
        return Member(state, actors, member.env_steps.add(transitions), ring), new_counts, metrics, episodes

    @jax.jit  # traced once, for the shapes of the metrics and for the loop
    def update(state: RunState) -> tuple[RunState, Metrics, EpisodeStats]:
        member, counts = Member.from_state(state), state.replay_state.counts
        if jax.tree.leaves(state.env_steps)[0].shape[0] == 1:
            # A batch dimension of one costs a transposed layout here and there; a single run does without.
            member, counts, *numbers = update_member(jax.tree.map(lambda x: x[0], member), counts)
            member, numbers = jax.tree.map(lambda x: x[None], (member, numbers))
        else:
            # All members have the same counts, so all take the same branches.
            member, counts, *numbers = jax.vmap(update_member, in_axes=(0, None), out_axes=(0, None, 0, 0))(
                member, counts
            )
        return member.to_state(counts), *numbers  # type: ignore[return-value]

    def body(carry: Any) -> Any:
        state, report, _ = carry
        state, metrics, episodes = update(state)
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
        members = unfinished(report, counts) & report.finite
        # Every device must decide alike, because the loop holds collectives; the devices of a member agree already.
        any_member = lax.pmax(jnp.any(members).astype(jnp.int32), POPULATION_AXIS) > 0
        return any_member & (jnp.max(report.updates) < report.max_updates[0])

    _, metrics, episodes = jax.eval_shape(update, state)
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)  # noqa: E731
    members = state.env_steps.low.shape
    # The votes of all devices; the least one counts.
    empty_report = Report(
        zeros(metrics),
        zeros(episodes),
        jnp.zeros(members, jnp.int32),
        state.learner.num_updates,
        state.env_steps,
        jnp.ones(members, bool),
        jnp.full(members, lax.pmin(limits.max_updates[0, 0], (POPULATION_AXIS, DATA_AXIS))),
    )
    state, report, _ = lax.while_loop(
        lambda carry: carry[2], body, (state, empty_report, goes_on(empty_report, state.replay_state.counts))
    )
    return state, lax.all_gather(report, POPULATION_AXIS, tiled=True)


def _update_shard(
    agent: Agent,
    environment: Environment,
    settings: Settings,
    learning: learner.Learner,
    state: LearnerState,
    actors: Actors,
    ring: ArrayTree,
    counts: Counts,
    progress: jax.Array,
) -> tuple[tuple[Actors, ArrayTree], tuple[LearnerState, Counts, Metrics, EpisodeStats, jax.Array]]:
    """Acts for T steps and learns; returns a part of this shard, actors and ring, and a part that all shards share."""
    # All keys of an update at once: on CPU every split is a loop of its own, whatever its size.
    keys = jax.random.split(actors.key, 4 + settings.rollout_length)
    key, learn_key, rollout_keys = keys[0], keys[1], keys[2:]
    actors, trajectory, episodes = rollout(agent, environment, settings, state, actors, progress, rollout_keys)
    if settings.lockstep:
        assert learning.steps is not None
        assert learning.steps.run_pending_updates is not None
        # As where actors and learners run side by side: learning from earlier rollouts only, then adding the newest.
        state, counts, ring, metrics = learning.steps.run_pending_updates(
            state, counts, ring, counts.pending_updates, progress, learn_key
        )
        counts, ring, call = learning.steps.add(counts, ring, trajectory, 0)
        metrics |= call
    else:
        state, counts, ring, metrics = learning.learn(state, counts, ring, trajectory, 0, progress, learn_key)
    # A transition into a `first` row is a reset, not a step.
    transitions = jnp.sum((~trajectory.timesteps.first[1:]).astype(jnp.int32))
    sums = collectives.global_sum((episodes, transitions))
    return (actors._replace(key=key), ring), (state, counts, metrics, *sums)


def _finish_shard(
    agent: Agent,
    environment: Environment,
    settings: Settings,
    learning: learner.Learner,
    state: LearnerState,
    actors: Actors,
    ring: ArrayTree,
    counts: Counts,
    progress: jax.Array,
) -> tuple[tuple[Actors, ArrayTree], tuple[LearnerState, Counts, Metrics, EpisodeStats, jax.Array]]:
    """Does one draw of pending updates without acting; returns what `_update_shard` does."""
    assert learning.steps is not None
    assert learning.steps.run_pending_updates is not None
    keys = jax.random.split(actors.key, 2 + settings.rollout_length)
    # No episodes, in the shapes that a rollout gives.
    act = lambda: rollout(agent, environment, settings, state, actors, progress, keys)[2]  # noqa: E731
    episodes = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(act))
    key = jax.random.fold_in(actors.key, 0)  # updates fold their own number into it
    state, counts, ring, metrics = learning.steps.run_pending_updates(state, counts, ring, 1, progress, key)
    return (actors, ring), (state, counts, metrics, episodes, jnp.int32(0))


def _trajectory(
    agent: Agent, environment: Environment, settings: Settings, state: LearnerState, actors: Actors
) -> Trajectory:
    """Acts a rollout of the first shard, for its shapes."""
    actors = jax.tree.map(lambda x: x[0], actors)
    keys = jax.random.split(actors.key, 2 + settings.rollout_length)
    return rollout(agent, environment, settings, state, actors, jnp.float32(0), keys)[1]
