"""Sebulba as a driver: what its actors and its learner are made of, compiled and saved (Hessel et al. 2021)."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from podracer import topology
from podracer.environments.seeds import first_seed
from podracer.learning.counter import Counter
from podracer.learning.learner import Experience, final_groups, require_room
from podracer.run.config import Mode
from podracer.run.driver import Progress, RunState, counter_values, run_keys
from podracer.sebulba import actor_program, learner_program, ready_lanes, runner
from podracer.sebulba.actor import Actor, Resume, Wiring
from podracer.sebulba.actors import Crew
from podracer.sebulba.agreement import Ballots
from podracer.sebulba.channels import Channel, ParamsStore
from podracer.sebulba.programs import Programs
from podracer.topology import HostTopology, compiling_for
from podracer.topology.processes import ALONE, Processes
from podracer.types import ActorParams, Agent, HostEnvironment, HostEnvironments, HostStep, LearnerState


class LockstepState(NamedTuple):
    """The acting side of a run in a fixed order whose environments can be saved.

    Attributes:
      published: the last publications, as many as a replica has threads, oldest first, on the learner devices; that
        after the newest rollout is not among them, for it is made of the learner's state again.
      resumes: where the next rollout of each actor begins, [R, A, ...], by process.
    """

    published: tuple[ActorParams, ...]
    resumes: Resume


class Sebulba:
    """Actor threads feed a learner loop (see `podracer.run.driver.Driver`).

    Args:
      agent: the agent.
      environments: where each actor's environments come from.
      layout: actors and learners.
      seed: of the run.
      hyper: tunable numbers.
      mode: "async": rollouts are learnt from as they come, each step acted by the newest parameters. "lockstep" and
        "serial": in a fixed order, acted by those that `actor.Wiring.publication` says.
      updates_per_batch: parts of a trajectory that are learnt from in turn.
      queue_capacity: rollouts of each actor that may wait for the learner.
      env_timeout: seconds after which an environment that does not answer ends the run,
      env_restarts: or is replaced, so many times.
      replay_memory: whether a replay is on the learner devices or in the host's memory.
      updates_per_call: pending updates that are done in one call at most (see `learning.make`).
      final_updates: updates behind the last step.
      prepare_ahead: whether reanalysers work on the next group of updates while this one is learnt from.

    Raises:
      ValueError: where a setting does not fit the agent or the layout.
    """

    arch = "sebulba"

    def __init__(
        self,
        agent: Agent,
        environments: HostEnvironments,
        layout: HostTopology,
        *,
        seed: int,
        hyper: dict[str, float],
        mode: Mode = "async",
        updates_per_batch: int = 1,
        queue_capacity: int = 1,
        env_timeout: float = 60.0,
        env_restarts: int = 0,
        replay_memory: Literal["device", "host"] = "device",
        updates_per_call: int | None = None,
        final_updates: int = 0,
        prepare_ahead: bool = True,
    ):
        if mode == "serial" and updates_per_batch > 1:
            raise ValueError(
                f"updates_per_batch={updates_per_batch}: with mode='serial' actors wait for the learner, so that every "
                "update is on rollouts of the newest parameters; use mode='lockstep', or 1."
            )
        # Optional, as not all environments have threads of their own.
        shared_by = getattr(environments, "shared_by", None)
        neighbours = 1
        if layout.processes > 1:
            from podracer.pod.settings import processes_of_host  # which a local run has no use for

            neighbours = processes_of_host(os.environ) or 1
        environments = shared_by(len(layout.actors) * neighbours) if shared_by else environments
        self._agent, self._environments, self._layout = agent, environments, layout
        self._seed, self._hyper = seed, hyper
        self._mode: Mode = mode
        self._parts, self._timeout, self._restarts = updates_per_batch, env_timeout, env_restarts
        self._replay_memory = replay_memory
        self._capacity, self._final_groups = queue_capacity, final_groups(agent, final_updates)
        first = {device.process_index: device for device in layout.mesh.devices[::-1]}
        processes = Mesh(np.asarray([first[index] for index in sorted(first)]), ("process",))
        self._by_process = NamedSharding(processes, PartitionSpec("process"))
        self.acting = actor_program.make(agent, environments.spec, self.rollout_length, layout.num_envs)
        at_once = getattr(environments, "lanes_at_once", None)
        self._at_once: int | None = at_once and at_once(layout.envs_per_actor)
        rollout = self._shapes(layout.actors[0]).rollout
        self.learning = learner_program.make(
            agent, layout, rollout, updates_per_batch, replay_memory, updates_per_call, prepare_ahead
        )
        self._ballots = Ballots(layout.mesh)
        self._start = jax.jit(self.acting.start)
        self._begin: dict[Any, Callable[..., Any]] = {}
        self._act: dict[Any, Callable[..., Any]] = {}
        self._finish: dict[Any, Callable[..., Any]] = {}
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
            + {"async": "", "lockstep": ", in lockstep", "serial": ", one after the other"}[self._mode]
        )

    # States

    def init(self) -> RunState:
        hyper = {name: jnp.float32(value) for name, value in self._hyper.items()}
        learner = self.learning.init(run_keys(self._seed)[0], hyper)
        saved: Any = ()
        if resumes := self._first_resumes():
            published = (self._save(self.learning.publish(learner, 0.0)),) * self._layout.threads
            saved = LockstepState(published, self._of_all(resumes))
        return self._state(learner, saved, 0, self.learning.experience())

    def like(self) -> RunState:
        everywhere = self.learning.state_sharding
        abstract = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        learner = jax.eval_shape(self._initial_learner)
        saved: Any = ()
        if resumes := self._first_resumes():
            params = jax.eval_shape(self._agent.actor_params, learner, jnp.float32(0))
            params = jax.tree.map(lambda x: abstract(x, everywhere), params)
            R, A = self._layout.replicas, self._layout.threads
            of_all = lambda x: jax.ShapeDtypeStruct((R, A, *x.shape), x.dtype, sharding=self._by_process)  # noqa: E731
            saved = LockstepState((params,) * A, jax.tree.map(of_all, resumes[0]))
        lead = lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype, sharding=everywhere)  # noqa: E731
        counter = jax.eval_shape(lambda: Counter.of(0))
        experience = jax.tree.map(abstract, jax.eval_shape(self.learning.experience), self.learning.experience_sharding)
        return RunState(jax.tree.map(lead, learner), saved, jax.tree.map(lead, counter), experience)

    def _initial_learner(self) -> LearnerState:
        hyper = {name: jnp.float32(value) for name, value in self._hyper.items()}
        return self._agent.init(jax.random.key(0), hyper)

    def _state(self, learner: LearnerState, saved: Any, env_steps: int, experience: Experience) -> RunState:
        """A state with the leading dim of a population of one.

        The learner's is a copy, which outlives its donation; the experience may be too large for that.
        """
        counter = topology.spread(Counter.of(env_steps), self.learning.state_sharding)
        return RunState(_with_member_axis(learner), saved, _with_member_axis(counter), experience)

    def _first_resumes(self) -> list[Resume]:
        """Where the actors of a fresh run begin, in this process; [] where that cannot be saved, or need not be."""
        if self._mode == "async" or not getattr(self._environments, "saved", False):
            return []
        resumes = []
        for index, device in self._places:
            environment: Any = self._make_environment(index, 0)
            try:
                resumes.append(Resume(environment.save(), self._carry(index, device, 0)))
            finally:
                environment.close()
        return resumes

    def _save(self, params: ActorParams) -> ActorParams:
        return topology.spread(params, self.learning.state_sharding)

    def _of_all(self, resumes: list[Resume]) -> Resume:
        """Those of this process's actors as its part of those of all, [R, A, ...]."""
        shape = (self._layout.replicas_here, self._layout.threads)
        # Actors may be on devices of their own.
        resumes = jax.device_put(resumes, self._layout.actors[0])
        stacked = jax.tree.map(lambda *x: jnp.stack(x).reshape(*shape, *x[0].shape), *resumes)
        return topology.together(stacked, self._by_process)

    def _of_this(self, resumes: Resume) -> list[Resume]:
        """The inverse of `_of_all`."""
        mine = jax.tree.map(lambda x: x.addressable_data(0), resumes)
        threads = self._layout.threads
        return [jax.tree.map(lambda x: x[i // threads, i % threads], mine) for i in range(len(self._layout.actors))]  # noqa: B023

    # Actors

    @property
    def _places(self) -> list[tuple[int, Any]]:
        """The actors of this process: their numbers among all, and their devices."""
        return list(enumerate(self._layout.actors, self._layout.first_actor))

    def _lanes(self, index: int) -> np.ndarray:
        B = self._layout.envs_per_actor
        return np.arange(index * B, (index + 1) * B, dtype=np.int32)

    def _make_environment(self, index: int, begun: int) -> HostEnvironment:
        B = self._layout.envs_per_actor
        return self._environments.make(B, first_seed(self._seed, "training", begun) + index * B)

    def _carry(self, index: int, device: Any, begun: int) -> actor_program.Carry:
        key = jax.random.fold_in(jax.random.fold_in(run_keys(self._seed)[1], index), begun)
        return self._start(*jax.device_put((self._lanes(index), key), device))

    def _actors(self, saved: list[Resume], begun: int, wiring: Wiring) -> list[Actor]:
        actors = []
        for place, (index, device) in enumerate(self._places):
            make = functools.partial(self._make_environment, index, begun)
            if saved:
                make = functools.partial(_load, functools.partial(self._make_environment, index, 0), saved[place])
            carry = saved[place].carry if saved else self._carry(index, device, begun)
            lanes, carry = jax.device_put((self._lanes(index), jax.tree.map(jnp.copy, carry)), device)
            number = begun + (index - begun) % wiring.num_actors
            actors.append(self._actor(index, place, device, make, lanes, carry, number, wiring))
        return actors

    def _actor(self, *args: Any) -> Actor:
        return ready_lanes.PartialActor(*args, at_once=self._at_once) if self._at_once else Actor(*args)

    # Compilation

    def check(self) -> None:
        learned = self._learned()
        devices = list((self._layout.reanalysers or self._layout.mesh).devices.flat)
        require_room(learned[1], devices, on_host=self._replay_memory == "host")
        self.learning.trace(*learned)

    def _learned(self) -> tuple[Any, Any, Any]:
        """What learning computes with: a state, the experience and a trajectory, as shapes on their devices."""
        everywhere = self.learning.state_sharding
        state = jax.eval_shape(self._initial_learner)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state)
        trajectory = self.learning.like(self._shapes(self._layout.actors[0]).rollout)
        return state, self.like().experience, trajectory

    def _shapes(self, device: Any) -> _Shapes:
        """What an actor on a device computes with."""
        B = self._layout.envs_per_actor
        there = SingleDeviceSharding(device)
        place = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), tree)  # noqa: E731
        lanes = place(jax.ShapeDtypeStruct((B,), np.int32))
        row = HostStep.zeros(self._environments.spec, B)
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), row)
        carry = place(jax.eval_shape(self.acting.start, lanes, jax.random.key(0)))
        buffer = place(jax.eval_shape(self.acting.begin, carry))
        params = place(jax.eval_shape(lambda: self._agent.actor_params(self._initial_learner(), jnp.float32(0))))
        versions = jax.ShapeDtypeStruct((self.rollout_length,), np.int32)
        rollout = jax.eval_shape(self.acting.finish, buffer, carry, lanes, versions, row)[0]
        return _Shapes(lanes, carry, buffer, params, row, versions, rollout)

    def compile(self, state: RunState) -> float:
        start = time.perf_counter()
        # Acting is a chain of small operations: on CPU, running some of them side by side costs more than it brings.
        here = compiling_for(self._layout.platform)
        on_cpu = self._layout.platform == "cpu"
        in_order = {"xla_cpu_enable_concurrency_optimized_scheduler": False} if on_cpu else {}
        some = ready_lanes.make(self._agent, self._environments.spec, self.rollout_length) if self._at_once else None
        programs = some or self.acting
        act = jax.jit(here(programs.act), donate_argnums=0, compiler_options=in_order)
        finish = jax.jit(here(programs.finish), donate_argnums=() if some else (0, 1))
        for device in dict.fromkeys(self._layout.actors):
            x = self._shapes(device)
            self._begin[device] = jax.jit(programs.begin).lower(x.carry).compile()
            if some:
                self._act[device], self._finish[device] = self._compile_partial(x, some, act, finish)
                continue
            self._act[device] = act.lower(x.buffer, x.params, x.carry.keys, x.row).compile()
            self._finish[device] = finish.lower(x.buffer, x.carry, x.lanes, x.versions, x.row).compile()
        self._programs = self.learning.compile(*self._learned())
        return time.perf_counter() - start

    def _compile_partial(self, x: _Shapes, some: ready_lanes.PartialActing, act: Any, finish: Any) -> tuple[Any, Any]:
        """For an actor whose environments return rows of some lanes at a time."""
        assert self._at_once
        halves = jax.eval_shape(some.begin, x.carry)
        halves = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=x.lanes.sharding), halves)
        row = jax.eval_shape(lambda: HostStep.zeros(self._environments.spec, self._at_once))  # type: ignore[arg-type]
        number = jax.ShapeDtypeStruct((), np.int32)
        where = ready_lanes.Where(*(jax.ShapeDtypeStruct((self._at_once,), np.int32),) * 4)
        key = jax.eval_shape(lambda carry: carry.keys[0], x.carry)
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=x.lanes.sharding)
        return (
            act.lower(halves, x.params, key, number, where, row).compile(),
            finish.lower(halves, x.carry.games, x.lanes, number).compile(),
        )

    # Running

    def run(
        self,
        state: RunState,
        *,
        total_steps: int,
        next_milestone: Callable[[int], int],
        on_progress: Callable[[Progress], None],
        on_milestone: Callable[[RunState, int], None],
        should_stop: Callable[[], bool],
        should_save: Callable[[], bool] = lambda: False,
        processes: Processes = ALONE,
    ) -> tuple[RunState, bool]:
        loop = self.learner(state, total_steps, processes)
        waiting = loop.pending and loop.env_steps < total_steps
        if not state.actors and waiting and not loop.drain(should_stop):  # what acts next is not there before
            return self._state(loop.learner, (), loop.env_steps, loop.experience), False
        published = state.actors.published if state.actors else ()
        crew = self.crew(
            loop.learner, loop.progress, published, loop.resumes, loop.rollouts, newest_is_there=not loop.pending
        )
        with crew:
            complete = loop.run(
                crew,
                next_milestone=next_milestone,
                on_progress=on_progress,
                on_milestone=lambda: on_milestone(self._snapshot(loop, crew), loop.env_steps),
                should_stop=should_stop,
                should_save=should_save,
            )
            return self._snapshot(loop, crew), complete

    def learner(self, state: RunState, total_steps: int = 2**50, processes: Processes = ALONE) -> runner.Learner:
        """The loop of a run, at a state."""
        learner = _without_member_axis(state.learner)
        return runner.Learner(
            programs=self._programs,
            publish=self.learning.publish,
            join=self.learning.join,
            ballots=self._ballots,
            processes=processes,
            key=jax.random.fold_in(run_keys(self._seed)[1], 2**31 - 1),
            parts=self._parts,
            learner=learner,
            experience=state.experience,
            rollouts=int(state.experience.counts.batches) // self._parts,
            env_steps=int(counter_values(state.env_steps)[0]),
            total_steps=total_steps,
            final_groups=self._final_groups,
            resumes=self._of_this(state.actors.resumes) if state.actors else [],
        )

    def crew(
        self,
        learner: LearnerState,
        progress: float,
        published: tuple[ActorParams, ...] = (),
        resumes: Sequence[Resume] = (),
        begun: int = 0,
        newest_is_there: bool = True,
    ) -> Crew:
        """The actors of a run, wired up and not started.

        Args:
          learner: whose parameters they begin with.
          progress: of the run, in [0, 1].
          published: of a `LockstepState` to go on from, or ().
          resumes: where its actors in this process begin, or ().
          begun: rollouts that every replica handed over before.
          newest_is_there: whether `learner` has learnt all that it has to from them.
        """
        num_actors = self._layout.threads
        store = ParamsStore(list(dict.fromkeys(self._layout.actors)), keep=num_actors + 1)
        newest = self.learning.publish(learner, progress)
        for i, params in enumerate(published or (newest,) * num_actors):
            store.publish(begun - num_actors + i, topology.here(params))
        if newest_is_there:
            store.publish(begun, newest)
        wiring = Wiring(
            rollout_length=self.rollout_length,
            begin=self._begin,
            act=self._act,
            finish=self._finish,
            spread=self.learning.spread,
            store=store,
            channel=Channel(self._capacity),
            mode=self._mode,
            num_actors=num_actors,
            replicas=self._layout.replicas,
            keep_resume=bool(resumes),
        )
        started = itertools.count(begun + 1)

        def replace(actor: Actor) -> Actor:
            # Another stream of random numbers, and of environments, than any before.
            stream = next(started) + 2**20
            make = functools.partial(self._make_environment, actor.index, stream)
            lanes, carry = jax.device_put(
                (self._lanes(actor.index), self._carry(actor.index, actor.device, stream)), actor.device
            )
            return self._actor(actor.index, actor.place, actor.device, make, lanes, carry, actor.number, wiring)

        actors = self._actors(list(resumes), begun, wiring)
        return Crew(actors, wiring, self._environments.spec.name, self._timeout, self._restarts, replace)

    def _snapshot(self, loop: runner.Learner, crew: Crew) -> RunState:
        saved: Any = ()
        if loop.resumes:
            device, oldest = self._layout.actors[0], loop.rollouts - self._layout.threads
            versions = [v for v in crew.wiring.store.snapshot() if oldest <= v.number < loop.rollouts]
            published = [self._save(version.params[device]) for version in versions]
            saved = LockstepState(tuple(published), self._of_all(loop.resumes))
        return self._state(loop.learner, saved, loop.env_steps, loop.experience)


@jax.jit
def _with_member_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


@jax.jit
def _without_member_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


class _Shapes(NamedTuple):
    """Of what `acting.Acting` takes and makes."""

    lanes: Any
    carry: Any
    buffer: Any
    params: Any
    row: Any
    versions: Any
    rollout: Any


def _load(make: Callable[[], HostEnvironment], resume: Resume) -> HostEnvironment:
    environment = make()
    environment.load(resume.environment)  # type: ignore[attr-defined]
    return environment
