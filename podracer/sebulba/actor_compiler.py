"""The compilation of what actors run: once for each of their devices, before the first step."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from podracer.sebulba import actor_program, ready_lanes
from podracer.topology import HostTopology, compiling_for
from podracer.types import Agent, EnvSpec, HostStep, LearnerState


class ActorPrograms(NamedTuple):
    """The programs of `actor_program.Acting`, compiled, by the device of the actor."""

    begin: dict[Any, jax.stages.Compiled]
    act: dict[Any, jax.stages.Compiled]
    finish: dict[Any, jax.stages.Compiled]


class Shapes(NamedTuple):
    """Shapes of what `actor_program.Acting` takes and makes, on a device."""

    lanes: Any
    carry: Any
    buffer: Any
    params: Any
    row: Any
    versions: Any
    rollout: Any


@dataclasses.dataclass(frozen=True)
class ActorCompiler:
    """Compiles acting.

    Attributes:
      agent: the agent.
      spec: of the environments.
      acting: what actors run.
      layout: actors and learners.
      at_once: rows that environments return at a time, or None where they return those of all lanes.
    """

    agent: Agent
    spec: EnvSpec
    acting: actor_program.Acting
    layout: HostTopology
    at_once: int | None

    def initial_learner(self) -> LearnerState:
        """A learner's first state, for its shapes."""
        hyper = {name: jnp.float32(0) for name in self.agent.hyper}
        return self.agent.init(jax.random.key(0), hyper)

    def shapes(self, device: Any) -> Shapes:
        """Shapes of what an actor on a device computes with."""
        B = self.layout.envs_per_actor
        sharding = SingleDeviceSharding(device)
        place = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)  # noqa: E731
        lanes = place(jax.ShapeDtypeStruct((B,), np.int32))
        row = HostStep.zeros(self.spec, B)
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), row)
        carry = place(jax.eval_shape(self.acting.start, lanes, jax.random.key(0)))
        buffer = place(jax.eval_shape(self.acting.begin, carry))
        params = place(jax.eval_shape(lambda: self.agent.actor_params(self.initial_learner(), jnp.float32(0))))
        versions = jax.ShapeDtypeStruct((self.agent.config.rollout_length,), np.int32)
        rollout = jax.eval_shape(self.acting.finish, buffer, carry, lanes, versions, row)[0]
        return Shapes(lanes, carry, buffer, params, row, versions, rollout)

    def compile(self) -> ActorPrograms:
        """Compiles for every device that has actors."""
        # Acting is a chain of small operations: on CPU, running some of them side by side costs more than it brings.
        for_platform = compiling_for(self.layout.platform)
        on_cpu = self.layout.platform == "cpu"
        in_order = {"xla_cpu_enable_concurrency_optimized_scheduler": False} if on_cpu else {}
        partial_acting = (
            ready_lanes.make(self.agent, self.spec, self.agent.config.rollout_length) if self.at_once else None
        )
        programs = partial_acting or self.acting
        act = jax.jit(for_platform(programs.act), donate_argnums=0, compiler_options=in_order)
        finish = jax.jit(for_platform(programs.finish), donate_argnums=() if partial_acting else (0, 1))
        made = ActorPrograms({}, {}, {})
        for device in dict.fromkeys(self.layout.actors):
            x = self.shapes(device)
            made.begin[device] = jax.jit(programs.begin).lower(x.carry).compile()
            if partial_acting:
                made.act[device], made.finish[device] = self._compile_partial(x, partial_acting, act, finish)
                continue
            made.act[device] = act.lower(x.buffer, x.params, x.carry.keys, x.row).compile()
            made.finish[device] = finish.lower(x.buffer, x.carry, x.lanes, x.versions, x.row).compile()
        return made

    def _compile_partial(
        self, x: Shapes, partial_acting: ready_lanes.PartialActing, act: Any, finish: Any
    ) -> tuple[Any, Any]:
        """The programs of an actor whose environments return rows of some lanes at a time."""
        assert self.at_once
        buffers = jax.eval_shape(partial_acting.begin, x.carry)
        buffers = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=x.lanes.sharding), buffers)
        row = jax.eval_shape(lambda: HostStep.zeros(self.spec, self.at_once))  # type: ignore[arg-type]
        number = jax.ShapeDtypeStruct((), np.int32)
        where = ready_lanes.WriteIndex(*(jax.ShapeDtypeStruct((self.at_once,), np.int32),) * 4)
        key = jax.eval_shape(lambda carry: carry.keys[0], x.carry)
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=x.lanes.sharding)
        return (
            act.lower(buffers, x.params, key, number, where, row).compile(),
            finish.lower(buffers, x.carry.games, x.lanes, number).compile(),
        )
