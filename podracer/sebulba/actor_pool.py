"""The actors of a run together: started, watched, replaced and stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from podracer.errors import ActorError, failed
from podracer.sebulba.actor import Actor, ActorContext, Rollout
from podracer.system import console
from podracer.system.stopping import soon

POLL_SECONDS = 0.2
"""Seconds between looks at signals and actors while a learner waits for a rollout."""

JOIN_SECONDS = 5.0
"""Seconds in which actors must end their current step after a run."""

JOIN_SECONDS_AFTER_AN_ERROR = 0.5
"""The same after a failure: one of them may hang, and the other processes of a pod are to learn of it."""


class ActorPool:
    """The actors of a run: started together, watched, and stopped together.

    Args:
      actors: not started yet.
      context: what they share.
      environment: its name, for messages.
      timeout: seconds that an environment may take to answer.
      restarts: how often an actor whose environment does not answer is replaced before the run ends.
      replace: `(actor) -> Actor`; one that goes on in its place, with new environments.
    """

    def __init__(
        self,
        actors: list[Actor],
        context: ActorContext,
        environment: str,
        timeout: float,
        restarts: int,
        replace: Callable[[Actor], Actor],
    ):
        self.actors, self.context, self.restarts = actors, context, restarts
        self._environment, self._timeout, self._replace = environment, timeout, replace
        self._back = 0.0

    def __enter__(self) -> ActorPool:
        for actor in self.actors:
            actor.start()
        return self

    def __exit__(self, kind: Any = None, *exception: Any) -> None:
        for actor in self.actors:
            actor.stop()
        self.context.channel.close()
        self.context.store.close()
        deadline = time.monotonic() + (JOIN_SECONDS if kind is None else JOIN_SECONDS_AFTER_AN_ERROR)
        for actor in self.actors:
            actor.join(max(0.0, deadline - time.monotonic()))

    def next_rollouts(self, number: int, should_stop: Callable[[], bool]) -> list[Rollout] | None:
        """The next rollout of every replica of this process, or None where the run should stop.

        It is rollout `number`, of the same thread in all replicas; of one that is alone and "async", the oldest.

        Raises:
          ActorError: where an actor failed, or its environment does not answer.
        """
        context, rollouts = self.context, []
        while not stops(should_stop, self.check):
            source = len(rollouts) * context.num_actors + number % context.num_actors if context.ordered else None
            rollout = context.channel.get(POLL_SECONDS, source)
            if rollout is not None:
                rollouts.append(rollout)
            if len(rollouts) * context.num_actors == len(self.actors):
                return rollouts
        return None

    def back(self) -> None:
        """Says that the learner has evaluated and saved: meanwhile actors may have waited for an evaluation's lanes."""
        self._back = time.perf_counter()

    def check(self) -> None:
        """Replaces an actor that hangs, if there are restarts left.

        Raises:
          ActorError: where an actor failed, ended, or hangs.
        """
        self._check_errors()  # first of all, for one that fails ends the others
        now = time.perf_counter()
        for i, actor in enumerate(self.actors):
            since = actor.waiting_since and max(actor.waiting_since, self._back)
            if not actor.is_alive():
                self._check_errors()  # of an actor that has failed since
                raise ActorError(f"{actor.name} ended without a word.")
            if since is not None and now - since > self._timeout:
                problem = f"{actor.name}: {self._environment} has not answered for {now - since:.0f} s"
                if not self.restarts:
                    raise ActorError(
                        f"{problem}; if that is how long it takes, raise env_timeout={self._timeout:g}; if it happens "
                        "now and then, let env_restarts replace the environments."
                    )
                actor.stop()
                self.restarts -= 1
                console.say(f"{problem}; starting new ones ({self.restarts} restart(s) left).")
                self.actors[i] = self._replace(actor)
                self.actors[i].start()

    def _check_errors(self) -> None:
        for actor in self.actors:
            if actor.error is not None:
                raise failed(actor.name, self._environment, actor.error) from actor.error


def stops(should_stop: Callable[[], bool], check: Callable[[], None]) -> bool:
    """Says whether a run should stop; the error of an actor that a signal to all processes brings is such a request.

    Raises:
      ActorError: another one, from `check`.
    """
    if should_stop():
        return True
    try:
        check()
    except ActorError:
        if not soon(should_stop):
            raise
        return True
    return False
