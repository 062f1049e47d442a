"""Sebulba as a driver: what its actors and its learner are made of, compiled and saved (Hessel et al. 2021)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from podracer import topology
from podracer.learning.learner import final_draws, require_room
from podracer.run.config import RunConfig
from podracer.run.driver import RunHooks, RunState, counter_values, run_keys
from podracer.sebulba import actor_program, learner_loop, learner_program
from podracer.sebulba.actor import ActorContext, ActorSnapshot
from podracer.sebulba.actor_compiler import ActorCompiler, ActorPrograms
from podracer.sebulba.actor_factory import ActorFactory
from podracer.sebulba.actor_pool import ActorPool
from podracer.sebulba.agreement import Agreement
from podracer.sebulba.channels import Channel, ParamsStore
from podracer.sebulba.programs import Programs
from podracer.sebulba.states import States, without_member_axis
from podracer.topology import HostTopology
from podracer.topology.processes import ALONE, Processes
from podracer.types import ActorParams, Agent, HostEnvironments, LearnerState


class Sebulba:
    """Actor threads feed a learner loop (see `podracer.run.driver.Driver`).

    Args:
      agent: the agent.
      environments: where each actor's environments come from.
      layout: actors and learners.
      run: settings of the run; those of the layout are in it already.
      hyper: tunable numbers.

    Raises:
      ValueError: where a setting does not fit the agent or the layout.
    """

    arch = "sebulba"

    def __init__(
        self,
        agent: Agent,
        environments: HostEnvironments,
        layout: HostTopology,
        run: RunConfig,
        hyper: dict[str, float],
    ):
        if run.mode == "serial" and run.updates_per_batch > 1:
            raise ValueError(
                f"updates_per_batch={run.updates_per_batch}: with mode='serial' actors wait for the learner, so that "
                "every update is on rollouts of the newest parameters; use mode='lockstep', or 1."
            )
        environments = _shared_environments(environments, layout)
        self._agent, self._environments, self._layout = agent, environments, layout
        self._run, self._hyper = run, hyper
        self._final_draws = final_draws(agent, run.final_updates)
        spec, at_once = environments.spec, getattr(environments, "lanes_at_once", None)
        rows: int | None = at_once and at_once(layout.envs_per_actor)
        if rows and run.mode != "async":
            raise ValueError(
                f"mode={run.mode!r} keeps a fixed order, and {spec.name} returns rows of the lanes that are ready "
                "(lanes_at_once), by the newest parameters; use mode='async', or let it return those of all lanes."
            )
        self.acting = actor_program.make(agent, spec, self.rollout_length, layout.num_envs)
        self._compiler = ActorCompiler(agent, spec, self.acting, layout, rows)
        self.learning = learner_program.make(
            agent,
            layout,
            self._compiler.shapes(layout.actors[0]).rollout,
            run.updates_per_batch,
            run.replay_memory,
            run.updates_per_call,
            run.prepare_ahead,
        )
        self.states = States(agent, layout, self.learning)
        self.actors = ActorFactory(environments, layout, run, jax.jit(self.acting.start), rows)
        self._agreement = Agreement(layout.mesh)
        self._actor_programs = ActorPrograms({}, {}, {})
        self._programs = Programs()

    @property
    def mesh(self) -> Mesh:
        return self._layout.mesh

    @property
    def devices(self) -> list[Any]:
        return list(self._layout.devices)

    @property
    def rollout_length(self) -> int:
        return self._agent.config.rollout_length

    def describe(self) -> str:
        return (
            self._layout.describe()
            + {"async": "", "lockstep": ", in lockstep", "serial": ", one after the other"}[self._run.mode]
        )

    def init(self) -> RunState:
        hyper = {name: jnp.float32(value) for name, value in self._hyper.items()}
        learner = self.learning.init(run_keys(self._run.seed)[0], hyper)
        acting: Any = ()
        if snapshots := self.actors.first_snapshots():
            acting = self.states.acting([self.learning.publish(learner, 0.0)], snapshots)
            acting = acting._replace(published=acting.published * self._layout.threads)
        return self.states.make(learner, acting, 0, self.learning.replay_state())

    def like(self) -> RunState:
        return self.states.like(jax.eval_shape(self._compiler.initial_learner), self.actors.first_snapshots())

    def check(self) -> None:
        shapes = self._learner_shapes()
        devices = list((self._layout.reanalysers or self._layout.mesh).devices.flat)
        require_room(shapes[1], devices, on_host=self._run.replay_memory == "host")
        actor = self._layout.actors[0]
        memory = (self._compiler.shapes(actor).carry.memory,) * self._layout.actors.count(actor)
        require_room(shapes[1]._replace(ring=(), prefetched=()), [actor], memory=memory)
        self.learning.trace(*shapes)

    def prepare(self) -> None:
        pass  # programs of actors and learners are many, and compiled by threads of their own

    def compile(self, state: RunState) -> float:
        start = time.perf_counter()
        self._actor_programs = self._compiler.compile()
        self._programs = self.learning.compile(*self._learner_shapes())
        return time.perf_counter() - start

    def _learner_shapes(self) -> tuple[Any, Any, Any]:
        """Shapes of what learning computes with, on their devices: a state, the replay state and a trajectory."""
        everywhere = self.learning.state_sharding
        state = jax.eval_shape(self._compiler.initial_learner)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state)
        trajectory = self.learning.like(self._compiler.shapes(self._layout.actors[0]).rollout)
        return state, self.like().replay_state, trajectory

    def run(
        self,
        state: RunState,
        hooks: RunHooks,
        *,
        total_steps: int,
        processes: Processes = ALONE,
    ) -> tuple[RunState, bool]:
        loop = self.learner(state, total_steps, processes)
        waiting = loop.pending and loop.env_steps < total_steps
        if (
            not state.actors and waiting and not loop.run_pending_updates(hooks.should_stop)
        ):  # what acts next is not there before
            return self.states.make(loop.learner, (), loop.env_steps, loop.replay_state), False
        published = state.actors.published if state.actors else ()
        actor_pool = self.actor_pool(
            loop.learner, loop.progress, published, loop.snapshots, loop.rollouts, newest_is_there=not loop.pending
        )
        with actor_pool:
            complete = loop.run(actor_pool, hooks, lambda: self._snapshot(loop, actor_pool))
            return self._snapshot(loop, actor_pool), complete

    def learner(
        self, state: RunState, total_steps: int = 2**50, processes: Processes = ALONE
    ) -> learner_loop.LearnerLoop:
        """The loop of a run, at a state."""
        settings = learner_loop.LoopSettings(
            key=jax.random.fold_in(run_keys(self._run.seed)[1], 2**31 - 1),
            parts=self._run.updates_per_batch,
            total_steps=total_steps,
            final_draws=self._final_draws,
            tasks=self._environments.spec.tasks,
        )
        start = learner_loop.LoopStart(
            learner=without_member_axis(state.learner),
            replay_state=state.replay_state,
            rollouts=int(state.replay_state.counts.batches) // self._run.updates_per_batch,
            env_steps=int(counter_values(state.env_steps)[0]),
            snapshots=self.states.split(state.actors.snapshots) if state.actors else [],
        )
        return learner_loop.LearnerLoop(self.learning, self._programs, self._agreement, processes, settings, start)

    def actor_pool(
        self,
        learner: LearnerState,
        progress: float,
        published: tuple[ActorParams, ...] = (),
        snapshots: Sequence[ActorSnapshot] = (),
        rollouts_done: int = 0,
        newest_is_there: bool = True,
    ) -> ActorPool:
        """The actors of a run, wired up and not started.

        Args:
          learner: whose parameters they begin with.
          progress: of the run, in [0, 1].
          published: of a `LockstepState` to go on from, or ().
          snapshots: where its actors in this process begin, or ().
          rollouts_done: rollouts that every replica handed over before.
          newest_is_there: whether `learner` has learnt all that it has to from them.
        """
        num_actors = self._layout.threads
        store = ParamsStore(list(dict.fromkeys(self._layout.actors)), keep=num_actors + 1)
        newest = self.learning.publish(learner, progress)
        for i, params in enumerate(published or (newest,) * num_actors):
            store.publish(rollouts_done - num_actors + i, topology.here(params))
        if newest_is_there:
            store.publish(rollouts_done, newest)
        context = ActorContext(
            rollout_length=self.rollout_length,
            **self._actor_programs._asdict(),
            spread=self.learning.spread,
            store=store,
            channel=Channel(self._run.queue_capacity),
            mode=self._run.mode,
            num_actors=num_actors,
            replicas=self._layout.replicas,
            keep_resume=bool(snapshots),
        )
        actors = self.actors.make(snapshots, rollouts_done, context)
        replace, run = self.actors.replacing(rollouts_done, context), self._run
        return ActorPool(actors, context, self._environments.spec.name, run.env_timeout, run.env_restarts, replace)

    def _snapshot(self, loop: learner_loop.LearnerLoop, actor_pool: ActorPool) -> RunState:
        """The state of a run while its actors go on: they have their own copies of what they use."""
        acting: Any = ()
        if loop.snapshots:
            device, oldest = self._layout.actors[0], loop.rollouts - self._layout.threads
            versions = [v for v in actor_pool.context.store.snapshot() if oldest <= v.number < loop.rollouts]
            acting = self.states.acting([version.params[device] for version in versions], loop.snapshots)
        return self.states.make(loop.learner, acting, loop.env_steps, loop.replay_state)


def _shared_environments(environments: HostEnvironments, layout: HostTopology) -> HostEnvironments:
    """The same environments, told how many actors of this machine share its cores, where they have threads."""
    shared_by = getattr(environments, "shared_by", None)
    if shared_by is None:
        return environments
    neighbours = 1
    if layout.processes > 1:
        from podracer.pod.settings import processes_of_host  # which a local run has no use for

        neighbours = processes_of_host(os.environ) or 1
    return shared_by(len(layout.actors) * neighbours)
