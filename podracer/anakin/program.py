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
from podracer.anakin.loop import Member, ShardUpdates, UnfinishedFn, UpdateShardFn, run
from podracer.anakin.pure_update import init_member
from podracer.anakin.rollout import RolloutSettings, rollout
from podracer.learning import learner
from podracer.learning.counter import Counter
from podracer.learning.learner import ReplayState
from podracer.learning.replay_steps import Counts
from podracer.population.evolution import Evolution
from podracer.run.driver import RunState
from podracer.topology import DATA_AXIS, POPULATION_AXIS, Topology, ahead
from podracer.types import Agent, ArrayTree, Environment, EpisodeStats, Trajectory


class StepFn(Protocol):
    """Does updates until a limit, and donates the state; jitted, and compiled ahead of time."""

    def __call__(self, state: RunState, limits: Limits, /) -> tuple[RunState, Report]: ...

    def lower(self, state: RunState, limits: Limits, /) -> jax.stages.Lowered: ...


class InitFn(Protocol):
    """Makes the first state of a run."""

    def __call__(self, seeds: jax.Array, hyper: dict[str, jax.Array], /) -> RunState:
        """Makes it on the mesh, from seeds int32 [P] and tunable numbers {name: [P]}."""
        ...


class LimitsFn(Protocol):
    """Makes the limits of a call."""

    def __call__(self, until: int, total_steps: int, max_updates: int, /) -> Limits:
        """Makes them; the votes are those of this process's devices."""
        ...


class Program(NamedTuple):
    """The compiled functions of a run.

    Attributes:
      init: makes the first state.
      like: the shapes, dtypes and shardings of a `RunState`, for restoring one without making one.
      step: does updates. The report is whole on every device.
      finish: the same, of pending updates alone (see `Counts.pending_updates`), until there are none or `max_updates`
        draws are done; None where there cannot be any.
      limits: makes the limits of a call.
      like_limits: the shapes, dtypes and shardings of `Limits`, for compiling.
    """

    init: InitFn
    like: Callable[[], RunState]
    step: StepFn
    finish: StepFn | None
    limits: LimitsFn
    like_limits: Callable[[], Limits]


def make(agent: Agent, environment: Environment, layout: Topology, settings: RolloutSettings) -> Program:
    """Builds the program of a run; nothing is compiled before the first call."""
    observation = spaces.zeros(environment.spec.observation_space)
    learning = learner.make(agent, observation, lanes=layout.envs_per_shard, groups=1, num_shards=layout.num_shards)
    if settings.lockstep and not learning.defers_updates:
        raise ValueError(f"mode='lockstep': {agent.name} has no updates that could wait in Anakin; use mode='async'.")
    searches = hasattr(agent.config, "simulations")
    shard = ShardUpdates(agent, environment, settings, learning)
    states = _States(agent, environment, layout, settings, learning)
    return Program(
        states.init,
        states.like,
        _on_mesh(layout, shard.update, _until_steps, searches),
        _on_mesh(layout, shard.finish, _until_nothing_pending, searches) if learning.defers_updates else None,
        functools.partial(_limits, layout),
        functools.partial(_like_limits, layout),
    )


def _until_steps(report: Report, counts: Counts, limits: Limits) -> jax.Array:
    return report.env_steps.less_than(jax.tree.map(lambda x: x[None], limits.until))


def _until_nothing_pending(report: Report, counts: Counts, limits: Limits) -> jax.Array:
    return jnp.broadcast_to(counts.pending_updates > 0, report.finite.shape)


def _on_mesh(layout: Topology, update_shard: UpdateShardFn, unfinished: UnfinishedFn, searches: bool) -> StepFn:
    """Makes a jitted loop over updates on the devices of a mesh (see `podracer.anakin.loop.run`)."""
    replicated: Any = PartitionSpec()
    votes: Any = PartitionSpec(POPULATION_AXIS, DATA_AXIS)
    state_specs = _by_part(PartitionSpec)

    @topology.compiling_for(layout.platform)
    def step(state: RunState, limits: Limits) -> tuple[RunState, Report]:
        return run(update_shard, unfinished, state, limits)

    mapped = jax.shard_map(
        step,
        mesh=layout.mesh,
        in_specs=(state_specs, Limits(replicated, replicated, votes)),
        out_specs=(state_specs, replicated),
        # Gradients are reduced by hand (collectives); with the check on, JAX would add a second reduction.
        check_vma=False,
    )
    options = topology.compiler_options(layout.platform, searches)
    return jax.jit(mapped, donate_argnums=0, compiler_options=options)  # type: ignore[return-value]


def _limits(layout: Topology, until: int, total_steps: int, max_updates: int) -> Limits:
    vote = np.full(layout.mesh.devices.shape, max_updates, np.int32)
    votes = layout.sharding(POPULATION_AXIS, DATA_AXIS)
    local_votes = jax.make_array_from_callback(vote.shape, votes, vote.__getitem__)
    return Limits(Counter.of(until), Counter.of(total_steps), local_votes)


def _like_limits(layout: Topology) -> Limits:
    counter = jax.eval_shape(lambda: Counter.of(0))
    votes = layout.sharding(POPULATION_AXIS, DATA_AXIS)
    like_votes: Any = jax.ShapeDtypeStruct(layout.mesh.devices.shape, jnp.int32, sharding=votes)
    return Limits(counter, counter, like_votes)


class _States:
    """Makes the first state of a run on its devices.

    Args:
      agent: the agent.
      environment: the environment.
      layout: the mesh and the shards.
      settings: of rollouts.
      learning: the agent's learner.
    """

    def __init__(
        self,
        agent: Agent,
        environment: Environment,
        layout: Topology,
        settings: RolloutSettings,
        learning: learner.Learner,
    ):
        self._agent, self._environment, self._layout = agent, environment, layout
        self._settings, self._learning = settings, learning
        by_member = PartitionSpec(POPULATION_AXIS)
        no_ring: Any = ReplayState(PartitionSpec(), ())  # type: ignore[arg-type]
        mapped = jax.shard_map(
            topology.compiling_for(layout.platform)(self._init_on_device),
            mesh=layout.mesh,
            in_specs=(by_member, by_member),
            out_specs=_by_part(PartitionSpec)._replace(replay_state=no_ring),
            check_vma=False,
        )
        self._init_without_ring = jax.jit(mapped, compiler_options=topology.quick_to_compile(layout.platform))
        self._make_state = ahead.Program("init", self._init_without_ring)
        self.like = functools.cache(self._like)  # because it traces a rollout

    def init(self, seeds: jax.Array, hyper: dict[str, jax.Array]) -> RunState:
        """See `InitFn`."""
        state, like = self._make_state(seeds, hyper), self.like()
        evolution = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), like.evolution)
        ring: ArrayTree = ()
        if self._agent.replay is not None:
            ring = self._empty_ring(like.replay_state.ring)
        return state._replace(replay_state=state.replay_state._replace(ring=ring), evolution=evolution)

    def _empty_ring(self, like: ArrayTree) -> ArrayTree:
        def empty() -> ArrayTree:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

        # Made with its sharding: a single device might not hold all of it.
        make_ring = jax.jit(empty, out_shardings=self._layout.sharding(POPULATION_AXIS, DATA_AXIS))
        return ahead.Program("ring", make_ring)()

    def _like(self) -> RunState:
        """Computes the shapes, dtypes and shardings of a state."""
        population = self._layout.population
        hyper = {name: jax.ShapeDtypeStruct((population,), jnp.float32) for name in self._agent.hyper}
        state = jax.eval_shape(self._init_without_ring, jax.ShapeDtypeStruct((population,), jnp.int32), hyper)
        one = jax.eval_shape(lambda state: jax.tree.map(lambda x: x[0], Member.from_state(state)), state)
        # The ring is made apart, for its shapes follow from a rollout, which is only traced here.
        state = state._replace(replay_state=state.replay_state._replace(ring=self._rings(one)))
        if self._settings.evolves:
            state = state._replace(evolution=self._evolution(one))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            state,
            _broadcast(_shardings(self._layout), state),
        )

    def _rings(self, member: Member) -> ArrayTree:
        """Computes the shapes of all members' rings, from those of one member."""
        if self._agent.replay is None:
            return ()
        ring = jax.eval_shape(lambda m: self._learning.ring(self._rollout(m)[0]), member)
        leading = self._layout.population, self._layout.num_shards
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*leading, *x.shape), x.dtype), ring)

    def _evolution(self, member: Member) -> Evolution:
        """Computes the shapes of the statistics of all members, from those of one member."""
        episodes = jax.eval_shape(lambda m: self._rollout(m)[1], member)
        return jax.eval_shape(lambda: Evolution.start(episodes, self._layout.population))

    def _rollout(self, member: Member) -> tuple[Trajectory, EpisodeStats]:
        """Acts a rollout of the first shard, for its shapes."""
        actors = jax.tree.map(lambda x: x[0], member.actors)
        keys = jax.random.split(actors.key, 2 + self._settings.rollout_length)
        parts = (self._agent, self._environment, self._settings, member.learner, actors)
        return rollout(*parts, jnp.float32(0), keys)[1:]

    def _init_on_device(self, seeds: jax.Array, hyper: dict[str, jax.Array]) -> RunState:
        """Makes a device's part of a state, without the ring: its own shards, and the learner that all devices make."""
        own = self._layout.num_shards // self._layout.mesh.shape[DATA_AXIS]
        shards = own * lax.axis_index(DATA_AXIS) + jnp.arange(own, dtype=jnp.int32)
        # A vmap over one member would turn its products of matrices into batched ones.
        if seeds.shape[0] == 1:
            member = self._init_member(seeds[0], {name: value[0] for name, value in hyper.items()}, shards)
            return jax.tree.map(lambda x: x[None], member).to_state(self._learning.counts())
        members = jax.vmap(lambda seed, hyper: self._init_member(seed, hyper, shards))(seeds, hyper)
        return members.to_state(self._learning.counts())

    def _init_member(self, seed: jax.Array, hyper: dict[str, jax.Array], shards: jax.Array) -> Member:
        return init_member(self._agent, self._environment, self._layout, seed, hyper, shards)


def _by_part(place: Callable[..., Any]) -> RunState:
    """Calls `place(*axes)` with the mesh axes of every part of a state."""
    by_member, by_shard = place(POPULATION_AXIS), place(POPULATION_AXIS, DATA_AXIS)
    return RunState(by_member, by_shard, by_member, ReplayState(place(), by_shard), by_member)


def _shardings(layout: Topology) -> RunState:
    return _by_part(layout.sharding)


def _broadcast(prefix: RunState, state: RunState) -> RunState:
    """Broadcasts a tree prefix of shardings to one sharding per leaf of `state`."""
    broadcast = lambda s, part: jax.tree.map(lambda _: s, part)  # noqa: E731
    counts, ring = (broadcast(s, part) for s, part in zip(prefix.replay_state[:2], state.replay_state))
    learner, actors, env_steps = (broadcast(s, part) for s, part in zip(prefix[:3], state[:3]))
    return RunState(learner, actors, env_steps, ReplayState(counts, ring), broadcast(prefix[4], state[4]))
