"""The actors of a process: their environments, their first states, and those that take their places."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environments.seeds import first_seed
from podracer.run.config import RunConfig
from podracer.run.driver import run_keys
from podracer.sebulba import actor_program, ready_lanes
from podracer.sebulba.actor import Actor, ActorContext, ActorSnapshot
from podracer.topology import HostTopology
from podracer.types import HostEnvironment, HostEnvironments

REPLACEMENTS = 2**20
"""The number from which the streams of random numbers count of actors that take the places of others. Those with which
a run begins or goes on have the number of rollouts before it, which is less in nearly all runs."""


class ActorFactory:
    """Makes the actors of a process.

    Args:
      environments: where each actor's environments come from.
      layout: actors and learners.
      run: settings of the run.
      start: makes the first carry of lanes; jitted.
      at_once: rows that environments return at a time, or None where they return those of all lanes.
    """

    def __init__(
        self,
        environments: HostEnvironments,
        layout: HostTopology,
        run: RunConfig,
        start: actor_program.StartFn,
        at_once: int | None,
    ):
        self._environments, self._layout, self._run = environments, layout, run
        self._start, self._at_once = start, at_once

    def first_snapshots(self) -> list[ActorSnapshot]:
        """The states in which the actors of a fresh run begin; [] where they cannot be saved, or need not be."""
        if self._run.mode == "async" or not getattr(self._environments, "saved", False):
            return []
        snapshots = []
        for index, device in self._places:
            environment: Any = self._make_environment(index, 0)
            try:
                snapshots.append(ActorSnapshot(environment.save(), self._carry(index, device, 0)))
            finally:
                environment.close()
        return snapshots

    def make(self, saved: Sequence[ActorSnapshot], rollouts_done: int, context: ActorContext) -> list[Actor]:
        """The actors of this process, not started.

        Args:
          saved: where they begin, or () for new environments.
          rollouts_done: rollouts that every replica handed over before.
          context: what they share.
        """
        actors = []
        for place, (index, device) in enumerate(self._places):
            make = functools.partial(self._make_environment, index, rollouts_done)
            if saved:
                make = functools.partial(_load, functools.partial(self._make_environment, index, 0), saved[place])
            carry = saved[place].carry if saved else self._carry(index, device, rollouts_done)
            # A copy of the carry, for acting donates it and a checkpoint may still need what was saved.
            lanes, carry = jax.device_put((self._lanes(index), jax.tree.map(jnp.copy, carry)), device)
            number = rollouts_done + (index - rollouts_done) % context.num_actors
            actors.append(self._actor(index, place, device, make, lanes, carry, number, context))
        return actors

    def replacing(self, rollouts_done: int, context: ActorContext) -> Callable[[Actor], Actor]:
        """The function that makes an actor in place of one that hangs."""
        started = itertools.count(rollouts_done + 1)

        def replace(actor: Actor) -> Actor:
            # Another stream of random numbers, and of environments, than any before.
            stream = next(started) + REPLACEMENTS
            make = functools.partial(self._make_environment, actor.index, stream)
            lanes, carry = jax.device_put(
                (self._lanes(actor.index), self._carry(actor.index, actor.device, stream)), actor.device
            )
            return self._actor(actor.index, actor.place, actor.device, make, lanes, carry, actor.number, context)

        return replace

    @property
    def _places(self) -> list[tuple[int, Any]]:
        """The actors of this process: their numbers among all, and their devices."""
        return list(enumerate(self._layout.actors, self._layout.first_actor))

    def _lanes(self, index: int) -> np.ndarray:
        B = self._layout.envs_per_actor
        return np.arange(index * B, (index + 1) * B, dtype=np.int32)

    def _make_environment(self, index: int, rollouts_done: int) -> HostEnvironment:
        B = self._layout.envs_per_actor
        return self._environments.make(B, first_seed(self._run.seed, "training", rollouts_done) + index * B)

    def _carry(self, index: int, device: Any, rollouts_done: int) -> actor_program.ActorCarry:
        key = jax.random.fold_in(jax.random.fold_in(run_keys(self._run.seed)[1], index), rollouts_done)
        return self._start(*jax.device_put((self._lanes(index), key), device))

    def _actor(self, *args: Any) -> Actor:
        return ready_lanes.PartialActor(*args, at_once=self._at_once) if self._at_once else Actor(*args)


def _load(make: Callable[[], HostEnvironment], resume: ActorSnapshot) -> HostEnvironment:
    environment = make()
    try:
        environment.load(resume.environment)  # type: ignore[attr-defined]
    except BaseException:
        environment.close()
        raise
    return environment
