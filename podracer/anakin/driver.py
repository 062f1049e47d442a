"""Anakin as a driver: the fused program of an experiment, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.anakin import program, runner
from podracer.driver import Progress, RunState
from podracer.learning.learner import require_room
from podracer.topology import Topology, compiling_for
from podracer.types import Agent, Environment


class Anakin:
    """One compiled program for everything (see `podracer.driver.Driver`)."""

    arch = "anakin"

    def __init__(
        self,
        agent: Agent,
        environment: Environment,
        layout: Topology,
        *,
        reset_pool: int,
        seeds: np.ndarray,
        hyper: dict[str, np.ndarray],
    ):
        self._rows_per_update = layout.num_envs * agent.config.rollout_length
        self._layout, self._seeds, self._hyper = layout, seeds, hyper
        self.program = program.make(
            agent, environment, layout, program.Settings(agent.config.rollout_length, reset_pool)
        )
        self._compiled: runner.Compiled | None = None

    @property
    def devices(self) -> list[Any]:
        return list(self._layout.mesh.devices.flat)

    def describe(self) -> str:
        return self._layout.describe()

    def check(self) -> None:
        like = self.program.like()
        require_room(like.experience, self.devices)
        with compiling_for(self._layout.platform):
            jax.eval_shape(self.program.step, like, program.Limits.of(0, 1, 0))

    def init(self) -> RunState:
        hyper = {name: jnp.asarray(value) for name, value in self._hyper.items()}
        with compiling_for(self._layout.platform):
            return self.program.init(jnp.asarray(self._seeds), hyper)

    def like(self) -> RunState:
        return self.program.like()

    def compile(self, state: RunState) -> float:
        self._compiled = runner.compile_step(self.program, state)
        return self._compiled.seconds

    def run(
        self,
        state: RunState,
        *,
        total_steps: int,
        next_milestone: Callable[[int], int],
        on_progress: Callable[[Progress], None],
        on_milestone: Callable[[RunState, int], None],
        should_stop: Callable[[], bool],
    ) -> tuple[RunState, bool]:
        assert self._compiled is not None, "compile first"
        updates = -(-total_steps // self._rows_per_update)
        return runner.run(
            self._compiled.call,
            state,
            total_steps=total_steps,
            next_milestone=next_milestone,
            max_updates_per_call=max(1, updates // 100),
            on_progress=on_progress,
            on_milestone=on_milestone,
            should_stop=should_stop,
        )
