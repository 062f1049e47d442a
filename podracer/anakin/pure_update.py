"""One update as a pure function: act, step and learn, to differentiate through and to compose in a loop of one's own.

update = podracer.anakin.update(agent, environment, num_envs=64)
member = update.init(seed=0)
member, trajectory, report = jax.jit(update.step)(member, progress)

The program of a run does the same updates, bit by bit, in a loop whose length is known only while it runs; a gradient
cannot pass such a loop backwards (Hessel et al. 2021, section 3, differentiates through an update as here). Take
`jax.grad` of a function that calls `step`, outside of which nothing is mapped over devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from podracer import spaces, topology, trajectories
from podracer.anakin.loop import Member, ShardUpdates, update_member
from podracer.anakin.rollout import Actors, RolloutSettings
from podracer.environments import autoreset, tasks
from podracer.learning import learner
from podracer.learning.counter import Counter
from podracer.run.driver import run_keys
from podracer.topology import DATA_AXIS, Topology, collectives
from podracer.types import Agent, ArrayTree, Environment, EpisodeStats, LearnerState, Metrics, Trajectory


class StepReport(NamedTuple):
    """The numbers of one update.

    Attributes:
      metrics: of learning, float32 [].
      episodes: sums over the episodes that ended.
    """

    metrics: Metrics
    episodes: EpisodeStats


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The pure functions of one member; neither jitted nor donating. `update` makes it.

    A population is `jax.vmap` of them.

    Attributes:
      shard: the iteration of one shard.
      layout: the shards and devices.
      on_mesh: True spreads shards over the devices of `layout`; else all are where JAX puts them.
      remat: True has a backward pass compute a step's activations again instead of keeping them.
    """

    shard: ShardUpdates
    layout: Topology
    on_mesh: bool
    remat: bool

    def init(
        self,
        seed: jax.Array | int,
        hyper: Mapping[str, jax.Array | float] | None = None,
        parameters: ArrayTree = None,
    ) -> Member:
        """Makes a member before its first update.

        Args:
          seed: int32 [].
          hyper: tunable numbers, float32 [], by name; the agent's defaults for those that are left out.
          parameters: of the environment, such as its `parameters(key)` draws; None for its own. `step` and `rollout`
            need the same.

        Raises:
          ValueError: for a number that the agent does not have, or parameters that the environment does not take.
        """
        agent, environment = self.shard.agent, self._shard(parameters).environment
        numbers = self._with_numbers({name: jnp.float32(x) for name, x in agent.hyper.items()}, hyper)
        shards = jnp.arange(self.layout.num_shards, dtype=jnp.int32)
        return init_member(agent, environment, self.layout, jnp.asarray(seed, jnp.int32), numbers, shards)

    def step(
        self,
        member: Member,
        progress: jax.Array | float,
        hyper: Mapping[str, jax.Array | float] | None = None,
        parameters: ArrayTree = None,
    ) -> tuple[Member, Trajectory, StepReport]:
        """Does one update: T steps of every lane, then learning from them.

        Args:
          member: of `init`, or the last step's.
          progress: float32 []; the share of the run that is done, for schedules.
          hyper: tunable numbers for this update alone, by name; the member's for those that are left out.
          parameters: as in `init`.

        Returns:
          The member after it, the trajectory [T, num_envs], and the update's numbers.

        Raises:
          ValueError: as in `init`, and for a learning rate where the agent's `target_kl` sets it.
        """
        target_kl = getattr(self.shard.agent.config, "target_kl", None)
        if target_kl is not None and "learning_rate" in (hyper or {}):
            raise ValueError(
                f"hyper has learning_rate, which target_kl={target_kl} sets in every update; use target_kl=None, or "
                "give the first one to init."
            )
        # Meta-gradients pass through `hyper` (Xu et al. 2018): it replaces the member's numbers for this update.
        own = member.learner.hyper
        member = member._replace(learner=member.learner._replace(hyper=self._with_numbers(own, hyper)))
        function = jax.checkpoint(self._step) if self.remat else self._step
        member, trajectory, report = function(member, jnp.asarray(progress, jnp.float32), parameters)
        return member._replace(learner=member.learner._replace(hyper=own)), trajectory, report

    def rollout(
        self, member: Member, progress: jax.Array | float, parameters: ArrayTree = None
    ) -> tuple[Member, Trajectory, EpisodeStats]:
        """Acts for T steps without learning; the trajectory is the one that `step` would learn from.

        Args:
          member: as in `step`.
          progress: as in `step`.
          parameters: as in `init`.

        Returns:
          The member after it, the trajectory [T, num_envs], and sums over the episodes that ended.
        """
        return self._on_devices(self._rollout)(member, jnp.asarray(progress, jnp.float32), parameters)

    def _step(
        self, member: Member, progress: jax.Array, parameters: ArrayTree
    ) -> tuple[Member, Trajectory, StepReport]:
        def step(member: Member, progress: jax.Array, parameters: ArrayTree) -> Any:
            shard, counts = self._shard(parameters), self.shard.learning.counts()
            member, _, metrics, episodes, trajectory = update_member(shard.update, member, counts, progress)
            assert isinstance(trajectory, Trajectory)
            return member, trajectories.join_lanes(trajectory), StepReport(metrics, episodes)

        return self._on_devices(step)(member, progress, parameters)

    def _rollout(
        self, member: Member, progress: jax.Array, parameters: ArrayTree
    ) -> tuple[Member, Trajectory, EpisodeStats]:
        shard = self._shard(parameters)

        def act(actors: Actors) -> Any:
            actors, trajectory, episodes, transitions, _ = shard.act(member.learner, actors, progress)
            return (actors, trajectory), collectives.global_sum((episodes, transitions))

        # The sums are over all shards, so that no shard has an axis of its own in them.
        (actors, trajectory), (episodes, transitions) = collectives.over_shards(act, member.actors)
        member = member._replace(actors=actors, env_steps=member.env_steps.add(transitions))
        return member, trajectories.join_lanes(trajectory), episodes

    def _on_devices(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Runs `(member, progress, parameters) -> (member, trajectory, numbers)` of a device on all of them."""
        function = topology.compiling_for(self.layout.platform)(function)
        if not self.on_mesh:
            # Nothing is mapped: the axis only has its name, and no dim of size one.
            return jax.vmap(function, in_axes=None, out_axes=None, axis_name=DATA_AXIS, axis_size=1)
        whole: Any = PartitionSpec()
        member: Any = Member(whole, PartitionSpec(DATA_AXIS), whole, whole)  # type: ignore[arg-type]
        rows, lanes = PartitionSpec(None, DATA_AXIS), PartitionSpec(DATA_AXIS)
        trajectory: Any = Trajectory(rows, rows, rows, lanes, rows, lanes)  # type: ignore[arg-type]
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=(member, whole, whole),
            out_specs=(member, trajectory, whole),
            check_vma=False,  # as in the program: gradients are reduced by hand
        )

    def _shard(self, parameters: ArrayTree) -> ShardUpdates:
        """The iteration of one shard in the environment with its parameters."""
        environment: Any = self.shard.environment
        if parameters is None:
            return self.shard
        if not hasattr(environment, "with_parameters"):
            raise ValueError(f"parameters: {environment.spec.name} takes none (`with_parameters`); leave them out.")
        return self.shard._replace(environment=environment.with_parameters(parameters))

    def _with_numbers(
        self, numbers: Mapping[str, jax.Array], others: Mapping[str, jax.Array | float] | None
    ) -> dict[str, jax.Array]:
        if unknown := sorted(set(others or ()) - set(numbers)):
            raise ValueError(
                f"hyper has {', '.join(unknown)}: the tunable numbers of {self.shard.agent.name} are "
                f"{', '.join(sorted(numbers))}."
            )
        return {**numbers, **{name: jnp.asarray(x, jnp.float32) for name, x in (others or {}).items()}}


def update(
    agent: Agent,
    environment: Environment,
    *,
    num_envs: int = 64,
    num_shards: int = 1,
    devices: Sequence[Any] | None = None,
    remat: bool = False,
) -> Update:
    """Makes the pure functions of one update.

    Args:
      agent: without replay.
      environment: the environment.
      num_envs: lanes over all shards.
      num_shards: S, logical shards; a multiple of the devices.
      devices: to spread shards over; None leaves all of them where JAX puts them, also under `jax.vmap` and `jax.jit`
        with shardings.
      remat: True keeps only the states between steps for a backward pass, and computes each step again: memory falls to
        one step's activations, and time grows by a forward pass.

    Raises:
      ValueError: for an agent with replay, and for shards that do not fit the lanes, the devices or the tasks.
    """
    if agent.replay is not None:
        raise ValueError(
            f"agent={agent.name!r} has a replay, whose number of updates is known only while the program runs, and no "
            "gradient passes that; use an agent that learns from every rollout once, such as ppo, pqn, or vtrace with "
            "replay_fraction=0."
        )
    used = jax.local_devices()[:1] if devices is None else devices
    layout = topology.make(num_envs=num_envs, envs_per_device=num_envs, num_shards=num_shards, devices=used)
    tasks.check_lanes(environment.spec, layout.num_envs, layout.envs_per_shard, "a shard")
    observation = spaces.zeros(environment.spec.observation_space)
    learning = learner.make(agent, observation, lanes=layout.envs_per_shard, groups=1, num_shards=num_shards)
    settings = RolloutSettings(agent.config.rollout_length)
    shard = ShardUpdates(agent, environment, settings, learning)
    return Update(shard, layout, devices is not None, remat)


def init_member(
    agent: Agent,
    environment: Environment,
    layout: Topology,
    seed: jax.Array,
    hyper: Mapping[str, jax.Array],
    shards: jax.Array,
) -> Member:
    """Makes a member before its first update, without a ring.

    Args:
      agent: the agent.
      environment: the environment.
      layout: the lanes of all shards.
      seed: int32 [].
      hyper: the tunable numbers, float32 [].
      shards: int32 [n]; the shards to make actors of.
    """
    learner_key, actor_key, _ = run_keys(seed)
    state: LearnerState = agent.init(learner_key, hyper)
    B = layout.envs_per_shard

    def actors_of(shard: jax.Array) -> Actors:
        # Keys and lane ids belong to a shard, so that results do not depend on the number of devices.
        reset_key, key = jax.random.split(jax.random.fold_in(actor_key, shard))
        lane = shard * B + jnp.arange(B, dtype=jnp.int32)
        lanes = autoreset.reset_lanes(environment, jax.random.split(reset_key, B))
        return Actors(lanes, agent.start(lane, layout.num_envs), lane, key)

    no_ring: ArrayTree = ()
    return Member(state, jax.vmap(actors_of)(shards), Counter.of(0), no_ring)
