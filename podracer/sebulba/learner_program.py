"""The functions of Sebulba's learner: its first state, its programs, and what goes between it and the actors.

A trajectory [T, R B], of a rollout of every replica, arrives spread along its lanes. The programs, the agent's own
`learn` under `shard_map`, are those of `podracer.sebulba.learner_devices`, or of `podracer.sebulba.replay_devices` for
a replay in the hosts' memory or on devices that reanalyse. Each device runs its logical shards side by side, as in
Anakin, so equal shards give equal results on any number of learner devices.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from podracer import trajectories
from podracer.learning import learner
from podracer.learning.learner import ReplayState
from podracer.sebulba.learner_devices import OnDevices
from podracer.sebulba.programs import LearnerPrograms, Programs
from podracer.sebulba.replay_devices import SplitReplay
from podracer.sebulba.sharding import Assembly, SpreadFn
from podracer.topology import HostTopology, data_mesh, host_cpus, quick_to_compile
from podracer.trajectories import split_lanes
from podracer.types import ActorParams, Agent, ArrayTree, InitFn, LearnerState, Trajectory


class ReplayStateFn(Protocol):
    """Makes the replay state of a run."""

    def __call__(self) -> ReplayState:
        """Makes it at the beginning; its ring [S] is over the learner devices, or where the replay is kept."""
        ...


class TraceFn(Protocol):
    """Traces the programs, as `LearnerPrograms.trace`."""

    def __call__(self, state: LearnerState, replay_state: ReplayState, trajectory: Trajectory, /) -> Any:
        """Traces them for these shapes."""
        ...


class CompileFn(Protocol):
    """Compiles the programs, as `LearnerPrograms.compile`."""

    def __call__(self, state: LearnerState, replay_state: ReplayState, trajectory: Trajectory, /) -> Programs:
        """Compiles them for these shapes."""
        ...


class PublishFn(Protocol):
    """Copies parameters for actors."""

    def __call__(self, learner: LearnerState, progress: float, /) -> ActorParams:
        """Copies them from a state, whose donation they survive; `progress` is the share of the run that is done."""
        ...


class LikeFn(Protocol):
    """Computes the shapes of a trajectory on the learner devices."""

    def __call__(self, rollout: Trajectory, /) -> Trajectory:
        """Computes the shapes and shardings from the shapes of one actor's rollout."""
        ...


class JoinFn(Protocol):
    """Joins the trajectories of a round."""

    def __call__(self, parts: list[Trajectory], /) -> Trajectory:
        """Joins trajectories that were spread, one of each of this process's replicas."""
        ...


class Learning(NamedTuple):
    """The functions of a learner.

    Attributes:
      init: makes the first state, a copy on every learner device.
      replay_state: makes the first replay state.
      trace: traces the programs.
      compile: compiles the programs.
      publish: copies parameters for actors.
      like: computes the shapes of a trajectory.
      spread: sends a rollout's trajectory to the learners.
      join: joins the trajectories of a round.
      state_sharding: of a LearnerState.
      replay_sharding: of a ReplayState.
    """

    init: InitFn
    replay_state: ReplayStateFn
    trace: TraceFn
    compile: CompileFn
    publish: PublishFn
    like: LikeFn
    spread: SpreadFn
    join: JoinFn
    state_sharding: NamedSharding
    replay_sharding: ReplayState


def make(
    agent: Agent,
    layout: HostTopology,
    rollout: Trajectory,
    updates_per_batch: int = 1,
    replay_memory: Literal["device", "host"] = "device",
    updates_per_call: int | None = None,
    prepare_ahead: bool = False,
) -> Learning:
    """Makes the learning functions on the learner mesh, whose only axis is `data`.

    Args:
      agent: the agent.
      layout: actors and learners.
      rollout: of one actor, for its shapes.
      updates_per_batch: parts of a trajectory that are learnt from in turn.
      replay_memory: where a replay is kept.
      updates_per_call: pending updates that are done in one call at most; as many as take a moment, if None.
      prepare_ahead: whether reanalysers work on the next draw while this one is learnt from.

    Raises:
      ValueError: where a replay does not fit the layout.
    """
    if agent.replay is not None and updates_per_batch > 1:
        raise ValueError(
            f"updates_per_batch={updates_per_batch}: {agent.name} replays, and its replay's settings say how often it "
            "learns; use 1."
        )
    core = learner.make(
        agent,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), rollout.timesteps.observation),
        lanes=layout.envs_per_actor // layout.shards_per_replica,
        groups=layout.threads,
        num_shards=layout.num_shards,
    )
    if not core.defers_updates and updates_per_call is not None:
        raise ValueError(f"updates_per_call={updates_per_call}: {agent.name} has no pending updates; leave it out.")
    place = _place(agent, core, layout, rollout, updates_per_batch, replay_memory, updates_per_call, prepare_ahead)
    assembly = Assembly(layout, place.trajectory_mesh)
    replay_state = functools.partial(_first_replay_state, agent, core, layout, rollout, place)
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    replay_sharding = _broadcast(place.replay_sharding, jax.eval_shape(replay_state))
    return Learning(
        init=jax.jit(agent.init, out_shardings=everywhere, compiler_options=quick_to_compile(layout.platform)),
        replay_state=jax.jit(replay_state, out_shardings=replay_sharding),
        trace=place.trace,
        compile=place.compile,
        publish=_publisher(agent),
        like=functools.partial(_like, layout, assembly),
        spread=assembly.spread,
        join=assembly.join,
        state_sharding=everywhere,
        replay_sharding=replay_sharding,
    )


def _first_replay_state(
    agent: Agent, core: learner.Learner, layout: HostTopology, rollout: Trajectory, place: LearnerPrograms
) -> ReplayState:
    """Makes an empty replay, ring [S], for rollouts of one shape (see `make`)."""
    on_a_shard = jax.eval_shape(
        lambda t: jax.tree.map(lambda x: x[0], split_lanes(t, layout.shards_per_replica)), rollout
    )
    ring = jax.eval_shape(core.ring, on_a_shard)
    ring = jax.tree.map(lambda x: jnp.zeros((layout.num_shards, *x.shape), x.dtype), ring)
    hyper = {name: jnp.float32(0) for name in agent.hyper}
    state = jax.eval_shape(agent.init, jax.random.key(0), hyper)
    return ReplayState(core.counts(), ring, place.empty_prefetched(state, core.counts(), ring))


def _publisher(agent: Agent) -> PublishFn:
    """Makes a function that copies parameters for actors."""

    @jax.jit
    def copy(learner: LearnerState, progress: jax.Array) -> ActorParams:
        # Copied: the learner's own arrays are donated to the next update, and jit passes inputs on without a copy.
        return jax.tree.map(jnp.copy, agent.actor_params(learner, progress))

    def publish(learner: LearnerState, progress: float) -> ActorParams:
        return jax.tree.map(lambda x: x.addressable_shards[0].data, copy(learner, jnp.float32(progress)))

    return publish


def _like(layout: HostTopology, assembly: Assembly, rollout: Trajectory) -> Trajectory:
    """Computes shapes and shardings [T, R B] from the shapes of a rollout [T, B]."""

    def whole(axis: int, x: Any) -> Any:
        shape = (*x.shape[:axis], layout.replicas * x.shape[axis], *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=assembly.sharding(axis))

    return trajectories.by_lane(whole, rollout)


def _place(
    agent: Agent,
    core: learner.Learner,
    layout: HostTopology,
    rollout: Trajectory,
    updates_per_batch: int,
    replay_memory: Literal["device", "host"],
    updates_per_call: int | None,
    prepare_ahead: bool,
) -> LearnerPrograms:
    """The place of learning and replay that settings ask for (arguments and errors as in `make`)."""
    if layout.reanalysers is not None:
        if replay_memory == "host":
            raise ValueError("replay_memory='host': the replay is where it is reanalysed; use 'device'.")
        if agent.reanalyse is None or core.steps is None:
            raise ValueError(
                f"reanalyser_devices={layout.reanalysers.size}: {agent.name} does not reanalyse; leave it out."
            )
        if updates_per_call is not None:
            raise ValueError(f"updates_per_call={updates_per_call}: reanalysers go one by one; leave it out.")
        return SplitReplay(core.steps, layout, layout.reanalysers, reanalyses=True, prefetch=prepare_ahead)
    if replay_memory == "device":
        return OnDevices(core, layout, updates_per_batch, updates_per_call or _at_once(layout, rollout))
    if agent.replay is not None and agent.replay.refresh_interval:
        raise ValueError("replay_memory='host': priorities are refreshed where the network is; use 'device'.")
    if core.steps is None:
        raise ValueError(f"replay_memory='host': {agent.name} has no replay here; use 'device'.")
    hosts = data_mesh(host_cpus("replay_memory='host'", layout.mesh))
    return SplitReplay(core.steps, layout, hosts)


MOST_AT_ONCE = 256
"""Pending updates in one call, of which the runner asks for as many as take a moment."""


def _at_once(layout: HostTopology, trajectory: Trajectory) -> int:
    """The largest number of pending updates in a call."""
    images = any(x.dtype == jnp.uint8 and x.ndim >= 4 for x in jax.tree.leaves(trajectory.timesteps.observation))
    # XLA:CPU is slow at convolutions in loops (podracer/nets/convolutions.py), next to which a call costs nothing.
    return 1 if images and layout.platform == "cpu" else MOST_AT_ONCE


def _broadcast(prefix: Any, tree: ArrayTree) -> Any:
    """A tree of shardings from a prefix of it."""
    is_leaf = lambda x: isinstance(x, Sharding)  # noqa: E731
    return jax.tree.map(lambda sharding, part: jax.tree.map(lambda _: sharding, part), prefix, tree, is_leaf=is_leaf)
