"""Anakin as a driver: runs the fused program of an experiment."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from podracer import spaces, topology
from podracer.anakin import program, random_play, runner
from podracer.learning.learner import final_draws, require_room, require_room_for_all
from podracer.population import evolution
from podracer.population.config import PBT
from podracer.population.evolution import Lineage
from podracer.run.driver import RunHooks, RunState, require_memory
from podracer.system import machine
from podracer.topology import Topology, executables
from podracer.topology.processes import ALONE, Processes
from podracer.types import Agent, Environment, EpisodeStats, TimeStep

BUSY_ROWS = 100_000
"""Rows of an update on one device that keep an accelerator busy."""

MOST_LANES = 16_384
"""Lanes up to which more of them cost an accelerator little."""

BUSY_LANES = 128
"""Lanes of a CPU device from which it is worth while to have several (docs/adr/0045)."""


class Anakin:
    """Runs one compiled program for acting and learning (see `podracer.run.driver.Driver`)."""

    arch = "anakin"

    def __init__(
        self,
        agent: Agent,
        environment: Environment,
        layout: Topology,
        *,
        reset_pool: int | None,
        seeds: np.ndarray,
        hyper: dict[str, np.ndarray],
        lockstep: bool = False,
        final_updates: int = 0,
        pbt: PBT | None = None,
    ):
        self._replays = agent.replay is not None
        self._rows_per_update = layout.num_envs * agent.config.rollout_length
        self._layout, self._seeds, self._hyper, self._spec = layout, seeds, hyper, environment.spec
        self._environment = environment
        self.program = program.make(
            agent,
            environment,
            layout,
            program.RolloutSettings(agent.config.rollout_length, reset_pool, lockstep, evolves=pbt is not None),
        )
        self._pbt, self._limits = pbt, evolution.limits_of(agent.config, pbt.hyper) if pbt else {}
        self._final_draws = final_draws(agent, final_updates)
        self._compiling: runner.Compiling | None = None
        self._compiled: runner.Compiled | None = None

    @property
    def mesh(self) -> Mesh:
        return self._layout.mesh

    @property
    def devices(self) -> list[Any]:
        return list(self._layout.mesh.devices.flat)

    def describe(self) -> str:
        platform, layout = self.devices[0].platform, self._layout
        # Replayed batches are small: more lanes do not make an update larger, and devices would wait for each other
        # after each.
        hint = "" if self._replays else _too_small(platform, self._rows_on_a_device, layout.num_envs)
        if not self._replays and len(self.devices) == 1:
            hint += _idle_cores(platform, layout.num_envs, layout.population, layout.num_shards)
        return layout.describe() + hint

    @property
    def _rows_on_a_device(self) -> int:
        return self._rows_per_update * self._layout.population // self._layout.num_devices

    def check(self) -> None:
        if (stored := executables.current()) and stored.has("step"):
            return  # as it was before that was stored
        like = self.program.like()
        require_room(like.replay_state, self.devices, memory=like.actors.agent)
        if self._pbt:
            require_room_for_all((like.learner.params, like.learner.opt_state), self.devices)
        jax.eval_shape(self.program.step, like, self.program.like_limits())
        if self._final_draws and self.program.finish:
            jax.eval_shape(self.program.finish, like, self.program.like_limits())

    def prepare(self) -> None:
        self._compiling = runner.start_step(self.program, None, bool(self._final_draws))

    def init(self) -> RunState:
        # As arrays of NumPy: to make others takes a program for each.
        return self.program.init(self._seeds, self._hyper)  # type: ignore[arg-type]

    def like(self) -> RunState:
        return self.program.like()

    def compile(self, state: RunState) -> float:
        compiling = self._compiling or runner.start_step(self.program, state, bool(self._final_draws))
        self._compiled = compiling.result()
        require_memory(self._compiled.memory, self.devices[0])
        return self._compiled.seconds

    def run(
        self,
        state: RunState,
        hooks: RunHooks,
        *,
        total_steps: int,
        processes: Processes = ALONE,
    ) -> tuple[RunState, bool]:
        assert self._compiled is not None, "compile first"
        updates = -(-total_steps // self._rows_per_update)
        return runner.run(
            self._compiled,
            self.program.limits,
            state,
            hooks,
            total_steps=total_steps,
            max_updates_per_call=max(1, updates // 100),
            culprit=self._culprit,
            final_draws=self._final_draws,
            processes=processes,
            tasks=self._spec.tasks,
        )

    def evolve(self, state: RunState) -> tuple[RunState, Lineage]:
        """Ends a generation of population based training; `state` is consumed, and the record whole on every device."""
        replay = state.replay_state
        new, lineage = self._evolve(state._replace(replay_state=()), int(self._seeds[0]))  # type: ignore[arg-type]
        if replay.ring != ():
            copied, fitness = jax.device_get(topology.here((lineage.copied, lineage.fitness)))
            # Of other members' replay nothing changes.
            if (replaced := copied & np.isneginf(fitness)).any():
                replay = replay._replace(ring=self._mend(replay.ring, replaced))
        return new._replace(replay_state=replay), lineage

    @functools.cached_property
    def _mend(self) -> Callable[[Any, np.ndarray], Any]:
        shardings = jax.tree.map(lambda x: x.sharding, self.program.like().replay_state.ring)
        return jax.jit(evolution.mended_replay, donate_argnums=0, out_shardings=shardings)

    @functools.cached_property
    def _evolve(self) -> Callable[[RunState, int], tuple[RunState, Lineage]]:
        assert self._pbt is not None
        like = self.program.like()._replace(replay_state=())  # type: ignore[arg-type]
        shardings = jax.tree.map(lambda x: x.sharding, like), self._layout.sharding()
        function = functools.partial(evolution.evolve, self._pbt, self._limits)
        return jax.jit(function, donate_argnums=0, out_shardings=shardings)

    def _culprit(self, episodes: EpisodeStats, state: RunState) -> str:
        """Names the numbers of the environment that are not finite, in words; "" for none.

        Args:
          episodes: sums until training diverged; a reward that is not finite spoils them before its episode ends.
          state: after it did, and perhaps after some steps of a policy that is not finite either.
        """
        rewards = "" if np.all(np.isfinite(episodes.return_sum)) else "the environment's rewards are not finite"
        if isinstance(self._spec.action_space, spaces.Box):
            # By now the actions are not finite either, and so the observations, and perhaps the rewards.
            return random_play.not_finite(self._environment) or rewards
        lanes, lane = jax.device_get(topology.here((state.actors.lanes, state.actors.lane)))
        for part, leaf in (("reward", lanes.episode_return), *(("observation", x) for x in _floats(lanes.timestep))):
            bad = ~np.isfinite(leaf).reshape(*lane.shape, -1).all(axis=-1)
            if bad.any():
                return f"the environment's {part} is not finite in lane {lane[bad][0]}"
        return rewards


def _floats(row: TimeStep) -> list[np.ndarray]:
    return [x for x in jax.tree.leaves(row.observation) if x.dtype.kind == "f"]


def _too_small(platform: str, rows: int, num_envs: int) -> str:
    """Returns a hint if an accelerator would spend its time launching kernels, and has fewer lanes than it could; else
    ""."""
    if platform == "cpu" or rows >= BUSY_ROWS or num_envs >= MOST_LANES:
        return ""
    advice = f"num_envs of 2,048 to {MOST_LANES:,} cost little more"
    return f"; {rows:,} rows an update leave it idle most of the time: {advice}"


def _idle_cores(platform: str, num_envs: int, population: int, num_shards: int) -> str:
    """Returns a hint if a single CPU device leaves cores idle that more devices would use; else ""."""
    cores = machine.num_cores()
    if platform != "cpu":
        return ""

    def divides(devices: int) -> bool:
        # As `topology.make` has it: one shard is one for each device of a member.
        of_member = devices // math.gcd(population, devices)
        return (num_envs if num_shards == 1 else num_shards) % of_member == 0

    most = min(cores, num_envs * population // BUSY_LANES)
    better = max(filter(divides, range(2, most + 1)), default=0)
    if not better:
        return ""
    return f"; one CPU device keeps about one of {cores} cores busy: JAX_NUM_CPU_DEVICES={better} makes {better}"
